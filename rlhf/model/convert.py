"""Weights to and from transformers' GPT-2 and Llama, and export to a folder that loads without this package.

Only names and layouts change, never numbers: converting there and back gives the same tensors. Not here:
other architectures, quantised weights, tokenizer conversion.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf.errors import UserError
from rlhf.model import gpt
from rlhf.model.gpt import GPTConfig, GPTForCausalLM

Form = Literal["auto", "gpt2", "llama", "rlhf"]
State = dict[str, Tensor]
CODE_FILE = "modeling_rlhf_gpt.py"

# What a configuration of ours must be to have a form elsewhere.
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"positions": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True, "qk_norm": False},
    "llama": {"positions": "rotary", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "qk_norm": False},
}


def misfits(config: Any, form: str) -> list[str]:
    """What keeps a configuration from a form, in words; empty where nothing does."""
    wrong = [
        f"{name} is {getattr(config, name)!r}, {form} has {wanted!r}"
        for name, wanted in SHAPES.get(form, {}).items()
        if getattr(config, name) != wanted
    ]
    if form == "gpt2" and config.n_kv_head != config.n_head:
        wrong.append(f"n_kv_head is {config.n_kv_head}, gpt2 has n_head={config.n_head}")
    return wrong


# ------------------------------------------------------------------------------------------------------ names


def _gpt2_names(n_layer: int) -> Iterator[tuple[str, str, bool]]:
    """(our name, GPT-2's name, whether the matrix is stored transposed there)."""
    yield "model.embed_tokens.weight", "transformer.wte.weight", False
    yield "model.embed_positions.weight", "transformer.wpe.weight", False
    yield "lm_head.weight", "lm_head.weight", False
    pairs = (
        ("norm_1", "ln_1"),
        ("attention.qkv", "attn.c_attn"),
        ("attention.out", "attn.c_proj"),
        ("norm_2", "ln_2"),
        ("mlp.up", "mlp.c_fc"),
        ("mlp.down", "mlp.c_proj"),
    )
    for kind in ("weight", "bias"):
        yield f"model.norm.{kind}", f"transformer.ln_f.{kind}", False
        for layer in range(n_layer):
            our, their = f"model.layers.{layer}", f"transformer.h.{layer}"
            for ours, theirs in pairs:
                transposed = kind == "weight" and not theirs.startswith("ln")
                yield f"{our}.{ours}.{kind}", f"{their}.{theirs}.{kind}", transposed


def _llama_names(config: Any) -> Iterator[tuple[str, tuple[str, ...], list[int]]]:
    """(our name, Llama's names, rows of each): our fused matrix is theirs, one below the other."""
    head = config.width // config.n_head
    fused: dict[str, list[int]] = {
        "attention.qkv": [head * config.n_head, head * config.n_kv_head, head * config.n_kv_head],
        "mlp.up": [config.mlp_width, config.mlp_width],
    }
    parts = {
        "norm_1": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.out": ("self_attn.o_proj",),
        "norm_2": ("post_attention_layernorm",),
        "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
    }
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        yield name, (name,), []
    for layer in range(config.n_layer):
        for ours, theirs in parts.items():
            names = tuple(f"model.layers.{layer}.{name}.weight" for name in theirs)
            yield f"model.layers.{layer}.{ours}.weight", names, fused.get(ours, [])


def _build(model: PreTrainedModel, state: State, like: PreTrainedModel) -> Any:
    """Fill a fresh model with a state dict, in the other model's type and place; evaluation mode."""
    torch.nn.Module.to(model, device=like.device, dtype=like.dtype)
    model.load_state_dict(state)
    model.generation_config = GenerationConfig.from_dict(like.generation_config.to_dict())
    return model.eval()


def _refuse(source: str, problems: list[str]) -> None:
    if problems:
        raise UserError(f"convert {source}: " + "; ".join(problems))


def _special_ids(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}


# ------------------------------------------------------------------------------------------------------ GPT-2


def from_gpt2(model: GPT2LMHeadModel) -> GPTForCausalLM:
    """Our GPT with GPT-2's weights, copied.

    Raises: UserError for GPT-2 variants that ours has no form for.
    """
    c = model.config
    problems = []
    if c.activation_function not in ("gelu_new", "gelu_pytorch_tanh"):
        problems.append(f"activation_function is {c.activation_function!r}, wanted 'gelu_new'")
    if not c.scale_attn_weights or c.scale_attn_by_inverse_layer_idx:
        problems.append("attention must be scaled by 1/sqrt(head size) in every layer")
    if c.add_cross_attention:
        problems.append("add_cross_attention is True: cross-attention has no place in a decoder-only model")
    _refuse("from gpt2", problems)
    config = GPTConfig(
        vocab_size=c.vocab_size,
        context_length=c.n_positions,
        n_layer=c.n_layer,
        n_head=c.n_head,
        width=c.n_embd,
        mlp_width=c.n_inner or 4 * c.n_embd,
        dropout=c.resid_pdrop,
        norm_eps=c.layer_norm_epsilon,
        initializer_range=c.initializer_range,
        tie_word_embeddings=c.tie_word_embeddings,
        **_special_ids(c),
    )
    theirs = model.state_dict()
    state = {our: theirs[name].t() if flip else theirs[name] for our, name, flip in _gpt2_names(c.n_layer)}
    return _build(GPTForCausalLM(config), state, model)


def to_gpt2(model: GPTForCausalLM) -> GPT2LMHeadModel:
    """transformers' GPT-2 with our weights, copied.

    Raises: UserError where the model is not GPT-2-shaped.
    """
    c = model.config
    _refuse("to gpt2", misfits(c, "gpt2"))
    config = GPT2Config(
        vocab_size=c.vocab_size,
        n_positions=c.context_length,
        n_layer=c.n_layer,
        n_head=c.n_head,
        n_embd=c.width,
        n_inner=c.mlp_width,
        activation_function="gelu_new",
        resid_pdrop=c.dropout,
        embd_pdrop=c.dropout,
        attn_pdrop=c.dropout,
        layer_norm_epsilon=c.norm_eps,
        initializer_range=c.initializer_range,
        tie_word_embeddings=c.tie_word_embeddings,
        **_special_ids(c),
    )
    ours = model.state_dict()
    state = {name: ours[our].t() if flip else ours[our] for our, name, flip in _gpt2_names(c.n_layer)}
    return _build(GPT2LMHeadModel(config), state, model)


# ------------------------------------------------------------------------------------------------------ Llama


def from_llama(model: LlamaForCausalLM) -> GPTForCausalLM:
    """Our GPT with Llama's weights, copied; grouped queries too.

    Raises: UserError for Llama variants that ours has no form for.
    """
    c: Any = model.config
    rope = c.rope_parameters
    problems = []
    if c.hidden_act != "silu":
        problems.append(f"hidden_act is {c.hidden_act!r}, wanted 'silu'")
    if c.attention_bias or c.mlp_bias:
        problems.append("attention_bias and mlp_bias must be False")
    if rope.get("rope_type", "default") != "default":
        problems.append(f"rope_type is {rope['rope_type']!r}: only unscaled rotary positions convert")
    if c.head_dim != c.hidden_size // c.num_attention_heads:
        problems.append(f"head_dim is {c.head_dim}, wanted hidden_size / heads")
    _refuse("from llama", problems)
    config = GPTConfig(
        vocab_size=c.vocab_size,
        context_length=c.max_position_embeddings,
        n_layer=c.num_hidden_layers,
        n_head=c.num_attention_heads,
        n_kv_head=c.num_key_value_heads,
        width=c.hidden_size,
        mlp_width=c.intermediate_size,
        positions="rotary",
        norm="rmsnorm",
        mlp="swiglu",
        bias=False,
        dropout=c.attention_dropout,
        norm_eps=c.rms_norm_eps,
        rope_theta=rope["rope_theta"],
        initializer_range=c.initializer_range,
        tie_word_embeddings=c.tie_word_embeddings,
        **_special_ids(c),
    )
    theirs = model.state_dict()
    state = {our: torch.cat([theirs[name] for name in names]) for our, names, _ in _llama_names(config)}
    return _build(GPTForCausalLM(config), state, model)


def to_llama(model: GPTForCausalLM) -> LlamaForCausalLM:
    """transformers' Llama with our weights, copied.

    Raises: UserError where the model is not Llama-shaped.
    """
    c = model.config
    _refuse("to llama", misfits(c, "llama"))
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        max_position_embeddings=c.context_length,
        num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head,
        num_key_value_heads=c.n_kv_head,
        hidden_size=c.width,
        intermediate_size=c.mlp_width,
        hidden_act="silu",
        attention_dropout=c.dropout,
        rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        initializer_range=c.initializer_range,
        tie_word_embeddings=c.tie_word_embeddings,
        **_special_ids(c),
    )
    ours = model.state_dict()
    state: State = {}
    for our, names, rows in _llama_names(c):
        state.update(zip(names, ours[our].split(rows) if rows else (ours[our],), strict=True))
    return _build(LlamaForCausalLM(config), state, model)


# ----------------------------------------------------------------------------------------------------- export


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: str | PathLike, form: Form = "auto") -> str:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads where this package is not installed.

    form: "gpt2" and "llama" are transformers' own architectures; "rlhf" carries `gpt.py` with it and needs
    trust_remote_code; "auto" takes the first that fits. Tokenizer and a generation configuration that ends at
    the tokenizer's eos go with it. A model that is not our GPT is saved as it is. Returns the form written.

    Raises: UserError where the model does not fit the form.
    """
    if form not in ("auto", "rlhf", *SHAPES):
        raise UserError(f"export: form {form!r} is unknown: choose auto, gpt2, llama or rlhf")
    converted, form_written = _as_form(model, form)
    ids = _special_ids(tokenizer)
    generation = GenerationConfig(**ids)
    own = converted.generation_config
    converted.generation_config = generation
    try:
        converted.save_pretrained(out)
    finally:
        converted.generation_config = own
    tokenizer.save_pretrained(out)
    _finish_config(Path(out) / "config.json", ids, carries_code=form_written == "rlhf")
    if form_written == "rlhf":
        shutil.copyfile(gpt.__file__, Path(out) / CODE_FILE)
    return form_written


def _as_form(model: PreTrainedModel, form: str) -> tuple[PreTrainedModel, str]:
    if not isinstance(model, GPTForCausalLM):
        kind = model.config.model_type
        if form not in ("auto", kind):
            raise UserError(f"export: a {kind} model is saved as it is, not as {form!r}: choose form auto")
        return model, kind
    if form == "auto":
        form = next((name for name in SHAPES if not misfits(model.config, name)), "rlhf")
    _refuse(f"to {form}", misfits(model.config, form))
    return {"gpt2": to_gpt2, "llama": to_llama, "rlhf": lambda same: same}[form](model), form


def _finish_config(path: Path, ids: dict[str, Any], carries_code: bool) -> None:
    """Put the tokenizer's special ids, and the classes of the code beside it, into the saved config.json."""
    config = {**json.loads(path.read_text(encoding="utf-8")), **ids}
    if carries_code:
        module = Path(CODE_FILE).stem
        config["auto_map"] = {
            "AutoConfig": f"{module}.GPTConfig",
            "AutoModel": f"{module}.GPTModel",
            "AutoModelForCausalLM": f"{module}.GPTForCausalLM",
        }
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
