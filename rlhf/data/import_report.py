"""The reports of an import: report.json, rejects.jsonl and the table on the screen. They contain no times and no paths of
their own files, so that importing the same rows twice writes the same bytes.
"""

import base64
import importlib.metadata
import json
import platform
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf import __version__
from rlhf.data import agreement
from rlhf.data.cleaning import Facts
from rlhf.data.inputs import Reject
from rlhf.data.splits import SPLITS
from rlhf.system.terminal import one_line

KEPT_BYTES = 1 << 20  # of a rejected row
ROW_COUNTS = ("input", "accepted", "duplicates", "filtered", "rejected")


def summarise(kept: Sequence[Facts]) -> dict[str, Any]:
    """The figures of the records that are kept."""
    rankings = [one for one in kept if one.kind == "ranking"]
    judged = [one.labeler for one in kept if one.kind != "prompt"]
    sizes = Counter(len(one.response_words) for one in rankings)
    named = Counter(name for name in judged if name is not None)
    return {
        "ties": sum(one.ties for one in rankings),
        "pairs": sum(one.pairs for one in rankings),
        "unpaired": sum(one.pairs == 0 for one in rankings),
        "responses_a_ranking": {str(size): sizes[size] for size in sorted(sizes)},
        "labelers": dict(sorted(named.items())),
        "records_without_labeler": judged.count(None),
        "lengths": {
            "prompt_words": _quantiles([one.prompt_words for one in kept]),
            "response_words": _quantiles([words for one in kept for words in one.response_words]),
        },
    }


def _quantiles(lengths: list[int]) -> dict[str, Any] | None:
    """Number, mean and quantiles; each quantile is one of the lengths."""
    if not lengths:
        return None
    least, median, p95, most = np.quantile(lengths, (0, 0.5, 0.95, 1), method="inverted_cdf").astype(int).tolist()
    mean = round(sum(lengths) / len(lengths), 2)
    return {"n": len(lengths), "mean": mean, "min": least, "median": median, "p95": p95, "max": most}


def versions() -> dict[str, str]:
    ours = {"rlhf": __version__, "python": platform.python_version()}
    return ours | {name: importlib.metadata.version(name) for name in ("pydantic", "pyarrow", "datasets")}


def reject_line(reject: Reject) -> str:
    """A line of rejects.jsonl: the place, what is wrong, and the row, cut to KEPT_BYTES."""
    entry: dict[str, Any] = {name: getattr(reject, name) for name in ("file", "line", "number", "field", "message")}
    if reject.raw is not None:
        kept = reject.raw[:KEPT_BYTES]
        cut = len(kept) < len(reject.raw)
        try:
            entry["original"] = kept.decode("utf-8", "ignore" if cut else "strict")
        except UnicodeDecodeError:
            entry["base64"] = base64.b64encode(kept).decode("ascii")
        if cut:
            entry["bytes"] = len(reject.raw)
    text = json.dumps(entry, ensure_ascii=False)
    # lone surrogates, which UTF-8 cannot hold, are written as JSON's escapes
    return text.encode("utf-8", "backslashreplace").decode() + "\n"


def describe(report: dict[str, Any]) -> list[str]:
    """The report as lines for the screen."""
    lines = []
    for file in report["files"]:
        made = ", ".join(f"{count:,} {kind}" for kind, count in file["records"].items()) or "no record"
        lines.append(f"{file['file']}: {file['format']} ({file['why']}): {file['counts']['input']:,} rows, {made}")
    lines.append("rows: " + ", ".join(f"{report['counts'][name]:,} {name}" for name in ROW_COUNTS))
    records = report["records"]
    if records:
        lines.append(f"  {'records':<15}" + "".join(f"{name:>10}" for name in (*SPLITS, "in all")))
        for kind, by_split in records.items():
            cells = [by_split[split] for split in SPLITS]
            lines.append(f"  {kind:<15}" + "".join(f"{count:>10,}" for count in (*cells, sum(cells))))
    done = [f"{count:,} {name.replace('_', ' ')}" for name, count in report["cleaning"].items() if count]
    lines += ["cleaning: " + ", ".join(done)] if done else []
    if "ranking" in records:
        k = ", ".join(f"{count:,} of {size}" for size, count in report["responses_a_ranking"].items())
        lines.append(
            f"rankings: responses {k}; {report['pairs']:,} pairs, {report['ties']:,} ties, "
            f"{report['unpaired']:,} unpaired; {len(report['labelers']):,} labelers"
        )
    for name, figures in report["lengths"].items():
        if figures:
            lines.append(
                f"words per {name.removesuffix('_words')}: median {figures['median']:,}, "
                f"95% up to {figures['p95']:,}, longest {figures['max']:,}"
            )
    lines += agreement.describe(report["agreement"]) if "ranking" in records else []
    for labeler, checks in report["checks"].items():
        shares = (
            f"{name} {one['right'] / one['pairs']:.1%} of {one['pairs']:.0f} pairs"
            for name, one in checks.items()
            if one["pairs"]
        )
        lines.append(f"checks: {one_line(labeler, 24)}: {', '.join(shares)}")
    return lines
