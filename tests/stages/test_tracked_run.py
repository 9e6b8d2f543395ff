"""Real stages with W&B on: what they log is what the dashboard shows, and W&B's own file holds all of it."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf.runs.metric_table import METRICS, TABLES, find
from rlhf.runs.run_files import read_jsonl
from rlhf.training.loop import TrainingLoop
from tests.stages.conftest import Run, run_stage
from tests.tracking.wandb_file import history_row, read_history, read_records, run_files
from tests.tracking.wandb_server import serve

from ..tracking.test_dashboard import NOT_SHOWN, panel_metrics

ROOT = Path(__file__).parents[2]
TRACKED = ("sft", "reward", "ppo", "evaluate")


@pytest.fixture(scope="module")
def tracked(gold_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose stages after pretraining ran with tracking=wandb."""
    run = gold_run.copy(tmp_path_factory.mktemp("tracked"), "sft", "tracked")
    given = os.environ.pop("WANDB_MODE", None)
    try:
        for stage in ("sft", "label", "reward", "ppo", "evaluate"):
            run.stage(stage, "tracking=wandb", "tracking.peak_tflops=0.05", "ppo.samples_every=1")
    finally:
        if given is not None:
            os.environ["WANDB_MODE"] = given
    return run


def wandb_file(folder: Path) -> Path:
    (path,) = run_files(folder / "wandb", (folder / "wandb" / "run-id").read_text().strip())
    return path


@pytest.mark.parametrize("stage", TRACKED)
def test_the_offline_file_holds_every_metric_and_the_config(tracked: Run, stage: str) -> None:
    folder = tracked.folder / stage
    lines = list(read_jsonl(folder / "metrics.jsonl"))
    assert lines
    wanted: dict[int, dict[str, float]] = {}
    for line in lines:
        wanted.setdefault(line["progress/step"], {}).update({k: v for k, v in line.items() if v is not None})
    found = {step: row for step, row in read_history(wandb_file(folder)) if "progress/step" in row}
    assert set(found) == set(wanted)
    for step, row in wanted.items():
        assert {name: found[step][name] for name in row} == pytest.approx(row, rel=1e-12)

    (run,) = [r.run for r in read_records(wandb_file(folder)) if r.WhichOneof("record_type") == "run"]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    record = json.loads((folder / "stage.json").read_text())
    assert (config["stage"], config["run"], config["parents"]) == (stage, "tracked", record["parents"])
    assert config["data"] == record["data"] and config["versions"] == record["versions"]
    assert config["ppo"] == record["config"]["ppo"] and config["kl"] == record["config"]["kl"]
    assert set(config["git"]) in ({"commit", "branch", "dirty"}, set())
    assert (run.run_group, run.job_type) == ("tracked", stage)


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_training_says_what_it_takes(tracked: Run, stage: str) -> None:
    rows = [row for row in read_jsonl(tracked.folder / stage / "metrics.jsonl") if "optim/lr" in row]
    assert rows and all(row["time/tokens_per_s"] > 0 and row.get("time/samples_per_s", 1) > 0 for row in rows)
    assert all(0 < row["time/mfu"] < 20 for row in rows), "of 0.05 TFLOP/s, which is about what a core does"
    assert all(100 < row["memory/peak_rss_mb"] < 10_000 and "memory/peak_gpu_mb" not in row for row in rows)
    axis = [row["progress/tokens"] for row in rows]
    assert axis == sorted(axis) and axis[0] > 0
    record = json.loads((tracked.folder / stage / "stage.json").read_text())
    assert record["steps"] == rows[-1]["progress/step"] and set(record["git"]) in ({"commit", "branch", "dirty"}, set())


def test_the_tables_are_there(tracked: Run) -> None:
    samples = list(read_jsonl(tracked.folder / "ppo" / "samples.jsonl"))
    assert len({row["id"] for row in samples}) < len(samples), "the same prompts again and again"
    path = wandb_file(tracked.folder / "ppo")
    rows: list[dict[str, Any]] = []
    for _, row in read_history(path):
        if "samples.path" in row:
            table = json.loads((path.parent / "files" / row["samples.path"]).read_text())
            rows += [dict(zip(table["columns"], values, strict=True)) for values in table["data"]]
    assert [(r["step"], r["id"], r["prompt"], r["response"]) for r in rows] == [
        (r["step"], r["id"], r["prompt"], r["response"]) for r in samples
    ]
    assert [r["gold/total"] for r in rows] == pytest.approx([r["gold"]["total"] for r in samples])
    path = wandb_file(tracked.folder / "evaluate")
    shown = {}
    for record in read_records(path):
        if record.WhichOneof("record_type") == "history":
            row = history_row(record)
            for name in ("calibration", "score_histogram"):
                if f"{name}.path" in row:
                    shown[name] = json.loads((path.parent / "files" / row[f"{name}.path"]).read_text())
    for name in ("calibration", "score_histogram"):
        assert tuple(shown[name]["columns"]) == TABLES[name] and shown[name]["data"], name
    results = json.loads((tracked.folder / "evaluate" / "results.json").read_text())
    assert len(shown["calibration"]["data"]) == 2 * len(results["reward_model"]["calibration"])


def logged_by_the_run(gold_run: Run, tracked: Run) -> set[str]:
    """Rows of the table of metrics that real stages wrote."""
    folders = [gold_run.folder / "pretrain", *(tracked.folder / stage for stage in TRACKED)]
    rows = [row for folder in folders for row in read_jsonl(folder / "metrics.jsonl")]
    return {metric.name for row in rows for name in row if (metric := find(name)) is not None}


@functools.cache
def named_in_the_code() -> set[str]:
    """Rows of the table of metrics whose name, or a string that is built to one, stands in the stages' code."""
    names: set[str] = set()
    tables = {ROOT / "rlhf/runs/metric_table.py"}
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in {*(ROOT / "rlhf").rglob("*.py")} - tables]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    passed = {a.value for call in calls for a in call.args if isinstance(a, ast.Constant)}  # such as "dpo"
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "/" in node.value:
                metric = find(node.value)
                names |= {metric.name} if metric is not None else set()
            elif isinstance(node, ast.JoinedStr):
                parts = [re.escape(str(v.value)) if isinstance(v, ast.Constant) else ".+" for v in node.values]
                pattern = re.compile("".join(parts))
                if "/" in pattern.pattern:  # only of families: f"time/{phase}_s" fits names that nobody logs
                    names |= {m.name for m in METRICS if m.is_pattern and pattern.fullmatch(m.name)}
                if parts[0] == ".+":  # f"{stage}/accuracy", where a call passes the stage's name
                    names |= {
                        m.name for m in METRICS if pattern.fullmatch(m.name) and m.name.partition("/")[0] in passed
                    }
    return names


def test_no_panel_names_a_metric_that_no_stage_logs(gold_run: Run, tracked: Run) -> None:
    known = logged_by_the_run(gold_run, tracked) | named_in_the_code()
    rows = {metric.name for name in panel_metrics() if (metric := find(name.replace("*", "word"))) is not None}
    assert sorted(rows - known) == []


def test_no_metric_is_logged_that_no_panel_shows(gold_run: Run, tracked: Run) -> None:
    logged = logged_by_the_run(gold_run, tracked)
    assert len(logged) > 50
    shown = {metric.name for name in panel_metrics() if (metric := find(name.replace("*", "word"))) is not None}
    assert sorted((logged | named_in_the_code()) - shown - set(NOT_SHOWN)) == []


STAGE = "import sys; from rlhf.cli import main; main(sys.argv[1:])"


@pytest.mark.long
@pytest.mark.parametrize("mode", ["hang", "dies"])
def test_training_against_a_broken_server_ends_with_the_same_numbers(gold_run: Run, tmp_path: Path, mode: str) -> None:
    run = gold_run.copy(tmp_path, "ppo", "broken")
    inherited = {name: value for name, value in os.environ.items() if name not in ("WANDB_SERVICE", "WANDB_MODE")}
    with serve(mode) as server:
        environment = inherited | {
            "WANDB_BASE_URL": server.url,
            "WANDB_API_KEY": "0" * 40,
            "RLHF_PROGRESS": "off",
            "RLHF_WANDB_INIT_SECONDS": "3",
            "RLHF_WANDB_FINISH_SECONDS": "2",
        }
        overrides = [*run.overrides, f"runs_dir={tmp_path}", "run=broken", "tracking=wandb", "--shared-settings"]
        done = subprocess.run(
            [sys.executable, "-c", STAGE, "ppo", *overrides],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert server.paths
    assert done.returncode == 0, done.stderr

    def numbers(folder: Path) -> list[dict[str, float]]:
        rows = read_jsonl(folder / "ppo" / "metrics.jsonl")
        return [
            {k: v for k, v in row.items() if not k.startswith(("time/", "memory/")) and "per_s" not in k}
            for row in rows
        ]

    assert numbers(run.folder) == numbers(gold_run.folder)


def test_a_resumed_stage_goes_on_in_the_same_wandb_run(gold_run: Run, tmp_path: Path) -> None:
    """PPO ended after its second update, with a checkpoint of the first: one run, in one folder, every step once."""
    run = gold_run.copy(tmp_path, "ppo", "resumed")
    more = ("tracking=wandb", "checkpoints.every_seconds=0", "ppo.samples_every=1")
    real, calls = TrainingLoop.save, []

    def save_once(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    TrainingLoop.save = save_once  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            run_stage("ppo", run.config(*more))
    finally:
        TrainingLoop.save = real  # type: ignore[method-assign]
    run_stage("ppo", run.config(*more))
    home = run.folder / "ppo" / "wandb"
    files = run_files(home, (home / "run-id").read_text().strip())
    assert len(files) == 1
    rows = [(step, row) for path in files for step, row in read_history(path)]
    wanted = [row["progress/step"] for row in read_jsonl(run.folder / "ppo" / "metrics.jsonl")]
    assert [step for step, row in rows if "eval/dev/kl" in row] == sorted(set(wanted))
    assert [step for step, row in rows if "samples.path" in row] == sorted(set(wanted))
