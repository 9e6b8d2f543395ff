"""Three labelling rounds: restart from the SFT model or continue, keep the rankings of earlier rounds or drop them.

    for seed in 0 1 2 3 4; do rlhf sft experiment=gold run=base-$seed seed=$seed threads=1; done     after world, tokenizer, pretrain
    python scripts/studies/rounds.py --out runs/rounds --seeds 0 1 2 3 4 --parents runs/base-0 … runs/base-4 experiment=gold threads=1

A cell is a pipeline of three rounds, each with a third of the labels and a reward model trained anew, on the parent's SFT model. Its
evaluation measures the policies of all rounds on the same prompts.
"""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness import Cell, draw, is_complete, make_cells, mean_interval, over_seeds, parse, read, rows, run, show, table

CHOICES: dict[str, Sequence[str]] = {
    "restart": (),
    "continue": ("ppo.policy=ppo",),
    "dropped": ("round.keep_rankings=false",),
}
TITLES = {
    "restart": "from SFT, all rankings",
    "continue": "from the last policy, all rankings",
    "dropped": "from SFT, the round's own rankings",
}
SETTINGS = (
    "rounds=3",
    "gold.comparison_prompts=3999",
    "ppo.episodes=2048",
    "round.later_reward_epochs=null",
    "reward.audit=0",
    "evaluate.best_of=0",
)
TAKEN = ("world", "tokenizer", "pretrain", "sft")
FIGURES = ("gold", "win_rate", "kl", "accuracy")


def round_runs(cell: Cell) -> list[str]:
    """The names of a cell's runs, one per round."""
    return [f"{cell.home.name}-round-1", f"{cell.home.name}-round-2", cell.home.name]


def run_cells(cells: Sequence[Cell], processes: int) -> None:
    """The first round of all arms is that of `restart`: it is copied."""
    for name in CHOICES:
        mine = [cell for cell in cells if cell.name == name]
        for cell in mine if name != "restart" else []:
            source = cell.home.with_name(f"restart-seed{cell.seed}-round-1")
            copy = cell.home.with_name(f"{cell.home.name}-round-1")
            if is_complete(source / "ppo") and not copy.exists():
                shutil.copytree(source, copy)
        if mine:
            run(mine, processes)


def figures(cell: Cell) -> list[dict[str, float]]:
    """The figures of each round."""
    results, samples = cell.results(), rows(cell.home / "evaluate" / "samples.jsonl")
    found = []
    for name in round_runs(cell):
        policy = "ppo" if name == cell.home.name else name
        wins = [
            (row["gold"][policy] > row["gold"]["sft"]) + (row["gold"][policy] == row["gold"]["sft"]) / 2
            for row in samples
        ]
        summary = read(cell.home.with_name(name) / "reward" / "stage.json")["summary"]
        found.append(
            {
                "gold": results["gold"]["mean_score"][policy],
                "win_rate": sum(wins) / len(wins),
                "kl": results["kl"][policy]["value"],
                "accuracy": summary["accuracy"],
            }
        )
    return found


def main(asked: Any) -> None:
    """Run the cells, then print the table by round and that of differences at the last round, and draw the picture."""
    cells = [with_rounds(cell) for cell in make_cells(asked, CHOICES, TAKEN, {"pipeline": SETTINGS})]
    run_cells(cells, asked.processes)
    found = {(name, number): {cell.seed: figures(cell)[number] for cell in cells if cell.name == name}
             for name in dict.fromkeys(cell.name for cell in cells) for number in range(3)}  # fmt: skip
    means = over_seeds({f"{name} {number + 1}": by_seed for (name, number), by_seed in found.items()})
    table(["arm and round", *FIGURES], [[name, *(row[key] for key in FIGURES)] for name, row in means.items()])
    lines = []
    for name in CHOICES:
        for a, b, title in [((name, 2), (name, 0), f"{name}: round 3 less round 1")] + [
            ((name, 2), ("restart", 2), f"{name} less restart, round 3")
        ] * (name != "restart"):
            if a in found and b in found:
                pairs = [(found[a][seed], found[b][seed]) for seed in found[a]]
                lines.append(
                    [title, *(show(mean_interval([x[k] - y[k] for x, y in pairs]), sign="+") for k in FIGURES)]
                )
    table(["paired over seeds", *FIGURES], lines)
    series = {
        TITLES[name]: [(n + 1.0, means[f"{name} {n + 1}"]["gold"]) for n in range(3)]
        for name in CHOICES
        if f"{name} 1" in means
    }
    draw(asked.picture, series, "labelling round", "gold score")


def with_rounds(cell: Cell) -> Cell:
    """The cell with an evaluation of all its rounds' policies."""
    ((command, *settings),) = cell.steps
    earlier = ",".join(round_runs(cell)[:2])
    return replace(cell, steps=((command, *settings, f"evaluate.compare=[{earlier}]"),))


if __name__ == "__main__":
    main(parse(__doc__))
