import math
import shutil
from types import SimpleNamespace

import pytest
import torch

from rlhf.config.compose import compose_config, conf_dir
from rlhf.data.corpus import PackedCorpus
from rlhf.engines.sampling import sample
from rlhf.planning.formulas import make_shape
from rlhf.runs.run_files import read_jsonl
from rlhf.stages.pretrain import load_or_pack, pretrain_schedule


def test_the_schedules_of_the_papers():
    settings = ["pretrain.global_batch_tokens=1024", "pretrain.warmup_tokens=102_400"]  # 100 steps
    gpt3 = pretrain_schedule(compose_config([*settings, "pretrain.decay_fraction=0.8"]), 1000)
    # half of the cosine from step 100 to 800 is at 450: 0.1 + 0.9 / 2
    assert [gpt3(step) for step in (0, 49, 100, 450, 800, 999)] == pytest.approx([0.01, 0.5, 1.0, 0.55, 0.1, 0.1])
    gpt1 = pretrain_schedule(compose_config([*settings, "pretrain.final_lr_fraction=0"]), 1000)
    assert [gpt1(step) for step in (100, 550, 1000)] == pytest.approx([1.0, 0.5, 0.0])
    transformer = pretrain_schedule(compose_config([*settings, "pretrain.schedule=inverse_sqrt"]), 1000)
    assert [transformer(step) for step in (0, 99, 399, 999)] == pytest.approx([0.01, 1.0, 0.5, math.sqrt(0.1)])


def test_a_mixture_by_weight(gold_run, tmp_path, capsys):
    rows = (gold_run.folder / "world" / "corpus.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("large.jsonl", rows[:1500]), ("small.jsonl", rows[1500:1560])):
        (tmp_path / name).write_text("".join(part))
    settings = [
        f"data.corpus=['{tmp_path}/large.jsonl','{tmp_path}/small.jsonl']", "data.corpus_weights=[3,1]", "pretrain.tokens=16384",
        "pretrain.eval_sequences=4", "model.n_layer=1", "model.width=16", "data.held_out=0.1",
    ]  # fmt: skip
    whole = gold_run.copy(tmp_path, "pretrain", "whole")
    whole.stage("pretrain", *settings)
    told = capsys.readouterr().out
    sources = PackedCorpus.load(whole.folder / "pretrain" / "corpus").meta["sources"]
    assert [source["drawn"] for source in sources] == [12288, 4096] and sources[1]["epochs"] > 1
    for source in sources:
        assert f"{source['name']}: {source['share']:.1%} of them, {source['epochs']:.2f} epochs of its" in told


def test_a_packed_corpus_that_was_changed_is_packed_again(gold_run, tmp_path):
    folder = gold_run.folder / "pretrain" / "corpus"
    shutil.copytree(folder, tmp_path / "corpus")
    data = bytearray((folder / "train.bin").read_bytes())
    data[100] ^= 1
    (tmp_path / "corpus" / "train.bin").write_bytes(data)
    told: list[str] = []
    stage = SimpleNamespace(folder=tmp_path, say=told.append, config=gold_run.config())
    load_or_pack(stage, gold_run.tokenizer(), 64)
    assert (tmp_path / "corpus" / "train.bin").read_bytes() == (folder / "train.bin").read_bytes()
    assert len(told) == 1 and "packing it again" in told[0]


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
    "ppo.eval_prompts=4", "kl.target=null",
]  # fmt: skip


QUICKLY = ("switch-tiny",)  # palm-tiny's block and decoding: tests/model and tests/gpu


def test_twins_have_the_demos_number_of_parameters():
    sizes = {name: make_shape(compose_config([f"model={name}"]).model, 1024) for name in ("tiny", *TWINS)}
    wanted = sizes.pop("tiny").language_model
    assert {name for name, shape in sizes.items() if abs(shape.language_model / wanted - 1) > 0.01} == set()
    names = {path.stem for path in (conf_dir() / "model").glob("*-tiny.yaml")}
    assert names == set(TWINS)


@pytest.mark.parametrize("twin", [pytest.param(t, marks=[] if t in QUICKLY else pytest.mark.long) for t in TWINS])
def test_the_gold_pipeline_passes_with_each_twin(twin, copy_until):
    run = copy_until("pretrain")
    overrides = [f"model={twin}", *SHORT]
    for stage in ("pretrain", "sft", "label", "reward", "ppo"):
        run.stage(stage, *overrides)
    for stage in ("pretrain", "sft", "reward", "ppo"):
        assert run.record(stage)["status"] == "complete"
        rows = list(read_jsonl(run.folder / stage / "metrics.jsonl"))
        assert rows and all(math.isfinite(v) for row in rows for v in row.values() if isinstance(v, float))
    model, kls = run.policy("ppo"), run.values("ppo", "objective/kl")
    assert {name: getattr(model.config, name) for name in TWINS[twin]} == TWINS[twin]
    assert abs(kls[0][1]) < 1e-4 < abs(kls[-1][1])  # the first update is at the SFT model
    with torch.no_grad():
        assert len(sample(model, [[5, 6, 7]], max_new_tokens=3, eos_token_id=None, pad_token_id=0).responses[0]) == 3
