import pytest
import torch

from rlhf.model import GPTConfig, GPTForCausalLM
from rlhf.model.blocks import SwitchMLP, compute_balance, limited_experts
from rlhf.model.fused_loss import NextToken
from rlhf.model.linear import Float32Linear

SIZES = {"vocab_size": 61, "context_length": 48, "n_layer": 2, "n_head": 4, "width": 32, "experts": 4}


def make_layer(**fields) -> SwitchMLP:
    torch.manual_seed(0)
    layer = SwitchMLP(GPTConfig(**{**SIZES, "mlp": "relu", **fields}))
    torch.nn.init.normal_(layer.router.weight)
    return layer


def make_model(**fields) -> GPTForCausalLM:
    torch.manual_seed(0)
    model = GPTForCausalLM(GPTConfig(**{**SIZES, "initializer_range": 0.3, **fields}))
    return model.train()


def expected(layer: SwitchMLP, x: torch.Tensor, room: int | None = None) -> torch.Tensor:
    """p_i E_i(x) token by token, 0 for the tokens of a row after the first `room` of their expert."""
    y = torch.zeros_like(x)
    for b, row in enumerate(x):
        used = [0] * len(layer.experts)
        for t, token in enumerate(row):
            probs = torch.softmax(layer.router.weight @ token, 0)
            i = int(probs.argmax())
            used[i] += 1
            if room is None or used[i] <= room:
                y[b, t] = probs[i] * layer.experts[i](token)
    return y


@torch.no_grad()
def test_a_token_goes_to_its_expert():
    layer, x = make_layer(), torch.randn(3, 10, 32)
    assert torch.allclose(layer(x), expected(layer, x), atol=1e-6)
    assert torch.allclose(layer(x[:, 4]), expected(layer, x)[:, 4], atol=1e-6)  # a decoder's step: (B, D)


@torch.no_grad()
@pytest.mark.parametrize(
    ("capacity", "room"), [(1.0, 3), (0.4, 1), (1.25, 4)]
)  # of 10 tokens, 4 experts: 2.5, 1, 3.125
def test_tokens_beyond_the_capacity_are_dropped(capacity, room):
    layer, x = make_layer(expert_capacity=capacity), torch.randn(3, 10, 32)
    with limited_experts(layer):
        y = layer(x)
        assert torch.allclose(y, expected(layer, x, room), atol=1e-6)
        assert (y == 0).all(-1).any() and not torch.allclose(y, expected(layer, x), atol=1e-3)
        # neither the other rows nor later tokens matter
        assert torch.allclose(layer(x[1:2]), y[1:2], atol=1e-6)
        changed = x.clone()
        changed[:, 6:] = torch.randn(3, 4, 32)
        assert torch.allclose(layer(changed)[:, :6], y[:, :6], atol=1e-6)
    assert torch.allclose(layer(x), expected(layer, x), atol=1e-6) and layer.balance is None


def test_balance_by_hand():
    even = torch.eye(2).repeat(2, 1)[None]  # probabilities 1 of experts 0, 1, 0, 1: f = P = (1/2, 1/2)
    assert compute_balance(even, even.argmax(-1)).tolist() == [1.0]
    one = torch.tensor([[[1.0, 0.0]] * 3])
    assert compute_balance(one, one.argmax(-1)).tolist() == [2.0]
    # f = (2/3, 1/3), P = (0.6, 0.4): 2 * (0.4 + 0.4 / 3) = 1.066667
    probs = torch.tensor([[[0.7, 0.3], [0.8, 0.2], [0.3, 0.7]]])
    assert compute_balance(probs, probs.argmax(-1)).item() == pytest.approx(1.0666667, abs=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_a_batch_in_parts_has_the_balance_loss_of_the_whole(fused):
    model, tokens = make_model(balance_coef=0.5), torch.randint(0, 61, (4, 12))
    labels = tokens.clone()
    labels[0, :4] = -100
    count = int((labels[:, 1:] != -100).sum())

    def loss(rows: slice) -> torch.Tensor:
        if fused:
            return NextToken(model)(labels[rows], count, input_ids=tokens[rows])
        return model(tokens[rows], labels=labels[rows], num_items_in_batch=count).loss

    every = slice(None)
    plain = loss(every)
    with limited_experts(model):
        whole = loss(every)
        parts = [loss(slice(i, i + 2)) for i in (0, 2)]
        balances = model.model.layers[1].mlp.balance
    assert balances is not None and balances.shape == (2,)
    assert sum(parts).item() == pytest.approx(whole.item(), abs=1e-6)
    assert 0.3 < whole.item() - plain.item() < 2.5  # 0.5 times 1 to 4, and what the dropped tokens change
    assert loss(every).item() == plain.item()


def test_every_expert_has_a_gradient_and_the_router_learns():
    model, tokens = make_model(experts=16), torch.randint(0, 61, (1, 4))
    NextToken(model)(tokens, input_ids=tokens).backward()
    switch = model.model.layers[1].mlp
    assert isinstance(switch, SwitchMLP) and not isinstance(model.model.layers[0].mlp, SwitchMLP)
    used = [bool(expert.up.weight.grad.abs().sum() > 0) for expert in switch.experts]
    assert 1 <= sum(used) <= 4  # of four tokens; the others have a gradient of 0, not none
    assert switch.router.weight.grad.abs().sum() > 0


@torch.no_grad()
def test_the_router_stays_in_float32():
    model, tokens = make_model().eval(), torch.randint(0, 61, (2, 9))
    seen = []
    router = model.model.layers[1].mlp.router
    assert isinstance(router, Float32Linear)
    router.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(tokens)
    model.to(torch.bfloat16)(tokens)
    assert seen == [torch.float32] * 2
