"""The reports of an import: report.json, rejects.jsonl and the table on the screen. They contain no times and no paths of
their own files, so that importing the same rows twice writes the same bytes.
"""

import base64
import hashlib
import importlib.metadata
import json
import platform
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from rlhf import __version__
from rlhf.data.importing.cleaning import KIND_NUMBERS, PII_KINDS
from rlhf.data.reading.readers import KEPT_BYTES, Reject

ROW_COUNTS = ("input", "accepted", "duplicates", "filtered", "rejected")
_KINDS = tuple(KIND_NUMBERS)
_GOT_WANT = re.compile(r"(?:got )?(.*), want (.*)", re.DOTALL)


class Histogram:
    """Counts of integers, for exact quantiles in little memory."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, values: np.ndarray) -> None:
        for value, count in zip(*np.unique(values, return_counts=True), strict=True):
            self._counts[int(value)] += int(count)

    def counts(self) -> dict[str, int]:
        return {str(value): self._counts[value] for value in sorted(self._counts)}

    def describe(self) -> dict[str, Any] | None:
        """n, mean, least, median, 95th percentile and largest; a quantile is a value that occurs."""
        n = sum(self._counts.values())
        if n == 0:
            return None
        values = np.array(sorted(self._counts))
        seen = np.cumsum([self._counts[value] for value in values.tolist()])
        median, high = (int(values[np.searchsorted(seen, share * n)]) for share in (0.5, 0.95))
        total = sum(value * count for value, count in self._counts.items())
        return {
            "n": n,
            "mean": round(total / n, 2),
            "min": int(values[0]),
            "median": median,
            "p95": high,
            "max": int(values[-1]),
        }


class Statistics:
    """Figures of the records that are kept."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.labelers: Counter[str] = Counter()
        self.unnamed = 0
        self.unpaired = 0
        self.pairs = 0
        self.ties = 0
        self.pii: Counter[str] = Counter()
        self.responses_a_ranking = Histogram()
        self.lengths = {
            f"{part}_{unit}": Histogram() for part in ("prompt", "response") for unit in ("characters", "words")
        }

    def add(self, facts: np.ndarray) -> None:
        """Add the properties of kept records."""
        for number, count in zip(*np.unique(facts["kind"], return_counts=True), strict=True):
            self.kinds[_KINDS[number]] += int(count)
        rankings = facts[facts["kind"] == KIND_NUMBERS["ranking"]]
        self.responses_a_ranking.add(rankings["responses"])
        self.unpaired += int((rankings["pairs"] == 0).sum())
        self.pairs += int(rankings["pairs"].sum())
        self.ties += int(rankings["ties"].sum())
        for i, name in enumerate(PII_KINDS):
            self.pii[name] += int((facts["pii"] >> i & 1).sum())

    def add_sizes(self, prompts: np.ndarray, responses: np.ndarray) -> None:
        """Add characters and words, as `batch_sizes` counts them."""
        for part, sizes in (("prompt", prompts), ("response", responses)):
            self.lengths[f"{part}_characters"].add(sizes[:, 0])
            self.lengths[f"{part}_words"].add(sizes[:, 1])

    def add_labelers(self, names: Iterable[str | None], counts: Iterable[int]) -> None:
        for name, count in zip(names, counts, strict=True):
            if name is None:
                self.unnamed += count
            else:
                self.labelers[name] += count

    def report(self) -> dict[str, Any]:
        return {
            "ties": self.ties,
            "pairs": self.pairs,
            "unpaired": self.unpaired,
            "responses_a_ranking": self.responses_a_ranking.counts(),
            "labelers": {name: self.labelers[name] for name in sorted(self.labelers)},
            "records_without_labeler": self.unnamed,
            "lengths": {name: histogram.describe() for name, histogram in self.lengths.items()},
        }


def versions() -> dict[str, str]:
    ours = {"rlhf": __version__, "python": platform.python_version()}
    return ours | {name: importlib.metadata.version(name) for name in ("pydantic", "pyarrow", "datasets")}


def reject_line(reject: Reject) -> str:
    """A line of rejects.jsonl: where, what came, what was wanted, and the original."""
    message = reject.message.removeprefix(f"{reject.field}: ") if reject.field else reject.message
    parts = _GOT_WANT.fullmatch(message)
    if parts:
        got, wanted = parts[1], parts[2]
    elif message == "missing":
        got, wanted = "nothing", "a value"
    else:
        got, _, wanted = message.rpartition(": ")
        got, wanted = (got, wanted) if got else (wanted, "")
    entry: dict[str, Any] = {
        "file": reject.file, "line": reject.line, "number": reject.number, "offset": reject.offset,
        "field": reject.field, "got": got, "want": wanted, "message": reject.message,
    }  # fmt: skip
    if reject.digest is not None:
        entry["sha256"], entry["bytes"] = reject.digest
    elif reject.raw is not None and len(reject.raw) > KEPT_BYTES:
        entry["sha256"], entry["bytes"] = hashlib.sha256(reject.raw).hexdigest(), len(reject.raw)
    elif reject.raw is not None:
        try:
            entry["original"] = reject.raw.decode("utf-8")
        except UnicodeDecodeError:
            entry["base64"] = base64.b64encode(reject.raw).decode("ascii")
    text = json.dumps(entry, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # a message with characters that UTF-8 cannot encode
        text = json.dumps(entry)
    return text + "\n"


def describe(report: dict[str, Any]) -> list[str]:
    """The report as lines for the screen."""
    from rlhf.data.agreement import judgements as agreement

    lines = []
    for file in report["files"]:
        made = ", ".join(f"{count:,} {kind}" for kind, count in sorted(file["records"].items())) or "no record"
        taken = f"{file['format']} ({file['why']})" if file["format"] else file["why"]
        lines.append(f"{file['file']}: {taken}: {file['counts']['input']:,} rows, {made}")
    counts = report["counts"]
    lines.append("rows: " + ", ".join(f"{counts[name]:,} {name}" for name in ROW_COUNTS))
    records = report["records"]
    if records:
        splits = ("train", "dev", "test")
        lines.append(f"  {'records':<15}" + "".join(f"{name:>10}" for name in (*splits, "in all")))
        for kind, by_split in records.items():
            cells = [by_split[split] for split in splits]
            lines.append(f"  {kind:<15}" + "".join(f"{count:>10,}" for count in (*cells, sum(cells))))
    done = [f"{count:,} {name.replace('_', ' ')}" for name, count in report["cleaning"].items() if count]
    if done:
        lines.append("cleaning: " + ", ".join(done))
    if "ranking" in records:
        k = ", ".join(f"{count:,} of {size}" for size, count in report["responses_a_ranking"].items())
        people = len(report["labelers"])
        lines.append(
            f"rankings: responses {k}; {report['pairs']:,} pairs, {report['ties']:,} ties, "
            f"{report['unpaired']:,} unpaired; {people:,} labelers"
        )
    for name, figures in report["lengths"].items():
        if figures and name.endswith("_words"):
            lines.append(
                f"words per {name.removesuffix('_words')}: median {figures['median']:,}, "
                f"95% up to {figures['p95']:,}, longest {figures['max']:,}"
            )
    return lines + (agreement.describe(report["agreement"]) if "ranking" in records else [])
