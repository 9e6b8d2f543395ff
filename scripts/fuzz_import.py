"""Feed `rlhf import` damaged files of every format and check its promises. Seeded; trains nothing.

    python scripts/fuzz_import.py --rows 100000 --folder /tmp/fuzz

Good rows of each format are written as JSON Lines, JSON arrays and CSV, most of them damaged in one of the `DAMAGES`, and imported
in chunks, one process per chunk. The checks of each import:

    the exit code is 0 or 2, without a traceback
    the counts add up, and equal the number of JSON Lines that are not blank
    rejects.jsonl parses, and each original (text or base64) of JSON Lines is in the file
    if nothing is filtered, every row is found again by a marker in its text: in a record, or in the original of a reject
"""

import argparse
import base64
import csv
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz_rows import DAMAGES, FLAT, GOOD, byte_flip, control, cut, swapped

ROWS_A_FILE = 500
FILES_A_CHUNK = 6
DAMAGED = 0.8  # of the rows
LONGEST_IMPORT = 300  # seconds
MARKER = re.compile(rb"mk\d{4}x\d{5}z")
BLANK = b" \t\r"  # a line of nothing else is no row


# --- files -----------------------------------------------------------------------------------------------------------


@dataclass
class File:
    """A generated file."""

    path: Path
    content: bytes
    markers: list[str]  # of rows that were not damaged


@dataclass
class Tally:
    """Counts over all imports."""

    rows: Counter[str] = field(default_factory=Counter)  # given, by container
    damages: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)  # peak of each chunk, bytes
    seconds: float = 0.0


def damaged(
    good: Callable[[str], dict[str, Any]], count: int, name: str, random_: random.Random, tally: Tally
) -> Iterator[tuple[bytes, dict[str, Any], str | None]]:
    """(raw JSON, the good row, its marker) of each row, most of them damaged; the marker of a damaged one is None."""
    for i in range(count):
        marker = f"mk{name}x{i:05d}z"
        row = good(marker)
        raw = json.dumps(row).encode()
        if i < 3 or random_.random() > DAMAGED:  # the first rows show the format
            yield raw, row, marker
            continue
        damage = random_.choice(list(DAMAGES))
        tally.damages[damage] += 1
        yield DAMAGES[damage](raw, row, random_), row, None


def csv_cells(row: dict[str, Any]) -> list[str]:
    return [one if isinstance(one, str) else json.dumps(one) for one in row.values()]


def make_file(folder: Path, number: int, count: int, random_: random.Random, tally: Tally) -> File:
    """One file; successive numbers go through all formats and containers."""
    kinds = [(name, suffix) for name in GOOD for suffix in ("jsonl", "json")] + [(name, "csv") for name in FLAT]
    name, suffix = kinds[number % len(kinds)]
    if name == "tasks_csv":
        suffix = "csv"
    rows = list(damaged(GOOD[name], count, f"{number:04d}", random_, tally))
    markers = [marker for _, _, marker in rows if marker is not None]
    if suffix == "jsonl":
        content = b"\n".join(raw for raw, _, _ in rows) + (b"\n" if random_.random() < 0.5 else b"")
    elif suffix == "json":
        content = b"[\n" + b",\n".join(raw for raw, _, _ in rows) + b"\n]" + (b"\n" if random_.random() < 0.5 else b"")
    else:
        text = io.StringIO()
        csv.writer(text).writerow(list(GOOD[name]("x")))
        lines = [text.getvalue().encode()]
        for _, row, marker in rows:
            text = io.StringIO()
            changed = row if marker else swapped(row, random_)
            csv.writer(text).writerow(csv_cells(changed))
            line = text.getvalue().encode("utf-8", "replace")
            by_bytes = (byte_flip, cut, control)
            lines.append(line if marker else random_.choice(by_bytes)(line, row, random_) + b"\r\n")
        content = b"".join(lines)
    path = folder / f"{number:04d}-{name.replace(' ', '-')}.{suffix}"
    path.write_bytes(content)
    tally.rows[suffix] += count
    return File(path, content, markers)


# --- checks ----------------------------------------------------------------------------------------------------------


def check(files: list[File], out: Path, code: int, said: str, tally: Tally, strict: bool) -> None:
    """Check one import; every broken promise is recorded as a problem."""
    problem = tally.problems.append
    if code not in (0, 2) or "Traceback" in said:
        problem(f"{files[0].path.parent}: exit code {code}: {said[-2000:]}")
        return
    written_to = out if out.exists() else out.with_name(out.name + ".partial")
    if not written_to.exists():
        problem(f"{files[0].path.parent}: nothing was written: {said[-500:]}")
        return
    report = json.loads((written_to / "report.json").read_text(encoding="utf-8"))
    by_name = {str(file.path): file for file in files}
    for entry in report["files"]:
        counts, file = entry["counts"], by_name[entry["file"]]
        tally.counts.update(counts)
        if counts["input"] != sum(counts[name] for name in ("accepted", "duplicates", "filtered", "rejected")):
            problem(f"{entry['file']}: counts do not add up: {counts}")
        if entry["format"] is None:
            problem(f"{entry['file']}: not recognised: {entry['why']}")
        if file.path.suffix == ".jsonl":
            lines = sum(bool(line.strip(BLANK)) for line in file.content.removeprefix(b"\xef\xbb\xbf").split(b"\n"))
            if lines != counts["input"]:
                problem(f"{entry['file']}: {lines} lines, {counts['input']} counted")
    originals = check_rejects(written_to, by_name, problem)
    if strict:  # nothing was filtered or dropped
        written = {marker for path in written_to.rglob("*.arrow") for marker in MARKER.findall(path.read_bytes())}
        for file in files:
            named = set(MARKER.findall(file.content))
            assert named.issuperset(marker.encode() for marker in file.markers)
            tally.counts["found again"] += len(named)
            lost = sorted(named - written - set(MARKER.findall(originals[str(file.path)])))
            if lost:
                problem(f"{file.path}: {len(lost)} rows are nowhere, first {lost[0].decode()}")


def check_rejects(folder: Path, by_name: dict[str, File], problem: Callable[[str], None]) -> dict[str, bytes]:
    """Compare each reject's original with the file; returns the originals of each file, joined."""
    originals: dict[str, list[bytes]] = {name: [] for name in by_name}
    for number, line in enumerate((folder / "rejects.jsonl").read_bytes().split(b"\n")[:-1], start=1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            problem(f"{folder}/rejects.jsonl:{number}: {error}")
            continue
        file = by_name[entry["file"]]
        if entry["field"] == "file":  # damaged: what follows is not read, and the import is partial
            originals[entry["file"]].append(file.content)
            continue
        raw = entry["original"].encode() if "original" in entry else base64.b64decode(entry.get("base64", ""))
        if "bytes" in entry:  # a long one, of which the beginning is kept
            originals[entry["file"]].append(file.content.split(b"\n")[entry["line"] - 1])
        if file.path.suffix == ".jsonl" and (raw not in file.content or not raw):
            problem(f"{folder}/rejects.jsonl:{number}: the original is not in the file")
        if "\n" in entry["message"] or not entry["message"]:
            problem(f"{folder}/rejects.jsonl:{number}: the message is not one line: {entry['message']!r}")
        originals[entry["file"]].append(raw)
    return {name: b"\n".join(parts) for name, parts in originals.items()}


def run_import(folder: Path, out: Path, more: list[str]) -> tuple[int, str, int]:
    """Exit code, what was printed, and the peak memory of the process in bytes."""
    log = folder.with_suffix(".log")
    command = [sys.executable, "-m", "rlhf", "import", f"path={folder}", f"out={out}", *more]
    with log.open("wb") as file:
        child = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | {"RLHF_PROGRESS": "off"})
        started, peak = time.monotonic(), 0
        while child.poll() is None:
            peak = max(peak, peak_memory(child.pid))
            time.sleep(0.02)
            if time.monotonic() - started > LONGEST_IMPORT:
                child.kill()  # an import that never ends is a problem too
    said = log.read_text(encoding="utf-8", errors="replace")
    log.unlink()
    return child.returncode, said, peak


def peak_memory(pid: int) -> int:
    """Peak resident bytes of a process; 0 if it has ended. (The peak that wait4 returns includes the parent's.)"""
    try:
        match = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


def run(rows: int, seed: int, folder: Path, keep: bool) -> Tally:
    tally = Tally()
    number = done = chunk = 0
    started = time.monotonic()
    while done < rows:
        random_ = random.Random(f"{seed}-{chunk}")
        inside, out = folder / f"chunk-{chunk:03d}", folder / f"out-{chunk:03d}"
        for old in (inside, out, out.with_name(out.name + ".partial")):
            shutil.rmtree(old, ignore_errors=True)
        inside.mkdir(parents=True)
        files = []
        for _ in range(FILES_A_CHUNK):
            count = min(ROWS_A_FILE, rows - done)
            if count <= 0:
                break
            files.append(make_file(inside, number, count, random_, tally))
            number, done = number + 1, done + count
        strict = chunk % 3 != 2
        more = ["duplicates=keep", "filter_prefixes=false", "max_prompts_per_user=1000000"] if strict else []
        more += ["processes=2"] if chunk % 4 == 3 else []
        code, said, peak = run_import(inside, out, more)
        tally.memory.append(peak)
        before = len(tally.problems)
        check(files, out, code, said, tally, strict)
        for one in tally.problems[before:]:
            print(f"PROBLEM: {one}", flush=True)
        if len(tally.problems) == before and not keep:
            for old in (inside, out, out.with_name(out.name + ".partial")):
                shutil.rmtree(old, ignore_errors=True)
        chunk += 1
    tally.seconds = time.monotonic() - started
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True, help="for the files; chunks with a problem stay there")
    parser.add_argument("--keep", action="store_true", help="keep the files of all chunks")
    arguments = parser.parse_args()
    tally = run(arguments.rows, arguments.seed, arguments.folder, arguments.keep)
    given = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(tally.rows.items()))
    memory = [peak / 1e6 for peak in tally.memory]
    print(f"| rows given | {sum(tally.rows.values()):,} ({given}) |")
    print(f"| of these damaged | {sum(tally.damages.values()):,} in {len(tally.damages)} ways |")
    found = tally.counts.pop("found again", 0)
    print("| rows counted | " + ", ".join(f"{count:,} {name}" for name, count in tally.counts.items()) + " |")
    print(f"| rows found again by their marker | {found:,} |")
    print(f"| imports | {len(memory)} of up to {FILES_A_CHUNK} files, {tally.seconds:.0f} s |")
    print(
        f"| peak memory of an import | first {memory[0]:.0f} MB, last {memory[-1]:.0f} MB, "
        f"least {min(memory):.0f} MB, most {max(memory):.0f} MB |"
    )
    print(f"| promises broken | {len(tally.problems)} |")
    sys.exit(1 if tally.problems else 0)


if __name__ == "__main__":
    main()
