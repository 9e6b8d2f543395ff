"""Print a study's figures as the Markdown tables of docs/RESULTS.md: means over seeds, with 95% intervals.

python scripts/study_table.py runs/studies/study/frontier.json
"""

import json
import sys
from pathlib import Path
from typing import Any

NAMES = {
    "win_rate": "win rate",
    "win_rate_greedy": "greedy",
    "gold": "gold",
    "correct": "`correct`",
    "kl": "KL",
    "score": "learned reward",
    "gap": "learned less true gain",
    "bpb": "bits per byte",
    "explained_var": "explained variance",
}
DETAILS = ("win_rate", "win_rate_greedy", "gold", "correct", "kl", "score", "bpb", "explained_var")
DIFFERENCES = ("win_rate", "gold", "kl", "score", "gap", "bpb")


def show(value: dict[str, Any] | None, digits: int = 3, sign: str = "") -> str:
    """A mean with its interval, or a dash."""
    if value is None:
        return "–"
    text = f"{value['mean']:{sign}.{digits}f}"
    low, high = value.get("ci95") or (None, None)
    return text if low is None else f"{text} [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"


def table(head: list[str], rows: list[list[str]]) -> None:
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def frontier(study: dict[str, Any]) -> None:
    """For each coefficient the peak of the true reward and the end, then best-of-n."""
    rows = []
    for name, curve in study["curves"].items():
        path, lost = curve["mean"], study["over_optimisation"][name]
        peak, last = max(path, key=lambda row: row["gold"]["mean"]), path[-1]
        points = [
            f"{at['kl']['mean']:.2f} · {at['score']['mean']:.2f} · {at['gold']['mean']:.3f}" for at in (peak, last)
        ]
        losses = [show(lost[key], sign="+") for key in ("gold_lost", "score_gained")]
        rows.append([name.removeprefix("kl_coef_"), str(peak["update"]), *points, *losses])
    points_head = ["KL · learned · true reward there", "at the end"]
    losses_head = ["true reward lost since the peak", "learned reward gained"]
    table(["`kl.coef`", "peak at update", *points_head, *losses_head], rows)
    best = []
    for row in study["best_of_n"]:
        figures = [show(row[key]) for key in ("score", "gold", "correct")]
        best.append([f"{row['n']:.0f}", f"{max(0.0, row['kl_estimate']['mean']):.2f}", *figures])
    table(["best of n", "KL", "learned reward", "true reward", "`correct`"], best)


def details(study: dict[str, Any]) -> None:
    """The figures of each choice, then their differences from the default, seed by seed."""
    rows, differences = [], []
    for name, row in study["rows"].items():
        rows.append([name, *(f"{row[key]['mean']:.3f}" if key in row else "–" for key in DETAILS)])
        if "difference" in row:
            differences.append([name, *(show(row["difference"].get(key), sign="+") for key in DIFFERENCES)])
    table(["choice", *(NAMES[key] for key in DETAILS)], rows)
    table(["less the default", *(NAMES[key] for key in DIFFERENCES)], differences)


def sizes(study: dict[str, Any]) -> None:
    """Each measure of every size and policy, then how often the smallest PPO model is preferred to those of the largest size."""

    def cell(figure: Any) -> str:
        return f"{figure:,}" if isinstance(figure, int) else show({"mean": figure["value"], "ci95": figure["ci95"]})

    columns = list(next(iter(study["rows"].values())))
    rows = [[spaced(name), *(cell(row[key]) for key in columns)] for name, row in study["rows"].items()]
    table(["policy", *map(spaced, columns)], rows)
    preferred = [[spaced(name), cell(row)] for name, row in study["small_ppo_over"].items()]
    table(["the smallest PPO model over", "share preferred"], preferred)


def spaced(name: str) -> str:
    return name.replace("_", " ")


def audit(study: dict[str, Any]) -> None:
    """Each figure's rank correlation with the outcome and the error of predictions from it; then the cells."""

    def cell(figure: dict[str, Any] | None) -> str:
        return "–" if figure is None else show({"mean": figure["value"], "ci95": figure["ci95"]}, 2, "+")

    rows = []
    for name, row in study["rows"].items():
        errors = [f"{row[key]:.3f}" for key in ("error", "error_of_mean")]
        rows.append([spaced(name), cell(row.get("rank_correlation")), cell(row["leave_one_out"]), *errors])
    table(["figure", "rank correlation", "leave one out", "mean error", "of predicting the mean"], rows)
    runs = []
    for run in study["runs"]:
        figures = [f"{run['figures'][key]:.3f}" for key in ("accuracy", "worst_flips")]
        outcome = [run["verdict"], f"{run['kl']:.2f}", f"{run['gold_gain']:+.3f}"]
        runs.append([run["parent"], spaced(run["cell"]), *figures, *outcome])
    table(["parent", "cell", "accuracy", "worst flips", "verdict", "KL", "true reward gained"], runs)


def scaling(study: dict[str, Any]) -> None:
    """The exponents, the fitted law, and the losses of each budget and size."""
    rows = [
        [name, *(f"{row[key]:.2f}" if isinstance(row[key], float) else show(row[key]) for key in "ab")]
        for name, row in study["rows"].items()
    ]
    table(["N ~ C^a, D ~ C^b", "a", "b"], rows)
    laws = [[name, *map(show, law.values())] for name, law in study["laws"].items()]
    table(["law, N", *next(iter(study["laws"].values()))], laws)
    budgets = study["isoflop"]["all parameters"]
    losses = [[f"{b['budget']:.2g}", *(f"{p['loss']['mean']:.3f}" for p in b["points"])] for b in budgets]
    table(["FLOPs", *(f"{p['parameters']:,}" for p in budgets[0]["points"])], losses)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/study_table.py STUDY.json")
    study = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    tables = {
        "frontier": frontier,
        "details": details,
        "prompts": details,
        "audit": audit,
        "sizes": sizes,
        "scaling": scaling,
    }
    tables[study["study"]](study)
