"""The dashboard: its specification offline, W&B's own objects, and a server that does not take it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb

from rlhf.cli import main
from rlhf.commands.dashboard import SECTIONS, make_specification, make_workspace
from rlhf.runs.metric_table import CHARTS, METRICS, TABLES, find, metric_pattern
from tests.tracking.wandb_server import serve

# Logged, and in no panel on purpose.
NOT_SHOWN = {
    "optim/steps": "a constant; in the report",
    "custom/<part>": "of the user's own functions; in the report, one picture each",
    "time/elapsed_s": "W&B's own runtime; in the report's table of stages",
    "calibration/gain": "one number a run, in its summary",
    "calibration/shift": "one number a run, in its summary",
    "progress/step": "an x axis",
    "progress/episodes": "an x axis",
    "progress/tokens": "an x axis",
}


def panels() -> list[dict[str, Any]]:
    return [panel for section in make_specification("p", "me")["sections"] for panel in section["panels"]]


def panel_metrics() -> set[str]:
    """Every metric that a panel draws or that is its axis."""
    drawn = [panel for panel in panels() if panel["kind"] == "lines"]
    return {name for panel in drawn for name in (panel["x"], *(metric["name"] for metric in panel["metrics"]))}


def test_every_section_and_table_is_there_and_each_panel_has_its_meaning() -> None:
    specification = make_specification("p", "me")
    assert json.loads(json.dumps(specification)) == specification
    assert CHARTS.keys() - {"judge"} == SECTIONS.keys()
    assert [section["name"] for section in specification["sections"]] == [*SECTIONS.values(), "Cost"]
    assert set(NOT_SHOWN) <= {metric.name for metric in METRICS}
    tables = [panel for panel in panels() if "table" in panel]
    assert {panel["table"] for panel in tables} == set(TABLES)
    assert all(set(panel.get("fields", {}).values()) <= set(panel["columns"]) for panel in tables)
    titled = {panel["title"]: panel for panel in panels()}
    meaning = find("objective/kl").meaning  # type: ignore[union-attr]
    kl = titled["KL to the SFT model"]
    assert kl["x"] == "progress/episodes"
    assert kl["metrics"][0] == {"name": "objective/kl", "unit": "nats per sequence", "meaning": meaning}
    assert titled["Reward against the root of KL"]["x"] == "objective/sqrt_kl"


def test_wandbs_own_objects_take_every_panel() -> None:
    workspace = make_workspace(make_specification("p"), "me")
    assert [section.name for section in workspace.sections] == [*SECTIONS.values(), "Cost"]
    plots = {getattr(panel, "title", None): panel for section in workspace.sections for panel in section.panels}
    assert plots["KL to the SFT model"].metric_regex == "^(objective/kl|objective/kl_k3|eval/[^/]+/kl)$"
    assert plots["KL coefficient"].y == ["objective/kl_coef"] and plots["KL coefficient"].x == "progress/episodes"
    assert sum(len(section.panels) for section in workspace.sections) == len(panels())
    for section in workspace.sections:  # no panel covers another one
        places = [panel.layout for panel in section.panels]
        cells = [(p.x + i, p.y + j) for p in places for i in range(p.w) for j in range(p.h)]
        assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24


def test_a_pattern_is_exact() -> None:
    pattern = metric_pattern(("gold/*", "eval/*/kl"))
    assert re.search(pattern, "gold/total") and re.search(pattern, "eval/dev/kl")
    assert not re.search(pattern, "eval/dev/kl_k3") and not re.search(pattern, "eval/dev/gold/total")


@pytest.fixture
def no_account(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    yield
    wandb.teardown()  # it keeps what it read of the environment for later runs of this process


def test_offline_the_command_writes_the_specification_and_keeps_a_known_address(
    tmp_path: Path, no_account: None, capsys: Any
) -> None:
    path = tmp_path / "dashboard.json"
    main(["dashboard", f"runs_dir={tmp_path}", "tracking.project=mine", "tracking.entity=me"])
    assert json.loads(path.read_text()) == make_specification("mine", "me")
    assert "offline: set WANDB_API_KEY" in capsys.readouterr().out
    path.write_text(json.dumps({"project": "rlhf", "entity": None, "url": "https://example.org/me/rlhf?nw=abc"}))
    main(["dashboard", f"runs_dir={tmp_path}"])
    assert json.loads(path.read_text())["url"].endswith("nw=abc")
    main(["dashboard", f"runs_dir={tmp_path}", "tracking.project=other"])
    assert "url" not in json.loads(path.read_text())


def test_a_server_that_refuses_is_one_line(
    tmp_path: Path, no_account: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("rlhf.commands.dashboard.SEND_TIMEOUT", 2.0)
    with serve("hang") as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        with pytest.raises(SystemExit) as caught:
            main(["dashboard", f"runs_dir={tmp_path}", "tracking.entity=me"])
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "W&B did not take it" in told and "Traceback" not in told
    assert (tmp_path / "dashboard.json").is_file()
