"""scripts/fault_run.py in short: killed runs end as the undisturbed one, and it would say so if they did not."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "fault_run.py"


def load_script() -> ModuleType:
    environment = dict(os.environ)
    spec = importlib.util.spec_from_file_location("fault_run", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    os.environ.clear()
    os.environ.update(environment)
    return module


@pytest.mark.long
def test_a_few_kills_change_nothing(tmp_path: Path) -> None:
    out = tmp_path / "faults"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(out), "kills=10", "saves=2"],
        cwd=ROOT,
        timeout=900,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((out / "faults.json").read_text())
    assert found["kills"] >= 10 and found["in_save"] >= 2 and all(not told for told in found["runs"].values())
    assert {hit["stage"] for hit in found["hits"]} >= {"world", "pretrain"}

    # Were one number, or one byte of an output, another, it would be found.
    script = load_script()
    whole, killed = out / "whole" / script.RUN, out / "killed-0" / script.RUN
    assert script.differences(whole, killed) == []
    metrics = killed / "sft" / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text(text.replace('"sft/loss": ', '"sft/loss": 1', 1))
    assert script.differences(whole, killed) == ["sft/metrics.jsonl"]
    metrics.write_text(text + text.splitlines(keepends=True)[-1])
    assert script.differences(whole, killed) == ["sft/metrics.jsonl"], "a line twice"
    metrics.write_text(text)
    record = killed / "ppo" / "stage.json"
    record.write_text(record.read_text().replace('"model/model.safetensors": "', '"model/model.safetensors": "0', 1))
    assert script.differences(whole, killed) == ["ppo/model/model.safetensors"]
