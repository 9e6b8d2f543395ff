"""Feed `rlhf import` damaged files of every format and check its promises. Seeded; trains nothing.

    python scripts/fuzz_import.py --rows 100000 --folder /tmp/fuzz

Rows of each format (scripts/fuzz_rows.py) are written as JSON Lines, JSON arrays and CSV, most of them damaged, and imported,
one process per file. The checks of each import:

    the exit code is 0 or 2, without a traceback
    only an array or a CSV file may be refused as a whole, in one line that names the damage
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
from pathlib import Path
from typing import Any, NamedTuple

from fuzz_rows import DAMAGES, FLAT, GOOD, byte_flip, control, cut, swapped

ROWS_A_FILE = 500
DAMAGED = 0.8  # of the rows
LONGEST_IMPORT = 300  # seconds
MARKER = re.compile(rb"mk\d{4}x\d{5}z")
BLANK = b" \t\r"  # a line of nothing else is no row
KINDS = [(name, suffix) for name in GOOD for suffix in ("jsonl", "json")]
KINDS += [(name, "csv") for name in FLAT]


class File(NamedTuple):
    """A generated file."""

    path: Path
    content: bytes
    markers: set[bytes]  # of rows that were not damaged


def make_file(folder: Path, number: int, count: int, random_: random.Random, tally: Counter[str]) -> File:
    """One file; successive numbers go through all formats and containers."""
    name, suffix = KINDS[number % len(KINDS)]
    lines, markers = [], set()
    for i in range(count):
        marker = f"mk{number:04d}x{i:05d}z"
        row = GOOD[name](marker)
        good = i < 3 or random_.random() > DAMAGED  # the first rows show the format
        if good:
            markers.add(marker.encode())
        damage = random_.choice(list(DAMAGES))
        tally["damaged"] += not good
        if suffix == "csv":
            line = csv_line((row if good else swapped(row, random_)).values())
            lines.append(line if good else random_.choice((byte_flip, cut, control))(line, row, random_) + b"\r\n")
        else:
            raw = json.dumps(row).encode()
            lines.append(raw if good else DAMAGES[damage](raw, row, random_))
    end = b"\n" if random_.random() < 0.5 else b""
    if suffix == "jsonl":
        content = b"\n".join(lines) + end
    elif suffix == "json":
        content = b"[\n" + b",\n".join(lines) + b"\n]" + end
    else:
        content = b"".join([csv_line(GOOD[name]("x")), *lines])
    path = folder / f"{number:04d}-{name.replace(' ', '-')}.{suffix}"
    path.write_bytes(content)
    tally[f"{suffix} rows"] += count
    return File(path, content, markers)


def csv_line(cells: Any) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerow([one if isinstance(one, str) else json.dumps(one) for one in cells])
    return text.getvalue().encode("utf-8", "replace")


def check(file: File, out: Path, code: int, said: str, tally: Counter[str], strict: bool) -> list[str]:
    """The promises that one import broke. strict: nothing was filtered or dropped."""
    if code not in (0, 2) or "Traceback" in said:
        return [f"{file.path}: exit code {code}: {said[-2000:]}"]
    written_to = out if out.exists() else out.with_name(out.name + ".partial")
    if not written_to.exists():
        if "damaged" not in said or file.path.suffix == ".jsonl":
            return [f"{file.path}: nothing was written: {said[-500:]}"]
        tally["refused"] += 1
        return []
    problems = []
    (entry,) = json.loads((written_to / "report.json").read_text(encoding="utf-8"))["files"]
    counts = entry["counts"]
    tally.update(counts)
    if counts["input"] != sum(counts[name] for name in ("accepted", "duplicates", "filtered", "rejected")):
        problems.append(f"{file.path}: counts do not add up: {counts}")
    lines = file.content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if file.path.suffix == ".jsonl" and sum(bool(line.strip(BLANK)) for line in lines) != counts["input"]:
        problems.append(f"{file.path}: {counts['input']} of its lines counted")
    originals: list[bytes] = []
    for number, line in enumerate((written_to / "rejects.jsonl").read_bytes().split(b"\n")[:-1], start=1):
        problems += check_reject(f"{written_to}/rejects.jsonl:{number}", line, file, originals)
    if strict:
        written = {marker for path in written_to.glob("*/*.jsonl") for marker in MARKER.findall(path.read_bytes())}
        named = set(MARKER.findall(file.content))
        assert named >= file.markers
        tally["found again"] += len(named)
        if lost := sorted(named - written - set(MARKER.findall(b"\n".join(originals)))):
            problems.append(f"{file.path}: {len(lost)} rows are nowhere, first {lost[0].decode()}")
    return problems


def check_reject(where: str, line: bytes, file: File, originals: list[bytes]) -> list[str]:
    """Compare a reject's original with the file, and add it to `originals`."""
    try:
        entry = json.loads(line)
    except ValueError as error:
        return [f"{where}: {error}"]
    raw = entry["original"].encode() if "original" in entry else base64.b64decode(entry.get("base64", ""))
    originals.append(raw)
    if "bytes" in entry:  # a long one, of which the beginning is kept
        originals.append(file.content.split(b"\n")[entry["line"] - 1])
    problems = []
    if file.path.suffix == ".jsonl" and (raw not in file.content or not raw):
        problems.append(f"{where}: the original is not in the file")
    if "\n" in entry["message"] or not entry["message"]:
        problems.append(f"{where}: the message is not one line: {entry['message']!r}")
    return problems


def run_import(folder: Path, out: Path, more: list[str]) -> tuple[int, str]:
    """Exit code and what was printed."""
    command = [sys.executable, "-m", "rlhf", "import", f"path={folder}", f"out={out}", *more]
    both: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run(command, **both, env=os.environ | {"RLHF_PROGRESS": "off"}, timeout=LONGEST_IMPORT)
    except subprocess.TimeoutExpired:
        return -1, f"no end within {LONGEST_IMPORT} s"
    return done.returncode, done.stdout.decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True, help="for the files; chunks with a problem stay there")
    given = parser.parse_args()
    tally: Counter[str] = Counter()
    broken = done = chunk = 0
    started = time.monotonic()
    while done < given.rows:
        random_ = random.Random(f"{given.seed}-{chunk}")
        inside, out = given.folder / f"chunk-{chunk:03d}", given.folder / f"out-{chunk:03d}"
        places = (inside, out, out.with_name(out.name + ".partial"))
        for old in places:
            shutil.rmtree(old, ignore_errors=True)
        inside.mkdir(parents=True)
        count = min(ROWS_A_FILE, given.rows - done)
        file = make_file(inside, chunk, count, random_, tally)
        strict = chunk % 3 != 2
        more = ["duplicates=keep", "filter_prefixes=false", "max_prompts_per_user=1000000"] if strict else []
        problems = check(file, out, *run_import(inside, out, more), tally, strict)
        for problem in problems:
            print(f"PROBLEM: {problem}", flush=True)
        for old in () if problems else places:
            shutil.rmtree(old, ignore_errors=True)
        broken, chunk, done = broken + len(problems), chunk + 1, done + count
    print(f"{done:,} rows in {chunk} imports, {time.monotonic() - started:.0f} s; promises broken: {broken}")
    print(", ".join(f"{count:,} {name}" for name, count in tally.items()))
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
