"""Evaluations beside the stage: when the stage runs too, and what the report makes of them."""

import json
import shutil

from rlhf.evaluation.judging import judged_figures
from rlhf.report.page import make_page
from rlhf.runs.run_files import read_run
from rlhf.stages import evaluate as external

from .conftest import Run


def test_the_stage_runs_only_if_it_is_due(gold_run, tmp_path):
    more = ["evaluate.pairs=x.jsonl", "evaluate.judge=http://localhost/v1"]
    assert gold_run.config().evaluate.turned_on == []
    assert gold_run.config(*more).evaluate.turned_on == ["pairs", "judge"]
    assert not external.stage_is_due(gold_run.config())  # it is complete
    run = Run(tmp_path, "x", gold_run.overrides)
    for stage in ("world", "pretrain", "sft", "label", "reward"):
        (run.folder / stage).mkdir(parents=True)
        shutil.copy(gold_run.folder / stage / "stage.json", run.folder / stage / "stage.json")
    assert not external.stage_is_due(run.config())  # PPO is missing
    (run.folder / "ppo").mkdir()
    shutil.copy(gold_run.folder / "ppo" / "stage.json", run.folder / "ppo" / "stage.json")
    assert external.stage_is_due(run.config())


def test_the_report_shows_them_and_says_where_judges_disagree(gold_run, tmp_path):
    share = {"value": 0.75, "ci95": [0.6, 0.9], "n": 40}
    row = {"pairs": share, "all_right": share, "length": share}
    answers = {
        "responses": {"ppo": "a b", "sft": "c"},
        "scores": {"ppo": 2.0, "sft": 1.0},
        "gold": {"ppo": 0.1, "sft": 0.9},
    }
    judged = judged_figures([answers] * 40, ("ppo", "sft"), ["B", "A"] * 40)
    found = {
        "pairs": {"overall": row, "subsets": {"<b>chat</b>": row}},
        "judge": judged | {"judge": "m-1", "counts": {"requests": 80}},
    }
    folder = tmp_path / "run"
    (folder / "evaluations").mkdir(parents=True)
    for name, results in found.items():
        (folder / "evaluations" / f"{name}.json").write_text(json.dumps(results), encoding="utf-8")
    page = make_page([read_run(folder)])
    assert "The reward model on preference files" in page
    assert "&lt;b&gt;chat&lt;/b&gt;" in page and "<b>chat" not in page and ">m-1</td>" in page
    # with the reward model, not with the truth
    assert page.count(">true</td>") == 1 and page.count(">false</td>") == 1 and "1.000 (" in page
