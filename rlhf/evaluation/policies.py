"""Policies compared by the true score: means, parts, and win rates over SFT."""

from collections.abc import Sequence
from typing import Any

from rlhf.data.records import PromptRecord
from rlhf.evaluation.statistics import Figures, interval, win_rate
from rlhf.gold.truth import Truth

Judged = list[list[dict[str, float]]]  # the parts of each response, a list per prompt


def judge_rows(
    truth: Truth, records: Sequence[PromptRecord], texts: Sequence[Sequence[str]], ended: Sequence[Sequence[bool]]
) -> Judged:
    """The true scores of responses, a list per prompt."""
    return [
        [truth.judge(record, text, end) for text, end in zip(row, ends, strict=True)]
        for record, row, ends in zip(records, texts, ended, strict=True)
    ]


def judge_answers(
    truth: Truth, records: Sequence[PromptRecord], answers: dict[str, Any]
) -> dict[str, dict[str, Judged]]:
    """{policy: {"samples" | "greedy": the judge's parts, a list per prompt}}."""
    return {
        name: {
            kind: judge_rows(truth, records, given[f"{key}texts"], given[f"{key}ended"])
            for kind, key in (("samples", ""), ("greedy", "greedy_"))
        }
        for name, given in answers.items()
    }


def totals(judged: Judged, part: str = "total") -> list[list[float]]:
    return [[parts[part] for parts in row] for row in judged]


def mean_of(rows: Sequence[Sequence[Any]]) -> float:
    return round(sum(map(sum, rows)) / sum(map(len, rows)), 4)


def interval_of(rows: Sequence[Sequence[float]]) -> Figures:
    """Interval of the mean over prompts of each prompt's mean."""
    return interval([sum(row) / len(row) for row in rows])


def summarize_truth(truth: Truth, judged: dict[str, dict[str, Judged]]) -> dict[str, Any]:
    """The `gold` entry of results.json."""

    def parts(kind: str) -> dict[str, dict[str, float]]:
        return {n: {part: mean_of(totals(judged[n][kind], part)) for part in truth.parts} for n in judged}

    figures = truth_win_rates(judged, "ppo") | {
        "truth": truth.name,
        "mean_score": {n: mean_of(totals(judged[n]["samples"])) for n in judged},
        "mean_score_greedy": {n: mean_of(totals(judged[n]["greedy"])) for n in judged},
        "score": {n: interval_of(totals(judged[n]["samples"])) for n in judged},
        "parts": parts("samples"),
        "parts_greedy": parts("greedy"),
    }
    if "correct" in truth.parts:
        figures["correct"] = {n: interval_of(totals(judged[n]["samples"], "correct")) for n in judged}
    return figures


def truth_win_rates(judged: dict[str, dict[str, Judged]], name: str) -> dict[str, Any]:
    """Win rates of one policy over SFT, by the total true score."""
    return {
        key: win_rate(totals(judged[name][kind]), totals(judged["sft"][kind]))
        for key, kind in (("win_rate_vs_sft", "samples"), ("win_rate_greedy", "greedy"))
    }
