"""An encoder of our own as reward model beside a causal one, on the gold world, at equal parameters and pretraining tokens.

    python scripts/studies/encoders.py --out runs/encoders --parents runs/gold-0 runs/gold-1 runs/gold-2 experiment=gold rounds=1 threads=1

A parent is a run with finished labels. Its own pretrained model is the causal one; the encoders are pretrained on its corpus with its
tokenizer, for as many tokens. Then a reward model is fine-tuned from each as a text classifier (reward.model), beside the recipe's own
on the SFT model's trunk, and PPO runs against it.
"""

import copy
from typing import Any

from harness import Cell, make_cells, over_seeds, parse, read, run, spaced, table
from safetensors import safe_open

ENCODER = ("model.attention=bidirectional",)
KINDS = {
    "masked": ENCODER,
    "masked_next": (*ENCODER, "pretrain.pairs=next", "pretrain.isolate_documents=false"),
    "masked_order": (*ENCODER, "pretrain.pairs=order", "pretrain.isolate_documents=false"),
}
TAKEN = ("world", "tokenizer", "pretrain", "sft", "label")
STEPS = {"reward": (), "ppo": (), "evaluate": ("evaluate.best_of=0",)}


def mean(rows: list[Any], key: str) -> float:
    values = [row[key]["value"] for row in rows if row[key] is not None]
    return sum(values) / len(values)


def figures(cell: Cell) -> dict[str, float]:
    """What the reward model and the policy trained against it are worth."""
    results, attacks = cell.results(), read(cell.home / "reward" / "audit.json")["attacks"]
    with safe_open(cell.home / "reward" / "model" / "model.safetensors", "pt") as file:
        parameters = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 (it is no dict)
    return {
        "thousand parameters": parameters / 1000,
        "pair accuracy": results["reward_model"]["accuracy"]["value"],
        "pairs that an attack flips, mean": mean(attacks, "flips"),
        "worst attack": max(row["flips"]["value"] for row in attacks if row["flips"] is not None),
        "gold win rate, PPO over SFT": results["gold"]["win_rate_vs_sft"]["value"],
        "gold score of PPO": results["gold"]["mean_score"]["ppo"],
    }


def main() -> None:
    asked = parse(__doc__)
    bases = make_cells(asked, KINDS, TAKEN[:2], {"pretrain": ()})
    run(bases, asked.processes)
    cells = []
    for seed, parent in zip(asked.seeds, asked.parents, strict=True):
        one = copy.copy(asked)
        one.seeds, one.parents, one.cells = [seed], [parent], []
        folders = {"causal": parent, **{base.name: base.home for base in bases if base.seed == seed}}
        choices = {name: (f"reward.model='{home / 'pretrain' / 'model'}'",) for name, home in folders.items()}
        cells += make_cells(
            one, {f"reward_{name}": more for name, more in {**choices, "sft_trunk": ()}.items()}, TAKEN, STEPS
        )
    run(cells, asked.processes)
    found: dict[str, dict[int, dict[str, float]]] = {}
    for cell in cells:
        found.setdefault(cell.name.removeprefix("reward_"), {})[cell.seed] = figures(cell)
    means = over_seeds(found)
    table(
        ["reward model from", *next(iter(means.values()))],
        [[spaced(name), *row.values()] for name, row in means.items()],
    )
    causal = found.pop("causal", {})
    less = {
        name: {seed: {key: value - causal[seed][key] for key, value in row.items()} for seed, row in rows.items()}
        for name, rows in found.items()
        if causal
    }
    table(
        ["less causal", *next(iter(means.values()))],
        [[spaced(name), *row.values()] for name, row in over_seeds(less).items()],
    )


if __name__ == "__main__":
    main()
