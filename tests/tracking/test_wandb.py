import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rlhf.commands.dashboard import SECTIONS, STEP_AXIS, make_workspace
from rlhf.config import Config
from rlhf.runs.metric_table import CHARTS, COST, METRICS, X_AXES, metric_pattern
from rlhf.runs.stage import Stage
from rlhf.runs.trackers import Tracker, choose_mode, project_of
from tests.tracking.wandb_file import read_history, read_records, run_files

LINEAGE: dict[str, Any] = {"stage": "ppo", "run": "r", "parents": {"sft": "ab12"}, "data": {"p.jsonl": "cd34"}}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_") and name != "WANDB_SERVICE"]:
        monkeypatch.delenv(name)


def tracker(folder: Path, resume_step: int = 0) -> Any:
    stage = Stage(Config(run="r"), "ppo", folder, LINEAGE["parents"], LINEAGE["data"])
    return Tracker(stage, resume_step)


def sample(step: int) -> list[dict[str, Any]]:
    row = {"prompt": "<b>Who?</b>", "response": f"answer {step}", "score": 0.5, "kl": 1.0, "parts": {"reward_model": 0.75},
           "gold": {"total": 0.25}}  # fmt: skip
    return [{"id": f"p-{i}"} | row for i in range(2)]


def write(folder: Path, steps: range, resume_step: int = 0) -> None:
    with tracker(folder, resume_step) as writer:
        for step in steps:
            writer.samples(step, sample(step))
            writer.log({"objective/kl": float(step), "objective/scores": 0.1 * step}, step=step, episodes=64 * step)


def files(folder: Path) -> list[Path]:
    return run_files(folder / "wandb", (folder / "wandb" / "run-id").read_text().strip())


def history(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    return [row for path in files(folder) for row in read_history(path)]


def steps_of(folder: Path, name: str) -> list[int]:
    return [step for step, row in history(folder) if name in row]


def test_the_offline_file_holds_metrics_axes_tables_and_config(tmp_path: Path) -> None:
    with tracker(tmp_path) as writer:
        writer.log({"objective/kl": 4.0}, step=1, episodes=64)
        writer.samples(1, sample(1))
    (path,) = files(tmp_path)
    records = list(read_records(path))
    kinds = [record.WhichOneof("record_type") for record in records]
    assert kinds[0] == "header" and kinds[-1] == "exit"
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    config = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in run.config.update}
    assert {key: config[key] for key in LINEAGE} == LINEAGE and config["ppo"] == asdict(Config().ppo)
    assert (run.run_group, run.job_type, run.display_name, run.project) == ("r", "ppo", "r/ppo", "rlhf")
    metrics = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    assert {m.name for m in metrics if m.name} == {"progress/step", "progress/episodes", "progress/tokens"}
    assert [(m.glob_name, m.step_metric) for m in metrics if m.glob_name] == [("*", "progress/episodes")]
    ((step, row),) = read_history(path)
    expected = {"progress/step": 1, "progress/episodes": 64, "objective/kl": 4, "objective/sqrt_kl": 2}
    assert step == 1 and {name: row[name] for name in expected} == expected
    table = json.loads((path.parent / "files" / row["samples.path"]).read_text())
    parts = ["parts/reward_model", "gold/total"]
    assert table["columns"] == ["step", "id", "prompt", "response", "score", "kl", "length", *parts]
    assert table["data"][1] == [1, "p-1", "<b>Who?</b>", "answer 1", 0.5, 1.0, None, 0.75, 0.25]
    assert not list(tmp_path.glob("wandb/*/files/requirements.txt"))


def test_a_project_that_is_given_counts_more_than_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    assert (project_of(None), project_of("ours")) == ("theirs", "ours")


def test_a_resume_continues_the_run(tmp_path: Path) -> None:
    write(tmp_path, range(1, 5))
    run_id = (tmp_path / "wandb" / "run-id").read_text()
    time.sleep(1.1)  # W&B names its folders by the second
    write(tmp_path, range(5, 8), resume_step=4)
    assert (tmp_path / "wandb" / "run-id").read_text() == run_id and len(files(tmp_path)) == 2
    assert steps_of(tmp_path, "objective/kl") == steps_of(tmp_path, "samples.path") == list(range(1, 8))


@pytest.mark.parametrize(("environment", "mode"), [
    ({}, "offline"), ({"WANDB_API_KEY": "0" * 40}, "online"),
    ({"WANDB_API_KEY": "0" * 40, "WANDB_MODE": "offline"}, None), ({"WANDB_MODE": "disabled"}, None),
])  # fmt: skip
def test_wandb_is_online_only_with_a_key(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], mode: str | None
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert choose_mode() == mode


def test_online_without_a_key_asks_for_none(tmp_path: Path) -> None:
    """A process of its own, since W&B remembers a key that it has seen; no terminal, no key, no .netrc."""
    code = "from rlhf.runs.trackers import choose_mode; print(choose_mode())"
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    environment |= {"WANDB_MODE": "online", "NETRC": str(tmp_path / "netrc"), "HOME": str(tmp_path)}
    environment |= {"WANDB_SILENT": "true", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", code]
    pipes = {"capture_output": True, "text": True, "timeout": 60, "stdin": subprocess.DEVNULL}
    done = subprocess.run(command, env=environment, **pipes)  # type: ignore[call-overload]
    assert done.stdout.strip() == "offline", done.stderr


# Logged, and in no panel on purpose.
NOT_SHOWN = {
    "optim/steps": "a constant; in the report",
    "custom/<part>": "of the user's own functions; in the report, one picture each",
    "time/elapsed_s": "W&B's own runtime; in the report's table of stages",
    "calibration/gain": "one number a run, in its summary", "calibration/shift": "one number a run, in its summary",
    "progress/step": "an x axis", "progress/episodes": "an x axis", "progress/tokens": "an x axis",
}  # fmt: skip


def panel_metrics() -> set[str]:
    """Every metric that a panel draws or that is its axis."""
    charts = [(stage, chart) for stage in SECTIONS for chart in CHARTS[stage]]
    axes = {chart.x or X_AXES.get(stage, STEP_AXIS) for stage, chart in charts}
    return axes | {name for _, chart in charts for name in chart.metrics}


def test_wandbs_own_objects_take_every_chart_and_table() -> None:
    workspace = make_workspace("p", "me")
    assert CHARTS.keys() - {"judge"} == SECTIONS.keys()
    assert [section.name for section in workspace.sections] == [*SECTIONS.values(), "Cost"]
    assert set(NOT_SHOWN) <= {metric.name for metric in METRICS}
    plots = {getattr(panel, "title", None): panel for section in workspace.sections for panel in section.panels}
    assert plots["KL to the SFT model"].metric_regex == "^(objective/kl|objective/kl_k3|eval/[^/]+/kl)$"
    assert plots["KL coefficient"].y == ["objective/kl_coef"] and plots["KL coefficient"].x == "progress/episodes"
    assert plots["Reward against the root of KL"].x == "objective/sqrt_kl"
    drawn = sum(chart not in COST for stage in SECTIONS for chart in CHARTS[stage]) + len(COST) + 1
    assert sum(len(section.panels) for section in workspace.sections) == drawn


def test_a_pattern_is_exact() -> None:
    pattern = metric_pattern(("gold/*", "eval/*/kl"))
    assert re.search(pattern, "gold/total") and re.search(pattern, "eval/dev/kl")
    assert not re.search(pattern, "eval/dev/kl_k3") and not re.search(pattern, "eval/dev/gold/total")
