import copy
import csv
import json
import random

import pytest
import torch

from rlhf.config import Config
from rlhf.config.stages import ClassifyConfig, SftConfig
from rlhf.data.labelled import Example, classes_of, divide, encode_examples, find_marks, load_examples
from rlhf.data.tokenizer import encode_texts, load_tokenizer
from rlhf.errors import UserError
from rlhf.evaluation.statistics import classification, wilson
from rlhf.model.heads import LabelModel, transfer
from rlhf.report.page import make_page
from rlhf.runs.folders import read_stage
from rlhf.runs.run_files import read_run
from rlhf.stages import classify
from rlhf.system.files import read_json
from rlhf.training.engine import make_engine
from rlhf.training.setup import load_policy

from .conftest import Run
from .recorder import Recorder, one_step
from .test_resume import assert_same_weights, interrupt

CPU = torch.device("cpu")
QUICK = ["classify.epochs=1", "classify.examples=96", "classify.batch_size=32"]


@pytest.fixture(scope="module")
def base(gold_run):
    folder = gold_run.folder / "pretrain" / "model"
    return load_tokenizer(folder), load_policy(folder)


def write_csv(path, rows):
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return str(path)


def rows_of(tmp_path, tokenizer, columns, row):
    path = tmp_path / "task.jsonl"
    path.write_text(json.dumps(row) + "\n")
    [example] = load_examples("classify.data", str(path), columns, "utf-8")
    return encode_examples([example], tokenizer, find_marks(tokenizer)[0], 128)[0][0]


def test_the_four_transformations_token_by_token(tmp_path, base):
    tokenizer, _ = base
    s, d, e = (tokenizer.convert_tokens_to_ids(name) for name in ("<|endoftext|>", "<|end|>", "<|assistant|>"))
    row = {"t": "Blood is red.", "u": "Snow is white.", "y": "b", "a": "Yes.", "b": "No."}
    t, u, a, b = (encode_texts(tokenizer, [row[name]])[0] for name in ("t", "u", "a", "b"))

    def found(**more):
        return rows_of(tmp_path, tokenizer, ClassifyConfig(text="t", label="y", **more), row)

    assert found() == [[s, *t, e]]
    assert found(second="u") == [[s, *t, d, *u, e]]
    assert found(second="u", both_orders=True) == [[s, *t, d, *u, e], [s, *u, d, *t, e]]
    assert found(choices=("a", "b")) == [[s, *t, d, *a, e], [s, *t, d, *b, e]]
    both = encode_texts(tokenizer, ["Blood is red.\nSnow is white."])[0]
    assert found(second="u", choices=("a", "b")) == [[s, *both, d, *a, e], [s, *both, d, *b, e]]


def test_a_choice_is_named_by_its_text_its_column_or_its_number(tmp_path):
    columns = ClassifyConfig(text="t", label="y", choices=("one", "two"))
    rows = [{"t": "x", "one": "red", "two": "blue", "y": y} for y in ("blue", "one", "1")]
    examples = load_examples("classify.data", write_csv(tmp_path / "a.csv", rows), columns, "utf-8")
    assert [e.label for e in examples] == ["1", "0", "1"] and classes_of(examples, columns) == ["0", "1"]
    rows = [{"t": "x", "one": "red", "two": "blue", "y": y} for y in (1, 2, 2)]
    examples = load_examples("classify.data", write_csv(tmp_path / "b.csv", rows), columns, "utf-8")
    assert classes_of(examples, columns) == ["1", "2"], "from 1, since 2 occurs and 0 does not"
    rows = [{"t": "x", "one": "1", "two": "0", "y": 1}, {"t": "y", "one": "red", "two": "blue", "y": 0}]
    examples = load_examples("classify.data", write_csv(tmp_path / "c.csv", rows), columns, "utf-8")
    assert [e.label for e in examples] == ["1", "0"], "a number is a place, though a choice has it as its text"


def nats_of(lm, row):
    """-mean of log P of tokens 1, 2, … of one row, computed alone."""
    logp = lm(torch.tensor([row])).logits[0].log_softmax(-1)
    return -sum(logp[t - 1, row[t]] for t in range(1, len(row))) / (len(row) - 1)


@pytest.mark.parametrize("micro", [1, 8])
def test_l3_by_hand(base, micro):
    """1/2 sum over 2 examples of: -log softmax(W (h_ab + h_ba))_y + 0.5 * (mean of its two rows' mean nats per token)."""
    config = Config()
    config.classify.micro_batch_size, config.classify.max_grad_norm = micro, 1e9
    torch.manual_seed(0)
    model = LabelModel(copy.deepcopy(base[1]), ["no", "yes"], choices=False)
    batch = [
        classify.Coded([[1, 40, 41, 5, 50, 4], [1, 50, 5, 40, 41, 4]], 1),
        classify.Coded([[1, 60, 5, 61, 4], [1, 61, 5, 60, 4]], 0),
    ]
    wanted = torch.zeros(())
    for example in batch:
        hidden = [model.lm.base_model(torch.tensor([row])).last_hidden_state[0, -1] for row in example.rows]
        logits = model.head.weight @ (hidden[0] + hidden[1])
        lm_loss = sum(nats_of(model.lm, row) for row in example.rows) / 2
        wanted = wanted + (logits.logsumexp(0) - logits[example.label] + 0.5 * lm_loss) / 2
    wanted.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    groups = [{"params": list(model.parameters())}]
    engine = make_engine(config, model, SftConfig(max_grad_norm=1e9), CPU, groups=groups)
    engine.optimizer = Recorder(model)
    found = one_step(engine, batch, classify.make_objective(config, engine, 0, most=2)).reduce()
    for name, gradient in gradients.items():
        assert torch.allclose(engine.optimizer.gradients[name], gradient, atol=1e-5), name
    assert found["classify/loss"] + 0.5 * found["classify/lm_loss"] == pytest.approx(wanted.item(), abs=1e-5)


def test_both_orders_give_one_answer_and_choices_their_own(base):
    torch.manual_seed(0)
    a, b = [1, 40, 41, 5, 50, 4], [1, 50, 5, 40, 41, 4]
    similar = LabelModel(base[1], ["no", "yes"], choices=False)
    one, other = classify.predict(similar, [classify.Coded([a, b], 0), classify.Coded([b, a], 0)], 0, CPU)
    assert torch.allclose(one, other, atol=1e-6)
    chooser = LabelModel(base[1], ["0", "1", "2"], choices=True)
    c = [1, 70, 4]
    first, second = classify.predict(chooser, [classify.Coded([a, b, c], 0), classify.Coded([c, a, b], 0)], 0, CPU)
    assert torch.allclose(first[[2, 0, 1]], second, atol=1e-6) and first.std() > 0.01
    last = (base[1].base_model(torch.tensor([row])).last_hidden_state[0, -1] for row in (a, b, c))
    scores = [chooser.head.weight[0] @ x for x in last]
    assert torch.allclose(first, torch.stack(scores).softmax(0), atol=1e-5)


def test_what_is_transferred(base):
    lm = base[1]
    for layers in (0, 1, 2):
        torch.manual_seed(1)
        found = dict(transfer(lm, layers).named_parameters())
        same = {name for name, p in lm.named_parameters() if p.equal(found[name]) and p.unique().numel() > 1}
        assert "model.embed_tokens.weight" in same
        assert {name.split(".")[2] for name in same if ".layers." in name} == {str(i) for i in range(layers)}
    nothing = dict(transfer(lm, None).named_parameters())
    assert not any(p.equal(nothing[name]) for name, p in lm.named_parameters() if p.unique().numel() > 1)
    with pytest.raises(UserError, match=r"classify.layers=3: the base has 2"):
        transfer(lm, 3)


def run_of(gold_run, tmp_path, name) -> Run:
    return Run(tmp_path, name, [*gold_run.overrides, f"parents.pretrain='{gold_run.folder / 'pretrain'}'", *QUICK])


def test_a_resumed_run_equals_an_undisturbed_one(gold_run, tmp_path):
    """With dropout on the classifier, whose random numbers go on too."""
    task = ["classify.data=gold:topic"]
    whole, broken = run_of(gold_run, tmp_path, "whole"), run_of(gold_run, tmp_path, "broken")
    whole.stage("classify", *task)
    interrupt(broken, "classify", 2, *task)
    broken.stage("classify", *task)
    files = ("model/model.safetensors", "model/label_head.safetensors")
    assert_same_weights(whole.folder / "classify", broken.folder / "classify", *files)
    one, two = (run.values("classify", "classify/loss") for run in (whole, broken))
    assert one == two and len(one) == 3
    folder = whole.folder / "classify"
    results = read_json(folder / "results.json")
    lines = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    assert len(lines) == results["accuracy"]["n"] == sum(map(sum, results["confusion"]))
    right = sum(line["label"] == line["predicted"] for line in lines)
    assert results["accuracy"]["value"] == pytest.approx(right / len(lines), abs=1e-4)
    assert read_stage(folder)["summary"]["accuracy"] == results["accuracy"]["value"]
    page = make_page(read_run(whole.folder))
    assert "Labelled task" in page and "closed_qa" in page and "classify" in page


def test_a_text_is_either_trained_on_or_held_out():
    rng = random.Random(0)
    pairs = [(str(rng.randrange(40)), str(rng.randrange(40))) for _ in range(300)]
    examples = [Example("x", ((a, b), (b, a)), "y") for a, b in pairs]
    train, held_out = divide(examples, 0.3, 0)
    assert not {e.split_key for e in train} & {e.split_key for e in held_out}
    assert 0.2 < len(held_out) / 300 < 0.4


def test_figures_of_a_classifier_by_hand():
    # labels a a a b b, said a a b b a: a has precision 2/3 and recall 2/3, b 1/2 and 1/2
    found = classification([0, 0, 0, 1, 1], [0, 0, 1, 1, 0], ["a", "b", "c"])
    assert found["confusion"] == [[2, 1, 0], [1, 1, 0], [0, 0, 0]]
    assert found["macro_f1"] == pytest.approx((2 / 3 + 1 / 2) / 2) and found["majority"] == 0.6
    # n = 5, p = 0.6: centre (0.6 + 3.8416/10) / (1 + 3.8416/5) = 0.5565, half sqrt(0.24/5 + 3.8416/100) * 1.96 / 1.76832 = 0.3259
    assert wilson(3, 5) == {"value": 0.6, "ci95": [0.2307, 0.8824], "n": 5}
    assert wilson(5, 5)["ci95"] == [pytest.approx(0.5655, abs=1e-4), 1.0]
