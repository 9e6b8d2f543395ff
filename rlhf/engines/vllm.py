"""Sampling by vLLM, in the training process: one engine per process, which receives the trainer's weights tensor by
tensor.

vLLM computes with other kernels than the trainer, so the trainer recomputes the log-probs of what it samples, and after
every load a probe compares the log-probs of both (`VllmEngine.load`). Our GPT runs under the architecture that
`rlhf export` writes.
"""

import functools
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf.config import Config
from rlhf.config.precision import wants_bfloat16
from rlhf.engines.choosing import Key, Samples, Sampling, SamplingEngine, check_sampling, hashed, make_samples
from rlhf.engines.decoder import Prompts
from rlhf.errors import UserError
from rlhf.model.convert import public_config, public_weights
from rlhf.model.fused_loss import response_logprobs
from rlhf.model.interface import evaluating, lm
from rlhf.system.processes import process_count

# In one process, since the weights are handed over as an iterator; nothing listens on the network. No usage statistics.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip
# Root mean square of the difference between vLLM's and the trainer's log-probs of a probe, in nats: larger is refused.
MOST_GAP = {"float32": 1e-3, "bfloat16": 0.1}
PROBE_ROWS, PROBE_TOKENS = 4, 24
# By `vllm.LLM`, which engines of one configuration share: the engine that loaded its weights.
LOADED: dict[Any, "VllmEngine"] = {}


Probe = tuple[Tensor, Tensor]  # log-probs of the same tokens by the trainer and by the sampler


class VllmEngine(SamplingEngine):
    """`load_seconds` includes the probe."""

    def __init__(self, config: Config, model: Any, settings: Sampling):
        super().__init__(model, settings)
        self.device = device = next(model.parameters()).device
        self.dtype = "bfloat16" if wants_bfloat16(config, device) else "float32"
        self.context = lm(model).context
        described = json.dumps(public_config(model, "rollout.engine=vllm"), sort_keys=True)
        memory = config.rollout.vllm_memory if device.type == "cuda" else None
        self.llm = start_vllm(described, self.context, self.dtype, memory, config.rollout.tensor_parallel)
        self.before: Probe | None = None  # of the weights loaded last
        self.asleep = False

    def load(self, model: Any) -> None:
        """Send this model's weights, adapters merged. Raises: UserError if the probe says that vLLM has other ones."""
        started = time.monotonic()
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": public_weights(model)})
        self.llm.reset_prefix_cache()
        self.model = model
        probe = self._probe()
        if problem := stale(probe, self.before, MOST_GAP[self.dtype]):
            raise UserError(f"rollout.engine=vllm: {problem}: sample with rollout.engine=native")
        self.before, self.load_seconds = probe, time.monotonic() - started
        LOADED[self.llm] = self

    def sleep(self) -> None:
        LOADED.pop(self.llm, None)
        if self.device.type == "cuda":
            self.llm.sleep(level=2)
            self.asleep = True

    def wake(self) -> None:
        if self.asleep:
            self.llm.wake_up()
            self.asleep = False

    def sample(self, prompts: Prompts, keys: Sequence[Key] | None = None, **changes: Any) -> Samples:
        from vllm import SamplingParams

        how = replace(self.settings, **changes)
        keys = check_sampling(prompts, keys, how, self.context)
        if LOADED.get(self.llm) is not self:
            self.load(self.model)
        asked = [
            SamplingParams(
                temperature=0.0 if how.greedy else how.temperature,
                top_p=how.top_p,
                max_tokens=how.max_new_tokens,
                seed=hashed(how.seed, key) >> 1,
                logprobs=0,  # of the chosen token only
                stop_token_ids=how.ends,
                ignore_eos=True,  # other end tokens are in stop_token_ids
                detokenize=False,
            )
            for key in keys
        ]
        out = self.llm.generate([{"prompt_token_ids": list(p)} for p in prompts], asked, use_tqdm=False)
        tokens = [torch.tensor(one.outputs[0].token_ids) for one in out]
        chosen = [
            torch.tensor([step[token].logprob for step, token in zip(o.logprobs, o.token_ids, strict=True)])
            for o in (one.outputs[0] for one in out)
        ]
        pad = functools.partial(pad_sequence, batch_first=True)
        eos = torch.tensor(how.ends, dtype=torch.int64)
        samples = make_samples(pad(tokens, padding_value=how.pad_token_id), pad(chosen), eos)
        return Samples(samples.responses, *(x.to(self.device) for x in samples[1:]))

    @torch.no_grad()
    def _probe(self) -> Probe:
        """Log-probs of random tokens, the same ones each time."""
        from vllm import SamplingParams

        generator = torch.Generator().manual_seed(0)
        width = min(PROBE_TOKENS, (self.context or PROBE_TOKENS + 1) - 1)
        vocabulary = self.model.get_input_embeddings().num_embeddings
        rows = torch.randint(0, vocabulary, (PROBE_ROWS, width), generator=generator)
        asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        out = self.llm.generate([{"prompt_token_ids": row} for row in rows.tolist()], asked, use_tqdm=False)
        sampler = [
            [step[token].logprob for step, token in zip(one.prompt_logprobs[1:], row[1:], strict=True)]
            for one, row in zip(out, rows.tolist(), strict=True)
        ]
        tokens = rows.to(self.device)
        everything = torch.ones_like(tokens[:, 1:], dtype=torch.bool)
        starts = torch.ones(len(rows), dtype=torch.int64, device=self.device)
        with evaluating(self.model):
            trainer, _ = response_logprobs(self.model, tokens, starts, everything)
        return trainer.float().cpu(), torch.tensor(sampler)


def stale(probe: Probe, before: Probe | None, most: float) -> str | None:
    """Why a probe says that vLLM does not have the trainer's weights, or None.

    The gap must be rounding, and if the trainer's log-probs moved by more than rounding since the last load, vLLM's
    must be nearer to the new ones than to the old ones.
    """
    trainer, sampler = probe
    old, old_sampler = before or probe
    gap = rms(sampler, trainer)
    if not gap <= most:  # NaN too
        return f"its log-probs of a probe differ from the trainer's by {gap:.1e} nats, want {most:.0e} or less"
    if rms(trainer, old) > 4 * rms(old_sampler, old) and (to_old := rms(sampler, old)) < gap:
        return f"it still has the weights of the last update: {to_old:.1e} nats from those, {gap:.1e} from the new ones"
    return None


def rms(a: Tensor, b: Tensor) -> float:
    return (a - b).double().square().mean().sqrt().item()


@functools.cache
def start_vllm(described: str, context: int | None, dtype: str, memory: float | None, tensor_parallel: int) -> Any:
    """vLLM for a model of this configuration (as JSON), with random weights until the first `load`.

    memory: the share of a GPU's memory for weights and key-value cache. Raises: UserError if vLLM is missing or refuses
    the model.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM
    except ImportError as error:
        failed = f"vLLM cannot be imported ({str(error).splitlines()[0]})"
        raise UserError(f"rollout.engine=vllm: {failed}: see docs/vllm.md, or set rollout.engine=native") from None
    if memory is not None:
        place: dict[str, Any] = {"gpu_memory_utilization": memory, "enable_sleep_mode": True}
    else:  # vLLM 0.32 on a CPU fails if it divides the prompt of a request with a seed
        place = {"enforce_eager": True, "enable_chunked_prefill": False}
    external = {"distributed_executor_backend": "external_launcher"} if process_count() > 1 else {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(described, encoding="utf-8")
        try:
            llm = LLM(
                model=folder,
                dtype=dtype,
                load_format="dummy",
                skip_tokenizer_init=True,
                max_model_len=context,
                tensor_parallel_size=tensor_parallel,
                disable_log_stats=True,
                trust_remote_code=False,
                **place,
                **external,
            )
        except (ValueError, NotImplementedError) as error:
            failed = f"vLLM does not run a {json.loads(described)['model_type']}: {str(error).splitlines()[0]}"
            raise UserError(f"rollout.engine=vllm: {failed}: set rollout.engine=native") from error
    return llm
