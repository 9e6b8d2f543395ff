"""scripts/gpu/run.sh as a rehearsal on the CPU. Not here: what it measures on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu" / "run.sh"
PARTS = ["tests", "pretrain", "decode", "ppo", "ppo13", "chat13", "sentiment", "dialogue"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """The script in a rehearsal with this Python, where no peer's environment exists."""
    settings = {
        "DEVICE": "cpu", "SIZE": "tiny", "REPEATS": "1", "PYTHON": sys.executable, "BENCH_PEERS": "/nonexistent",
    }  # fmt: skip
    given = os.environ | settings | environment
    return subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, timeout=1200, env=given)


def figures_of(folder: Path, part: str) -> dict:
    found = json.loads((folder / f"{part}.json").read_text())
    assert found["device"] == "cpu" and len((found["commit"] or "")[:40]) in (0, 40)
    return found


def test_the_parts_are_listed():
    done = run("list")
    assert done.returncode == 0 and [line.split()[0] for line in done.stdout.splitlines()] == PARTS


@pytest.mark.long
def test_decoding_writes_its_figures(tmp_path):
    done = run("decode", "--out", str(tmp_path), ONLY="ours")
    assert done.returncode == 0, done.stderr[-2000:]
    found = figures_of(tmp_path, "decode")
    ((name, case),) = found["cases"].items()
    assert name == "quick, whole" and case["spec"]["batch"] == 8 and found["apart"]
    ours = case["contestants"]["ours"]
    assert {"torch", "transformers"} <= set(ours["versions"]) and ours["units"] == 8 * 16
    (line,) = map(json.loads, (tmp_path / "decode.jsonl").read_text().splitlines())
    assert line["contestant"] == "ours" and line["units_per_second"] == ours["units_per_second"]
    shares, memory = case["bandwidth"]["shares"], case["bandwidth"]
    assert list(shares) == list(case["contestants"]) == ["ours"]
    # 2 layers of width 32 and 256 tokens; keys and values of 8 rows of 10 + 8 tokens on average; 4 bytes each
    assert memory["bytes_per_step"] == 4 * (12 * 2 * 32**2 + 256 * 32 + 8 * 2 * 2 * 32 * (10 + 8))
    rate = ours["units_per_second"] / 8 * memory["bytes_per_step"]
    assert shares["ours"] == pytest.approx(rate / memory["bytes_per_second"], rel=1e-6)


@pytest.mark.long  # every other part: some twelve processes that import the libraries
def test_all_parts_run(tmp_path):
    done = run("all", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path.stem for path in tmp_path.glob("*.json")} == set(PARTS[:-2])
    tests = figures_of(tmp_path, "tests")["tests"]
    assert tests and {row["outcome"] for row in tests.values()} == {"passed"}
    for part in ("pretrain", "ppo", "ppo13", "chat13"):
        for case in figures_of(tmp_path, part)["cases"].values():
            assert all("mfu" not in f for f in case["contestants"].values())  # no peak rate of a CPU is known
    chat = figures_of(tmp_path, "chat13")["cases"]["quick, deepspeed-chat"]
    assert chat["spec"]["reward"] != chat["spec"]["size"]
    assert chat["contestants"]["ours"]["processed"] > chat["contestants"]["ours"]["units"] > 0
