"""Pretrained models of many architectures through sft -> reward -> ppo, natively where ours covers them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rlhf.cli import main
from rlhf.model import GPTForCausalLM
from rlhf.training.setup import load_policy
from tests.model.chats import make_tokenizer
from tests.model.checkpoints import CHECKPOINTS, GROUPED, WIDE
from tests.stages.conftest import Run

LONG = {"vocab_size": 410, "max_position_embeddings": 96}
# What ours does not express: class of the configuration and its fields.
OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "opt": (transformers.OPTConfig, {**WIDE, **LONG, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "phi": (transformers.PhiConfig, {**WIDE, **LONG}),
    "gemma3": (transformers.Gemma3TextConfig, {**GROUPED, **LONG, "head_dim": 8, "sliding_window": 16}),
    "gemma2": (transformers.Gemma2Config, {**GROUPED, **LONG, "head_dim": 8, "final_logit_softcapping": 2.0}),
    "falcon": (transformers.FalconConfig, {**WIDE, **LONG, "alibi": False}),
    "bloom": (transformers.BloomConfig, {"vocab_size": 410, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "mixtral": (
        transformers.MixtralConfig,
        {**GROUPED, **LONG, "num_local_experts": 4, "sliding_window": None},
    ),
}
SMALL = [
    "tracking=jsonl", "tracking.log_every=1", "device=cpu", "threads=1", "sft.epochs=1", "sft.batch_size=4", "reward.batch_prompts=2",
    "reward.calibration_samples=4", "rollout.max_new_tokens=8", "ppo.episodes=8", "ppo.episodes_per_update=4",
    "ppo.minibatches=2", "ppo.epochs=1", "ppo.eval_prompts=2", "data.dev=0.2", "data.test=0.2",
]  # fmt: skip


def save(folder: Path, name: str) -> Path:
    """A random model of that architecture with a chat tokenizer whose pad token is its end token."""
    kind, fields = {**CHECKPOINTS, **OTHERS}[name]
    long = {} if name in OTHERS else {"vocab_size": 410, "max_position_embeddings": 96, "sliding_window": 96}
    if "n_positions" in fields:
        long = {"vocab_size": 410, "n_positions": 96}
    torch.manual_seed(1)
    tokenizer = make_tokenizer("chatml")
    ids = {"bos_token_id": 0, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    transformers.AutoModelForCausalLM.from_config(kind(**{**fields, **long, **ids})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that name a few demonstrations, every other one a dialogue with a system prompt, and comparisons."""
    folder = tmp_path_factory.mktemp("labels")
    rows: dict[str, list[dict[str, Any]]] = {"demonstrations": [], "comparisons": []}
    for i in range(12):
        asked = [{"role": "user", "content": f"Where is the {i} cat?"}]
        before = [{"role": "system", "content": "Be brief."}, *asked, {"role": "assistant", "content": "A cat?"}]
        answer = {"role": "assistant", "content": "On the mat." * (1 + i % 2)}
        rows["demonstrations"].append({"messages": [*(before if i % 2 else []), *asked, answer]})
        rows["comparisons"].append({"prompt": asked, "chosen": [answer], "rejected": [answer | {"content": f"No {i}"}]})
    for kind, records in rows.items():
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    return [f"data.{kind}='{folder}/{kind}.jsonl'" for kind in rows]


def align(folder: Path, labels: list[str], *more: str) -> Run:
    """A run that adopts the model in folder/hf and aligns it."""
    run = Run(folder, "run", [*SMALL, *labels, f"model.pretrained='{folder}/hf'", *more])
    for stage in ("tokenizer", "pretrain", "sft", "reward", "ppo"):
        run.stage(stage)
    return run


def metrics(run: Run, stage: str, name: str) -> list[float]:
    rows = [json.loads(line) for line in (run.folder / stage / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gpt_neox", "openai-gpt", *OTHERS])
def test_an_adopted_model_goes_through_every_stage(tmp_path, labels, name):
    save(tmp_path / "hf", name)
    run = align(tmp_path, labels)
    policy = load_policy(run.folder / "ppo" / "model")
    record = json.loads((run.folder / "pretrain" / "adopted.json").read_text())
    assert record["native"] == isinstance(policy, GPTForCausalLM) == (name not in OTHERS)
    assert list(record["sha256"]) == ["model.safetensors"]
    losses = metrics(run, "sft", "sft/loss")
    assert losses and all(abs(loss - 6) < 0.5 for loss in losses)  # ln 410
    assert len(metrics(run, "ppo", "objective/kl")) == 2
    assert metrics(run, "ppo", "objective/kl")[0] == pytest.approx(0, abs=1e-4)
    base = load_policy(run.folder / "sft" / "model").state_dict()
    assert any(not torch.equal(value, base[key]) for key, value in policy.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("sft model={folder}", "model={folder}: model=… names a shape to pretrain, such as gpt2: a pretrained model is named "
                               "with model.pretrained={folder}"),
        ("tokenizer model=someone/model", "a pretrained model is named with model.pretrained=someone/model"),
        ("sft model_name_or_path={folder}", "a pretrained model is named with model.pretrained={folder}, in `rlhf pipeline`"),
        ("sft model.name_or_path=x", "a pretrained model is named with model.pretrained=x"),
        ("sft model.pretrained={folder}", "add it to `rlhf tokenizer` and `rlhf pretrain`, which run first, or to `rlhf pipeline`"),
        ("sft parents.pretrain={folder}", "a pretrained model, and no run: adopt it with `rlhf tokenizer model.pretrained={folder}`"),
        ("pretrain model.pretrained={folder} model.n_layer=3", "model.n_layer: a pretrained model has a shape and a tokenizer"),
        ("pretrain model.pretrained={folder} model=gpt2", "model: a pretrained model has a shape and a tokenizer of its own"),
        ("tokenizer model.pretrained={folder} tokenizer.vocab_size=900", "tokenizer.vocab_size: a pretrained model has a shape"),
        ("pretrain model.pretrained={folder} pretrain.tokens=9", "pretraining goes on with text only: set data.corpus too"),
        ("tokenizer model.pretrained=./none", "no such file or folder: give a hub id, a folder or a .gguf file"),
        ("pretrain model.native=perhaps", "model.native=perhaps: want auto, true or false"),
    ],
)  # fmt: skip
def test_every_wrong_way_to_name_a_model_says_what_works(tmp_path, capsys, arguments, told):
    (tmp_path / "config.json").write_text("{}")
    command, *overrides = arguments.format(folder=tmp_path).split()
    with pytest.raises(SystemExit) as ended:
        main([command, *overrides, f"runs_dir={tmp_path}/runs"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and told.format(folder=tmp_path) in said and said.count("\n") == 1
