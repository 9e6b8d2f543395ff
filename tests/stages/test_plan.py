"""`rlhf plan`: the table, the verdict, plan.json, and how long it takes to start."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.commands import plan as stage
from rlhf.config import compose
from rlhf.errors import UserError

ROOT = Path(__file__).parents[2]


def run(capsys, *overrides: str) -> str:
    stage.run(compose.compose_config(list(overrides), "plan"))
    return capsys.readouterr().out


def test_the_table_shows_what_the_plan_holds(capsys, tmp_path):
    out = run(capsys, "model=gpt3-xl", "deepspeed=zero3", "gpus=8", f"out={tmp_path}")
    plan = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert "1,315,723,264 parameters" in out and "approach 3" in out
    lines = {line[:12].strip(): line.split() for line in out.splitlines() if line.endswith(("  yes", "  NO"))}
    assert list(lines) == list(plan["bytes"])
    weights = lines["pretrain"][2]
    assert weights == f"{plan['bytes']['pretrain']['weights'] / 1e9:.2f}" == "0.33"  # 2 * 1.3157e9 / 8
    assert out.splitlines()[-2].startswith("fits: " if plan["fits"] else "does not fit: ")


def test_a_plan_is_not_overwritten_unasked(capsys, tmp_path):
    path = tmp_path / "a" / "mine.json"
    with pytest.raises(UserError, match=r"there is no folder .*/a: create it"):
        run(capsys, f"out={path}")
    path.parent.mkdir()
    run(capsys, f"out={path}")
    with pytest.raises(UserError, match=r"mine\.json: exists: .*overwrite=true"):
        run(capsys, f"out={path}")
    assert f"written to {path}" in run(capsys, f"out={path}", "overwrite=true", "gpus=3")
    assert json.loads(path.read_text(encoding="utf-8"))["setup"]["gpus"] == 3
    assert [entry.name for entry in path.parent.iterdir()] == ["mine.json"]


def test_it_plans_without_torch():
    script = (
        "import sys, rlhf.cli as cli\n"
        "cli.main(['plan', 'model=gpt3-xl', 'deepspeed=zero3', 'gpus=8', 'gpu_memory_gb=40'])\n"
        "heavy = {'torch', 'transformers', 'deepspeed', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "fits" in done.stdout
