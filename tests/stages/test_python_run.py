"""`rlhf.Run`: the commands from Python."""

import json
from pathlib import Path

import pandas
import pytest

import rlhf
from rlhf.errors import UserError
from rlhf.runs.folders import read_stage
from tests.stages.conftest import Run as GoldRun


def brevity(prompts, responses, metadata):
    return [-float(len(response)) for response in responses]


@pytest.fixture(scope="module")
def base(gold_run: GoldRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained model as others publish it."""
    out = tmp_path_factory.mktemp("base") / "model"
    gold_run.stage("export", "export.stage=pretrain", f"export.out='{out}'")
    return out


def make_run(gold_run: GoldRun, base: Path, folder: Path, **more) -> rlhf.Run:
    lines = (gold_run.folder / "world" / "demonstrations.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[:80]]
    fast = {"device": "cpu", "threads": 1, "tracking_kind": "jsonl", "rollout_max_new_tokens": 12}
    return rlhf.Run("mine", model=base, demonstrations=rows, runs_dir=folder, **fast, **more)


SMALL = {
    "episodes": 32,
    "episodes_per_update": 16,
    "minibatches": 2,
    "warmup_fraction": 0.0,
    "eval_every": 0,
    "critic": "sft",
}


def test_a_model_a_list_of_rows_and_a_function(gold_run, base, tmp_path, capsys):
    run = make_run(gold_run, base, tmp_path)
    run.sft(epochs=1, lr=1e-3).ppo(rewards=[brevity], kl_coef=0.05, **SMALL)
    record = read_stage(run.folder / "ppo")
    assert record["config"]["kl"]["coef"] == 0.05 and record["config"]["ppo"]["rewards"] == [f"{__name__}:brevity"]
    assert any(key.startswith("reward:") for key in record["data"])  # the function's source is an input of the stage
    metrics = run.metrics("ppo")
    assert isinstance(metrics, pandas.DataFrame) and list(metrics.index) == [1, 2]
    assert (metrics["objective/scores"] <= 0).all()
    assert len(run.sample(["Name a fruit.", "What colour is snow?"], max_new_tokens=4)) == 2
    assert run.metrics("tokenizer").empty  # a stage that logs no metrics
    # a second session: the same rows and settings are the same run, and nothing is computed again
    capsys.readouterr()
    again = make_run(gold_run, base, tmp_path)
    again.sft(epochs=1, lr=1e-3).ppo(rewards=[brevity], kl_coef=0.05, **SMALL)
    assert "ppo: complete, skipped" in capsys.readouterr().out
    with pytest.raises(UserError, match="was run with other settings"):
        again.ppo(kl_coef=0.1)


def test_a_table_of_pandas_is_rows(gold_run, base, tmp_path):
    table = pandas.DataFrame({"instruction": ["Name a fruit."] * 3, "output": ["pear", "plum", "fig"]})
    run = rlhf.Run("mine", model=base, demonstrations=table, runs_dir=tmp_path)
    assert len((run.folder / "data" / "demonstrations.jsonl").read_text(encoding="utf-8").splitlines()) == 3


def test_plugins_are_called_before_a_stage(tmp_path):
    def register():
        raise RuntimeError("called")

    run = rlhf.Run("mine", runs_dir=tmp_path, corpus=["text.txt"], plugins=[register])
    with pytest.raises(UserError, match=r"^plugins .*register: raised RuntimeError: called"):
        run.stage("tokenizer")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda run: run.ppo(learning_rate=1), "learning_rate"),
        (lambda run: run.sft(model_width=64), "a pretrained model has a shape"),
        (lambda run: run.stage("rewrd"), "did you mean 'reward'"),
        (lambda run: run.metrics("ppo"), "has not run"),
        (lambda run: run.ppo(rewards=[lambda responses: responses]), "takes"),
    ],
)
def test_mistakes_are_one_line(gold_run, base, tmp_path, call, said):
    with pytest.raises(UserError, match=said) as error:
        call(make_run(gold_run, base, tmp_path, sft_epochs=0))
    assert "\n" not in str(error.value)
