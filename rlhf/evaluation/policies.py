"""The responses of each policy of a run, and how the policies compare: scores by the reward, KL to SFT, and the true score."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from rlhf.config import Config
from rlhf.data.chat_template import decode_response, end_ids, response_text
from rlhf.data.tokenizer import encode_texts
from rlhf.engines.choosing import Key, SamplingEngine
from rlhf.engines.sampling import make_sampler
from rlhf.evaluation.scoring import Scores, pair_nats
from rlhf.evaluation.statistics import Figures, flatten, interval_of, split_like, win_rate
from rlhf.gold.truth import Truth
from rlhf.model.interface import Episodes
from rlhf.ppo.experience import Prompt
from rlhf.ppo.rewards import ModelReward, Reward, adjust_scores, make_reward
from rlhf.runs.folders import read_stage, reward_sources, rounds_before, run_folder, stage_folder, stages_of
from rlhf.runs.progress import Progress
from rlhf.system.processes import divide
from rlhf.training.setup import load_frozen

TOGETHER = 32  # prompts whose responses are drawn together

Keyed = tuple[list[int], tuple, int]  # a prompt as tokens, its key, and the number of its responses
ByPolicy = dict[str, Scores]  # a number per response, a list per prompt
Judged = list[list[dict[str, float]]]  # the parts of each response's true score, a list per prompt


class Answer(NamedTuple):
    """One response. `ids` ends with the end token if there is one; `logprobs` are the ids', in nats, at the sampling temperature."""

    text: str
    ended: bool
    ids: list[int]
    logprobs: list[float]


Answers = list[list[Answer]]  # a list per prompt


class Asked(NamedTuple):
    """Prompts, and the true scores of each policy's samples if the run has a truth."""

    prompts: list[Prompt]
    tokenizer: Any
    truth: Truth | None = None
    gold: Any = None  # {policy: `judge_by_truth`}
    main: str = "ppo"  # the policy that is compared with best-of-n: PPO's, if there is one


class Responses(NamedTuple):
    """What one policy answers to its prompts: samples at temperature 1, and greedily."""

    prompts: list[Prompt]
    samples: Answers
    greedy: Answers


def room_for(most: int, max_new_tokens: int) -> tuple[int, int]:
    """The maximum tokens of a response, at most half of `most`, and the tokens left for the prompt."""
    length = min(max_new_tokens, most // 2)
    return length, most - length


def draw_answers(
    engine: SamplingEngine,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    keys: Sequence[Key],
    read: Callable[[Any, list[int]], str] = response_text,
    **changes: Any,
) -> list[Answer]:
    """One response to each prompt, in order; the keys distinguish several responses to one prompt. changes: as of `SamplingEngine`."""
    samples = engine.sample(prompts, keys, **changes)
    return [
        Answer(read(tokenizer, ids), ended, ids, row[: len(ids)])
        for ids, ended, row in zip(samples.responses, samples.ended.tolist(), samples.logprobs.tolist(), strict=True)
    ]


def draw_in_turn(
    engine: SamplingEngine, tokenizer: Any, asked: Sequence[Keyed], together: int = TOGETHER, **how: Any
) -> Iterator[list[Answer]]:
    """The responses to each prompt, which is given with its key and their number; `together` prompts are answered at
    once. how: as of `draw_answers`.
    """
    for start in range(0, len(asked), together):
        part = asked[start : start + together]
        prompts = [ids for ids, _, count in part for _ in range(count)]
        keys = [(*key, j) for _, key, count in part for j in range(count)]
        answers = draw_answers(engine, tokenizer, prompts, keys, **how)
        yield from split_like(answers, [range(count) for *_, count in part])


def draw_divided(
    engine: SamplingEngine, tokenizer: Any, prompts: Sequence[Prompt], name: str, count: int, **how: Any
) -> Answers:
    """`count` responses to each prompt; the prompts are divided among the processes. The model must be whole on each."""
    asked = [(ids, ("evaluate", name, i), count) for i, (_, ids) in enumerate(prompts)]
    return divide(asked, lambda mine: list(draw_in_turn(engine, tokenizer, mine, max(1, len(mine)), **how)))


def answer_all(config: Config, models: dict[str, Path], asked: Asked, device: torch.device) -> dict[str, Responses]:
    """`evaluate.samples` responses at temperature 1 to each prompt, and the greedy one, of each policy.

    The base model, if it is among them, is prompted in two ways: with the chat template, which it has never seen
    (`base`), and with the beginning of a document like those of its pretraining (`base_prompted`); "GPT" and "GPT
    prompted" of Ouyang et al. 2022, section 3.5.
    """
    answers: dict[str, Responses] = {}
    tokenizer, truth = asked.tokenizer, asked.truth
    with Progress(len(models) * len(asked.prompts), "evaluate", unit="prompt") as bar:
        for name, folder in models.items():
            policy, prompts = load_frozen(config, folder, device), asked.prompts
            read: Callable[[Any, list[int]], str] = response_text
            if name == "base_prompted" and truth is not None:
                records = [record for record, _ in prompts]
                texts: list[Any] = list(map(truth.base_text, records))
                prompts, read = list(zip(records, encode_texts(tokenizer, texts), strict=True)), text_after_name
            ends = end_ids(tokenizer, base=name.startswith("base"))
            engine = make_sampler(config, policy, tokenizer, eos_token_id=ends)
            drawn = [
                draw_divided(engine, tokenizer, prompts, name, count, read=read, greedy=greedy)
                for greedy, count in ((False, config.evaluate.samples), (True, 1))
            ]
            answers[name] = Responses(prompts, *drawn)
            bar.update(len(prompts))
    return answers


def text_after_name(tokenizer: Any, ids: list[int]) -> str:
    """A document's answer, which follows a line with the speaker's name and ends before the next document."""
    return decode_response(tokenizer, ids).split("\n", 1)[-1].strip()


def judge_rows(truth: Truth, prompts: Sequence[Prompt], answers: Answers) -> Judged:
    asked = zip(prompts, answers, strict=True)
    return [[truth.judge(record, one.text, one.ended) for one in row] for (record, _), row in asked]


def judge_by_truth(truth: Truth, given: Responses) -> dict[str, Judged]:
    """{"samples" | "greedy": the judge's parts of a policy's answers, a list per prompt}."""
    return {kind: judge_rows(truth, given.prompts, getattr(given, kind)) for kind in ("samples", "greedy")}


def totals(judged: Judged, part: str = "total") -> list[list[float]]:
    return [[parts[part] for parts in row] for row in judged]


def mean_of(rows: Sequence[Sequence[Any]]) -> float:
    return round(fmean(flatten(rows)), 4)


def part_means(truth: Truth, judged: Judged) -> dict[str, float]:
    return {part: mean_of(totals(judged, part)) for part in truth.parts}


def summarize_truth(truth: Truth, judged: dict[str, dict[str, Judged]], main: str) -> dict[str, Any]:
    """The `gold` entry of results.json. main: the policy whose win rates it states."""
    sampled = {name: given["samples"] for name, given in judged.items()}
    stated = {"score": "total"} | ({"correct": "correct"} if "correct" in truth.parts else {})
    return truth_win_rates(judged, main) | {
        "truth": truth.name,
        "mean_score": {name: mean_of(totals(rows)) for name, rows in sampled.items()},
        "parts": {name: part_means(truth, rows) for name, rows in sampled.items()},
        **{key: {name: interval_of(totals(s, part)) for name, s in sampled.items()} for key, part in stated.items()},
    }


def truth_win_rates(judged: dict[str, dict[str, Judged]], name: str) -> Figures:
    return {
        key: win_rate(totals(judged[name][kind]), totals(judged["sft"][kind]))
        for key, kind in (("win_rate_vs_sft", "samples"), ("win_rate_greedy", "greedy"))
    }


def score_by(reward: Reward, prompts: Sequence[Prompt], answers: Answers) -> Scores:
    """A reward's scores of the answers, a list per prompt."""
    asked = [(*prompt, *one) for prompt, row in zip(prompts, answers, strict=True) for one in row]
    records, ids, texts, ended, responses, _ = map(list, zip(*asked, strict=True))
    return split_like(reward(Episodes(records, ids, responses, texts, torch.tensor(ended))).tolist(), answers)


def score_divided(reward: Reward, given: Responses) -> Scores:
    """`score_by` of a policy's samples, the prompts divided among the processes. The reward's models must be whole on each."""
    asked = list(zip(given.prompts, given.samples, strict=True))
    return divide(asked, lambda mine: score_by(reward, *map(list, zip(*mine, strict=True))) if mine else [])


def score_answers(
    config: Config, answers: dict[str, Responses], asked: Asked, reward_model: Any, device: torch.device
) -> tuple[ByPolicy, ByPolicy]:
    """Scores of the samples of SFT, PPO and the baselines: by the run's own calibrated reward model, and by PPO's
    sources.

    The two are the same if ppo.rewards, ppo.reward_weights and ppo.calibrated are not set, or if there is no reward
    model.
    """
    scores, rewards = {}, {}
    if reward_model is not None:
        own = ModelReward(reward_model, device)
        scores = {name: score_divided(own, given) for name, given in answers.items()}
    if reward_model is None or reward_sources(config) != ([None], [1.0]) or not config.ppo.calibrated:
        reward, _ = make_reward(config, asked.tokenizer, device)
        rewards = {name: score_divided(reward, given) for name, given in answers.items()}
    return scores or rewards, rewards or scores


def adjusted(config: Config, answers: Answers, scores: Scores) -> Scores:
    """Scores with PPO's score clipping and its rule for responses without an end token."""
    ended = torch.tensor([one.ended for one in flatten(answers)])
    return split_like(adjust_scores(config, torch.tensor(flatten(scores)), ended).tolist(), scores)


def baseline_figures(baselines: dict[str, Path], kl: ByPolicy, optimised: ByPolicy, gold: Any) -> dict[str, Any]:
    """Of each baseline: its stage's hash, its KL, and its win rates over the SFT model."""
    return {
        name: {"stage": (read_stage(folder) or {})["hash"], "kl_to_sft_nats": mean_of(kl[name])}
        | ({"rm_win_rate_vs_sft": win_rate(optimised[name], optimised["sft"])} if optimised else {})
        | ({} if gold is None else truth_win_rates(gold, name))
        for name, folder in baselines.items()
    }


def nats_and_kl(
    config: Config, answers: dict[str, Responses], models: dict[str, Path], pad: int, device: torch.device
) -> tuple[ByPolicy, ByPolicy]:
    """SFT's log-probs in nats of each policy's samples; and log pi - log pi_sft of the samples of the other policies,
    whose mean estimates the KL."""

    def nats_of(folder: Path, pairs: list[tuple[list[int], list[int]]]) -> list[float]:
        model = load_frozen(config, folder, device)
        return divide(pairs, lambda mine: pair_nats(model, mine, pad, device))

    nats, kl = {}, {}
    with Progress(2 * len(answers) - 1, "evaluate: KL", unit="pass") as bar:
        for name, drawn in answers.items():
            pairs = [(ids, one.ids) for (_, ids), row in zip(drawn.prompts, drawn.samples, strict=True) for one in row]
            by_sft = nats_of(models["sft"], pairs)
            nats[name] = split_like(by_sft, drawn.samples)
            bar.update()
            if name != "sft":
                by_policy = nats_of(models[name], pairs)
                kl[name] = split_like((a - b for a, b in zip(by_policy, by_sft, strict=True)), drawn.samples)
                bar.update()
    return nats, kl


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
