"""The losses of distillation against sums in float64."""

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from rlhf.ops.logprobs import soft_cross_entropy

from .. import oracles


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
