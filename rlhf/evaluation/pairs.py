"""Accuracy of any reward model on preference files in any import format, by subset: `evaluate.pairs`.

The run needs only a reward model; the folder of a classifier works too. Each row of a file is scored on its own: several chosen and
rejected answers (RewardBench 2, RM-Bench) count as all their pairs.
"""

import itertools
import math
import operator
from collections.abc import Sequence
from statistics import fmean

import torch

from rlhf.config import Config
from rlhf.data.items import Item, join_rankings
from rlhf.data.label_files import load_comparisons
from rlhf.data.splits import prompt_key
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import UserError
from rlhf.evaluation.scoring import Scores, item_encoder, judged_pairs, length_scores, score_each, share
from rlhf.evaluation.statistics import Figures, figure, per_key, show
from rlhf.model.classifier import load_reward_model
from rlhf.model.linear import hold_frozen
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
    by_subset: dict[str, list[tuple[Item, list[float]]]] = {}
    for item, s in zip(items, scores, strict=True):
        metadata = {} if item.record is None else item.record.metadata
        named = (str(metadata[key]) for key in SUBSETS if metadata.get(key) not in (None, ""))
        by_subset.setdefault(next(named, "all"), []).append((item, s))
    subsets = {name: row_figures(*zip(*rows, strict=True)) for name, rows in sorted(by_subset.items())}
    figures: Figures = {"overall": row_figures(items, scores), "subsets": subsets}
    if len(subsets) > 1:  # the plain mean of independent shares, as benchmarks average their subsets
        for key in ("pairs", "all_right"):
            shares = [row[key] for row in subsets.values()]
            half = math.hypot(*((row["ci95"][1] - row["ci95"][0]) / 2 for row in shares)) / len(shares)
            mean = figure(fmean(row["value"] for row in shares), half, len(shares))
            figures.setdefault("mean_of_subsets", {})[key] = mean
    if (styles := style_figures(items, scores)) is not None:
        figures["styles"] = styles
    return figures


def row_figures(items: Sequence[Item], scores: Sequence[list[float]]) -> Figures:
    """pairs: the share of pairs in the right order, equal scores half; all_right: the share of rows whose pairs all are; length: the
    share of pairs that length alone orders correctly. The unit of the intervals is a prompt."""
    keys, pairs = keys_of(items), judged_pairs(items, scores)
    by_length = judged_pairs(items, length_scores(items)[0])
    wrong = {pair.item for pair in pairs if pair.won < 1}
    return {
        "pairs": share(*per_key([keys[pair.item] for pair in pairs], [pair.won for pair in pairs])),
        "all_right": share(*per_key(keys, [float(row not in wrong) for row in range(len(items))])),
        "length": share(*per_key([keys[pair.item] for pair in by_length], [pair.won for pair in by_length])),
    }


def style_figures(items: Sequence[Item], scores: Scores) -> Figures | None:
    """RM-Bench's easy, normal and hard accuracy: the chosen answer has a richer style than the rejected one, the same, a poorer one.

    Source: Liu et al. 2024, section 3.3. None unless every row has three chosen and three rejected answers, all different.
    """
    order = list(itertools.product(range(STYLES), range(STYLES, 2 * STYLES)))
    if any(sorted({*item.pairs()}) != order for item in items):
        return None
    levels = {"easy": operator.gt, "normal": operator.eq, "hard": operator.lt}
    return {
        level: share(
            *per_key(
                keys_of(items),
                [fmean((s[i] > s[j]) + 0.5 * (s[i] == s[j]) for i, j in order if fits(i, j - STYLES)) for s in scores],
            )
        )
        for level, fits in levels.items()
    }


def keys_of(items: Sequence[Item]) -> list[str]:
    return ["" if item.record is None else prompt_key(item.record.prompt) for item in items]


def describe_pairs(results: Figures) -> list[str]:
    rows = {"all": results["overall"]} | (results["subsets"] if len(results["subsets"]) > 1 else {})
    return [
        f"pairs: {name}: accuracy {show(row['pairs'])} on {row['pairs']['n']:,} pairs, all right in {show(row['all_right'])} of "
        f"{row['all_right']['n']:,} rows; length alone {row['length']['value']:.3f}"
        for name, row in rows.items()
    ]
