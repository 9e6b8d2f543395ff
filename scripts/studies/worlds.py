"""Does the built-in world predict which method is better on a pretrained model? An order of methods per world, and their rank correlation.

    python scripts/studies/worlds.py --out runs/in-gold --parents runs/gold-0 runs/gold-1 --less=kl.coef=0.28 experiment=gold rounds=1
    python scripts/studies/worlds.py --out runs/in-real --parents runs/sent-0 runs/sent-1 --less=kl.target=2 experiment=sentiment … \
        --against runs/in-gold --picture worlds.png

A parent is a finished run of one labelling round with `evaluate.baselines=[rejection,dpo]`: its PPO, rejection sampling, DPO and best-of-16
are four of the methods. Three more have its SFT model and rankings: PPO with less KL (the settings of --less), PPO on the mean of three
reward models, GRPO. A method's figure is its true win rate over the SFT model. The correlation has two intervals: for these methods and
seeds, every win rate is drawn anew from its own interval (by prompt); for other methods of this kind, by Fisher's z with the variance
1.06 / (n - 3) (Fieller, Hartley and Pearson 1957).
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from harness import Cell, Choices, draw, make_cells, parse, read, run, show, spaced, table

BEFORE = ("world", "tokenizer", "pretrain", "sft", "label")
AFTER = (*BEFORE, "reward")
GRPO = ("ppo.advantages=grpo", "ppo.responses_per_prompt=4", "ppo.critic_warmup_updates=0", "ppo.shared_critic=false",
        "ppo.score_by_token=false")  # fmt: skip
EVALUATION = {"evaluate": ("evaluate.best_of=0",)}
BEST = "best_of_16"
DRAWS = 2000


def models_of(asked: Any) -> list[Cell]:
    """Two more reward models per seed: another head, and the rankings in another order."""
    others = {"reward_a": 100, "reward_b": 200}
    cells = make_cells(asked, dict.fromkeys(others, ()), BEFORE, {"reward": ("reward.audit=0",)})
    return [cell.changed(f"seed={cell.seed + others[cell.name]}") for cell in cells]


def methods_of(asked: Any, models: Sequence[Cell]) -> list[Cell]:
    """A cell per method and seed."""

    def choices(seed: int, parent: Path) -> Choices:
        sources = [parent / "reward", *(cell.home / "reward" for cell in models if cell.seed == seed)]
        three = "ppo.rewards=[" + ",".join(f"'{source}'" for source in sources) + "]"
        mean = (three, "ppo.reward_weights=[0.3333,0.3333,0.3334]")
        return {"ppo_less_kl": asked.less, "grpo": GRPO, "ensemble": mean}

    return make_cells(asked, choices, AFTER, {"ppo": (), **EVALUATION})


def figures(asked: Any, cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """{method: {seed: {"win_rate", "error", "kl"}}}; the error is the standard error by prompt, the KL in nats."""
    found: dict[str, dict[str, Any]] = {}
    parents = [("ppo", seed, parent) for seed, parent in zip(asked.seeds, asked.parents, strict=True)]
    for name, seed, home in [*parents, *((cell.name, cell.seed, cell.home) for cell in cells)]:
        results = read(home / "evaluate" / "results.json")
        rows = {name: (results["gold"]["win_rate_vs_sft"], results["kl_to_sft_nats"])}
        if name == "ppo":
            rows[BEST] = (results["best_of_n"]["win_rate_vs_sft"], results["best_of_n"]["kl_bound_nats"])
            rows |= {k: (f["win_rate_vs_sft"], f["kl_to_sft_nats"]) for k, f in results["baselines"].items()}
        for method, (rate, kl) in rows.items():
            error = (rate["ci95"][1] - rate["ci95"][0]) / 2 / 1.96
            found.setdefault(method, {})[str(seed)] = {"win_rate": rate["value"], "error": error, "kl": kl}
    return found


def correlation(here: dict[str, dict[str, Any]], there: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Spearman's correlation of the methods' mean win rates in two worlds, with the two intervals above."""
    from scipy.stats import spearmanr

    rng, names = np.random.default_rng(0), [name for name in here if name in there]

    def means(world: dict[str, dict[str, Any]], noise: float) -> list[float]:
        by_name = [world[name].values() for name in names]
        return [np.mean([f["win_rate"] + noise * f["error"] * rng.normal() for f in by_seed]) for by_seed in by_name]

    drawn = [spearmanr(means(here, 1.0), means(there, 1.0)).statistic for _ in range(DRAWS)]
    value = float(spearmanr(means(here, 0.0), means(there, 0.0)).statistic)
    z, half = np.arctanh(value), 1.96 * math.sqrt(1.06 / (len(names) - 3))
    others = np.tanh([z - half, z + half]).tolist()
    return {"value": value, "ci95": np.quantile(drawn, (0.025, 0.975)).tolist(), "other_methods": others}


def mean_of(by_seed: dict[str, Any], key: str) -> float:
    return fmean(f[key] for f in by_seed.values())


def win_rate(by_seed: dict[str, Any]) -> dict[str, Any]:
    """The mean over seeds, with the interval by prompt."""
    mean = mean_of(by_seed, "win_rate")
    half = 1.96 * math.sqrt(sum(f["error"] ** 2 for f in by_seed.values())) / len(by_seed)
    return {"value": mean, "ci95": [mean - half, mean + half]}


def main() -> None:
    asked = parse(__doc__, less={"action": "append", "default": []}, against={"type": Path})
    models = run(models_of(asked), asked)
    found = figures(asked, run(methods_of(asked, models), asked))
    (asked.out / "methods.json").write_text(json.dumps(found), encoding="utf-8")
    ordered = sorted(found, key=lambda name: -mean_of(found[name], "win_rate"))
    lines = [
        [spaced(n), win_rate(found[n]), *(f["win_rate"] for f in found[n].values()), mean_of(found[n], "kl")]
        for n in ordered
    ]
    table(["method", "true win rate over SFT", *(f"seed {s}" for s in asked.seeds), "KL, nats"], lines)
    if asked.against:
        other = read(asked.against / "methods.json")
        figure = correlation(found, other)
        low, high = figure["other_methods"]
        print(f"rank correlation over {len(found)} methods: {show(figure)}; for others [{low:.3f}, {high:.3f}]")
        points = {spaced(n): [(mean_of(other[n], "win_rate"), win_rate(found[n]))] for n in ordered if n in other}
        x, y = (f"true win rate over SFT, {folder.name}" for folder in (asked.against, asked.out))
        draw(asked.picture, points, x, y, line=False)


if __name__ == "__main__":
    main()
