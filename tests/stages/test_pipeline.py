"""`rlhf pipeline`: does what is missing, resumes what was killed, notices what changed, and nothing twice."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rlhf
from rlhf.commands import pipeline
from rlhf.commands.run import Run as Python
from rlhf.errors import UserError
from rlhf.runs.folders import is_complete, read_stage
from rlhf.runs.remembered import recall
from rlhf.runs.run_files import read_jsonl

from .conftest import GOLD_STAGES, Run
from .test_resume import interrupt

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
SHORT_EVALUATION = ["evaluate.prompts=8", "evaluate.samples=1", "evaluate.best_of=2"]


@pytest.fixture
def whole(copy_until) -> Run:
    return copy_until(None)


def states(run: Run) -> dict[str, str]:
    table = json.loads((run.folder / "pipeline.json").read_text())
    return {name: row["state"] for name, row in table["stages"].items()}


def pipe_in_process(monkeypatch: pytest.MonkeyPatch, run: Run, *more: str) -> list[str]:
    """The pipeline, with its stages in this process and an empty report; the names of those that ran."""
    ran: list[str] = []

    def run_stage(config: Any, stage: str, overrides: list[str]) -> None:
        ran.append(stage)
        run.stage(stage, *[o for o in more if not o.startswith("overwrite=")], *overrides)

    monkeypatch.setattr(pipeline, "run_stage", run_stage)
    monkeypatch.setattr(pipeline, "write_report", lambda folder: (folder / "report.html").touch())
    pipeline.run(run.config(*more))
    return ran


def test_second_call_skips_everything_without_torch(whole, monkeypatch):
    assert pipe_in_process(monkeypatch, whole) == []
    before = {p: p.stat().st_mtime_ns for p in whole.folder.rglob("*") if p.is_file() and p.name != "pipeline.json"}
    script = (
        "import sys; from rlhf.cli import main; main(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'trl', 'datasets', 'wandb', 'matplotlib'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    before_it, command = os.times(), [sys.executable, "-c", script, "pipeline", *whole.words()]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert done.returncode == 0, done.stderr
    spent = os.times()
    assert sum(spent[2:4]) - sum(before_it[2:4]) < 5, "seconds of the processor, whatever else runs"
    skipped = [line for line in done.stdout.splitlines() if line.endswith("complete, skipped")]
    assert skipped == [f"{stage}: complete, skipped" for stage in GOLD_STAGES]
    assert "win rate of PPO over SFT by the gold judge" in done.stdout and "report.html" in done.stdout
    assert set(states(whole).values()) == {"complete before"}
    after = {p: p.stat().st_mtime_ns for p in whole.folder.rglob("*") if p.is_file() and p.name != "pipeline.json"}
    assert after == before, "nothing was written but pipeline.json"


def test_a_changed_setting_is_refused_by_name_unless_it_changes_speed_only(whole, monkeypatch):
    for setting, stage in (("sft.lr=0.123", "sft"), ("seed=1", "world"), ("ppo.clip_range=0.3", "ppo")):
        key = setting.split("=")[0]
        with pytest.raises(UserError, match=rf"{stage} was run with other settings \({key} .*overwrite=true"):
            pipe_in_process(monkeypatch, whole, setting)
    micro = ["ppo.micro_batch_episodes=8", "reward.micro_batch_responses=8"]
    assert pipe_in_process(monkeypatch, whole, *micro, "checkpoints.every_seconds=1", "threads=2") == []


def test_a_call_that_a_finished_stage_refuses_runs_nothing_and_is_not_remembered(copy_until, gold_run, monkeypatch):
    """The reward model, which is missing, would be trained and remember the setting that PPO then refuses."""
    run = copy_until("reward")
    shutil.copytree(gold_run.folder / "ppo", run.folder / "ppo")
    remembered = recall(run.folder)
    with pytest.raises(UserError, match=r"ppo was run with other settings \(ppo.clip_range "):
        pipe_in_process(monkeypatch, run, "ppo.clip_range=0.3")
    assert not (run.folder / "reward").exists() and recall(run.folder) == remembered
    python = Python(run.folder.name, runs_dir=run.runs_dir)
    before = python.config().ppo.clip_range
    with pytest.raises(UserError, match=r"ppo was run with other settings"):
        python.ppo(clip_range=0.3)
    assert python.config().ppo.clip_range == before


def test_overwrite_redoes_the_changed_stage_and_what_builds_on_it(whole, monkeypatch):
    hashes = {stage: read_stage(whole.folder / stage)["hash"] for stage in GOLD_STAGES}
    changed = ["ppo.episodes=64", "ppo.epochs=1", *SHORT_EVALUATION]
    ran = pipe_in_process(monkeypatch, whole, *changed, "overwrite=true")
    assert ran == ["ppo", "evaluate"]
    assert states(whole) == {s: "redone" if s in ran else "complete before" for s in GOLD_STAGES}
    for stage in GOLD_STAGES:
        assert (read_stage(whole.folder / stage)["hash"] != hashes[stage]) == (stage in ran)
    assert pipe_in_process(monkeypatch, whole, *changed) == []


def test_no_reward_model_is_trained_if_a_function_pays(gold_run, copy_until, tmp_path, monkeypatch):
    """The pipeline to the end without a reward stage; once there is one, `evaluate` measures it too."""
    run = copy_until("reward")
    (tmp_path / "pay.py").write_text("def brief(prompts, responses, metadata): return [-len(r) for r in responses]\n")
    # The briefest of eight responses is briefer than another sample on average, whatever the rounding; on 8 prompts it need not be.
    short = ["evaluate.prompts=32", "evaluate.samples=1", "evaluate.best_of=8"]
    paid = [f"ppo.rewards='{tmp_path}/pay.py:brief'", "ppo.episodes=64", *short]
    assert pipe_in_process(monkeypatch, run, *paid) == ["ppo", "evaluate"] and not (run.folder / "reward").exists()
    results = run.results()
    answers = [json.loads(line)["responses"] for line in (run.folder / "evaluate" / "samples.jsonl").open()]
    for name in ("sft", "ppo"):
        mean = sum(-len(row[name]) for row in answers) / len(answers)
        assert results["reward_without_eos_rule"][name] == pytest.approx(mean, abs=1e-3)
    assert "reward_model" not in results and results["best_of_n"]["reward"] > results["reward"]["sft"]
    assert (run.folder / "report.html").exists()
    assert pipe_in_process(monkeypatch, run, *paid) == []
    shutil.copytree(gold_run.folder / "reward", run.folder / "reward")
    assert pipe_in_process(monkeypatch, run, *paid, "overwrite=true") == ["evaluate"]
    again = run.results()
    assert "accuracy" in again["reward_model"] and again["reward"] == results["reward"]


def test_every_parent_may_be_another_runs(gold_run, capsys):
    parents = [f"parents.{stage}=gold" for stage in ("world", "sft", "reward")]
    other = Run(gold_run.runs_dir, "other", [*gold_run.overrides, *parents, "kl.coef=0.5", "ppo.episodes=64"])
    capsys.readouterr()
    record = read_stage(other.stage("ppo"))
    assert "gold/sft" in capsys.readouterr().out
    assert record["parents"] == {s: read_stage(gold_run.folder / s)["hash"] for s in ("world", "sft", "reward")}
    loaded = rlhf.load(other.folder, device="cpu")
    assert "sft" in loaded.policies and len(loaded.score(["a"], loaded.sample(["a"], "sft"))) == 1
    again = Run(gold_run.runs_dir, "other", [*gold_run.overrides, *parents, "parents.label=gold"])
    ours, theirs = read_stage(again.stage("reward")), gold_run.record("reward")
    assert (ours["files"], ours["hash"]) == (theirs["files"], theirs["hash"]), "equal runs have equal hashes"


def test_a_damaged_model_is_noticed(whole, monkeypatch):
    path = whole.folder / "sft" / "model" / "model.safetensors"
    content = path.read_bytes()
    for damaged in (content[:-100], content[:-100] + bytes([content[-100] ^ 1]) + content[-99:], None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        for call in (lambda: pipe_in_process(monkeypatch, whole), lambda: whole.stage("ppo", "overwrite=true")):
            with pytest.raises(UserError) as caught:
                call()
            assert str(path) in str(caught.value) and "overwrite=true" in str(caught.value)


RUN_WORLD = """
import sys
from rlhf.commands.pipeline import run_stage
from rlhf.config.compose import compose_config
run_stage(compose_config(sys.argv[1:]), "world", sys.argv[1:])
"""


def test_a_failing_stage_stops_the_pipeline_with_its_code(copy_until):
    words = [sys.executable, "-c", RUN_WORLD, *copy_until("tokenizer").words()]
    done = subprocess.run(words, capture_output=True, text=True)
    told = done.stderr
    assert done.returncode == 2
    assert "already has a complete world" in told and "error: stopped in world" in told and "Traceback" not in told


def test_a_stage_that_was_stopped_is_resumed(copy_until, monkeypatch):
    """With the weights of the undisturbed stage: test_resume.py."""
    run, more = copy_until("ppo"), ["ppo.episodes=64", "ppo.episodes_per_update=32", "ppo.epochs=1", *SHORT_EVALUATION]
    interrupt(run, "ppo", 1, *more)
    assert pipe_in_process(monkeypatch, run, *more) == ["ppo", "evaluate"]
    assert states(run) == {s: "complete before" for s in GOLD_STAGES} | {"ppo": "resumed", "evaluate": "done"}
    assert all(is_complete(run.folder / stage) for stage in GOLD_STAGES)
    steps = [row["progress/step"] for row in read_jsonl(run.folder / "ppo" / "metrics.jsonl")]
    assert steps == [0, 1, 2]  # 0: the SFT model on the held-out prompts
    assert (run.folder / "report.html").is_file()
