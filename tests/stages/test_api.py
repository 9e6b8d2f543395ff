"""From Python: `rlhf.load` and `rlhf.Run` give the numbers of the stages, and importing stays light."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import rlhf
from rlhf.data import chat_template
from rlhf.data.rows import plain
from rlhf.errors import UserError
from rlhf.runs.folders import read_stage
from tests.stages.conftest import Run as GoldRun

from ..conftest import ROOT


@pytest.fixture(scope="module")
def run(gold_run) -> rlhf.LoadedRun:
    return rlhf.load(gold_run.folder, device="cpu")


def test_the_example_runs(gold_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(gold_run.folder)
    _, code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text("utf-8"), re.S)
    Path("example.py").write_text(code, encoding="utf-8")
    names = runpy.run_path("example.py")
    assert len(names["answers"]) == len(names["before"]) == len(names["scores"]) == 2
    assert all(isinstance(score, float) for score in names["scores"])
    assert names["run"].policies == ("pretrain", "sft", "ppo")
    assert names["logp"].shape == (1, names["ids"]["input_ids"].shape[1] - 1) and (names["logp"] <= 0).all()


def test_answers_depend_on_the_seed_and_the_stage(run):
    prompts = [f"What colour is thing {i}?" for i in range(12)]
    first = run.sample(prompts, max_new_tokens=16)
    assert run.sample(prompts, max_new_tokens=16) == first
    assert run.sample(prompts[:3], max_new_tokens=16) == first[:3], "whatever else is asked"
    assert run.sample(prompts, max_new_tokens=16, seed=1) != first
    assert run.sample(prompts, "sft", max_new_tokens=16) != first
    assert run.sample(prompts, greedy=True, seed=1) == run.sample(prompts, greedy=True, seed=2)
    assert run.sample([]) == []


def test_a_text_of_the_base_ends_where_a_document_does(run, monkeypatch):
    prompts = [f"What colour is thing {i}?" for i in range(12)]
    ended = run.sample(prompts, "pretrain")
    of_answers = chat_template.end_ids
    monkeypatch.setattr(chat_template, "end_ids", lambda tokenizer, base=False: of_answers(tokenizer))
    further = run.sample(prompts, "pretrain")
    assert ended != further and all(b.startswith(a) for a, b in zip(ended, further, strict=True))


def test_importing_is_light_and_help_shows_it():
    heavy = {"torch", "transformers", "hydra", "pydantic"}
    code = f"import rlhf, sys; print(sorted({{m.split('.')[0] for m in sys.modules}} & {heavy})); help(rlhf)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = done.stdout.replace("pathlib._local.", "pathlib.")
    assert told.startswith("[]\n") and "load(run: str | pathlib.Path, device: str = 'auto', precision" in told
    assert "sample(" in told and "score(" in told
    assert (Path(rlhf.__file__).parent / "py.typed").is_file()
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = rlhf.lode


def brevity(prompts, responses, metadata):
    return [-float(len(response)) for response in responses]


@pytest.fixture(scope="module")
def base(gold_run: GoldRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("base") / "model"
    gold_run.stage("export", "export.stage=pretrain", f"export.out='{out}'")
    return out


def make_run(gold_run: GoldRun, base: Path, folder: Path, **more) -> rlhf.Run:
    lines = (gold_run.folder / "world" / "demonstrations.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[:80]]
    fast = {"device": "cpu", "threads": 1, "tracking_kind": "jsonl", "rollout_max_new_tokens": 12}
    return rlhf.Run("mine", model=base, demonstrations=rows, runs_dir=folder, **fast, **more)


SMALL = {
    "episodes": 32, "episodes_per_update": 16, "minibatches": 2, "warmup_fraction": 0.0, "eval_every": 0,
    "critic": "sft",
}  # fmt: skip


def test_a_model_a_list_of_rows_and_a_function(gold_run, base, tmp_path, capsys):
    run = make_run(gold_run, base, tmp_path)
    run.sft(epochs=1, lr=1e-3).ppo(rewards=[brevity], kl_coef=0.05, **SMALL)
    record = read_stage(run.folder / "ppo")
    assert record["config"]["kl"]["coef"] == 0.05 and record["config"]["ppo"]["rewards"] == [f"{__name__}:brevity"]
    assert any(key.startswith("reward:") for key in record["data"])  # the function's source is an input of the stage
    metrics = run.metrics("ppo")
    assert type(metrics).__name__ == "DataFrame" and list(metrics.index) == [1, 2]
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
    import pandas

    table = pandas.DataFrame({"instruction": ["Name a fruit."] * 3, "output": ["pear", "plum", "fig"]})
    run = rlhf.Run("mine", model=base, demonstrations=table, runs_dir=tmp_path)
    assert len((run.folder / "data" / "demonstrations.jsonl").read_text(encoding="utf-8").splitlines()) == 3


def test_plugins_are_called_before_a_stage(tmp_path):
    def register():
        raise RuntimeError("called")

    run = rlhf.Run("mine", runs_dir=tmp_path, corpus=["text.txt"], plugins=[register])
    with pytest.raises(UserError, match=r"^plugins .*register: raised RuntimeError: called"):
        run.stage("tokenizer")


@pytest.mark.parametrize(("call", "said"), [
    (lambda run: run.ppo(learning_rate=1), "learning_rate"), (lambda run: rlhf.Run("x", experiment="golt"), "did you mean 'gold'"),
    (lambda run: rlhf.Run("x", overwrite=True), "given to a stage"), (lambda run: run.reward(data_comparisons="no.csv"), "no such file"),
    (lambda run: run.sft(model_width=64), "a pretrained model has a shape"), (lambda run: run.stage("rewrd"), "did you mean 'reward'"),
    (lambda run: run.metrics("ppo"), "has not run"), (lambda run: run.ppo(rewards=[lambda responses: responses]), "takes"),
])  # fmt: skip
def test_mistakes_of_a_run_in_python_are_one_line(gold_run, base, tmp_path, call, said):
    with pytest.raises(UserError, match=said) as error:
        call(make_run(gold_run, base, tmp_path, sft_epochs=0))
    assert "\n" not in str(error.value)


def test_a_frames_arrays_are_lists(tmp_path):
    numpy = pytest.importorskip("numpy")
    cells = numpy.array([{"role": "user", "content": "p"}], dtype=object)
    found = plain({"prompt": cells, "n": numpy.int64(3), "none": float("nan")})
    assert found == {"prompt": list(cells), "n": 3, "none": None}
