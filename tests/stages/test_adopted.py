"""Pretrained models of many architectures through sft -> reward -> ppo, natively where ours covers them; models named by hub ids."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import constants

import rlhf
from rlhf.cli import main
from rlhf.errors import UserError
from rlhf.model import GPTForCausalLM
from rlhf.model.adopt import adopt
from rlhf.model.checkpoint import read_checkpoint
from rlhf.stages import reward
from rlhf.training.setup import load_policy
from tests.model.chats import make_tokenizer
from tests.model.checkpoints import CHECKPOINTS, GROUPED, WIDE
from tests.stages.conftest import Run, run_ranks
from tests.stages.sharding_ranks import draw_head_alike

LONG = {"vocab_size": 410, "max_position_embeddings": 96}
KINDS_OF_LAYER = ["sliding_attention", "full_attention"]
# What ours does not express: class of the configuration and its fields.
OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "opt": (transformers.OPTConfig, {**WIDE, **LONG, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "phi": (transformers.PhiConfig, {**WIDE, **LONG}),
    "gemma3": (transformers.Gemma3TextConfig, {**GROUPED, **LONG, "head_dim": 8, "sliding_window": 16, "layer_types": KINDS_OF_LAYER}),
    "gemma2": (transformers.Gemma2Config, {**GROUPED, **LONG, "head_dim": 8, "final_logit_softcapping": 2.0}),
    "falcon": (transformers.FalconConfig, {**WIDE, **LONG, "alibi": False}),
    "bloom": (transformers.BloomConfig, {"vocab_size": 410, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "mixtral": (transformers.MixtralConfig, {**GROUPED, **LONG, "num_local_experts": 4, "sliding_window": None}),
}  # fmt: skip
SMALL = [
    "tracking=jsonl", "tracking.log_every=1", "device=cpu", "threads=1", "sft.epochs=1", "sft.batch_size=4", "reward.batch_prompts=2",
    "reward.calibration_samples=4", "rollout.max_new_tokens=8", "ppo.episodes=8", "ppo.episodes_per_update=4",
    "ppo.minibatches=2", "ppo.epochs=1", "ppo.eval_prompts=2", "data.dev=0.2", "data.test=0.2",
]  # fmt: skip


def save(folder: Path, name: str, scale: float = 1.0) -> Path:
    """A random model of that architecture with a chat tokenizer whose pad token is its end token. scale: of the unembedding."""
    kind, fields = {**CHECKPOINTS, **OTHERS}[name]
    long = {} if name in OTHERS else {"vocab_size": 410, "max_position_embeddings": 96, "sliding_window": 96}
    if "n_positions" in fields:
        long = {"vocab_size": 410, "n_positions": 96}
    torch.manual_seed(1)
    tokenizer = make_tokenizer("chatml")
    ids = {"bos_token_id": 0, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = transformers.AutoModelForCausalLM.from_config(kind(**{**fields, **long, **ids}))
    model.get_output_embeddings().weight.data.mul_(scale)
    model.save_pretrained(folder)
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
    return [value for _, value in run.values(stage, name)]


# They differ from those that are not long in what tests/model covers: tensors' names, and the logits of transformers' classes.
MORE = [pytest.param(one, marks=pytest.mark.long) for one in ("gpt_neox", "opt", "phi", "gemma3", "falcon", "mixtral")]


@pytest.mark.parametrize("name", ["openai-gpt", "gemma2", "bloom", *MORE])
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


TAUGHT = [
    "sft.lr=0.01", "sft.epochs=12", "sft.dropout=0", "ppo.lr=1e-4", "rejection.prompts=4", "rejection.samples=2",
    "rejection.epochs=1", "dpo.batch_prompts=2", "evaluate.prompts=2", "evaluate.samples=1", "evaluate.best_of=2",
]  # fmt: skip
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the 3 cat?"}]


@pytest.mark.parametrize(("name", "more"), [
    ("qwen2", []),
    pytest.param("llama", ["model.native=false", "lora.rank=8", "lora.alpha=32", "sft.epochs=60"], marks=pytest.mark.long),
    pytest.param("gemma3", ["sft.lr=0.02", "sft.epochs=100"], marks=pytest.mark.long),
    pytest.param("llama", ["lora.rank=8", "lora.alpha=32", "lora.share_trunk=true"], marks=pytest.mark.long),
])  # fmt: skip
def test_every_command_takes_an_adopted_model(tmp_path, labels, capsys, name, more):
    """As our GPT, as transformers' class, with adapters: trained until it gives, in every command, the answer that dialogues teach."""
    lora = "lora.rank=8" in more
    save(tmp_path / "hf", name, scale=30.0 if lora else 1.0)  # beside a small frozen unembedding adapters learn little
    # whose answers it learns, and they fit
    taught = [f"data.prompts={labels[0].partition('=')[2]}", "rollout.max_new_tokens=12"]
    run = align(tmp_path, labels, *TAUGHT, *taught, *more)
    assert all((run.folder / stage / "adapters").is_dir() == lora for stage in ("sft", "reward", "ppo"))
    for stage in ("rejection", "dpo", "evaluate"):
        run.stage(stage)
    results = run.results()
    assert set(results["baselines"]) == {"rejection", "dpo"} and results["ended"]["sft"] == 1.0

    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": QUESTION}) + "\n")
    asked = [f"data.prompts='{tmp_path}/prompts.jsonl'", "rollout.max_new_tokens=8"]

    def call(command: str, *more: str) -> str:
        capsys.readouterr()
        main([command, "run=run", f"runs_dir='{tmp_path}'", *more])
        return capsys.readouterr().out

    said = ("chat.system=Be brief.", "chat.greedy=true", "rollout.max_new_tokens=8", "--", QUESTION[1]["content"])
    answer, out = call("chat", *said).strip(), f"generate.out='{tmp_path}/answers.jsonl'"
    call("generate", *asked, "generate.greedy=true", "generate.logprobs=true", out)
    [row] = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    # Of the few demonstrations this Gemma learns the answers, but not which one a system prompt asks for.
    assert row["responses"] == [answer] and answer in ["A cat?", "On the mat."][: 1 + (name == "gemma3")]
    call(
        "sample", *asked, "data.dev=0", "data.test=0", "sample.responses=2", "sample.stage=sft", "sample.temperature=3"
    )
    assert "Be brief." in (tmp_path / "run" / "sample" / "tasks.jsonl").read_text()
    plan = call("plan", f"model.pretrained='{tmp_path}/hf'", "rollout.max_new_tokens=8", "+experiment=align-laptop")
    assert "trained: lora.rank=16" in plan
    assert [line.split()[0] for line in plan.splitlines() if line.endswith("  yes")] == ["sft", "reward", *3 * ["ppo"]]

    call("export", f"export.out='{tmp_path}/policy'")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "policy").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "policy")
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    drawn = theirs.generate(**prompt, do_sample=False, max_new_tokens=8)[0, prompt["input_ids"].shape[1] :]
    assert drawn.tolist() == row["token_ids"][0]

    call("export", "export.stage=reward", f"export.out='{tmp_path}/judge'")
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "judge").eval()
    assert theirs.config.model_type == judge.config.model_type  # Gemma3ForCausalLM, Gemma3TextForSequenceClassification
    said = [{"role": "assistant", "content": text} for text in ("On the mat.", "No 3")]
    chats = [tokenizer.apply_chat_template([*QUESTION, turn], return_tensors="pt", return_dict=True) for turn in said]
    with torch.no_grad():
        logits = [judge(input_ids=chat["input_ids"][:, :-1]).logits.item() for chat in chats]
    scores = rlhf.load(tmp_path / "run", "cpu").score([QUESTION] * 2, [t["content"] for t in said])
    assert scores == pytest.approx([logit + judge.config.score_offset for logit in logits], abs=1e-4)


@pytest.mark.long  # two processes import DeepSpeed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("zero", ["zero2", "zero3"])
@pytest.mark.parametrize(("name", "native"), [("gpt2", "auto"), ("llama", "auto"), ("llama", "false")])
def test_two_processes_under_zero_compute_what_one_does(tmp_path, labels, monkeypatch, name, native, zero):
    save(tmp_path / "hf", name)
    monkeypatch.setattr(reward, "make_model", draw_head_alike)
    alone = align(tmp_path, labels, f"model.native={native}", "sft.dropout=0")
    pair = alone.copy(tmp_path, "sft", zero)
    words = " ".join(pair.words(f"deepspeed={zero}", "sharding.persistence_threshold=200"))
    run_ranks(
        "sharding_ranks", 2, f"{tmp_path}/held.json", *(f"{stage}:0:{words}" for stage in ("sft", "reward", "ppo"))
    )
    for stage, metric in {"sft": "sft/loss", "reward": "reward/loss", "ppo": "loss/value_avg"}.items():
        wanted = metrics(alone, stage, metric)
        assert wanted and metrics(pair, stage, metric) == pytest.approx(wanted, abs=1e-3), stage
    assert isinstance(load_policy(pair.folder / "ppo" / "model"), GPTForCausalLM) == (native == "auto")


@pytest.mark.parametrize("native", ["auto", "false"])
def test_pretraining_goes_on_with_a_corpus(tmp_path, native):
    save(tmp_path / "hf", "llama")
    (tmp_path / "corpus.txt").write_text("The cat sat on the mat. " * 800)
    data = [f"model.pretrained='{tmp_path}/hf'", f"model.native={native}", f"data.corpus='{tmp_path}/corpus.txt'"]
    budget = ["pretrain.tokens=4096", "pretrain.global_batch_tokens=384", "pretrain.warmup_tokens=384"]
    run = Run(tmp_path, "run", [*SMALL, *data, *budget, "pretrain.lr=1e-2"])
    run.stage("tokenizer")
    policy = load_policy(run.stage("pretrain") / "model")
    assert isinstance(policy, GPTForCausalLM) == (native == "auto")
    losses = metrics(run, "pretrain", "pretrain/loss")
    assert abs(losses[0] - 6) < 0.5 and losses[-1] < losses[0] - 1 and len(losses) == 10  # ln 410; 4096 / 384
    assert (run.folder / "pretrain" / "adopted.json").is_file()


@pytest.mark.parametrize(("arguments", "told"), [
    ("sft model={folder}", "model={folder}: names a shape to pretrain, such as gpt2: give model.pretrained={folder}"),
    ("sft model.pretrained={folder}", "add it to `rlhf tokenizer` and `rlhf pretrain`, which run first, or to `rlhf pipeline`"),
    ("sft parents.pretrain={folder}", "neither a run nor a stage folder: give model.pretrained={folder} instead"),
    ("pretrain model.pretrained={folder} model.n_layer=3", "model.n_layer: a pretrained model has a shape and a tokenizer"),
    ("tokenizer model.pretrained=./none", "no such file or folder: give a hub id, a folder or a .gguf file"),
    ("sft tokenizer={folder}", "a pretrained tokenizer comes with its model, by model.pretrained=…"),
    ("tokenizer model.pretrained={folder}/config.json", "is one file of a model: give its folder, {folder}"),
    ("tokenizer model.pretrained={folder}/stage", "no config.json in it: give {folder}/stage/model"),
    ("tokenizer model.pretrained={folder}/adapter", "adapters without adapter_model.safetensors or their model's name"),
    ("tokenizer model.pretrained={folder}/bert", "a bert writes no text: give a causal language model, or use this one as reward "
                                                 "model: reward.model={folder}/bert"),
])  # fmt: skip
def test_every_wrong_way_to_name_a_model_says_what_works(tmp_path, refused, arguments, told):
    for name, config in ((".", {}), ("stage/model", {}), ("bert", {"model_type": "bert"})):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    said = refused(*arguments.format(folder=tmp_path).split(), f"runs_dir={tmp_path}/runs")
    assert told.format(folder=tmp_path) in said and not (tmp_path / "runs").exists(), "nothing has started"


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_hub_id_with_a_revision(tmp_path, monkeypatch):
    """This process is offline (conftest.py)."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    repository, folder = tmp_path / "cache" / "models--me--tiny", save(tmp_path / "tiny", "llama")
    shutil.copytree(folder, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "v2").write_text(COMMIT)
    kept = adopt("me/tiny@v2", say=[].append).record
    assert kept["revision"] == COMMIT and kept["source"] == "me/tiny@v2"
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert kept["sha256"] == {"model.safetensors": weights}
    for wrong in ("me/tiny@v3", "me/other"):  # neither is in the cache
        with pytest.raises(UserError, match=f"^model.pretrained={wrong[:7]}.*: not readable from the hub") as told:
            read_checkpoint(wrong)
        assert "\n" not in str(told.value)
