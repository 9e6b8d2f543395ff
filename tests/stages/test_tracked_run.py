"""Real stages with W&B on: what they log is what the dashboard shows, and W&B's own file holds all of it."""

import json
import os
from pathlib import Path

import pytest

from rlhf.runs.metric_table import find
from rlhf.runs.run_files import read_jsonl
from tests.stages.conftest import Run
from tests.tracking.wandb_file import read_history, read_records, run_files

from ..tracking.test_wandb import NOT_SHOWN, panel_metrics

ROOT = Path(__file__).parents[2]
TRACKED = ("sft", "ppo", "evaluate")


@pytest.fixture(scope="module")
def tracked(gold_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = gold_run.copy(tmp_path_factory.mktemp("tracked"), "ppo", "tracked")
    given = os.environ.pop("WANDB_MODE", None)
    try:
        for stage in TRACKED:
            more = ["evaluate.prompts=8", "evaluate.samples=1", "evaluate.best_of=2", "ppo.samples_every=1"]
            run.stage(stage, "tracking=wandb", "tracking.peak_tflops=0.05", "overwrite=true", *more)
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


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_training_says_what_it_takes(tracked: Run, stage: str) -> None:
    rows = [row for row in read_jsonl(tracked.folder / stage / "metrics.jsonl") if "optim/lr" in row]
    assert rows and all(row["time/tokens_per_s"] > 0 and row.get("time/samples_per_s", 1) > 0 for row in rows)
    assert all(0 < row["time/mfu"] < 20 for row in rows), "of 0.05 TFLOP/s, which is about what a core does"
    assert all(100 < row["memory/peak_rss_mb"] < 10_000 and "memory/peak_gpu_mb" not in row for row in rows)
    axis = [row["progress/tokens"] for row in rows]
    assert axis == sorted(axis) and axis[0] > 0
    record = json.loads((tracked.folder / stage / "stage.json").read_text())
    assert record["steps"] == rows[-1]["progress/step"] and set(record["git"]) in ({"commit", "branch", "dirty"}, set())


def test_panels_show_what_stages_log(tracked, gold_run):
    folders = [gold_run.folder / "pretrain", gold_run.folder / "reward", *(tracked.folder / stage for stage in TRACKED)]
    names = {name for folder in folders for row in read_jsonl(folder / "metrics.jsonl") for name in row}
    logged = {metric.name for name in names if (metric := find(name)) is not None}
    shown = {metric.name for name in panel_metrics() if (metric := find(name.replace("*", "word"))) is not None}
    assert len(logged) > 50 and sorted(logged - shown - set(NOT_SHOWN)) == []
