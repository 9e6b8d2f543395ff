"""The policies of a run compared: scores by the reward, KL to SFT, and win rates, means and parts by the true score."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from rlhf.config import Config
from rlhf.data.records import PromptRecord
from rlhf.evaluation.answers import Answers
from rlhf.evaluation.scoring import pair_nats, score_samples
from rlhf.evaluation.statistics import Figures, flatten, interval, split_like, win_rate
from rlhf.gold.truth import Truth
from rlhf.ppo.rewards import ModelReward, adjust_scores, make_reward
from rlhf.runs.folders import read_stage, rounds_before, run_folder, stage_folder, stages_of
from rlhf.runs.progress import progress
from rlhf.runs.sources import reward_sources
from rlhf.training.setup import load_frozen

Judged = list[list[dict[str, float]]]  # the parts of each response, a list per prompt


def judge_rows(
    truth: Truth, records: Sequence[PromptRecord], texts: Sequence[Sequence[str]], ended: Sequence[Sequence[bool]]
) -> Judged:
    """The true scores of responses, a list per prompt."""
    return [
        [truth.judge(record, text, end) for text, end in zip(row, ends, strict=True)]
        for record, row, ends in zip(records, texts, ended, strict=True)
    ]


def judge_by_truth(
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
    return round(fmean(flatten(rows)), 4)


def interval_of(rows: Sequence[Sequence[float]]) -> Figures:
    """Interval of the mean over prompts of each prompt's mean."""
    return interval(list(map(fmean, rows)))


def summarize_truth(truth: Truth, judged: dict[str, dict[str, Judged]]) -> dict[str, Any]:
    """The `gold` entry of results.json."""

    def of_each(kind: str, measure: Callable[[Any], Any]) -> dict[str, Any]:
        return {name: measure(rows[kind]) for name, rows in judged.items()}

    def parts(rows: Judged) -> dict[str, float]:
        return {part: mean_of(totals(rows, part)) for part in truth.parts}

    figures = truth_win_rates(judged, "ppo") | {
        "truth": truth.name,
        "mean_score": of_each("samples", lambda rows: mean_of(totals(rows))),
        "mean_score_greedy": of_each("greedy", lambda rows: mean_of(totals(rows))),
        "score": of_each("samples", lambda rows: interval_of(totals(rows))),
        "parts": of_each("samples", parts),
        "parts_greedy": of_each("greedy", parts),
    }
    if "correct" in truth.parts:
        figures["correct"] = of_each("samples", lambda rows: interval_of(totals(rows, "correct")))
    return figures


def truth_win_rates(judged: dict[str, dict[str, Judged]], name: str) -> dict[str, Any]:
    """Win rates of one policy over SFT, by the total true score."""
    return {
        key: win_rate(totals(judged[name][kind]), totals(judged["sft"][kind]))
        for key, kind in (("win_rate_vs_sft", "samples"), ("win_rate_greedy", "greedy"))
    }


Scores = dict[str, list[list[float]]]  # by policy, a list per prompt


def score_answers(
    config: Config,
    answers: dict[str, Answers],
    records: list[PromptRecord],
    reward_model: Any,
    tokenizer: Any,
    device: torch.device,
) -> tuple[Scores, Scores]:
    """Scores of the samples of SFT, PPO and the baselines: by the run's own calibrated reward model, and by PPO's sources.

    The two are the same if ppo.rewards, ppo.reward_weights and ppo.calibrated are not set, or if there is no reward model.
    """
    names = [name for name in answers if not name.startswith("base")]
    scores, rewards = {}, {}
    if reward_model is not None:
        own = ModelReward(reward_model, device)
        scores = {name: score_samples(own, answers[name], records) for name in names}
    if reward_model is None or reward_sources(config) != ([None], [1.0]) or not config.ppo.calibrated:
        reward, _ = make_reward(config, tokenizer, device)
        rewards = {name: score_samples(reward, answers[name], records) for name in names}
    return scores or rewards, rewards or scores


def with_missing_eos(config: Config, answers: dict[str, Answers], scores: Scores) -> Scores:
    """Scores with PPO's score clipping and its rule for responses without an end token."""
    adjusted = {
        name: adjust_scores(config, torch.tensor(flatten(rows)), torch.tensor(flatten(answers[name]["ended"])))
        for name, rows in scores.items()
    }
    return {name: split_like(flat.tolist(), scores[name]) for name, flat in adjusted.items()}


def baseline_figures(baselines: dict[str, Path], kl: Scores, optimised: Scores, gold: Any) -> dict[str, Any]:
    """Of each baseline: its stage's hash, its KL, and its win rates over the SFT model."""
    return {
        name: {
            "stage": (read_stage(folder) or {})["hash"],
            "kl_to_sft_nats": mean_of(kl[name]),
            "rm_win_rate_vs_sft": win_rate(optimised[name], optimised["sft"]),
        }
        | ({} if gold is None else truth_win_rates(gold, name))
        for name, folder in baselines.items()
    }


def nats_and_kl(
    config: Config, answers: dict[str, Answers], models: dict[str, Path], pad: int, device: torch.device
) -> tuple[Scores, Scores]:
    """SFT's log-probs in nats of each policy's samples; and log pi - log pi_sft of the samples of the other policies, whose mean
    estimates the KL."""
    nats, kl = {}, {}
    with progress(2 * len(answers) - 1, "evaluate: KL", unit="pass") as bar:
        for name, drawn in answers.items():
            nats[name] = response_nats(config, drawn, models["sft"], pad, device)
            bar.update()
            if name != "sft":
                policy_nats = response_nats(config, drawn, models[name], pad, device)
                differences = (a - b for a, b in zip(flatten(policy_nats), flatten(nats[name]), strict=True))
                kl[name] = split_like(differences, policy_nats)
                bar.update()
    return nats, kl


def response_nats(config: Config, answers: Answers, folder: Path, pad: int, device: torch.device) -> list[list[float]]:
    """The log-prob in nats of each of a policy's samples under the model in `folder`, a list per prompt."""
    pairs = [(p, r) for p, responses in zip(answers["prompts"], answers["ids"], strict=True) for r in responses]
    return split_like(pair_nats(load_frozen(config, folder, device), pairs, pad, device), answers["ids"])


def costs(config: Config) -> dict[str, Any]:
    """Seed, held-out bits per byte, and the time and memory of each stage."""
    folders = stages_of(run_folder(config))
    for run in rounds_before(run_folder(config)):
        folders |= {f"{run.name}/{stage}": folder for stage, folder in stages_of(run).items()}
    records = {name: read_stage(folder) or {} for name, folder in folders.items() if folder.name != "evaluate"}
    pretrain = read_stage(stage_folder(config, "pretrain")) or {}
    return {
        "pretrain_bits_per_byte": pretrain.get("summary", {}).get("bpb"),
        "seed": config.seed,
        "seconds": {name: record.get("seconds") for name, record in records.items()},
        "peak_rss_mb": {name: record.get("peak_rss_mb") for name, record in records.items()},
    }
