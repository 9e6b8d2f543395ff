"""Feed `rlhf import` damaged files of every format, and check that it keeps its promises. Seeded; it trains nothing.

    python scripts/fuzz_import.py --rows 100000 --folder /tmp/fuzz

Good rows of each format are written as JSON Lines, JSON arrays and CSV, most of them damaged in one way of `DAMAGES`,
and imported by a process a chunk. Of each import it checks:

    exit code 0 or 2, no traceback         counts add up, and equal the lines of JSON Lines that are not blank
    rejects.jsonl parses, and each original (text, base64 or sha256) is what stands in the file at the stated offset
    every row is found again               by a marker in its text (whole or damaged, as long as that can be read): in a
                                           record, or within the original of a reject; where nothing is filtered
"""

import argparse
import base64
import csv
import hashlib
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

ROWS_A_FILE = 500
FILES_A_CHUNK = 6
DAMAGED = 0.8  # of the rows
LONGEST_IMPORT = 300  # seconds
MARKER = re.compile(rb"mk\d{4}x\d{5}z")
BLANK = b" \t\r"  # a line of nothing else is no row


# --- good rows -------------------------------------------------------------------------------------------------------


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def says(who: str, text: str) -> dict[str, str]:
    return {"from": who, "value": text}


def _oasst(m: str) -> dict[str, Any]:
    replies = [
        {"message_id": f"{m}-{i}", "text": f"Reply {i}.", "role": "assistant", "rank": i, "replies": []} for i in (0, 1)
    ]
    root = {"message_id": m, "text": f"Name {m}.", "role": "prompter", "lang": "en", "replies": replies}
    return {"message_tree_id": m, "tree_state": "ready_for_export", "prompt": root}


def _summaries(m: str) -> dict[str, Any]:
    info = {"id": m, "post": f"Post {m}.", "title": "T", "subreddit": "s", "site": None, "article": None}
    both = [{"text": f" Short {i}.", "policy": f"p{i}", "note": None} for i in (0, 1)]
    return {"info": info, "split": "train", "summaries": both, "choice": 1, "worker": "w", "batch": "b", "extra": {}}


def _webgpt(m: str) -> dict[str, Any]:
    row: dict[str, Any] = {"question": {"dataset": "d", "id": m, "full_text": f"Why {m}?"}}
    for i in (0, 1):
        row |= {f"quotes_{i}": {"title": [], "extract": []}, f"answer_{i}": f"Since {i}.", f"score_{i}": i - 0.5}
        row[f"tokens_{i}"] = {"prefix": [1], "completion": [i]}
    return row


def _ultrafeedback(m: str) -> dict[str, Any]:
    made = [{"model": f"m{i}", "response": f"R{i}.", "overall_score": i, "fine-grained_score": i, "annotations": {}}
            for i in (1, 2)]  # fmt: skip
    return {"source": "s", "instruction": f"Say {m}.", "models": ["m1", "m2"], "completions": made}


def _label_studio(m: str) -> dict[str, Any]:
    result = {"value": {"selected": "left"}, "from_name": "better", "to_name": "left", "type": "pairwise"}
    data = {"item": m, "prompt": f"Say {m}.", "left": "L.", "right": "R.", "left_id": "a", "right_id": "b"}
    data |= {"dialogue": [user(f"Say {m}.")], "about": {"a": {"policy": "p"}, "b": {"policy": "p"}}, "metadata": {}}
    return {"id": 1, "data": data, "annotations": [{"id": 1, "completed_by": 1, "result": [result], "lead_time": 2.5}]}


def _argilla(m: str) -> dict[str, Any]:
    return {
        "id": m, "fields": {"instruction": f"Say {m}.", "response": "Yes."}, "metadata": {}, "suggestions": {},
        "responses": {"quality": [{"value": 5, "user_id": "u"}]}, "vectors": {}, "_server_id": m,
    }  # fmt: skip


def _nectar(m: str) -> dict[str, Any]:
    answers = [{"answer": f"A{i}.", "model": f"m{i}", "rank": float(i)} for i in (1, 2)]
    return {"prompt": f"\n\nHuman: Say {m}.\n\nAssistant: ", "answers": answers, "turns": 1, "source": ["s"]}


def _qa_feedback(m: str) -> dict[str, Any]:
    row = {"question": f"Who is {m}?", "passages": [["T", "First."]], "gold": "g", "feedback": {"errors": []}}
    return row | {f"prediction {i}": f"w{i}" for i in range(1, 5)} | {"preference": [1, 1, 0, 0, 2, 2]}


def _native(m: str) -> dict[str, Any]:
    responses = [{"id": name, "text": f"Text {name}.", "policy": "p"} for name in "abc"]
    return {
        "kind": "ranking", "id": m, "prompt": [user(f"Say {m}.")], "responses": responses, "ranking": [["b"], ["a", "c"]],
        "ratings": {"a": 3}, "flags": {"c": ["harmful"]}, "labeler": "ann", "seconds": 3.5,
        "created": "2026-05-01T10:00:00Z", "metadata": {"user": m, "group": m},
    }  # fmt: skip


ABOUT = '{"responses": {"a": {"policy": "p"}, "b": {"policy": "p"}}}'
TASKS = {"winner": "left", "labeler": "kim", "ids": "a b", "about": ABOUT}
GOOD: dict[str, Callable[[str], dict[str, Any]]] = {
    "native": _native,
    "native demonstration": lambda m: {"kind": "demonstration", "prompt": f"Say {m}.", "response": "Yes."},
    "native prompt": lambda m: {"kind": "prompt", "prompt": f"Say {m}.", "user": "u"},
    "hh": lambda m: {"chosen": f"\n\nHuman: {m}\n\nAssistant: Yes", "rejected": f"\n\nHuman: {m}\n\nAssistant: No"},
    "hh scores": lambda m: {"text": [f"\n\nHuman: {m}\n\nAssistant: {a}" for a in ("Yes", "No")], "score": [1.0, 0.0]},
    "trl": lambda m: {"prompt": f"Say {m}.", "chosen": "Yes.", "rejected": "No."},
    "trl turns": lambda m: {"chosen": [user(m), answer("Yes.")], "rejected": [user(m), answer("No.")]},
    "pairs": lambda m: {"question": f"Say {m}.", "response_j": "Yes.", "response_k": "No."},
    "alpaca": lambda m: {"instruction": f"Say {m}.", "input": "", "output": "Yes."},
    "sharegpt": lambda m: {"conversations": [says("human", m), says("gpt", "Yes.")]},
    "messages": lambda m: {"messages": [user(m), answer("Yes.")]},
    "openai_comparisons": _summaries,
    "webgpt": _webgpt,
    "oasst": _oasst,
    "ultrafeedback": _ultrafeedback,
    "nectar": _nectar,
    "choices": lambda m: {"prompt": f"Say {m}.", "chosen": ["Yes."], "rejected": ["No.", "Nay."], "id": m},
    "kto": lambda m: {"prompt": f"Say {m}.", "completion": "Yes.", "label": True},
    "self_instruct": lambda m: {"id": m, "name": "n", "instruction": f"Add {m}.",
                                "instances": [{"input": "1", "output": "3"}]},
    "qa_feedback": _qa_feedback,
    "question_answer": lambda m: {"question": f"{m}?", "answer": "2"},
    "decoded": lambda m: {"id": 0, "instruction": m, "text": "Hello", "decoded": "Hum"},
    "mt_bench": lambda m: {"question_id": 81, "category": "c", "turns": [f"Say {m}.", "Say b."]},
    "argilla": _argilla,
    "label_studio": _label_studio,
    "tasks_csv": lambda m: {"item": m, "prompt": f"Say {m}.", "left": "Yes.", "right": "No."} | TASKS,
}  # fmt: skip
FLAT = ("trl", "pairs", "alpaca", "kto", "question_answer", "tasks_csv")  # their rows are as good in CSV


# --- damage ----------------------------------------------------------------------------------------------------------


def _somewhere(value: Any, random_: random.Random) -> tuple[Any, Any]:
    """A container within a row and a key of it, chosen at random; at every level it may stop."""
    key = random_.choice(list(value) if isinstance(value, dict) else range(len(value)))
    inner = value[key]
    if isinstance(inner, dict | list) and inner and random_.random() < 0.7:
        return _somewhere(inner, random_)
    return value, key


def _swapped(row: dict[str, Any], random_: random.Random) -> Any:
    """The row with one value of another type."""
    row = json.loads(json.dumps(row))
    where, key = _somewhere(row, random_)
    odd = ["", " ", "a", "left", 0, -1, 7, 1.5, 1e308, True, False, None, [], {}, [[]], [None], {"": ""}, "\0", "\x1b[31m",
           "\u2028", "\ufeff", "NaN", [where[key]], {"a": where[key]}, str(where[key]), 10**400, "0" * 50, ["x"] * 60,
           "2026-13-45", "\U0001f600" * 3, "a\u0300\u0315" * 20, json.loads(json.dumps(row))]  # fmt: skip
    where[key] = random_.choice(odd)
    if isinstance(where, dict) and random_.random() < 0.2:
        del where[key]
    return row


def _with_token(row: dict[str, Any], random_: random.Random, token: str) -> bytes:
    """The row as JSON with one value replaced by text that json.dumps would not write."""
    row = json.loads(json.dumps(row))
    where, key = _somewhere(row, random_)
    where[key] = "@@@"
    return json.dumps(row).replace('"@@@"', token, 1).encode("utf-8", "surrogatepass")


def _byte_flip(raw: bytes, row: Any, random_: random.Random) -> bytes:
    data = bytearray(raw)
    for _ in range(random_.choice((1, 1, 2, 8))):
        data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
    return bytes(data)


def _cut(raw: bytes, row: Any, random_: random.Random) -> bytes:
    begin, end = sorted(random_.choices(range(len(raw) + 1), k=2))
    return random_.choice((raw[:end], raw[begin:], raw[:begin] + raw[end:], raw + raw[begin:end]))


def _insert(raw: bytes, random_: random.Random, what: bytes) -> bytes:
    at = random_.randrange(len(raw) + 1)
    return raw[:at] + what + raw[at:]


def _control(raw: bytes, row: Any, random_: random.Random) -> bytes:
    return _insert(raw, random_, bytes([random_.choice([*range(1, 10), *range(11, 32), 127])]))


def _nested(raw: bytes, row: Any, random_: random.Random) -> bytes:
    depth = random_.choice((90, 150, 190, 200, 210, 300, 450, 600, 900, 940, 980, 1000, 3000, 10_000))
    opening, closing = random_.choice((("[", "]"), ('{"a":', "}"), ('[{"b":', "}]")))
    inner = "1" if random_.random() < 0.7 else ""
    return _with_token(
        row, random_, opening * depth + inner + closing * (depth if random_.random() < 0.9 else depth // 2)
    )


def _number(raw: bytes, row: Any, random_: random.Random) -> bytes:
    numbers = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 300, "9" * 5000, "-0", "1e-999", "0x10", "01")
    return _with_token(row, random_, random_.choice(numbers))


def _surrogate(raw: bytes, row: Any, random_: random.Random) -> bytes:
    kinds = ('"\\ud800"', '"a\\udfffb"', '"\\udc00\\ud800"', '"\ud800"', '{"\\ud800": 1}', '"\\ud83d\\ude00"')
    return _with_token(row, random_, random_.choice(kinds))


def _twice(raw: bytes, row: Any, random_: random.Random) -> bytes:
    key = json.dumps(random_.choice(list(row))).encode()
    return raw[:-1] + b", " + key + b": 1}"


def _long(raw: bytes, row: Any, random_: random.Random) -> bytes:
    if random_.random() > 0.1:  # some are enough
        return _number(raw, row, random_)
    unit = random_.choice(("a", "a@", "1 ", "\\u0315\\u0300", "\\n", '\\"', "é", "a.", "a@a.", "(", " ", "mk"))
    text = unit * (random_.choice((200_000, 1_100_000)) // len(unit)) + random_.choice(("", "@", "1", "x"))
    if random_.random() < 0.5:
        return _with_token(row, random_, f'"{text}"')
    return re.sub(rb"mk\w+z", lambda _: text.encode(), raw, count=1)  # in the prompt, or beside it


def _crowd(raw: bytes, row: Any, random_: random.Random) -> bytes:
    """Tens of thousands of keys, responses or judgements."""
    if random_.random() > 0.05:
        return _twice(raw, row, random_)
    many = range(random_.choice((1000, 40_000)))
    responses = json.dumps([{"id": str(i), "text": "t"} for i in many])
    chain = json.dumps([[str(i), str(i + 1)] for i in many[:-1]])
    token = random_.choice((
        "{" + ",".join(f'"k{i}": 1' for i in (*many, many[-1])) + "}", responses, chain, "[" + "1," * len(many) + "1]",
        json.dumps({str(i): 5 for i in many}),
    ))  # fmt: skip
    if random_.random() < 0.5:
        return _with_token(row, random_, token)
    made = f'"responses": {responses}, ' + random_.choice(
        (f'"pairs": {chain}', f'"ranking": [{json.dumps(list(map(str, many)))}]')
    )
    return b'{"kind": "ranking", "prompt": "p", ' + made.encode() + b"}"


def _encoded(raw: bytes, row: Any, random_: random.Random) -> bytes:
    text = json.dumps(row | {"note": "café"}, ensure_ascii=False)
    return text.encode(random_.choice(("latin-1", "utf-16", "utf-16-le", "utf-32", "cp1252", "utf-8-sig", "utf-7")))


DAMAGES: dict[str, Callable[[bytes, dict[str, Any], random.Random], bytes]] = {
    "byte flips": _byte_flip,
    "cuts": _cut,
    "NUL": lambda raw, row, random_: _insert(raw, random_, b"\0" * random_.choice((1, 5))),
    "control characters": _control,
    "lone surrogates": _surrogate,
    "numbers": _number,
    "duplicate keys": _twice,
    "deep nesting": _nested,
    "swapped types": lambda raw, row, random_: json.dumps(_swapped(row, random_), default=str).encode(),
    "encodings": _encoded,
    "BOM": lambda raw, row, random_: random_.choice((b"\xef\xbb\xbf" + raw, _insert(raw, random_, b"\xef\xbb\xbf"))),
    "line ends": lambda raw, row, random_: random_.choice((raw + b"\r", raw.replace(b" ", b"\r\n", 1), raw + b"\n\n\r\n")),
    "text around": lambda raw, row, random_: random_.choice((raw + raw, raw + b",", b"[" + raw, b"// x", b"null", b"{}")),
    "megabytes": _long,
    "crowds": _crowd,
}  # fmt: skip


# --- files -----------------------------------------------------------------------------------------------------------


@dataclass
class File:
    """A file as it was written."""

    path: Path
    content: bytes
    markers: list[str]  # of rows that were not damaged


@dataclass
class Tally:
    """What the imports made of it."""

    rows: Counter[str] = field(default_factory=Counter)  # given, by container
    damages: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)  # peak of each chunk, bytes
    seconds: float = 0.0


def damaged(good: Callable[[str], dict[str, Any]], count: int, name: str, random_: random.Random, tally: Tally
            ) -> Iterator[tuple[bytes, dict[str, Any], str | None]]:  # fmt: skip
    """Rows as JSON, most of them damaged; beside each the good row, and its marker where it is whole."""
    for i in range(count):
        marker = f"mk{name}x{i:05d}z"
        row = good(marker)
        raw = json.dumps(row).encode()
        if i < 3 or random_.random() > DAMAGED:  # the first ones tell the format
            yield raw, row, marker
            continue
        damage = random_.choice(list(DAMAGES))
        tally.damages[damage] += 1
        yield DAMAGES[damage](raw, row, random_), row, None


def csv_cells(row: dict[str, Any]) -> list[str]:
    return [one if isinstance(one, str) else json.dumps(one) for one in row.values()]


def make_file(folder: Path, number: int, count: int, random_: random.Random, tally: Tally) -> File:
    """One file: its format and its container go through all there are, file after file."""
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
            changed = row if marker else _swapped(row, random_)
            csv.writer(text).writerow(csv_cells(changed))
            line = text.getvalue().encode("utf-8", "replace")
            by_bytes = (_byte_flip, _cut, _control)
            lines.append(line if marker else random_.choice(by_bytes)(line, row, random_) + b"\r\n")
        content = b"".join(lines)
    path = folder / f"{number:04d}-{name.replace(' ', '-')}.{suffix}"
    path.write_bytes(content)
    tally.rows[suffix] += count
    return File(path, content, markers)


# --- checks ----------------------------------------------------------------------------------------------------------


def check(files: list[File], out: Path, code: int, said: str, tally: Tally, strict: bool) -> None:
    """Whether one import kept its promises; every broken one is a problem."""
    problem = tally.problems.append
    if code not in (0, 2) or "Traceback" in said:
        problem(f"{files[0].path.parent}: exit code {code}: {said[-2000:]}")
        return
    found = out if out.exists() else out.with_name(out.name + ".partial")
    if not found.exists():
        problem(f"{files[0].path.parent}: nothing was written: {said[-500:]}")
        return
    report = json.loads((found / "report.json").read_text(encoding="utf-8"))
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
    originals = check_rejects(found, by_name, problem)
    if strict:  # nothing was filtered or dropped
        written = {marker for path in found.rglob("*.arrow") for marker in MARKER.findall(path.read_bytes())}
        for file in files:
            named = set(MARKER.findall(file.content))
            assert named.issuperset(marker.encode() for marker in file.markers)
            tally.counts["found again"] += len(named)
            lost = sorted(named - written - set(MARKER.findall(originals[str(file.path)])))
            if lost:
                problem(f"{file.path}: {len(lost)} rows are nowhere, first {lost[0].decode()}")


def check_rejects(found: Path, by_name: dict[str, File], problem: Callable[[str], None]) -> dict[str, bytes]:
    """Compare each reject's original with the file; returns the originals of each file, joined."""
    originals: dict[str, list[bytes]] = {name: [] for name in by_name}
    for number, line in enumerate((found / "rejects.jsonl").read_bytes().split(b"\n")[:-1], start=1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            problem(f"{found}/rejects.jsonl:{number}: {error}")
            continue
        content, at = by_name[entry["file"]].content, entry["offset"]
        if "original" in entry:
            raw = entry["original"].encode()
        elif "base64" in entry:
            raw = base64.b64decode(entry["base64"])
        elif "sha256" in entry:
            raw = content[at : at + entry["bytes"]]
            if hashlib.sha256(raw).hexdigest() != entry["sha256"] or len(raw) != entry["bytes"]:
                problem(f"{found}/rejects.jsonl:{number}: another sha256 than the file at {at}")
        elif "does not end" in entry["message"]:
            continue
        else:
            problem(f"{found}/rejects.jsonl:{number}: no original: {entry['message']}")
            continue
        if content[at : at + len(raw)] != raw:
            problem(f"{found}/rejects.jsonl:{number}: the original is not what stands at {at}")
        if "\n" in entry["message"] or not entry["message"]:
            problem(f"{found}/rejects.jsonl:{number}: the message is not one line: {entry['message']!r}")
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
                child.kill()  # what never ends is a problem as well
    said = log.read_text(encoding="utf-8", errors="replace")
    log.unlink()
    return child.returncode, said, peak


def peak_memory(pid: int) -> int:
    """The most bytes that a process has held so far; 0 where it ended. (What wait4 tells counts its parent's, too.)"""
    try:
        found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


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
    print(f"| peak memory of an import | first {memory[0]:.0f} MB, last {memory[-1]:.0f} MB, "
          f"least {min(memory):.0f} MB, most {max(memory):.0f} MB |")  # fmt: skip
    print(f"| promises broken | {len(tally.problems)} |")
    sys.exit(1 if tally.problems else 0)


if __name__ == "__main__":
    main()
