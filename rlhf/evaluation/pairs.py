"""Accuracy of any reward model on preference files in any import format, by subset: `evaluate.pairs`.

The run needs only a reward model; the folder of a classifier works too. Each row of a file is scored on its own: several chosen and
rejected answers (RewardBench 2, RM-Bench) count as all their pairs.
"""

import math
from collections.abc import Sequence

import torch

from rlhf.config import Config
from rlhf.data.items import Item, join_rankings
from rlhf.data.label_files import load_comparisons
from rlhf.data.records import Ranking
from rlhf.data.splits import prompt_key
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import UserError
from rlhf.evaluation.scoring import Scores, count_right, item_encoder, length_scores, score_each, share
from rlhf.evaluation.statistics import Figures, figure, per_key, show, sum_by
from rlhf.model.classifier import load_reward_model
from rlhf.model.half import hold_frozen
from rlhf.runs.folders import check_output
from rlhf.runs.sources import reward_folder, reward_model_folder
from rlhf.system.terminal import say

SUBSETS = ("subset", "domain", "category", "section")  # keys that name a row's subset; the first one counts
STYLES = 3  # of RM-Bench's chosen and rejected answers: concise, detailed, detailed with Markdown


def evaluate_pairs(config: Config, device: torch.device) -> Figures:
    """{"model", "overall", "subsets", "mean_of_subsets", …} of the reward model `evaluate.pairs_model`.

    Raises: UserError if there is no such model, or no pair in the files.
    """
    name = config.evaluate.pairs_model
    folder = reward_folder(config, name, "evaluate.pairs_model")
    if name is None:
        check_output(folder, "reward")
    model = hold_frozen(config, load_reward_model(reward_model_folder(folder), device), device)
    tokenizer = model.tokenizer if model.reads_text else load_tokenizer(reward_model_folder(folder))
    records, info = load_comparisons(config.evaluate.pairs, config.data.format, config.data.allow_partial)
    for line in info.describe():
        say(f"evaluate: {line}")
    encode = item_encoder(config, model, tokenizer)
    items = [item for record in records for item in join_rankings([record], encode)[0]]
    if not items:
        raise UserError(
            f"evaluate.pairs={config.evaluate.pairs}: no pair of different answers whose prompt fits the model: "
            "give other files"
        )
    scores = score_each(model, items)
    return {"model": str(folder), "left_out": len(records) - len(items)} | pair_figures(items, scores)


def pair_figures(items: Sequence[Item], scores: Scores) -> Figures:
    """The figures of scored rows: over all, by subset, the mean over subsets, and by style where all rows have three of each."""
    by_subset: dict[str, list[int]] = {}
    for i, item in enumerate(items):
        by_subset.setdefault(subset_of(item.record), []).append(i)
    subsets = {
        name: row_figures([items[i] for i in rows], [scores[i] for i in rows])
        for name, rows in sorted(by_subset.items())
    }
    figures: Figures = {"overall": row_figures(items, scores), "subsets": subsets}
    if len(subsets) > 1:
        figures["mean_of_subsets"] = {
            key: mean_of_shares([row[key] for row in subsets.values()]) for key in ("pairs", "all_right")
        }
    if (styles := style_figures(items, scores)) is not None:
        figures["styles"] = styles
    return figures


def subset_of(record: Ranking | None) -> str:
    """The subset that a row names, or "all"."""
    metadata = {} if record is None else record.metadata
    return next((str(metadata[key]) for key in SUBSETS if metadata.get(key) not in (None, "")), "all")


def row_figures(items: Sequence[Item], scores: Scores) -> Figures:
    """pairs: the share of pairs in the right order, equal scores half; all_right: the share of rows whose pairs all are; length: the
    share of pairs that length alone orders correctly. The unit of the intervals is a prompt."""
    listed, keys = list(items), keys_of(items)
    right, count = count_right(listed, scores)
    return {
        "pairs": by_prompt(keys, right, count),
        "all_right": share(*per_key(keys, [float(r == c) for r, c in zip(right, count, strict=True)])),
        "length": by_prompt(keys, *count_right(listed, length_scores(listed)[0])),
    }


def by_prompt(keys: Sequence[str], right: Sequence[float], count: Sequence[float]) -> Figures:
    """A share of sums per row, with a prompt as the unit of its interval."""
    return share(sum_by(keys, right), sum_by(keys, count))


def mean_of_shares(figures: Sequence[Figures]) -> Figures:
    """The plain mean of independent shares, as benchmarks average their subsets."""
    halves = [(row["ci95"][1] - row["ci95"][0]) / 2 for row in figures]
    mean = sum(row["value"] for row in figures) / len(figures)
    return figure(mean, math.hypot(*halves) / len(figures), len(figures))


def style_figures(items: Sequence[Item], scores: Scores) -> Figures | None:
    """RM-Bench's easy, normal and hard accuracy: the chosen answer has a richer style than the rejected one, the same, a poorer one.

    Source: Liu et al. 2024, section 3.3. None unless every row has three chosen and three rejected answers, all different.
    """
    order = list(range(2 * STYLES))
    if any(sorted({*item.pairs()}) != [(i, j) for i in order[:STYLES] for j in order[STYLES:]] for item in items):
        return None
    accuracies: dict[str, list[float]] = {"easy": [], "normal": [], "hard": []}
    for s in scores:
        points: dict[str, list[float]] = {level: [] for level in accuracies}
        for i in range(STYLES):
            for j in range(STYLES):
                level = "easy" if i > j else "normal" if i == j else "hard"
                points[level].append(1.0 if s[i] > s[STYLES + j] else 0.5 if s[i] == s[STYLES + j] else 0.0)
        for level, of_row in points.items():
            accuracies[level].append(sum(of_row) / len(of_row))
    keys = keys_of(items)
    return {level: share(*per_key(keys, values)) for level, values in accuracies.items()}


def keys_of(items: Sequence[Item]) -> list[str]:
    return ["" if item.record is None else prompt_key(item.record.prompt) for item in items]


def describe_pairs(results: Figures) -> list[str]:
    rows = {"all": results["overall"]} | (results["subsets"] if len(results["subsets"]) > 1 else {})
    return [
        f"pairs: {name}: accuracy {show(row['pairs'])} on {row['pairs']['n']:,} pairs, all right in {show(row['all_right'])} of "
        f"{row['all_right']['n']:,} rows; length alone {row['length']['value']:.3f}"
        for name, row in rows.items()
    ]
