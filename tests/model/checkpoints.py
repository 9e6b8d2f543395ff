"""Small random models of transformers' own classes, far from their initial symmetric weights."""

from typing import Any

import torch
import transformers

VOCAB = 61
WIDE = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
}  # fmt: skip
GROUPED = {**WIDE, "num_key_value_heads": 2, "max_position_embeddings": 48}
OLD = {"vocab_size": VOCAB, "n_positions": 48, "n_layer": 2, "n_head": 4, "n_embd": 32}
IDS = {"bos_token_id": 1, "eos_token_id": 2}

# name: (class of the configuration, its fields)
CHECKPOINTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt2": (transformers.GPT2Config, {**OLD, "n_inner": 40}),
    "openai-gpt": (transformers.OpenAIGPTConfig, OLD),
    "llama": (transformers.LlamaConfig, {**GROUPED, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama3": (  # 16 tokens before, 48 after: of 8 channels the first pair stays, the second is interpolated, the others are slowed
        transformers.LlamaConfig,
        {**GROUPED, "head_dim": 8, "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0,
            "original_max_position_embeddings": 16,
        }},
    ),
    "llama-tied": (transformers.LlamaConfig, {**GROUPED, "num_key_value_heads": 4, "tie_word_embeddings": True, "head_dim": 12}),
    "mistral": (transformers.MistralConfig, {**GROUPED, "sliding_window": 48, "head_dim": 16}),
    "qwen2": (transformers.Qwen2Config, {**GROUPED, "tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {**GROUPED, "head_dim": 16}),
    "cohere": (transformers.CohereConfig, {**GROUPED, "logit_scale": 1.0}),
    "gpt_neox": (transformers.GPTNeoXConfig, {**WIDE, "max_position_embeddings": 48, "rotary_pct": 0.5}),
    "gpt_neox-serial": (
        transformers.GPTNeoXConfig,
        {**WIDE, "max_position_embeddings": 48, "use_parallel_residual": False, "hidden_act": "gelu_new"},
    ),
}  # fmt: skip


def make_checkpoint(name: str, **overrides: Any) -> Any:
    """The model in evaluation mode, its weights shaken so that no bias is 0 and no scale 1."""
    kind, fields = CHECKPOINTS[name]
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(kind(**{**fields, **IDS, **overrides}))
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.eval()
