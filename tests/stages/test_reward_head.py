"""reward.fit_head: the head alone, on the frozen trunk, before other training."""

import pytest
import torch
from torch import Tensor

from rlhf.data.encoding import Item, Judgement
from rlhf.evaluation.scoring import fit_head, read_features
from rlhf.model.heads import LayerMix, RewardModel, ScalarHead

CPU = torch.device("cpu")


def ranked_items(true: Tensor, noise: float) -> list[Item]:
    """Items of K answers each, ranked by true scores (N, K) plus Gaussian noise."""
    seen = true + noise * torch.randn(true.shape, generator=torch.Generator().manual_seed(1))
    items = []
    for n, scores in enumerate(seen.tolist()):
        order = sorted(range(len(scores)), key=lambda k: -scores[k])
        ranks = {place: rank for rank, place in enumerate(order)}
        pairs = [(a, b) for a in ranks for b in ranks if ranks[a] < ranks[b]]
        judgements = [Judgement("x", pairs, None, ranks=ranks)]
        items.append(Item(str(n), [[0]] * len(scores), [1] * len(scores), judgements=judgements))
    return items


def test_it_finds_the_direction_that_made_the_rankings():
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(300, 4, 6, generator=draw, dtype=torch.float64) * torch.tensor([1, 1, 10, 1, 0.1, 1.0])
    true = features @ torch.tensor([1.0, -1.0, 0.1, 0, 0, 0], dtype=torch.float64)  # three features that count alike
    head = ScalarHead(6)
    found = fit_head(head, features.flatten(0, 1)[None], ranked_items(true, noise=0.5))
    with torch.no_grad():
        scores = head(features.float()).squeeze(-1).double()
    assert torch.corrcoef(torch.stack([scores.flatten(), true.flatten()]))[0, 1] > 0.99
    assert 0.8 < found["accuracy"] < 0.95 and found["loss"] < 0.5
    assert head.bias.item() == 0


def test_it_finds_the_layer_that_made_the_rankings():
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(3, 40, 4, 6, generator=draw, dtype=torch.float64)
    true = features[1] @ torch.tensor([1.0, -1.0, 0, 0, 0, 0], dtype=torch.float64)
    head, mix = ScalarHead(6), LayerMix(3)
    flat, items = features.flatten(1, 2), ranked_items(true, noise=0.5)
    found = fit_head(head, flat, items, mix)
    assert (
        mix.weight.softmax(0)[1] > 0.9
        and found["accuracy"] > fit_head(ScalarHead(6), flat.mean(0)[None], items)["accuracy"] + 0.05
    )
    with torch.no_grad():
        scores = head(mix(flat.float())).squeeze(-1).double()
    assert torch.corrcoef(torch.stack([scores, true.flatten()]))[0, 1] > 0.99


def test_labels_that_say_nothing_give_a_strong_decay_and_a_coin():
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(60, 4, 40, generator=draw, dtype=torch.float64)
    noise = torch.randn(60, 4, generator=draw)
    found = fit_head(ScalarHead(40), features.flatten(0, 1)[None], ranked_items(noise, noise=0.0))
    assert found["decay"] >= 0.3 and 0.4 < found["accuracy"] < 0.6
    assert found["loss"] == pytest.approx(0.6931, abs=0.03)  # log 2 of a coin, cross-validated over 60 prompts


@pytest.mark.parametrize("read_tokens", [1, 3])
def test_the_head_of_the_features_is_the_score(gold_run, read_tokens):
    model = RewardModel.from_causal_lm(str(gold_run.folder / "sft" / "model"))
    model.config.read_tokens = read_tokens
    items = [
        Item("a", [[5, 6, 7, 8], [9, 10]], [2, 1]),
        Item("b", [[11, 12, 13]], [1]),
    ]  # the second row is shorter than 3
    features = read_features(model, items, 0, CPU)
    tokens = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0], [11, 12, 13, 0]])
    with torch.no_grad():
        scores = model(tokens, torch.tensor([4, 2, 3]), calibrated=False)
        from_features = model.head(features[0].float()).squeeze(-1)
    torch.testing.assert_close(from_features, scores, rtol=1e-5, atol=1e-6)
