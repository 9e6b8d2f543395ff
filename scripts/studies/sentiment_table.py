"""Print finished runs of experiment=sentiment as the table of docs/studies/sentiment.md, and draw their PPO.

    python scripts/studies/sentiment_table.py runs/seed-0 runs/seed-1 runs/seed-2
    python scripts/studies/sentiment_table.py preset=runs/s0 "constant rate=runs/s0-const" --picture docs/img/sentiment.png

Below the table, per run: the true score of the held-out passages at each evaluation during PPO, update 0 being the base model. The
picture shows true score and KL by update, and one against the other; the first run gives the evaluated points.
"""

import argparse
from pathlib import Path
from typing import Any

from harness import read, show, table
from harness import rows as read_rows

HELD_OUT = "eval/dev/gold/total"
HEADS = (
    "run", "policy", "KL to the base, nats", "true score", "win rate over the base", "perplexity under the base",
    "different 2-grams", "repetition",
)  # fmt: skip
COLOURS = ("#2a5f99", "#c8641f", "#3f8457", "#7a4f9a")


def rows(results: dict[str, Any]) -> list[list[str]]:
    """One row per policy of a run."""
    gold, best, texts = results["gold"], results["best_of_n"], results["text"]
    name = f"best of {best['n']} by the reward model"
    made = [
        ("base", 0.0, gold["score"]["sft"], None, texts["sft"]),
        (name, best["kl_bound_nats"], best["score"], best["win_rate_vs_sft"], best["text"]),
    ]
    for policy, figures in results.get("baselines", {}).items():
        made.append((policy, results["kl"][policy], gold["score"][policy], figures["win_rate_vs_sft"], texts[policy]))
    made.append(("PPO", results["kl"]["ppo"], gold["score"]["ppo"], gold["win_rate_vs_sft"], texts["ppo"]))
    return [
        [policy, show(kl, 2), show(score), show(win), show(text["perplexity"], 1), show(text["distinct_2"]),
         show(text["repetition"])]
        for policy, kl, score, win, text in made
    ]  # fmt: skip


def draw(runs: dict[str, Path], results: dict[str, Any], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (score, kl, both) = pyplot.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for colour, (name, run) in zip(COLOURS, runs.items(), strict=False):
        updates = [row for row in read_rows(run / "ppo" / "metrics.jsonl") if "objective/kl" in row]
        steps, nats, truth = ([row[key] for row in updates] for key in ("progress/step", "objective/kl", "gold/total"))
        score.plot(steps, truth, color=colour, label=name)
        kl.plot(steps, nats, color=colour)
        both.plot(nats, truth, ".", color=colour, alpha=0.5)
    best, scores = results["best_of_n"], results["gold"]["score"]
    points = {"base": (0.0, scores["sft"]), f"best of {best['n']}": (best["kl_bound_nats"], best["score"])}
    points["PPO"] = (results["kl"]["ppo"]["value"], scores["ppo"])
    for mark, (name, (distance, figure_)) in zip("os^", points.items(), strict=True):
        value, (low, high) = figure_["value"], figure_["ci95"]
        error = [[value - low], [high - value]]
        both.errorbar(distance, value, yerr=error, fmt=mark, color="black", capsize=3, label=f"{name}, held out")
    score.set(title="True score of the rollouts", xlabel="update")
    kl.set(title="KL to the base, nats", xlabel="update", yscale="symlog", yticks=[0, 1, 2, 5, 10, 50])
    kl.set_yticklabels(["0", "1", "2", "5", "10", "50"])
    both.set(title="True score against KL", xlabel="nats", xlim=(-0.5, 15))
    for axes in (score, kl, both):
        axes.grid(color="#ecece7")
    score.legend(fontsize=8)
    both.legend(fontsize=8, loc="lower right")
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="[NAME=]FOLDER")
    parser.add_argument("--picture", type=Path)
    asked = parser.parse_args()
    runs = {name or Path(folder).name: Path(folder) for name, _, folder in (one.rpartition("=") for one in asked.runs)}
    results = {name: read(folder / "evaluate" / "results.json") for name, folder in runs.items()}
    table(HEADS, [[name, *cells] for name in runs for cells in rows(results[name])])
    for name, folder in runs.items():
        scores = [r[HELD_OUT] for r in read_rows(folder / "ppo" / "metrics.jsonl") if HELD_OUT in r]
        accuracy, best = results[name]["reward_model"], results[name]["best_of_n"]
        print(
            f"{name}: true score during PPO {', '.join(f'{score:.3f}' for score in scores)}; reward model: "
            f"{show(accuracy['accuracy'])} of held-out pairs as the labelers, {accuracy['gold_order_accuracy']:.3f} as the lexicon; "
            f"PPO minus best-of-n {show(best.get('ppo_above'))}"
        )
    if asked.picture:
        draw(runs, next(iter(results.values())), asked.picture)


if __name__ == "__main__":
    main()
