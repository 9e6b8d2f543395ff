"""The sampler: responses with log-probs to prompts of different lengths. Rollouts take most of PPO's time.

`sample` runs our GPT with a preallocated key-value cache, takes the log-probs while it samples and drops finished
sequences from the batch; other models go through transformers' `generate`. `stream` yields one response token by
token. Tokens depend only on (seed, key, step), the prompt and the model, never on the other prompts of the
batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from rlhf.config import Config
from rlhf.data.chat_template import end_ids
from rlhf.engines.choosing import Choice, Key, choose_tokens, make_uniforms
from rlhf.engines.decoder import Decoder, Prompts, cached_in
from rlhf.engines.graphs import make_decoder
from rlhf.errors import UserError
from rlhf.model.blocks import SwitchMLP
from rlhf.model.gpt import GPTForCausalLM
from rlhf.model.interface import lm
from rlhf.model.linear import Linear, products_cast
from rlhf.ops.fast import packed_weights

MAX_BATCH = 256
LOOK_EVERY = 8  # steps on a GPU between two checks for ended rows, since a check waits for the GPU
PACKED_STEPS = 8  # new tokens from which packing the weights (a few passes over them) saves time
# Bounds in bytes for a batch's keys and values on a CPU.
MOST_CACHE_BYTES, LEAST_CACHE_BYTES = 2**30, 64 * 2**20


class Samples(NamedTuple):
    """Responses to B prompts, in the caller's order; A is the longest response."""

    responses: list[list[int]]  # B lists of token ids, the end token included where there is one
    logprobs: Tensor  # (B, A) float32 nats, 0 where mask is False
    mask: Tensor  # (B, A) bool, True at response tokens
    ended: Tensor  # (B,) bool, True if the response is complete: it has its end token, or the form has none


# -------------------------------------------------------------------------------- decoding with our own model


def _decode(decoder: Decoder, uniforms: Tensor, eos: Tensor, choice: Choice) -> Iterator[tuple[Tensor, ...]]:
    """Yields (rows, tokens, log-probs, ended) per step; `rows` are the prompts still in the batch.

    Rows that have ended stay until the next check; their further tokens are ignored.
    """
    every = _steps_between_looks(eos.device)
    rows = torch.arange(len(uniforms), device=eos.device)
    ended = torch.zeros(len(rows), dtype=torch.bool, device=eos.device)
    logits = decoder.prefill()
    for step in range(uniforms.shape[1]):
        tokens, logp = choose_tokens(logits, uniforms[:, step], choice)
        ended = ended | torch.isin(tokens, eos)
        yield rows, tokens, logp, ended
        if step + 1 == uniforms.shape[1]:
            return
        live = len(ended) if (step + 1) % every else len(ended) - int(ended.sum())
        if live == 0:
            return
        if (carried := rows_carried(live, len(ended))) < len(ended):
            # the first ended rows stay if more rows are carried than live
            kept = decoder.drop(ended & (ended.cumsum(0) > carried - live))
            rows, tokens, uniforms, ended = rows[kept], tokens[kept], uniforms[kept], ended[kept]
        logits = decoder.step(tokens)


def packed(model: nn.Module, rows: int) -> AbstractContextManager[int]:
    """`packed_weights` of a model for this many sequences. Experts' products have any number of rows, so theirs are not packed."""
    routed = {part for layer in model.modules() if isinstance(layer, SwitchMLP) for part in layer.modules()}
    layers = (layer for layer in model.modules() if isinstance(layer, Linear) and layer not in routed)
    return packed_weights([layer.weight for layer in layers], rows)


def _steps_between_looks(device: torch.device) -> int:
    return 1 if device.type == "cpu" else LOOK_EVERY


def rows_carried(live: int, rows: int) -> int:
    """The number of rows with which a batch continues: keeping a few ended ones costs less than removing them.

    Packed products are compiled and CUDA graphs recorded for each number of rows, so only numbers of three significant bits occur.
    """
    step = 1 << max(0, live.bit_length() - 3)
    return min(rows, -(-live // step) * step)


def _sample_native(
    model: GPTForCausalLM, prompts: Prompts, uniforms: Tensor, eos: Tensor, pad: int, choice: Choice
) -> tuple[Tensor, Tensor]:
    """Tokens (B, max_new_tokens) and log-probs of the same shape; values after an end token are meaningless."""
    tokens = torch.full(uniforms.shape[:2], pad, dtype=torch.int64, device=eos.device)
    logprobs = torch.zeros(tokens.shape, device=eos.device)
    decoder = make_decoder(model, prompts, uniforms.shape[1], pad)
    for step, (rows, chosen, logp, _) in enumerate(_decode(decoder, uniforms, eos, choice)):
        tokens[rows, step] = chosen
        logprobs[rows, step] = logp
    return tokens, logprobs


# ------------------------------------------------------------------------------------ decoding with any model


class _ChooseByUniform(LogitsProcessor):
    """Leaves only the token that inverse transform sampling picks, so that `generate` takes it by argmax."""

    def __init__(self, uniforms: Tensor, width: int, choice: Choice):
        self.uniforms, self.width, self.choice = uniforms, width, choice

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - self.width
        tokens, _ = choose_tokens(scores, self.uniforms[:, step], self.choice)
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens[:, None], 0.0)


def _sample_transformers(
    model: Any, prompts: Prompts, uniforms: Tensor, eos: Tensor, pad: int, choice: Choice
) -> tuple[Tensor, Tensor]:
    """As `_sample_native`, through `generate`; a forward over prompt and response gives the log-probs."""
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
    attention = F.pad(mask, (0, response.shape[1]), value=True).long()  # pads after an end token come last
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    output = model(out, attention_mask=attention, position_ids=positions, use_cache=False)
    logits = output.logits[:, width - 1 : -1].float() / choice.temperature
    logp = torch.log_softmax(logits, dim=-1).gather(-1, response[..., None])[..., 0]
    missing = steps - response.shape[1]
    return F.pad(response, (0, missing), value=pad), F.pad(logp, (0, missing))


# ----------------------------------------------------------------------------------------------------- public


def sample(
    model: nn.Module,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None,
    pad_token_id: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    greedy: bool = False,
    keys: Sequence[Key] | None = None,
    seed: int = 0,
    batch_size: int | None = None,
) -> Samples:
    """One response to each prompt, drawn token by token from softmax(logits / temperature).

    keys: one int, str, or tuple of them per prompt; (seed, key) fixes the prompt's random numbers (None: its
    index).
    batch_size: prompts decoded together; None fits the key-value cache to the processor. The order of the
    prompts and the batch change samples only through rounding of the logits. The log-probs are those of the full
    softmax at `temperature`; for models that are not ours a forward recomputes them. Dropout is off while sampling;
    afterwards every module has its former training flag.

    Raises: UserError for a prompt that is empty or leaves no room for max_new_tokens in the context, for
    sampling settings out of range, and for keys that do not match the prompts.
    """
    choice = Choice(temperature, top_p, greedy)
    _check_room(model, prompts, max_new_tokens)
    keys = range(len(prompts)) if keys is None else keys
    if len(keys) != len(prompts):
        raise UserError(f"sampling: {len(keys)} keys for {len(prompts)} prompts: give one key per prompt")
    device = next(model.parameters()).device
    eos = _as_tensor(eos_token_id, device)
    uniforms = make_uniforms(seed, keys, max_new_tokens).to(device)
    native = lm(model).native
    decode: Any = _sample_native if native else _sample_transformers
    size = batch_size or default_batch(model, max(map(len, prompts), default=1) + max_new_tokens)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # prompts of similar length share a batch
    tokens = torch.full((len(prompts), max_new_tokens), pad_token_id, dtype=torch.int64, device=device)
    logprobs = torch.zeros(tokens.shape, device=device)
    rows = min(size, len(prompts))
    many = packed(model, rows) if max_new_tokens >= PACKED_STEPS else nullcontext()
    with _evaluating(model), products_cast(model), torch.inference_mode(), many:
        for start in range(0, len(order), size):
            part = order[start : start + size]
            index = torch.tensor(part, device=device)
            tokens[index], logprobs[index] = decode(
                model, [prompts[i] for i in part], uniforms[index], eos, pad_token_id, choice
            )
    return _make_samples(tokens, logprobs, eos)


def sample_as_configured(config: Config, policy: Any, tokenizer: Any, prompts: Prompts, **settings: Any) -> Samples:
    """`sample` with the run's seed, length of responses and batch, and the tokenizer's end tokens, unless `settings` say
    otherwise.
    """
    of_run = {
        "seed": config.seed,
        "max_new_tokens": config.rollout.max_new_tokens,
        "batch_size": config.rollout.batch_size,
        "eos_token_id": end_ids(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
    }
    return sample(policy, prompts, **{**of_run, **settings})


def stream(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None,
    temperature: float = 1.0,
    greedy: bool = False,
    key: Key = 0,
    seed: int = 0,
) -> Iterator[int]:
    """The tokens of one response as `sample` would draw them, one by one, the end token included.

    Raises: UserError as `sample` does, at the call.
    """
    choice = Choice(temperature, greedy=greedy)
    _check_room(model, [prompt], max_new_tokens)
    device = next(model.parameters()).device
    eos, uniforms = _as_tensor(eos_token_id, device), make_uniforms(seed, [key], max_new_tokens).to(device)
    steps: Any = _stream_native if lm(model).native else _stream_transformers
    return steps(model, prompt, uniforms, eos, choice)


@torch.inference_mode()
def _stream_native(
    model: GPTForCausalLM, prompt: Sequence[int], uniforms: Tensor, eos: Tensor, choice: Choice
) -> Iterator[int]:
    with _evaluating(model):
        decoder = make_decoder(model, [prompt], uniforms.shape[1], pad=0)
        for _, tokens, _, ended in _decode(decoder, uniforms, eos, choice):
            yield int(tokens)
            if bool(ended):
                return


@torch.inference_mode()
def _stream_transformers(
    model: Any, prompt: Sequence[int], uniforms: Tensor, eos: Tensor, choice: Choice
) -> Iterator[int]:
    with _evaluating(model):
        tokens, past = torch.tensor([list(prompt)], device=uniforms.device), None
        for step in range(uniforms.shape[1]):
            output = model(tokens, past_key_values=past, use_cache=True)
            chosen, _ = choose_tokens(output.logits[:, -1], uniforms[:, step], choice)
            yield int(chosen)
            if bool(torch.isin(chosen, eos)):
                return
            past = getattr(output, "past_key_values", None)  # some classes have none: the whole text is read again
            tokens = chosen[:, None] if past is not None else torch.cat([tokens, chosen[:, None]], 1)


# ---------------------------------------------------------------------------------------------------- helpers


def _make_samples(tokens: Tensor, logprobs: Tensor, eos: Tensor) -> Samples:
    """Cut tokens and log-probs (B, max_new_tokens) after the first end token of each row."""
    is_end = torch.isin(tokens, eos)
    ends = is_end.any(-1)
    lengths = torch.where(ends, is_end.int().argmax(-1) + 1, tokens.shape[1])
    ended = ends | (len(eos) == 0)
    longest = int(lengths.max()) if len(lengths) else 0
    mask = torch.arange(longest, device=tokens.device) < lengths[:, None]
    responses = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    return Samples(responses, logprobs[:, :longest].masked_fill(~mask, 0.0), mask, ended)


def _check_room(model: Any, prompts: Prompts, max_new_tokens: int) -> None:
    context = getattr(model.config, "max_position_embeddings", None)
    if max_new_tokens < 1:
        raise UserError(f"sampling: max_new_tokens={max_new_tokens} must be at least 1")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise UserError(f"sampling: prompt {index} has no tokens: give each prompt at least one")
        total = len(prompt) + max_new_tokens
        if context is not None and total > context:
            raise UserError(
                f"sampling: prompt {index} has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}, "
                f"together {total}, the model's context is {context}: shorten the prompt or lower it"
            )


def default_batch(model: Any, columns: int) -> int:
    """The number of rows whose keys and values fit the bound.

    On a CPU eight times the weights (each step reads all weights, whatever the batch, and the longest
    responses are decoded by few rows at the end, once a batch), but 64 MiB at least, and 1 GiB or twice the
    weights at most; on a GPU a quarter of its free memory.
    """
    if not lm(model).native:
        return MAX_BATCH
    config, parameter = model.config, next(model.parameters())
    numbers = 2 * config.n_layer * config.n_kv_head * config.head_dim * columns
    row = numbers * cached_in(model).itemsize
    if parameter.device.type == "cuda":
        room = torch.cuda.mem_get_info(parameter.device)[0] // 4
    else:
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        room = max(LEAST_CACHE_BYTES, 2 * weights, min(8 * weights, MOST_CACHE_BYTES))
    return max(1, min(MAX_BATCH, room // row))


def _as_tensor(eos_token_id: int | Sequence[int] | None, device: torch.device) -> Tensor:
    ids = [] if eos_token_id is None else eos_token_id
    return torch.tensor([ids] if isinstance(ids, int) else list(ids), dtype=torch.int64, device=device)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """A context in eval mode; afterwards the modules that were in training mode are so again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
