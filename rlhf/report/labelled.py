"""The report's tables of a labelled task, from classify/results.json."""

from typing import Any

from rlhf.report.audit import cell
from rlhf.tracking.run_files import decimal, get, number, percent, visible

MOST_CLASSES = 20  # most classes of a confusion matrix that is shown


def make_labelled(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Accuracy and that of the most frequent label, figures of each class, and the confusion matrix; empty without results."""
    named = get(results, "classes")
    if not isinstance(named, dict) or number(results, "accuracy", "value") is None:
        return []
    names = [visible(name, 40) for name in named]
    whole = [
        ["Accuracy", cell(get(results, "accuracy"), share=True)],
        ["The most frequent label alone", percent(number(results, "majority"))],
        ["Macro F1", decimal(number(results, "macro_f1"))],
        ["Examples", f"{number(results, 'accuracy', 'n') or 0:,.0f}"],
    ]
    classes = [
        [name, *(percent(number(row, key)) for key in ("precision", "recall", "f1")), f"{number(row, 'n') or 0:,.0f}"]
        for name, row in zip(names, named.values(), strict=True)
    ]
    tables = [
        ("Held-out examples", ["", "value"], whole),
        ("By class", ["class", "precision", "recall", "F1", "examples"], classes),
    ]
    confusion = get(results, "confusion")
    square = (
        isinstance(confusion, list) and len(confusion) == len(names) and all(isinstance(r, list) for r in confusion)
    )
    if square and len(names) <= MOST_CLASSES:
        rows = [[name, *map(str, row)] for name, row in zip(names, confusion, strict=True)]
        tables.append(("Label (down) against prediction (across)", ["", *names], rows))
    return [{"caption": caption, "columns": columns, "rows": rows} for caption, columns, rows in tables]
