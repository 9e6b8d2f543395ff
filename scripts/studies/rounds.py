"""Three labelling rounds: restart from the SFT model or continue, keep the rankings of earlier rounds or drop them.

    for seed in 0 1 2 3 4; do rlhf sft experiment=gold run=base-$seed seed=$seed threads=1; done     after world, tokenizer, pretrain
    python scripts/studies/rounds.py --out runs/rounds --seeds 0 1 2 3 4 --parents runs/base-0 … runs/base-4 experiment=gold threads=1

A cell is a pipeline of three rounds, each with a third of the labels and a reward model trained anew, on the parent's SFT model. Its
evaluation measures the policies of all rounds on the same prompts.
"""

import shutil
from collections.abc import Iterator, Sequence
from typing import Any

from harness import Cell, Choices, Found, draw, is_complete, less, make_cells, parse, print_means, read, rows, run

from rlhf.evaluation.statistics import win

CHOICES: Choices = {"restart": (), "continue": ("ppo.policy=ppo",), "dropped": ("round.keep_rankings=false",)}
TITLES = {
    "restart": "from SFT, all rankings",
    "continue": "from the last policy, all rankings",
    "dropped": "from SFT, the round's own rankings",
}
SETTINGS = (
    "rounds=3", "gold.comparison_prompts=3999", "ppo.episodes=2048", "round.later_reward_epochs=null", "reward.audit=0",
    "evaluate.best_of=0",
)  # fmt: skip
TAKEN = ("world", "tokenizer", "pretrain", "sft")


def round_runs(cell: Cell) -> list[str]:
    """The names of a cell's runs, one per round."""
    return [f"{cell.home.name}-round-1", f"{cell.home.name}-round-2", cell.home.name]


def run_cells(cells: Sequence[Cell], asked: Any) -> None:
    """The first round of all arms is that of `restart`: it is copied."""
    for name in CHOICES:
        mine = [cell for cell in cells if cell.name == name]
        for cell in mine:
            source, copy = (asked.out / f"{arm}-seed{cell.seed}-round-1" for arm in ("restart", name))
            if is_complete(source / "ppo") and not copy.exists():
                shutil.copytree(source, copy)
        if mine:
            run(mine, asked)


def figures(cell: Cell) -> Iterator[dict[str, float]]:
    """The figures of each round."""
    results, samples = cell.results(), rows(cell.home / "evaluate" / "samples.jsonl")
    for name in round_runs(cell):
        policy = "ppo" if name == cell.home.name else name
        summary = read(cell.home.with_name(name) / "reward" / "stage.json")["summary"]
        yield {
            "gold": results["gold"]["mean_score"][policy],
            "win_rate": sum(win(row["gold"][policy], row["gold"]["sft"]) for row in samples) / len(samples),
            "kl": results["kl"][policy]["value"],
            "accuracy": summary["accuracy"],
        }


def main(asked: Any) -> None:
    """Run the cells, then print the table by round and that of differences at the last round, and draw the picture."""
    cells = make_cells(asked, CHOICES, TAKEN, {"pipeline": SETTINGS})
    cells = [cell.changed(f"evaluate.compare=[{','.join(round_runs(cell)[:2])}]") for cell in cells]
    run_cells(cells, asked)
    found: Found = {}
    for cell in cells:
        for number, row in enumerate(figures(cell), 1):
            found.setdefault(f"{cell.name} {number}", {})[cell.seed] = row
    means = print_means("arm and round", found)
    names = dict.fromkeys(cell.name for cell in cells)
    changes: Found = {}
    for name in names:
        changes[f"{name}: round 3 less round 1"] = less(found, f"{name} 1")[f"{name} 3"]
        if name != "restart" and "restart" in names:
            changes[f"{name} less restart, round 3"] = less(found, "restart 3")[f"{name} 3"]
    print_means("paired over seeds", changes, sign="+")
    series = {TITLES[name]: [(n, means[f"{name} {n:g}"]["gold"]) for n in (1.0, 2.0, 3.0)] for name in names}
    draw(asked.picture, series, "labelling round", "gold score")


if __name__ == "__main__":
    main(parse(__doc__))
