"""The encoder against transformers' BERT: hidden states and masked-token loss; and what is masked, drawn and paired."""

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from rlhf.errors import UserError
from rlhf.model import GPTConfig, GPTForCausalLM, GPTForSequenceClassification
from rlhf.model.checkpoint import read_checkpoint
from rlhf.model.convert import find_form
from rlhf.model.fused_loss import IGNORED, MaskedToken, mask_tokens, pair_halves
from rlhf.training.setup import load_policy

VOCAB, PAD, MASK = 61, 0, 60
SHAPE = {
    "vocab_size": VOCAB, "context_length": 16, "n_layer": 2, "n_head": 4, "width": 32, "pad_token_id": PAD,
    "attention": "bidirectional",
}  # fmt: skip
BERTS = {"block": "post", "mlp": "gelu_erf", "norm_eps": 1e-12}
OTHERS = {
    "llama": {"positions": "rotary", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "n_kv_head": 2},
    "gpt2": {},
}


def make(**more) -> GPTForCausalLM:
    torch.manual_seed(0)
    model = GPTForCausalLM(GPTConfig(**{**SHAPE, **more})).eval()
    for parameter in model.parameters():  # far from the initial biases of 0 and scales of 1
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def random_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, MASK, shape, generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def as_bert(ours: GPTForCausalLM) -> BertForMaskedLM:
    """transformers' BERT with our weights, without the layer before its unembedding, which ours does not have."""
    config, trunk = ours.config, ours.model
    bert = BertForMaskedLM(BertConfig(
        vocab_size=VOCAB, hidden_size=config.width, num_hidden_layers=config.n_layer, num_attention_heads=config.n_head,
        intermediate_size=config.mlp_width, max_position_embeddings=config.context_length, pad_token_id=PAD,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )).eval()  # fmt: skip
    first = bert.bert.embeddings
    first.word_embeddings.weight.copy_(trunk.embed_tokens.weight)
    first.position_embeddings.weight.copy_(trunk.embed_positions.weight - first.token_type_embeddings.weight[0])
    first.LayerNorm.load_state_dict(trunk.embed_norm.state_dict())
    for mine, its in zip(trunk.layers, bert.bert.encoder.layer, strict=True):
        attention = its.attention.self
        for kind in ("weight", "bias"):
            parts = getattr(mine.attention.qkv, kind).chunk(3)
            for layer, part in zip((attention.query, attention.key, attention.value), parts, strict=True):
                getattr(layer, kind).copy_(part)
        for layer, source in (
            (its.attention.output.dense, mine.attention.out), (its.attention.output.LayerNorm, mine.norm_1),
            (its.intermediate.dense, mine.mlp.up), (its.output.dense, mine.mlp.down), (its.output.LayerNorm, mine.norm_2),
        ):  # fmt: skip
            layer.load_state_dict(source.state_dict())
    bert.cls.predictions.transform = nn.Identity()
    bert.cls.predictions.decoder.bias.zero_()
    return bert


def test_hidden_states_are_those_of_bert_with_and_without_padding():
    ours = make(**BERTS)
    bert, tokens = as_bert(ours), random_tokens(3, 12)
    whole = ours.model(tokens).last_hidden_state
    assert torch.allclose(whole, bert.bert(tokens).last_hidden_state, rtol=0, atol=1e-5)
    tokens[1, 8:] = tokens[2, 5:] = PAD
    mask = tokens != PAD
    theirs = bert.bert(tokens, attention_mask=mask.long(), output_hidden_states=True).hidden_states
    mine = ours.model(tokens, output_hidden_states=True).hidden_states  # pad tokens are padding
    given = ours.model(tokens, attention_mask=mask.long()).last_hidden_state
    for a, b in zip(mine, theirs, strict=True):
        assert torch.allclose(a[mask], b[mask], rtol=0, atol=1e-5)
    assert torch.allclose(given[mask], theirs[-1][mask], rtol=0, atol=1e-5)
    kept = torch.tensor([11, 12 + 7, 24 + 4])  # the last token of each row
    assert torch.allclose(ours.hidden(tokens, kept), theirs[-1].flatten(0, 1)[kept], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", OTHERS)
def test_a_token_sees_all_tokens_of_its_document_and_no_other(kind):
    model, tokens = make(**OTHERS[kind]), random_tokens(1, 10)
    changed = tokens.clone()
    changed[0, 9] = tokens[0, 9] % 50 + 1
    first = model.model(tokens).last_hidden_state[0, 0]
    assert not torch.allclose(first, model.model(changed).last_hidden_state[0, 0], atol=1e-4), "a later token counts"
    documents = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]])
    packed = model.model(tokens, position_ids=documents).last_hidden_state[0]
    for part in (slice(0, 6), slice(6, 10)):
        alone = model.model(tokens[:, part]).last_hidden_state[0]
        assert torch.allclose(packed[part], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [BERTS, OTHERS["llama"]])
def test_half_precision_attends_to_all_too(kind):
    model, tokens = make(**kind).train(), random_tokens(2, 12)
    exact = model.model(tokens).last_hidden_state
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model.model(tokens).last_hidden_state
    assert (rounded.float() - exact).abs().max() < 0.1  # bfloat16 has 8 bits


def test_the_loss_is_that_of_bert_on_the_same_masked_tokens():
    ours = make(**BERTS)
    bert, ordinary = as_bert(ours), torch.arange(VOCAB).clamp(max=MASK - 1).eq(torch.arange(VOCAB))
    tokens, labels = mask_tokens(random_tokens(4, 16), ordinary, MASK, torch.Generator().manual_seed(1))
    theirs = bert(tokens, attention_mask=torch.ones_like(tokens), labels=labels).loss
    nats, pairs = MaskedToken(ours, pairs=False)(labels, input_ids=tokens)
    count = int((labels != IGNORED).sum())
    assert pairs is None and torch.allclose(nats / count, theirs, rtol=0, atol=1e-5)
    ours.zero_grad()
    (nats / count).backward()
    theirs.backward()
    mine, its = ours.model.layers[0].mlp.up.weight.grad, bert.bert.encoder.layer[0].intermediate.dense.weight.grad
    assert torch.allclose(mine, its, rtol=0, atol=1e-5)


def test_the_pair_is_read_at_the_last_token():
    ours = make(**OTHERS["llama"])
    module, tokens = MaskedToken(ours, pairs=True), random_tokens(3, 16)
    labels = torch.full_like(tokens, IGNORED)
    labels[:, 4] = tokens[:, 4]
    hidden = ours.model(tokens).last_hidden_state
    nats, logits = module(labels, input_ids=tokens)
    assert torch.allclose(logits, module.pair_head(hidden[:, -1]), atol=1e-5)
    by_hand = -ours.lm_head(hidden[:, 4]).log_softmax(-1).gather(1, tokens[:, 4:5]).sum()
    assert torch.allclose(nats, by_hand, atol=1e-4)


def test_fifteen_percent_are_chosen_of_which_80_10_10():
    tokens = torch.randint(0, 1000, (200, 500), generator=torch.Generator().manual_seed(0))
    ordinary = (torch.arange(1001) >= 10) & (torch.arange(1001) < 1000)  # the last is the mask
    masked, labels = mask_tokens(tokens, ordinary, 1000, torch.Generator().manual_seed(1))
    chosen = labels != IGNORED
    assert not chosen[tokens < 10].any(), "special tokens are never chosen"
    assert labels[chosen].equal(tokens[chosen]) and masked[~chosen].equal(tokens[~chosen])

    def within(count: float, n: int, p: float) -> bool:  # four standard deviations of a binomial
        return abs(count - n * p) < 4 * (n * p * (1 - p)) ** 0.5

    n = int((tokens >= 10).sum())
    assert within(chosen.sum(), n, 0.15)
    count = int(chosen.sum())
    assert within((masked[chosen] == 1000).sum(), count, 0.8)
    # a random token is the token itself once in 990
    assert within((masked[chosen] == tokens[chosen]).sum(), count, 0.1 + 0.1 / 990)
    drawn = masked[chosen & (masked != 1000) & (masked != tokens)]
    assert within(len(drawn), count, 0.1 * 989 / 990) and drawn.min() >= 10 and drawn.unique().numel() > 700
    # exact for these seeds: the draws do not depend on the machine
    assert (n, count, int((masked == 1000).sum())) == (98984, 14686, 11685)
    again = mask_tokens(tokens, ordinary, 1000, torch.Generator().manual_seed(1))
    assert again[0].equal(masked) and again[1].equal(labels)


def test_a_short_row_has_at_least_one_chosen_token():
    tokens, ordinary = random_tokens(500, 3), torch.ones(VOCAB, dtype=torch.bool)
    labels = mask_tokens(tokens, ordinary, MASK, torch.Generator().manual_seed(0))[1]
    assert (labels != IGNORED).any(1).all()


@pytest.mark.parametrize("length", [8, 9])
def test_pairs_by_hand_and_balanced(length):
    tokens = torch.arange(1000 * length).view(1000, length)
    half = length // 2
    for others in (None, tokens.flip(0)):
        rows, same = pair_halves(tokens, others, -7, torch.Generator().manual_seed(3))
        assert abs(int(same.sum()) - 500) < 4 * 250**0.5
        assert (rows[:, [half - 1, -1]] == -7).all()
        i, j = int(same.nonzero()[0]), int((same == 0).nonzero()[0])
        first, second = tokens[i].tolist()[: half - 1], tokens[i].tolist()[half:-1]
        assert rows[i].tolist() == [*first, -7, *second, -7]
        changed = [*tokens[j].tolist()[length - half :], *tokens[j].tolist()[: length - half]]
        if others is not None:
            changed = [*tokens[j].tolist()[:half], *others[j].tolist()[half:]]
        assert rows[j].tolist() == [*changed[: half - 1], -7, *changed[half:-1], -7]


def test_what_an_encoder_cannot_be(tmp_path):
    for wrong in ({"window": 4}, {"experts": 2}):
        with pytest.raises(ValueError, match="attention=bidirectional goes with neither window nor experts"):
            GPTConfig(**{**SHAPE, **wrong})
    ours = make(**OTHERS["gpt2"])
    assert find_form(ours.config) == "rlhf", "not GPT-2, which is causal"
    ours.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"is an encoder .* want a causal model, or use this one as reward.model="):
        load_policy(tmp_path)
    with pytest.raises(UserError, match=r"writes no text: give a causal language model, or use this one as reward"):
        read_checkpoint(tmp_path)


def test_a_classifier_takes_its_trunk_and_reads_the_last_real_token(tmp_path):
    ours, tokens = make(**OTHERS["llama"]), random_tokens(2, 9)
    ours.save_pretrained(tmp_path)
    tokens[1, 6:] = PAD
    classifier = GPTForSequenceClassification.from_pretrained(tmp_path, num_labels=1).eval()
    hidden = torch.stack(
        [ours.model(tokens[:1]).last_hidden_state[0, -1], ours.model(tokens[1:, :6]).last_hidden_state[0, -1]]
    )
    logits = classifier(tokens, attention_mask=(tokens != PAD).long()).logits
    assert torch.allclose(logits, classifier.score(hidden), atol=1e-5)
