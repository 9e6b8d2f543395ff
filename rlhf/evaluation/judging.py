"""Pairwise judging of answers: by a model behind an OpenAI-style endpoint (`evaluate.judge`), by a second reward model
(the stage `judge`), and by people (`evaluate.labels`).

The endpoint judges both orders of the two answers, so that a preference for a position cancels out. The labels of
people rank, rate and flag one response of each policy (`rlhf sample sample.stages=[sft,ppo]`). A prompt is the unit of
every figure: the judgements of one prompt are averaged first. Source: Ouyang et al. 2022, section 3.6 and figures 1, 3
and 4.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from rlhf.config import Config
from rlhf.data.agreement import pairwise_agreement
from rlhf.data.reading import load_comparisons
from rlhf.data.records import Ranking
from rlhf.data.splits import prompt_key
from rlhf.errors import UserError
from rlhf.evaluation.policies import Asked, Responses, score_divided
from rlhf.evaluation.reward_report import evaluate_reward_model
from rlhf.evaluation.scoring import held_out_labelers, load_judge, score_each
from rlhf.evaluation.statistics import (
    Figures,
    ends,
    interval,
    interval_of,
    length_controlled,
    pair_points,
    prediction_powered,
    win,
)
from rlhf.model.classifier import load_reward_model
from rlhf.ppo.rewards import ModelReward
from rlhf.runs.folders import run_folder, stage_folder
from rlhf.runs.run_files import read_jsonl
from rlhf.system.endpoint import Client
from rlhf.system.terminal import say

INSTRUCTION = (
    "You compare two answers to the same request. Judge how well each does what was asked: correctness and completeness first, then "
    "clarity and tone. Length by itself is no merit. Reply with one word: A if the first answer is better, B if the second one is, "
    "TIE if they are equally good."
)
VERDICT = re.compile(r"\b(A|B|TIE)\b")
POINTS = {"A": 1.0, "TIE": 0.5, "B": 0.0}
OTHER_JUDGES = {"reward model": "scores", "truth": "gold"}  # by the key in samples.jsonl


class Endpoint(Client):
    """A client of an OpenAI-style chat endpoint, with a cache on disk. `ask` may be called from several threads."""

    def __init__(self, url: str, model: str, cache: Path, key_variable: str | None = None):
        """cache: JSON lines: key (hash of URL and request), reply, usage. Raises: UserError."""
        super().__init__("evaluate.judge", url, "evaluate.judge_key", key_variable)
        self.model, self.cache = model, cache
        self._known = {row["key"]: row["reply"] for row in read_jsonl(cache)}

    def ask(self, messages: list[dict[str, str]]) -> str | None:
        """The reply's text; None if the request failed permanently, which is counted. Raises: UserError as `Client.post`."""
        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": 16}
        key = hashlib.sha256(json.dumps([self.url, body], sort_keys=True).encode()).hexdigest()
        with self.lock:
            if key in self._known:
                self.counts["cached"] += 1
                return self._known[key]
        if (answered := self.post("chat/completions", body, read_reply)) is None:
            return None
        reply, usage = answered
        with self.lock:
            self.counts.update(usage)
            self._known[key] = reply
            self.cache.parent.mkdir(parents=True, exist_ok=True)
            with self.cache.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "reply": reply, "usage": usage}) + "\n")
        return reply


def read_reply(content: bytes) -> tuple[str, dict[str, int]]:
    """The text of a chat reply, and the numbers of tokens. Raises: ValueError, LookupError or TypeError for any other reply."""
    reply = json.loads(content)
    text, usage = reply["choices"][0]["message"]["content"], reply.get("usage")
    if not isinstance(text, str):
        raise TypeError("the reply has no text")
    usage = usage if isinstance(usage, dict) else {}
    return text, {name: n for name in ("prompt_tokens", "completion_tokens") if isinstance(n := usage.get(name), int)}


def compare_by_endpoint(config: Config, device: torch.device) -> Figures:
    """Win rates of the first of evaluate.judge_pair over the second. Raises: UserError without answers of both."""
    settings = config.evaluate
    ours, theirs = settings.judge_pair or ("ppo", "sft")
    path = stage_folder(config, "evaluate") / "samples.jsonl"
    rows = [row for row in read_jsonl(path) if {ours, theirs} <= row["responses"].keys()][: settings.judge_prompts]
    if not rows:
        missing = f"{path}: has no answers of both {ours} and {theirs}"
        raise UserError(f"{missing}: run `rlhf evaluate` first, or give evaluate.judge_pair")
    assert settings.judge is not None
    cache = run_folder(config) / "evaluations" / "judge-cache.jsonl"
    endpoint = Endpoint(settings.judge, settings.judge_model, cache, settings.judge_key)
    judge = f"{settings.judge_model} at {settings.judge}"
    say(f"evaluate: {judge} compares {ours} with {theirs} on {len(rows)} prompts, both orders")
    asked = [
        question(row["prompt"], row["responses"][first], row["responses"][second])
        for row in rows
        for first, second in ((ours, theirs), (theirs, ours))
    ]
    with ThreadPoolExecutor(max_workers=settings.judge_parallel) as pool:
        verdicts = [verdict_of(reply) for reply in pool.map(endpoint.ask, asked)]
    results = judged_figures(rows, (ours, theirs), verdicts, endpoint.refused)
    return results | {"judge": settings.judge_model, "url": settings.judge, "counts": dict(endpoint.counts)}


def question(prompt: str, first: str, second: str) -> list[dict[str, str]]:
    text = f"Request:\n{prompt}\n\nAnswer A:\n{first}\n\nAnswer B:\n{second}\n\nWhich answer is better: A, B or TIE?"
    return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": text}]


def verdict_of(reply: str | None) -> str | None:
    """The last of A, B and TIE in a reply, before "than"; None if there is none."""
    text = re.sub(r"\btie\b", "TIE", reply or "", flags=re.IGNORECASE)
    bare = text.strip(" \t\n*.()[]\"'").upper()
    words = VERDICT.findall(bare if bare in ("A", "B", "TIE") else text.partition(" than ")[0])
    return words[-1] if words else None


def judged_figures(
    rows: Sequence[dict[str, Any]], pair: tuple[str, str], verdicts: Sequence[str | None], refused: str = ""
) -> Figures:
    """From two verdicts per row, one for each order. Raises: UserError if no row has both, with the last refusal of the judge."""
    both = list(zip(rows, verdicts[::2], verdicts[1::2], strict=True))
    answered = [(row, POINTS[one], 1.0 - POINTS[two]) for row, one, two in both if one is not None and two is not None]
    if not answered:
        none = f"evaluate.judge: none of {len(verdicts)} requests was answered with A, B or TIE"
        raise UserError(f"{none}{refused and f' ({refused})'}: check the judge")
    points = [(one + two) / 2 for _, one, two in answered]
    said = [[row["responses"][name].split() for name in pair] for row, _, _ in answered]
    return {
        "pair": list(pair),
        "win_rate": interval(points, share=True),
        "length_controlled": length_controlled([[p] for p in points], [[len(a) - len(b)] for a, b in said]),
        "both_orders_agree": interval([float(one == two) for _, one, two in answered], share=True),
        "left_out": len(rows) - len(answered),
        "others": compare_judges([row for row, _, _ in answered], pair, points),
    }


def compare_judges(rows: Sequence[Figures], pair: tuple[str, str], points: Sequence[float]) -> dict[str, Figures]:
    """{other judge: {"win_rate", "agreement", "disagrees"}} on the same answers. agreement: of the prompts on which
    both prefer an answer, the share on which it is the same one. disagrees: the intervals of the two win rates lie on
    different sides of 1/2.
    """
    judges, (our_low, our_high) = {}, ends(interval(points, share=True))
    for name, key in OTHER_JUDGES.items():
        scored = [(row[key], p) for row, p in zip(rows, points, strict=True) if {*pair} <= row.get(key, {}).keys()]
        if not scored:
            continue
        known = [(win(s[pair[0]], s[pair[1]]), p) for s, p in scored]
        both = [float((a > 0.5) == (b > 0.5)) for a, b in known if a != 0.5 and b != 0.5]
        rate = interval([theirs for theirs, _ in known], share=True)
        low, high = ends(rate)
        judges[name] = {
            "win_rate": rate,
            "agreement": interval(both, share=True) if both else None,
            "disagrees": (low > 0.5 and our_high < 0.5) or (high < 0.5 and our_low > 0.5),
        }
    return judges


# --- a reward model as judge ---------------------------------------------------------------------------------------

Scored = tuple[Sequence[Sequence[float]], Sequence[Sequence[str]]]  # scores and texts, a list per prompt
# Figures of the judge itself.
HELD_OUT = ("accuracy", "length_baseline", "length_prefers", "above_length", "labeler_agreement")


def compare_policies(config: Config, answers: dict[str, Responses], asked: Asked, device: torch.device) -> Figures:
    """{"held_out": the judge's own figures, "scores": {policy: mean}, "pairs": [figures of ours over theirs]}: every
    policy is compared with SFT, the second of `answers` first, and that one with every other.
    """
    judge = load_reward_model(stage_folder(config, "judge") / "model", device)
    held_out, reward = evaluate_reward_model(config, judge, asked.tokenizer), ModelReward(judge, device)
    scores = {name: score_divided(reward, given) for name, given in answers.items()}
    texts = {name: [[one.text for one in row] for row in given.samples] for name, given in answers.items()}
    main, *others = (name for name in scores if name != "sft")
    pairs = [(main, "sft"), *((name, "sft") for name in others), *((main, name) for name in others)]
    given = {name: (rows, texts[name]) for name, rows in scores.items()}
    return {
        "held_out": {key: held_out[key] for key in HELD_OUT},
        "scores": {name: interval_of(rows) for name, rows in scores.items()},
        "pairs": [{"pair": [a, b]} | compare_scored(given[a], given[b]) for a, b in pairs],
    }


def compare_scored(ours: Scored, theirs: Scored) -> Figures:
    """How often our answers win, by their scores: all pairs of answers to a prompt, ties half. words: ours minus theirs."""
    points = pair_points(ours[0], theirs[0])
    words = [
        [float(len(a.split()) - len(b.split())) for a in a_texts for b in b_texts]
        for a_texts, b_texts in zip(ours[1], theirs[1], strict=True)
    ]
    rates = {"win_rate": interval_of(points, share=True), "length_controlled": length_controlled(points, words)}
    return rates | {"words": interval_of(words)}


# --- people ----------------------------------------------------------------------------------------------------------


# By the places of two responses: 1 if the first is better, 1/2 for a tie, else 0.
Told = Mapping[tuple[int, int], float]
Points = dict[tuple[str, str], dict[str, float]]  # by pair of policies and prompt: how often the first beats the second


def evaluate_people(config: Config, device: torch.device) -> Figures:
    """The figures of all labelers, and of training and held-out ones apart if there are both; with a judge, corrected
    win rates.
    Raises: UserError if no label compares two policies.
    """
    records = load_comparisons(config.evaluate.labels, config.data.format, config.data.allow_partial)[0]
    people = [r for r in records if r.ranking is not None or r.pairs is not None or r.ratings]
    names = policy_names(records)
    if not (points := mean_points(((record, said_of(record)) for record in people), names)):
        wanted = "give labels of tasks of `rlhf sample sample.stages=[sft,ppo]`"
        raise UserError(f"evaluate.labels={config.evaluate.labels}: no label compares two policies: {wanted}")
    held_out = held_out_labelers(config)
    groups = {"all labelers": people}
    if strangers := [record for record in people if record.labeler in held_out]:
        known = [record for record in people if record.labeler not in held_out]
        groups |= {"training labelers": known, "held-out labelers": strangers}
    figures: Figures = {name: people_figures(group, names) for name, group in groups.items() if group}
    if config.evaluate.labels_model is not None:
        judged = mean_points(score_tasks(config, records, device), names)
        corrected = {pair: prediction_powered(told, judged.get(pair, {})) for pair, told in points.items()}
        figures["corrected"] = [{"pair": list(pair), **one} for pair, one in corrected.items()]
    return figures


def people_figures(rankings: Sequence[Ranking], names: Mapping[str, str]) -> Figures:
    """agreement, win_rates of each pair of policies, and per policy the mean rating and the share of responses with each flag."""
    kinds = sorted({flag for record in rankings for given in record.flags.values() for flag in given})
    found: dict[str, dict[str, dict[str, list[float]]]] = {name: {} for name in sorted(names.values())}
    for record, response in [(one, response) for one in rankings for response in one.responses]:
        if response.policy is not None and response.policy in names:
            values = {"rating": record.ratings[response.id]} if response.id in record.ratings else {}
            values |= {flag.replace(" ", "_"): float(flag in record.flags.get(response.id, ())) for flag in kinds}
            for what, value in values.items():
                of = found[names[response.policy]].setdefault(what, {})
                of.setdefault(prompt_key(record.prompt), []).append(value)
    return {
        "labelers": len({record.labeler for record in rankings}),
        "judgements": len(rankings),
        "agreement": pairwise_agreement(rankings),
        "win_rates": [
            {"pair": list(pair), "win_rate": interval(list(by_prompt.values()), share=True)}
            for pair, by_prompt in mean_points(((one, said_of(one)) for one in rankings), names).items()
        ],
        "policies": {
            name: {what: interval_of(list(of.values()), share=what != "rating") for what, of in row.items()}
            for name, row in found.items()
        },
    }


def policy_names(records: Iterable[Ranking]) -> dict[str, str]:
    """What each policy is called: run/stage, with its hash if two share that name."""
    policies = sorted({r.policy for record in records for r in record.responses if r.policy})
    short = [policy.partition("@")[0] for policy in policies]
    return {p: p if short.count(name) > 1 else name for p, name in zip(policies, short, strict=True)}


def mean_points(told: Iterable[tuple[Ranking, Told]], names: Mapping[str, str]) -> Points:
    """The means of what is told of each record's responses of different policies, for the policy whose name comes first."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for record, points in told:
        policies = [names.get(response.policy or "") for response in record.responses]
        for (i, j), point in points.items():
            if (a := policies[i]) and (b := policies[j]) and a < b:
                found.setdefault((a, b), {}).setdefault(prompt_key(record.prompt), []).append(point)
    return {pair: {key: fmean(row) for key, row in by.items()} for pair, by in sorted(found.items())}


def said_of(record: Ranking) -> Told:
    """What a labeler says of each two responses that are both ranked."""
    place = {response.id: i for i, response in enumerate(record.responses)}
    said = [(place[a], place[b], verdict / 2) for a, b, verdict in record.verdicts()]
    return {(i, j): 0.5 + x for i, j, x in said} | {(j, i): 0.5 - x for i, j, x in said}


def score_tasks(config: Config, records: Sequence[Ranking], device: torch.device) -> Iterator[tuple[Ranking, Told]]:
    """What the scores of evaluate.labels_model say of every task that fits the model once, labelled or not."""
    _, model, encode = load_judge(config, config.evaluate.labels_model, "evaluate.labels_model", device)
    tasks = {repr((r.prompt, sorted((x.policy or "", x.text) for x in r.responses))): r for r in records}
    encoded = ((r, encode(r.prompt, [response.answer for response in r.responses])) for r in tasks.values())
    fitting = [(r, made[0]) for r, made in encoded if made is not None]
    for (record, _), s in zip(fitting, score_each(model, [rows for _, rows in fitting]), strict=True):
        yield record, {(i, j): win(s[i], s[j]) for i, j in itertools.permutations(range(len(s)), 2)}
