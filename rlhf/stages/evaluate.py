"""Stage 5: the final figures, on prompts and comparisons that no stage used for training or for choosing settings.

In the gold world the judge gives every response its true score. With other data the figures are the reward model's score, the KL and
the held-out accuracy of the reward model.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf.chat_template import decode_response, end_ids
from rlhf.config import Config
from rlhf.data.prompts import encode_prompt_within, load_prompts
from rlhf.data.records import PromptRecord
from rlhf.data.splits import record_split
from rlhf.errors import UserError
from rlhf.evaluation import external
from rlhf.evaluation.best_of import best_index, best_of_n_kl, draw_candidates, estimate_kl
from rlhf.evaluation.reward_report import describe, evaluate_reward_model, score_distributions
from rlhf.evaluation.scoring import response_batches, score_rows
from rlhf.evaluation.statistics import interval, win_rate
from rlhf.files import write_json
from rlhf.gold.corpus import talk
from rlhf.gold.judge import WEIGHTS, judge
from rlhf.gold.world import task_from_metadata
from rlhf.model.classifier import TextRewardModel, load_reward_model
from rlhf.model.generate import Samples, sample
from rlhf.model.half import hold_frozen
from rlhf.ppo.rewards import Episodes, Reward, pay
from rlhf.ppo.rollout import response_logprobs
from rlhf.ppo.setup import make_reward
from rlhf.precision import inference
from rlhf.recipe import BASELINES
from rlhf.runs.folders import (
    check_output,
    is_complete,
    needs_parent,
    read_stage,
    rounds_before,
    run_folder,
    stage_folder,
)
from rlhf.runs.sources import fractions, hash_sources, need_source, reward_sources
from rlhf.runs.stage import Stage, open_stage
from rlhf.terminal import say
from rlhf.tokenizer import encode_texts, load_tokenizer
from rlhf.tracking.progress import progress
from rlhf.tracking.results import log_results
from rlhf.training.setup import load_frozen, open_tracker, set_up


def run(config: Config) -> None:
    """The stage, and what evaluate.pairs and the like ask for; only the latter if the stage is complete or cannot run yet."""
    if not external.asked(config) or external.stage_is_due(config):
        run_stage(config)
    external.run_external(config)


def run_stage(config: Config) -> None:
    """Write runs/<run>/evaluate: results.json and samples.jsonl."""
    sources = hash_sources(config, "evaluate")
    with open_stage(config, "evaluate", sources) as stage, inference(config, set_up(config)) as device:
        tokenizer = load_tokenizer(stage_folder(config, "ppo") / "model")
        records, prompts = load_test_prompts(config, tokenizer, need_source(config, "prompts"), stage.say)
        reward_model = None
        if needs_parent(config, "evaluate", "reward"):
            reward_model = load_reward_model(stage_folder(config, "reward") / "model", device)
            reward_model = hold_frozen(config, reward_model, device)

        # 1. Responses of every policy to the test prompts
        baselines = finished_baselines(config, stage.say)
        names = (*(("base", "base_prompted") if config.gold.enabled else ()), "sft", "ppo", *baselines)
        answers = answer_all(config, names, records, prompts, tokenizer, device)

        # 2. Evaluate the reward model, if the run has one
        results: dict[str, Any] = {}
        scores, paid = score_answers(config, answers, records, reward_model, tokenizer, device)
        if reward_model is not None:
            results["reward_model"] = evaluate_reward_model(config, reward_model, tokenizer, device)
            for line in describe(results["reward_model"]):
                stage.say(line)
            found = score_distributions(config, reward_model, tokenizer, scores["sft"], device)
            results["reward_model"]["scores"] = found

        # 3. Evaluate the policies
        optimised = with_missing_eos(config, answers, paid)
        results["reward"] = {name: mean_of(rows) for name, rows in optimised.items()}
        results["reward_without_eos_rule"] = {name: mean_of(rows) for name, rows in scores.items()}
        results["ended"] = {name: mean_of(answers[name]["ended"]) for name in scores}
        ppo, sft = (stage_folder(config, name) / "model" for name in ("ppo", "sft"))
        results["kl_to_sft_nats"] = round(
            kl_between(config, answers["ppo"], ppo, sft, tokenizer.pad_token_id, device), 4
        )
        results["rm_win_rate_vs_sft"] = win_rate(optimised["ppo"], optimised["sft"])
        gold = judge_answers(config, records, answers)
        if gold is not None:
            results["gold"] = summarize_gold(gold)
        if baselines:
            results["baselines"] = {
                name: {"stage": digest} | compare_baseline(config, name, answers, optimised, gold, device)
                for name, digest in baselines.items()
            }
        if config.evaluate.best_of:
            results["best_of_n"] = evaluate_best_of(config, records, prompts, tokenizer, gold, device)
        results |= costs(config)

        with open_tracker(stage) as tracker:  # before the samples: opening a tracker truncates the stage's files
            log_results(tracker, results, scores)
        write_samples(stage.folder / "samples.jsonl", records, answers, gold, scores)
        results["seconds"]["evaluate"] = round(stage.elapsed(), 1)
        write_json(stage.folder / "results.json", results)
        say_results(stage, results)
        stage.finish()


def load_test_prompts(
    config: Config, tokenizer: Any, source: Any, say: Callable[[str], None] = say
) -> tuple[list[PromptRecord], list[list[int]]]:
    """The first `evaluate.prompts` prompts of the test split that fit the context, and their tokens."""
    records, _ = load_prompts(source, config.data.format, config.data.allow_partial)
    shares = fractions(config)
    room = tokenizer.model_max_length - config.rollout.max_new_tokens
    test = [r for r in records if record_split(r, config.data.split_seed, shares) == "test"]
    fitted = [(r, encode_prompt_within(tokenizer, r.prompt, room)) for r in test]
    kept = [(r, found) for r, found in fitted if found is not None][: config.evaluate.prompts]
    cut = sum(found[1] for _, found in kept)
    say(f"{len(kept)} test prompts" + (f", {cut} of them cut from the left to fit" if cut else ""))
    if not kept:
        raise UserError(
            "evaluate: no prompt of the test split fits the context: raise data.test, or add shorter prompts"
        )
    return [record for record, _ in kept], [found[0] for _, found in kept]


def finished_baselines(config: Config, say: Callable[[str], None]) -> dict[str, str]:
    """{stage: hash} of the complete optional stages of this run that train a policy: rejection sampling, DPO.

    One that was built on another SFT model than this run's is named and left out.
    """
    found = {}
    sft = check_output(stage_folder(config, "sft"), "sft")["hash"]
    for name in BASELINES:
        folder = run_folder(config) / name
        if not is_complete(folder):
            continue
        record = check_output(folder, name)
        if record["parents"].get("sft") == sft:
            found[name] = record["hash"]
        else:
            say(f"{folder}: built on another SFT model: left out, run `rlhf {name} overwrite=true` to compare it")
    return found


def compare_baseline(
    config: Config, name: str, answers: dict[str, "Answers"], scores: dict[str, list[list[float]]], gold: Any,
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """Of one baseline's policy what results.json has of PPO's: its KL and its win rates over SFT."""
    policy, sft = run_folder(config) / name / "model", stage_folder(config, "sft") / "model"
    pad = load_tokenizer(sft).pad_token_id
    found: dict[str, Any] = {
        "kl_to_sft_nats": round(kl_between(config, answers[name], policy, sft, pad, device), 4),
        "rm_win_rate_vs_sft": win_rate(scores[name], scores["sft"]),
    }
    return found | ({} if gold is None else gold_win_rates(gold, name))


class Answers(dict):
    """What one policy answered: {"prompts", "samples", "greedy"}; one list per prompt."""


def answer_all(
    config: Config,
    names: Sequence[str],
    records: list[PromptRecord],
    prompts: list[list[int]],
    tokenizer: Any,
    device: torch.device,
) -> dict[str, Answers]:
    """Samples at temperature 1 and greedy responses of each policy.

    The base model (gold world only) is prompted twice: with the chat template, which it has never seen, and with a document
    from its corpus ("GPT" and "GPT prompted" of Ouyang et al. 2022, section 3.5).
    """
    answers = {}
    with progress(len(names) * len(prompts), "evaluate", unit="prompt") as bar:
        for name in names:
            parent = "pretrain" if name.startswith("base") else name
            folder = run_folder(config) / name if name in BASELINES else stage_folder(config, parent)
            policy = load_frozen(config, folder / "model", device)
            asked, ends = prompts, end_ids(tokenizer)
            if name == "base_prompted":  # a text like those it was trained on, for it to continue
                texts = [talk(task_from_metadata(record.metadata["gold"])) for record in records]
                asked, ends = encode_texts(tokenizer, texts), [tokenizer.bos_token_id]
            answers[name] = Answers(prompts=asked, **draw(config, policy, asked, ends, tokenizer, name))
            bar.update(len(prompts))
    return answers


def draw(
    config: Config, policy: Any, prompts: list[list[int]], ends: list[int], tokenizer: Any, name: str
) -> dict[str, Any]:
    """{"ids", "texts", "ended"}: lists per prompt of `evaluate.samples` responses; and the greedy ones."""
    count = config.evaluate.samples
    settings = {
        "max_new_tokens": config.rollout.max_new_tokens, "eos_token_id": ends, "pad_token_id": tokenizer.pad_token_id,
        "batch_size": config.rollout.batch_size,
    }  # fmt: skip
    repeated = [prompt for prompt in prompts for _ in range(count)]
    keys = [("evaluate", name, i, j) for i in range(len(prompts)) for j in range(count)]
    drawn = unpack(sample(policy, repeated, seed=config.seed, keys=keys, **settings), tokenizer, ends, count)
    greedy = unpack(sample(policy, prompts, greedy=True, **settings), tokenizer, ends, 1)
    return drawn | {f"greedy_{key}": value for key, value in greedy.items()}


def unpack(samples: Samples, tokenizer: Any, ends: list[int], count: int) -> dict[str, list[list[Any]]]:
    ended = samples.ended.tolist()
    texts = []
    for ids in samples.responses:
        text = decode_response(tokenizer, ids[:-1] if ids and ids[-1] in ends else ids)
        if ends != end_ids(tokenizer):  # the base model's answer follows a line with the speaker's name
            text = text.split("\n", 1)[-1]
        texts.append(text.strip())
    groups = range(0, len(texts), count)
    return {
        "ids": [samples.responses[i : i + count] for i in groups],
        "texts": [texts[i : i + count] for i in groups],
        "ended": [ended[i : i + count] for i in groups],
    }


Scores = dict[str, list[list[float]]]  # by policy, a list per prompt


def score_answers(
    config: Config, answers: dict[str, Answers], records: list[PromptRecord], reward_model: Any, tokenizer: Any,
    device: torch.device,
) -> tuple[Scores, Scores]:  # fmt: skip
    """Scores of the samples of SFT, PPO and the baselines: by the run's own calibrated reward model, and by PPO's sources.

    The two are the same if ppo.rewards, ppo.reward_weights and ppo.calibrated are not set, or if there is no reward model.
    """
    names = [name for name in answers if not name.startswith("base")]
    scores, paid = {}, {}
    if reward_model is not None:
        pad = tokenizer.pad_token_id
        scores = {name: score_by_model(reward_model, answers[name], records, pad, device) for name in names}
    if reward_model is None or reward_sources(config) != ([None], [1.0]) or not config.ppo.calibrated:
        reward, _ = make_reward(config, tokenizer, device)
        paid = {name: score_by(reward, answers[name], records) for name in names}
    return scores or paid, paid or scores


def score_by_model(
    reward_model: Any, answers: Answers, records: list[PromptRecord], pad: int, device: torch.device
) -> list[list[float]]:
    """The reward model's calibrated scores of one policy's samples, a list per prompt."""
    ids, prompts = answers["ids"], answers["prompts"]
    if isinstance(reward_model, TextRewardModel):
        asked = [record.prompt for record, responses in zip(records, ids, strict=True) for _ in responses]
        texts, ended = ([x for row in answers[key] for x in row] for key in ("texts", "ended"))
        flat = reward_model.score_texts(asked, texts, ended).tolist()
    else:
        rows = [p + response for p, responses in zip(prompts, ids, strict=True) for response in responses]
        flat = score_rows(reward_model, rows, pad, device).tolist()
    count = len(ids[0])
    return [flat[i : i + count] for i in range(0, len(flat), count)]


def score_by(reward: Reward, answers: Answers, records: list[PromptRecord]) -> list[list[float]]:
    """A reward's scores of one policy's samples, a list per prompt."""
    count = len(answers["ids"][0])
    ids, texts, ended = ([x for row in answers[key] for x in row] for key in ("ids", "texts", "ended"))
    asked = [record for record in records for _ in range(count)]
    prompts = [prompt for prompt in answers["prompts"] for _ in range(count)]
    flat = reward(Episodes(asked, prompts, ids, texts, torch.tensor(ended))).tolist()
    return [flat[i : i + count] for i in range(0, len(flat), count)]


def with_missing_eos(
    config: Config, answers: dict[str, Answers], scores: dict[str, list[list[float]]]
) -> dict[str, list[list[float]]]:
    """Scores with PPO's score clipping and its rule for responses without an end token."""

    def paid(row: list[float], ended: list[bool]) -> list[float]:
        return pay(config, torch.tensor(row), torch.tensor(ended)).tolist()

    return {
        name: [paid(row, ended) for row, ended in zip(rows, answers[name]["ended"], strict=True)]
        for name, rows in scores.items()
    }


def evaluate_best_of(
    config: Config, records: list[PromptRecord], prompts: list[list[int]], tokenizer: Any, gold: Any,
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """Best-of-n by the reward model over n samples of the SFT model: the baseline for PPO."""
    n, policy = config.evaluate.best_of, load_frozen(config, stage_folder(config, "sft") / "model", device)
    reward, _ = make_reward(config, tokenizer, device)
    with progress(len(prompts), f"evaluate: best of {n}", unit="prompt") as bar:
        found = draw_candidates(config, policy, tokenizer, records, prompts, n, reward, bar)
    best = [best_index(scores) for scores in found["scores"]]
    picked = {name: [[row[i]] for row, i in zip(rows, best, strict=True)] for name, rows in found.items()}
    estimates = [
        [estimate_kl(*drawn, n)] for drawn in zip(found["ids"], found["logprobs"], found["scores"], strict=True)
    ]
    results: dict[str, Any] = {"n": n, "kl_bound_nats": round(best_of_n_kl(n), 4), "reward": mean_of(picked["scores"]),
                               "kl_estimate_nats": mean_of(estimates)}  # fmt: skip
    if gold is not None:
        tasks = [task_from_metadata(record.metadata["gold"]) for record in records]
        judged = [
            [judge(task, texts[0], ended=ended[0])]
            for task, texts, ended in zip(tasks, picked["texts"], picked["ended"], strict=True)
        ]
        totals = [[parts["total"] for parts in row] for row in judged]
        sft = [[parts["total"] for parts in row] for row in gold["sft"]["samples"]]
        results["gold"] = mean_of(totals)
        results["parts"] = {part: mean_of([[p[part] for p in row] for row in judged]) for part in WEIGHTS}
        results["win_rate_vs_sft"] = win_rate(totals, sft)
    return results


def mean_of(rows: list[list[Any]]) -> float:
    return round(sum(map(sum, rows)) / sum(map(len, rows)), 4)


def kl_between(
    config: Config, answers: Answers, policy: Path, reference: Path, pad: int, device: torch.device
) -> float:
    """Mean over the policy's samples of sum_t (logp - logp_ref), nats per sequence."""
    policies = [load_frozen(config, folder, device) for folder in (policy, reference)]
    pairs = [(p, r) for p, responses in zip(answers["prompts"], answers["ids"], strict=True) for r in responses]
    total = 0.0
    for _, where in response_batches(pairs, pad, device):
        ppo, sft = (response_logprobs(policy, *where)[0] for policy in policies)
        total += (ppo - sft).sum().item()
    return total / len(pairs)


# --- the gold world ------------------------------------------------------------------------------------------------


def judge_answers(
    config: Config, records: list[PromptRecord], answers: dict[str, Answers]
) -> dict[str, dict[str, list[list[dict[str, float]]]]] | None:
    """{policy: {"samples" | "greedy": the judge's parts, a list per prompt}}, or None without the gold world."""
    if not config.gold.enabled:
        return None
    tasks = [task_from_metadata(record.metadata["gold"]) for record in records]
    return {
        name: {
            kind: [
                [judge(task, text, ended=end) for text, end in zip(texts, ended, strict=True)]
                for task, texts, ended in zip(tasks, given[f"{key}texts"], given[f"{key}ended"], strict=True)
            ]
            for kind, key in (("samples", ""), ("greedy", "greedy_"))
        }
        for name, given in answers.items()
    }


def summarize_gold(gold: dict[str, dict[str, list[list[dict[str, float]]]]]) -> dict[str, Any]:
    def mean(name: str, part: str, kind: str = "samples") -> float:
        values = [parts[part] for judged in gold[name][kind] for parts in judged]
        return round(sum(values) / len(values), 4)

    per_prompt = {n: [sum(p["correct"] for p in judged) / len(judged) for judged in gold[n]["samples"]] for n in gold}
    return gold_win_rates(gold, "ppo") | {
        "mean_score": {name: mean(name, "total") for name in gold},
        "mean_score_greedy": {name: mean(name, "total", "greedy") for name in gold},
        "parts": {name: {part: mean(name, part) for part in WEIGHTS} for name in gold},
        "parts_greedy": {name: {part: mean(name, part, "greedy") for part in WEIGHTS} for name in gold},
        "correct": {name: interval(values) for name, values in per_prompt.items()},
    }


def gold_win_rates(gold: dict[str, dict[str, list[list[dict[str, float]]]]], name: str) -> dict[str, Any]:
    """Of one policy over SFT, by the judge's total score."""

    def totals(name: str, kind: str) -> list[list[float]]:
        return [[parts["total"] for parts in judged] for judged in gold[name][kind]]

    return {
        "win_rate_vs_sft": win_rate(totals(name, "samples"), totals("sft", "samples")),
        "win_rate_greedy": win_rate(totals(name, "greedy"), totals("sft", "greedy")),
    }


# --- the record ----------------------------------------------------------------------------------------------------


def costs(config: Config) -> dict[str, Any]:
    """Seed, held-out bits per byte, and the time and memory of each stage."""
    folders = {path.parent.name: path.parent for path in sorted(run_folder(config).glob("*/stage.json"))}
    for run in rounds_before(run_folder(config)):
        folders |= {f"{run.name}/{path.parent.name}": path.parent for path in sorted(run.glob("*/stage.json"))}
    records = {name: read_stage(folder) or {} for name, folder in folders.items() if folder.name != "evaluate"}
    pretrain = read_stage(stage_folder(config, "pretrain")) or {}
    return {
        "pretrain_bits_per_byte": pretrain.get("summary", {}).get("bpb"),
        "seed": config.seed,
        "seconds": {name: record.get("seconds") for name, record in records.items()},
        "peak_rss_mb": {name: record.get("peak_rss_mb") for name, record in records.items()},
    }


def write_samples(
    path: Path,
    records: list[PromptRecord],
    answers: dict[str, Answers],
    gold: Any,
    scores: dict[str, list[list[float]]],
) -> None:
    """One line per test prompt: the first sample of every policy, with its scores."""
    with path.open("w", encoding="utf-8") as file:
        for i, record in enumerate(records):
            row = {
                "id": record.id,
                "prompt": record.prompt[-1].content,
                "responses": {name: given["texts"][i][0] for name, given in answers.items()},
                "scores": {name: round(s[i][0], 4) for name, s in scores.items()},
            }
            if gold is not None:
                row["gold"] = {name: round(judged["samples"][i][0]["total"], 4) for name, judged in gold.items()}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def say_results(stage: Stage, results: dict[str, Any]) -> None:
    stage.say(f"reward {results['reward']}, KL {results['kl_to_sft_nats']:.2f} nats")
    if "gold" in results:
        gold = results["gold"]
        stage.say(f"gold win rate over SFT {gold['win_rate_vs_sft']['value']:.3f} {gold['win_rate_vs_sft']['ci95']}, greedy "
                  f"{gold['win_rate_greedy']['value']:.3f}; mean score {gold['mean_score']}")  # fmt: skip
    for name, row in results.get("baselines", {}).items():
        stage.say(f"{name}: reward {results['reward'][name]}, KL {row['kl_to_sft_nats']:.2f} nats, win rate over SFT by the reward "
                  f"model {row['rm_win_rate_vs_sft']['value']:.3f}"
                  + (f", gold {row['win_rate_vs_sft']['value']:.3f}" if "win_rate_vs_sft" in row else ""))  # fmt: skip
    if "best_of_n" in results:
        best = results["best_of_n"]
        stage.say(f"best of {best['n']} samples of SFT: reward {best['reward']}, KL about {best['kl_estimate_nats']:.2f} nats (at most "
                  f"{best['kl_bound_nats']:.2f})" + (f", gold {best['gold']}" if "gold" in best else ""))  # fmt: skip
