"""Muon and AdamW as one optimizer: who trains what, torch's own two as oracle, state across a restart."""

import io

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rlhf.model import GPTConfig, GPTForCausalLM
from rlhf.training.optim import MuonAdamW, make_adamw

SETTINGS = {"muon_lr": 0.02, "lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
TOKENS = torch.randint(0, 17, (4, 8), generator=torch.Generator().manual_seed(0))


def make_model(seed: int = 0) -> GPTForCausalLM:
    torch.manual_seed(seed)
    shape = {"vocab_size": 17, "n_layer": 2, "n_head": 2, "width": 8, "context_length": 8}
    return GPTForCausalLM(GPTConfig(**shape, pad_token_id=0, bos_token_id=1, eos_token_id=2))


def make_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def train(model: nn.Module, optimizer: MuonAdamW, schedule, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def names_of(model: nn.Module, parameters: list[Tensor]) -> set[str]:
    wanted = {id(p) for p in parameters}
    return {name for name, p in model.named_parameters() if id(p) in wanted}


def test_muon_gets_the_matrices_of_the_layers_and_adamw_everything_else():
    model = make_model()
    optimizer = MuonAdamW(model, **SETTINGS)
    muon, adamw = optimizer.param_groups
    inner, rest = names_of(model, muon["params"]), names_of(model, adamw["params"])
    assert not inner & rest and inner | rest == {name for name, _ in model.named_parameters()}
    assert len(inner) == 2 * 4  # two layers, each with two matrices of attention and two of the MLP
    assert all(".layers." in name and name.endswith("weight") for name in inner)
    assert any("embed" in name for name in rest) and any(name.endswith("bias") for name in rest)
    assert (muon["lr"], adamw["lr"]) == (0.02, 3e-3)
    assert (muon["weight_decay"], adamw["weight_decay"]) == (0.1, 0.0)


def test_frozen_parameters_are_left_out():
    model = make_model()
    for p in model.model.layers[0].parameters():
        p.requires_grad_(False)
    optimizer = MuonAdamW(model, **SETTINGS)
    taken = names_of(model, [p for group in optimizer.param_groups for p in group["params"]])
    assert taken and not any(".layers.0." in name for name in taken)


def test_steps_are_those_of_torchs_own_optimizers():
    model, twin = make_model(), make_model()
    ours = MuonAdamW(model, **SETTINGS)
    inner = [p for name, p in twin.named_parameters() if ".layers." in name and p.ndim == 2]
    rest = [p for name, p in twin.named_parameters() if not (".layers." in name and p.ndim == 2)]
    muon = torch.optim.Muon(inner, lr=0.02, weight_decay=0.1)
    adamw = torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(3):
        for one, steppers in ((model, [ours]), (twin, [muon, adamw])):
            one.zero_grad()
            one(input_ids=TOKENS, labels=TOKENS).loss.backward()
            for stepper in steppers:
                stepper.step()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_without_gradient_only_the_layers_matrices_decay():
    model = make_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = MuonAdamW(model, **SETTINGS)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        # decoupled decay: w (1 - lr weight_decay) = w (1 - .02 * .1)
        factor = 0.998 if ".layers." in name and p.ndim == 2 else 1.0
        torch.testing.assert_close(p.detach(), before[name] * factor, rtol=1e-6, atol=0)


def test_it_learns():
    model = make_model()
    optimizer = MuonAdamW(model, **SETTINGS)
    losses = train(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0), 100)
    # uniform: log 17 = 2.83
    assert losses[0] == pytest.approx(2.83, abs=0.1) and losses[-1] < 1.5


def test_a_schedule_reaches_both_optimizers():
    optimizer = MuonAdamW(make_model(), **SETTINGS)
    schedule = make_schedule(optimizer)
    optimizer.step()
    schedule.step()
    assert (optimizer.muon.param_groups[0]["lr"], optimizer.adamw.param_groups[0]["lr"]) == (0.01, 1.5e-3)


def test_gradients_are_cleared():
    model = make_model()
    optimizer = MuonAdamW(model, **SETTINGS)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_restart_is_no_interruption():
    model = make_model()
    optimizer = MuonAdamW(model, **SETTINGS)
    schedule = make_schedule(optimizer)
    expected = train(model, optimizer, schedule, 6)

    first = make_model()
    optimizer = MuonAdamW(first, **SETTINGS)
    schedule = make_schedule(optimizer)
    losses = train(first, optimizer, schedule, 3)
    saved = (first.state_dict(), optimizer.state_dict(), schedule.state_dict())
    weights, state, place = map(through_a_file, saved)

    second = make_model(seed=1)
    second.load_state_dict(weights)
    optimizer = MuonAdamW(second, **SETTINGS)
    schedule = make_schedule(optimizer)  # before the state is loaded, as Trainer does
    optimizer.load_state_dict(state)
    schedule.load_state_dict(place)
    losses += train(second, optimizer, schedule, 3)

    assert losses == expected
    for (name, p), q in zip(model.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.02 / 7, 3e-3 / 7])


def test_without_its_state_a_restart_is_an_interruption():
    # So that the test above cannot pass for want of a state.
    model = make_model()
    optimizer = MuonAdamW(model, **SETTINGS)
    schedule = make_schedule(optimizer)
    expected = train(model, optimizer, schedule, 6)
    other = make_model()
    optimizer = MuonAdamW(other, **SETTINGS)
    schedule = make_schedule(optimizer)
    losses = train(other, optimizer, schedule, 3)
    fresh = MuonAdamW(other, **SETTINGS)
    for group in fresh.param_groups:
        group["lr"] /= 4
    assert (losses + train(other, fresh, schedule, 3))[4:] != expected[4:]


@pytest.mark.parametrize(("devices", "fused"), [(["cpu"], None), (["cuda"], True), (["cuda", "cpu"], None)])
def test_adamw_is_fused_where_all_its_parameters_are_on_a_gpu(devices, fused):
    with FakeTensorMode():  # tensors that know their device and hold nothing
        groups = [{"params": [nn.Parameter(torch.empty(3, device=device))]} for device in devices]
        groups.append({"params": []})
        assert make_adamw(groups).defaults["fused"] is fused
