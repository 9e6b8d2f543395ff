"""`evaluate.pairs`: accuracy of a reward model on preference files, by subset, by hand and through the stage."""

import json
import shutil

import pytest
import torch

from rlhf.data.encoding import Item, Judgement
from rlhf.data.records import Message, Ranking
from rlhf.evaluation import reward_report as pairs
from rlhf.model.classifier import load_reward_model

from ..model.classifiers import WORDS, save_classifier, score_texts
from .conftest import GOLD, Run


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
