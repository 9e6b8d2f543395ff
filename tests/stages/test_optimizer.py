"""Optimizers, with torch's own two as oracle; gradients on an Apple GPU; whole weights and their folder."""

import json

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rlhf.config.compose import compose_config
from rlhf.config.stages import PretrainConfig, SftConfig, WarmupConfig
from rlhf.errors import UserError
from rlhf.model import GPTConfig, GPTForCausalLM
from rlhf.training import state as gather
from rlhf.training.engine import Engine, make_engine
from rlhf.training.optim import MuonAdamW, make_adamw, make_schedule, orthogonalised
from rlhf.training.setup import choose_device
from tests.presets import preset

from .conftest import ONE_LABELER, SHORT

SETTINGS = PretrainConfig(muon_lr=0.02, lr=3e-3, beta1=0.9, beta2=0.95, weight_decay=0.1)
TOKENS = torch.randint(0, 17, (4, 8), generator=torch.Generator().manual_seed(0))


def make_model(seed: int = 0) -> GPTForCausalLM:
    torch.manual_seed(seed)
    shape = {"vocab_size": 17, "n_layer": 2, "n_head": 2, "width": 8, "context_length": 8}
    return GPTForCausalLM(GPTConfig(**shape, pad_token_id=0, bos_token_id=1, eos_token_id=2))


def names_of(model: nn.Module, parameters: list[Tensor]) -> set[str]:
    wanted = {id(p) for p in parameters}
    return {name for name, p in model.named_parameters() if id(p) in wanted}


def test_muon_gets_the_matrices_of_the_layers_and_adamw_everything_else():
    model = make_model()
    optimizer = MuonAdamW(model, SETTINGS)
    muon, adamw = optimizer.param_groups
    inner, rest = names_of(model, muon["params"]), names_of(model, adamw["params"])
    assert not inner & rest and inner | rest == {name for name, _ in model.named_parameters()}
    assert len(inner) == 2 * 4  # two layers, each with two matrices of attention and two of the MLP
    assert all(".layers." in name and name.endswith("weight") for name in inner)
    assert any("embed" in name for name in rest) and any(name.endswith("bias") for name in rest)
    assert (muon["lr"], adamw["lr"]) == (0.02, 3e-3)
    assert (muon["weight_decay"], adamw["weight_decay"]) == (0.1, 0.0)
    for p in model.model.layers[0].parameters():
        p.requires_grad_(False)
    taken = [p for group in MuonAdamW(model, SETTINGS).param_groups for p in group["params"]]
    assert taken and not any(".layers.0." in name for name in names_of(model, taken)), "frozen ones are left out"


def test_steps_are_those_of_torchs_own_optimizers(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    model, twin = make_model(), make_model()
    ours = MuonAdamW(model, SETTINGS)
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


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_a_cpu_without_avx512_orthogonalises_in_float32(monkeypatch, shape):
    """Five steps move each singular value s by 3.4445 s - 4.775 s^3 + 2.0315 s^5 and no singular vector."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    assert (s > 0.6).all() and (s < 1.3).all()
    found = orthogonalised(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), u * s @ vh, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("schedule", "wanted"), [
    # four of twenty steps are warm-up; then 1 - 0.8 t, and 0.2 + 0.8 (1 + cos(pi t)) / 2, with t of 0, 1/4, 1/2, 1
    ("linear", [1.0, 0.8, 0.6, 0.2]), ("cosine", [1.0, 0.2 + 0.4 * (1 + 2**-0.5), 0.6, 0.2]),
    ("constant", [1.0, 1.0, 1.0, 1.0]),
])  # fmt: skip
def test_the_schedules(schedule, wanted):
    factor = make_schedule(WarmupConfig(schedule=schedule, final_lr_fraction=0.2, warmup_fraction=0.2), 20)
    assert [factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert [factor(step) for step in (4, 8, 12, 20)] == pytest.approx(wanted)
    late = make_schedule(WarmupConfig(schedule=schedule, final_lr_fraction=0.2), 10, warmup=15)
    assert late(14) == 1, "a warm-up that outlasts the schedule"
    assert all(0.199 < late(step) <= 1 for step in range(15, 40))


OPTIMIZER = ("beta1=0.5", "beta2=0.75", "weight_decay=0.25", "schedule=linear", "final_lr_fraction=0.5")
FEW_STEPS = {
    "dpo": ["dpo.batch_prompts=8", "dpo.warmup_fraction=0", *ONE_LABELER],
    "pretrain": [*SHORT["pretrain"], "pretrain.warmup_tokens=0", "pretrain.optimizer=adamw"],
    "ppo": ["ppo.ema_decay=null", "ppo.episodes=48", "ppo.episodes_per_update=16", "ppo.minibatches=2", "ppo.eval_every=0"],
}  # fmt: skip


@pytest.mark.parametrize("stage", ["pretrain", "sft", "reward", "dpo", "ppo"])
def test_every_stage_trains_by_its_own_settings_of_the_optimizer(copy_until, monkeypatch, stage):
    """By what AdamW is given, and by the logged rates, which fall by a line towards half of lr."""
    made = []

    def make(groups, **more):
        made.append([(group["betas"], group["weight_decay"]) for group in groups])
        return make_adamw(groups, **more)

    monkeypatch.setattr("rlhf.training.engine.make_adamw", make)
    run = copy_until("ppo" if stage == "dpo" else stage)
    run.stage(stage, *(f"{stage}.{one}" for one in OPTIMIZER), *FEW_STEPS.get(stage, SHORT.get(stage, [])))
    assert {betas for betas, _ in made[0]} == {(0.5, 0.75)} and {decay for _, decay in made[0]} == {0.25, 0.0}
    rates, steps = [rate for _, rate in run.values(stage, "optim/lr")], run.record(stage)["steps"]
    lr = getattr(run.config(), stage).lr
    assert steps >= 3 and rates[-1] == pytest.approx(lr * (1 - 0.5 * (steps - 1) / steps))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Faulty(nn.Linear):
    """A layer whose gradients are twice too large, unlike its copy's."""

    def __init__(self, width: int, faulty: bool):
        super().__init__(width, width)
        self.faulty = id(self) if faulty else 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return {"y": [Doubled.apply(y) if self.faulty == id(self) else y], "n": None}


def engine_of(faulty: bool) -> Engine:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), Faulty(4, faulty))
    config = compose_config(["device=cpu"])
    engine = make_engine(config, module, SftConfig(lr=0.1, max_grad_norm=1e9), torch.device("cpu"))
    engine.unchecked = True
    return engine


def test_gradients_that_are_the_cpus_are_accepted_and_left_alone():
    engine = engine_of(faulty=False)
    engine(torch.randn(3, 4))
    assert not engine.unchecked and engine.module.training
    assert all(p.grad is None for p in engine.module.parameters())


def test_a_wrong_gradient_ends_the_stage_before_the_first_step():
    with pytest.raises(UserError, match=r"device=mps: the gradient of 0.weight is not the CPU's"):
        engine_of(faulty=True)(torch.randn(3, 4))


def test_a_machine_without_one_is_told():
    with pytest.raises(UserError, match="torch sees no such GPU here"):
        choose_device(compose_config(["device=mps"]))


@pytest.fixture
def model() -> GPTForCausalLM:
    return GPTForCausalLM(preset("tiny", n_layer=1, vocab_size=64))


def test_a_tied_embedding_is_there_once_and_the_copy_shares_nothing(model, monkeypatch):
    state = gather.gathered_state(model)
    assert "model.embed_tokens.weight" in state and "lm_head.weight" not in state
    assert sum(t.numel() for t in state.values()) == sum(p.numel() for p in model.parameters())
    before = state["model.norm.weight"].clone()
    with torch.no_grad():
        model.model.norm.weight.fill_(7)
    assert torch.equal(state["model.norm.weight"], before)
    monkeypatch.setenv("RANK", "1")
    assert gather.gathered_state(model) is None


def test_the_folder_states_the_type_of_its_weights(model, tmp_path):
    """As where bfloat16 weights are trained and their float32 masters are saved."""
    state = gather.gathered_state(model)
    gather.save_model(model.to(torch.bfloat16), tmp_path, state)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32 and loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in state.items())
