"""In-context learning: prompts by hand, likelihoods against a forward, what does not fit, and the evaluation on the small gold run."""

import random

import pytest

from rlhf.data.labelled import Columns, Example
from rlhf.data.tokenizer import load_tokenizer
from rlhf.evaluation.benchmarks import columns_of, load_task, make_rows
from rlhf.report.pictures import make_pictures
from rlhf.report.sections import make_evaluation
from rlhf.runs.run_files import read_run
from rlhf.stages import evaluate as external
from rlhf.system.files import read_json
from rlhf.training.setup import load_policy
from tests.oracles import row_logprobs

CHOICE = Columns("text", "label", choices=("a", "b"))
TRAIN = [
    Example("t:1", (("red is", "a colour"), ("red is", "an animal")), "0"),
    Example("t:2", (("a dog is", "a colour"), ("a dog is", "an animal")), "1"),
]
QUESTION = Example("t:3", (("a cat is", "a colour"), ("a cat is", "an animal")), "1")


@pytest.fixture(scope="module")
def tokenizer(gold_run):
    return load_tokenizer(gold_run.folder / "pretrain" / "model")


def test_the_prompt_is_k_answered_examples_and_the_question(tokenizer):
    rows, shown = make_rows(tokenizer, 128, CHOICE, ["0", "1"], [QUESTION], [TRAIN])
    decoded = [(tokenizer.decode(prompt), tokenizer.decode(answer)) for prompt, answer in rows]
    before = "<|endoftext|>red is a colour\n\na dog is an animal\n\na cat is"
    assert decoded == [(before, " a colour"), (before, " an animal")] and shown == 2
    labelled = [Example("t:1", (("red is",),), "colour"), Example("t:2", (("a dog is",),), "animal")]
    classes, shown = ["animal", "colour"], [labelled[:1]]
    rows, _ = make_rows(tokenizer, 128, Columns("text", "label"), classes, labelled[1:], shown)
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
    external.run_external(run.config(*settings))
    assert "shots: models: pretrain: shots 0, shown 0.0, accuracy 0." in capsys.readouterr().out
    found = read_json(run.folder / "evaluations" / "shots.json")
    assert found["task"] == "gold:choice" and list(found["models"]) == ["pretrain"]
    zero, two = found["models"]["pretrain"]
    assert (zero["shots"], zero["shown"], zero["accuracy"]["n"]) == (0, 0.0, 24) and 0 < two["shown"] <= 2

    config = run.config(*settings)
    train, held_out, classes = load_task(config, columns_of(config), run.folder / "evaluations")
    model, tokenizer = (load(run.folder / "pretrain" / "model") for load in (load_policy, load_tokenizer))
    drawn = [random.Random(f"shots-{config.seed}-{i}").sample(train, 2) for i in range(24)]
    rows, _ = make_rows(tokenizer, 128, columns_of(config), classes, held_out[:24], drawn)
    right = 0
    for i, example in enumerate(held_out[:24]):
        said = rows[4 * i : 4 * i + 4]
        means = [sum(row_logprobs(model, prompt + answer, len(prompt))) / len(answer) for prompt, answer in said]
        right += means.index(max(means)) == classes.index(example.label)
    assert two["accuracy"]["value"] == round(right / 24, 4)
    files = read_run(run.folder)
    assert "In-context learning" in [picture.title for picture in make_pictures([files])]
    tables = {table.caption: table for table in make_evaluation(files)["sections"][-1].tables}
    rows = tables["In-context learning: models: pretrain"].rows
    assert [row[0] for row in rows] == ["0", "2"] and rows[1][1] == f"{two['shown']:.3f}"
