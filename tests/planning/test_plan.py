"""The plan as a whole: parts that add up, the fewest GPUs, suggestions that hold, hours by hand."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.commands import plan as stage
from rlhf.commands.plan import plan_lines
from rlhf.config import DEEPSPEED, PlanConfig, compose
from rlhf.config.checks import check_config
from rlhf.config.model import ModelConfig
from rlhf.errors import UserError
from rlhf.planning import estimates, formulas
from rlhf.planning.estimates import fewest_gpus, largest, make_plan, make_times, planned_shape, room, stage_bytes
from rlhf.planning.formulas import make_shape


def planned(*overrides: str) -> PlanConfig:
    compose.check_overrides(list(overrides), "plan")
    config = compose.compose_config(list(overrides), "plan")
    check_config(config, "plan")
    return config


def test_ppo_holds_four_models():
    config = planned("model=gpt2", "gpus=4", "deepspeed=none")
    n, critic = 124_439_808, 124_439_808 + 769  # the trunk is the whole of a tied model; the head has 768 + 1
    parts = stage_bytes(config, "ppo update")
    assert (parts["weights"], parts["optimizer"]) == (2 * (n + critic), 12 * (n + critic))
    # token and position embeddings (50257 + 1024) * 768, 25 norms of 2 * 768 and the head are in float32, the rest in bf16
    whole = (50257 + 1024) * 768 + 25 * 2 * 768
    assert parts["frozen"] == 2 * (2 * (n - whole) + 4 * whole) + 4 * 769
    sharded = stage_bytes(planned("model=gpt2", "gpus=4", "deepspeed=zero3"), "ppo update")
    assert sharded["frozen"] == 2 * -(-n // 4) + 2 * -(-critic // 4)
    rollout = stage_bytes(planned("model=gpt2", "gpus=4", "deepspeed=zero3"), "ppo rollout")
    assert rollout["gathered"] == 2 * n and rollout["gradients"] == 0


def test_activations_and_cache_of_a_stage_by_hand():
    sizes = ["rollout.batch_size=8", "rollout.max_new_tokens=24", "pretrain.micro_batch_sequences=2"]
    config = planned("model=gpt2", *sizes)
    # 12 blocks, bf16: 32 * 768 + 16 (statistics) + 4 * 12 (log-sums) bytes per token, and 2 * 2 * 768 of the last norm
    assert stage_bytes(config, "pretrain")["activations"] == 2 * 1024 * (12 * (32 * 768 + 16 + 48) + 3072)
    assert stage_bytes(config, "pretrain")["logits"] == 12 * 2048 * 50257
    assert stage_bytes(config, "ppo rollout")["kv_cache"] == 2 * 12 * 768 * 8 * 1023 * 2
    assert stage_bytes(config, "ppo update")["logits"] == 12 * 64 * 24 * 50257  # response tokens only


def test_adapters_hold_one_copy_of_the_weights_per_model_or_one_in_all():
    n, critic, r = 124_439_808, 124_439_808 + 769, 16
    # a block's layers: 768 -> 2304, 768 -> 768, 768 -> 3072, 3072 -> 768
    adapters = 12 * r * (768 + 2304 + 2 * 768 + 2 * (768 + 3072))
    whole = (50257 + 1024) * 768 + 25 * 2 * 768  # embeddings and norms, in float32
    language, scalar = 2 * (n - whole) + 4 * whole, 2 * (n - whole) + 4 * (whole + 769)
    own = stage_bytes(planned("model=gpt2", f"lora.rank={r}"), "ppo update")
    assert own["optimizer"] == 12 * (2 * adapters + 769)
    assert own["frozen"] == language + 2 * scalar, "the reference is the policy without its adapters"
    shared = stage_bytes(planned("model=gpt2", f"lora.rank={r}", "lora.share_trunk=true"), "ppo update")
    assert shared["frozen"] == language + 2 * adapters + 4 * 769
    sft = stage_bytes(planned("model=gpt2", f"lora.rank={r}"), "sft")
    assert (sft["weights"], sft["frozen"]) == (2 * adapters, language)
    reward = stage_bytes(planned("model=gpt2", f"lora.rank={r}"), "reward")
    assert reward["frozen"] == scalar == 2 * (critic - whole - 769) + 4 * (whole + 769)


PLANNED = {model: planned(f"model={model}") for model in ("gpt3-xl", "gpt3-13b", "llama-2-70b")}


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(list(PLANNED)), st.sampled_from(list(DEEPSPEED)), st.integers(2, 3000), st.booleans())
def test_more_gpus_never_need_more_a_gpu_and_the_fewest_is_the_fewest(model, deepspeed, gpus, checkpointing):
    config = dataclasses.replace(PLANNED[model])
    config.gradient_checkpointing, config.deepspeed, config.gpus = checkpointing, deepspeed, gpus
    assert largest(dataclasses.replace(config, gpus=gpus + 1))[1] <= largest(config)[1]
    found = fewest_gpus(config)
    if found is not None:
        assert largest(dataclasses.replace(config, gpus=found))[1] <= room(config)
    fits_here = largest(config)[1] <= room(config)
    assert fits_here == (found is not None and (found <= gpus))


@pytest.mark.parametrize("overrides", [
    *([f"model={model}", f"deepspeed={zero}", "gpus=4"] for model in ("gpt3-xl", "gpt3-13b") for zero in ("none", "zero3")),
    ["model=gpt2-xl", "gpu_memory_gb=24", "data.max_tokens=512", "gold.enabled=false"],
    ["model=gpt2-xl", "gpu_memory_gb=24", "lora.rank=16"],
    ["model=gpt2-xl", "gpu_memory_gb=6", "lora.rank=16", "lora.share_trunk=true"],
], ids=str)  # fmt: skip
def test_what_is_suggested_fits(overrides, monkeypatch):
    if "model=gpt2-xl" in overrides:  # as of an adopted model, which is not pretrained
        monkeypatch.setattr("rlhf.planning.estimates.planned_stages", lambda config: estimates.PHASES[1:])
    plan = make_plan(planned(*overrides))
    assert plan["fits"] or plan["suggestions"]
    for text in plan["suggestions"]:
        assert make_plan(planned(*overrides, *text.split()))["fits"], text


# The configurations of three published models (Qwen2.5-1.5B, Llama-3.2-1B and Llama-3.1-8B), and the GB of a GPU.
QWEN = {"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}  # fmt: skip
LLAMA_1B = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True}  # fmt: skip
LLAMA_8B = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}  # fmt: skip
PUBLISHED = [
    (QWEN, 24, 1_543_714_304, ["gpus=1 deepspeed=zero3_offload", "gpus=1 deepspeed=none lora.rank=16"], []),
    (LLAMA_1B, 80, 1_235_814_400, [], []),
    (LLAMA_8B, 80, 8_030_261_248, ["gpus=1 deepspeed=zero3_offload", "gpus=1 deepspeed=none lora.rank=16"], []),
]


def adopting(folder, shape: dict, gigabytes: int) -> list[str]:
    described = shape | {"hidden_act": "silu", "max_position_embeddings": 131072}
    (folder / "config.json").write_text(json.dumps(described))
    return ["experiment=align", f"model.pretrained='{folder}'", f"gpu_memory_gb={gigabytes}"]


@pytest.mark.parametrize(("shape", "gigabytes", "parameters", "in_full", "with_adapters"), PUBLISHED)
def test_a_published_model_fits_its_gpu_by_what_the_plan_proposes(
    tmp_path, shape, gigabytes, parameters, in_full, with_adapters
):
    given = adopting(tmp_path, shape, gigabytes)
    for more, suggestions in (([], in_full), (["lora.rank=16"], with_adapters)):
        plan = make_plan(planned(*given, *more))
        assert plan["shape"]["context_length"] == 131072, "rows are cut to data.max_tokens, not to this"
        assert plan["parameters"]["policy"] == parameters
        assert plan["suggestions"] == suggestions and plan["fits"] == (not suggestions)
        for text in suggestions:
            assert make_plan(planned(*given, *more, *text.split()))["fits"], text


def test_flops_and_hours_by_hand_and_pretraining_by_6nd():
    shape = make_shape(ModelConfig(n_layer=2, n_head=2, width=8, bias=False), 10)
    # matrices of a block: 4 * 64 + 2 * 8 * 32 = 768; 2 * (2 * 768 + 80) = 3232 a token, and 4 * 2 * 8 * 16 for attention
    assert formulas.shape_flops(shape, 1, 16) == 3232 + 1024
    assert formulas.shape_flops(shape, 3, 16, scalar=True) == 3 * (2 * (1536 + 8) + 1024)
    assert formulas.shape_flops(shape, 3, 16, logits=1) == 3 * (2 * 1536 + 1024) + 160
    assert formulas.TRAINING_PASSES * formulas.shape_flops(shape, 1, 16) == 3 * 4256
    # a prompt of 1 and an answer of 2: tokens see 1, 2 and 3 positions; 2 tokens go through the unembedding
    assert formulas.shape_flops(shape, 3, 2, logits=2) == 3 * 3072 + 4 * 2 * 8 * (1 + 2 + 3) + 2 * 160
    # at 1 byte a second, 6 times: the weights, and keys and values of 2 layers of width 8 and 4 + 3 tokens on average
    slow = formulas.decode_seconds(shape, 1, 4, 6, "fp32", flops=1e12, bandwidth=1.0)
    assert slow == pytest.approx(6 * (4 * shape.language_model + 4 * 2 * 2 * 8 * 7), abs=1e-6)
    config = planned("model=gpt3-175b", "gpus=1000", "pretrain.tokens=300_000_000_000", "mfu=0.5", "peak_tflops=100")
    times = make_times(config)["pretrain"]
    # Brown et al. 2020, table D.1: 3.14e23 FLOPs, from 6 N D without attention over positions, which is 3% here
    assert times["flops"] == pytest.approx(3.14e23, rel=0.05)
    assert times["hours"] == pytest.approx(times["flops"] / (1000 * 50e12) / 3600)


def test_times_of_ppo_ptx_and_of_the_rows_that_fit():
    node = ["model=gpt3-xl", "deepspeed=zero3", "gpus=8"]
    config, mixed = planned(*node, "gpu_memory_gb=80"), planned(*node, "gpu_memory_gb=80", "ppo.ptx_coef=27.8")
    plain, more = (make_times(one)["ppo update"]["flops"] for one in (config, mixed))
    shape, blocks = planned_shape(config), 8 * config.ppo.episodes  # 8 blocks per episode, one epoch
    extra = formulas.shape_flops(shape, blocks * shape.context_length, shape.context_length)
    assert more - plain == pytest.approx(3 * extra)
    fewer, many = (make_times(one)["ppo rollout"]["hours"] for one in (planned(*node, "gpu_memory_gb=24"), config))
    assert fewer > many, "fewer rows at a time"


def test_gemmas_activation_has_another_name():
    from transformers import Gemma2Config

    assert formulas.shape_of_config(Gemma2Config()).mlp == "swiglu"


def test_defaults_are_the_papers_and_any_experiment_can_be_planned():
    assert planned().ppo.episodes == 256_000
    for name in ("gold", "real"):
        plan = make_plan(planned(f"experiment={name}", "deepspeed=zero1", "gpus=2"))
        assert plan["fits"] and plan["shape"]["vocab_size"] in (1024, 4096)
        assert f"{'ppo in all':<24}under a minute" in plan_lines(plan)


def test_what_use_costs_by_hand():
    overrides = ["model=gpt2", "pretrain.tokens=1_000_000_000", "served_tokens=1e12", "mfu=0.5", "peak_tflops=100"]
    config = planned(*overrides, "gpu_watts=400", "gpu_price=2", "energy_price=0.5")
    row = make_plan(config)["served"]["this model"]
    flops = 6 * 124_439_808 * 1e9 + 2 * 124_439_808 * 1e12
    hours = flops / 0.5e14 / 3600
    assert row["gpu_hours"] == pytest.approx(hours) and row["kwh"] == pytest.approx(0.4 * hours)
    assert row["cost"] == pytest.approx(2 * hours + 0.5 * 0.4 * hours)
    assert any("in use" in line and "cheapest" in line for line in plan_lines(make_plan(config)))
    with pytest.raises(UserError, match=r"energy_price=0\.5: no power is known"):
        planned(*overrides, "energy_price=0.5")


ROOT = Path(__file__).parents[2]


def run(capsys, *overrides: str) -> str:
    stage.run(compose.compose_config(list(overrides), "plan"))
    return capsys.readouterr().out


def test_the_table_shows_what_the_plan_holds(capsys, tmp_path):
    out = run(capsys, "model=gpt3-xl", "deepspeed=zero3", "gpus=8", f"out={tmp_path}")
    plan = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert "1,315,723,264 parameters" in out and "approach 3" in out
    lines = {line[:12].strip(): line.split() for line in out.splitlines() if line.endswith(("  yes", "  NO"))}
    assert list(lines) == list(plan["bytes"])
    weights = lines["pretrain"][2]
    assert weights == f"{plan['bytes']['pretrain']['weights'] / 1e9:.2f}" == "0.33"  # 2 * 1.3157e9 / 8
    assert out.splitlines()[-2].startswith("fits: " if plan["fits"] else "does not fit: ")


def test_a_plan_is_not_overwritten_unasked(capsys, tmp_path):
    path = tmp_path / "a" / "mine.json"
    run(capsys, f"out={path}")
    with pytest.raises(UserError, match=r"mine\.json: exists: .*overwrite=true"):
        run(capsys, f"out={path}")
    assert f"written to {path}" in run(capsys, f"out={path}", "overwrite=true", "gpus=3")
    assert json.loads(path.read_text(encoding="utf-8"))["setup"]["gpus"] == 3
    assert [entry.name for entry in path.parent.iterdir()] == ["mine.json"]
