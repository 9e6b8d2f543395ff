"""Mutation tests: change one line of the package at a time and check that its test fails.

The mutations are in `scripts/mutations/*.yaml`: what is wrong, the folder or file under rlhf/ that contains `old` exactly once,
`new`, and the fastest test that fails, in float32 and, if bfloat16 is computed differently, in bfloat16. The package and its tests
are copied to a temporary folder; the checkout is never edited. First the tests run on the unchanged copy, where all must pass.
Then each mutation must make its tests fail.

    python scripts/mutations.py                  # all of them; exit code 1 if one survives
    python scripts/mutations.py --only kl gae    # those whose place or text contains one of these words
    python scripts/mutations.py --part 2/3       # every third, from the second on: three calls share the work
    python scripts/mutations.py --list

Prints one row per run: number, place, what is wrong, precision, outcome, the test that failed, seconds. Outcomes: killed; SURVIVED
(the tests still pass); STALE (the fragment does not occur exactly once, or a test is missing); BROKEN (the mutated package cannot be
imported); TIMEOUT. Every outcome except killed is a failure.
"""

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("rlhf", "tests", "conf", "data")
LIMIT = 600  # seconds per run of the tests
FAILED, COLLECTION = 1, 2  # pytest's exit codes
OUTCOMES = {None: "TIMEOUT", 0: "SURVIVED", FAILED: "killed", 4: "STALE (no such test)", 5: "STALE (no such test)"}
FIRST_UPDATE = re.compile(r"invariant \d fails on the first update")


class Mutation(NamedTuple):
    wrong: str
    where: str
    old: str
    new: str
    float32: str | None = None
    bfloat16: str | None = None


def read_table() -> list[Mutation]:
    paths = sorted((ROOT / "scripts" / "mutations").glob("*.yaml"))
    return [Mutation(**row) for path in paths for row in yaml.safe_load(path.read_text(encoding="utf-8"))]


def prepare(folder: Path) -> None:
    """Copy the project, set the environment and import the libraries once: each run is a fork of this process."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    os.chdir(folder)
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    os.environ["CI"] = "1"  # property tests then try the same examples each time
    os.environ.setdefault("RLHF_GOLD_RUN", str(folder / "gold_run"))  # made once, by the unchanged package
    others = [path for path in sys.path if path and Path(path).resolve() not in (ROOT, ROOT / "scripts")]
    sys.path[:] = [str(folder), *others]
    import datasets  # noqa: F401
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import transformers
    import trl  # noqa: F401

    # Imported lazily, by name.
    _ = transformers.PreTrainedModel, transformers.Trainer, transformers.PreTrainedTokenizerFast, torch.optim.AdamW
    assert not any(name.split(".")[0] == "rlhf" for name in sys.modules), "each run imports the mutated package"


def run_tests(nodes: list[str], log: Path) -> tuple[int | None, float]:
    """pytest's exit code (None after LIMIT seconds), and the seconds."""
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1), os.dup2(output, 2)
        import pytest

        options = "-x -q --tb=short -p no:cacheprovider -p no:xdist -o addopts= --timeout=0"
        try:
            code = int(pytest.main([*options.split(), *nodes]))
        except BaseException:
            code = COLLECTION
        sys.stdout.flush()
        os._exit(code)
    try:
        while time.monotonic() - started < LIMIT:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                child = 0
                return os.waitstatus_to_exitcode(status), time.monotonic() - started
            time.sleep(0.05)
        return None, time.monotonic() - started
    finally:
        if child:  # after LIMIT seconds, or on an interrupt
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)


def place_of(mutation: Mutation, folder: Path) -> Path | None:
    """The file under `mutation.where` that contains the fragment; None unless it occurs exactly once."""
    where = folder / "rlhf" / mutation.where
    files = [where] if where.is_file() else sorted(where.rglob("*.py"))
    occurrences = [path for path in files for _ in range(path.read_text(encoding="utf-8").count(mutation.old))]
    return occurrences[0] if len(occurrences) == 1 else None


def killer(log: Path) -> str:
    """The test that failed, and the check of PPO's first update if that failed it."""
    text = log.read_text(encoding="utf-8", errors="replace")
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", text, re.M)
    check = FIRST_UPDATE.search(text)
    return (failed[0] if failed else "?") + (f" ({check[0]})" if check and failed else "")


def apply(number: int, mutation: Mutation, folder: Path) -> list[tuple[str, str, str, float]]:
    """(precision, outcome, killer, seconds) of each of the mutation's tests."""
    path = place_of(mutation, folder)
    if path is None:
        return [("float32", "STALE (fragment does not occur exactly once)", "", 0.0)]
    before, stamp = path.read_text(encoding="utf-8"), path.stat().st_mtime
    path.write_text(before.replace(mutation.old, mutation.new), encoding="utf-8")
    os.utime(path, (stamp + number, stamp + number))  # or Python might use the compiled module of another mutation
    results = []
    try:
        for precision, test in (("float32", mutation.float32), ("bfloat16", mutation.bfloat16)):
            if test:
                log = folder / f"{number}-{precision}.log"
                code, seconds = run_tests([test], log)
                results.append(
                    (precision, OUTCOMES.get(code, "BROKEN"), killer(log) if code == FAILED else "", seconds)
                )
    finally:
        path.write_text(before, encoding="utf-8")
        os.utime(path, (stamp, stamp))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="words; a mutation runs if its place or text contains one")
    parser.add_argument("--part", default="1/1", help="2/3: every third mutation, from the second on")
    parser.add_argument("--list", action="store_true", help="print the table and stop")
    arguments = parser.parse_args()
    words = arguments.only or [""]
    rows = [(n, m) for n, m in enumerate(read_table(), 1) if any(w in f"{m.where} {m.wrong} {m.new}" for w in words)]
    part, parts = map(int, arguments.part.split("/"))
    rows = rows[part - 1 :: parts]
    if arguments.list:
        for number, mutation in rows:
            print(number, mutation.where, mutation.wrong, mutation.float32, mutation.bfloat16, sep=" | ")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        folder = Path(name)
        prepare(folder)
        nodes = sorted({test for _, m in rows for test in (m.float32, m.bfloat16) if test})
        code, seconds = run_tests(nodes, folder / "baseline.log")
        print(f"unchanged: {len(nodes)} tests, exit code {code}, {seconds:.0f} s", flush=True)
        if code != 0:
            print((folder / "baseline.log").read_text(encoding="utf-8")[-3000:])
            return 1
        killed: list[bool] = []
        for number, mutation in rows:
            about = f"{number} | {mutation.where} | {mutation.wrong}"
            for precision, outcome, test, seconds in apply(number, mutation, folder):
                print(f"{about} | {precision} | {outcome} | {test} | {seconds:.1f}", flush=True)
                killed.append(outcome == "killed")
    print(f"{len(rows)} mutations: {sum(killed)} runs killed, {killed.count(False)} not")
    return 0 if all(killed) else 1


if __name__ == "__main__":
    sys.exit(main())
