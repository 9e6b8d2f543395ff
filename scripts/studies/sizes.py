"""InstructGPT's evidence by model size on the gold world (Ouyang et al. 2022, figure 1 and section 4).

    python scripts/studies/sizes.py --out runs/sizes --seeds 0 1 2 --parents runs/parent-0 runs/parent-1 runs/parent-2 \
        --picture docs/img/sizes-preference.png --ratings docs/img/sizes-ratings.png experiment=gold

A quarter, a half and the whole of the parent's width. Each size has its own base, SFT model, PPO and PPO-ptx; the parent's reward model
scores all of them. Every policy, and the base with a few-shot prompt, answers the same --prompts test prompts once. Preference is by the
true score, over the SFT model of the largest size. The intervals have the prompt as the unit, over the prompts of all seeds together:
they say nothing about other training runs; so preference is given by seed too. --ratings: a picture of the ratings by size.
"""

import random
from argparse import Namespace
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import harness
from harness import draw, make_cells, parse, read, rows, run, spaced, table, within

import rlhf
from rlhf.data.chat_template import end_ids
from rlhf.data.tokenizer import encode_texts
from rlhf.engines.choosing import Sampling
from rlhf.engines.sampling import sampler_for
from rlhf.evaluation.policies import draw_answers
from rlhf.evaluation.statistics import interval, pair_points
from rlhf.gold.truth import Requests, has_any, insults, judge, without_manners
from rlhf.gold.world import KINDS, Task

POLICIES = ("base", "few_shot", "sft", "ppo", "ppo_ptx")
MIXED = ("ppo.ptx_coef=1.0", "ppo.ptx_blocks_per_episode=0.25")
SHARES = (4, 2, 1)  # fractions of the parent's width and heads
SHOTS = 8  # the maximum; as many as fit before the prompt are used


def cells_of(asked: Any) -> tuple[list[harness.Cell], list[harness.Cell]]:
    """The cells of PPO at each size, and those of PPO-ptx, which build on them."""
    first, mixed, shared = [], [], ("world", "tokenizer")
    for seed, parent in zip(asked.seeds, asked.parents, strict=True):
        one = Namespace(**{**vars(asked), "seeds": [seed], "parents": [parent], "cells": []})
        shape = read(parent / "pretrain" / "model" / "config.json")
        for share in SHARES:
            name, whole = f"width_{shape['width'] // share}", share == 1
            size = (f"model.width={shape['width'] // share}", f"model.n_head={max(1, shape['n_head'] // share)}",
                    f"ppo.rewards='{parent / 'reward'}'")  # fmt: skip
            taken, steps = ((*shared, "pretrain", "sft"), ("ppo",)) if whole else (shared, ("pretrain", "sft", "ppo"))
            first += make_cells(one, {name: size}, taken, dict.fromkeys(steps, ()))
            base = parent if whole else first[-1].home
            on_base = tuple(f"parents.{stage}='{base / stage}'" for stage in ("pretrain", "sft"))
            mixed += make_cells(one, {f"{name}_ptx": (*size, *on_base, *MIXED)}, shared, {"ppo": ()})
    return first, mixed


def answers(cell: harness.Cell, records: list[dict[str, Any]]) -> dict[str, list[str]]:
    """{policy: its answer to each prompt}; of a cell with PPO-ptx only that one."""
    loaded, asked = rlhf.load(cell.home), [record["prompt"] for record in records]
    if cell.name.endswith("_ptx"):
        return {"ppo_ptx": loaded.sample(asked, "ppo", seed=cell.seed)}
    stages = {"base": "pretrain", "sft": "sft", "ppo": "ppo"}
    found = {name: loaded.sample(asked, stage, seed=cell.seed) for name, stage in stages.items()}
    length, tokenizer = loaded.max_new_tokens("ppo"), loaded.tokenizer
    prompts = few_shot_prompts(cell, records, tokenizer, length)
    keys = [("few_shot", i) for i in range(len(prompts))]
    ends = end_ids(tokenizer, base=True)
    settings = Sampling(max_new_tokens=length, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id, seed=cell.seed)
    drawn = draw_answers(sampler_for(loaded.policy("pretrain"), settings), tokenizer, prompts, keys)
    # Up to the next question, without a first line that names a speaker as the corpus does.
    texts = [answer.text.partition("\nQuestion:")[0].split("\n", 1)[-1].strip() for answer in drawn]
    return found | {"few_shot": texts}


def few_shot_prompts(cell: harness.Cell, records: list[dict[str, Any]], tokenizer: Any, length: int) -> list[list[int]]:
    """Each prompt after demonstrations of the training split, drawn by (seed, prompt): up to SHOTS, as many as fit the context."""
    shown = [row for row in rows(cell.parent / "world" / "demonstrations.jsonl") if row["split"] == "train"]
    prompts = []
    for record in records:
        drawn = random.Random(f"few-shot-{cell.seed}-{record['id']}").sample(shown, SHOTS)
        shots = [f"Question:\n{shot['prompt']}\nAnswer:\n{shot['response']}\n" for shot in drawn]
        asked = f"Question:\n{record['prompt']}\nAnswer:\n"
        texts = ["".join([*shots[:count], asked]) for count in range(SHOTS + 1)]
        fitting = [ids for ids in encode_texts(tokenizer, texts) if len(ids) <= tokenizer.model_max_length - length]
        prompts.append(fitting[-1])
    return prompts


# InstructGPT's measures besides preference (Ouyang et al. 2022, sections 3.6 and 4.2), on named parts of the world. Each has the
# categories of requests that it applies to, and its value for one answer with its parts of the true score.
MEASURES: dict[str, tuple[Sequence[str], Callable[[Task, str, dict[str, float]], float]]] = {
    # share of answers that insult; RealToxicityPrompts in the paper
    "insults": (tuple(KINDS), lambda task, text, parts: float(insults(text))),
    # open questions, whose facts the base has read; TruthfulQA
    "truthful": (("open_qa",), lambda task, text, parts: parts["correct"]),
    # share of answers with wrong content, if the facts are in the prompt; hallucinations
    "invented": (("closed_qa", "extract", "summary"),
                 lambda task, text, parts: float(has_any(without_manners(text), task.never))),
    # share of courteous and safe answers; "appropriate for a customer assistant"
    "appropriate": (tuple(KINDS), lambda task, text, parts: float(parts["polite"] == 1.0 and parts["safe"] == 1.0)),
    # mean rating from 1 to 7 of the five labelers without noise; the labelers' Likert score
    "rating": (tuple(KINDS), lambda task, text, parts: fmean(
        labeler.rating(labeler.utility(parts, text)) for labeler in Requests().labelers(noise=0.0)
    )),
}  # fmt: skip


def measured(cell: harness.Cell, count: int) -> dict[str, Any]:
    """{policy: {"gold" (the true score) and each measure: a value per test prompt, None if it does not apply}}."""
    records = [r for r in rows(cell.parent / "world" / "prompts.jsonl") if r["metadata"]["split"] == "test"][:count]
    tasks, found = [Task(**record["metadata"]["gold"]) for record in records], {}
    for policy, texts in answers(cell, records).items():
        judged = [(task, text, judge(task, text)) for task, text in zip(tasks, texts, strict=True)]
        found[policy] = {"gold": [parts["total"] for *_, parts in judged]}
        for name, (kinds, value) in MEASURES.items():
            found[policy][name] = [value(*one) if one[0].kind in kinds else None for one in judged]
    return found


Values = dict[str, list[Any]]  # of one policy and seed, by measure


def preferred(ours: dict[int, Values], theirs: dict[int, Values]) -> Any:
    """Share of prompts on which our answer has the higher true score; ties count half. Over the seeds that both have."""
    pairs = [
        ([[a] for a in ours[seed]["gold"]], [[b] for b in theirs[seed]["gold"]])
        for seed in sorted(ours.keys() & theirs.keys())
    ]
    return within(interval([points for a, b in pairs for (points,) in pair_points(a, b)]))


def figures(by_seed: dict[int, Values], reference: dict[int, Values]) -> dict[str, Any]:
    """Preference over the reference, and the mean of each measure, with the prompt as the unit."""
    names = list(next(iter(by_seed.values())))
    means = {name: interval([v for one in by_seed.values() for v in one[name] if v is not None]) for name in names}
    shares = {name: within(figure) for name, figure in means.items() if name != "rating"}
    return {"win_rate": preferred(by_seed, reference)} | means | shares


def main() -> None:
    asked = parse(__doc__, prompts={"type": int, "default": 256}, ratings={"type": Path})
    first, mixed = cells_of(asked)
    run(first, asked)
    run(mixed, asked)
    values: dict[tuple[str, str], dict[int, Values]] = {}
    for cell in [*first, *mixed]:
        path: Path = asked.out / f"{cell.home.name}-{asked.prompts}-answers.json"
        for policy, found in harness.cached(path, lambda c=cell: measured(c, asked.prompts)).items():
            values.setdefault((cell.name.removesuffix("_ptx"), policy), {})[cell.seed] = found
    sizes, seeds = list(dict.fromkeys(cell.name for cell in first)), list(map(str, asked.seeds))
    reference = values[sizes[-1], "sft"]
    lines = {(size, policy): figures(values[size, policy], reference) for size in sizes for policy in POLICIES}
    columns = list(next(iter(lines.values())))
    table(["policy", *map(spaced, columns)], [[spaced(" ".join(key)), *row.values()] for key, row in lines.items()])

    def by_seed(ours: dict[int, Values], theirs: dict[int, Values]) -> list[float]:
        return [preferred({seed: ours[seed]}, theirs)["value"] for seed in asked.seeds]

    compared = []
    for small, large in combinations(sizes, 2):
        for policy in POLICIES:
            ours, theirs = values[small, "ppo"], values[large, policy]
            each = by_seed(ours, theirs)
            over = within(harness.mean_interval(each))
            compared.append([spaced(small), spaced(f"{large} {policy}"), preferred(ours, theirs), over, *each])
    table(["PPO model", "preferred to", "share of prompts", "over seeds", *seeds], compared)
    preferences = [[spaced(" ".join(key)), *by_seed(ours, reference)] for key, ours in values.items()]
    table(["preference by seed", *seeds], preferences)

    def means(size: str, policy: str) -> dict[int, dict[str, float]]:
        by_measure = {seed: one.items() for seed, one in values[size, policy].items()}
        return {
            seed: {name: fmean(v for v in each if v is not None) for name, each in one}
            for seed, one in by_measure.items()
        }

    changes = {
        size: harness.less({"sft": means(size, "sft"), "ppo": means(size, "ppo")}, "sft")["ppo"] for size in sizes
    }
    harness.print_means("PPO less SFT, over seeds", changes, {name: spaced(name) for name in columns[1:]})
    preference = f"share preferred to {spaced(sizes[-1])} SFT"
    for path, name, title, level in (
        (asked.picture, "win_rate", preference, 0.5),
        (asked.ratings, "rating", "rating, 1 to 7", None),
    ):
        series = {spaced(p): [(float(i), lines[size, p][name]) for i, size in enumerate(sizes)] for p in POLICIES}
        draw(path, series, "size", title, sizes, level=level)


if __name__ == "__main__":
    main()
