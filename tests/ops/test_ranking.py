import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.data.encoding import Item, Judgement
from rlhf.ops.ranking import pair_weights, ranking_loss
from tests import oracles

NAN = float("nan")


def softplus(x: float) -> float:
    return math.log(1.0 + math.exp(x))


def test_pair_weights_by_hand():
    # answer 1 is best, 0 and 3 tie behind it, 2 is absent: 1 > 0 and 1 > 3
    weights = pair_weights(torch.tensor([1, 0, -1, 1]))
    assert weights.tolist() == [[0, 0, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert weights.dtype == torch.float32


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-1, 4), min_size=1, max_size=9))
def test_pair_weights_are_all_ordered_pairs(ranks):
    weights = pair_weights(torch.tensor(ranks))
    assert [tuple(pair) for pair in weights.nonzero().tolist()] == sorted(oracles.pairs_of(ranks))
    assert ((weights == 0) | (weights == 1)).all()


def test_labelers_add_up():
    # pairs: 0 > 2, 2 > 1; ranks: 1 best, 0 next, 2 not judged, so 1 > 0, with weight 3; nobody: no weight
    judged = [Judgement("ann", [(0, 2), (2, 1)]), Judgement("ben", [(1, 0)], weight=3.0)]
    item = Item("p", [[1]] * 3, [1] * 3, judgements=judged)
    assert item.weights().tolist() == [[0, 0, 1], [3, 0, 0], [0, 1, 0]]
    item.judgements += [judged[0], Judgement("cid", [(0, 1)], weight=0.5)]  # who disagrees
    assert item.weights().tolist() == [[0, 0.5, 2], [3, 0, 0], [0, 2, 0]]
    assert Item("p", [[1]] * 2, [1] * 2).weights().tolist() == [[0, 0], [0, 0]]


def test_loss_by_hand():
    # prompt 0: 0 > 1 > 2 with scores 2, 1, 1: differences 1, 1, 0
    # prompt 1: 1 > 0, scores 0, -1, third absent: difference -1
    scores = torch.tensor([[2.0, 1.0, 1.0], [0.0, -1.0, NAN]])
    weights = pair_weights(torch.tensor([[0, 1, 2], [1, 0, -1]]))
    loss, statistics = ranking_loss(scores, weights)
    first = (softplus(-1) + softplus(-1) + softplus(0)) / 3  # 0.4399
    second = softplus(1)  # 1.3133
    assert loss.item() == pytest.approx((first + second) / 2, abs=1e-6)
    assert statistics["loss_sum"].item() == pytest.approx(first + second, abs=1e-6)
    assert statistics["prompts"].item() == 2
    assert statistics["pairs"].item() == 4
    assert statistics["pairs_correct"].item() == 2.5  # 1 + 1 + a half for the tie of scores + 0
    assert statistics["margin_sum"].item() == 1.0  # 1 + 1 + 0 - 1
    assert statistics["accuracy"].item() == 2.5 / 4
    assert statistics["margin"].item() == 0.25
    assert not any(value.requires_grad for value in statistics.values())


def test_each_prompt_has_the_same_say_whatever_its_k():
    # ten pairs with loss log 2 each and one pair with loss softplus(1): the mean of two, not of eleven
    scores = torch.tensor([[0.0] * 5, [-1.0, 0.0, 0.0, 0.0, 0.0]])
    loss, _ = ranking_loss(scores, pair_weights(torch.tensor([[0, 1, 2, 3, 4], [0, 1, -1, -1, -1]])))
    assert loss.item() == pytest.approx((math.log(2) + softplus(1)) / 2, abs=1e-6)


def test_labelers_weigh_the_pairs_within_a_prompt():
    # 2 : 1 for 0 over 1, difference 1: (2 softplus(-1) + 1 softplus(1)) / 3
    weights = torch.tensor([[[0.0, 2.0], [1.0, 0.0]]])
    loss, statistics = ranking_loss(torch.tensor([[1.0, 0.0]]), weights)
    assert loss.item() == pytest.approx((2 * softplus(-1) + softplus(1)) / 3, abs=1e-6)
    assert ranking_loss(torch.tensor([[1.0, 0.0]]), 5 * weights)[0].item() == pytest.approx(loss.item(), abs=1e-6)
    assert statistics["pairs"].item() == 3 and statistics["pairs_correct"].item() == 2


@st.composite
def ranked(draw):
    N, K = draw(st.integers(1, 5)), draw(st.integers(2, 6))
    ranks = draw(st.lists(st.lists(st.integers(-1, 3), min_size=K, max_size=K), min_size=N, max_size=N))
    ranks[0] = list(range(K))  # at least one prompt has a pair
    scores = torch.randn(N, K, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31))))
    return scores, torch.tensor(ranks)


@settings(max_examples=30, deadline=None)
@given(ranked(), st.lists(st.floats(0.1, 5), min_size=36, max_size=36))
def test_weighted_pairs_agree_with_the_oracle(case, numbers):
    scores, ranks = case
    K = scores.shape[1]
    weights = pair_weights(ranks) * torch.tensor(numbers[: K * K]).view(K, K)
    pairs = [[tuple(p) for p in one.nonzero().tolist()] for one in weights]
    listed = [[one[p].item() for p in prompt] for one, prompt in zip(weights, pairs, strict=True)]
    expected, accuracy, margin = oracles.ranking_loss(scores.numpy(), pairs, listed)
    loss, statistics = ranking_loss(scores, weights)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert statistics["accuracy"].item() == pytest.approx(accuracy, abs=1e-5)
    assert statistics["margin"].item() == pytest.approx(margin, abs=1e-5)


@settings(max_examples=30, deadline=None)
@given(ranked(), st.randoms(), st.integers(0, 2))
def test_order_and_padding_of_answers_and_prompts_change_nothing(case, random, absent):
    scores, ranks = case
    loss, statistics = ranking_loss(scores, pair_weights(ranks))
    prompts, answers = list(range(len(scores))), list(range(scores.shape[1] + absent))
    random.shuffle(prompts)
    random.shuffle(answers)
    scores = torch.nn.functional.pad(scores, (0, absent), value=NAN)[prompts][:, answers]
    ranks = torch.nn.functional.pad(ranks, (0, absent), value=-1)[prompts][:, answers]
    again, statistics_again = ranking_loss(scores, pair_weights(ranks))
    assert again.item() == pytest.approx(loss.item(), rel=1e-5)
    for name, value in statistics.items():
        assert statistics_again[name].item() == pytest.approx(value.item(), rel=1e-4, abs=1e-5), name


@settings(max_examples=30, deadline=None)
@given(ranked(), st.integers(1, 3))
def test_parts_with_the_global_count_add_up_to_loss_and_gradient_of_the_whole(case, size):
    scores, ranks = case
    weights = pair_weights(ranks)
    whole_scores, part_scores = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    whole, statistics = ranking_loss(whole_scores, weights)
    whole.backward()
    total, pairs, correct = 0.0, 0.0, 0.0
    for one, w in zip(part_scores.split(size), weights.split(size), strict=True):
        loss, part = ranking_loss(one, w, denominator=statistics["prompts"])
        loss.backward()
        total += loss.item()
        pairs += part["pairs"].item()
        correct += part["pairs_correct"].item()
    assert total == pytest.approx(whole.item(), rel=1e-5)
    assert (pairs, correct) == (statistics["pairs"].item(), statistics["pairs_correct"].item())
    torch.testing.assert_close(part_scores.grad, whole_scores.grad, rtol=1e-4, atol=1e-7)


def test_gradient_reaches_every_compared_answer_and_no_absent_one():
    scores = torch.tensor([[0.3, NAN, -0.2], [1.0, 2.0, 3.0]], requires_grad=True)
    loss, _ = ranking_loss(scores, pair_weights(torch.tensor([[1, -1, 0], [0, 0, 0]])))
    loss.backward()
    # d/dr of softplus(r_0 - r_2) at difference 0.5: sigmoid(0.5) = 0.6225 for the loser
    g = 1 / (1 + math.exp(-0.5))
    np.testing.assert_allclose(scores.grad.numpy(), [[g, 0, -g], [0, 0, 0]], atol=1e-6)


def test_a_smoothed_loss_and_that_of_ipo_by_hand():
    # margins 1, 1, 0 of prompt 0 and -1 of prompt 1; eps = 0.2: 0.8 softplus(-m) + 0.2 softplus(m)
    scores = torch.tensor([[2.0, 1.0, 1.0], [0.0, -1.0, NAN]])
    weights = pair_weights(torch.tensor([[0, 1, 2], [1, 0, -1]]))
    loss, statistics = ranking_loss(scores, weights, label_smoothing=0.2)
    one, back = 0.8 * softplus(-1) + 0.2 * softplus(1), 0.8 * softplus(1) + 0.2 * softplus(-1)
    assert loss.item() == pytest.approx(((2 * one + softplus(0)) / 3 + back) / 2, abs=1e-6)
    assert statistics["accuracy"].item() == 2.5 / 4, "as without"
    # tau = 0.25: the target is 2, squares 1, 1, 4 and 9
    loss, _ = ranking_loss(scores, weights, target=2.0)
    assert loss.item() == pytest.approx((6 / 3 + 9) / 2, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(ranked(), st.floats(0, 0.49), st.floats(0.05, 3))
def test_the_other_losses_agree_with_the_oracles(case, eps, tau):
    scores, ranks = case
    weights = pair_weights(ranks)
    pairs = [[tuple(p) for p in one.nonzero().tolist()] for one in weights]
    for given_, of_pair in (
        ({"label_smoothing": eps}, lambda x: oracles.smoothed_loss(x, eps)),
        ({"target": 1 / (2 * tau)}, lambda x: oracles.ipo_loss(x, tau)),
    ):
        expected, _, _ = oracles.ranking_loss(scores.numpy(), pairs, of_pair=of_pair)
        assert ranking_loss(scores, weights, **given_)[0].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert torch.autograd.gradcheck(
            lambda x, g=given_: ranking_loss(x, weights, **g)[0], scores.double().requires_grad_()
        )


def test_far_apart_scores_stay_finite():
    scores = torch.tensor([[-1e4, 1e4]], requires_grad=True)
    loss, _ = ranking_loss(scores, pair_weights(torch.tensor([[0, 1]])))
    loss.backward()
    assert loss.item() == 2e4
    half, _ = ranking_loss(scores.bfloat16(), pair_weights(torch.tensor([[0, 1]])))
    assert half.dtype == torch.float32
    assert scores.grad.tolist() == [[-1.0, 1.0]]


def test_prompts_without_a_pair():
    scores, none = torch.zeros(2, 3), torch.zeros(2, 3, 3)
    with pytest.raises(ValueError, match="no prompt with an ordered pair"):
        ranking_loss(scores, none)
    loss, statistics = ranking_loss(scores, none, denominator=4)
    assert loss.item() == 0.0 and statistics["pairs"].item() == 0 and math.isnan(statistics["accuracy"])


def test_gradcheck():
    scores = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    weights = pair_weights(torch.tensor([[0, 1, 2, 3], [1, 1, 0, -1], [2, 0, 0, 1]]))
    assert torch.autograd.gradcheck(lambda x: ranking_loss(x, weights)[0], scores)
