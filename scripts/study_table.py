"""Print a study's figures as the Markdown tables of docs/RESULTS.md: means over seeds, with 95% intervals.

python scripts/study_table.py runs/studies/study/frontier.json
"""

import json
import sys
from pathlib import Path
from typing import Any

DETAILS = {
    "win_rate": "win rate", "win_rate_greedy": "greedy", "gold": "gold", "correct": "`correct`", "kl": "KL",
    "score": "learned reward", "bpb": "bits per byte", "explained_var": "explained variance",
}  # fmt: skip
DIFFERENCES = {
    "win_rate": "win rate", "gold": "gold", "kl": "KL", "score": "learned reward", "gap": "learned less true gain",
    "bpb": "bits per byte",
}  # fmt: skip


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
    """Each coefficient's peak of the true reward and its end, then best-of-n."""
    rows = []
    for name, curve in study["curves"].items():
        path, lost = curve["mean"], study["over_optimisation"][name]
        peak, last = max(path, key=lambda row: row["gold"]["mean"]), path[-1]
        rows.append([
            name.removeprefix("kl_coef_"), str(peak["update"]),
            *(f"{at['kl']['mean']:.2f} · {at['score']['mean']:.2f} · {at['gold']['mean']:.3f}" for at in (peak, last)),
            show(lost["gold_lost"], sign="+"), show(lost["score_gained"], sign="+"),
        ])  # fmt: skip
    table(["`kl.coef`", "peak at update", "KL · learned · true reward there", "at the end", "true reward lost since the peak",
           "learned reward gained"], rows)  # fmt: skip
    table(["best of n", "KL", "learned reward", "true reward", "`correct`"], [
        [f"{row['n']:.0f}", f"{max(0.0, row['kl_estimate']['mean']):.2f}", *(show(row[key]) for key in ("score", "gold", "correct"))]
        for row in study["best_of_n"]
    ])  # fmt: skip


def details(study: dict[str, Any]) -> None:
    """The figures of each choice, then their differences from the default, seed by seed."""
    table(["choice", *DETAILS.values()], [
        [name, *(f"{row[key]['mean']:.3f}" if key in row else "–" for key in DETAILS)] for name, row in study["rows"].items()
    ])  # fmt: skip
    table(["less the default", *DIFFERENCES.values()], [
        [name, *(show(row["difference"].get(key), sign="+") for key in DIFFERENCES)]
        for name, row in study["rows"].items() if "difference" in row
    ])  # fmt: skip


def sizes(study: dict[str, Any]) -> None:
    """Every size and policy by each measure, then how often the smallest PPO model is preferred to those of the largest size."""

    def cell(figure: Any) -> str:
        return f"{figure:,}" if isinstance(figure, int) else show({"mean": figure["value"], "ci95": figure["ci95"]})

    columns = list(next(iter(study["rows"].values())))
    table(["policy", *(name.replace("_", " ") for name in columns)], [
        [name.replace("_", " "), *(cell(row[key]) for key in columns)] for name, row in study["rows"].items()
    ])  # fmt: skip
    table(["the smallest PPO model over", "share preferred"], [
        [name.replace("_", " "), cell(row)] for name, row in study["small_ppo_over"].items()
    ])  # fmt: skip


def audit(study: dict[str, Any]) -> None:
    """Each figure's rank correlation with the outcome and its predictions; then the cells."""

    def cell(figure: dict[str, Any] | None) -> str:
        return "–" if figure is None else show({"mean": figure["value"], "ci95": figure["ci95"]}, 2, "+")

    table(["figure", "rank correlation", "leave one out", "mean error", "of predicting the mean"], [
        [name.replace("_", " "), cell(row.get("rank_correlation")), cell(row["leave_one_out"]), f"{row['error']:.3f}",
         f"{row['error_of_mean']:.3f}"] for name, row in study["rows"].items()
    ])  # fmt: skip
    table(["parent", "cell", "accuracy", "worst flips", "verdict", "KL", "true reward gained"], [
        [run["parent"], run["cell"].replace("_", " "), f"{run['figures']['accuracy']:.3f}", f"{run['figures']['worst_flips']:.3f}",
         run["verdict"], f"{run['kl']:.2f}", f"{run['gold_gain']:+.3f}"] for run in study["runs"]
    ])  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/study_table.py STUDY.json")
    found = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    {"frontier": frontier, "details": details, "prompts": details, "audit": audit, "sizes": sizes}[found["study"]](
        found
    )
