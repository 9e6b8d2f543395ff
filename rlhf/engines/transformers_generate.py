"""Sampling from any of transformers' models through its `generate`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from rlhf.engines.choosing import Choice, choose_tokens
from rlhf.engines.local import LocalEngine, Prompts


class _ChooseByUniform(LogitsProcessor):
    """Leaves only the token that inverse transform sampling picks, so that `generate` takes it by argmax; keeps its log-prob."""

    def __init__(self, uniforms: Tensor, width: int, choice: Choice):
        self.uniforms, self.width, self.choice = uniforms, width, choice
        self.logprobs = torch.zeros_like(uniforms)  # (B, steps)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - self.width
        tokens, self.logprobs[:, step] = choose_tokens(scores, self.uniforms[:, step], self.choice)
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens[:, None], 0.0)


class GenerateEngine(LocalEngine):
    def draw(self, prompts: Prompts, uniforms: Tensor, eos: Tensor, pad: int, choice: Choice) -> tuple[Tensor, Tensor]:
        model = self.model
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=eos.device)
        width, steps = int(lengths.max()), uniforms.shape[1]
        left = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=eos.device)  # (B, P)
        mask = torch.arange(width, device=eos.device) >= (width - lengths)[:, None]
        choose, generation_config = _ChooseByUniform(uniforms, width, choice), model.generation_config
        model.generation_config = GenerationConfig()  # its penalties and cuts would change the distribution
        try:
            out = model.generate(
                left,
                attention_mask=mask.long(),
                do_sample=False,
                num_beams=1,
                max_new_tokens=steps,
                eos_token_id=eos.tolist() or None,
                pad_token_id=pad,
                logits_processor=LogitsProcessorList([choose]),
            )
        finally:
            model.generation_config = generation_config
        return F.pad(out[:, width:], (0, width + steps - out.shape[1]), value=pad), choose.logprobs
