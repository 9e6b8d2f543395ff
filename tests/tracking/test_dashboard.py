"""The dashboard: its specification offline, W&B's own objects, and a server that does not take it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlhf.cli import main
from rlhf.report.workspace import NAMES, flow, make_specification, make_workspace, sections
from rlhf.runs.charts import CHARTS, TABLE_PANELS, TABLES, Chart, metric_pattern
from rlhf.runs.metric_table import METRICS, find
from tests.tracking.wandb_server import serve

WANTED = ("PPO", "Reward model", "DPO", "Labelled tasks", "SFT", "Pretraining", "Cost")


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


def panel_metrics() -> set[str]:
    """Every metric that a panel draws or that is its axis."""
    panels = [(panel, x) for _, x, panels in sections() for panel in panels if isinstance(panel, Chart)]
    return {name for panel, x in panels for name in (*panel.metrics, panel.x or x)}


def test_every_section_and_every_name_is_there() -> None:
    assert tuple(name for name, _, _ in sections()) == WANTED and CHARTS.keys() - {"judge"} == NAMES.keys()
    assert [name for name in panel_metrics() if find(name.replace("*", "word")) is None] == []
    assert set(NOT_SHOWN) <= {metric.name for metric in METRICS}
    shown = panel_metrics()
    for name in ("objective/scores", "objective/rlhf_reward", "objective/kl", "objective/kl_coef", "objective/sqrt_kl",
                 "policy/ratio_max", "policy/clipfrac_avg", "policy/approxkl_avg", "policy/entropy_avg",
                 "val/explained_var", "optim/policy_grad_norm", "rollout/response_len", "rollout/eos_fraction",
                 "reward/loss", "reward/accuracy", "reward/margin", "sft/loss", "pretrain/loss", "time/tokens_per_s"):  # fmt: skip
        assert name in shown, name
    tables = {panel.table for panels in TABLE_PANELS.values() for panel in panels}
    assert tables == set(TABLES) == {"samples", "calibration", "score_histogram"}
    for panel in [panel for panels in TABLE_PANELS.values() for panel in panels]:
        assert {column for _, column in panel.fields} <= set(TABLES[panel.table]), panel.title


def test_the_specification_tells_what_each_panel_means() -> None:
    specification = make_specification("p", "me")
    assert json.loads(json.dumps(specification)) == specification
    panels = {panel["title"]: panel for section in specification["sections"] for panel in section["panels"]}
    kl = panels["KL to the SFT model"]
    assert kl["x"] == "progress/episodes"
    assert kl["metrics"][0] == {
        "name": "objective/kl",
        "unit": "nats per sequence",
        "meaning": find("objective/kl").meaning,
    }  # type: ignore[union-attr]
    assert panels["Reward against the root of KL"]["x"] == "objective/sqrt_kl"
    assert panels["The same held-out prompts over time"]["columns"][:4] == ["step", "id", "prompt", "response"]


def test_wandbs_own_objects_take_every_panel() -> None:
    workspace = make_workspace("p", "me")
    assert [section.name for section in workspace.sections] == list(WANTED)
    plots = {getattr(panel, "title", None): panel for section in workspace.sections for panel in section.panels}
    kl = plots["KL to the SFT model"]
    assert kl.metric_regex == "^(objective/kl|objective/kl_k3|eval/[^/]+/kl)$"
    assert plots["KL coefficient"].y == ["objective/kl_coef"] and plots["KL coefficient"].x == "progress/episodes"
    for section in workspace.sections:  # nothing lies over anything else
        cells = [
            (p.layout.x + i, p.layout.y + j)
            for p in section.panels
            for i in range(p.layout.w)
            for j in range(p.layout.h)
        ]
        assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24


def test_panels_flow_like_words_and_a_pattern_is_exact() -> None:
    assert flow([12, 12, 8, 8, 8, 24]) == [(0, 0), (12, 0), (0, 8), (8, 8), (16, 8), (0, 16)]
    pattern = metric_pattern(("gold/*", "eval/*/kl"))
    assert re.search(pattern, "gold/total") and re.search(pattern, "eval/dev/kl")
    assert not re.search(pattern, "eval/dev/kl_k3") and not re.search(pattern, "eval/dev/gold/total")


@pytest.fixture
def no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


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
