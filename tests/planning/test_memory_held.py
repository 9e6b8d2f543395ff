"""The bytes of model states that each of two processes really holds, against the formula, part by part."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.planning.memory import model_state_bytes

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
CASES = ["zero1:fp32:0", "zero3:bf16:20000"]  # in the last some tensors below it stay whole on both
MORE = ["zero2:bf16:0", "zero2:fp32:0", "zero3:fp32:0", "zero1:bf16:0", "zero3:bf16:0"]


def measure(out: Path, cases: list[str]) -> dict[str, dict[str, int]]:
    script = Path(__file__).with_name("state_ranks.py")
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script), str(out), *cases],
        check=True, timeout=400, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip
    return json.loads(out.read_text())


def assert_fits(case: str, found: dict[str, int]) -> None:
    name, dtype, _ = case.split(":")
    told = model_state_bytes(found["parameters"], 2, STAGES[name], dtype, persistent=found["persistent"])
    for part in ("weights", "gradients", "optimizer"):
        assert found[part] == pytest.approx(told[part], rel=0.05), f"{case}: {part}"


def test_bytes_held_fit_the_formula(tmp_path):
    found = measure(tmp_path / "held.json", CASES)
    assert found["zero3:bf16:20000"]["persistent"] > 0
    for case in CASES:
        assert_fits(case, found[case])


@pytest.mark.long
def test_bytes_held_in_all_ways(tmp_path):
    found = measure(tmp_path / "held.json", MORE)
    for case in MORE:
        assert_fits(case, found[case])
