"""Print the figures of finished gold runs as the Markdown table of the README, with means if there are several.

    python scripts/studies/results_table.py runs/demo runs/seed-1 runs/seed-2

The row "during training" shows whether PPO was stable, over all labelling rounds: the largest KL of an update, the lowest gold
score, and the critic's explained variance at the end.
"""

import statistics
import sys
from pathlib import Path
from typing import Any

from harness import read, show, table, updates_of

from rlhf.runs.folders import rounds_before
from rlhf.runs.run_files import entry_at

GOLD = "eval/dev/gold/total"


def training(folder: Path) -> dict[str, float]:
    """Extremes over PPO's updates in all labelling rounds, and the last explained variance.

    The gold score is measured twice, each time minus the SFT model's: at the evaluations on held-out prompts, which use the averaged
    policy if there is one, and on the rollouts. Updates that train only the critic count as the SFT model's.
    """
    kl, held_out, rollouts = list[float](), list[float](), list[float]()
    for run in (folder, *rounds_before(folder)):
        warmup = read(run / "ppo" / "stage.json")["config"]["ppo"]["critic_warmup_updates"]
        updates, evaluated = updates_of(run), updates_of(run, GOLD)  # the first evaluation is of SFT
        sampled = [row["gold/total"] for row in updates]  # by the policy before the update
        start = sum(sampled[: warmup + 1]) / (warmup + 1)
        kl += [row["objective/kl"] for row in updates]
        rollouts += [gold - start for gold in sampled[warmup + 1 :]]
        held_out += [row[GOLD] - evaluated[0][GOLD] for row in evaluated if row["progress/step"] > warmup]
    figures = {"highest_kl": max(kl), "lowest_gold": min(held_out), "lowest_rollout": min(rollouts)}
    return figures | {"explained_variance": updates_of(folder)[-1]["val/explained_var"]}


def rows(results: dict[str, Any], during: dict[str, float]) -> dict[str, str]:
    """One column of the table: {row: cell}. during: as `training` gives it."""
    best, gold, rm = results["best_of_n"], results["gold"], results["reward_model"]
    mean, correct, weights = gold["mean_score"], gold["correct"], rm["gold_regression"]["parts"]
    share = (rm["accuracy"]["value"] - 0.5) / (rm["noise_ceiling"] - 0.5)
    policies = ("base", "base_prompted", "sft", "ppo")
    return {
        "gold win rate of PPO over SFT, temperature 1": show(gold["win_rate_vs_sft"]),
        "the same, greedy against greedy": show(gold["win_rate_greedy"]),
        "KL to SFT, nats per sequence": f"{results['kl_to_sft_nats']:.2f}",
        "mean gold score: base, base prompted, SFT, PPO": " · ".join(f"{mean[name]:.3f}" for name in policies),
        "`correct`: SFT, PPO": f"{show(correct['sft'])} · {show(correct['ppo'])}",
        f"best of {best['n']} by the reward model: gold score, win rate, bound of the KL": (
            f"{best['gold']:.3f} · {show(best['win_rate_vs_sft'])} · {best['kl_bound_nats']:.2f}"
        ),
        "during training: highest KL; lowest gold minus SFT's, held-out and of rollouts; last explained variance": (
            f"{during['highest_kl']:.2f} · {during['lowest_gold']:+.3f}, {during['lowest_rollout']:+.3f} · "
            f"{during['explained_variance']:.2f}"
        ),
        "reward model accuracy, held-out prompts": show(rm["accuracy"]),
        "on held-out labelers": show(rm["held_out_labelers"]["accuracy"]),
        "what it rewards, standardised weights": ", ".join(
            f"{part} {row['weight']:.2f}" for part, row in weights.items() if row["weight"] is not None
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
    by_run = {folder: read(folder / "evaluate" / "results.json") for folder in map(Path, folders)}
    columns = [rows(results, training(folder)) for folder, results in by_run.items()]
    seeds = [f"seed {results['seed']}" for results in by_run.values()]
    table(["", *seeds], [[label, *(column[label] for column in columns)] for label in columns[0]])

    def mean(*path: str) -> float:
        return statistics.fmean(entry_at(results, *path) for results in by_run.values())

    if len(by_run) > 1:
        print(
            f"\nMean over {len(by_run)} seeds: win rate {mean('gold', 'win_rate_vs_sft', 'value'):.3f}, "
            f"greedy {mean('gold', 'win_rate_greedy', 'value'):.3f}, KL {mean('kl_to_sft_nats'):.2f} nats; "
            f"gold score of PPO {mean('gold', 'mean_score', 'ppo'):.4f}, of best-of-n {mean('best_of_n', 'gold'):.4f} "
            f"at up to {mean('best_of_n', 'kl_bound_nats'):.2f} nats."
        )


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python scripts/studies/results_table.py RUN_FOLDER …")
    main(sys.argv[1:])
