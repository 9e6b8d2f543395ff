"""reward.fit_head: the head alone, on the frozen trunk, before other training; and reward.lm_coef, by the SFT model's unembedding."""

import shutil
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from rlhf.data.encoding import Item, Judgement
from rlhf.errors import UserError
from rlhf.evaluation.scoring import fit_head, read_features
from rlhf.model.batching import right_pad
from rlhf.model.gpt import GPTForCausalLM
from rlhf.model.heads import RewardModel, ScalarHead
from rlhf.stages import reward

from ..oracles import row_logprobs
from ..presets import preset

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
    found = fit_head(head, features.flatten(0, 1), ranked_items(true, noise=0.5))
    with torch.no_grad():
        scores = head(features.float()).squeeze(-1).double()
    assert torch.corrcoef(torch.stack([scores.flatten(), true.flatten()]))[0, 1] > 0.99
    assert 0.8 < found["accuracy"] < 0.95 and found["loss"] < 0.5
    assert head.bias.item() == 0


def test_labels_that_say_nothing_give_a_strong_decay_and_a_coin():
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(60, 4, 40, generator=draw, dtype=torch.float64)
    noise = torch.randn(60, 4, generator=draw)
    found = fit_head(ScalarHead(40), features.flatten(0, 1), ranked_items(noise, noise=0.0))
    assert found["decay"] >= 0.3 and 0.4 < found["accuracy"] < 0.6
    assert found["loss"] == pytest.approx(0.6931, abs=0.03)  # log 2 of a coin, cross-validated over 60 prompts


def test_a_single_prompt_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"^reward.fit_head=true: 1 training prompt with a ranking"):
        fit_head(ScalarHead(3), torch.zeros(4, 3, dtype=torch.float64), ranked_items(torch.zeros(1, 4), noise=1.0))


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
        from_features = model.head(features.float()).squeeze(-1)
    torch.testing.assert_close(from_features, scores, rtol=1e-5, atol=1e-6)


def untied(kind: str) -> Any:
    """A small language model whose unembedding is its own; Phi's has a bias too."""
    torch.manual_seed(3)
    if kind == "phi":
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        config = transformers.PhiConfig(vocab_size=768, max_position_embeddings=128, **sizes)
        policy = transformers.PhiForCausalLM(config)
        policy.lm_head.bias.data.normal_()
        return policy
    return GPTForCausalLM(preset("tiny", vocab_size=768, n_layer=1, n_head=2, width=32, tie_word_embeddings=False))


@pytest.mark.parametrize("kind", ["ours", "phi"])
@pytest.mark.parametrize("later", [False, True], ids=["first round", "later round"])
def test_the_language_models_loss_is_by_the_sft_models_own_unembedding(copy_until, kind, later):
    run, policy = copy_until("reward"), untied(kind).eval()
    tokenizer = run.tokenizer()
    shutil.rmtree(run.folder / "sft" / "model")
    for part in (policy, tokenizer):
        part.save_pretrained(run.folder / "sft" / "model")
    config = run.config("reward.lm_coef=0.5")
    model = reward.make_model(config)
    if later:
        model.save_pretrained(run.folder / "earlier" / "model")
        model = reward.make_model(config, run.folder / "earlier")
    rows = [[5, 6, 7, 8, 9], [11, 12, 13]]
    tokens, lengths = right_pad(rows, 0)
    wanted = torch.tensor([-sum(row_logprobs(policy, row)) / (len(row) - 1) for row in rows])
    with torch.no_grad():
        assert torch.allclose(model(tokens, lengths, with_lm=True)[1], wanted, atol=1e-5)
        half = model.bfloat16()(tokens, lengths, with_lm=True)[1]  # weights as ZeRO holds them
        # bfloat16 rounds weights and activations to 8 bits: errors of 1.4e-3 were measured
        assert torch.allclose(half, wanted, atol=3e-3)
    assert not any("unembedding" in name for name in model.state_dict())
