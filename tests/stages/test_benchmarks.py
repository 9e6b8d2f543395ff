"""Evaluations: a local task of lm-eval, best-of-n, and a reward model on preference files."""

import importlib.util
import json
import shutil
from itertools import combinations

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data.encoding import Item, Judgement
from rlhf.data.records import Message, Ranking
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import UserError
from rlhf.evaluation import benchmarks
from rlhf.evaluation import reward_report as pairs
from rlhf.evaluation.best_of import best_of_n_kl, expected_best
from rlhf.model.classifier import load_reward_model
from rlhf.runs.folders import read_stage
from rlhf.system.files import read_json
from rlhf.training.setup import load_policy
from tests.oracles import row_logprobs

from ..model.classifiers import WORDS, save_classifier, score_texts
from .conftest import GOLD, Run

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


def test_expected_best_by_hand():
    proxy, gold = [3.0, 1.0, 2.0], [10.0, 0.0, 4.0]
    # pairs by proxy: {3,1} -> 10, {3,2} -> 10, {1,2} -> 4: mean 8
    assert expected_best(proxy, gold, 2) == pytest.approx(8.0)
    assert expected_best(proxy, gold, 1) == pytest.approx(14 / 3)
    assert expected_best(proxy, gold, 3) == 10.0


@given(
    st.lists(st.tuples(st.integers(0, 99), st.floats(-5, 5)), min_size=1, max_size=7, unique_by=lambda x: x[0]),
    st.data(),
)
def test_expected_best_is_the_mean_over_all_subsets(samples, data):
    n = data.draw(st.integers(1, len(samples)))
    proxy, values = [float(p) for p, _ in samples], [v for _, v in samples]
    subsets = list(combinations(range(len(samples)), n))
    wanted = sum(values[max(chosen, key=lambda i: proxy[i])] for chosen in subsets) / len(subsets)
    assert expected_best(proxy, values, n) == pytest.approx(wanted, abs=1e-9)


def test_evaluation_has_the_best_of_n_beside_ppo(gold_run):
    results = read_json(gold_run.folder / "evaluate" / "results.json")
    best = results["best_of_n"]
    assert best["n"] == 4 and best["kl_bound_nats"] == 0.6363  # log 4 - 3/4
    # In this small run most of the scores' spread is between prompts; a pick at random would be within 0.1 of the mean
    assert best["reward"] > results["reward_without_eos_rule"]["sft"] + 0.2, "the best of 4 by the model that picks"
    assert 0 < best["gold"] < 1 and best["win_rate_vs_sft"]["n"] == 40


def test_rejection_sampling_trains_on_the_best(copy_until, gold_run):
    settings = ["rejection.prompts=60", "rejection.samples=8", "sft.lr=1e-3", "rejection.epochs=2"]
    folder = copy_until("ppo").stage("rejection", *settings)
    rows = [json.loads(line) for line in (folder / "demonstrations.jsonl").read_text().splitlines()]
    assert 10 < len(rows) <= 60 and all(row["response"].strip() and row["source"] == "best of 8" for row in rows)
    scores = torch.tensor([row["metadata"]["score"] for row in rows])
    ordinary = read_json(gold_run.folder / "evaluate" / "results.json")["reward_without_eos_rule"]["sft"]
    assert scores.mean() > ordinary + 0.3
    before, after = (load_policy(p / "model") for p in (gold_run.folder / "sft", folder))
    assert any(not p.equal(q) for p, q in zip(before.parameters(), after.parameters(), strict=True))
    assert read_stage(folder)["status"] == "complete"


def test_kl_of_best_of_n_by_hand():
    assert best_of_n_kl(1) == 0.0
    assert best_of_n_kl(2) == pytest.approx(0.193147, abs=1e-6)  # log 2 - 1/2
    assert best_of_n_kl(16) == pytest.approx(1.835089, abs=1e-6)  # 2.772589 - 15/16


def row(prompt: str, chosen: int, rejected: int, subset: str) -> Item:
    """Answers 0 … chosen - 1 beat the others."""
    told = {"kind": "ranking", "id": "r", "prompt": prompt, "ranking": [["a"], ["b"]], "metadata": {"subset": subset}}
    record = Ranking.model_validate(told | {"responses": [{"id": "a", "text": "x"}, {"id": "b", "text": "y"}]})
    order = [(i, j) for i in range(chosen) for j in range(chosen, chosen + rejected)]
    sizes = [1] * (chosen + rejected)
    return Item("k", [[1]] * len(sizes), sizes, record, judgements=[Judgement(None, order, None)])


def test_figures_by_hand():
    items = [row("p", 1, 3, "easy"), row("q", 1, 1, "hard"), row("r", 2, 1, "hard")]
    scores = [[3.0, 1.0, 2.0, 0.0], [0.0, 1.0], [2.0, 0.5, 0.5]]
    found = pairs.pair_figures(items, scores)
    # easy: 3 of 3, all right; hard: 0 of 1, then 1 and a half of 2: 1.5 of 3, none all right
    assert (found["subsets"]["easy"]["pairs"]["value"], found["subsets"]["easy"]["all_right"]["value"]) == (1.0, 1.0)
    assert (found["subsets"]["hard"]["pairs"]["value"], found["subsets"]["hard"]["all_right"]["value"]) == (0.5, 0.0)
    assert found["overall"]["pairs"]["value"] == 0.75 and found["overall"]["pairs"]["n"] == 6


def test_rows_of_one_prompt_are_one_unit():
    """Ten copies of a prompt's row do not narrow the interval."""
    once, many = [row("p", 1, 1, "s"), row("q", 1, 1, "s")], [*[row("p", 1, 1, "s")] * 10, *[row("q", 1, 1, "s")] * 10]
    right, wrong = [1.0, 0.0], [0.0, 1.0]
    few = pairs.row_figures(once, [right, wrong])["pairs"]
    copied = pairs.row_figures(many, [right] * 10 + [wrong] * 10)["pairs"]
    assert copied["value"] == few["value"] == 0.5 and copied["ci95"] == few["ci95"]


@pytest.fixture
def files(tmp_path):
    """RewardBench-like and RM-Bench-like files."""
    answers = {"chosen": "It is red.", "rejected": "No."}
    bench = [{"id": i, "prompt": f"Name colour {i}.", "subset": ("safety", "chat")[i % 2]} | answers for i in range(6)]
    animals = {"chosen": ["A cow.", "A big cow.", "A *big* cow."], "rejected": ["Soil.", "Wet soil.", "*Wet* soil."]}
    styles = [{"id": f"m{i}", "prompt": f"Name animal {i}.", "domain": "math"} | animals for i in range(4)]
    for name, rows in (("bench", bench), ("styles", styles)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path / "bench.jsonl", tmp_path / "styles.jsonl"


def evaluate(run: Run, *more: str) -> dict:
    run.stage("evaluate", *more)
    return json.loads((run.folder / "evaluations" / "pairs.json").read_text(encoding="utf-8"))


def test_a_run_with_nothing_but_a_reward_model(gold_run, files, tmp_path):
    shutil.copytree(gold_run.folder / "reward", tmp_path / "runs" / "only" / "reward")
    run = Run(tmp_path / "runs", "only", GOLD)
    found = evaluate(run, f"evaluate.pairs=['{files[0]}','{files[1]}']")
    assert set(found["subsets"]) == {"chat", "math", "safety"} and found["left_out"] == 0
    assert found["overall"]["pairs"]["n"] == 6 + 4 * 9 and found["overall"]["all_right"]["n"] == 10
    assert not (run.folder / "evaluate").exists()


def test_a_classifiers_folder(files, tmp_path):
    folder = save_classifier(tmp_path / "classifier", "bert", text=[WORDS])
    run = Run(tmp_path / "runs", "none", ["tracking=jsonl", "device=cpu", "threads=1"])
    found = evaluate(run, f"evaluate.pairs='{files[0]}'", f"evaluate.pairs_model='{folder}'")
    model = load_reward_model(folder, torch.device("cpu"))
    prompts = [f"Name colour {i}." for i in range(6)]
    asked = [[Message(role="user", content=text)] for text in prompts]
    better, worse = (score_texts(model, asked, [text] * 6, [True] * 6) for text in ("It is red.", "No."))
    points = (better > worse).float() + 0.5 * (better == worse).float()
    assert found["overall"]["pairs"]["value"] == pytest.approx(points.mean().item(), abs=1e-4)
