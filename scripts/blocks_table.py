"""Compare kinds of blocks: the gold pipeline with models of equal size, as a Markdown table.

    python scripts/blocks_table.py --seeds 0 1 2 [overrides of rlhf pipeline …]

Each pipeline is the run runs/blocks-<model>-<seed>; complete ones are not run again. Prints means over seeds, with 95% intervals
if there are several seeds. The models have the same number of parameters within 1% and see the same number of tokens.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from rlhf.commands.study_cells import mean_interval
from rlhf.report.figures import Curve, save, with_intervals

MODELS = ("tiny", "gpt1-tiny", "gpt3-tiny", "palm-tiny", "llama-tiny", "switch-tiny")
WIN_RATE = "gold win rate, PPO over SFT"

Rows = dict[str, list[dict[str, float]]]  # by model, the figures of each seed


def measure(runs_dir: Path, model: str, seed: int, overrides: list[str]) -> dict[str, float]:
    """Run the pipeline; returns figures of its evaluation."""
    run = f"blocks-{model}-{seed}"
    settings = [
        "experiment=gold",
        "tracking=jsonl",
        f"model={model}",
        f"seed={seed}",
        f"run={run}",
        f"runs_dir={runs_dir}",
    ]
    subprocess.run([sys.executable, "-m", "rlhf", "pipeline", *settings, *overrides], check=True)
    results = json.loads((runs_dir / run / "evaluate" / "results.json").read_text(encoding="utf-8"))
    return {
        "bits per byte": results["pretrain_bits_per_byte"],
        "reward accuracy": results["reward_model"]["accuracy"]["value"],
        WIN_RATE: results["gold"]["win_rate_vs_sft"]["value"],
        "mean gold score of PPO": results["gold"]["mean_score"]["ppo"],
    }


def show(values: list[float]) -> str:
    over = mean_interval(values)
    ends = "" if over["ci95"] is None else " [" + ", ".join(f"{end:.3f}" for end in over["ci95"]) + "]"
    return f"{over['mean']:.3f}{ends}"


def draw(rows: Rows, name: str, path: Path) -> None:
    """One figure of each model: the mean over the seeds, with its interval."""
    points = []
    for i, by_seed in enumerate(rows.values()):
        over = mean_interval([figures[name] for figures in by_seed])
        low, high = over["ci95"] or (over["mean"], over["mean"])
        points.append((float(i), over["mean"], low, high))
    save(
        Curve([with_intervals(name, points, line=False)], x_name="", label=name, y_name=name, names=list(rows)),
        path,
        name,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--picture", type=Path, help="an SVG or PNG file to write, with the win rates")
    overrides = [
        a for a in sys.argv[1:] if "=" in a and not a.startswith("-")
    ]  # also behind --seeds, which would take them
    options = parser.parse_args([a for a in sys.argv[1:] if a not in overrides])
    rows = {m: [measure(options.runs_dir, m, seed, overrides) for seed in options.seeds] for m in options.models}
    names = list(next(iter(rows.values()))[0])
    print("| model | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 1) + "|")
    for model, by_seed in rows.items():
        print(f"| {model} | " + " | ".join(show([figures[name] for figures in by_seed]) for name in names) + " |")
    if options.picture:
        draw(rows, WIN_RATE, options.picture)


if __name__ == "__main__":
    main()
