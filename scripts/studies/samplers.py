"""PPO with rollout.engine=vllm beside native: the same settings and parents, over seeds.

    python scripts/studies/samplers.py --out runs/samplers --seeds 0 1 2 --parents runs/a runs/b runs/c experiment=gold ppo.episodes=2048

Run it in an environment that has vLLM. Both draw their own random numbers, so what is compared is the outcome: held-out prompts after
the last update, and the rollouts of all updates.
"""

from typing import Any

from harness import Cell, make_cells, mean_interval, over_seeds, parse, rows, run, show, table

CHOICES = {"native": (), "vllm": ("rollout.engine=vllm",)}
TAKEN = ("world", "tokenizer", "pretrain", "sft", "reward")
HELD_OUT = ("eval/dev/scores", "eval/dev/kl", "eval/dev/gold/total")
ROLLOUTS = ("objective/scores", "objective/kl", "gold/total", "rollout/response_len")
MISMATCH = ("rollout/mismatch", "rollout/mismatch_p99", "rollout/mismatch_outside", "rollout/mismatch_ess")


def figures(cell: Cell) -> dict[str, float]:
    """Of the last update on held-out prompts, and means over the updates of a cell's rollouts."""
    updates = [row for row in rows(cell.home / "ppo" / "metrics.jsonl") if "objective/scores" in row]
    found = {name: updates[-1][name] for name in HELD_OUT}
    found |= {name: sum(row[name] for row in updates) / len(updates) for name in ROLLOUTS}
    if cell.name == "vllm":
        found |= {name: sum(row[name] for row in updates) / len(updates) for name in MISMATCH}
        seconds = [sum(row[f"time/{phase}_s"] for phase in ("rollout", "score", "update")) for row in updates]
        weights = [row["time/weights_s"] for row in updates]
        found |= {"time/weights_s": sum(weights) / len(updates), "share of an update": sum(weights) / sum(seconds)}
    return found


def main(asked: Any) -> None:
    """Run the cells, then print each engine's means and the paired differences."""
    cells = make_cells(asked, CHOICES, TAKEN, {"ppo": ()})
    run(cells, asked.processes)
    found = {name: {c.seed: figures(c) for c in cells if c.name == name} for name in CHOICES}
    means = over_seeds(found)
    lines = []
    for key in (*HELD_OUT, *ROLLOUTS):
        pairs = [found["vllm"][seed][key] - found["native"][seed][key] for seed in found["native"]]
        lines.append([key, *(show(means[name][key]) for name in CHOICES), show(mean_interval(pairs), sign="+")])
    table(["metric", *CHOICES, "vllm less native, paired"], lines)
    table(["vllm alone", "value"], [[k, show(means["vllm"][k], 8)] for k in means["vllm"] if k not in means["native"]])


if __name__ == "__main__":
    main(parse(__doc__))
