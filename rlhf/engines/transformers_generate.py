"""Sampling from any of transformers' models through its `generate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from rlhf.engines.choosing import Choice, choose_tokens
from rlhf.engines.likely import response_logprobs
from rlhf.engines.local import LocalEngine, Prompts, evaluating
from rlhf.model.batching import right_pad

READ_ROWS = 16  # responses per forward that computes their log-probs


class _ChooseByUniform(LogitsProcessor):
    """Leaves only the token that inverse transform sampling picks, so that `generate` takes it by argmax."""

    def __init__(self, uniforms: Tensor, width: int, choice: Choice):
        self.uniforms, self.width, self.choice = uniforms, width, choice

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - self.width
        tokens, _ = choose_tokens(scores, self.uniforms[:, step], self.choice)
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens[:, None], 0.0)


class GenerateEngine(LocalEngine):
    def draw(self, prompts: Prompts, uniforms: Tensor, eos: Tensor, pad: int, choice: Choice) -> tuple[Tensor, Tensor]:
        """By `generate`; forwards over prompts and responses give the log-probs, without logits of all tokens."""
        model = self.model
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=eos.device)
        width, steps = int(lengths.max()), uniforms.shape[1]
        left = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=eos.device)  # (B, P)
        mask = torch.arange(width, device=eos.device) >= (width - lengths)[:, None]
        generation_config = model.generation_config
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
                logits_processor=LogitsProcessorList([_ChooseByUniform(uniforms, width, choice)]),
            )
        finally:
            model.generation_config = generation_config
        response = out[:, width:]
        rows = [[*p, *r] for p, r in zip(prompts, response.tolist(), strict=True)]  # pads after an end token come last
        logp = torch.zeros(response.shape, device=eos.device)
        for start in range(0, len(rows), READ_ROWS):
            part = slice(start, start + READ_ROWS)
            tokens, everything = (
                right_pad(rows[part], pad)[0].to(eos.device),
                torch.ones_like(response[part], dtype=torch.bool),
            )
            logp[part], _ = response_logprobs(model, tokens, lengths[part], everything, temperature=choice.temperature)
        missing = steps - response.shape[1]
        return F.pad(response, (0, missing), value=pad), F.pad(logp, (0, missing))

    @torch.inference_mode()
    def draw_steps(self, prompt: Sequence[int], uniforms: Tensor, eos: Tensor, choice: Choice) -> Iterator[int]:
        with evaluating(self.model):
            tokens, past = torch.tensor([list(prompt)], device=uniforms.device), None
            for step in range(uniforms.shape[1]):
                output = self.model(tokens, past_key_values=past, use_cache=True)
                chosen, _ = choose_tokens(output.logits[:, -1], uniforms[:, step], choice)
                yield int(chosen)
                if bool(torch.isin(chosen, eos)):
                    return
                past = getattr(output, "past_key_values", None)  # some classes have none: the whole text is read again
                tokens = chosen[:, None] if past is not None else torch.cat([tokens, chosen[:, None]], 1)
