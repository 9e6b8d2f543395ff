import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf import cli, recipe
from rlhf.config import Config
from rlhf.config.setting import settings_in

from .conftest import ROOT
from .stages.conftest import Run, gold_run  # noqa: F401 (a fixture)


def test_every_row_has_a_module_and_parents_before_it():
    assert len(recipe.STAGES) == len(recipe.ROWS)
    for i, row in enumerate(recipe.ROWS):
        assert importlib.util.find_spec(row.module) is not None
        assert set(row.parents) <= {earlier.name for earlier in recipe.ROWS[:i]}
        assert cli.COMMANDS[row.name][:2] == (row.module, row.help)


def test_every_kind_of_data_and_setting_of_a_row_exists():
    keys = settings_in(Config)
    groups = {key.partition(".")[0] for key in keys}
    for row in recipe.ROWS:
        assert set(row.settings) <= keys.keys() | groups
        assert {f"data.{kind}" for kind in (*row.data, *row.gold_data)} <= keys.keys()


def test_what_other_modules_derive_and_that_it_imports_nothing_of_the_project():
    assert recipe.PIPELINE == ("world", "tokenizer", "pretrain", "sft", "label", "reward", "ppo", "evaluate")
    assert recipe.ancestors("ppo") == ("world", "tokenizer", "pretrain", "sft", "label", "reward")
    assert recipe.ancestors("label") == ("world", "tokenizer", "pretrain", "sft")
    assert recipe.ROUND_STAGES == ("label", "reward", "ppo")
    names = tuple(x.partition(".")[2] for x in settings_in(Config) if x.startswith("parents."))
    assert tuple(vars(recipe)["PARENTS"]) == names
    assert all(getattr(Config().parents, stage) is None for stage in recipe.PARENTS)
    code = "import sys, rlhf.recipe; print(sorted(m for m in sys.modules if m.startswith('rlhf')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['rlhf', 'rlhf.recipe']"


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A copy of the package with the stage of docs/new_stage.md: its row in recipe.py and its file."""
    row, code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "new_stage.md").read_text("utf-8"), re.S)
    for name in ("rlhf", "conf"):
        # with bytecode, which fits as long as its source is as old
        shutil.copytree(ROOT / name, tmp_path / "copy" / name)
    package = tmp_path / "copy" / "rlhf"
    table = (package / "recipe.py").read_text("utf-8")
    assert table.count("\n)  # fmt: skip\nSTAGES") == 1
    (package / "recipe.py").write_text(
        table.replace("\n)  # fmt: skip\nSTAGES", f"\n{row.rstrip()},\n)  # fmt: skip\nSTAGES"), "utf-8"
    )
    (package / "stages" / "survey.py").write_text(code, "utf-8")
    return tmp_path / "copy"


def test_a_row_and_a_file_add_a_stage(toy: Path, gold_run: Run, tmp_path: Path):  # noqa: F811
    run = gold_run.copy(tmp_path / "runs", "sft")

    def rlhf(*arguments: str) -> str:
        command, environment = [sys.executable, "-m", "rlhf", *arguments], os.environ | {"PYTHONPATH": str(toy)}
        done = subprocess.run(command, capture_output=True, text=True, cwd=toy, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "\n  survey     count the tokens of the demonstrations\n" in rlhf("--help")
    whole = [*run.overrides, f"runs_dir='{run.runs_dir}'", f"run={run.name}"]
    first = rlhf("pipeline", *whole, "stages=survey")
    assert "tokenizer: complete, skipped\n" in first and "survey: complete in" in first
    assert '"survey"' in (run.folder / "pipeline.json").read_text()
    assert "survey" in (run.folder / "report.html").read_text()
