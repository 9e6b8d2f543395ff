"""Speed and peak memory of `rlhf import` on generated comparisons.

python scripts/import_speed.py --megabytes 30 --folder /tmp/speed
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


def measure(path: Path, out: Path) -> tuple[float, float]:
    """Seconds of an import, and its peak memory in MB without the pages of files that it maps."""
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "rlhf", "import", f"path={path}", f"out={out}"]
    started = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    peak = 0
    while child.poll() is None:
        found = re.search(r"RssAnon:\s*(\d+) kB", Path(f"/proc/{child.pid}/status").read_text(encoding="utf-8"))
        peak = max(peak, int(found[1]) * 1024 if found else 0)
        time.sleep(0.1)
    if child.returncode != 0:
        raise SystemExit(f"the import failed with exit code {child.returncode}")
    return time.monotonic() - started, peak / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=30)
    parser.add_argument("--folder", type=Path, required=True, help="for the data; needs about three times its size")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    path = arguments.folder / f"comparisons-{arguments.megabytes:g}-{arguments.seed}.jsonl"
    rows = make_comparisons(path, arguments.megabytes, arguments.seed)
    size = path.stat().st_size / 1e6
    print(f"{size:.1f} MB, {rows:,} comparisons", flush=True)
    seconds, peak = measure(path, arguments.folder / "import")
    print(f"{seconds:.1f} s, {size / seconds:.1f} MB/s, peak {peak:.0f} MB")


if __name__ == "__main__":
    main()
