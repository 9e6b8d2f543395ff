"""The table of transformers' architectures that our GPT can express: how configurations and tensors are converted in
both directions.

Numbers never change, only names and layouts. `register_architecture` adds a row from outside the package.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from rlhf.model.gpt_config import SCALING, GPTConfig

Fields = dict[str, Any]
# Our module's name, in a layer without the layer's; theirs, or their names and the layout between them.
Modules = dict[str, "str | tuple[tuple[str, ...], Layout]"]


class Layout(NamedTuple):
    join: Callable[[list[Tensor]], Tensor]
    split: Callable[[Tensor], list[Tensor]]


SAME = Layout(lambda theirs: theirs[0], lambda ours: [ours])
TRANSPOSED = Layout(lambda theirs: theirs[0].t(), lambda ours: [ours.t()])
STACKED = Layout(torch.stack, lambda ours: list(ours.unbind()))  # type: ignore[arg-type]


def rows(*sizes: int) -> Layout:
    """Our matrix is theirs, stacked in rows."""
    return Layout(torch.cat, lambda ours: list(ours.split(sizes)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    shape: the values (one, or a tuple of them) that our configuration must have to be written. wanted: those that
    theirs must have to be read; the first one is written. names: of the fields that mean the same, ours to theirs,
    besides COMMON. read: their configuration to our other fields; write: back. modules: the names of each module.
    misfits: why our configuration cannot be written, beyond `shape`. ropes: kinds of rotary positions.
    """

    config_class: Any
    model_class: Any
    shape: Fields
    wanted: dict[str, tuple[Any, ...]]
    names: dict[str, str]
    read: Callable[[Any], Fields]
    write: Callable[[GPTConfig], Fields]
    modules: Callable[[GPTConfig], Modules]
    misfits: Callable[[GPTConfig], list[str]] = lambda ours: []
    ropes: tuple[str, ...] = ("default",)

    def our_fields(self, config: Any) -> Fields:
        fixed = {name: value for name, value in self.shape.items() if not isinstance(value, tuple)}
        same = {ours: getattr(config, theirs) for ours, theirs in (COMMON | self.names).items()}
        return {**fixed, **same, **special_ids(config), **self.read(config)}

    def their_fields(self, c: GPTConfig) -> Fields:
        known = self.config_class().to_dict()
        fixed = {name: values[0] for name, values in self.wanted.items() if name in known}
        same = {theirs: getattr(c, ours) for ours, theirs in (COMMON | self.names).items()}
        return {**fixed, **same, **special_ids(c), **self.write(c)}

    def locate(self, c: GPTConfig, name: str) -> tuple[list[str], Layout]:
        """Their names of one of our tensors, and the layout between them."""
        modules = self.modules(c)
        layer, module, kind = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.(\w+)", name).groups()  # type: ignore[union-attr]
        theirs = modules[module]
        names, layout = ((theirs,), SAME) if isinstance(theirs, str) else theirs
        prefix = "" if layer is None else f"{modules['model.layers']}.{layer}."
        return [f"{prefix}{name}.{kind}" for name in names], layout


ARCHITECTURES: dict[str, Architecture] = {}  # by transformers' model type; export tries them in this order


def register_architecture(model_type: str, architecture: Architecture) -> None:
    """Checkpoints of this model type then run as our GPT, and export writes them back (docs/extending.md)."""
    ARCHITECTURES[model_type] = architecture


def why_not_native(config: Any) -> list[str]:
    """Why our GPT cannot express a checkpoint's configuration, as texts; empty if it can."""
    kind = config.model_type
    if isinstance(config, GPTConfig):
        return []
    if kind not in ARCHITECTURES:
        return [f"{kind} is none of {', '.join(ARCHITECTURES)}"]
    problems = []
    for name, values in ARCHITECTURES[kind].wanted.items():
        if (value := getattr(config, name, values[0])) not in values:
            problems.append(f"{name} is {value!r}, wanted {' or '.join(map(repr, values))}")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    known = ARCHITECTURES[kind].ropes
    return problems if rope in known else [*problems, f"rope_type is {rope!r}, wanted {' or '.join(map(repr, known))}"]


COMMON = {name: name for name in ("vocab_size", "initializer_range", "tie_word_embeddings")} | {
    "context_length": "max_position_embeddings", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "width": "hidden_size",
}  # fmt: skip


def special_ids(config: Any) -> Fields:
    """Pad, begin and end token of a configuration or a tokenizer, each None if it states none."""
    return {name: getattr(config, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}


def _square(c: GPTConfig) -> list[str]:
    wrong = [f"n_kv_head is {c.n_kv_head}"] if c.n_kv_head != c.n_head else []
    return wrong + ([f"head_dim is {c.head_dim}"] if c.head_dim * c.n_head != c.width else [])


# ---------------------------------------------------------------------------------------------- GPT and GPT-2


_GPT_NAMES = {"dropout": "resid_pdrop", "norm_eps": "layer_norm_epsilon"}
_GPT_SHAPE = {
    "positions": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True, "qkv_bias": True, "qk_norm": False,
}  # fmt: skip


def _gpt_modules(tokens: str, positions: str, c: GPTConfig) -> Modules:
    """GPT's and GPT-2's: matrices of the layers are stored transposed there, vectors are not changed by it."""
    return {
        "model.embed_tokens": f"transformer.{tokens}", "model.embed_positions": f"transformer.{positions}",
        "model.norm": "transformer.ln_f", "lm_head": "lm_head", "model.layers": "transformer.h",
        "norm_1": "ln_1", "attention.qkv": (("attn.c_attn",), TRANSPOSED), "attention.out": (("attn.c_proj",), TRANSPOSED),
        "norm_2": "ln_2", "mlp.up": (("mlp.c_fc",), TRANSPOSED), "mlp.down": (("mlp.c_proj",), TRANSPOSED),
    }  # fmt: skip


register_architecture("gpt2", Architecture(
    transformers.GPT2Config, transformers.GPT2LMHeadModel, {**_GPT_SHAPE, "block": "pre"},
    {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
    },
    _GPT_NAMES, lambda c: {"mlp_width": c.n_inner or 4 * c.n_embd},
    lambda c: {"embd_pdrop": c.dropout, "attn_pdrop": c.dropout, "n_inner": c.mlp_width},
    partial(_gpt_modules, "wte", "wpe"), _square,
))  # fmt: skip
register_architecture("openai-gpt", Architecture(
    transformers.OpenAIGPTConfig, transformers.OpenAIGPTLMHeadModel, {**_GPT_SHAPE, "block": "post"}, {"afn": ("gelu",)},
    _GPT_NAMES, lambda c: {"mlp_width": 4 * c.n_embd}, lambda c: {"embd_pdrop": c.dropout, "attn_pdrop": c.dropout},
    partial(_gpt_modules, "tokens_embed", "positions_embed"),
    lambda c: _square(c) + ([f"mlp_width is {c.mlp_width}, not 4 width"] if c.mlp_width != 4 * c.width else []),
))  # fmt: skip

# ------------------------------------------------------------------------------------- Llama and what shares its shape


_LLAMA_NAMES = {
    "n_kv_head": "num_key_value_heads", "mlp_width": "intermediate_size", "dropout": "attention_dropout", "norm_eps": "rms_norm_eps",
}  # fmt: skip
_LLAMA_WANTED: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)}
_LLAMA_SHAPE = {
    "positions": "rotary", "norm": "rmsnorm", "mlp": "swiglu", "block": "pre", "bias": False, "rotary_share": 1.0,
    "qkv_bias": False, "qk_norm": False,
}  # fmt: skip


def read_llama(c: Any) -> Fields:
    """A context no longer than the sliding window of its layers, which our GPT then need not mask."""
    context = c.max_position_embeddings
    rope = {"original_max_position_embeddings": context, **c.rope_parameters}
    scaled = rope.get("rope_type") == "llama3"
    slides = "sliding_attention" in (getattr(c, "layer_types", None) or ["sliding_attention"])
    window = getattr(c, "sliding_window", None) if slides else None
    return {
        "rotary_scaling": {name: rope[name] for name in SCALING} if scaled else None,
        "context_length": min(context, window or context),
        "head_dim": getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        "rope_theta": rope["rope_theta"],
    }


def write_llama(c: GPTConfig) -> Fields:
    scaling = {"rope_type": "llama3", **c.rotary_scaling} if c.rotary_scaling else {"rope_type": "default"}
    return {"head_dim": c.head_dim, "rope_parameters": {"rope_theta": c.rope_theta, **scaling}}


def _write_qwen2(c: GPTConfig) -> Fields:
    """Its configuration has no head_dim, though its class reads one."""
    fields = write_llama(c)
    if c.head_dim * c.n_head == c.width:
        del fields["head_dim"]
    return fields


def llama_modules(c: GPTConfig) -> Modules:
    """Our fused matrices are theirs, stacked in rows."""
    qkv = rows(c.head_dim * c.n_head, c.head_dim * c.n_kv_head, c.head_dim * c.n_kv_head)
    return {
        **{name: name for name in ("model.embed_tokens", "model.norm", "lm_head", "model.layers")},
        "norm_1": "input_layernorm",
        "attention.qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), qkv),
        "attention.qk_norm": (("self_attn.q_norm", "self_attn.k_norm"), STACKED),
        "attention.out": "self_attn.o_proj",
        "norm_2": "post_attention_layernorm",
        "mlp.up": (("mlp.gate_proj", "mlp.up_proj"), rows(c.mlp_width, c.mlp_width)),
        "mlp.down": "mlp.down_proj",
    }


def llama_like(
    config_class: Any, model_class: Any, write: Any = write_llama, wanted: Any = _LLAMA_WANTED, **shape: Any
) -> Architecture:
    """A row for an architecture with Llama's fields and tensors; `shape`: what differs."""
    both = {**_LLAMA_SHAPE, **shape}
    names, ropes = _LLAMA_NAMES, ("default", "llama3")
    return Architecture(config_class, model_class, both, wanted, names, read_llama, write, llama_modules, ropes=ropes)


register_architecture("llama", llama_like(transformers.LlamaConfig, transformers.LlamaForCausalLM))
register_architecture("mistral", llama_like(
    transformers.MistralConfig, transformers.MistralForCausalLM, lambda c: {**write_llama(c), "sliding_window": None}
))  # fmt: skip
register_architecture("qwen2", llama_like(
    transformers.Qwen2Config, transformers.Qwen2ForCausalLM, _write_qwen2, qkv_bias=True
))  # fmt: skip
register_architecture("qwen3", llama_like(transformers.Qwen3Config, transformers.Qwen3ForCausalLM, qk_norm=True))

# ----------------------------------------------------------------------------------------- Cohere, which is PaLM's block


def _cohere_modules(c: GPTConfig) -> Modules:
    """Llama's names, of two norms per block only the first; the two channels of a rotary pair are adjacent."""
    modules: Any = llama_modules(c)
    names, qkv = modules["attention.qkv"]
    # our order of their channels: 0, 2, 4, …, 1, 3, 5, …
    order = torch.arange(c.head_dim).unflatten(0, (-1, 2)).t().flatten()

    def reorder(matrix: Tensor, channels: Tensor) -> Tensor:
        return matrix.unflatten(0, (-1, c.head_dim))[:, channels].flatten(0, 1)

    def join(theirs: list[Tensor]) -> Tensor:
        return torch.cat([*(reorder(part, order) for part in theirs[:2]), theirs[2]])

    def split(ours: Tensor) -> list[Tensor]:
        q, k, v = qkv.split(ours)
        return [reorder(q, order.argsort()), reorder(k, order.argsort()), v]

    return {**modules, "attention.qkv": (names, Layout(join, split))}


register_architecture("cohere", Architecture(
    transformers.CohereConfig, transformers.CohereForCausalLM, {**_LLAMA_SHAPE, "norm": "layernorm", "block": "one_norm"},
    {**_LLAMA_WANTED, "logit_scale": (1.0,), "use_qk_norm": (False,)}, {**_LLAMA_NAMES, "norm_eps": "layer_norm_eps"},
    read_llama, _write_qwen2, _cohere_modules,
))  # fmt: skip

# --------------------------------------------------------------------------------------------------- GPT-NeoX


def _read_neox(c: Any) -> Fields:
    return {
        "mlp": "gelu_erf" if c.hidden_act == "gelu" else "gelu",
        "block": "parallel" if c.use_parallel_residual else "pre",
        "rope_theta": c.rope_parameters["rope_theta"],
        "rotary_share": c.rope_parameters.get("partial_rotary_factor", 1.0),
    }


def _write_neox(c: GPTConfig) -> Fields:
    rope = {"rope_type": "default", "rope_theta": c.rope_theta, "partial_rotary_factor": c.rotary_share}
    return {
        "hidden_act": "gelu" if c.mlp == "gelu_erf" else "gelu_new",
        "use_parallel_residual": c.block == "parallel",
        "attention_dropout": c.dropout,
        "rope_parameters": rope,
    }


def _neox_modules(c: GPTConfig) -> Modules:
    """Their fused matrix is ordered by head, then query, key, value. They rotate channel i with i + R/2 of the first R
    channels, ours with i + head_dim/2; queries and keys may be reordered alike: their products do not change.
    """
    turning, channels = int(c.head_dim * c.rotary_share), torch.arange(c.head_dim)
    halves = zip(channels[:turning].tensor_split(2), channels[turning:].tensor_split(2), strict=True)
    order = torch.cat([part for half in halves for part in half])
    back = order.argsort()

    def join(theirs: list[Tensor]) -> Tensor:
        q, k, v = theirs[0].unflatten(0, (c.n_head, 3, c.head_dim)).unbind(1)
        return torch.cat([part.flatten(0, 1) for part in (q[:, order], k[:, order], v)])

    def split(ours: Tensor) -> list[Tensor]:
        q, k, v = ours.unflatten(0, (3, c.n_head, c.head_dim))
        return [torch.stack((q[:, back], k[:, back], v), 1).flatten(0, 2)]

    return {
        "model.embed_tokens": "gpt_neox.embed_in", "model.norm": "gpt_neox.final_layer_norm", "lm_head": "lm_head",
        "model.layers": "gpt_neox.layers",
        "norm_1": "input_layernorm", "attention.qkv": (("attention.query_key_value",), Layout(join, split)),
        "attention.out": "attention.dense", "norm_2": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
    }  # fmt: skip


register_architecture("gpt_neox", Architecture(
    transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM,
    {**_GPT_SHAPE, "positions": "rotary", "mlp": ("gelu", "gelu_erf"), "block": ("pre", "parallel")},
    {"hidden_act": ("gelu", "gelu_new", "gelu_pytorch_tanh"), "attention_bias": (True,)},
    {"mlp_width": "intermediate_size", "dropout": "hidden_dropout", "norm_eps": "layer_norm_eps"},
    _read_neox, _write_neox, _neox_modules, _square,
))  # fmt: skip
