"""Print the figures of finished gold runs as the Markdown table of the README.

python scripts/results_table.py runs/demo runs/seed-1 runs/seed-2
"""

import json
import sys
from pathlib import Path
from typing import Any


def show(value: dict[str, Any]) -> str:
    return f"{value['value']:.3f} [{value['ci95'][0]:.3f}, {value['ci95'][1]:.3f}]"


def rows(results: dict[str, Any]) -> dict[str, str]:
    """One column of the table: what is shown, in order."""
    gold, rm = results["gold"], results["reward_model"]
    mean, correct = gold["mean_score"], gold["correct"]
    share = (rm["accuracy"]["value"] - 0.5) / (rm["noise_ceiling"] - 0.5)
    return {
        "gold win rate of PPO over SFT, temperature 1": show(gold["win_rate_vs_sft"]),
        "the same, greedy against greedy": show(gold["win_rate_greedy"]),
        "KL to SFT, nats a sequence": f"{results['kl_to_sft_nats']:.2f}",
        "mean gold score: base, base prompted, SFT, PPO": " · ".join(
            f"{mean[name]:.3f}" for name in ("base", "base_prompted", "sft", "ppo")
        ),
        "`correct`: SFT, PPO": f"{show(correct['sft'])} · {show(correct['ppo'])}",
        "reward model accuracy, held-out prompts": show(rm["accuracy"]),
        "its ceiling, and the share of the way from chance": f"{rm['noise_ceiling']:.3f}, {share:.2f}",
        "length alone; gold order; labelers' agreement": (
            f"{rm['length_baseline']:.3f} · {rm['gold_order_accuracy']:.3f} · {rm['labeler_agreement']:.3f}"
        ),
        "held-out bits per byte": f"{results['pretrain_bits_per_byte']:.3f}",
        "seconds of all stages; most memory of one, MB": (
            f"{sum(results['seconds'].values()):.0f}; {max(results['peak_rss_mb'].values()):.0f}"
        ),
    }


def main(folders: list[str]) -> None:
    columns = []
    for folder in folders:
        results = json.loads((Path(folder) / "evaluate" / "results.json").read_text(encoding="utf-8"))
        columns.append((f"seed {results['seed']}", rows(results)))
    print("| | " + " | ".join(name for name, _ in columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for label in columns[0][1]:
        print(f"| {label} | " + " | ".join(column[label] for _, column in columns) + " |")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python scripts/results_table.py RUN_FOLDER …")
    main(sys.argv[1:])
