"""Gradients and optimizer steps of a module: on one process, on several, or with DeepSpeed ZeRO.

ZeRO-1 shards the optimizer's state over the ranks, ZeRO-2 the gradients too, ZeRO-3 the weights too (Rajbhandari et
al. 2020); offload keeps the sharded optimizer (and with ZeRO-3 the weights) in the host's memory.

Losses are already divided by GLOBAL counts, so the gradient of a step is the SUM over all ranks and micro-batches of
the losses given to `backward`.
"""

import contextlib
import copy
import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.config import DEEPSPEED, Config
from rlhf.config.precision import wants_bfloat16
from rlhf.errors import UserError, optional
from rlhf.model.linear import hold_frozen, hold_rounded, round_frozen
from rlhf.system.files import read_json
from rlhf.system.processes import Ranks, connect, is_first
from rlhf.training.optim import decay_groups, make_adamw
from rlhf.training.setup import check_gradients, transformers_in
from rlhf.training.state import Ema, PlainState, SavedState, ZeroState, gathered, is_partitioned


class NonFinite(Exception):
    """Values that are not finite, by name, and the batch that they come from; `open_loop` makes one line of it."""

    def __init__(self, names: list[str], batch: Mapping[str, Tensor]):
        super().__init__(", ".join(names))
        self.names, self.batch = names, batch


def check_finite(values: Mapping[str, Tensor | float], batch: Mapping[str, Tensor]) -> None:
    """A value that is not finite ends the stage before the optimizer step. Raises: NonFinite."""
    finite = [torch.isfinite(torch.as_tensor(value)).all() for value in values.values()]
    bad = [name for name, good in zip(values, torch.stack(finite).tolist(), strict=True) if not good]
    if bad:
        raise NonFinite(bad, batch)


class Engine:
    """A module and its optimizer, with a whole copy on each process; gradients are summed over processes.

    groups: the optimizer's parameter groups; those of one "name" are a part of the module that is clipped by itself.
    """

    # whether ZeRO owns the gradients: they cannot be read before the step, which all ranks take together
    sharded = False

    def __init__(self, module: Any, optimizer: Any, device: torch.device, bfloat16: bool, most: float):
        self.module, self.optimizer, self.device, self.bfloat16 = module, optimizer, device, bfloat16
        self.max_grad_norm = most
        self.ranks = Ranks(device)
        self.names: list[str] = [group.pop("name", "") for group in optimizer.param_groups]
        self.rates: list[float] = [group["lr"] for group in optimizer.param_groups]
        self.parts: dict[str, list[nn.Parameter]] = {name: [] for name in self.names}
        for name, group in zip(self.names, optimizer.param_groups, strict=True):
            self.parts[name] += group["params"]
        place = {id(p): i for i, p in enumerate(module.parameters())}
        for parameters in self.parts.values():
            parameters.sort(key=lambda p: place[id(p)])
        self.whole_state: Any = PlainState(module, optimizer)
        # memory of the gradients, until training ends
        self.places = place_gradients(module) if device.type == "cpu" and not self.sharded else {}
        self.ema: Ema | None = None
        self.averaged = ""  # the part whose weights `ema` averages
        self.unchecked = device.type == "mps"  # whether the first forward is to be compared with the CPU's
        # of the micro-batches since the last step: whether the loss is finite, read once per step, and the tensors
        self.losses: list[tuple[Tensor, Mapping[str, Tensor]]] = []
        self.batch: Mapping[str, Tensor] = {}  # the last micro-batch of a step; the first whose loss is not finite
        # `set_budget` sets the first
        self.most_tokens: int | None = None  # padded tokens of a forward with gradients
        self.recomputes = False  # whether activations are computed again in the backward pass: gradient_checkpointing

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """The module's forward."""
        if self.unchecked and torch.is_grad_enabled():
            self.unchecked = False
            check_gradients(self.module, arguments, keywords)
        with self.autocast():
            return self.module(*arguments, **keywords)

    def recompute_activations(self) -> None:
        """Compute activations again in the backward pass from now on. Raises: UserError if a model's class does not support it."""
        for model in transformers_in(self.module):
            if not model.supports_gradient_checkpointing:
                wrong = f"gradient_checkpointing: {type(model).__name__} has no gradient checkpointing"
                raise UserError(f"{wrong}: set it to false")
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.recomputes = True

    def autocast(self) -> contextlib.AbstractContextManager:
        on = self.bfloat16 and not self.sharded  # under ZeRO the weights themselves are bfloat16
        return torch.autocast(self.device.type, torch.bfloat16) if on else contextlib.nullcontext()

    def keep_average(self, part: str, module: nn.Module, decay: float) -> None:
        """Average the weights of `module`, which belong to this part, at each step in which the part trains."""
        slices = (self.ranks.rank, self.ranks.count) if self.sharded else (0, 1)
        self.ema, self.averaged = Ema(module, decay, *slices), part

    def backward(self, loss: Tensor, batch: Mapping[str, Tensor] | None = None) -> None:
        """Add a micro-batch's gradient. batch: its tensors, which are kept if the loss is not finite."""
        self.losses.append((torch.isfinite(loss.detach()).all(), batch or {}))
        self._backward(loss)

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def discard(self) -> None:
        """Forget the gradients since the last step, of something that was only measured. Not under ZeRO."""
        self.module.zero_grad()
        self.losses.clear()

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> float:
        """The norm of the gradient over all ranks; changes no gradient."""
        return nn.utils.get_total_norm(self._summed(list(parameters))).item()

    def _summed(self, parameters: list[nn.Parameter]) -> list[Tensor]:
        """The gradients summed over ranks; those of parameters without one on any rank are zeros, or left out on one rank."""
        if self.ranks.count == 1:
            return [p.grad for p in parameters if p.grad is not None]
        return self.ranks.sum_tensors([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])

    def step(self, factors: float | Mapping[str, float] = 1.0) -> dict[str, float]:
        """One optimizer step by the gradients since the last one, clipped; clears them.

        factors: on the learning rates, by part if parts differ. A part that is not named is idle: it has no gradient
        and takes no step. Returns the norms before clipping: optim/grad_norm and, without ZeRO, optim/<part>_grad_norm.
        Raises: NonFinite on every rank, before the step, if a loss or a gradient of any rank is not finite.
        """
        factors = factors if isinstance(factors, Mapping) else dict.fromkeys(self.parts, factors)
        finite = torch.stack([flag for flag, _ in self.losses]).tolist() if self.losses else []
        bad = finite.index(False) if False in finite else None
        self.batch = self.losses[-1 if bad is None else bad][1] if finite else {}
        self.losses = []
        if self.ranks.max(bad is not None):
            raise NonFinite(["loss"], {} if bad is None else self.batch)
        for group, name, rate in zip(self.optimizer.param_groups, self.names, self.rates, strict=True):
            group["lr"] = rate * factors.get(name, 0.0)
        norms = self._step(factors)
        if self.ema is not None and self.averaged in factors:
            self.ema.update()
        return norms

    def _step(self, factors: Mapping[str, float]) -> dict[str, float]:
        norms = {}
        for name, parameters in self.parts.items():
            if name in factors and self.ranks.count > 1:
                for p, total in zip(parameters, self._summed(parameters), strict=True):
                    p.grad = total
            norms[name] = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).to(self.device)
        check_finite({f"gradient of {name}" if name else "gradient": norm for name, norm in norms.items()}, self.batch)
        if self.max_grad_norm:
            for name, parameters in self.parts.items():
                nn.utils.clip_grads_with_norm_(parameters, self.max_grad_norm, norms[name])
        self.optimizer.step()
        self.optimizer.zero_grad()
        whole, *each = torch.stack([torch.stack(list(norms.values())).norm(), *norms.values()]).tolist()
        by_part = {f"optim/{name}_grad_norm": x for name, x in zip(norms, each, strict=True) if name}
        return {"optim/grad_norm": whole} | by_part

    def whole(self, part: nn.Module) -> contextlib.AbstractContextManager[nn.Module]:
        """A context with a part of the module that has all its weights on this rank."""
        return contextlib.nullcontext(part)

    def state(self) -> dict[str, dict[str, Tensor]] | None:
        """{"weights", "exp_avg", "exp_avg_sq", "steps", "ema"}: whole float32 tensors by parameter, on rank 0's CPU.
        Moments of parameters that have taken no step yet are absent. On a CPU without ZeRO the tensors are not copies:
        the next step changes them. Every rank has to call it.
        """
        state = self.whole_state.read()
        if self.ema is not None:
            average = self.ema.state_dict()
            if state is not None:
                state |= {"ema": average, "ema_steps": {"steps": torch.tensor(self.ema.steps)}}
        return state

    def restore(self, state: SavedState) -> None:
        """Restore the result of `state`."""
        self.whole_state.write({kind: tensors for kind, tensors in state.items() if not kind.startswith("ema")})
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"], int(state["ema_steps"]["steps"]))


def place_gradients(module: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Reserve memory for each gradient, by parameter. Else they lie scattered among freed activations, and larger forwards fit nowhere."""
    places: dict[Any, Tensor] = {p: torch.empty_like(p) for p in module.parameters() if p.requires_grad}

    def move(parameter: Tensor) -> None:
        place = places.get(parameter)
        if place is not None and parameter.grad is not None and parameter.grad is not place:
            parameter.grad = place.copy_(parameter.grad)

    for parameter in places:
        parameter.register_post_accumulate_grad_hook(move)
    return places


class ZeroEngine(Engine):
    """The same under DeepSpeed: optimizer state (ZeRO-1), gradients (2) and weights (3) are divided among the ranks.

    DeepSpeed clips the joint norm of all parameters. Its engine is used directly: accelerate's backward steps the
    optimizer.
    """

    sharded = True

    def __init__(self, config: Config, module: Any, optimizer: Any, device: torch.device, most: float, sampled: Any):
        deepspeed = import_deepspeed(device)
        super().__init__(module, optimizer, device, wants_bfloat16(config, device), most)
        stage = zero_stage(config)
        # Under ZeRO-3 a rank has only slices: this copy without weights receives the whole ones for sampling.
        self.empty_copy: nn.Module | None = None
        if stage == 3 and sampled is not None:
            nothing: dict[int, Any] = {id(p): nn.Parameter(p.new_empty(0), False) for p in sampled.parameters()}
            self.empty_copy = copy.deepcopy(sampled, nothing).eval()
            # samples by the logits that the sharded unembedding gives
            self.empty_copy.get_output_embeddings().stands_for_shards = True  # type: ignore[operator]
        for p in module.parameters() if self.bfloat16 else ():
            if not p.requires_grad and not is_partitioned(p):
                hold_rounded(p, keep=is_first())  # DeepSpeed would cast it without keeping what is written later
        if stage == 3 and self.bfloat16:
            cast_weights(module)
        names = {id(p): name for name, p in module.named_parameters()}
        # before DeepSpeed puts its flat slices into the groups
        group_of = {names[id(p)]: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        settings = deepspeed_settings(config, bfloat16=self.bfloat16, max_grad_norm=most)
        settings["managed_gradient_accumulation"] = False  # we call the step ourselves, after any number of backwards
        if stage == 3:
            # steps run different parts (policy, critic, both), so prefetched weights could stay in memory
            settings["zero_optimization"]["stage3_prefetch_bucket_size"] = 0
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=settings, dist_init_required=False
        )
        self.module = self.engine.module
        self.whole_state = ZeroState(self.module, self.optimizer, stage, group_of, self.ranks)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.engine(*arguments, **keywords)

    def _backward(self, loss: Tensor) -> None:
        # DeepSpeed averages over ranks and divides by accumulation steps; our losses need the sum.
        self.engine.backward(loss * self.ranks.count, scale_wrt_gas=False)

    def _step(self, factors: Mapping[str, float]) -> dict[str, float]:
        self.engine.step()
        norm = self.engine.get_global_grad_norm()  # before clipping; not finite if DeepSpeed skipped the step
        check_finite({"gradient": float("nan") if norm is None else norm}, self.batch)
        idle = {group: 0.0 for group, name in enumerate(self.names) if name not in factors}
        self.whole_state.set_steps(idle)  # their steps had no gradient; without ZeRO, AdamW skips such parameters
        return {"optim/grad_norm": float(norm)}

    @contextlib.contextmanager
    def whole(self, part: nn.Module) -> Iterator[nn.Module]:
        if self.empty_copy is None:
            yield part
            return
        for whole, sliced in zip(self.empty_copy.parameters(), part.parameters(), strict=True):
            with gathered([sliced]):
                whole.data = sliced.data.clone()
        try:
            yield self.empty_copy
        finally:
            for p in self.empty_copy.parameters():
                p.data = torch.empty(0, dtype=p.dtype, device=p.device)


def make_engine(
    config: Config, module: nn.Module, settings: Any, device: torch.device, *, groups: Any = None, sampled: Any = None
) -> Engine:
    """The engine of deepspeed=… with a stage's `OptimizerConfig`; max_grad_norm is of each part, under ZeRO of all
    together.
    groups: the optimizer, or AdamW's parameter groups if not those of `decay_groups`. sampled: the part of `module` for
    which `Engine.whole` will be called. Raises: UserError if DeepSpeed is not installed.
    """
    groups = decay_groups(module, settings) if groups is None else groups
    module.to(device)
    optimizer: Any = make_adamw(groups, on_host=DEEPSPEED[config.deepspeed][1]) if isinstance(groups, list) else groups
    bfloat16 = wants_bfloat16(config, device)
    if zero_stage(config):
        engine: Engine = ZeroEngine(config, module, optimizer, device, settings.max_grad_norm, sampled)
    else:
        if bfloat16:
            round_frozen(module)
        engine = Engine(module, optimizer, device, bfloat16, settings.max_grad_norm)
    if config.gradient_checkpointing:
        engine.recompute_activations()
    return engine


def shard_frozen(config: Config, module: nn.Module, device: torch.device) -> nn.Module:
    """A model that does not train, ready to be called: under ZeRO-3 in slices, gathered layer by layer when called.
    Under ZeRO-3 every rank must call it the same number of times. In bfloat16, all its weights are cast under ZeRO, as
    the trained ones are; otherwise only those that autocast would cast at every call.
    """
    if not zero_stage(config):
        return hold_frozen(config, module, device)
    module.to(device)
    if wants_bfloat16(config, device):
        cast_weights(module)
    if zero_stage(config) < 3:
        return module
    for p in module.parameters():
        vars(p).pop("exact", None)  # of `hold_rounded`, for weights that are written
    settings = deepspeed_settings(config, bfloat16=wants_bfloat16(config, device))
    settings["zero_optimization"].pop("offload_optimizer", None)
    return import_deepspeed(device).initialize(model=module, config=settings, dist_init_required=False)[0]


def cast_weights(module: nn.Module) -> None:
    """Hold weights in bfloat16, except those that are divided, which are already; buffers such as rotary frequencies stay exact."""
    for p in module.parameters():
        if not is_partitioned(p):
            p.data = p.data.to(torch.bfloat16)


def import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed, without its messages, and with a connection of one process if there is no launcher. Raises: UserError without it."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", message=".*is deprecated. Please use .torch.distributed", category=FutureWarning)
    deepspeed = optional("deepspeed", "deepspeed", ", or set deepspeed=none")
    deepspeed.utils.logger.setLevel(logging.ERROR)
    # Only DeepSpeed's inference uses this operator, and compiling it takes a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    connect(device, alone=True)
    deepspeed.init_distributed(verbose=False)
    return deepspeed


def zero_stage(config: Config) -> int:
    """The ZeRO stage of deepspeed=…; 0 without DeepSpeed."""
    return DEEPSPEED[config.deepspeed][0]


def deepspeed_settings(config: Config, *, bfloat16: bool, max_grad_norm: float = 0.0) -> dict[str, Any]:
    """The dictionary that DeepSpeed takes as its configuration. max_grad_norm: of the joint gradient; 0 clips nothing."""
    stage, offloads = DEEPSPEED[config.deepspeed]
    bucket, overlap = config.sharding.bucket_elements, config.sharding.overlap
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "overlap_comm": stage >= 2 and (torch.cuda.is_available() if overlap is None else overlap),
    }
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": bucket,
            "stage3_max_live_parameters": bucket,
            "stage3_max_reuse_distance": bucket,
            "stage3_param_persistence_threshold": config.sharding.persistence_threshold,
        }
    if offloads:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    ours = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        "zero_optimization": zero,
        "bf16": {"enabled": bfloat16},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    return ours if config.sharding.file is None else with_file(ours, config.sharding.file)


# Sections of DeepSpeed's configuration that settings of ours decide, besides those that we write.
DECIDED_HERE = ("optimizer", "scheduler", "fp16", "amp", "train_batch_size", "offload_optimizer", "offload_param")


def with_file(ours: dict[str, Any], path: str) -> dict[str, Any]:
    """DeepSpeed's settings: ours and those of a user's JSON; "auto" stands for ours. Raises: UserError that names all conflicts."""
    given, conflicts = read_json(Path(path)), list[str]()
    if not given:
        raise UserError(f"sharding.file={path}: contains no settings: want a JSON object, as DeepSpeed documents it")

    def merge(mine: dict[str, Any], theirs: dict[str, Any], prefix: str) -> dict[str, Any]:
        merged = dict(mine)
        for key, value in theirs.items():
            old = mine.get(key)
            if isinstance(old, dict) and isinstance(value, dict):
                merged[key] = merge(old, value, f"{prefix}{key}.")
            elif value in ("auto", old):  # null says nothing either
                continue
            elif key in mine or key in DECIDED_HERE:
                conflicts.append(prefix + key)
            else:
                merged[key] = value
        return merged

    merged = merge(ours, given, "")
    if conflicts:
        raise UserError(f"sharding.file={path}: {', '.join(conflicts)}: settings of ours decide this: leave it out")
    return merged
