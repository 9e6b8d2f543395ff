import json
import random
import shutil
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.config.stages import ClassifyConfig
from rlhf.data.encoding import Item, Judgement
from rlhf.data.labelled import Example
from rlhf.data.records import Message, Ranking
from rlhf.evaluation import reward_report as pairs
from rlhf.evaluation.best_of import best_of_n_kl, expected_best
from rlhf.evaluation.judging import judged_figures
from rlhf.evaluation.shots import columns_of, load_task, make_rows
from rlhf.model.classifier import load_reward_model
from rlhf.report.page import make_page
from rlhf.report.pictures import make_pictures
from rlhf.report.sections import make_evaluation
from rlhf.runs.folders import read_stage
from rlhf.runs.run_files import read_run
from rlhf.stages import evaluate as external
from rlhf.system.files import read_json, write_json
from rlhf.training.setup import load_policy
from tests.oracles import row_logprobs

from ..model.classifiers import WORDS, save_classifier, score_texts
from .conftest import GOLD, Run


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
    results = gold_run.results()
    best = results["best_of_n"]
    assert best["n"] == 4 and best["kl_bound_nats"] == 0.6363  # log 4 - 3/4
    # In this small run most of the scores' spread is between prompts; a pick at random would be within 0.1 of the mean
    assert best["reward"] > results["reward_without_eos_rule"]["sft"] + 0.2, "the best of 4 by the model that picks"
    assert 0 < best["gold"] < 1 and best["win_rate_vs_sft"]["n"] == 40


def test_rejection_sampling_trains_on_the_best_and_its_kl_by_hand(copy_until, gold_run):
    settings = ["rejection.prompts=60", "rejection.samples=8", "sft.lr=1e-3", "rejection.epochs=2"]
    folder = copy_until("ppo").stage("rejection", *settings)
    rows = [json.loads(line) for line in (folder / "demonstrations.jsonl").read_text().splitlines()]
    assert 10 < len(rows) <= 60 and all(row["response"].strip() and row["source"] == "best of 8" for row in rows)
    scores = torch.tensor([row["metadata"]["score"] for row in rows])
    assert scores.mean() > gold_run.results()["reward_without_eos_rule"]["sft"] + 0.3
    before, after = (load_policy(p / "model") for p in (gold_run.folder / "sft", folder))
    assert any(not p.equal(q) for p, q in zip(before.parameters(), after.parameters(), strict=True))
    assert read_stage(folder)["status"] == "complete"
    assert best_of_n_kl(1) == 0.0
    assert best_of_n_kl(2) == pytest.approx(0.193147, abs=1e-6)  # log 2 - 1/2
    assert best_of_n_kl(16) == pytest.approx(1.835089, abs=1e-6)  # 2.772589 - 15/16


def row(prompt: str, chosen: int, rejected: int, subset: str) -> Item:
    """Answers 0 … chosen - 1 beat the others."""
    told = {"kind": "ranking", "id": "r", "prompt": prompt, "ranking": [["a"], ["b"]], "metadata": {"subset": subset}}
    record = Ranking.model_validate(told | {"responses": [{"id": "a", "text": "x"}, {"id": "b", "text": "y"}]})
    order = [(i, j) for i in range(chosen) for j in range(chosen, chosen + rejected)]
    sizes = [1] * (chosen + rejected)
    return Item("k", [[1]] * len(sizes), sizes, record, judgements=[Judgement(None, order)])


def test_figures_by_hand_and_rows_of_one_prompt_as_one_unit():
    items = [row("p", 1, 3, "easy"), row("q", 1, 1, "hard"), row("r", 2, 1, "hard")]
    scores = [[3.0, 1.0, 2.0, 0.0], [0.0, 1.0], [2.0, 0.5, 0.5]]
    found = pairs.pair_figures(items, scores)
    # easy: 3 of 3, all right; hard: 0 of 1, then 1 and a half of 2: 1.5 of 3, none all right
    assert (found["subsets"]["easy"]["pairs"]["value"], found["subsets"]["easy"]["all_right"]["value"]) == (1.0, 1.0)
    assert (found["subsets"]["hard"]["pairs"]["value"], found["subsets"]["hard"]["all_right"]["value"]) == (0.5, 0.0)
    assert found["overall"]["pairs"]["value"] == 0.75 and found["overall"]["pairs"]["n"] == 6
    # Ten copies of a prompt's row do not narrow the interval.
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
    return read_json(run.folder / "evaluations" / "pairs.json")


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


def test_the_report_shows_them_and_says_where_judges_disagree(tmp_path):
    share = {"value": 0.75, "ci95": [0.6, 0.9], "n": 40}
    row = {"pairs": share, "all_right": share, "length": share}
    said, scores = {"ppo": "a b", "sft": "c"}, {"ppo": 2.0, "sft": 1.0}
    answers = {"responses": said, "scores": scores, "gold": {"ppo": 0.1, "sft": 0.9}}
    judged = judged_figures([answers] * 40, ("ppo", "sft"), ["B", "A"] * 40) | {
        "judge": "m-1",
        "counts": {"requests": 80},
    }
    (tmp_path / "evaluations").mkdir()
    for name, results in (("pairs", {"overall": row, "subsets": {"<b>chat</b>": row}}), ("judge", judged)):
        write_json(tmp_path / "evaluations" / f"{name}.json", results)
    page = make_page(read_run(tmp_path))
    assert "The reward model on preference files" in page
    assert "&lt;b&gt;chat&lt;/b&gt;" in page and "<b>chat" not in page and ">m-1</td>" in page
    # with the reward model, not with the truth
    assert page.count(">true</td>") == 1 and page.count(">false</td>") == 1 and "1.000 (" in page


CHOICE = ClassifyConfig(text="text", label="label", choices=("a", "b"))
TRAIN = [
    Example("t:1", (("red is", "a colour"), ("red is", "an animal")), "0"),
    Example("t:2", (("a dog is", "a colour"), ("a dog is", "an animal")), "1"),
]
QUESTION = Example("t:3", (("a cat is", "a colour"), ("a cat is", "an animal")), "1")


@pytest.fixture(scope="module")
def tokenizer(gold_run):
    return gold_run.tokenizer("pretrain")


def test_the_prompt_is_k_answered_examples_and_the_question(tokenizer):
    rows, shown = make_rows(tokenizer, 128, CHOICE, ["0", "1"], [QUESTION], [TRAIN])
    decoded = [(tokenizer.decode(prompt), tokenizer.decode(answer)) for prompt, answer in rows]
    before = "<|endoftext|>red is a colour\n\na dog is an animal\n\na cat is"
    assert decoded == [(before, " a colour"), (before, " an animal")] and shown == 2
    labelled = [Example("t:1", (("red is",),), "colour"), Example("t:2", (("a dog is",),), "animal")]
    classes, shown = ["animal", "colour"], [labelled[:1]]
    rows, _ = make_rows(tokenizer, 128, ClassifyConfig(text="text", label="label"), classes, labelled[1:], shown)
    decoded = [tokenizer.decode(prompt + answer) for prompt, answer in rows]
    assert decoded == [f"<|endoftext|>red is colour\n\na dog is {name}" for name in classes]


def test_examples_that_do_not_fit_are_left_out_and_counted(tokenizer):
    whole, _ = make_rows(tokenizer, 128, CHOICE, ["0", "1"], [QUESTION], [TRAIN[:1]])
    context = max(len(prompt) + len(answer) for prompt, answer in whole)
    rows, shown = make_rows(tokenizer, context, CHOICE, ["0", "1"], [QUESTION], [TRAIN])
    assert rows == whole and shown == 1, "the second one has no room"
    rows, shown = make_rows(tokenizer, context - 1, CHOICE, ["0", "1"], [QUESTION], [TRAIN])
    assert shown == 0 and rows == make_rows(tokenizer, 128, CHOICE, ["0", "1"], [QUESTION], [[]])[0]
    rows, _ = make_rows(tokenizer, 6, CHOICE, ["0", "1"], [QUESTION], [[]])
    # a question that is too long loses its beginning
    assert max(len(prompt) + len(answer) for prompt, answer in rows) == 6


def test_shots_on_the_gold_run_are_the_models_own_likelihoods(gold_run, copy_until, capsys):
    run = copy_until("sft")
    settings = ["evaluate.shots=[0,2]", "classify.data=gold:choice", "evaluate.prompts=24"]
    external.run(run.config(*settings))
    assert "shots: models: pretrain: shots 0, shown 0.0, accuracy 0." in capsys.readouterr().out
    found = read_json(run.folder / "evaluations" / "shots.json")
    assert found["task"] == "gold:choice" and list(found["models"]) == ["pretrain"]
    zero, two = found["models"]["pretrain"]
    assert (zero["shots"], zero["shown"], zero["accuracy"]["n"]) == (0, 0.0, 24) and 0 < two["shown"] <= 2

    config = run.config(*settings)
    train, held_out, classes = load_task(config, columns_of(config), run.folder / "evaluations")
    held_out = random.Random(f"questions-{config.seed}").sample(held_out, 24)
    model, tokenizer = run.policy("pretrain"), run.tokenizer("pretrain")
    drawn = [random.Random(f"shots-{config.seed}-{i}").sample(train, 2) for i in range(24)]
    rows, _ = make_rows(tokenizer, 128, columns_of(config), classes, held_out, drawn)
    right = 0
    for i, example in enumerate(held_out):
        said = rows[4 * i : 4 * i + 4]
        means = [sum(row_logprobs(model, prompt + answer, len(prompt))) / len(answer) for prompt, answer in said]
        right += means.index(max(means)) == classes.index(example.label)
    assert two["accuracy"]["value"] == round(right / 24, 4)
    files = read_run(run.folder)
    assert "In-context learning" in [picture.title for picture in make_pictures(files)]
    tables = {table.caption: table for table in make_evaluation(files)[-1].tables}
    rows = tables["In-context learning: models: pretrain"].rows
    assert [row[0] for row in rows] == ["0", "2"] and rows[1][1] == f"{two['shown']:.3f}"
