import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from rlhf.errors import UserError
from rlhf.model import GPTConfig, RewardConfig, RewardModel
from rlhf.model.convert import export_reward
from tests.oracles import token_values
from tests.presets import make_gpt

VOCAB, WIDTH = 53, 32
LENGTHS = torch.tensor([9, 4, 7])
make_policy = partial(make_gpt, vocab_size=VOCAB)


@pytest.fixture
def reward() -> RewardModel:
    model = RewardModel.from_causal_lm(make_policy())
    model.calibrate(gain=2.0, shift=0.25)
    return model


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (3, 9), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def test_score_is_the_head_at_the_last_real_token(reward, tokens):
    rows = zip(tokens, LENGTHS, strict=True)
    hidden = torch.stack([reward.trunk(row[None, :n]).last_hidden_state[0, -1] for row, n in rows])
    raw = hidden @ reward.head.weight[0] + reward.head.bias
    assert torch.allclose(reward(tokens, LENGTHS, calibrated=False), raw, atol=1e-6)
    assert torch.allclose(reward(tokens, LENGTHS), 2.0 * (raw - 0.25), atol=1e-6)
    values = token_values(reward, tokens)
    assert values.shape == (3, 9) and values.dtype == torch.float32
    assert torch.allclose(values[torch.arange(3), LENGTHS - 1], reward(tokens, LENGTHS), atol=1e-6)


@torch.no_grad()
def test_terms_of_the_score_are_those_of_its_last_tokens(reward, tokens):
    values = token_values(reward, tokens)
    reward.config.read_tokens = 5
    terms = reward(tokens, LENGTHS, by_token=True)
    assert terms.shape == (3, 5) and torch.allclose(terms.sum(1), reward(tokens, LENGTHS), atol=1e-6)
    for row, n, found in zip(values, LENGTHS.tolist(), terms, strict=True):
        read = min(n, 5)
        assert torch.allclose(found[:read], row[n - read : n].flip(0) / read, atol=1e-6)
        assert not found[read:].any(), "there is no token"


@torch.no_grad()
@pytest.mark.parametrize("read_tokens", [1, 5])
def test_padding_and_order_change_no_score(reward, tokens, read_tokens):
    reward.config.read_tokens = read_tokens
    expected = reward(tokens, LENGTHS)
    assert torch.allclose(reward(F.pad(tokens, (0, 11), value=1), LENGTHS), expected, atol=1e-6)
    scrambled = torch.where(torch.arange(9) < LENGTHS[:, None], tokens, 17)
    assert torch.allclose(reward(scrambled, LENGTHS), expected, atol=1e-6)
    order = torch.tensor([2, 0, 1])
    assert torch.allclose(reward(tokens[order], LENGTHS[order]), expected[order], atol=1e-6)


@torch.no_grad()
def test_scores_in_bfloat16_do_not_collapse(reward):
    """A raw score near 10 in bfloat16 has steps of 1/16: what is left after the shift would be a few dozen values."""
    tokens = torch.randint(0, VOCAB, (749, 9), generator=torch.Generator().manual_seed(4))
    lengths = torch.full((749,), 9)
    reward.head.bias.add_(10.0)
    reward.calibrate(gain=2.0, shift=10.0)
    exact = reward(tokens, lengths)
    with torch.autocast("cpu", torch.bfloat16):
        found = reward(tokens, lengths)
        values = token_values(reward, tokens)[:, -1]
    assert found.dtype == torch.float32 and torch.equal(values, found)
    assert found.unique().numel() > 700
    assert (found - exact).abs().max() < 0.05 * exact.std(), "what is left is the trunk's rounding"


def test_head_initialisation():
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=8, context_length=8, n_layer=1, n_head=2, width=1024)
    head = RewardModel(RewardConfig(trunk=config)).head
    # 1 / sqrt(1024 + 1) = 0.03123; 1024 draws know their deviation to 1/sqrt(2 * 1024) = 2.2%
    assert head.weight.std().item() == pytest.approx(0.03123, rel=0.1)
    assert head.bias.item() == 0.0


@torch.no_grad()
def test_the_trunk_is_the_policys_and_the_policy_stays(tokens):
    policy = make_policy(dropout=0.1)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    model = RewardModel.from_causal_lm(policy)
    assert not any("lm_head" in name for name, _ in model.named_parameters())
    assert torch.equal(model.trunk(tokens).last_hidden_state, policy.model(tokens).last_hidden_state)
    for parameter in model.parameters():
        parameter.add_(1.0)
    assert all(torch.equal(before[name], value) for name, value in policy.state_dict().items())
    assert policy.config.dropout == 0.1


@torch.no_grad()
def test_any_transformers_trunk_and_no_dropout(tokens):
    torch.manual_seed(0)
    foreign = GPT2Config(vocab_size=VOCAB, n_positions=32, n_layer=2, n_head=2, n_embd=WIDTH)
    for policy in (GPT2LMHeadModel(foreign), make_policy(dropout=0.3)):
        model = RewardModel.from_causal_lm(policy).train()
        assert torch.equal(model(tokens, LENGTHS), model(tokens, LENGTHS))
        padded = model(F.pad(tokens, (0, 4)), LENGTHS)
        assert torch.allclose(padded, model(tokens, LENGTHS), atol=1e-5)


@torch.no_grad()
def test_checkpoint_carries_the_calibration(reward, tokens, tmp_path):
    reward.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    again = RewardModel.from_pretrained(tmp_path)
    assert (again.config.gain, again.config.shift) == (2.0, 0.25)
    assert type(again.config.trunk) is GPTConfig and type(AutoModel.from_pretrained(tmp_path)) is RewardModel
    assert torch.allclose(again(tokens, LENGTHS), reward(tokens, LENGTHS), atol=1e-6)


@torch.no_grad()
def test_folding_keeps_the_scores(reward, tokens):
    expected = reward(tokens, LENGTHS)
    reward.fold_calibration()
    assert (reward.config.gain, reward.config.shift) == (1.0, 0.0)
    assert torch.allclose(reward(tokens, LENGTHS, calibrated=False), expected, atol=1e-6)


def test_a_reward_model_of_the_first_blocks_scores_their_hidden_states(tokens):
    policy = make_policy(n_layer=3)
    cut = RewardModel.from_causal_lm(policy, layers=2)
    assert len(cut.trunk.layers) == cut.config.trunk.n_layer == 2 and len(policy.base_model.layers) == 3
    with torch.no_grad():
        hidden = policy.base_model(tokens, output_hidden_states=True).hidden_states[2]
        expected = cut.head(policy.base_model.norm(hidden))[:, -1, 0]
        assert torch.allclose(cut(tokens, torch.full((3,), 9), calibrated=False), expected, atol=1e-6)
        shared = RewardModel.on_trunk(cut.config, copy.deepcopy(policy.base_model))
        shared.head.load_state_dict(cut.head.state_dict())
        assert torch.equal(shared(tokens, LENGTHS), cut(tokens, LENGTHS))
    assert len(shared.trunk.layers) == 2


@pytest.mark.parametrize("kind", ["native", "transformers"])
def test_a_mix_of_layers_is_elmos(tokens, tmp_path, kind):
    foreign = GPT2Config(vocab_size=VOCAB, n_positions=32, n_layer=2, n_head=2, n_embd=WIDTH)
    policy = make_policy() if kind == "native" else GPT2LMHeadModel(foreign).eval()
    mixed = RewardModel.from_causal_lm(policy, layers="mix")
    states = policy.base_model(tokens, output_hidden_states=True).hidden_states
    with torch.no_grad():
        mixed.mix.weight.copy_(torch.tensor([0.3, -1.0, 2.0]))
        mixed.mix.gamma.fill_(1.7)
    s = torch.tensor([0.3, -1.0, 2.0]).exp() / torch.tensor([0.3, -1.0, 2.0]).exp().sum()
    normed = [state / state.square().mean(-1, keepdim=True).sqrt() for state in states]
    wanted = mixed.head(1.7 * sum(share * state for share, state in zip(s, normed, strict=True))).squeeze(-1)
    ends = torch.arange(3), LENGTHS - 1
    scores = mixed(tokens, LENGTHS, calibrated=False)
    torch.testing.assert_close(scores, wanted[ends], rtol=1e-5, atol=1e-6)
    scores.sum().backward()
    assert mixed.mix.weight.grad.abs().min() > 0 and mixed.mix.gamma.grad.abs() > 0
    mixed.save_pretrained(tmp_path)
    again = RewardModel.from_pretrained(tmp_path)
    torch.testing.assert_close(again(tokens, LENGTHS, calibrated=False), scores)
    shared = RewardModel.on_trunk(mixed.config, copy.deepcopy(policy.base_model))
    shared.head.load_state_dict(mixed.head.state_dict())
    shared.mix.load_state_dict(mixed.mix.state_dict())
    torch.testing.assert_close(shared(tokens, LENGTHS, calibrated=False), scores)
    with pytest.raises(UserError, match=r"reward\.layers=mix"):
        export_reward(again, None, tmp_path / "out")


def test_a_mix_of_joined_rows_is_that_of_single_ones():
    mixed = RewardModel.from_causal_lm(make_policy(), layers="mix")
    rows = torch.randint(0, VOCAB, (4, 24), generator=torch.Generator().manual_seed(1))
    rows[:, :20] = rows[0, :20]  # a common prompt, which is read once
    lengths = torch.tensor([24, 23, 22, 24])
    with torch.no_grad():
        alone = torch.cat([mixed(row[None], length[None]) for row, length in zip(rows, lengths, strict=True)])
        torch.testing.assert_close(mixed(rows, lengths), alone, rtol=1e-5, atol=1e-5)


def test_the_head_is_as_wide_as_the_last_hidden_states():
    """OPT of 350 M parameters projects them to the width of its embeddings."""
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = OPTConfig(hidden_size=WIDTH, ffn_dim=WIDTH, word_embed_proj_dim=WIDTH // 2, **sizes)
    model = RewardModel.from_causal_lm(OPTForCausalLM(config).eval())
    assert model.head.weight.shape == (1, WIDTH // 2)
    assert model(torch.ones(2, 5, dtype=torch.long), torch.tensor([5, 3])).shape == (2,)
