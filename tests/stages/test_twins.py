"""The gold pipeline with the blocks of GPT-1, GPT-3, PaLM, LLaMA and the Switch Transformer, in a few steps each."""

import math

import pytest
import torch

from rlhf.config import compose
from rlhf.engines.sampling import sample
from rlhf.planning.shapes import make_shape
from rlhf.runs.folders import read_stage
from rlhf.runs.run_files import read_jsonl
from rlhf.training.setup import load_policy

TWINS = {
    "gpt1-tiny": {"block": "post", "positions": "learned"},
    "gpt3-tiny": {"window": 32, "block": "pre"},
    "palm-tiny": {"block": "one_norm", "n_kv_head": 1},
    "llama-tiny": {"norm": "rmsnorm", "tie_word_embeddings": False},
    "switch-tiny": {"experts": 4, "mlp": "relu"},
}
# A few steps per stage. An update of PPO whose sampled log-probs or KL are off refuses to train.
SHORT = [
    "pretrain.tokens=16_384", "pretrain.eval_sequences=8", "pretrain.optimizer=adamw", "sft.epochs=1", "sft.batch_size=128",
    "gold.comparison_prompts=12", "gold.comparison_test_prompts=6", "reward.calibration_samples=8", "reward.audit=0",
    "ppo.episodes=32", "ppo.episodes_per_update=16", "ppo.minibatches=2", "ppo.epochs=1", "ppo.critic_warmup_updates=0",
    "ppo.eval_prompts=4", "kl.target=null", "lora.alpha=8",
]  # fmt: skip


def test_twins_have_the_demos_number_of_parameters():
    sizes = {name: make_shape(compose.compose_config([f"model={name}"]).model, 1024) for name in ("tiny", *TWINS)}
    wanted = sizes.pop("tiny").language_model
    assert {name for name, shape in sizes.items() if abs(shape.language_model / wanted - 1) > 0.01} == set()
    names = {path.stem for path in (compose.conf_dir() / "model").glob("*-tiny.yaml")}
    assert names == set(TWINS)


@pytest.mark.parametrize("twin", TWINS)
def test_the_gold_pipeline_passes_with_each_twin(twin, copy_until):
    run = copy_until("pretrain")
    overrides = [f"model={twin}", *SHORT]
    for stage in ("pretrain", "sft", "label", "reward", "ppo"):
        run.stage(stage, *overrides)
    for stage in ("pretrain", "sft", "reward", "ppo"):
        assert read_stage(run.folder / stage)["status"] == "complete"
        values = [
            v for row in read_jsonl(run.folder / stage / "metrics.jsonl") for v in row.values() if isinstance(v, float)
        ]
        assert values and all(map(math.isfinite, values))
    model = load_policy(run.folder / "ppo" / "model")
    assert {name: getattr(model.config, name) for name in TWINS[twin]} == TWINS[twin]
    rows = [row for row in read_jsonl(run.folder / "ppo" / "metrics.jsonl") if "objective/kl" in row]
    assert abs(rows[0]["objective/kl"]) < 1e-4 < abs(rows[-1]["objective/kl"])  # the first update is at the SFT model
    with torch.no_grad():
        assert len(sample(model, [[5, 6, 7]], max_new_tokens=3, eos_token_id=None, pad_token_id=0).responses[0]) == 3
