"""Pairwise judging of the evaluation's answers by a model behind an OpenAI-style endpoint: `evaluate.judge`.

Both orders of the two answers are judged. A prompt counts 1, 1/2 or 0 in each order, and the mean of both, so that a preference for a
position cancels out. The verdicts are compared with those of the reward model, and of the true score if known, on the same answers.
"""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rlhf.config import Config
from rlhf.data.records import PromptRecord
from rlhf.errors import UserError
from rlhf.evaluation.endpoint import Endpoint, shown_counts
from rlhf.evaluation.reward_report import evaluate_reward_model
from rlhf.evaluation.scoring import Scores, score_samples
from rlhf.evaluation.statistics import Figures, interval, length_controlled, pair_points, show
from rlhf.model.classifier import load_reward_model
from rlhf.ppo.rewards import ModelReward
from rlhf.runs.folders import run_folder, stage_folder
from rlhf.runs.run_files import read_jsonl
from rlhf.system.terminal import say

INSTRUCTION = (
    "You compare two answers to the same request. Judge how well each does what was asked: correctness and completeness first, then "
    "clarity and tone. Length by itself is no merit. Reply with one word: A if the first answer is better, B if the second one is, "
    "TIE if they are equally good."
)
VERDICT = re.compile(r"\b(A|B|TIE)\b")
POINTS = {"A": 1.0, "TIE": 0.5, "B": 0.0}
OTHER_JUDGES = {"reward model": "scores", "truth": "gold"}  # by the key in samples.jsonl


def compare_by_endpoint(config: Config, device: torch.device) -> Figures:
    """Win rates of the first of evaluate.judge_pair over the second. Raises: UserError without answers of both."""
    settings = config.evaluate
    ours, theirs = settings.judge_pair or ("ppo", "sft")
    path = stage_folder(config, "evaluate") / "samples.jsonl"
    rows = [
        row
        for row in read_jsonl(path)
        if holds(row, "responses", (ours, theirs), str) and isinstance(row.get("prompt"), str)
    ]
    rows = rows[: settings.judge_prompts]
    if not rows:
        raise UserError(
            f"{path}: has no answers of both {ours} and {theirs}: run `rlhf evaluate` first, or give evaluate.judge_pair"
        )
    assert settings.judge is not None
    cache = run_folder(config) / "evaluations" / "judge-cache.jsonl"
    endpoint = Endpoint(settings.judge, settings.judge_model, cache, settings.judge_key)
    say(
        f"evaluate: {settings.judge_model} at {settings.judge} compares {ours} with {theirs} on {len(rows)} prompts, both orders"
    )
    asked = [
        question(row["prompt"], row["responses"][first], row["responses"][second])
        for row in rows
        for first, second in ((ours, theirs), (theirs, ours))
    ]
    with ThreadPoolExecutor(max_workers=settings.judge_parallel) as pool:
        verdicts = [verdict_of(reply) for reply in pool.map(endpoint.ask, asked)]
    return judged_figures(rows, (ours, theirs), verdicts) | {
        "judge": settings.judge_model,
        "url": settings.judge,
        "counts": dict(endpoint.counts),
        "cost": cost_of(endpoint.counts, settings.judge_prices),
    }


def holds(row: dict[str, Any], key: str, names: Sequence[str], kind: Any) -> bool:
    """Whether a line of samples.jsonl has a value of this kind for each of the names."""
    given = row.get(key)
    return isinstance(given, dict) and all(isinstance(given.get(name), kind) for name in names)


def question(prompt: str, first: str, second: str) -> list[dict[str, str]]:
    text = f"Request:\n{prompt}\n\nAnswer A:\n{first}\n\nAnswer B:\n{second}\n\nWhich answer is better: A, B or TIE?"
    return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": text}]


def verdict_of(reply: str | None) -> str | None:
    """The last of A, B and TIE in a reply; None if there is none."""
    text = reply or ""
    words = VERDICT.findall(text.upper() if text.strip().lower() in ("a", "b", "tie") else text)
    return words[-1] if words else None


def judged_figures(rows: Sequence[dict[str, Any]], pair: tuple[str, str], verdicts: Sequence[str | None]) -> Figures:
    """From two verdicts per row, one for each order. Raises: UserError if no row has both."""
    ours, theirs = pair
    both = list(zip(rows, verdicts[::2], verdicts[1::2], strict=True))
    answered = [(row, POINTS[one], 1.0 - POINTS[two]) for row, one, two in both if one is not None and two is not None]
    if not answered:
        raise UserError(
            f"evaluate.judge: none of {len(verdicts)} requests was answered with A, B or TIE: check the judge"
        )
    points = [(one + two) / 2 for _, one, two in answered]
    lengths = [
        float(len(row["responses"][ours].split()) - len(row["responses"][theirs].split())) for row, _, _ in answered
    ]
    return {
        "pair": list(pair),
        "win_rate": interval(points),
        "length_controlled": length_controlled([[point] for point in points], [[n] for n in lengths]),
        "longer": round(sum((n > 0) + 0.5 * (n == 0) for n in lengths) / len(lengths), 4),
        "both_orders_agree": interval([float(one == two) for _, one, two in answered]),
        "first_place": interval([(one + 1.0 - two) / 2 for _, one, two in answered]),  # of the answer shown first
        "ties": round(sum(point == 0.5 for point in points) / len(points), 4),
        "left_out": len(rows) - len(answered),
        "others": compare_judges([row for row, _, _ in answered], pair, points),
    }


def compare_judges(
    rows: Sequence[dict[str, Any]], pair: tuple[str, str], points: Sequence[float]
) -> dict[str, Figures]:
    """{other judge: {"win_rate", "agreement", "disagrees"}} on the same answers.

    agreement: the share of prompts, of those on which both prefer an answer, on which they prefer the same one. disagrees: the intervals
    of the two win rates lie on different sides of 1/2.
    """
    judges = {}
    for name, key in OTHER_JUDGES.items():
        known = [
            (row[key], point) for row, point in zip(rows, points, strict=True) if holds(row, key, pair, int | float)
        ]
        if not known:
            continue
        theirs = [1.0 if s[pair[0]] > s[pair[1]] else 0.0 if s[pair[0]] < s[pair[1]] else 0.5 for s, _ in known]
        strict = [
            float((a > 0.5) == (b > 0.5)) for a, (_, b) in zip(theirs, known, strict=True) if a != 0.5 and b != 0.5
        ]
        rate, ours = interval(theirs), interval(points)
        judges[name] = {
            "win_rate": rate,
            "agreement": interval(strict) if strict else None,
            "disagrees": opposed(rate, ours),
        }
    return judges


def opposed(a: Figures, b: Figures) -> bool:
    """Whether two win rates lie on different sides of 1/2, intervals included."""
    return (a["ci95"][0] > 0.5 and b["ci95"][1] < 0.5) or (a["ci95"][1] < 0.5 and b["ci95"][0] > 0.5)


def cost_of(counts: Any, prices: Sequence[float] | None) -> float | None:
    """The cost, in the currency of the prices per million prompt and completion tokens; None without prices."""
    if prices is None:
        return None
    return round((counts["prompt_tokens"] * prices[0] + counts["completion_tokens"] * prices[1]) / 1e6, 6)


def describe_judging(results: Figures) -> list[str]:
    pair = " over ".join(results["pair"])
    lines = [
        f"judge {results['judge']}: {pair} {show(results['win_rate'])}, at equal length {show(results['length_controlled'])}; "
        f"both orders agree on {show(results['both_orders_agree'])}",
        f"judge: {shown_counts(results['counts'])}; {results['left_out']} prompts left out"
        + ("" if results["cost"] is None else f"; cost {results['cost']:g}"),
    ]
    for name, row in results["others"].items():
        agreement = "" if row["agreement"] is None else f", the same preference on {show(row['agreement'])}"
        warning = ": THE JUDGES DISAGREE" if row["disagrees"] else ""
        lines.append(f"judge: the {name} gives {show(row['win_rate'])}{agreement}{warning}")
    return lines


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
    reward = ModelReward(judge, device)
    scores = {name: score_samples(reward, given, records) for name, given in answers.items()}
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

    words: ours minus theirs.
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
    return rates | {"words": interval([sum(row) / len(row) for row in words])}


def describe_comparisons(results: Figures) -> list[str]:
    held_out = results["held_out"]
    accuracy, length = held_out["accuracy"], held_out["length_baseline"]
    lines = [f"judge: accuracy {show(accuracy)} on {accuracy['n']} held-out pairs, length alone {length:.3f}"]
    for row in results["pairs"]:
        lines.append(
            f"judge: {' over '.join(row['pair'])} {show(row['win_rate'])}, at equal length {show(row['length_controlled'])}; "
            f"{row['words']['value']:+.1f} words"
        )
    return lines
