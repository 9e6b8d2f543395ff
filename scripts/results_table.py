"""Print the figures of finished gold runs as the Markdown table of the README, with their means where there are several.

    python scripts/results_table.py runs/demo runs/seed-1 runs/seed-2

Rows on the way tell whether a run stayed whole, in all its labelling rounds: the largest KL of an update, the least gold score
of one, the critic's explained variance at the end, and best-of-n beside PPO.
"""

import json
import sys
from pathlib import Path
from typing import Any

from rlhf.runs.folders import rounds_before


def show(value: dict[str, Any]) -> str:
    return f"{value['value']:.3f} [{value['ci95'][0]:.3f}, {value['ci95'][1]:.3f}]"


def training(folder: Path) -> dict[str, float]:
    """What happened on the way, in all labelling rounds: extremes over PPO's updates, and the last explained variance.

    Gold is taken twice, each time less the SFT model's: of the looks at held-out prompts, which see the averaged policy where
    there is one, and of the rollouts, which the policy itself wrote. Updates that train the critic alone are SFT's.
    """
    found: dict[str, list[float]] = {"kl": [], "looks": [], "rollouts": []}
    for run in (folder, *rounds_before(folder)):
        record = json.loads((run / "ppo" / "stage.json").read_text(encoding="utf-8"))
        alone = record["config"]["ppo"]["critic_warmup_updates"]
        rows = [json.loads(line) for line in (run / "ppo" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        updates = [row for row in rows if "objective/kl" in row]
        looks = [row for row in rows if "eval/dev/gold/total" in row]  # the first is SFT's
        sampled = [row["gold/total"] for row in updates]  # by the policy before the update
        start = sum(sampled[: alone + 1]) / (alone + 1)
        found["kl"] += [row["objective/kl"] for row in updates]
        found["rollouts"] += [gold - start for gold in sampled[alone + 1 :]]
        found["looks"] += [
            row["eval/dev/gold/total"] - looks[0]["eval/dev/gold/total"]
            for row in looks
            if row["progress/step"] > alone
        ]
        if run == folder:
            found["explained_variance"] = [updates[-1]["val/explained_var"]]
    return {
        "kl_most": max(found["kl"]),
        "gold_least": min(found["looks"]),
        "rollout_least": min(found["rollouts"]),
        "explained_variance": found["explained_variance"][0],
    }


def rows(results: dict[str, Any], way: dict[str, float]) -> dict[str, str]:
    """One column of the table: what is shown, in order."""
    best, held_out = results["best_of_n"], results["reward_model"]["held_out_labelers"]["accuracy"]
    weights = results["reward_model"]["gold_regression"]["parts"]
    gold, rm = results["gold"], results["reward_model"]
    mean, correct = gold["mean_score"], gold["correct"]
    share = (rm["accuracy"]["value"] - 0.5) / (rm["noise_ceiling"] - 0.5)
    return {
        "gold win rate of PPO over SFT, temperature 1": show(gold["win_rate_vs_sft"]),
        "the same, greedy against greedy": show(gold["win_rate_greedy"]),
        "KL to SFT, nats per sequence": f"{results['kl_to_sft_nats']:.2f}",
        "mean gold score: base, base prompted, SFT, PPO": " · ".join(
            f"{mean[name]:.3f}" for name in ("base", "base_prompted", "sft", "ppo")
        ),
        "`correct`: SFT, PPO": f"{show(correct['sft'])} · {show(correct['ppo'])}",
        f"best of {best['n']} by the reward model: gold score, win rate, KL (and its bound)": (
            f"{best['gold']:.3f} · {show(best['win_rate_vs_sft'])} · {best['kl_estimate_nats']:.2f} ({best['kl_bound_nats']:.2f})"
        ),
        "on the way: largest KL; least gold less SFT's, held-out and of rollouts; last explained variance": (
            f"{way['kl_most']:.2f} · {way['gold_least']:+.3f}, {way['rollout_least']:+.3f} · {way['explained_variance']:.2f}"
        ),
        "reward model accuracy, held-out prompts": show(rm["accuracy"]),
        "on held-out labelers": show(held_out),
        "what it pays for, standardised weights": ", ".join(
            f"{part} {found['weight']:.2f}" for part, found in weights.items() if found["weight"] is not None
        ),
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
    columns: list[tuple[str, dict[str, str]]] = []
    every: list[dict[str, Any]] = []
    for folder in folders:
        results = json.loads((Path(folder) / "evaluate" / "results.json").read_text(encoding="utf-8"))
        columns.append((f"seed {results['seed']}", rows(results, training(Path(folder)))))
        every.append(results)
    print("| | " + " | ".join(name for name, _ in columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for label in columns[0][1]:
        print(f"| {label} | " + " | ".join(column.get(label, "") for _, column in columns) + " |")
    if len(every) > 1:

        def mean(values: list[float]) -> float:
            return sum(values) / len(values)

        print(
            f"\nMean over {len(every)} seeds: win rate {mean([r['gold']['win_rate_vs_sft']['value'] for r in every]):.3f}, "
            f"greedy {mean([r['gold']['win_rate_greedy']['value'] for r in every]):.3f}, "
            f"KL {mean([r['kl_to_sft_nats'] for r in every]):.2f} nats; "
            f"gold score of PPO {mean([r['gold']['mean_score']['ppo'] for r in every]):.4f}, "
            f"of best of {every[0]['best_of_n']['n']} {mean([r['best_of_n']['gold'] for r in every]):.4f} "
            f"at {mean([r['best_of_n']['kl_estimate_nats'] for r in every]):.2f} nats."
        )


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python scripts/results_table.py RUN_FOLDER …")
    main(sys.argv[1:])
