"""Conversion both ways, and an exported folder in a process that does not know this package."""

import json
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from rlhf.errors import UserError
from rlhf.model import GPTConfig, GPTForCausalLM
from rlhf.model.convert import export, from_gpt2, from_llama, to_gpt2, to_llama

VOCAB = 47
GPT2_SIZES = {"vocab_size": VOCAB, "n_positions": 24, "n_layer": 2, "n_head": 2, "n_embd": 16}
LLAMA_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
}
OUR_SIZES = {"vocab_size": VOCAB, "context_length": 24, "n_layer": 2, "n_head": 4, "width": 32}
TOKENS = torch.randint(0, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))


def shake(model):
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def make_theirs(kind: str):
    if kind == "gpt2":
        return shake(GPT2LMHeadModel(GPT2Config(**GPT2_SIZES, n_inner=24, bos_token_id=1, eos_token_id=2)))
    if kind == "llama-gqa":
        rope = {"rope_type": "default", "rope_theta": 500.0}
        return shake(LlamaForCausalLM(LlamaConfig(**LLAMA_SIZES, num_key_value_heads=2, rope_parameters=rope)))
    return shake(LlamaForCausalLM(LlamaConfig(**LLAMA_SIZES, tie_word_embeddings=True, rms_norm_eps=1e-3)))


def make_ours(**kind) -> GPTForCausalLM:
    ids = {"pad_token_id": 0, "eos_token_id": 2}
    return shake(GPTForCausalLM(GPTConfig(**OUR_SIZES, **kind, **ids)))


LLAMA_KIND = {"positions": "rotary", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "n_kv_head": 2}


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama-gqa"])
def test_there_and_back(kind):
    theirs = make_theirs(kind)
    there, back = (from_gpt2, to_gpt2) if kind == "gpt2" else (from_llama, to_llama)
    ours = there(theirs)
    assert torch.allclose(ours(TOKENS).logits, theirs(TOKENS).logits, rtol=0, atol=1e-5)
    again = back(ours)
    assert type(again) is type(theirs)
    state = theirs.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())
    assert torch.allclose(again(TOKENS).logits, theirs(TOKENS).logits, rtol=0, atol=1e-5)
    same = (
        "vocab_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "eos_token_id",
    )
    for name in same:
        assert getattr(again.config, name) == getattr(theirs.config, name) == getattr(ours.config, name)
    next(again.parameters()).add_(1.0)  # a copy: the original does not move
    assert torch.equal(next(ours.parameters()), next(there(theirs).parameters()))


@torch.no_grad()
@pytest.mark.parametrize(("kind", "convert"), [({}, to_gpt2), (LLAMA_KIND, to_llama)])
def test_ours_untied_and_in_bfloat16(kind, convert):
    ours = make_ours(tie_word_embeddings=False, **kind)
    theirs = convert(ours)
    assert theirs.lm_head.weight.data_ptr() != theirs.get_input_embeddings().weight.data_ptr()
    assert torch.allclose(ours(TOKENS).logits, theirs(TOKENS).logits, rtol=0, atol=1e-5)
    assert convert(ours.to(torch.bfloat16)).dtype == torch.bfloat16


def test_what_has_no_form_is_refused():
    for config, said in (
        (GPT2Config(**GPT2_SIZES, activation_function="relu"), "'relu'"),
        (GPT2Config(**GPT2_SIZES, scale_attn_by_inverse_layer_idx=True), "every layer"),
    ):
        with pytest.raises(UserError, match=said):
            from_gpt2(GPT2LMHeadModel(config))
    with pytest.raises(UserError, match="attention_bias"):
        from_llama(LlamaForCausalLM(LlamaConfig(**LLAMA_SIZES, attention_bias=True)))
    with pytest.raises(UserError, match="head_dim is 16"):
        from_llama(LlamaForCausalLM(LlamaConfig(**LLAMA_SIZES, head_dim=16)))
    with pytest.raises(UserError, match=r"positions is 'rotary'.*bias is False"):
        to_gpt2(make_ours(**LLAMA_KIND))
    with pytest.raises(UserError, match="n_kv_head is 2"):
        to_gpt2(make_ours(n_kv_head=2))
    with pytest.raises(UserError, match="qk_norm is True"):
        to_llama(make_ours(**LLAMA_KIND, qk_norm=True))


# ---------------------------------------------------------------------------------------------------- export

READER = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokens, answers = torch.tensor(json.loads(sys.argv[1])), []
for folder in sys.argv[2:]:
    trust = {"trust_remote_code": folder.endswith("rlhf")}
    model = AutoModelForCausalLM.from_pretrained(folder, **trust)
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4, do_sample=False)
    ids = model.generation_config
    answers.append({
        "type": type(model).__name__, "logits": model(tokens).logits.tolist(), "generated": out.tolist(),
        "ids": [ids.eos_token_id, ids.pad_token_id],
        "tokenizer": AutoTokenizer.from_pretrained(folder, **trust).eos_token_id,
    })
assert "rlhf" not in sys.modules
print(json.dumps(answers))
"""


@pytest.fixture
def tokenizer():
    words = {"<|pad|>": 0, "<|endoftext|>": 1, "<|end|>": 2, "a": 3}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="a")),
        pad_token="<|pad|>",
        bos_token="<|endoftext|>",
        eos_token="<|end|>",
        chat_template="{{ messages }}",
    )


@torch.no_grad()
def test_exported_folders_load_without_this_package(tokenizer, tmp_path):
    kinds = {"gpt2": {}, "llama": LLAMA_KIND, "rlhf": {**LLAMA_KIND, "qk_norm": True}}
    originals = {form: make_ours(**kind) for form, kind in kinds.items()}
    for form, model in originals.items():
        assert export(model, tokenizer, tmp_path / form) == form
        assert model.generation_config.eos_token_id in (None, 2)
    folders = [str(tmp_path / form) for form in kinds]
    run = subprocess.run(
        [sys.executable, "-c", READER, json.dumps(TOKENS.tolist()), *folders],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": "/usr/bin:/bin",
        },
    )
    assert run.returncode == 0, run.stderr
    for answer, (form, model) in zip(json.loads(run.stdout), originals.items(), strict=True):
        expected = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "rlhf": "GPTForCausalLM"}[form]
        assert answer["type"] == expected
        assert torch.allclose(torch.tensor(answer["logits"]), model(TOKENS).logits, rtol=0, atol=1e-5)
        own = model.generate(TOKENS, max_new_tokens=4, do_sample=False, eos_token_id=2, pad_token_id=0)
        assert answer["generated"] == own.tolist()
        assert answer["ids"] == [2, 0] and answer["tokenizer"] == 2


def test_export_in_a_chosen_form(tokenizer, tmp_path):
    assert export(make_ours(), tokenizer, tmp_path / "own", form="rlhf") == "rlhf"
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_rlhf_gpt.GPTForCausalLM"
    assert config["eos_token_id"] == 2 and (tmp_path / "own" / "chat_template.jinja").exists()
    assert export(make_theirs("gpt2"), tokenizer, tmp_path / "theirs") == "gpt2"
    with pytest.raises(UserError, match="mlp is 'gelu'"):
        export(make_ours(), tokenizer, tmp_path / "no", form="llama")
    with pytest.raises(UserError, match="'onnx' is unknown"):
        export(make_ours(), tokenizer, tmp_path / "no", form="onnx")
    with pytest.raises(UserError, match="saved as it is"):
        export(make_theirs("gpt2"), tokenizer, tmp_path / "no", form="llama")
    assert not (tmp_path / "no").exists()
