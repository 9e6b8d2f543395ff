"""Figures of a reward model: on the run's held-out comparisons, and on preference files of any origin
(`evaluate.pairs`).

Accuracy is given with its bounds: the labelers' own agreement above, the length of responses below.
"""

import itertools
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch

from rlhf.config import Config
from rlhf.data.agreement import pairwise_agreement
from rlhf.data.encoding import Item, join_rankings, names_of
from rlhf.data.reading import load_comparisons
from rlhf.data.records import Ranking
from rlhf.data.splits import prompt_key
from rlhf.errors import UserError
from rlhf.evaluation import scoring
from rlhf.evaluation.scoring import JudgedPair, Scores, accuracy, judged_pairs, pairs_by_length
from rlhf.evaluation.statistics import Figures, flatten, mean_by, show, win
from rlhf.gold.truth import Judged, Truth, make_truth
from rlhf.gold.truth import utilities as labelers_mean
from rlhf.runs.folders import read_stage, stage_folder
from rlhf.runs.sources import in_split, read_comparisons
from rlhf.system.terminal import say

CALIBRATION_BINS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)  # upper edges of the score gap
SUBSETS = ("subset", "domain", "category", "section")  # keys that name a row's subset; the first one counts


def evaluate_reward_model(config: Config, model: Any, tokenizer: Any) -> Figures:
    """Every figure of the reward model on comparisons, as in results.json under reward_model.

    accuracy: on prompts of the test split, for the labelers who also judged for training; held_out_labelers: for the
    others, on the same prompts. Raises: UserError if there are no test comparisons, or it was trained with other
    held-out labelers.
    """
    records, folder, held = read_comparisons(config), stage_folder(config, "reward"), config.data.held_out_labelers
    trained = ((read_stage(folder) or {}).get("settings") or {}).get("data.held_out_labelers")
    if sorted(names_of(trained)) != sorted(names_of(held)):
        other = f"the reward model in {folder} was trained with {trained}"
        raise UserError(f"data.held_out_labelers={held}: {other}: give the same")
    judged = {record.labeler for record in records}
    strangers = judged & scoring.held_out_labelers(config, records)
    items, _ = join_rankings(in_split(config, records, "test"), scoring.item_encoder(config, model, tokenizer))
    held_out = items, scoring.score_each(model, [item.rows for item in items])
    results = comparison_figures(records, strangers, held_out, model.gain)
    if results is None:
        raise UserError("evaluate: no comparison is in the test split: raise data.test, or add comparisons")
    if (truth := make_truth(config)) is not None:
        results |= compare_with_truth(config, truth, *held_out, judged - strangers)
    return results


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
    by_length, longer = pairs_by_length([item.of_labelers({pair.labeler for pair in pairs}) for item in held_out[0]])
    above = [a.won - b.won for a, b in zip(pairs, by_length, strict=True)]
    gaps = sorted({pair.rank_gap for pair in pairs if pair.rank_gap is not None})
    curve = calibration_curve(pairs, gain)
    errors = [abs(row["predicted"] - row["observed"]) for row in curve]
    agreement = {
        "training": pairwise_agreement(r for r in records if r.labeler not in strangers),
        "held_out": pairwise_agreement(r for r in records if r.labeler in strangers),
    }
    results: Figures = {
        "accuracy": accuracy(pairs),
        "length_baseline": accuracy(by_length)["value"],
        "length_prefers": "longer" if longer else "shorter",
        "above_length": mean_by([pair.item for pair in pairs], above),
        "labeler_agreement": agreement["training"]["value"],
        "agreement": agreement,
        "by_labeler": {
            name: accuracy([pair for pair in everyone if pair.labeler == name]) | {"held_out": name in strangers}
            for name in sorted({pair.labeler for pair in everyone if pair.labeler is not None})
        },
        # 1, 2, … ranks apart; judgements without ranks are left out
        "by_rank_gap": [{"gap": gap} | accuracy([pair for pair in pairs if pair.rank_gap == gap]) for gap in gaps],
        "calibration": curve,
        "calibration_error": round(float(np.average(errors, weights=[row["n"] for row in curve])), 4),
    }
    if strangers:
        results["held_out_labelers"] = {
            "labelers": sorted(name for name in strangers if name is not None),
            "accuracy": accuracy(theirs) if theirs else None,
        }
    return results


def calibration_curve(pairs: Sequence[JudgedPair], gain: float) -> list[Figures]:
    """P(win | score gap): predicted sigmoid(raw gap), and how often the labelers preferred the higher score."""
    curve, places = [], np.searchsorted(CALIBRATION_BINS, [abs(pair.margin) for pair in pairs]).tolist()
    for place in sorted(set(places)):
        rows = [pair for pair, its_place in zip(pairs, places, strict=True) if its_place == place]
        gaps, observed = np.array([abs(pair.margin) for pair in rows]), accuracy(rows)
        predicted = (1 / (1 + np.exp(-gaps / gain))).mean()
        figures = {"gap": round(float(gaps.mean()), 4), "predicted": round(float(predicted), 4)}
        curve.append(figures | {"observed": observed["value"], "ci95": observed["ci95"], "n": len(rows)})
    return curve


def describe_reward_model(results: Figures) -> list[str]:
    agreement = results["agreement"]
    bounds = f"length alone {results['length_baseline']:.3f}, labelers' agreement {show(agreement['training'])}"
    lines = [f"reward model accuracy {show(results['accuracy'])}; {bounds}"]
    if "held_out_labelers" in results:
        theirs = show(results["held_out_labelers"]["accuracy"])
        lines.append(f"on held-out labelers {theirs}; their agreement {show(agreement['held_out'])}")
    return lines


def compare_with_truth(
    config: Config, truth: Truth, items: list[Item], scores: Scores, known: set[str | None]
) -> Figures:
    """The ceiling (the labelers' noiseless mean utility on the same pairs), the accuracy on the judge's own order, and,
    if the true score has parts, `gold_regression`. known: the labelers who also judged for training.
    """
    judged = [[truth.judge(i.record, text, ended) for text, ended in i.answers] for i in items]
    both = [list(zip((one["total"] for one in j), s, strict=True)) for j, s in zip(judged, scores, strict=True)]
    seen = [rows for item, rows in zip(items, both, strict=True) if item.of_labelers(known).judgements]
    couples = itertools.chain.from_iterable(itertools.permutations(rows, 2) for rows in seen)
    points = [win(one, other) for (total, one), (lower, other) in couples if total > lower + 1e-9]
    utilities = [labelers_mean(truth, config.gold.labeler_noise, i.record, i.answers) for i in items]
    ceiling = accuracy([pair for pair in judged_pairs(items, utilities) if pair.labeler in known])["value"]
    results = {"noise_ceiling": ceiling, "gold_order_accuracy": round(fmean(points), 4) if points else None}
    parts = {"gold_regression": {"parts": gold_regression(truth.parts, judged, scores)}} if truth.parts else {}
    return results | parts


def gold_regression(names: Sequence[str], judged: Sequence[list[Judged]], scores: Scores) -> Figures:
    """What the scores reward: {part of the judge's score: {"weight"}}, by least squares over held-out responses, all in
    standard deviations, with an intercept; None for a part that never varies.
    """
    x, y = np.array([[parts[name] for name in names] for parts in flatten(judged)]), np.array(flatten(scores))
    varies, weights = x.std(0) > 1e-9, np.full(len(names), np.nan)
    if varies.any() and y.std() > 1e-9:
        z = (x[:, varies] - x[:, varies].mean(0)) / x[:, varies].std(0)
        weights[varies] = np.linalg.lstsq(z, (y - y.mean()) / y.std(), rcond=None)[0]
    rounded = [None if np.isnan(weight) else round(float(weight), 4) for weight in weights]
    return {name: {"weight": weight} for name, weight in zip(names, rounded, strict=True)}


def evaluate_pairs(config: Config, device: torch.device) -> Figures:
    """{"model", "left_out", "overall", "subsets"} of the reward model `evaluate.pairs_model`.

    Each row of a file is scored on its own: several chosen and rejected answers (RewardBench 2, RM-Bench) count as all
    their pairs.
    Raises: UserError if there is no such model, or no pair in the files.
    """
    folder, model, encode = scoring.load_judge(config, config.evaluate.pairs_model, "evaluate.pairs_model", device)
    records, files = load_comparisons(config.evaluate.pairs, config.data.format, config.data.allow_partial)
    for line in files:
        say(f"evaluate: {line}")
    items = [item for record in records for item in join_rankings([record], encode)[0]]
    if not items:
        none = "no pair of different answers whose prompt fits the model"
        raise UserError(f"evaluate.pairs={config.evaluate.pairs}: {none}: give other files")
    scores = scoring.score_each(model, [item.rows for item in items])
    return {"model": str(folder), "left_out": len(records) - len(items)} | pair_figures(items, scores)


def pair_figures(items: Sequence[Item], scores: Scores) -> Figures:
    """The figures of scored rows, over all and by subset."""
    by_subset: dict[str, list[tuple[Item, list[float]]]] = {}
    for item, s in zip(items, scores, strict=True):
        named = (str(item.record.metadata[key]) for key in SUBSETS if item.record.metadata.get(key) not in (None, ""))
        by_subset.setdefault(next(named, "all"), []).append((item, s))
    subsets = {name: row_figures(*zip(*rows, strict=True)) for name, rows in sorted(by_subset.items())}
    return {"overall": row_figures(items, scores), "subsets": subsets}


def row_figures(items: Sequence[Item], scores: Sequence[list[float]]) -> Figures:
    """pairs: the share of pairs in the right order, equal scores half; all_right: the share of rows whose pairs all
    are; length: the share of pairs that length alone orders correctly. The unit of the intervals is a prompt."""
    keys, pairs = [prompt_key(item.record.prompt) for item in items], judged_pairs(items, scores)
    by_length, _ = pairs_by_length(items)
    wrong = {pair.item for pair in pairs if pair.won < 1}
    return {
        "pairs": mean_by([keys[pair.item] for pair in pairs], [pair.won for pair in pairs], share=True),
        "all_right": mean_by(keys, [float(row not in wrong) for row in range(len(items))], share=True),
        "length": mean_by([keys[pair.item] for pair in by_length], [pair.won for pair in by_length], share=True),
    }
