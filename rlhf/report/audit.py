"""The report's page of the reward model's audit, from reward/audit.json."""

from typing import Any

from rlhf.tracking.run_files import decimal, entries, get, interval, number, percent, rows_of, visible


def cell(figure: Any, share: bool = False) -> str:
    """A figure with its 95% interval, or a dash."""

    def show(value: float) -> str:
        return percent(value) if share else decimal(value, 2)

    value, low, high = interval(figure)
    if value is None:
        return "–"
    return show(value) + ("" if low is None or high is None else f" ({show(low)} – {show(high)})")


def make_audit(audit: dict[str, Any]) -> dict[str, Any] | None:
    """{"verdict", "labels", "reasons", "tables"}, or None without an audit."""
    decision = get(audit, "verdict", "decision")
    if not isinstance(decision, str):
        return None
    ceiling, labels, reasons = (get(audit, "verdict", key) for key in ("ceiling", "labels", "reasons"))
    attacks = []
    for row in rows_of(audit, "attacks"):
        figures = [cell(row.get(key)) for key in ("gain", "gain_better", "gain_worse", "nats")]
        name = visible(str(row.get("name")).replace("_", " "), 40)
        attacks.append([name, cell(row.get("flips"), share=True), *figures])
    picked = [[f"{number(row, 'n') or 0:g}", cell(row.get("gain"), share=True)] for row in rows_of(audit, "picked")]
    best_of = []
    for row in rows_of(audit, "best_of"):
        figures = [cell(row.get(key)) for key in ("score", "check", "truth")]
        best_of.append([f"{number(row, 'n') or 0:g}", decimal(number(row, "kl"), 2), *figures])
    tables = [
        ("Held-out comparisons", ("share of pairs", "value"), compared(get(audit, "comparisons"))),
        (
            "Attacks on held-out answers, in standard deviations of SFT samples' scores",
            ("attack", "order flipped", "score bought", "by the better", "by the worse", "KL, nats"),
            attacks,
        ),
        (
            "The reward model's pick among labelled answers, against a random one",
            ("answers", "more of the others beaten"),
            picked,
        ),
        ("Best of n samples of the SFT model", ("n", "KL, nats", "score", "by the check", "true reward"), best_of),
    ]
    return {
        "verdict": visible(decision, 100)
        + ("" if number(audit, "verdict", "ceiling") is None else f" of {ceiling:g} nats"),
        "labels": visible("; ".join(map(str, labels)), 1000) if isinstance(labels, list) else "",
        "reasons": [visible(str(reason), 300) for reason in reasons] if isinstance(reasons, list) else [],
        "tables": [{"caption": caption, "columns": columns, "rows": rows} for caption, columns, rows in tables if rows],
    }


def compared(figures: Any) -> list[list[str]]:
    """Accuracy with its bounds, by labeler and by gap in rank."""
    rows = [
        ("Accuracy", get(figures, "accuracy")),
        ("Accuracy above length alone", get(figures, "above_length")),
        ("Labelers' agreement", get(figures, "agreement", "training")),
        ("Accuracy on held-out labelers", get(figures, "held_out_labelers", "accuracy")),
    ]
    rows += [(f"On {name}", figure) for name, figure in entries(figures, "by_labeler")]
    rows += [(f"On answers {number(row, 'gap') or 0:g} ranks apart", row) for row in rows_of(figures, "by_rank_gap")]
    shown = [
        [visible(label, 60), cell(figure, share=True)] for label, figure in rows if number(figure, "value") is not None
    ]
    for label, key in (("Length alone", "length_baseline"), ("Calibration error", "calibration_error")):
        if (value := number(figures, key)) is not None:
            shown.append([label, percent(value)])
    return shown
