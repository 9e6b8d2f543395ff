from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf.config.compose import compose_config
from rlhf.engines.sampling import sample
from rlhf.errors import UserError
from rlhf.model.fused_loss import NextToken
from rlhf.model.heads import RewardModel
from rlhf.model.linear import merged, product_weights
from rlhf.runs.checkpoints import checkpoints
from rlhf.stages import ppo
from rlhf.training.adapters import add_adapters, gathered_state
from rlhf.training.engine import make_engine
from rlhf.training.setup import load_policy
from tests.model.test_generate import KINDS, make

from .conftest import ONE_LABELER, Run
from .ppo_trainer import Trainer, open_trainer
from .test_ppo_options import SMALL
from .test_resume import assert_same_weights, interrupt

LORA = ["lora.rank=4", "lora.alpha=8"]
SHORT = {
    "sft": [*LORA, "sft.epochs=1", "sft.batch_size=100", "sft.dropout=0.1", "sft.lr=3e-3"],  # 4 steps
    "reward": [*LORA, "reward.epochs=1", "reward.lr=3e-3", "reward.audit=0", "reward.batch_prompts=4", *ONE_LABELER],  # 4 steps
}  # fmt: skip
FILES = ["model/model.safetensors", "adapters/adapter_model.safetensors"]
TOKENS = torch.arange(5, 45).reshape(2, 20)


@pytest.fixture(scope="module")
def adapted(gold_run, tmp_path_factory) -> dict[str, Run]:
    """A run whose SFT is trained with adapters; one whose reward model is."""
    made = {}
    for stage in SHORT:
        made[stage] = gold_run.copy(tmp_path_factory.mktemp("lora"), stage)
        made[stage].stage(stage, *SHORT[stage])
    return made


def base_of(run: Run, stage: str) -> Path:
    return run.folder / ("pretrain" if stage == "sft" else "sft") / "model"


@pytest.mark.parametrize("stage", SHORT)
def test_linear_layers_of_the_trunk_have_learned_and_the_rest_is_the_base(adapted, stage):
    folder = adapted[stage].folder / stage
    base, model = (load_file(path / "model.safetensors") for path in (base_of(adapted[stage], stage), folder / "model"))
    base = {name.replace("model.", "trunk.", 1) if stage == "reward" else name: t for name, t in base.items()}
    changed = {name for name in model.keys() & base.keys() if not model[name].equal(base[name])}
    wanted = {n for n in base if n.endswith(("qkv.weight", "out.weight", "up.weight", "down.weight"))}
    assert wanted and changed == wanted
    stored = load_file(folder / "adapters" / "adapter_model.safetensors")
    assert sum(t.numel() for t in stored.values()) < 0.2 * sum(t.numel() for t in base.values())
    assert all(t.norm() > 0 for t in stored.values())


def test_only_the_layers_asked_for_have_adapters(copy_until, capsys):
    run = copy_until("sft")
    run.stage("sft", *SHORT["sft"], "lora.target_modules=[qkv,layers.1.mlp.up]")
    base, model = (load_file(at / "model.safetensors") for at in (base_of(run, "sft"), run.folder / "sft" / "model"))
    changed = {name for name in model.keys() & base.keys() if not model[name].equal(base[name])}
    wanted = {n for n in base if n.endswith("qkv.weight") or "layers.1.mlp.up.weight" in n}
    assert changed == wanted and len(wanted) == 3
    with pytest.raises(UserError, match=r"q_proj: no linear layer has this name: want some of qkv, out,"):
        run.stage("sft", *SHORT["sft"], "lora.target_modules=q_proj", "overwrite=true")


def test_dropout_is_on_the_adapters_input_and_never_in_ppo(gold_run, copy_until):
    """Between two forwards in training mode the outputs differ with it; PPO's policy and critic have none, nor do loaded adapters."""
    for dropout, alike in ((0.0, True), (0.5, False)):
        config = gold_run.config(*LORA, f"lora.dropout={dropout}")
        model = gold_run.policy()
        add_adapters(model, config, Path("base"))
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.data.normal_()
        model.train()
        with torch.no_grad():
            assert torch.equal(model(TOKENS).logits, model(TOKENS).logits) == alike
    with open_trainer(copy_until("ppo"), *SMALL, *LORA, "lora.dropout=0.5") as trainer:
        found = [m.p for m in trainer.engine.module.modules() if isinstance(m, torch.nn.Dropout)]
        assert found and set(found) == {0.0}


def test_peft_reads_the_adapters_of_sft_and_those_and_the_head_of_the_reward_model(adapted):
    import peft

    run = adapted["sft"]
    found = peft.PeftModel.from_pretrained(run.policy("pretrain"), str(run.folder / "sft" / "adapters"))
    with torch.no_grad():
        wanted, logits = run.policy("sft")(TOKENS).logits, found(input_ids=TOKENS).logits
        before = run.policy("pretrain")(TOKENS).logits
    assert torch.allclose(logits, wanted, atol=1e-5) and (before - wanted).abs().max() > 0.1
    folder = adapted["reward"].folder / "reward"
    base = RewardModel.from_causal_lm(load_policy(base_of(adapted["reward"], "reward")))
    found = peft.PeftModel.from_pretrained(base, str(folder / "adapters"))
    wanted = RewardModel.from_pretrained(str(folder / "model"))
    lengths = torch.tensor([20, 13])
    with torch.no_grad():
        scores = found(TOKENS, lengths, calibrated=False)
        assert torch.allclose(scores, wanted(TOKENS, lengths, calibrated=False), atol=1e-5)
    assert wanted.gain != 1.0


@pytest.mark.parametrize("stage", SHORT)
def test_a_resumed_stage_equals_an_undisturbed_one(adapted, copy_until, stage):
    broken = copy_until(stage)
    interrupt(broken, stage, 2, *SHORT[stage])
    *_, newest = checkpoints(broken.folder / stage / "checkpoints")
    kept = load_file(newest / "weights.safetensors")
    assert kept and all(".lora_" in name or "head." in name for name in kept), "frozen weights are in the base's folder"
    broken.stage(stage, "checkpoints.every_seconds=0", *SHORT[stage])
    assert_same_weights(adapted[stage].folder / stage, broken.folder / stage, *FILES)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_other_architectures_have_adapters_on_their_trunk(gold_run, kind):
    """The merged weights are those of a model without PEFT's layers, transposed ones too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    sizes |= {} if kind == "gpt2" else {"intermediate_size": 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).eval()
    plain = AutoModelForCausalLM.from_config(model.config).eval()
    add_adapters(model, gold_run.config(*LORA), Path("base"))
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all(".lora_" in name for name, _ in trained)
    with torch.no_grad():
        for _, p in trained:
            p.normal_(0.0, 0.1)
        plain.load_state_dict(dict(merged(model, gathered_state(model))), strict=False)
        assert torch.allclose(plain(TOKENS).logits, model(TOKENS).logits, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_block_trains_and_decodes_with_adapters(kind):
    model, config = make(kind), compose_config(LORA)
    with torch.no_grad():
        before = model(TOKENS % 40).logits
    linear = {n for n, m in model.model.named_modules(prefix="model") if isinstance(m, torch.nn.Linear)}
    add_adapters(model, config, Path("base"))
    assert torch.equal(model(TOKENS % 40).logits, before)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {name.rpartition(".lora_")[0] for name in trained} == linear
    for p in trained.values():
        torch.nn.init.normal_(p, 0.0, 0.3)
    NextToken(model)(TOKENS % 40, input_ids=TOKENS % 40).backward()
    assert all(p.grad is not None for p in trained.values())
    out = sample(model, [[5, 6, 7], [8]], max_new_tokens=8, eos_token_id=None, pad_token_id=0, greedy=True)
    with torch.no_grad():
        for prompt, response in zip([[5, 6, 7], [8]], out.responses, strict=True):
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == response


PPO = ["lora.rank=1", "lora.alpha=8", *SMALL, "ppo.lr=1e-3"]


def models_of(trainer: Trainer) -> list[torch.nn.Module]:
    return [trainer.actor_critic, trainer.reference.model, trainer.reward.model]


def bytes_of(*models: torch.nn.Module) -> int:
    found = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for m in models for p in m.parameters()}
    return sum(found.values())


@pytest.fixture(scope="module")
def first_updates(adapted, tmp_path_factory) -> dict[bool, dict[str, Any]]:
    """PPO's first update with a trunk of each model's own and with a shared one, after its invariants."""
    found = {}
    for shared in (False, True):
        run = adapted["reward"].copy(tmp_path_factory.mktemp("ppo"), "ppo")
        with open_trainer(run, *PPO, f"lora.share_trunk={str(shared).lower()}") as trainer:
            metrics = trainer.update()
            ppo.write_models(trainer.stage, trainer.engine, trainer.tokenizer)
            critic = trainer.actor_critic.critic
            weights = dict(merged(critic, gathered_state(critic)))
        share = bytes_of(*models_of(trainer)) / bytes_of(run.policy("sft"))
        found[shared] = {"share": share, "metrics": metrics, "folder": trainer.stage.folder, "critic": weights}
    return found


def test_a_shared_trunk_is_held_once_and_changes_no_result(first_updates):
    assert first_updates[True]["share"] < 1.1 and first_updates[False]["share"] > 2.5
    measured = ("time/", "memory/", "rollout/tokens_per_s")
    metrics = (first_updates[shared]["metrics"] for shared in (False, True))
    one, two = ({n: v for n, v in found.items() if not n.startswith(measured)} for found in metrics)
    assert one == pytest.approx(two, abs=1e-5, rel=1e-5) and one["optim/policy_grad_norm"] > 0
    for mine, theirs in (
        [load_file(first_updates[shared]["folder"] / "model" / "model.safetensors") for shared in (True, False)],
        [first_updates[shared]["critic"] for shared in (True, False)],
    ):
        assert mine.keys() == theirs.keys()
        assert all(torch.allclose(mine[n], theirs[n], atol=1e-5) for n in mine)


def test_frozen_weights_are_held_in_the_precision_of_training(gold_run):
    """They are rounded once; the merged model is written from what they were."""
    folder = gold_run.folder / "sft" / "model"
    config = gold_run.config(*LORA, "precision=bfloat16")
    policy = load_policy(folder)
    [first, second, *_] = product_weights(policy)
    first.data = first.data.bfloat16().float()
    original = {name.replace(".base_layer", ""): t.clone() for name, t in policy.state_dict().items()}
    add_adapters(policy, config, folder)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = policy(TOKENS, use_cache=False).logits
    make_engine(config, policy, config.sft, torch.device("cpu"))
    assert first.dtype == torch.bfloat16 and second.dtype == torch.float32, "on a CPU only what loses nothing"
    second.exact, second.data = second.data, second.data.bfloat16()  # as on a GPU
    with torch.autocast("cpu", torch.bfloat16):
        assert policy(TOKENS, use_cache=False).logits.equal(wanted)
    state = dict(merged(policy, gathered_state(policy)))
    assert state and all(tensor.equal(original[name]) for name, tensor in state.items())
