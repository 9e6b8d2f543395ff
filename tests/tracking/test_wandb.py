"""W&B: the offline file read back record by record, a resume over two folders, and servers that misbehave."""

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf.runs.records import git_state, tracking_config
from rlhf.runs.run_files import read_jsonl
from rlhf.runs.trackers import make_tracker
from rlhf.runs.wandb_run import choose_mode, columns_of, flatten_sample
from tests.tracking.wandb_file import read_history, read_records, run_files
from tests.tracking.wandb_server import serve

CONFIG = {"stage": "ppo", "run": "r", "parents": {"sft": "ab12"}, "data": {"p.jsonl": "cd34"}, "ppo": {"lr": 1e-5}}


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_") and name != "WANDB_SERVICE"]:
        monkeypatch.delenv(name)


def tracker(folder: Path, resume_step: int = 0) -> Any:
    return make_tracker("wandb", folder=folder, run="r", stage="ppo", config=CONFIG, resume_step=resume_step)


def sample(step: int, text: str = "answer") -> list[dict[str, Any]]:
    return [
        {
            "id": f"p-{i}",
            "prompt": "<b>Who?</b>",
            "response": f"{text} {step}",
            "score": 0.5,
            "kl": 1.0,
            "parts": {"reward_model": 0.75},
            "gold": {"total": 0.25},
            "tokens": ["a"],
            "kl_tokens": [0.5],
        }
        for i in range(2)
    ]


def write(folder: Path, steps: range, resume_step: int = 0, text: str = "answer") -> None:
    with tracker(folder, resume_step) as writer:
        for step in steps:
            writer.samples(step, sample(step, text))
            writer.log({"objective/kl": float(step), "objective/scores": 0.1 * step}, step=step, episodes=64 * step)


def files(folder: Path) -> list[Path]:
    return run_files(folder / "wandb", (folder / "wandb" / "run-id").read_text().strip())


def history(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    return [row for path in files(folder) for row in read_history(path)]


def test_the_offline_file_holds_metrics_axes_tables_and_config(tmp_path: Path, offline: None) -> None:
    with tracker(tmp_path) as writer:
        writer.log({"objective/kl": 4.0}, step=1, episodes=64)
        writer.samples(1, sample(1))
        writer.table("calibration", ["gap", "observed"], [[0.5, 0.6], [1.0, 0.7]])
        writer.summary({"objective/kl": 4.0})
    assert "WANDB_DATA_DIR" not in os.environ and "WANDB_SILENT" not in os.environ, "given back"
    (path,) = files(tmp_path)
    records = list(read_records(path))
    kinds = [record.WhichOneof("record_type") for record in records]
    assert kinds[0] == "header" and kinds[-1] == "exit"
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    config = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in run.config.update}
    assert {key: config[key] for key in CONFIG} == CONFIG
    assert (run.run_group, run.job_type, run.display_name, run.project) == ("r", "ppo", "r/ppo", "rlhf")
    metrics = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    assert {m.name for m in metrics if m.name} == {"progress/step", "progress/episodes", "progress/tokens"}
    assert [(m.glob_name, m.step_metric) for m in metrics if m.glob_name] == [("*", "progress/episodes")]
    ((step, row),) = read_history(path)
    assert step == 1
    assert {
        name: row[name] for name in ("progress/step", "progress/episodes", "objective/kl", "objective/sqrt_kl")
    } == {"progress/step": 1, "progress/episodes": 64, "objective/kl": 4, "objective/sqrt_kl": 2}
    table = json.loads((path.parent / "files" / row["samples.path"]).read_text())
    assert table["columns"] == [
        "step",
        "id",
        "prompt",
        "response",
        "score",
        "kl",
        "length",
        "parts/reward_model",
        "gold/total",
    ]
    assert table["data"][1] == [1, "p-1", "<b>Who?</b>", "answer 1", 0.5, 1.0, None, 0.75, 0.25]
    levels = json.loads((path.parent / "files" / row["calibration.path"]).read_text())
    assert levels["data"] == [[0.5, 0.6], [1.0, 0.7]]
    assert not list(tmp_path.glob("wandb/*/files/requirements.txt"))


def test_a_resume_writes_no_step_twice_and_misses_none(tmp_path: Path, offline: None) -> None:
    """Stopped at step 6 with a checkpoint of step 4; what step 5 and 6 said is not said again."""
    write(tmp_path, range(1, 7))
    time.sleep(1.1)  # the folders are named by the second
    write(tmp_path, range(5, 10), resume_step=4, text="again")
    assert len(files(tmp_path)) == 1, "the folder before is replaced"
    rows = history(tmp_path)
    assert sorted(step for step, row in rows if "objective/kl" in row) == list(range(1, 10))
    assert sorted(step for step, row in rows if "samples.path" in row) == list(range(1, 10))
    assert [row["progress/episodes"] for _, row in rows] == [64 * step for step in range(1, 10)]


@pytest.mark.parametrize("left", [0, 100, 2000], ids=["nothing", "the header", "some of it"])
def test_a_resume_brings_what_a_kill_left_unwritten(tmp_path: Path, offline: None, left: int) -> None:
    """The first folder's file is cut, as SIGKILL leaves it; metrics.jsonl has every step."""
    write(tmp_path, range(1, 7))
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes()[:left])
    time.sleep(1.1)
    write(tmp_path, range(7, 9), resume_step=6)
    steps = [step for step, row in history(tmp_path) if "objective/kl" in row]
    assert steps == list(range(1, 9))
    assert [step for step, row in history(tmp_path) if "samples.path" in row] == list(range(1, 9))


def test_two_starts_within_a_second_lose_nothing(tmp_path: Path, offline: None) -> None:
    """W&B names its folders by the second."""
    write(tmp_path, range(1, 3))
    write(tmp_path, range(3, 5), resume_step=2)
    assert [step for step, row in history(tmp_path) if "objective/kl" in row] == [1, 2, 3, 4]


def test_a_stage_begun_again_without_a_checkpoint_keeps_its_run(tmp_path: Path, offline: None) -> None:
    write(tmp_path, range(1, 3))
    run_id = (tmp_path / "wandb" / "run-id").read_text()
    time.sleep(1.1)
    write(tmp_path, range(1, 5))
    assert (tmp_path / "wandb" / "run-id").read_text() == run_id
    assert [step for step, row in history(tmp_path) if "objective/kl" in row] == [1, 2, 3, 4]


SCRIPT = """
import logging, sys, time
from pathlib import Path
from rlhf.runs.trackers import make_tracker
logging.basicConfig(format="%(message)s")
started = time.monotonic()
with make_tracker("wandb", folder=Path(sys.argv[1]), run="r", stage="sft", config={"seed": 1}) as writer:
    for step in range(1, 31):
        writer.log({"sft/loss": 1 / step}, step=step)
        if step == 20:
            writer.samples(step, [{"id": "p", "prompt": "a", "response": "b"}])
        time.sleep(0.05)
    print("trained", time.monotonic() - started)
"""


@pytest.mark.parametrize("mode", ["error", "hang", "dies"])
def test_a_server_that_misbehaves_stops_nothing(tmp_path: Path, offline: None, mode: str) -> None:
    """A process of its own, with a key, against a server that says 500, says nothing, or dies after the first lines."""
    with serve(mode) as server:
        inherited = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
        environment = inherited | {
            "WANDB_BASE_URL": server.url,
            "WANDB_API_KEY": "0" * 40,
            "RLHF_WANDB_INIT_SECONDS": "1.5",
            "RLHF_WANDB_FINISH_SECONDS": "1",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=60
        )
        assert server.paths, "it was asked"
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[1]) < 10, "the loop of 1.5 s did not wait for the server"
    rows = list(read_jsonl(tmp_path / "metrics.jsonl"))
    assert [row["sft/loss"] for row in rows] == [1 / step for step in range(1, 31)]
    assert len(list(read_jsonl(tmp_path / "samples.jsonl"))) == 1
    assert "Traceback" not in done.stderr and done.stderr.count("Weights & Biases") >= 1
    if mode != "dies":  # W&B's own file is complete too: the run went on offline
        assert "kept offline" in done.stderr
        (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
        assert [step for step, row in read_history(path) if "sft/loss" in row] == list(range(1, 31))


ONLINE = """
import logging, sys
from pathlib import Path
from rlhf.runs.trackers import make_tracker
logging.basicConfig(format="%(message)s")
config = {"stage": "sft", "parents": {"pretrain": "ab12"}}
with make_tracker("wandb", folder=Path(sys.argv[1]), run="r", stage="sft", config=config) as writer:
    for step in range(1, 31):
        writer.log({"sft/loss": 1 / step}, step=step)
"""


def test_online_the_server_gets_what_is_logged(tmp_path: Path, offline: None) -> None:
    with serve("answers") as server:
        inherited = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
        environment = inherited | {
            "WANDB_BASE_URL": server.url,
            "WANDB_API_KEY": "0" * 40,
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        done = subprocess.run(
            [sys.executable, "-c", ONLINE, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0 and done.stderr == done.stdout == ""
        (made,) = [body["variables"] for body in server.bodies if "upsertBucket" in body.get("query", "")][:1]
        sent = [
            json.loads(line)
            for body in server.bodies
            for line in body.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
        ]
    assert (made["groupName"], made["jobType"], made["displayName"]) == ("r", "sft", "r/sft")
    assert json.loads(made["config"])["parents"]["value"] == {"pretrain": "ab12"}
    assert [(row["_step"], row["sft/loss"]) for row in sent] == [
        (step, pytest.approx(1 / step)) for step in range(1, 31)
    ]


@pytest.mark.parametrize("problem", ["missing", "broken home"])
def test_wandb_that_cannot_start_is_told_once(
    tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, problem: str
) -> None:
    if problem == "missing":
        monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]
    else:
        (tmp_path / "wandb").write_text("a file where a folder should be")
    with caplog.at_level(logging.WARNING), tracker(tmp_path) as writer:
        for step in range(3):
            writer.log({"objective/kl": 1.0}, step=step)
    assert len(list(read_jsonl(tmp_path / "metrics.jsonl"))) == 3
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "could not start" in warning and "\n" not in warning


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": "0" * 40}, "online"),
        ({"WANDB_API_KEY": "0" * 40, "WANDB_MODE": "offline"}, None),
        ({"WANDB_MODE": "disabled"}, None),
    ],
)
def test_wandb_is_online_only_with_a_key(
    offline: None, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], mode: str | None
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert choose_mode() == mode


def test_online_without_a_key_asks_for_none(tmp_path: Path, offline: None) -> None:
    """A process of its own, since W&B remembers a key that it has seen; no terminal, no key, no .netrc."""
    code = "from rlhf.runs.wandb_run import choose_mode; print(choose_mode())"
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    environment |= {
        "WANDB_MODE": "online",
        "NETRC": str(tmp_path / "netrc"),
        "HOME": str(tmp_path),
        "WANDB_SILENT": "true",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.stdout.strip() == "offline", done.stderr


def test_columns_hold_the_parts_and_no_lists() -> None:
    rows = [{"id": "p", "gold": {"total": 1.0}}, {"id": "q", "parts": {"kl_penalty": -0.5}, "kl_tokens": [1.0]}]
    assert columns_of(rows)[-2:] == ["gold/total", "parts/kl_penalty"]
    assert flatten_sample(rows[1]) == {"id": "q", "parts/kl_penalty": -0.5}


def test_lineage_stands_at_the_top_of_the_configuration(tmp_path: Path) -> None:
    record = {
        "stage": "sft",
        "run": "r",
        "seed": 0,
        "parents": {"pretrain": "ab"},
        "data": {},
        "versions": {},
        "settings": {"sft.lr": 1.0},
        "config": {"run": "r", "seed": 0, "sft": {"lr": 1.0}},
    }
    config = tracking_config(record)
    assert (config["parents"], config["sft"], config["stage"]) == ({"pretrain": "ab"}, {"lr": 1.0}, "sft")
    assert "settings" not in config and "config" not in config
    assert git_state(tmp_path) == {}, "no checkout"
    here = git_state()
    assert bool(here) == (Path(__file__).parents[2] / ".git").exists()  # the tests may run from an archive
    if here:
        assert len(here["commit"]) == 40 and isinstance(here["dirty"], bool)
