"""What makes PPO steadier if a quarter of the rankings are wrong? Ensembles, averages, bounds, and the critic.

    python scripts/studies/steadier.py --out runs/steadier --seeds 0 1 2 3 4 --parents runs/seed-0 … runs/seed-4 experiment=gold threads=1

The parents' rankings, a quarter of them reversed, train three reward models per seed. Each arm is PPO against them, evaluated after
every update on 256 dev prompts. The arms are compared with the first model alone at one KL, by linear interpolation along each run.
"""

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from harness import Cell, cached, draw, make_cells, mean_interval, parse, rows, run, show, table

MODELS = 3
WRONG = 0.25
LEVELS = (1.0, 1.5)  # nats per sequence
AVERAGED = "averaged_reference"  # an arm, and the script that runs it
# Settings of arms that pay the first model's score as `one` does; the others are kinds of steadier_rewards.py
CRITICS = {"one": (), "two_lambdas": ("ppo.advantages='{FUNCTIONS}:two_lambdas'",), "first_critic": ("ppo.critic_warmup_updates=3",),
           "new_critic": ("ppo.critic=sft",)}  # fmt: skip
ARMS = (*CRITICS, AVERAGED, "mean", "lower", "worst", "averaged", "bounded", "even")
FUNCTIONS = Path(__file__).with_name("steadier_rewards.py")
BEFORE = ("world", "tokenizer", "pretrain", "sft", "label")
REWARD = ("reward.audit=0", "reward.fit_head=true")  # one start for all heads, so that weights can be averaged
PPO = ("ppo.eval_prompts=256", "ppo.eval_every=1", "ppo.ema_decay=null", "ppo.samples_every=100",
       "checkpoints.every_seconds=0", "checkpoints.keep_every=4")  # fmt: skip


def spoil(parent: Path, out: Path) -> Path:
    """The parent's rankings with a quarter of those that train reversed, drawn by their names."""
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        for row in rows(parent / "label" / "comparisons.jsonl"):
            if row["metadata"]["split"] == "train" and random.Random(f"wrong-{row['id']}").random() < WRONG:
                row |= {"ranking": row["ranking"][::-1], "ratings": {}}
            lines.append(json.dumps(row))
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return out


def prepare(asked: Any) -> dict[int, dict[str, Any]]:
    """By seed: the reward models' folders and the file of facts about SFT's answers. Trains what is missing."""
    members: list[Cell] = []
    for number in range(MODELS):
        for cell in make_cells(asked_all(asked), {f"model{number}": ()}, BEFORE, {"reward": REWARD}):
            labels = spoil(cell.parent, asked.out / f"labels-seed{cell.seed}.jsonl")
            ((command, *settings),) = cell.steps
            settings = [s for s in settings if not s.startswith("seed=")]
            step = (command, *settings, f"seed={100 * number + cell.seed}", f"data.comparisons='{labels}'")
            members.append(replace(cell, steps=(step,)))
    run(members, asked.processes)
    found = {}
    for seed in asked.seeds:
        folders = [str(cell.home / "reward" / "model") for cell in members if cell.seed == seed]
        facts = asked.out / f"facts-seed{seed}.json"
        cached(facts, lambda folders=folders, facts=facts, seed=seed: measure(folders, facts, asked, seed))
        found[seed] = {"models": folders, "facts": str(facts)}
    return found


def asked_all(asked: Any) -> Any:
    """The same without --cells, which names arms."""
    from argparse import Namespace

    return Namespace(**{**vars(asked), "cells": []})


def measure(folders: list[str], facts: Path, asked: Any, seed: int) -> dict[str, Any]:
    """Facts about the first model's scores of SFT's ranked answers; writes the average of the models' weights, recalibrated."""
    from statsmodels.nonparametric.smoothers_lowess import lowess
    from steadier_rewards import loaded, scores_of

    from rlhf.data.chat_template import encode_responses
    from rlhf.data.tokenizer import load_tokenizer

    tokenizer, prompts, tokens = load_tokenizer(folders[0]), [], []
    for row in rows(asked.out / f"labels-seed{seed}.jsonl")[:400]:
        answers = [answer for answer in row["responses"] if answer["metadata"]["ended"]]
        prompts += [row["prompt"]] * len(answers)
        tokens += [[*ids, tokenizer.eos_token_id] for ids in encode_responses(tokenizer, [a["text"] for a in answers])]
    first = scores_of(folders[:1], prompts, tokens)[0].double().numpy()
    lengths = np.array([len(ids) for ids in tokens], float)
    curve = np.unique(lowess(first - first.mean(), lengths, frac=2 / 3), axis=0)
    average = copy.deepcopy(loaded(folders[0]))
    states = [loaded(folder).state_dict() for folder in folders]
    average.load_state_dict({name: sum(s[name] for s in states) / MODELS for name in states[0]})
    target = facts.with_suffix("") / "model"
    average.calibrate(1.0, 0.0)
    average.save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))
    raw = scores_of([str(target)], prompts, tokens)[0]
    gain = float(first.std() / raw.double().std())
    average.calibrate(gain, float(raw.double().mean()) - float(first.mean()) / gain)
    average.save_pretrained(str(target))
    loaded.cache_clear()
    return {"sft_mean": float(first.mean()), "by_length": curve.T.tolist(), "averaged": str(target)}


def with_arm(cell: Cell, prepared: dict[str, Any]) -> Cell:
    """The cell with its arm's sources."""
    ((command, *settings),) = cell.steps
    models, first = prepared["models"], str(Path(prepared["models"][0]).parent)
    sources, program = [f"'{first}'"], cell.program
    if cell.name == AVERAGED:
        program = (str(FUNCTIONS.with_name(f"{AVERAGED}.py")),)
    elif cell.name in CRITICS:
        settings += [text.format(FUNCTIONS=FUNCTIONS) for text in CRITICS[cell.name]]
    else:
        sources += [f"'{FUNCTIONS}:reward'"]
        names = ",".join(f"'{folder}'" for folder in models)
        settings += [f"ppo.reward_parameters={{kind:{cell.name},models:[{names}],facts:'{prepared['facts']}'}}"]
    return replace(cell, steps=((command, *settings, f"ppo.rewards=[{','.join(sources)}]"),), program=program)


def along(cell: Cell) -> list[dict[str, float]]:
    """KL, learned and true reward after each update."""
    return [row for row in rows(cell.home / "ppo" / "metrics.jsonl") if "eval/dev/kl" in row]


def figures(cell: Cell, one: Cell) -> dict[str, float]:
    """The true reward at each level of KL (of the first crossing; none if it is not reached), and at the end; and how many updates it
    takes to 90% of what `one` gains of true reward in all of its updates.
    """
    path = along(cell)
    kl, gold = ([row[f"eval/dev/{name}"] for row in path] for name in ("kl", "gold/total"))
    found = {"gold_end": gold[-1], "kl_end": kl[-1], "learned_end": path[-1]["eval/dev/scores"]}
    for level in LEVELS:
        after = next((i for i, value in enumerate(kl) if value >= level), None)
        if after:
            share = (level - kl[after - 1]) / (kl[after] - kl[after - 1])
            found[f"gold_{level:g}"] = gold[after - 1] + share * (gold[after] - gold[after - 1])
    first, *_, end = (row["eval/dev/gold/total"] for row in along(one))
    wanted = first + 0.9 * (end - first)
    reached = next((i for i, value in enumerate(gold) if value >= wanted), None)
    if reached:
        found["updates"] = reached - 1 + (wanted - gold[reached - 1]) / (gold[reached] - gold[reached - 1])
    return found | {"explained": path[-1].get("val/explained_var", float("nan"))}


def main() -> None:
    asked = parse(__doc__)
    prepared = prepare(asked)
    cells = [
        with_arm(cell, prepared[cell.seed]) for cell in make_cells(asked, dict.fromkeys(ARMS, ()), BEFORE, {"ppo": PPO})
    ]
    for seed in asked.seeds:  # seed by seed: what is done when time ends is paired
        run([cell for cell in cells if cell.seed == seed], asked.processes)
    ones = {cell.seed: cell for cell in cells if cell.name == "one"}
    found = {
        name: {cell.seed: figures(cell, ones[cell.seed]) for cell in cells if cell.name == name}
        for name in dict.fromkeys(c.name for c in cells)
    }
    keys = [*(f"gold_{level:g}" for level in LEVELS), "gold_end", "kl_end", "learned_end", "updates", "explained"]
    table(
        ["arm", *keys], [[name, *(mean_of(by_seed.values(), key) for key in keys)] for name, by_seed in found.items()]
    )
    lines = []
    for name, by_seed in found.items():
        if name != "one":
            pairs = [(row, found["one"][seed]) for seed, row in by_seed.items()]
            both = {k: [a[k] - b[k] for a, b in pairs if k in a and k in b] for k in keys}
            lines.append([name, *(show(mean_interval(d), sign="+") if d else "–" for d in both.values())])
    table(["less `one`, paired over seeds", *keys], lines)
    series = {n: [(mean_of(f.values(), "kl_end")["mean"], mean_of(f.values(), "gold_end"))] for n, f in found.items()}
    draw(asked.picture, series, "KL, nats per sequence", "gold score", line=False)


def mean_of(found: Any, key: str) -> Any:
    values = [row[key] for row in found if key in row]
    return mean_interval(values) if values else None


if __name__ == "__main__":
    main()
