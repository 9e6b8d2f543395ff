"""`evaluate.benchmarks`: a local task of lm-eval on a stage's model, against a plain forward."""

import importlib.util
import json

import pytest
import torch
import yaml

from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import UserError
from rlhf.evaluation import benchmarks
from rlhf.training.setup import load_policy
from tests.oracles import row_logprobs

CPU = torch.device("cpu")
without = importlib.util.find_spec("lm_eval") is None
needs_lm_eval = pytest.mark.skipif(without, reason="needs the package lm-eval, which is not installed")
DOCS = [
    {"question": "Which colour does soil have?", "choices": [" Brown.", " Blue.", " Green."], "answer": 0},
    {"question": "Which colour does snow have?", "choices": [" Pink.", " White."], "answer": 1},
    {"question": "Which colour does coal have?", "choices": [" Red.", " Black."], "answer": 1},
    {"question": "What does a dog do?", "choices": [" It barks.", " It moos."], "answer": 0},
]


@pytest.fixture
def tasks(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    data = tmp_path / "colours.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in DOCS), encoding="utf-8")
    task = {
        "task": "our_colours", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test",
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_target": "answer", "doc_to_choice": "choices",
        "target_delimiter": "", "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    (folder / "colours.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    return folder


def plain_accuracy(folder) -> float:
    """The share of questions whose answer has the highest log-probability."""
    tokenizer, policy = load_tokenizer(folder), load_policy(folder)
    right = 0
    for row in DOCS:
        start = tokenizer(row["question"], add_special_tokens=False)["input_ids"]
        sums = []
        for choice in row["choices"]:
            tokens = tokenizer(row["question"] + choice, add_special_tokens=False)["input_ids"]
            sums.append(sum(row_logprobs(policy, tokens, len(start))))
        right += sums.index(max(sums)) == row["answer"]
    return right / len(DOCS)


@needs_lm_eval
def test_a_local_task_on_the_models_of_two_stages(gold_run, tasks):
    settings = ("evaluate.benchmarks=[our_colours]", "evaluate.models=[pretrain,ppo]")
    config = gold_run.config(*settings, f"evaluate.benchmark_tasks='{tasks}'")
    found = benchmarks.evaluate_benchmarks(config, CPU)
    for name in ("pretrain", "ppo"):
        row, wanted = found["models"][name]["our_colours acc"], plain_accuracy(gold_run.folder / name / "model")
        assert row["n"] == 4 and row["value"] == pytest.approx(wanted, abs=1e-4)
    tax = found["differences"]["ppo - pretrain"]["our_colours acc"]
    values = [found["models"][name]["our_colours acc"]["value"] for name in ("pretrain", "ppo")]
    assert tax["value"] == pytest.approx(values[1] - values[0], abs=1e-4)
    config = gold_run.config("evaluate.benchmarks=[no_such_task]", f"evaluate.benchmark_tasks='{tasks}'")
    with pytest.raises(UserError, match=r"'no_such_task': neither lm-eval .* has such a task"):
        benchmarks.evaluate_benchmarks(config, CPU)


def test_figures_of_lm_evals_results_by_hand():
    arc = {"alias": "arc", "acc,none": 0.5, "acc_stderr,none": 0.1, "f1,strict": 0.25, "f1_stderr,strict": "N/A"}
    results = {"results": {"arc": arc}, "n-samples": {"arc": {"original": 9, "effective": 4}}}
    found = benchmarks.task_figures(results)
    assert found == {
        "arc acc": {"value": 0.5, "ci95": [0.304, 0.696], "n": 4},
        "arc f1 (strict)": {"value": 0.25, "ci95": None, "n": 4},
    }
    # 0.3 less 0.5; half = hypot(.196, .196) = .2772
    worse = {"arc acc": {"value": 0.3, "ci95": [0.104, 0.496], "n": 4}}
    assert benchmarks.differences({"sft": found, "ppo": worse}) == {
        "ppo - sft": {"arc acc": {"value": -0.2, "ci95": [-0.4772, 0.0772], "n": 4}}
    }
