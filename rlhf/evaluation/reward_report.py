"""Figures of the reward model on held-out comparisons: accuracy, calibration, and the weights of its score.

Accuracy is given with its bounds: the labelers' own agreement above, the length of responses below. In the gold world the
noiseless mean of the labelers is known too, and so are the parts of the true score.
"""

import itertools
import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch

from rlhf.config import Config
from rlhf.data.agreement import pairwise_agreement, ratio
from rlhf.data.items import Encode, Item, join_rankings, names_of
from rlhf.data.records import Demonstration, Ranking
from rlhf.errors import UserError
from rlhf.evaluation.scoring import (
    JudgedPair,
    Scores,
    accuracy,
    held_out_labelers,
    item_encoder,
    judged_pairs,
    length_scores,
    score_each,
)
from rlhf.evaluation.statistics import Figures, flatten, per_key, ratio_interval, show
from rlhf.gold.truth import Truth, make_truth
from rlhf.gold.truth import utilities as labelers_mean
from rlhf.model.interface import score
from rlhf.runs.folders import read_stage, stage_folder
from rlhf.runs.sources import in_split, read_comparisons, read_demonstrations

CALIBRATION_BINS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)  # upper edges of the score gap
HISTOGRAM_STEP, HISTOGRAM_END = 0.25, 10.0  # in standard deviations of SFT samples; larger gaps are in the last bin


def evaluate_reward_model(config: Config, model: Any, tokenizer: Any, device: torch.device) -> Figures:
    """Every figure of the reward model on comparisons, as in results.json under reward_model.

    accuracy: on prompts of the test split, for the labelers who also judged for training; held_out_labelers: for the
    others, on the same prompts and on all prompts that they judged. `tokenizer` is the policy's.

    Raises: UserError if there are no test comparisons, or it was trained with other held-out labelers.
    """
    records = read_comparisons(config)
    strangers = check_held_out(config, records)
    encode = item_encoder(config, model, tokenizer)
    held_out = score_held_out(in_split(config, records, "test"), encode, model)
    results = comparison_figures(records, strangers, held_out, model.gain)
    if results is None:
        raise UserError("evaluate: no comparison is in the test split: raise data.test, or add comparisons")
    if strangers:
        theirs = [record for record in records if record.labeler in strangers]
        everywhere = score_held_out(theirs, encode, model)
        results["held_out_labelers"]["accuracy_all_prompts"] = (
            accuracy(judged_pairs(*everywhere)) if everywhere[0] else None
        )
    truth = make_truth(config)
    if truth is not None:
        results |= compare_with_truth(config, truth, *held_out, {record.labeler for record in records} - strangers)
        if truth.parts:
            results["gold_regression"] = gold_regression(config, truth, *held_out)
    return results


def score_held_out(records: Sequence[Ranking], encode: Encode, model: Any) -> tuple[list[Item], Scores]:
    """Every labeler's items of these rankings, with calibrated scores."""
    joined, _ = join_rankings(records, encode)
    return joined, score_each(model, joined)


def comparison_figures(
    records: Sequence[Ranking], strangers: set[str | None], held_out: tuple[list[Item], Scores], gain: float
) -> Figures | None:
    """The figures of scored held-out items; None if no labeler of the training split judged any.

    records: all rankings, for the labelers' agreement; strangers: the labelers that were held out of training.
    """
    everyone = judged_pairs(*held_out)
    pairs, theirs = ([pair for pair in everyone if (pair.labeler in strangers) == held] for held in (False, True))
    if not pairs:
        return None
    known = {pair.labeler for pair in pairs}
    items = [item.of_labelers(known) for item in held_out[0]]
    length, longer = length_scores(items)
    by_length = judged_pairs(items, length)
    agreement, curve = agreements(records, strangers), calibration_curve(pairs, gain)
    results: Figures = {
        "accuracy": accuracy(pairs),
        "length_baseline": accuracy(by_length)["value"],
        "length_prefers": "longer" if longer else "shorter",
        "above_length": difference(pairs, by_length),
        "labeler_agreement": agreement["training"]["value"],
        "agreement": agreement,
        "by_labeler": by_labeler(everyone, strangers),
        "by_rank_gap": by_rank_gap(pairs),
        "calibration": curve,
        "calibration_error": calibration_error(curve),
    }
    if strangers:
        results["held_out_labelers"] = {
            "labelers": sorted(name for name in strangers if name is not None),
            "accuracy": accuracy(theirs) if theirs else None,
            "calibration": calibration_curve(theirs, gain),
        }
    return results


def check_held_out(config: Config, records: Sequence[Ranking]) -> set[str | None]:
    """The labelers that were held out of training. Raises: UserError if others were held out when the reward model was trained."""
    folder = stage_folder(config, "reward")
    trained = ((read_stage(folder) or {}).get("settings") or {}).get("data.held_out_labelers")
    if sorted(names_of(trained)) != sorted(names_of(config.data.held_out_labelers)):
        raise UserError(
            f"data.held_out_labelers={config.data.held_out_labelers}: the reward model in {folder} was trained "
            f"with {trained}: give the same, or train it again"
        )
    return {name for name in held_out_labelers(config, records) if any(r.labeler == name for r in records)}


def difference(ours: Sequence[JudgedPair], theirs: Sequence[JudgedPair]) -> Figures:
    """The accuracy of some scores minus that of others, of the same pairs."""
    gains = [a.won - b.won for a, b in zip(ours, theirs, strict=True)]
    return ratio_interval(*per_key([pair.item for pair in ours], gains))


def agreements(records: Sequence[Ranking], strangers: set[str | None]) -> dict[str, Figures]:
    """How often labelers agree on pairs that two of them judged: among the training labelers, among the held-out ones, and
    between the two ({"value", "ci95", "n": items, "pairs"}; value None if none was judged twice)."""
    groups = {
        "training": pairwise_agreement(r for r in records if r.labeler not in strangers),
        "held_out": pairwise_agreement(r for r in records if r.labeler in strangers),
        "between": agreement_between(records, strangers),
    }
    return {
        name: {key: np.round(value, 4).tolist() if value is not None else None for key, value in figures.items()}
        for name, figures in groups.items()
    }


def agreement_between(records: Sequence[Ranking], strangers: set[str | None]) -> Figures:
    """As `pairwise_agreement`, of each training labeler with each held-out one."""
    items: dict[Any, tuple[list[set[tuple[str, str]]], list[set[tuple[str, str]]]]] = {}
    for record in records:
        texts = [response.text for response in record.responses]
        ordered = {(texts[better], texts[worse]) for better, worse in record.pair_list()}
        prompt = tuple((message.role, message.content) for message in record.prompt)
        training, held_out = items.setdefault((prompt, frozenset(texts)), ([], []))
        (held_out if record.labeler in strangers else training).append(ordered)
    counts = []
    for training, held_out in items.values():
        both = list(itertools.product(training, held_out))
        same = sum(len(ours & theirs) for ours, theirs in both)
        opposed = sum((j, i) in theirs for ours, theirs in both for i, j in ours)
        counts += [(same, same + opposed)] if same + opposed else []
    return ratio(*np.array(counts, dtype=float).reshape(-1, 2).T)


def by_labeler(pairs: Sequence[JudgedPair], strangers: set[str | None]) -> dict[str, Figures]:
    """{name: accuracy on this labeler's judgements, and whether they were held out}."""
    names = sorted({pair.labeler for pair in pairs if pair.labeler is not None})
    return {
        name: accuracy([pair for pair in pairs if pair.labeler == name]) | {"held_out": name in strangers}
        for name in names
    }


def by_rank_gap(pairs: Sequence[JudgedPair]) -> list[Figures]:
    """Accuracy on pairs that their labeler put 1, 2, … ranks apart; judgements without ranks are left out."""
    gaps = sorted({pair.rank_gap for pair in pairs if pair.rank_gap is not None})
    return [{"gap": gap} | accuracy([pair for pair in pairs if pair.rank_gap == gap]) for gap in gaps]


def calibration_curve(pairs: Sequence[JudgedPair], gain: float) -> list[Figures]:
    """P(win | score gap): predicted sigmoid(raw gap), and how often the labelers preferred the higher score."""
    curve = []
    for place in range(len(CALIBRATION_BINS) + 1):
        rows = [pair for pair in pairs if sum(abs(pair.margin) > edge for edge in CALIBRATION_BINS) == place]
        if rows:
            gaps, observed = torch.tensor([abs(pair.margin) for pair in rows]), accuracy(rows)
            curve.append(
                {
                    "gap": round(gaps.mean().item(), 4),
                    "predicted": round(torch.sigmoid(gaps / gain).mean().item(), 4),
                    "observed": observed["value"],
                    "ci95": observed["ci95"],
                    "n": len(rows),
                }
            )
    return curve


def calibration_error(curve: Sequence[Figures]) -> float:
    """Mean over pairs of |predicted - observed| of their bin."""
    counts = [row["n"] for row in curve]
    return round(float(np.average([abs(row["predicted"] - row["observed"]) for row in curve], weights=counts)), 4)


def unseen_demonstrations(config: Config) -> tuple[list[Demonstration], str]:
    """The demonstrations that were not used for calibration, or all if none was held out; and which of the two."""
    records = read_demonstrations(config)
    unseen = in_split(config, records, "dev", "test")
    return (unseen, "held out") if unseen else (records, "train")


def score_distributions(
    model: Any,
    tokenizer: Any,
    demonstrations: tuple[list[Demonstration], str],
    samples: Sequence[Sequence[float]],
    device: torch.device,
) -> Figures:
    """Histograms of calibrated scores: of SFT samples (`samples`, a list per prompt), and of `unseen_demonstrations`."""
    written = score(model, model.demonstration_rows(demonstrations[0], tokenizer)).tolist()
    drawn = flatten(samples)
    lowest, highest = min(*written, *drawn), max(*written, *drawn)
    first = max(-HISTOGRAM_END, math.floor(lowest / HISTOGRAM_STEP) * HISTOGRAM_STEP)
    last = max(first + HISTOGRAM_STEP, min(HISTOGRAM_END, math.ceil(highest / HISTOGRAM_STEP) * HISTOGRAM_STEP))
    edges = np.arange(first, last + HISTOGRAM_STEP / 2, HISTOGRAM_STEP)

    def summary(scores: list[float]) -> Figures:
        counts = np.histogram(np.clip(scores, edges[0], edges[-1]), edges)[0].tolist()
        mean, std = round(float(np.mean(scores)), 4), round(float(np.std(scores)), 4)
        return {"counts": counts, "mean": mean, "std": std, "n": len(scores)}

    return {
        "edges": [round(float(edge), 4) for edge in edges],
        "sft_samples": summary(drawn),
        "demonstrations": summary(written) | {"split": demonstrations[1]},
    }


# --- as text -------------------------------------------------------------------------------------------------------


def describe(results: Figures) -> list[str]:
    agreement, labelers = results["agreement"], "held-out prompts"  # nobody labelled what another one did
    if agreement["training"]["value"] is not None:
        labelers = f"training labelers, who agree among themselves on {show(agreement['training'])}"
    length = results["length_baseline"]
    lines = [f"reward model accuracy {show(results['accuracy'])} on {labelers}; length alone {length:.3f}"]
    if "held_out_labelers" in results:
        lines.append(
            f"on held-out labelers {show(results['held_out_labelers']['accuracy'])}, who agree on "
            f"{show(agreement['held_out'])}, and with training labelers on {show(agreement['between'])}"
        )
    if "gold_regression" in results:
        parts = results["gold_regression"]["parts"].items()
        weights = [
            f"{name} {row['weight']:.2f} ({row['true']:.2f})" for name, row in parts if row["weight"] is not None
        ]
        lines.append(f"it rewards (in brackets: what labelers reward) {', '.join(weights)}")
    return lines


def judged_parts(truth: Truth, item: Item) -> list[dict[str, float]]:
    """The judge's parts of an item's answers."""
    assert item.record is not None
    return [truth.judge(item.record, text, ended) for text, ended in item.answers]


def compare_with_truth(
    config: Config, truth: Truth, items: list[Item], scores: Scores, known: set[str | None]
) -> Figures:
    """The ceiling (the labelers' noiseless mean utility on the same pairs) and the accuracy on the judge's own order.

    known: the labelers who also judged for training.
    """
    judged = [(i, s) for i, s in zip(items, scores, strict=True) if i.of_labelers(known).judgements]
    points = []
    for item, s in judged:
        answers = zip((parts["total"] for parts in judged_parts(truth, item)), s, strict=True)
        pairs = itertools.permutations(answers, 2)
        points += [
            (one > other) + 0.5 * (one == other) for (total, one), (lower, other) in pairs if total > lower + 1e-9
        ]
    utilities = [labelers_mean(truth, config.gold.labeler_noise, i.record, i.answers) for i in items if i.record]
    return {
        "noise_ceiling": accuracy([pair for pair in judged_pairs(items, utilities) if pair.labeler in known])["value"],
        "gold_order_accuracy": round(sum(points) / len(points), 4) if points else None,
    }


def gold_regression(config: Config, truth: Truth, items: list[Item], scores: Scores) -> Figures:
    """What the reward model rewards: least squares of the score on the judge's parts, over held-out responses.

    weight: of the score on a part, both in standard deviations; true: the same for the labelers' noiseless mean utility,
    which a perfect reward model would have learned; labelers: the mean of their weights for the part, in utility per
    unit; coefficient: the score's, in calibrated score per unit. A part that never varies has no weight.
    """
    noise = config.gold.labeler_noise
    judged = flatten(judged_parts(truth, item) for item in items)
    x = np.array([[parts[name] for name in truth.parts] for parts in judged])
    prompts = np.repeat(np.arange(len(items)), list(map(len, scores)))
    y = np.array(flatten(scores))
    wanted = np.array(flatten(labelers_mean(truth, noise, i.record, i.answers) for i in items if i.record))
    learned, true = standardised_regression(x, y, prompts), standardised_regression(x, wanted, prompts)
    rows: dict[str, Figures] = {}
    for name, weight, error, other, spread in zip(
        truth.parts, learned["weights"], learned["errors"], true["weights"], x.std(0), strict=True
    ):
        rows[name] = {"weight": None, "ci95": None, "true": None, "coefficient": None}
        if not math.isnan(weight):
            rows[name] = {
                "weight": round(float(weight), 4),
                "ci95": [round(float(weight + sign * 1.96 * error), 4) for sign in (-1, 1)],
                "true": round(float(other), 4),
                "coefficient": round(float(weight * y.std() / spread), 4),
            }
        rows[name]["labelers"] = round(fmean(one.weights[name] for one in truth.labelers(noise)), 4)
    weights = {name: row["weight"] for name, row in rows.items() if row["weight"] is not None}
    return {
        "parts": rows,
        "smallest": min(weights, key=lambda name: weights[name]) if weights else None,
        "r2": round(float(learned["r2"]), 4),
        "true_r2": round(float(true["r2"]), 4),
        "responses": len(y),
        "prompts": len(items),
    }


def standardised_regression(x: np.ndarray, y: np.ndarray, clusters: np.ndarray) -> dict[str, Any]:
    """Least squares of y (n,) on x (n, p), all in standard deviations, with an intercept.

    Returns {"weights": (p,), "errors": (p,) standard errors robust to correlation within clusters (n,), "r2"}; NaN for
    a column that never varies. Means and deviations are taken as given.

    Source: Liang and Zeger 1986 (the sandwich), with the factor G / (G - 1) of G clusters.
    """
    import statsmodels.api as sm

    varies = x.std(0) > 1e-9
    weights, errors = np.full(x.shape[1], np.nan), np.full(x.shape[1], np.nan)
    if not varies.any() or y.std() < 1e-9:
        return {"weights": weights, "errors": errors, "r2": 0.0}
    z, groups = (x[:, varies] - x[:, varies].mean(0)) / x[:, varies].std(0), len(np.unique(clusters))
    robust = {"groups": clusters, "use_correction": False}
    fit = sm.OLS((y - y.mean()) / y.std(), z).fit(cov_type="cluster", cov_kwds=robust)
    weights[varies], errors[varies] = fit.params, fit.bse * math.sqrt(groups / max(1, groups - 1))
    return {"weights": weights, "errors": errors, "r2": fit.rsquared}
