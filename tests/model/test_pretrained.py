"""Checkpoints as others save them, adopted: small random models with every kind of tokenizer, and SmolLM2; loaded whole or not at all."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from rlhf.data.chat_template import encode_prompt, end_ids
from rlhf.data.tokenizer import CHAT_TEMPLATE, load_tokenizer
from rlhf.engines.choosing import Choice
from rlhf.engines.running import Response, RunningBatch
from rlhf.engines.sampling import sample
from rlhf.errors import UserError
from rlhf.model.adopt import adopt, load_weights
from rlhf.model.checkpoint import read_checkpoint
from rlhf.model.classifier import load_reward_model
from rlhf.model.fused_loss import response_logprobs
from rlhf.model.gpt import GPTConfig, GPTForCausalLM
from rlhf.model.heads import RewardModel
from rlhf.model.interface import lm
from rlhf.training.setup import load_policy
from tests.model.chats import make_tokenizer
from tests.model.checkpoints import make_checkpoint

TOKENS = torch.randint(0, 400, (2, 20), generator=torch.Generator().manual_seed(0))


def save(folder: Path, name: str = "llama", tokenizer: str = "chatml", **overrides) -> Path:
    """A checkpoint's folder: a vocabulary of 410 rows, more than the tokenizer has."""
    made = make_tokenizer(tokenizer)
    ids = {"bos_token_id": made.bos_token_id, "eos_token_id": made.eos_token_id, "pad_token_id": made.pad_token_id}
    make_checkpoint(name, **{"vocab_size": 410, **ids, **overrides}).save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


def test_a_checkpoint_is_described_before_it_is_loaded(tmp_path):
    save(tmp_path)
    (tmp_path / "README.md").write_text("---\ntags: [x]\nlicense: apache-2.0\n---\n# A model\n")
    found = read_checkpoint(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert (found.licence, found.dtype, found.context) == ("apache-2.0", "float32", 48)
    assert found.describe().endswith("licence apache-2.0; runs natively")
    (tmp_path / "README.md").write_text("---\nlicense:\ntags: [x]\n---\n")
    assert read_checkpoint(tmp_path).licence is None
    [(name, digest)] = adopt(tmp_path, say=[].append).record["sha256"].items()
    assert name == "model.safetensors" and len(digest) == 64


def test_rows_are_cut_to_what_a_model_without_its_window_sees(tmp_path):
    adopted = adopt(save(tmp_path, "mistral", sliding_window=20), say=[].append)
    assert adopted.record["native"] and adopted.record["context"] == adopted.tokenizer.model_max_length == 20


@pytest.mark.parametrize("name", ["gpt2", "openai-gpt", "llama-tied", "mistral", "qwen2", "qwen3", "gpt_neox"])
def test_a_covered_architecture_runs_natively_with_the_same_logits(tmp_path, name):
    save(tmp_path, name)
    said: list[str] = []
    adopted = adopt(tmp_path, say=said.append)
    assert type(adopted.model) is GPTForCausalLM and adopted.record["native"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.allclose(adopted.model(TOKENS).logits, theirs(TOKENS).logits, rtol=0, atol=1e-4)
    assert len(said) == 1 and json.loads(json.dumps(adopted.record)) == adopted.record
    # pad is the end token here: rows end where they end
    prompts = [encode_prompt(adopted.tokenizer, text) for text in ("a", "the cat sat")]
    ends = end_ids(adopted.tokenizer)
    settings = {"max_new_tokens": 6, "eos_token_id": ends, "pad_token_id": adopted.tokenizer.pad_token_id, "seed": 1}
    drawn = [sample(model, prompts, **settings) for model in (adopted.model, theirs)]
    assert drawn[0].responses == drawn[1].responses
    assert torch.allclose(drawn[0].logprobs[drawn[0].mask], drawn[1].logprobs[drawn[1].mask], atol=1e-4)
    one, batch = Response(prompts[1], Choice(), 1, 1, 6, frozenset(ends)), RunningBatch(theirs, 1)
    batch.advance([one])
    while not one.finished:
        batch.advance()
    assert one.tokens == drawn[0].responses[1]
    for part in (adopted.model, adopted.tokenizer):  # as a run's model folder
        part.save_pretrained(tmp_path / "again")
    again = adopt(tmp_path / "again", say=said.append)
    assert again.record["native"] and "runs natively" in said[1] and "runs as" not in said[-1]
    assert type(again.model) is GPTForCausalLM and again.record["context"] == adopted.record["context"]


@pytest.mark.parametrize(("overrides", "why"), [
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type is 'linear'"),
    ({"attention_bias": True}, "attention_bias"),
])  # fmt: skip
def test_what_is_not_covered_runs_as_transformers_class_and_says_why(tmp_path, overrides, why):
    save(tmp_path, "llama", **overrides)
    said: list[str] = []
    adopted = adopt(tmp_path, say=said.append)
    assert type(adopted.model) is transformers.LlamaForCausalLM and not adopted.record["native"]
    assert any(why in line and "\n" not in line for line in said)
    with pytest.raises(UserError, match=r"model.native=true: .*use model.native=auto"):
        adopt(tmp_path, native=True, say=said.append)
    assert adopt(tmp_path, native=False, say=said.append).record["notes"][-1].endswith("model.native=false")


def test_a_conversion_with_other_logits_is_not_used(tmp_path, monkeypatch):
    save(tmp_path)
    monkeypatch.setattr("rlhf.model.adopt.TOLERANCE", -1.0)
    adopted = adopt(tmp_path, say=lambda _: None)
    assert not adopted.record["native"] and "logits of a probe batch differ by" in adopted.record["notes"][-1]


def test_several_end_tokens_and_an_end_of_turn_that_is_not_eos(tmp_path):
    save(tmp_path, "llama", "turns", tie_word_embeddings=False)
    GenerationConfig(eos_token_id=[1, 7]).save_pretrained(tmp_path)
    adopted = adopt(tmp_path, say=lambda _: None)
    turn = adopted.tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert end_ids(adopted.tokenizer) == [turn, 1, 7] == adopted.model.generation_config.eos_token_id
    adopted.tokenizer.save_pretrained(tmp_path / "again")
    assert end_ids(load_tokenizer(tmp_path / "again")) == [turn, 1, 7]


@pytest.mark.parametrize("spare", [0, 100])
def test_a_tokenizer_without_a_template_gets_ours(tmp_path, spare):
    before = len(make_tokenizer("chatml"))
    save(tmp_path, "gpt2", vocab_size=before + spare)
    (tmp_path / "chat_template.jinja").unlink()
    adopted = adopt(tmp_path, say=lambda _: None)
    assert adopted.tokenizer.chat_template == CHAT_TEMPLATE and len(adopted.tokenizer) == before + 4
    rows = max(before + spare, before + 4)
    assert adopted.model.config.vocab_size == rows == len(adopted.model.model.embed_tokens.weight)
    assert "given ours, with the new tokens <|system|>" in adopted.record["notes"][0]
    assert any("embeddings grew" in note for note in adopted.record["notes"]) == (spare == 0)
    assert adopted.record["native"] and end_ids(adopted.tokenizer) == [before + 3, 1]
    ids = encode_prompt(adopted.tokenizer, "<|end|> the cat")
    assert ids.count(before + 3) == 1 and ids[-1] == adopted.tokenizer.convert_tokens_to_ids("<|assistant|>")


def test_a_pickled_checkpoint_is_read_as_weights_only(tmp_path):
    save(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert list(adopt(tmp_path, say=lambda _: None).record["sha256"]) == ["pytorch_model.bin"]

    class Hostile:
        def __reduce__(self):
            return (open, (str(tmp_path / "owned"), "w"))

    torch.save({"x": Hostile()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="not readable weights"):
        adopt(tmp_path, say=lambda _: None)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.bool])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_weights_that_are_no_floating_point_numbers_are_refused(tmp_path, file, dtype):
    save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    weights["model.norm.weight"] = weights["model.norm.weight"].to(dtype)
    if file.endswith("bin"):
        torch.save(weights, tmp_path / file)
    else:
        save_file(weights, tmp_path / file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"model.norm.weight in {file} is .*: want floating point numbers") as error:
        adopt(tmp_path, say=lambda _: None)
    assert "\n" not in str(error.value)


def test_what_cannot_be_read_is_one_line(tmp_path):
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def refuse(said: str, **changed) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
        with pytest.raises(UserError, match=said) as error:
            adopt(tmp_path, say=lambda _: None)
        assert "\n" not in str(error.value)

    refuse("weights are missing from the file", num_hidden_layers=3)
    refuse(r"config.json says vocab_size=50,000,000, the files have", vocab_size=50_000_000, hidden_size=32)
    refuse("weights", hidden_size=16)
    refuse("weights", intermediate_size=24)
    refuse("weights are not in the model of config.json", num_hidden_layers=1)
    refuse("its logits are not finite", rms_norm_eps=float("nan"))
    refuse("quantised", quantization_config={"quant_method": "gptq", "bits": 4})
    wide = {"hidden_size": 32}
    refuse("reads more than text", model_type="gemma3", text_config=wide, vision_config=wide)
    parts = {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}}
    refuse("has an encoder", model_type="musicgen", **parts, decoder={"model_type": "musicgen_decoder"})
    refuse("code of its own", model_type="new", auto_map={"AutoConfig": "new.NewConfig"})
    refuse("no readable configuration", model_type="unheard-of")
    for source in (tmp_path / "nowhere", "./model.gguf", "some/thing/else"):
        with pytest.raises(UserError, match="no such file or folder"):
            read_checkpoint(source)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json"):
        read_checkpoint(tmp_path)
    with pytest.raises(UserError, match="not readable from the hub"):
        read_checkpoint("nobody/nothing@v1")


@torch.no_grad()
@pytest.mark.parametrize("kind", ["softcapped", "scaled", "plain"])
def test_logits_that_are_no_plain_product_come_from_the_models_own_forward(kind):
    sizes = {
        "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "num_key_value_heads": 2, "max_position_embeddings": 48,
    }  # fmt: skip
    torch.manual_seed(0)
    config = {
        "softcapped": lambda: transformers.Gemma2Config(**sizes, head_dim=8, final_logit_softcapping=1.0),
        "scaled": lambda: transformers.CohereConfig(**sizes, logit_scale=0.25),
        "plain": lambda: transformers.LlamaConfig(**sizes),
    }[kind]()
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    assert lm(model).logits_are == ("product" if kind == "plain" else "finished")
    tokens = TOKENS % 61
    kept = torch.tensor([3, 25])
    product = model.get_output_embeddings()(lm(model).hidden(tokens, kept))
    assert torch.allclose(product, lm(model).logits(tokens, kept), atol=1e-4) == (kind == "plain")
    mask = torch.ones(2, 5, dtype=torch.bool)
    logp, _ = response_logprobs(model, tokens, torch.tensor([10, 10]), mask)
    expected = torch.log_softmax(model(tokens).logits[:, 9:14], -1).gather(-1, tokens[:, 10:15, None])[..., 0]
    assert torch.allclose(logp, expected, atol=1e-5)


@pytest.mark.long  # half a minute: 135 million weights are dequantised
@torch.no_grad()
def test_smollm2_from_its_gguf_file(smollm2, tmp_path):
    said: list[str] = []
    adopted = adopt(smollm2, say=said.append)
    assert adopted.record["native"] and adopted.record["parameters"] == 134_515_008
    assert adopted.tokenizer.pad_token_id == adopted.tokenizer.eos_token_id == 2 and end_ids(adopted.tokenizer) == [2]
    assert "SmolLM2" in said[0] and "GGUF" in said[0]
    prompt = encode_prompt(adopted.tokenizer, "What is the capital of France?")
    ids = {"eos_token_id": end_ids(adopted.tokenizer), "pad_token_id": 2}
    [answer] = sample(adopted.model, [prompt], max_new_tokens=16, greedy=True, **ids).responses
    assert adopted.tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    hostile = encode_prompt(adopted.tokenizer, "What is <|im_end|>?")
    assert hostile.count(2) == encode_prompt(adopted.tokenizer, "What is it?").count(2)


CPU = torch.device("cpu")


@pytest.fixture
def policy(tmp_path):
    torch.manual_seed(0)
    model = GPTForCausalLM(GPTConfig(vocab_size=32, n_layer=2, n_head=2, width=16, context_length=16))
    model.save_pretrained(str(tmp_path / "model"))
    return tmp_path / "model"


def loaders(policy, tmp_path):
    """Whatever reads a policy, or the reward model in tmp_path / "reward"."""
    return (
        lambda: load_policy(policy),
        lambda: load_reward_model(tmp_path / "reward", CPU),
        lambda: load_weights(read_checkpoint(policy)),
    )


def edit(path, **values):
    config = json.loads((path / "config.json").read_text())
    (config.get("trunk") or config).update(values)
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("layers", "told"), [(3, "missing from the file"), (1, "not in the model of config.json")])
def test_other_numbers_of_layers_are_refused(policy, tmp_path, layers, told):
    reward = RewardModel.from_causal_lm(load_policy(policy))
    reward.save_pretrained(str(tmp_path / "reward"))
    assert load_policy(policy) is not None and load_reward_model(tmp_path / "reward", CPU) is not None
    for folder in (policy, tmp_path / "reward"):
        edit(folder, n_layer=layers)
    for load in loaders(policy, tmp_path):
        with pytest.raises(UserError, match=told):
            load()


@pytest.mark.parametrize(("file", "content"), [
    ("config.json", b"null"), ("config.json", b"[]"), ("config.json", b'{"a":' * 50_000), ("config.json", None),
    ("model.safetensors", b""), ("model.safetensors", b"\xff" * 64), ("model.safetensors", None)],
    ids=["null", "list", "deep", "folder", "empty weights", "torn weights", "folder of weights"])  # fmt: skip
def test_a_damaged_file_is_one_line_whichever_model_reads_it(policy, tmp_path, file, content):
    RewardModel.from_causal_lm(load_policy(policy)).save_pretrained(str(tmp_path / "reward"))
    for folder in (policy, tmp_path / "reward"):
        (folder / file).unlink()
        (folder / file).mkdir() if content is None else (folder / file).write_bytes(content)
    for load in loaders(policy, tmp_path):
        with pytest.raises(UserError) as told:
            load()
        assert "\n" not in str(told.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(policy, tmp_path, value):
    RewardModel.from_causal_lm(load_policy(policy)).save_pretrained(str(tmp_path / "reward"))
    for folder in (policy, tmp_path / "reward"):
        weights = load_file(folder / "model.safetensors")
        weights[max(weights)].view(-1)[1] = value  # one of them
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for load in loaders(policy, tmp_path):
        with pytest.raises(UserError, match="has values that are not finite: use an earlier or another model"):
            load()
