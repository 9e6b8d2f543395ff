"""Speed and memory of `rlhf import` with one process and with two, on generated comparisons.

    python scripts/import_speed.py --megabytes 1000 --folder /tmp/speed

The peak memory is that of the import's process and its workers together, sampled every 0.1 s.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

VOCABULARY = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were her all she there would their we him been has when who will more no if out so said what up its about "
    "into than them can only other new some could time these two may then do first any my now such like our over man "
    "me even most made after also did many before must through back years where much your way well down should because"
)
WORDS = VOCABULARY.split()


def text(random_: random.Random, least: int, most: int) -> str:
    return " ".join(random_.choices(WORDS, k=random_.randint(least, most))).capitalize() + "."


def make_comparisons(path: Path, megabytes: float, seed: int) -> int:
    """Write native rankings of 2 to 5 responses, a quarter of the items judged twice; returns the number of rows."""
    random_ = random.Random(seed)
    rows = size = 0
    with path.open("w", encoding="utf-8") as file:
        while size < megabytes * 1e6:
            names = "abcde"[: random_.randint(2, 5)]
            prompt = [{"role": "user", "content": text(random_, 5, 120)}]
            responses = [{"id": name, "text": text(random_, 5, 150), "policy": "p"} for name in names]
            people = random_.sample(range(40), k=2 if random_.random() < 0.25 else 1)
            for person in people:
                order = random_.sample(names, k=len(names))
                item = {"kind": "ranking", "id": f"r-{rows}", "prompt": prompt, "responses": responses}
                judgement = {"ranking": [[name] for name in order], "labeler": f"labeler-{person}"}
                about = {"seconds": round(random_.uniform(5, 300), 1), "metadata": {"round": rows % 7}}
                line = json.dumps(item | judgement | about) + "\n"
                file.write(line)
                size += len(line)
                rows += 1
    return rows


def measure(path: Path, out: Path, processes: int) -> tuple[float, float]:
    """Seconds of an import, and the peak memory in MB of all its processes together."""
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "rlhf", "import", f"path={path}", f"out={out}", f"processes={processes}"]
    started = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    peak = 0
    while child.poll() is None:
        peak = max(peak, sum(resident(one) for one in family(child.pid)))
        time.sleep(0.1)
    seconds = time.monotonic() - started
    if child.returncode != 0:
        raise SystemExit(f"the import failed with exit code {child.returncode}")
    return seconds, peak / 1e6


def family(pid: int) -> list[int]:
    """A process and all processes that it started, from /proc."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(one) for task in tasks for one in (task / "children").read_text().split()]
    except OSError:  # it ended
        return [pid]
    return [pid, *(one for child in children for one in family(child))]


def resident(pid: int) -> int:
    """Resident bytes of a process, without the pages of files that it maps (the system may drop those)."""
    try:
        match = re.search(r"RssAnon:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--folder", type=Path, required=True, help="for the data; needs about three times its size")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    path = arguments.folder / f"comparisons-{arguments.megabytes:g}-{arguments.seed}.jsonl"
    rows = make_comparisons(path, arguments.megabytes, arguments.seed)
    size = path.stat().st_size / 1e6
    print(f"{size:.1f} MB, {rows:,} comparisons", flush=True)
    seconds = {}
    for processes in (1, 2):
        out = arguments.folder / f"import-{processes}"
        seconds[processes], peak = measure(path, out, processes)
        rate = size / seconds[processes]
        print(f"processes={processes}: {seconds[processes]:.1f} s, {rate:.1f} MB/s, peak {peak:.0f} MB", flush=True)
    one, two = ((arguments.folder / f"import-{n}" / "dataset.json").read_bytes() for n in (1, 2))
    print(f"speed-up {seconds[1] / seconds[2]:.2f}; results {'equal byte for byte' if one == two else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
