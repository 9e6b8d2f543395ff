import copy
import json
import math

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from rlhf.config import Config
from rlhf.config.stages import DistillConfig
from rlhf.model.gpt import GPTForCausalLM
from rlhf.model.gpt_config import GPTConfig
from rlhf.model.heads import keep_every
from rlhf.ops.logprobs import soft_cross_entropy
from rlhf.runs.metric_table import Sums
from rlhf.stages.distill import Student, make_objective
from rlhf.stages.sft import make_rows
from rlhf.training.engine import Engine

from .. import oracles


def make_model(seed: int, **shape) -> GPTForCausalLM:
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 11, "context_length": 16, "n_layer": 3, "n_head": 2, "width": 8, "initializer_range": 0.5,
    } | shape  # fmt: skip
    return GPTForCausalLM(GPTConfig(**shape)).eval()


def test_the_student_is_every_second_block_of_the_teacher():
    teacher = make_model(0)
    student = keep_every(copy.deepcopy(teacher), 2)
    tokens = torch.tensor([[1, 2, 3, 4]])
    x, rope = teacher.model.embed(teacher.model.embed_tokens(tokens), torch.arange(4)[None])
    for number in (0, 2):
        x = teacher.model.layers[number](x, rope, None)
    wanted = teacher.lm_head(teacher.model.norm(x))
    torch.testing.assert_close(student(tokens).logits, wanted)
    assert student.config.n_layer == 2 and teacher.config.n_layer == 3
    sampled = student.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)  # its cache has 2 layers
    assert sampled.shape == (1, 8)


def test_the_loss_is_the_weighted_sum_of_three_by_hand():
    teacher, model = make_model(1).double(), make_model(2, n_layer=2).double()
    settings = DistillConfig(temperature=3.0, ce_coef=0.7, lm_coef=0.2, cos_coef=0.4)
    rows = make_rows([{"prompt": [1, 2], "response": [3, 4, 5]}, {"prompt": [6], "response": [7]}], 0, pack=False)
    engine = Engine(Student(model, settings), torch.optim.SGD(model.parameters(), 0.1), torch.device("cpu"), False, 1.0)
    sums = Sums()
    loss, _ = make_objective(Config(), engine, teacher, settings, 0).loss(rows, 4, sums)
    wanted = 0.0
    for row, places in zip(rows, ([1, 2, 3], [0]), strict=True):
        tokens = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            hidden = [m.model(tokens).last_hidden_state[0].numpy() for m in (model, teacher)]
            logits = [m(tokens).logits[0].numpy() for m in (model, teacher)]
        for t in places:
            (a, b), (s, of_teacher) = (h[t] for h in hidden), (x[t] for x in logits)
            ce, _ = oracles.distillation(s, of_teacher, 3.0)
            nats = -oracles.log_softmax(s)[row["input_ids"][t + 1]]
            cosine = a @ b / math.sqrt((a @ a) * (b @ b))
            wanted += 0.7 * ce + 0.2 * nats + 0.4 * (1 - cosine)
    np.testing.assert_allclose(loss.item(), wanted / 4, rtol=1e-9)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters()) and all(p.grad is None for p in teacher.parameters())
    one, two = (make_objective(Config(), engine, teacher, settings, 0).loss([row], 4, Sums())[0] for row in rows)
    torch.testing.assert_close(one + two, loss)


def test_a_student_learns_from_ppos_answers_and_is_a_policy_like_any_other(copy_until):
    run = copy_until("evaluate")
    run.stage("distill", "distill.prompts=60", "distill.epochs=4", "distill.lr=3e-3")
    answers = [json.loads(line) for line in (run.folder / "distill" / "answers.jsonl").read_text().splitlines()]
    assert {row["split"] for row in answers} == {"train", "dev"} and sum(r["split"] == "train" for r in answers) == 60
    kl = [value for _, value in run.values("distill", "distill/kl")]
    assert kl[-1] < 0.5 * kl[0], "the student comes nearer to the teacher"
    summary = run.record("distill")["summary"]
    assert summary["parameters"] < summary["teacher_parameters"] and summary["kl"] < kl[0]
    assert run.policy("distill").config.n_layer == 1
    assert {"sft", "ppo"} <= run.record("distill")["parents"].keys()
    run.stage("evaluate", "evaluate.prompts=4", "evaluate.best_of=0")
    assert run.results()["baselines"]["distill"]["stage"] == run.record("distill")["hash"]


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_soft_cross_entropy_is_the_papers(temperature):
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(size=(5, 7)) * 3, rng.normal(size=(5, 7)) * 3
    ce, kl = soft_cross_entropy(torch.tensor(student), torch.tensor(teacher), temperature)
    wanted = [oracles.distillation(s, t, temperature) for s, t in zip(student, teacher, strict=True)]
    np.testing.assert_allclose(torch.stack((ce, kl), 1).numpy(), wanted, rtol=1e-12)


def test_the_gradient_is_the_students_alone():
    torch.manual_seed(0)
    student, teacher = (torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert gradcheck(lambda x: soft_cross_entropy(x, teacher.detach(), 2.0)[0], (student,))
    soft_cross_entropy(student, teacher, 2.0)[0].sum().backward()
    p, q = (torch.softmax(x.detach() / 2, -1) for x in (teacher, student))
    torch.testing.assert_close(student.grad, 2 * (q - p))  # d T^2 CE / d logits = T (q - p)
    assert teacher.grad is None
