"""`reward.lm_coef`: the language model's loss is computed with the SFT model's own unembedding."""

import shutil
from typing import Any

import pytest
import torch
import transformers

from rlhf.data.tokenizer import load_tokenizer
from rlhf.model.batching import right_pad
from rlhf.model.gpt import GPTForCausalLM
from rlhf.stages import reward

from ..presets import preset


def untied(kind: str) -> Any:
    """A small language model whose unembedding is its own; Phi's has a bias too."""
    torch.manual_seed(3)
    if kind == "phi":
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        policy = transformers.PhiForCausalLM(
            transformers.PhiConfig(vocab_size=768, max_position_embeddings=128, **sizes)
        )
        policy.lm_head.bias.data.normal_()
        return policy
    return GPTForCausalLM(preset("tiny", vocab_size=768, n_layer=1, n_head=2, width=32, tie_word_embeddings=False))


@pytest.mark.parametrize("kind", ["ours", "phi"])
@pytest.mark.parametrize("later", [False, True], ids=["first round", "later round"])
def test_the_language_models_loss_is_by_the_sft_models_own_unembedding(copy_until, kind, later):
    run, policy = copy_until("reward"), untied(kind).eval()
    tokenizer = load_tokenizer(run.folder / "sft" / "model")
    shutil.rmtree(run.folder / "sft" / "model")
    for part in (policy, tokenizer):
        part.save_pretrained(run.folder / "sft" / "model")
    config = run.config("reward.lm_coef=0.5")
    model = reward.make_model(config)
    if later:
        model.save_pretrained(run.folder / "earlier" / "model")
        model = reward.make_model(config, run.folder / "earlier")
    rows = [[5, 6, 7, 8, 9], [11, 12, 13]]
    tokens, lengths = right_pad(rows, 0)
    with torch.no_grad():
        logp = [policy(torch.tensor([row])).logits[0].log_softmax(-1) for row in rows]
        wanted = [
            -sum(p[t - 1, row[t]] for t in range(1, len(row))) / (len(row) - 1)
            for p, row in zip(logp, rows, strict=True)
        ]
        assert torch.allclose(model(tokens, lengths, with_lm=True)[1], torch.stack(wanted), atol=1e-5)
        half = model.bfloat16()(tokens, lengths, with_lm=True)[1]  # weights as ZeRO holds them
        # bfloat16 rounds weights and activations to 8 bits: errors of 1.4e-3 were measured
        assert torch.allclose(half, torch.stack(wanted), atol=5e-3)
    assert not any("unembedding" in name for name in model.state_dict())
