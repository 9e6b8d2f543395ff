"""Print finished runs of experiment=sentiment as the table of docs/studies/sentiment.md, and draw their PPO.

    python scripts/studies/sentiment_table.py runs/seed-0 runs/seed-1 runs/seed-2
    python scripts/studies/sentiment_table.py preset=runs/s0 "constant rate=runs/s0-const" --picture docs/img/sentiment.png

Below the table, per run: the true score of the held-out passages at each evaluation during PPO, update 0 being the base model. The
picture shows true score and KL by update, and one against the other; the first run gives the evaluated points.
"""

from pathlib import Path
from typing import Any

from harness import make_parser, read, show, table, updates_of

HELD_OUT = "eval/dev/gold/total"
HEADS = (
    "run", "policy", "KL to the base, nats", "true score", "win rate over the base", "perplexity under the base",
    "different 2-grams", "repetition",
)  # fmt: skip
COLOURS = ("#2a5f99", "#c8641f", "#3f8457", "#7a4f9a")


def rows(results: dict[str, Any]) -> list[list[str]]:
    """One row per policy of a run."""
    gold, best, texts, kl = results["gold"], results["best_of_n"], results["text"], results["kl"]
    made = [
        ("base", 0.0, gold["score"]["sft"], None, texts["sft"]),
        (
            f"best of {best['n']} by the reward model",
            best["kl_bound_nats"],
            best["score"],
            best["win_rate_vs_sft"],
            best["text"],
        ),
    ]
    for policy, figures in (results.get("baselines", {}) | {"ppo": gold}).items():
        name = "PPO" if policy == "ppo" else policy
        made.append((name, kl[policy], gold["score"][policy], figures["win_rate_vs_sft"], texts[policy]))
    return [
        [policy, show(nats, 2), show(score), show(win), show(text["perplexity"], 1), show(text["distinct_2"]),
         show(text["repetition"])]
        for policy, nats, score, win, text in made
    ]  # fmt: skip


def draw(runs: dict[str, Path], results: dict[str, Any], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (score, kl, both) = pyplot.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for colour, (name, run) in zip(COLOURS, runs.items(), strict=False):
        updates = updates_of(run)
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
    parser = make_parser(__doc__, {"runs": {"nargs": "+", "metavar": "[NAME=]FOLDER"}, "--picture": {"type": Path}})
    asked = parser.parse_args()
    runs = {name or Path(folder).name: Path(folder) for name, _, folder in (one.rpartition("=") for one in asked.runs)}
    results = {name: read(folder / "evaluate" / "results.json") for name, folder in runs.items()}
    table(HEADS, [[name, *cells] for name in runs for cells in rows(results[name])])
    for name, folder in runs.items():
        scores = [row[HELD_OUT] for row in updates_of(folder, HELD_OUT)]
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
