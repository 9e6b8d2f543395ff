"""Figures of the reward model on held-out comparisons: accuracy, calibration, and the weights of its score.

Accuracy is given with its bounds: the labelers' own agreement above, the length of responses below. In the gold world the
noiseless mean of the labelers is known too, and so are the parts of the true score.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlhf.config import Config
from rlhf.data.agreement import pairwise_agreement, ratio
from rlhf.data.items import Encode, Item, Judgement, join_rankings, names_of
from rlhf.data.records import Demonstration, Ranking
from rlhf.errors import UserError
from rlhf.evaluation.scoring import (
    Scores,
    accuracy,
    count_right,
    held_out_labelers,
    item_encoder,
    length_scores,
    score_each,
    share,
)
from rlhf.evaluation.statistics import Figures, per_key, ratio_interval, show
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
        results["held_out_labelers"]["accuracy_all_prompts"] = accuracy(*everywhere) if everywhere[0] else None
    truth = make_truth(config)
    if truth is not None:
        known = {record.labeler for record in records} - strangers
        results |= compare_with_truth(config, truth, *of_labelers(*held_out, known))
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
    joined, scores = held_out
    items, own_scores = of_labelers(joined, scores, {record.labeler for record in records} - strangers)
    if not items:
        return None
    length, longer = length_scores(items)
    agreement = agreements(records, strangers)
    results: Figures = {
        "accuracy": accuracy(items, own_scores),
        "length_baseline": accuracy(items, length)["value"],
        "length_prefers": "longer" if longer else "shorter",
        "above_length": difference(items, own_scores, length),
        "labeler_agreement": agreement["training"]["value"],
        "agreement": agreement,
        "by_labeler": by_labeler(joined, scores, strangers),
        "by_rank_gap": by_rank_gap(items, own_scores),
        "calibration": calibration_curve(items, own_scores, gain),
    }
    results["calibration_error"] = calibration_error(results["calibration"])
    if strangers:
        theirs, their_scores = of_labelers(joined, scores, strangers)
        results["held_out_labelers"] = {
            "labelers": sorted(name for name in strangers if name is not None),
            "accuracy": accuracy(theirs, their_scores) if theirs else None,
            "calibration": calibration_curve(theirs, their_scores, gain),
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


def of_labelers(items: list[Item], scores: Scores, labelers: set[str | None]) -> tuple[list[Item], Scores]:
    """The items that these labelers judged, with their judgements only, and the scores of these items."""
    judged = [(item.of_labelers(labelers), s) for item, s in zip(items, scores, strict=True)]
    judged = [(item, s) for item, s in judged if item.judgements]
    return [item for item, _ in judged], [s for _, s in judged]


def difference(items: list[Item], scores: Scores, baseline: Scores) -> Figures:
    """The accuracy minus another one's on the same pairs."""
    (ours, count), (theirs, _) = count_right(items, scores), count_right(items, baseline)
    return ratio_interval([a - b for a, b in zip(ours, theirs, strict=True)], count)


def agreements(records: Sequence[Ranking], strangers: set[str | None]) -> dict[str, Figures]:
    """How often labelers agree on pairs that two of them judged: among the training labelers, among the held-out ones, and
    between the two ({"value", "ci95", "n": items, "pairs"}; value None if none was judged twice)."""
    groups = {
        "training": pairwise_agreement(r for r in records if r.labeler not in strangers),
        "held_out": pairwise_agreement(r for r in records if r.labeler in strangers),
        "between": agreement_between(records, strangers),
    }
    return {name: rounded(figures) for name, figures in groups.items()}


def agreement_between(records: Sequence[Ranking], strangers: set[str | None]) -> Figures:
    """As `pairwise_agreement`, of each training labeler with each held-out one."""
    items: dict[Any, tuple[list[set[tuple[str, str]]], list[set[tuple[str, str]]]]] = {}
    for record in records:
        texts = [response.text for response in record.responses]
        ordered = {(texts[better], texts[worse]) for better, worse in record.pair_list()}
        prompt = tuple((message.role, message.content) for message in record.prompt)
        training, held_out = items.setdefault((prompt, frozenset(texts)), ([], []))
        (held_out if record.labeler in strangers else training).append(ordered)
    agreed, compared = [], []
    for training, held_out in items.values():
        same = sum(len(ours & theirs) for ours in training for theirs in held_out)
        opposed = sum((j, i) in theirs for ours in training for theirs in held_out for i, j in ours)
        if same + opposed:
            agreed.append(same)
            compared.append(same + opposed)
    return ratio(np.array(agreed), np.array(compared))


def rounded(figures: Figures) -> Figures:
    def shorten(value: Any) -> Any:
        return [round(v, 4) for v in value] if isinstance(value, list) else round(value, 4)

    return {name: None if value is None else shorten(value) for name, value in figures.items()}


def by_labeler(items: list[Item], scores: Scores, strangers: set[str | None]) -> dict[str, Figures]:
    """{name: accuracy on this labeler's judgements, and whether they were held out}."""
    names = sorted({j.labeler for item in items for j in item.judgements if j.labeler is not None})
    return {name: accuracy(*of_labelers(items, scores, {name})) | {"held_out": name in strangers} for name in names}


def by_rank_gap(items: list[Item], scores: Scores) -> list[Figures]:
    """Accuracy on pairs that their labeler put 1, 2, … ranks apart; judgements without ranks are left out."""
    gaps = sorted({gap for item in items for j in item.judgements for gap in j.gaps or []})
    rows = []
    for gap in gaps:
        judged = []
        for item, s in zip(items, scores, strict=True):
            pairs = [pair for j in item.judgements for pair, g in zip(j.pairs, j.gaps or [], strict=False) if g == gap]
            if pairs:
                judged.append((replace(item, judgements=[Judgement(None, pairs, None)]), s))
        rows.append({"gap": gap} | accuracy([item for item, _ in judged], [s for _, s in judged]))
    return rows


def calibration_curve(items: list[Item], scores: Scores, gain: float) -> list[Figures]:
    """P(win | score gap): predicted sigmoid(raw gap), and how often the labelers preferred the higher score."""
    bins: list[list[tuple[int, float, float]]] = [[] for _ in range(len(CALIBRATION_BINS) + 1)]  # (item, gap, won)
    for n, (item, s) in enumerate(zip(items, scores, strict=True)):
        for better, worse in item.pairs():
            gap = s[better] - s[worse]
            place = sum(abs(gap) > edge for edge in CALIBRATION_BINS)
            bins[place].append((n, abs(gap), 1.0 if gap > 0 else 0.5 if gap == 0 else 0.0))
    curve = []
    for rows in filter(None, bins):
        gaps = torch.tensor([gap for _, gap, _ in rows])
        observed = share(*per_key([n for n, _, _ in rows], [won for _, _, won in rows]))
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


def calibration_error(curve: list[Figures]) -> float:
    """Mean over pairs of |predicted - observed| of their bin."""
    return round(
        sum(row["n"] * abs(row["predicted"] - row["observed"]) for row in curve) / sum(row["n"] for row in curve), 4
    )


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
    drawn = [score for row in samples for score in row]
    lowest, highest = min(*written, *drawn), max(*written, *drawn)
    first = max(-HISTOGRAM_END, math.floor(lowest / HISTOGRAM_STEP) * HISTOGRAM_STEP)
    last = max(first + HISTOGRAM_STEP, min(HISTOGRAM_END, math.ceil(highest / HISTOGRAM_STEP) * HISTOGRAM_STEP))
    edges = np.arange(first, last + HISTOGRAM_STEP / 2, HISTOGRAM_STEP)

    def summary(scores: list[float]) -> Figures:
        inside = np.clip(scores, edges[0], edges[-1])
        counts = np.histogram(inside, edges)[0].tolist()
        return {
            "counts": counts,
            "mean": round(float(np.mean(scores)), 4),
            "std": round(float(np.std(scores)), 4),
            "n": len(scores),
        }

    return {
        "edges": [round(float(edge), 4) for edge in edges],
        "sft_samples": summary(drawn),
        "demonstrations": summary(written) | {"split": demonstrations[1]},
    }


# --- as text -------------------------------------------------------------------------------------------------------


def describe(results: Figures) -> list[str]:
    agreement = results["agreement"]
    agree = agreement["training"]
    labelers = "held-out prompts"  # nobody labelled what another one did
    if agree["value"] is not None:
        labelers = f"training labelers, who agree among themselves on {show(agree)}"
    accuracy, length = show(results["accuracy"]), results["length_baseline"]
    lines = [f"reward model accuracy {accuracy} on {labelers}; length alone {length:.3f}"]
    if "held_out_labelers" in results:
        lines.append(
            f"on held-out labelers {show(results['held_out_labelers']['accuracy'])}, who agree on "
            f"{show(agreement['held_out'])}, and with training labelers on {show(agreement['between'])}"
        )
    if "gold_regression" in results:
        parts = results["gold_regression"]["parts"].items()
        lines.append(
            "it rewards (in brackets: what labelers reward) "
            + ", ".join(
                f"{name} {row['weight']:.2f} ({row['true']:.2f})" for name, row in parts if row["weight"] is not None
            )
        )
    return lines


def judged_parts(truth: Truth, item: Item) -> list[dict[str, float]]:
    """The judge's parts of an item's answers."""
    assert item.record is not None
    return [truth.judge(item.record, text, ended) for text, ended in item.answers]


def compare_with_truth(config: Config, truth: Truth, items: list[Item], scores: Scores) -> Figures:
    """The ceiling (the labelers' noiseless mean utility on the same pairs) and the accuracy on the judge's own order."""
    points = []
    for item, s in zip(items, scores, strict=True):
        answers = zip((parts["total"] for parts in judged_parts(truth, item)), s, strict=True)
        for (total, one), (lower, other) in itertools.permutations(answers, 2):
            if total > lower + 1e-9:
                points.append(1.0 if one > other else 0.5 if one == other else 0.0)
    utilities = [labelers_mean(truth, config.gold.labeler_noise, item.record, item.answers) for item in items]
    return {
        "noise_ceiling": accuracy(items, utilities)["value"],
        "gold_order_accuracy": round(sum(points) / len(points), 4) if points else None,
    }


def gold_regression(config: Config, truth: Truth, items: list[Item], scores: Scores) -> Figures:
    """What the reward model rewards: least squares of the score on the judge's parts, over held-out responses.

    weight: of the score on a part, both in standard deviations; true: the same for the labelers' noiseless mean utility,
    which a perfect reward model would have learned; labelers: the mean of their weights for the part, in utility per
    unit; coefficient: the score's, in calibrated score per unit. A part that never varies has no weight.
    """
    parts = [judged_parts(truth, item) for item in items]
    x = np.array([[p[name] for name in truth.parts] for judged in parts for p in judged])
    prompts = np.repeat(np.arange(len(items)), [len(judged) for judged in parts])
    y = np.array([score for row in scores for score in row])
    noise = config.gold.labeler_noise
    wanted = np.array([u for item in items for u in labelers_mean(truth, noise, item.record, item.answers)])
    learned, true = standardised_regression(x, y, prompts), standardised_regression(x, wanted, prompts)
    labelers = truth.labelers(noise)
    spread = x.std(0)
    rows: dict[str, Figures] = {}
    for k, name in enumerate(truth.parts):
        if math.isnan(learned["weights"][k]):
            rows[name] = {"weight": None, "ci95": None, "true": None, "coefficient": None}
        else:
            low, high = (learned["weights"][k] + sign * 1.96 * learned["errors"][k] for sign in (-1, 1))
            rows[name] = {
                "weight": round(float(learned["weights"][k]), 4),
                "ci95": [round(float(low), 4), round(float(high), 4)],
                "true": round(float(true["weights"][k]), 4),
                "coefficient": round(float(learned["weights"][k] * y.std() / spread[k]), 4),
            }
        rows[name]["labelers"] = round(sum(one.weights[name] for one in labelers) / len(labelers), 4)
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
    z = (x[:, varies] - x[:, varies].mean(0)) / x[:, varies].std(0)
    robust = {"groups": clusters, "use_correction": False}
    fit = sm.OLS((y - y.mean()) / y.std(), z).fit(cov_type="cluster", cov_kwds=robust)
    groups = len(np.unique(clusters))
    weights[varies], errors[varies] = fit.params, fit.bse * math.sqrt(groups / max(1, groups - 1))
    return {"weights": weights, "errors": errors, "r2": fit.rsquared}
