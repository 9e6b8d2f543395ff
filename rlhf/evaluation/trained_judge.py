"""The policies compared by a reward model that none of them was trained with: the stage `judge`."""

from collections.abc import Sequence
from typing import Any

import torch

from rlhf.config import Config
from rlhf.data.records import PromptRecord
from rlhf.evaluation.reward_report import evaluate_reward_model
from rlhf.evaluation.scoring import Scores, score_answers_by
from rlhf.evaluation.statistics import Figures, interval, length_controlled, pair_points, prompts_needed, show
from rlhf.model.classifier import load_reward_model
from rlhf.runs.folders import stage_folder

# Figures of the judge itself.
HELD_OUT = ("accuracy", "length_baseline", "length_prefers", "above_length", "labeler_agreement")


def compare_policies(
    config: Config, answers: dict[str, Any], records: Sequence[PromptRecord], tokenizer: Any, device: torch.device
) -> Figures:
    """{"held_out": the judge's own figures, "scores": {policy: mean}, "pairs": [figures of ours over theirs]}.

    `tokenizer` is the policies'.
    """
    answers = {name: given for name, given in answers.items() if not name.startswith("base")}
    judge = load_reward_model(stage_folder(config, "judge") / "model", device)
    held_out = evaluate_reward_model(config, judge, tokenizer, device)
    pad = tokenizer.pad_token_id
    scores = {name: score_answers_by(judge, given, records, pad, device) for name, given in answers.items()}
    return {
        "held_out": {key: held_out[key] for key in HELD_OUT},
        "scores": {name: interval([sum(row) / len(row) for row in rows]) for name, rows in scores.items()},
        "pairs": [
            {"pair": list(pair)} | compare(*((scores[name], answers[name]["texts"]) for name in pair))
            for pair in pairs_of(list(answers))
        ],
    }


def pairs_of(policies: Sequence[str]) -> list[tuple[str, str]]:
    """Every policy over SFT, PPO first, and PPO over every other one."""
    others = [name for name in policies if name not in ("sft", "ppo")]
    return [("ppo", "sft"), *((name, "sft") for name in others), *(("ppo", name) for name in others)]


def compare(ours: tuple[Scores, list[list[str]]], theirs: tuple[Scores, list[list[str]]]) -> Figures:
    """How often our answers win over theirs, plainly and at equal length: all pairs of answers to a prompt, ties half.

    words: ours minus theirs. needed: the number of prompts that would detect an effect of this size, if the interval contains 1/2.
    """
    points = pair_points(ours[0], theirs[0])
    words = [
        [float(len(a.split()) - len(b.split())) for a in a_texts for b in b_texts]
        for a_texts, b_texts in zip(ours[1], theirs[1], strict=True)
    ]
    rates = {
        "win_rate": interval([sum(row) / len(row) for row in points]),
        "length_controlled": length_controlled(points, words),
    }
    needed = {key: prompts_needed(figure) for key, figure in rates.items() if reaches_half(figure)}
    return rates | {"words": interval([sum(row) / len(row) for row in words]), "needed": needed}


def reaches_half(figure: Figures) -> bool:
    return figure["value"] is not None and figure["ci95"][0] <= 0.5 <= figure["ci95"][1]


def describe_comparisons(results: Figures) -> list[str]:
    held_out = results["held_out"]
    accuracy, length = held_out["accuracy"], held_out["length_baseline"]
    lines = [f"judge: accuracy {show(accuracy)} on {accuracy['n']} held-out pairs, length alone {length:.3f}"]
    for row in results["pairs"]:
        needed = [f"{n:,} prompts for {key.replace('_', ' ')}" for key, n in row["needed"].items() if n is not None]
        lines.append(
            f"judge: {' over '.join(row['pair'])} {show(row['win_rate'])}, at equal length {show(row['length_controlled'])}; "
            f"{row['words']['value']:+.1f} words" + (f"; to show such an effect: {', '.join(needed)}" if needed else "")
        )
    return lines
