"""Conversion both ways, and an exported folder in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import rlhf
from rlhf.errors import UserError
from rlhf.model import GPTConfig, GPTForCausalLM
from rlhf.model.architectures import ARCHITECTURES
from rlhf.model.convert import (
    export,
    find_form,
    from_transformers,
    make_native_config,
    misfits,
    to_transformers,
    why_own,
)
from tests.model.checkpoints import CHECKPOINTS, VOCAB, make_checkpoint

OUR_SIZES = {"vocab_size": VOCAB, "context_length": 24, "n_layer": 2, "n_head": 4, "width": 32}
TOKENS = torch.randint(0, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))


def make_ours(**kind) -> GPTForCausalLM:
    ids = {"pad_token_id": 0, "eos_token_id": 2}
    torch.manual_seed(5)
    model = GPTForCausalLM(GPTConfig(**{**OUR_SIZES, **kind}, **ids))
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


LLAMA_KIND = {"positions": "rotary", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "n_kv_head": 2}
NEOX_KIND = {"positions": "rotary", "block": "parallel", "mlp": "gelu_erf", "rotary_share": 0.5}
OURS = {
    "gpt2": {},
    "openai-gpt": {"block": "post"},
    "llama": LLAMA_KIND,
    "mistral": LLAMA_KIND,
    "qwen2": {**LLAMA_KIND, "qkv_bias": True},
    "qwen3": {**LLAMA_KIND, "qk_norm": True, "head_dim": 12},
    "cohere": {**LLAMA_KIND, "norm": "layernorm", "block": "one_norm", "n_kv_head": 1, "head_dim": 12},
    "gpt_neox": NEOX_KIND,
}


@torch.no_grad()
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_there_and_back(name):
    theirs = make_checkpoint(name)
    ours = from_transformers(theirs)
    form = find_form(ours.config)
    assert form == theirs.config.model_type
    again = to_transformers(ours, form)
    assert type(again) is type(theirs)
    state = theirs.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())
    assert torch.allclose(again(TOKENS).logits, theirs(TOKENS).logits, rtol=0, atol=1e-5)
    before, after = theirs.config.to_dict(), again.config.to_dict()
    assert {n: v for n, v in after.items() if before[n] != v} == {}  # nothing that the checkpoint says is lost
    for name in ("vocab_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "eos_token_id"):
        assert getattr(theirs.config, name) == getattr(ours.config, name)
    next(again.parameters()).add_(1.0)  # a copy: the original does not move
    assert torch.equal(next(ours.parameters()), next(from_transformers(theirs).parameters()))


@torch.no_grad()
def test_llama_3_positions_are_transformers_past_the_original_context():
    theirs = make_checkpoint("llama3").double()
    ours = from_transformers(theirs)
    for layer in [theirs.model, *theirs.model.layers]:  # their norms compute in float32
        for name, norm in list(layer.named_children()):
            if "norm" in name:
                exact = torch.nn.RMSNorm(32, norm.variance_epsilon, dtype=torch.float64)
                exact.weight = norm.weight
                setattr(layer, name, exact)
    tokens = torch.randint(0, VOCAB, (2, 48), generator=torch.Generator().manual_seed(0))
    assert (ours(tokens).logits - theirs(tokens).logits).abs().max() < 1e-12
    unscaled = from_transformers(theirs)
    unscaled.config.rotary_scaling = None
    difference = (unscaled(tokens).logits - theirs(tokens).logits).abs().amax((0, 2))
    assert difference[16:].min() > 1e-3  # 16 tokens are the original context
    with pytest.raises(UserError, match="rotary_scaling is set, unlike cohere"):
        to_transformers(ours, "cohere")


@torch.no_grad()
@pytest.mark.parametrize("form", OURS)
def test_ours_untied_and_in_bfloat16(form):
    assert set(OURS) == set(ARCHITECTURES)
    ours = make_ours(tie_word_embeddings=False, **OURS[form])
    theirs = to_transformers(ours, form)
    assert theirs.get_output_embeddings().weight.data_ptr() != theirs.get_input_embeddings().weight.data_ptr()
    assert torch.allclose(ours(TOKENS).logits, theirs(TOKENS).logits, rtol=0, atol=1e-5)
    assert to_transformers(ours.to(torch.bfloat16), form).dtype == torch.bfloat16


def test_a_window_limits_the_context_and_comes_back():
    theirs = make_checkpoint("mistral", sliding_window=20)
    ours = from_transformers(theirs)
    assert (theirs.config.max_position_embeddings, ours.config.context_length) == (48, 20)
    tokens = torch.randint(0, VOCAB, (2, 21), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():  # within the window both see the same, one token further they do not
        difference = (ours(tokens).logits - theirs(tokens).logits).abs().amax((0, 2))
    assert difference[:20].max() < 1e-5 and difference[20] > 1e-3
    again = to_transformers(ours, "mistral").config
    assert (again.sliding_window, again.max_position_embeddings) == (20, 48)
    layers = {"use_sliding_window": True, "sliding_window": 20}
    assert make_native_config(make_checkpoint("qwen2", **layers, max_window_layers=1).config).context_length == 20
    assert make_native_config(make_checkpoint("qwen2", **layers, max_window_layers=2).config).context_length == 48


def test_what_has_no_form_is_refused():
    for name, overrides, said in (
        ("gpt2", {"activation_function": "relu"}, "'relu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "layer_idx is True, wanted False"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e2}},
            "rope_type is 'linear'",
        ),
    ):
        with pytest.raises(UserError, match=said):
            from_transformers(make_checkpoint(name, **overrides))
    for kind, form, said in (
        (LLAMA_KIND, "gpt2", r"positions is 'rotary'.*bias is False"),
        ({"n_kv_head": 2}, "gpt2", "n_kv_head is 2"),
        ({**LLAMA_KIND, "qk_norm": True}, "llama", "qk_norm is True"),
    ):
        with pytest.raises(UserError, match=said):
            to_transformers(make_ours(**kind), form)
    assert find_form(make_ours(**LLAMA_KIND, block="post").config) == "rlhf"
    for kind, why in (
        ({"window": 4}, "window is 4"),
        ({"positions": "sinusoidal", "block": "post"}, "positions is 'sinusoidal'"),
    ):
        config = GPTConfig(**{**OUR_SIZES, **kind})
        assert find_form(config) == "rlhf" and why in why_own(config)
    assert misfits(make_ours().config, "rlhf") == []


READER = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokens, answers = torch.tensor(json.loads(sys.argv[1])), []
for folder in sys.argv[2:]:
    if folder.endswith("rlhf"):  # the last one
        assert "rlhf" not in sys.modules
        import rlhf.model
    model = AutoModelForCausalLM.from_pretrained(folder)
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4, do_sample=False)
    ids = model.generation_config
    answers.append({
        "type": type(model).__name__, "logits": model(tokens).logits.tolist(), "generated": out.tolist(),
        "ids": [ids.eos_token_id, ids.pad_token_id],
        "tokenizer": AutoTokenizer.from_pretrained(folder).eos_token_id,
    })
print(json.dumps(answers))
"""


@pytest.fixture
def tokenizer():
    words = {"<|pad|>": 0, "<|endoftext|>": 1, "<|end|>": 2, "a": 3}
    special = {"pad_token": "<|pad|>", "bos_token": "<|endoftext|>", "eos_token": "<|end|>"}
    backend = Tokenizer(models.WordLevel(words, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special, chat_template="{{ messages }}")


@pytest.mark.long  # a process that imports the libraries; quickly: test_there_and_back and tests/stages/test_export.py
@torch.no_grad()
def test_exported_folders_load(tokenizer, tmp_path):
    kinds = {**OURS, "rlhf": {**LLAMA_KIND, "block": "post"}}
    del kinds["mistral"]  # of the same shape as llama, which comes first
    originals = {form: make_ours(**kind) for form, kind in kinds.items()}
    for form, model in originals.items():
        model.generation_config.eos_token_id = [2, 7]
        assert export(model, tokenizer, tmp_path / form) == form
        assert model.generation_config.eos_token_id == [2, 7]
        assert "auto_map" not in json.loads((tmp_path / form / "config.json").read_text())
        assert not list((tmp_path / form).glob("*.py"))
    folders = [str(tmp_path / form) for form in kinds]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(tmp_path / "hf"),
        "PATH": "/usr/bin:/bin",
    }
    environment["PYTHONPATH"] = str(Path(rlhf.__file__).parents[1])
    command = [sys.executable, "-c", READER, json.dumps(TOKENS.tolist()), *folders]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    for answer, (form, model) in zip(json.loads(run.stdout), originals.items(), strict=True):
        wanted = "GPTForCausalLM" if form == "rlhf" else ARCHITECTURES[form].model_class.__name__
        assert answer["type"] == wanted
        assert torch.allclose(torch.tensor(answer["logits"]), model(TOKENS).logits, rtol=0, atol=1e-5)
        ids = {"eos_token_id": [2, 7], "pad_token_id": 0, "attention_mask": torch.ones_like(TOKENS)}
        own = model.generate(TOKENS, max_new_tokens=4, do_sample=False, **ids)
        assert answer["generated"] == own.tolist()
        assert answer["ids"] == [[2, 7], 0] and answer["tokenizer"] == 2


def test_export_in_a_chosen_form_or_that_which_came_in(tokenizer, tmp_path):
    assert export(from_transformers(make_checkpoint("mistral")), tokenizer, tmp_path / "in") == "mistral"
    assert json.loads((tmp_path / "in" / "config.json").read_text())["architectures"] == ["MistralForCausalLM"]
    assert export(make_ours(), tokenizer, tmp_path / "own", form="rlhf") == "rlhf"
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    assert config["model_type"] == "rlhf_gpt"
    assert config["eos_token_id"] == 2 and (tmp_path / "own" / "chat_template.jinja").exists()
    assert export(make_checkpoint("gpt2"), tokenizer, tmp_path / "theirs") == "gpt2"
    with pytest.raises(UserError, match="mlp is 'gelu'"):
        export(make_ours(), tokenizer, tmp_path / "no", form="llama")
    with pytest.raises(UserError, match=r"export\.form=onnx: unknown"):
        export(make_ours(), tokenizer, tmp_path / "no", form="onnx")
    with pytest.raises(UserError, match="saved as it is"):
        export(make_checkpoint("gpt2"), tokenizer, tmp_path / "no", form="llama")
    assert not (tmp_path / "no").exists()
