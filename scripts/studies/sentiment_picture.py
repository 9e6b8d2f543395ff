"""Draw PPO of `experiment=sentiment`: true score and KL by update, and one against the other beside best-of-n.

    python scripts/studies/sentiment_picture.py --run preset=runs/s0 --run "constant rate=runs/s0-const" --out docs/img/sentiment.png

The first run gives the evaluated points. Needs matplotlib.
"""

import argparse
import json
from pathlib import Path

COLOURS = ("#2a5f99", "#c8641f", "#3f8457", "#7a4f9a")


def updates(run: Path) -> tuple[list[float], list[float], list[float]]:
    """Update, KL in nats per response, and mean true score of each update's rollouts."""
    rows = map(json.loads, (run / "ppo" / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    names = ("progress/step", "objective/kl", "gold/total")
    steps, kl, score = zip(*([row[name] for name in names] for row in rows if "objective/kl" in row), strict=True)
    return list(steps), list(kl), list(score)


def evaluated(run: Path) -> dict[str, tuple[float, dict]]:
    """KL and true score with its interval on held-out passages, by policy."""
    results = json.loads((run / "evaluate" / "results.json").read_text(encoding="utf-8"))
    best = results["best_of_n"]
    return {
        "base": (0.0, results["gold"]["score"]["sft"]),
        f"best of {best['n']}": (best["kl_estimate_nats"], best["score"]),
        "PPO": (results["kl"]["ppo"]["value"], results["gold"]["score"]["ppo"]),
    }


def draw(runs: dict[str, Path], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (score, kl, both) = pyplot.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for colour, (name, run) in zip(COLOURS, runs.items(), strict=False):
        x, nats, truth = updates(run)
        score.plot(x, truth, color=colour, label=name)
        kl.plot(x, nats, color=colour)
        both.plot(nats, truth, ".", color=colour, alpha=0.5)
    for mark, (name, (distance, figure_)) in zip("os^", evaluated(next(iter(runs.values()))).items(), strict=True):
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
    parser.add_argument(
        "--run", action="append", required=True, metavar="NAME=FOLDER", help="a run with ppo; repeatable"
    )
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    draw({name: Path(folder) for name, _, folder in (one.partition("=") for one in given.run)}, given.out)


if __name__ == "__main__":
    main()
