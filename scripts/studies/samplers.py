"""PPO with rollout.engine=vllm beside native: the same settings and parents, over seeds.

    python scripts/studies/samplers.py --out runs/samplers --seeds 0 1 2 --parents runs/a runs/b runs/c experiment=gold ppo.episodes=2048

Run it in an environment that has vLLM. Both draw their own random numbers, so what is compared is the outcome: held-out prompts after
the last update, and the rollouts of all updates.
"""

from harness import Cell, collect, less, make_cells, over_seeds, parse, run, show, table, updates_of

CHOICES = {"native": (), "vllm": ("rollout.engine=vllm",)}
TAKEN = ("world", "tokenizer", "pretrain", "sft", "reward")
HELD_OUT = ("eval/dev/scores", "eval/dev/kl", "eval/dev/gold/total")
ROLLOUTS = ("objective/scores", "objective/kl", "gold/total", "rollout/response_len")
MISMATCH = ("rollout/mismatch", "rollout/mismatch_p99", "rollout/mismatch_outside", "rollout/mismatch_ess")


def figures(cell: Cell) -> dict[str, float]:
    """Of the last update on held-out prompts, and means over the updates of a cell's rollouts."""
    updates = updates_of(cell.home, "objective/scores")
    found = {name: updates[-1][name] for name in HELD_OUT}
    averaged = ROLLOUTS if cell.name == "native" else (*ROLLOUTS, *MISMATCH)
    found |= {name: sum(row[name] for row in updates) / len(updates) for name in averaged}
    if cell.name == "vllm":
        seconds = [sum(row[f"time/{phase}_s"] for phase in ("rollout", "score", "update")) for row in updates]
        weights = [row["time/weights_s"] for row in updates]
        found |= {"time/weights_s": sum(weights) / len(updates), "share of an update": sum(weights) / sum(seconds)}
    return found


if __name__ == "__main__":
    asked = parse(__doc__)
    found = collect(run(make_cells(asked, CHOICES, TAKEN, {"ppo": ()}), asked), figures)
    means = over_seeds(found)
    changes = over_seeds(less(found, "native"))["vllm"]
    lines = [
        [key, *(means[name][key] for name in CHOICES), show(changes[key], sign="+")] for key in (*HELD_OUT, *ROLLOUTS)
    ]
    table(["metric", *CHOICES, "vllm less native, paired"], lines)
    table(["vllm alone", "value"], [[k, show(means["vllm"][k], 8)] for k in means["vllm"] if k not in means["native"]])
