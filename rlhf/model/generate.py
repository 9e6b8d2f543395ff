"""The sampler: ragged prompts in, responses with their log-probs out. Rollouts are most of PPO's time.

`sample` runs our GPT with a preallocated key-value cache, takes the log-probs while it samples and drops
finished sequences from the batch; other models go through transformers' `generate`. `stream` yields one
response token by token. Not here: chat templates, scores, rewards. Which token a prompt gets depends on
(seed, key, step) and the model alone, never on the batch the prompt is in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from rlhf.errors import UserError
from rlhf.model.fused_loss import is_plain
from rlhf.model.gpt import GPTForCausalLM, rotary_factors
from rlhf.model.packed import is_packed, packed_weights
from rlhf.ops.unembedding import unembed, unembedding_factor

Key = int | str | tuple
Prompts = Sequence[Sequence[int]]

MAX_BATCH = 256
PACKED_STEPS = 8  # new tokens from which packing the weights (a few passes over them) pays
PREFILL_ROWS = 32  # prompts that go through the model together on a CPU
CDF_BLOCK = 64  # tokens that are summed together before the cumulative distribution is searched
# Keys and values of a batch on a CPU: a small machine's memory, and the least that it gives.
MOST_CACHE_BYTES, LEAST_CACHE_BYTES = 2**30, 64 * 2**20


class Samples(NamedTuple):
    """Responses to B prompts, in the caller's order; A is the longest response."""

    responses: list[list[int]]  # B lists of token ids, the end token included where there is one
    logprobs: Tensor  # (B, A) float32 nats, 0 where mask is False
    mask: Tensor  # (B, A) bool, True at response tokens
    ended: Tensor  # (B,) bool, True where the response has its end token


@dataclass(slots=True)
class Choice:
    """How a token is chosen from logits; checked once."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False

    def __post_init__(self) -> None:
        problems = []
        if not self.temperature > 0:
            problems.append(f"temperature={self.temperature} must be above 0 (or ask for greedy)")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p={self.top_p} must be in (0, 1]")
        if self.top_k < 0:
            problems.append(f"top_k={self.top_k} must be 0 (off) or more")
        if problems:
            raise UserError("sampling: " + "; ".join(problems))


# ------------------------------------------------------------------------------------------- choosing a token


def make_uniforms(seed: int, keys: Sequence[Key], steps: int) -> Tensor:
    """Uniform numbers (len(keys), steps) float32 in [0, 1), a function of (seed, key, step) only.

    A counter-based generator: the mixing function of Steele et al. 2014 (splitmix64) over hash(seed, key) +
    step.
    """
    digests = [blake2b(repr((seed, key)).encode(), digest_size=8).digest() for key in keys]
    state = np.frombuffer(b"".join(digests), dtype=np.uint64)[:, None]  # (B, 1)
    x = state + np.arange(1, steps + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return torch.from_numpy(((x >> np.uint64(40)).astype(np.float32)) * np.float32(2**-24))


def choose_tokens(logits: Tensor, uniforms: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
    """Tokens (B,) int64 and their log-probs (B,) float32 from logits (B, V) and uniforms (B,).

    Inverse transform sampling: the first token whose cumulative probability exceeds u. The log-prob is that
    of softmax(logits / temperature), before any cut by top_k or top_p.
    """
    logits = logits.float() if choice.temperature == 1.0 else logits.float() / choice.temperature
    probs = torch.softmax(logits, dim=-1)
    tokens = logits.argmax(-1, keepdim=True) if choice.greedy else _invert(_cut(probs, choice), uniforms[:, None])
    # a token that was drawn has a probability well above the smallest float, so that its logarithm is as good as a
    # log-softmax's, which would take a second pass of exponentials
    return tokens[:, 0], probs.gather(-1, tokens)[:, 0].log()


def _invert(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The first token (B, 1) at which the cumulative sum of probs (B, V) exceeds uniforms (B, 1) times their total.

    First the block of tokens, then the place in it: a running sum over all of V is slow on a CPU.
    """
    size = probs.shape[-1]
    blocks = F.pad(probs, (0, -size % CDF_BLOCK)).unflatten(-1, (-1, CDF_BLOCK))  # (B, V/C, C)
    cumulative = blocks.sum(-1).cumsum(-1)  # (B, V/C)
    # u is at most 1 - 2^-24, so that the threshold is below the total after rounding too
    threshold = uniforms * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, threshold, right=True).clamp(max=cumulative.shape[1] - 1)
    before = F.pad(cumulative, (1, 0)).gather(-1, block)
    inside = blocks.gather(1, block[..., None].expand(-1, 1, CDF_BLOCK))[:, 0].cumsum(-1)  # (B, C)
    # a block's two sums differ by rounding: what is sought in it must stay below the second one
    sought = torch.minimum(threshold - before, inside[:, -1:] * (1 - 2**-23))
    tokens = block * CDF_BLOCK + torch.searchsorted(inside, sought, right=True)
    # logits that are not numbers point past the vocabulary; the log-prob, not a number either, tells of them
    return tokens.clamp(max=size - 1)


def _cut(probs: Tensor, choice: Choice) -> Tensor:
    """Keep the `top_k` likeliest, then the likeliest that together reach `top_p` of those; 0 elsewhere."""
    if 0 < choice.top_k < probs.shape[-1]:
        floor = probs.topk(choice.top_k, dim=-1).values[:, -1:]
        probs = probs.masked_fill(probs < floor, 0.0)
    if choice.top_p < 1.0:
        ordered, order = probs.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # mass of the likelier tokens: 0 for the first, so it stays
        ordered = ordered.masked_fill(before >= choice.top_p * ordered.sum(-1, keepdim=True), 0.0)
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)
    return probs


# -------------------------------------------------------------------------------- decoding with our own model


def computed_in(weight: Tensor) -> torch.dtype:
    """The precision of products with a weight, and so of keys and values: autocast's where that is on."""
    device = weight.device.type
    half = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if half else weight.dtype


class _Decoder:
    """Our GPT over a preallocated cache.

    Prompts stand on the left and are padded on the right, so that the first pass needs no mask; generated
    tokens go into the columns after the longest prompt, the same column for every row. What lies between a
    shorter prompt and its response is masked by `gap`; positions count real tokens.
    """

    def __init__(self, model: GPTForCausalLM, prompts: Prompts, max_new_tokens: int, pad: int):
        config, weight = model.config, model.model.embed_tokens.weight
        self.model, self.trunk = model, model.model
        self.packed = any(is_packed(module) for module in model.modules())
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=weight.device)
        self.column = max(map(len, prompts))
        padded = [list(prompt) + [pad] * (self.column - len(prompt)) for prompt in prompts]
        self.tokens = torch.tensor(padded, device=weight.device)  # (B, P)
        kind = computed_in(weight)
        # in half precision too the logits are float32, as where training computes log-probs of responses
        own = kind.itemsize < 4 and is_plain(model.lm_head) and not getattr(model.lm_head, "stands_for_shards", False)
        self.unembedding = unembedding_factor(model.lm_head.weight.to(kind)) if own else None
        self.kind = kind
        columns, heads = self.column + max_new_tokens - 1, config.n_kv_head
        self.shape = (len(prompts), heads, columns, config.head_dim)
        self.cache = [tuple(weight.new_empty(self.shape, dtype=kind) for _ in "kv") for _ in self.trunk.layers]
        self.gap = None
        if min(map(len, prompts)) < self.column:
            column = torch.arange(columns, device=weight.device)
            unseen = (column >= self.lengths[:, None]) & (column < self.column)
            self.gap = weight.new_zeros(unseen.shape).masked_fill(unseen, -torch.inf)  # (B, L)
            self.gap = self.gap[:, None, None]  # (B, 1, 1, L)
        self.rope = None
        if config.positions == "rotary":
            positions = torch.arange(columns, device=weight.device)
            # cos and sin, each (L, 1, D/H)
            self.rope = rotary_factors(positions, config, weight.dtype)

    def prefill(self) -> Tensor:
        """Logits (B, V) after each prompt; on a CPU a few rows of similar length at a time, to compute little padding."""
        count = len(self.tokens)
        size = PREFILL_ROWS if self.tokens.device.type == "cpu" else count
        last = [self._prefill_rows(slice(start, start + size)) for start in range(0, count, size)]
        return self._logits(torch.cat(last))

    def _prefill_rows(self, part: slice) -> Tensor:
        """Hidden states (rows, D) after the prompts of some rows, cut to the longest of them; fills their cache."""
        lengths, trunk = self.lengths[part], self.trunk
        width = int(lengths.max()) if len(lengths) < len(self.lengths) else self.column
        x = trunk.embed_tokens(self.tokens[part, :width])
        if trunk.embed_positions is not None:
            x = x + trunk.embed_positions.weight[:width]
        rope = None if self.rope is None else (self.rope[0][:width], self.rope[1][:width])
        rows = torch.arange(len(x), device=x.device)
        for layer, (keys, values) in zip(trunk.layers, self.cache, strict=True):
            q, k, v = (t.transpose(1, 2) for t in layer.attention.project(layer.before_attention(x), rope))
            for side, new in ((keys[part], k), (values[part], v)):
                side[:, :, :width] = new
                side[:, :, width : self.column] = 0.0  # masked later, but what is there must be a number
            grouped = q.shape[1] != k.shape[1]
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            y = y.transpose(1, 2).flatten(2)  # (rows, P, D)
            if layer is trunk.layers[-1]:  # of its output, only the last token's is read
                x, y = x[rows, lengths - 1], y[rows, lengths - 1]  # (rows, D)
            x = layer.after_attention(x, layer.attention.out(y))
        return x

    def step(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) after one more token (B,) a row."""
        trunk, column = self.trunk, self.column
        x = trunk.embed_tokens(tokens)  # (B, D)
        if trunk.embed_positions is not None:
            x = x + trunk.embed_positions(self.lengths)
        rope = None if self.rope is None else (self.rope[0][self.lengths], self.rope[1][self.lengths])
        gap = None if self.gap is None else self.gap[..., : column + 1]
        rows, heads = x.shape[0], self.shape[1]
        for layer, (keys, values) in zip(trunk.layers, self.cache, strict=True):
            q, k, v = layer.attention.project(layer.before_attention(x), rope)  # (B, H or KV, D/H)
            keys[:, :, column], values[:, :, column] = k, v
            # the queries that share a key head stand where a sequence would: (B, KV, H/KV, D/H)
            q = q.reshape(rows, heads, -1, self.shape[-1])
            y = _attend(q, keys[:, :, : column + 1], values[:, :, : column + 1], gap)
            x = layer.after_attention(x, layer.attention.out(y.reshape(rows, -1)))
        self.column += 1
        self.lengths += 1
        return self._logits(x)

    def _logits(self, x: Tensor) -> Tensor:
        x = self.trunk.norm(x)
        if self.unembedding is None:
            return self.model.lm_head(x)
        with torch.autocast(x.device.type, enabled=False):
            return unembed(x.to(self.kind), self.unembedding)

    def drop(self, ended: Tensor) -> Tensor:
        """Take the ended rows (B,) bool out of the batch; returns the old row at each new one.

        Rows from the end move into the gaps, so that only they are copied.
        """
        count = len(ended) - int(ended.sum())
        holes = ended[:count].nonzero()[:, 0]
        movers = (~ended[count:]).nonzero()[:, 0] + count
        for side in (side for pair in self.cache for side in pair):
            filled = side[:, :, : self.column]
            filled[holes] = filled[movers]
        self.cache = [(keys[:count], values[:count]) for keys, values in self.cache]
        rows = torch.arange(count, device=ended.device)
        rows[holes] = movers
        self.lengths = self.lengths[rows]
        self.gap = None if self.gap is None else self.gap[rows]
        return rows


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(D/H) + mask) v; the fused CPU kernel is slow where queries are few."""
    if q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)  # (B, KV, H/KV, L)
    return (scores if mask is None else scores + mask).softmax(-1) @ v


def _decode(decoder: _Decoder, uniforms: Tensor, eos: Tensor, choice: Choice) -> Iterator[tuple[Tensor, ...]]:
    """Yields (rows, tokens, log-probs, ended) a step; `rows` are the prompts still carried along."""
    rows = torch.arange(len(uniforms), device=eos.device)
    ended = torch.zeros(len(rows), dtype=torch.bool, device=eos.device)
    logits = decoder.prefill()
    for step in range(uniforms.shape[1]):
        tokens, logp = choose_tokens(logits, uniforms[:, step], choice)
        ended = ended | torch.isin(tokens, eos)
        yield rows, tokens, logp, ended
        live = len(ended) - int(ended.sum())
        if live == 0 or step + 1 == uniforms.shape[1]:
            return
        if (carried := _rows_carried(live, len(ended), decoder.packed)) < len(ended):
            # the first of the ended ones stay where more are carried than live
            kept = decoder.drop(ended & (ended.cumsum(0) > carried - live))
            rows, tokens, uniforms, ended = rows[kept], tokens[kept], uniforms[kept], ended[kept]
        logits = decoder.step(tokens)


def _rows_carried(live: int, rows: int, packed: bool) -> int:
    """How many rows a batch goes on with: a few ended ones cost less to carry than to take out.

    Packed products are compiled for each number of rows, and some megabytes each, so that they see few: of three bits.
    """
    if not packed:
        return live if rows - live > rows // 10 else rows
    step = 1 << max(0, live.bit_length() - 3)
    return min(rows, -(-live // step) * step)


def _sample_native(
    model: GPTForCausalLM, prompts: Prompts, uniforms: Tensor, eos: Tensor, pad: int, choice: Choice
) -> tuple[Tensor, Tensor]:
    """Tokens (B, max_new_tokens) and log-probs of the same shape; what follows an end token means nothing."""
    tokens = torch.full(uniforms.shape, pad, dtype=torch.int64, device=eos.device)
    logprobs = torch.zeros(uniforms.shape, device=eos.device)
    decoder = _Decoder(model, prompts, uniforms.shape[1], pad)
    for step, (rows, chosen, logp, _) in enumerate(_decode(decoder, uniforms, eos, choice)):
        tokens[rows, step] = chosen
        logprobs[rows, step] = logp
    return tokens, logprobs


# ------------------------------------------------------------------------------------ decoding with any model


class _ChooseByUniform(LogitsProcessor):
    """Leaves only the token that inverse transform sampling picks, so that `generate` takes it by argmax."""

    def __init__(self, uniforms: Tensor, prompt_width: int, choice: Choice):
        self.uniforms, self.prompt_width, self.choice = uniforms, prompt_width, choice

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - self.prompt_width
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
    own = model.generation_config
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
        model.generation_config = own
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
    top_k: int = 0,
    greedy: bool = False,
    keys: Sequence[Key] | Tensor | None = None,
    seed: int = 0,
    batch_size: int | None = None,
) -> Samples:
    """One response to each prompt, drawn token by token from softmax(logits / temperature).

    keys: one int, str, or tuple of them a prompt; (seed, key) fixes the prompt's random numbers (None: its
    index).
    batch_size: prompts decoded together; None fits the key-value cache to the processor. The order of the
    prompts, the batch they share and its size change no sample but through rounding of the logits. The
    log-probs are those of the full softmax at `temperature`; for models that are not ours a forward
    recomputes them. Dropout is off while sampling, and every module's training flag is as before afterwards.

    Raises: UserError for a prompt that is empty or leaves no room for max_new_tokens in the context, for
    sampling settings out of range, and for keys that do not match the prompts.
    """
    choice = Choice(temperature, top_p, top_k, greedy)
    _check_room(model, prompts, max_new_tokens)
    device = next(model.parameters()).device
    eos = _as_tensor(eos_token_id, device)
    uniforms = make_uniforms(seed, _as_keys(keys, len(prompts)), max_new_tokens).to(device)
    native = isinstance(model, GPTForCausalLM)
    decode: Any = _sample_native if native else _sample_transformers
    size = batch_size or _default_batch(model, max(map(len, prompts), default=1) + max_new_tokens)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # neighbours of a length share a batch
    tokens = torch.full((len(prompts), max_new_tokens), pad_token_id, dtype=torch.int64, device=device)
    logprobs = torch.zeros(tokens.shape, device=device)
    packed = (
        packed_weights(model, min(size, len(prompts))) if native and max_new_tokens >= PACKED_STEPS else nullcontext()
    )
    with _evaluating(model), torch.inference_mode(), packed:
        for start in range(0, len(order), size):
            part = order[start : start + size]
            index = torch.tensor(part, device=device)
            tokens[index], logprobs[index] = decode(
                model, [prompts[i] for i in part], uniforms[index], eos, pad_token_id, choice
            )
    return _make_samples(tokens, logprobs, eos)


def stream(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    greedy: bool = False,
    key: Key = 0,
    seed: int = 0,
) -> Iterator[int]:
    """The tokens of one response as `sample` would draw them, one by one, the end token included.

    Raises: UserError as `sample` does, at the call.
    """
    choice = Choice(temperature, top_p, top_k, greedy)
    _check_room(model, [prompt], max_new_tokens)
    device = next(model.parameters()).device
    eos, uniforms = _as_tensor(eos_token_id, device), make_uniforms(seed, [key], max_new_tokens).to(device)
    steps: Any = _stream_native if isinstance(model, GPTForCausalLM) else _stream_transformers
    return steps(model, prompt, uniforms, eos, choice)


@torch.inference_mode()
def _stream_native(
    model: GPTForCausalLM, prompt: Sequence[int], uniforms: Tensor, eos: Tensor, choice: Choice
) -> Iterator[int]:
    with _evaluating(model):
        decoder = _Decoder(model, [prompt], uniforms.shape[1], pad=0)
        for _, tokens, _, _ in _decode(decoder, uniforms, eos, choice):
            yield int(tokens)


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
            tokens, past = chosen[:, None], output.past_key_values


# ---------------------------------------------------------------------------------------------------- helpers


def _make_samples(tokens: Tensor, logprobs: Tensor, eos: Tensor) -> Samples:
    """Cut tokens and log-probs (B, max_new_tokens) after the first end token of each row."""
    is_end = torch.isin(tokens, eos)
    ended = is_end.any(-1)
    lengths = torch.where(ended, is_end.int().argmax(-1) + 1, tokens.shape[1])
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


def _default_batch(model: Any, columns: int) -> int:
    """As many rows as keep their keys and values within bounds.

    On a CPU eight times the weights (each step reads all weights, whatever the batch, and the longest
    responses are decoded by few rows at the end, once a batch), but 64 MiB at least, and 1 GiB or twice the
    weights at most; on a GPU a quarter of its free memory.
    """
    if not isinstance(model, GPTForCausalLM):
        return MAX_BATCH
    config, parameter = model.config, next(model.parameters())
    numbers = 2 * config.n_layer * config.n_kv_head * config.head_dim * columns
    row = numbers * computed_in(parameter).itemsize
    if parameter.device.type == "cuda":
        room = torch.cuda.mem_get_info(parameter.device)[0] // 4
    else:
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        room = max(LEAST_CACHE_BYTES, 2 * weights, min(8 * weights, MOST_CACHE_BYTES))
    return max(1, min(MAX_BATCH, room // row))


def _as_tensor(eos_token_id: int | Sequence[int] | None, device: torch.device) -> Tensor:
    ids = [] if eos_token_id is None else eos_token_id
    return torch.tensor([ids] if isinstance(ids, int) else list(ids), dtype=torch.int64, device=device)


def _as_keys(keys: Sequence[Key] | Tensor | None, count: int) -> list[Key]:
    if keys is None:
        return list(range(count))
    plain = [_plain_key(key) for key in (keys.tolist() if isinstance(keys, Tensor) else keys)]
    if len(plain) != count:
        raise UserError(f"sampling: {len(plain)} keys for {count} prompts: give one key a prompt")
    return plain


def _plain_key(key: Any) -> Key:
    """Of Python's own types, so that equal keys hash alike whatever number type they came in."""
    if isinstance(key, str):
        return key
    return tuple(map(_plain_key, key)) if isinstance(key, tuple | list) else int(key)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off inside; afterwards exactly the modules that were training train again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
