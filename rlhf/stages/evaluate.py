"""Stage 5: what came of it, on prompts and comparisons that no stage has trained on or chosen settings by.

In the gold world the judge tells the truth about every response. With other data the reward model's score, the KL and
the held-out accuracy of the reward model are what can be known.
"""

import json
from pathlib import Path
from typing import Any

import torch

from rlhf.config import Config
from rlhf.data.agreement import pairwise_agreement
from rlhf.data.batching import by_length, right_pad
from rlhf.data.comparisons import load_comparisons
from rlhf.data.items import Item, make_items
from rlhf.data.prompts import encode_prompt_within, load_prompts
from rlhf.data.records import PromptRecord
from rlhf.data.splits import record_split
from rlhf.errors import UserError
from rlhf.gold.corpus import talk
from rlhf.gold.judge import WEIGHTS, judge
from rlhf.gold.labelers import make_labelers, mean_utility
from rlhf.gold.world import task_from_metadata
from rlhf.model.generate import Samples, sample
from rlhf.model.heads import RewardModel
from rlhf.rollout import response_logprobs
from rlhf.runs import Stage, open_stage, read_stage, run_folder, stage_folder, write_json
from rlhf.stages.common import load_policy, set_up
from rlhf.stages.reward import score_rows
from rlhf.stages.sources import fractions, hash_sources, need_source
from rlhf.stages.statistics import interval, ratio_interval, win_rate
from rlhf.tokenizer import decode_response, encode_texts, load_tokenizer
from rlhf.tracking.progress import progress

POLICIES = ("base", "base_prompted", "sft", "ppo")
CALIBRATION_BINS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)  # upper edges of the score gap


def run(config: Config) -> None:
    """Write runs/<run>/evaluate: results.json and samples.jsonl."""
    with open_stage(config, "evaluate", hash_sources(config, "evaluate")) as stage:
        device = set_up(config)
        tokenizer = load_tokenizer(stage_folder(config, "ppo") / "model")
        records, prompts = load_test_prompts(config, stage, tokenizer)
        reward_model = RewardModel.from_pretrained(str(stage_folder(config, "reward") / "model")).eval().to(device)

        # 1. Responses of every policy to the test prompts
        answers = answer_all(config, records, prompts, tokenizer, device)

        # 2. What the reward model is worth
        results: dict[str, Any] = {"reward_model": evaluate_reward_model(config, reward_model, tokenizer, device)}

        # 3. What the policies are worth
        scores = score_answers(answers, reward_model, tokenizer.pad_token_id, device)
        optimised = with_missing_eos(config, answers, scores)  # what PPO was paid for
        results["reward"] = {name: mean_of(rows) for name, rows in optimised.items()}
        results["reward_without_eos_rule"] = {name: mean_of(rows) for name, rows in scores.items()}
        results["ended"] = {name: mean_of(answers[name]["ended"]) for name in scores}
        results["kl_to_sft_nats"] = round(kl_to_sft(config, answers["ppo"], tokenizer.pad_token_id, device), 4)
        results["rm_win_rate_vs_sft"] = win_rate(optimised["ppo"], optimised["sft"])
        gold = judge_answers(config, records, answers)
        if gold is not None:
            results["gold"] = summarize_gold(gold)
        results |= costs(config)

        write_samples(stage.folder / "samples.jsonl", records, answers, gold, scores)
        results["seconds"]["evaluate"] = round(stage.elapsed(), 1)
        write_json(stage.folder / "results.json", results)
        say_results(stage, results)
        stage.finish()


def load_test_prompts(config: Config, stage: Stage, tokenizer: Any) -> tuple[list[PromptRecord], list[list[int]]]:
    """The first `evaluate.prompts` prompts of the test split that fit the context, and their tokens."""
    records, _ = load_prompts(need_source(config, "prompts"), config.data.format)
    shares = fractions(config)
    room = tokenizer.model_max_length - config.rollout.max_new_tokens
    test = [r for r in records if record_split(r, config.seed, shares) == "test"]
    fitted = [(r, encode_prompt_within(tokenizer, r.prompt, room)) for r in test]
    kept = [(r, found) for r, found in fitted if found is not None][: config.evaluate.prompts]
    cut = sum(found[1] for _, found in kept)
    stage.say(f"{len(kept)} test prompts" + (f", {cut} of them cut from the left to fit" if cut else ""))
    if not kept:
        raise UserError(
            "evaluate: no prompt of the test split fits the context: raise data.test, or add shorter prompts"
        )
    return [record for record, _ in kept], [found[0] for _, found in kept]


class Answers(dict):
    """What one policy answered: {"prompts", "samples", "greedy"}; samples[i] has one Samples row list a prompt."""


def answer_all(
    config: Config, records: list[PromptRecord], prompts: list[list[int]], tokenizer: Any, device: torch.device
) -> dict[str, Answers]:
    """Samples at temperature 1 and greedy responses of SFT and PPO; in the gold world of the base too.

    The base is asked as all others, with a chat template that it has never seen, and once more prompted in its own way
    ("GPT" and "GPT prompted" of Ouyang et al. 2022, section 3.5).
    """
    answers = {}
    names = POLICIES if config.gold.enabled else ("sft", "ppo")
    with progress(len(names) * len(prompts), "evaluate", unit="prompt") as bar:
        for name in names:
            parent = "pretrain" if name.startswith("base") else name
            policy = load_policy(stage_folder(config, parent) / "model").to(device)
            asked, end = prompts, tokenizer.eos_token_id
            if name == "base_prompted":  # it continues a text of the kind it was trained on, and picks the speaker
                texts = [talk(task_from_metadata(record.metadata["gold"])) for record in records]
                asked, end = encode_texts(tokenizer, texts), tokenizer.bos_token_id
            answers[name] = Answers(prompts=asked, **draw(config, policy, asked, end, tokenizer, name))
            bar.update(len(prompts))
    return answers


def draw(config: Config, policy: Any, prompts: list[list[int]], end: int, tokenizer: Any, name: str) -> dict[str, Any]:
    """{"ids", "texts", "ended"}: lists a prompt of `evaluate.samples` responses; and the greedy ones."""
    count = config.evaluate.samples
    settings = {
        "max_new_tokens": config.rollout.max_new_tokens, "eos_token_id": end, "pad_token_id": tokenizer.pad_token_id,
        "batch_size": config.rollout.batch_size,
    }  # fmt: skip
    repeated = [prompt for prompt in prompts for _ in range(count)]
    keys = [("evaluate", name, i, j) for i in range(len(prompts)) for j in range(count)]
    drawn = unpack(sample(policy, repeated, seed=config.seed, keys=keys, **settings), tokenizer, end, count)
    greedy = unpack(sample(policy, prompts, greedy=True, **settings), tokenizer, end, 1)
    return drawn | {f"greedy_{key}": value for key, value in greedy.items()}


def unpack(samples: Samples, tokenizer: Any, end: int, count: int) -> dict[str, list[list[Any]]]:
    ended = samples.ended.tolist()
    texts = []
    for ids in samples.responses:
        text = decode_response(tokenizer, ids[:-1] if ids and ids[-1] == end else ids)
        if end != tokenizer.eos_token_id:  # the base's answer follows a line with its speaker's name
            text = text.split("\n", 1)[-1]
        texts.append(text.strip())
    groups = range(0, len(texts), count)
    return {
        "ids": [samples.responses[i : i + count] for i in groups],
        "texts": [texts[i : i + count] for i in groups],
        "ended": [ended[i : i + count] for i in groups],
    }


def score_answers(
    answers: dict[str, Answers], reward_model: RewardModel, pad: int, device: torch.device
) -> dict[str, list[list[float]]]:
    """Calibrated reward-model scores of the samples of SFT and PPO, a list a prompt."""
    scores = {}
    for name in ("sft", "ppo"):
        ids, prompts = answers[name]["ids"], answers[name]["prompts"]
        rows = [p + response for p, responses in zip(prompts, ids, strict=True) for response in responses]
        flat = score_rows(reward_model, rows, pad, device).tolist()
        count = len(ids[0])
        scores[name] = [flat[i : i + count] for i in range(0, len(flat), count)]
    return scores


def with_missing_eos(
    config: Config, answers: dict[str, Answers], scores: dict[str, list[list[float]]]
) -> dict[str, list[list[float]]]:
    """The scores under PPO's rule: a response without an end token gets at most `ppo.missing_eos_score`."""
    worst = config.ppo.missing_eos_score
    if worst is None:
        return scores
    return {
        name: [
            [s if end else min(s, worst) for s, end in zip(row, ended, strict=True)]
            for row, ended in zip(rows, answers[name]["ended"], strict=True)
        ]
        for name, rows in scores.items()
    }


def mean_of(rows: list[list[Any]]) -> float:
    return round(sum(map(sum, rows)) / sum(map(len, rows)), 4)


@torch.no_grad()
def kl_to_sft(config: Config, answers: Answers, pad: int, device: torch.device) -> float:
    """Mean over PPO's samples of sum_t (logp_ppo - logp_sft), nats a sequence."""
    policies = [load_policy(stage_folder(config, name) / "model").to(device) for name in ("ppo", "sft")]
    pairs = [(p, r) for p, responses in zip(answers["prompts"], answers["ids"], strict=True) for r in responses]
    total = 0.0
    for group in by_length([len(p) + len(r) for p, r in pairs], 64):
        tokens, lengths = right_pad([pairs[i][0] + pairs[i][1] for i in group], pad)
        starts = torch.tensor([len(pairs[i][0]) for i in group])
        answer = lengths - starts
        mask = torch.arange(int(answer.max())) < answer[:, None]
        where = (tokens.to(device), starts.to(device), mask.to(device))
        ppo, sft = (response_logprobs(policy, *where)[0] for policy in policies)
        total += (ppo - sft).sum().item()
    return total / len(pairs)


# --- the reward model ----------------------------------------------------------------------------------------------


def evaluate_reward_model(config: Config, model: RewardModel, tokenizer: Any, device: torch.device) -> dict[str, Any]:
    """Accuracy on held-out prompts beside what bounds it: the labelers' noise above, the length of responses below."""
    records, _ = load_comparisons(need_source(config, "comparisons"), config.data.format)
    shares = fractions(config)
    held_out = [r for r in records if record_split(r, config.seed, shares) == "test"]
    room = min(config.rollout.max_new_tokens, tokenizer.model_max_length // 2)
    items, _ = make_items(held_out, tokenizer, tokenizer.model_max_length, room)
    if not items:
        raise UserError("evaluate: no comparison is in the test split: raise data.test, or add comparisons")
    flat = score_rows(model, [row for item in items for row in item.rows], tokenizer.pad_token_id, device).tolist()
    scores, start = [], 0
    for item in items:
        scores.append(flat[start : start + len(item.rows)])
        start += len(item.rows)
    longer = accuracy(items, [[float(n) for n in item.lengths] for item in items])
    shorter = accuracy(items, [[-float(n) for n in item.lengths] for item in items])
    agreement = pairwise_agreement(records)
    results: dict[str, Any] = {
        "accuracy": accuracy(items, scores),
        "length_baseline": max(longer["value"], shorter["value"]),
        "labeler_agreement": None if not agreement["n"] else round(agreement["value"], 4),
        "calibration": calibration_curve(items, scores, model.config.gain),
    }
    if config.gold.enabled:
        results |= against_gold(config, items, scores)
    return results


def accuracy(items: list[Item], scores: list[list[float]]) -> dict[str, Any]:
    """Share of the labelers' ordered pairs that the scores order alike, ties half; a prompt is the interval's unit."""
    right, count = [], []
    for item, s in zip(items, scores, strict=True):
        points = [1.0 if s[i] > s[j] else 0.5 if s[i] == s[j] else 0.0 for i, j in item.pairs()]
        right.append(sum(points))
        count.append(float(len(points)))
    return ratio_interval(right, count)


def against_gold(config: Config, items: list[Item], scores: list[list[float]]) -> dict[str, float]:
    """The ceiling (the labelers' noiseless mean utility on the same pairs) and the accuracy on the judge's own order."""
    labelers = make_labelers(config.gold.labeler_noise)
    utilities, right, count = [], 0.0, 0
    for item, s in zip(items, scores, strict=True):
        record = item.records[0]
        task = task_from_metadata(record.metadata["gold"])
        heard = [(r.text, bool(r.metadata.get("ended", True))) for r in record.responses]
        utilities.append([mean_utility(labelers, task, text, ended=ended) for text, ended in heard])
        totals = [judge(task, text, ended=ended)["total"] for text, ended in heard]
        for i in range(len(totals)):
            for j in range(i):
                if abs(totals[i] - totals[j]) > 1e-9:
                    better, worse = (i, j) if totals[i] > totals[j] else (j, i)
                    right += 1.0 if s[better] > s[worse] else 0.5 if s[better] == s[worse] else 0.0
                    count += 1
    return {"noise_ceiling": accuracy(items, utilities)["value"], "gold_order_accuracy": round(right / count, 4)}


def calibration_curve(items: list[Item], scores: list[list[float]], gain: float) -> list[dict[str, float]]:
    """P(win | score gap): predicted sigmoid(raw gap) beside how often the labelers preferred the higher score."""
    bins: list[list[tuple[float, float]]] = [[] for _ in range(len(CALIBRATION_BINS) + 1)]
    for item, s in zip(items, scores, strict=True):
        for better, worse in item.pairs():
            gap = s[better] - s[worse]
            place = sum(abs(gap) > edge for edge in CALIBRATION_BINS)
            bins[place].append((abs(gap), 1.0 if gap > 0 else 0.5 if gap == 0 else 0.0))
    curve = []
    for rows in filter(None, bins):
        gaps = torch.tensor([gap for gap, _ in rows])
        curve.append(
            {
                "gap": round(gaps.mean().item(), 4),
                "predicted": round(torch.sigmoid(gaps / gain).mean().item(), 4),
                "observed": round(sum(won for _, won in rows) / len(rows), 4),
                "n": len(rows),
            }
        )
    return curve


# --- the gold world ------------------------------------------------------------------------------------------------


def judge_answers(
    config: Config, records: list[PromptRecord], answers: dict[str, Answers]
) -> dict[str, dict[str, list[list[dict[str, float]]]]] | None:
    """{policy: {"samples" | "greedy": the judge's parts, a list a prompt}}, or None where no truth is known."""
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
    def totals(name: str, kind: str) -> list[list[float]]:
        return [[parts["total"] for parts in judged] for judged in gold[name][kind]]

    def mean(name: str, part: str, kind: str = "samples") -> float:
        values = [parts[part] for judged in gold[name][kind] for parts in judged]
        return round(sum(values) / len(values), 4)

    per_prompt = {n: [sum(p["correct"] for p in judged) / len(judged) for judged in gold[n]["samples"]] for n in gold}
    return {
        "win_rate_vs_sft": win_rate(totals("ppo", "samples"), totals("sft", "samples")),
        "win_rate_greedy": win_rate(totals("ppo", "greedy"), totals("sft", "greedy")),
        "mean_score": {name: mean(name, "total") for name in gold},
        "mean_score_greedy": {name: mean(name, "total", "greedy") for name in gold},
        "parts": {name: {part: mean(name, part) for part in WEIGHTS} for name in gold},
        "parts_greedy": {name: {part: mean(name, part, "greedy") for part in WEIGHTS} for name in gold},
        "correct": {name: interval(values) for name, values in per_prompt.items()},
    }


# --- the record ----------------------------------------------------------------------------------------------------


def costs(config: Config) -> dict[str, Any]:
    """Seed, held-out bits per byte, and what each stage took."""
    stages = [p.parent.name for p in sorted(run_folder(config).glob("*/stage.json")) if p.parent.name != "evaluate"]
    records = {name: read_stage(run_folder(config) / name) or {} for name in stages}
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
    """One line a test prompt: the first sample of every policy, with its scores."""
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
    rm = results["reward_model"]["accuracy"]
    stage.say(f"reward model accuracy {rm['value']:.3f} {rm['ci95']}, length alone "
              f"{results['reward_model']['length_baseline']:.3f}; reward {results['reward']}, "
              f"KL {results['kl_to_sft_nats']:.2f} nats")  # fmt: skip
    if "gold" in results:
        gold = results["gold"]
        stage.say(f"gold win rate over SFT {gold['win_rate_vs_sft']['value']:.3f} {gold['win_rate_vs_sft']['ci95']}, greedy "
                  f"{gold['win_rate_greedy']['value']:.3f}; mean score {gold['mean_score']}")  # fmt: skip
