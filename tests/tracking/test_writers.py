"""The writers: names are checked, a resume repeats nothing, and W&B can fail without stopping anything."""

import json
import logging
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from rlhf.errors import UserError
from rlhf.tracking.writers import make_tracker, read_jsonl


def tracker(folder: Path, kind: Any = "jsonl", resume_step: int = 0) -> Any:
    return make_tracker(kind, folder=folder, run="r", stage="ppo", config={"seed": 1}, resume_step=resume_step)


def lines(path: Path) -> list[dict[str, Any]]:
    """Strict reading: every line must be JSON without NaN."""

    def refuse(constant: str) -> float:
        raise AssertionError(f"not JSON: {constant}")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_has_the_axes_and_is_there_at_once(tmp_path: Path) -> None:
    with tracker(tmp_path) as writer:
        writer.log({"objective/kl": 1.5}, step=3, episodes=96, tokens=4096)
        (row,) = lines(tmp_path / "metrics.jsonl")  # before finish: flushed
    assert row.pop("time/elapsed_s") >= 0
    assert row == {"progress/step": 3, "progress/episodes": 96, "progress/tokens": 4096, "objective/kl": 1.5}


@pytest.mark.parametrize("kind", ["jsonl", "off"])
def test_an_unknown_name_is_refused_and_writes_nothing(tmp_path: Path, kind: str) -> None:
    with tracker(tmp_path, kind) as writer:
        with pytest.raises(ValueError, match=r"unknown metric 'objective/klx'"):
            writer.log({"objective/kl": 1.0, "objective/klx": 1.0}, step=1)
        with pytest.raises(ValueError, match="unknown metric"):
            writer.summary({"final": 1.0})
    assert list(read_jsonl(tmp_path / "metrics.jsonl")) == []


def test_values_that_are_not_finite_become_null_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), tracker(tmp_path) as writer:
        writer.log({"loss/policy_avg": math.nan, "objective/kl": 1.0}, step=1)
        writer.log({"loss/policy_avg": math.inf, "objective/kl": 1.0}, step=2)
        writer.samples(2, [{"id": "p", "prompt": "a", "response": "b", "score": math.nan}])
    rows = lines(tmp_path / "metrics.jsonl")
    assert [row["loss/policy_avg"] for row in rows] == [None, None]
    assert [row["objective/kl"] for row in rows] == [1.0, 1.0]
    assert lines(tmp_path / "samples.jsonl")[0]["score"] is None
    assert sum("loss/policy_avg" in record.getMessage() for record in caplog.records) == 1


def test_resume_repeats_no_step_and_loses_none(tmp_path: Path) -> None:
    with tracker(tmp_path) as writer:
        for step in range(6):
            writer.log({"objective/kl": float(step)}, step=step)
            writer.samples(step, [{"id": "p", "prompt": "a", "response": str(step)}])
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"progress/step": 6, "step": 6, "objec')  # the process died in the middle of a line
    with tracker(tmp_path, resume_step=3) as writer:
        for step in range(4, 7):
            writer.log({"objective/kl": 10.0 + step}, step=step)
            writer.samples(step, [{"id": "p", "prompt": "a", "response": "again"}])
    rows = lines(tmp_path / "metrics.jsonl")
    assert [row["progress/step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert [row["objective/kl"] for row in rows] == [0, 1, 2, 3, 14, 15, 16]
    elapsed = [row["time/elapsed_s"] for row in rows]
    assert elapsed == sorted(elapsed)
    assert [row["response"] for row in lines(tmp_path / "samples.jsonl")] == list("0123") + ["again"] * 3


def test_the_clock_goes_on_over_a_resume(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"progress/step": 2, "time/elapsed_s": 500.0}\n')
    with tracker(tmp_path, resume_step=2) as writer:
        writer.log({"objective/kl": 0.0}, step=3)
    assert lines(tmp_path / "metrics.jsonl")[-1]["time/elapsed_s"] >= 500.0


def test_a_fresh_start_leaves_nothing_of_the_old_run(tmp_path: Path) -> None:
    for _ in range(2):
        with tracker(tmp_path) as writer:
            writer.log({"objective/kl": 0.0}, step=0)
            writer.samples(0, [{"id": "p", "prompt": "a", "response": "b"}])
    assert len(lines(tmp_path / "metrics.jsonl")) == len(lines(tmp_path / "samples.jsonl")) == 1


def test_samples_keep_their_text(tmp_path: Path) -> None:
    text = "naïve\nline \u2028 <script> \ud800 end"  # a lone surrogate has no UTF-8 form
    with tracker(tmp_path) as writer:
        writer.samples(4, [{"id": "p", "prompt": text, "response": text, "score": 1, "gold": {"total": 0.5}}])
        with pytest.raises(ValueError, match="a row lacks prompt, response"):
            writer.samples(4, [{"id": "p"}])
    (row,) = list(read_jsonl(tmp_path / "samples.jsonl"))
    assert row == {"step": 4, "id": "p", "prompt": text, "response": text, "score": 1, "kl": None,
                   "gold": {"total": 0.5}}  # fmt: skip


def test_off_writes_no_file(tmp_path: Path) -> None:
    with tracker(tmp_path / "stage", "off") as writer:
        writer.log({"objective/kl": 0.0}, step=0)
        writer.samples(0, [{"id": "p", "prompt": "a", "response": "b"}])
    assert not (tmp_path / "stage").exists()


def test_an_unknown_kind_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="got 'wandbb', want wandb, jsonl or off"):
        tracker(tmp_path, "wandbb")


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT", "WANDB_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))


def test_wandb_offline_writes_a_run_and_keeps_its_id(tmp_path: Path, offline: None) -> None:
    import os

    stage = tmp_path / "stage"
    with tracker(stage, "wandb") as writer:
        writer.log({"objective/kl": 1.0, "loss/policy_avg": math.nan}, step=1)
        writer.samples(1, [{"id": "p", "prompt": "a", "response": "b", "gold": {"total": 0.5}}])
        writer.summary({"objective/kl": 1.0})
    run_id = (stage / "wandb" / "run-id").read_text().strip()
    with tracker(stage, "wandb", resume_step=1) as writer:
        writer.log({"objective/kl": 2.0}, step=2)
    files = list(stage.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))
    content = b"".join(file.read_bytes() for file in files)
    assert b"objective/kl" in content and b"samples" in content
    assert list(stage.glob("wandb/offline-run-*/files/media/table/*.json"))
    assert not list(stage.glob("wandb/offline-run-*/files/requirements.txt"))
    assert [row["progress/step"] for row in lines(stage / "metrics.jsonl")] == [1, 2]
    assert "WANDB_DATA_DIR" not in os.environ  # given back


class FakeRun:
    """Stands for a W&B run whose connection breaks at the second call of `log`."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []
        self.summary: dict[str, float] = {}
        self.defined: list[tuple[str, dict[str, str]]] = []

    def define_metric(self, name: str, **options: str) -> None:
        self.defined.append((name, options))

    def log(self, row: dict[str, float], step: int) -> None:
        if self.logged:
            raise ConnectionError("broken\npipe")
        self.logged.append((row, step))

    def finish(self, exit_code: int) -> None:
        raise AssertionError("given up: must not be called")


def fake_wandb(monkeypatch: pytest.MonkeyPatch, run: FakeRun | Exception) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def init(**options: Any) -> FakeRun:
        seen.update(options)
        if isinstance(run, Exception):
            raise run
        return run

    fake = types.SimpleNamespace(init=init, Settings=lambda **options: options, login=lambda **_: False)
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    return seen


def test_wandb_is_told_the_group_the_axis_and_no_system_metrics(
    tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun()
    seen = fake_wandb(monkeypatch, run)
    tracker(tmp_path, "wandb").log({"objective/kl": 1.0}, step=7)
    assert (seen["group"], seen["job_type"], seen["mode"], seen["config"]) == (
        "r",
        "ppo",
        "offline",
        {"seed": 1},
    )
    settings = seen["settings"]
    assert all(settings[name] for name in ("silent", "x_disable_stats", "disable_git", "disable_code"))
    assert settings["save_code"] is False
    assert ("*", {"step_metric": "progress/step"}) in run.defined
    row, step = run.logged[0]
    assert step == row["progress/step"] == 7


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ({"WANDB_API_KEY": "k"}, "online"),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, None),
        ({"WANDB_MODE": "disabled"}, None),
        ({"WANDB_MODE": "online"}, "offline"),  # no key: W&B would ask for one
    ],
)
def test_wandb_mode(
    tmp_path: Path,
    offline: None,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    mode: str | None,
) -> None:
    seen = fake_wandb(monkeypatch, FakeRun())
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    tracker(tmp_path, "wandb")
    assert seen["mode"] == mode


def test_wandb_that_breaks_is_told_once_and_files_go_on(
    tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_wandb(monkeypatch, FakeRun())
    with caplog.at_level(logging.WARNING), tracker(tmp_path, "wandb") as writer:
        for step in range(4):
            writer.log({"objective/kl": 1.0}, step=step)
        writer.samples(3, [{"id": "p", "prompt": "a", "response": "b"}])
        writer.summary({"objective/kl": 1.0})
    assert len(lines(tmp_path / "metrics.jsonl")) == 4
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "could not log (ConnectionError: broken pipe)" in warning


@pytest.mark.parametrize("missing", [True, False])
def test_wandb_that_cannot_start_is_told_once(
    tmp_path: Path,
    offline: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    missing: bool,
) -> None:
    if missing:
        monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]
    else:
        fake_wandb(monkeypatch, RuntimeError("no service"))
    with caplog.at_level(logging.WARNING), tracker(tmp_path, "wandb") as writer:
        writer.log({"objective/kl": 1.0}, step=1)
    assert len(lines(tmp_path / "metrics.jsonl")) == 1
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "could not start" in warning
