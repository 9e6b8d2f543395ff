"""What trains a module in our own loops (reward model, PPO): plainly, on one process or several, or with DeepSpeed ZeRO.

Losses come divided by GLOBAL counts, so that a step's gradient is the SUM over all ranks and micro-batches of what
`backward` was given. Checkpoints hold whole tensors under their parameters' names, so that a run resumes on any number
of processes, with any ZeRO stage or none. Not here: transformers' Trainer, which drives DeepSpeed itself (`common.py`).
"""

import contextlib
import copy
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlhf.config import Config
from rlhf.model.half import cast_frozen_products
from rlhf.processes import Ranks, connect_alone
from rlhf.training import gather
from rlhf.training.optim import make_adamw
from rlhf.training.zero import deepspeed_settings, need_deepspeed, offloads, wants_bfloat16, zero_stage

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's, as torch and DeepSpeed call them


class Engine:
    """A module and its AdamW on one process, or copies of both on several, whose gradients are added up."""

    sharded = False  # whether an optimizer step needs all ranks at once, and gradients are not to be looked at before

    def __init__(self, module: nn.Module, groups: list[dict[str, Any]], accelerator: Accelerator):
        self.module, self.accelerator = module, accelerator
        self.device = accelerator.device
        self.ranks = Ranks(accelerator.device)
        self.bfloat16 = accelerator.mixed_precision == "bf16"
        module.to(self.device)
        self.optimizer: Any = make_adamw(groups)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """The module's forward."""
        with self.autocast():
            return self.module(*arguments, **keywords)

    def eval(self) -> "Engine":
        """As a module's."""
        self.module.eval()
        return self

    def autocast(self) -> contextlib.AbstractContextManager:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bfloat16 else contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add this micro-batch's gradient."""
        loss.backward()

    def reduce(self, parameters: list[nn.Parameter]) -> None:
        """Add up the gradients of all ranks."""
        if self.ranks.count == 1:
            return
        for p in parameters:
            if p.requires_grad:
                p.grad = self.ranks.sum_tensor(torch.zeros_like(p) if p.grad is None else p.grad)

    def step(self, rates: list[float]) -> None:
        """One optimizer step, with a learning rate a group; the gradients are gone afterwards."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.optimizer.step()
        self.discard()

    def discard(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad()

    @contextlib.contextmanager
    def whole(self, part: nn.Module) -> Iterator[nn.Module]:
        """A part of the module with all its weights on this rank."""
        yield part

    # --- checkpoints -------------------------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, Tensor]] | None:
        """{"weights", "exp_avg", "exp_avg_sq", "steps"}: whole float32 tensors by parameter, on the first rank's CPU.

        Moments of parameters that have taken no step yet are absent. Every rank has to call it.
        """
        if self.ranks.rank:
            return None
        kept = [(n, p, self.optimizer.state[p]) for n, p in self.module.named_parameters() if p in self.optimizer.state]
        moments = {key: {n: on_cpu(state[key]) for n, _, state in kept} for key in MOMENTS}
        steps = {n: torch.as_tensor(state["step"]).reshape(()).float().cpu() for n, _, state in kept}
        return {"weights": gather.gathered_state(self.module) or {}, **moments, "steps": steps}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Mapping[str, Tensor]], probe: Callable[[], Tensor]) -> None:
        """Read what `state` gave. probe: a loss of this module on any batch, for engines that need one to begin."""
        put_weights(self.module, state["weights"])
        for name, p in self.module.named_parameters():
            if name in state["steps"]:
                moments = {key: state[key][name].to(p, copy=True) for key in MOMENTS}
                self.optimizer.state[p] = {"step": state["steps"][name].clone(), **moments}


class ZeroEngine(Engine):
    """The same under DeepSpeed: optimizer state (ZeRO-1), gradients (2) and weights (3) sharded over the ranks.

    DeepSpeed clips the joint norm of all parameters. Differs from the design in that DeepSpeed's engine is used itself
    and not through accelerate, whose backward steps the optimizer.
    """

    sharded = True

    def __init__(
        self, module: nn.Module, groups: list[dict[str, Any]], accelerator: Accelerator, config: Config, max_grad_norm: float,
        sampled: nn.Module | None,
    ):  # fmt: skip
        deepspeed = import_deepspeed(accelerator.device)
        self.accelerator, self.device, self.ranks = accelerator, accelerator.device, Ranks(accelerator.device)
        self.stage, self.bfloat16 = zero_stage(config), wants_bfloat16(config, accelerator.device)
        # Under ZeRO-3 a rank holds slices only: a copy without weights stands by to take the whole ones for sampling.
        self.copy_of, self.empty_copy = sampled, hollow(sampled) if self.stage == 3 and sampled is not None else None
        if self.empty_copy is not None:  # samples by the logits that the sharded unembedding gives
            self.empty_copy.get_output_embeddings().stands_for_shards = True  # type: ignore[operator]
        names = {id(p): name for name, p in module.named_parameters()}
        self.group_of = {names[id(p)]: i for i, group in enumerate(groups) for p in group["params"]}
        settings = deepspeed_settings(config, bfloat16=self.bfloat16, max_grad_norm=max_grad_norm)
        settings["managed_gradient_accumulation"] = (
            False  # a step comes when we call for it, after any number of backwards
        )
        if (
            self.stage == 3
        ):  # our forwards differ in what they run (policy, critic, both): what is fetched ahead would stay
            settings["zero_optimization"]["stage3_prefetch_bucket_size"] = 0
        module.to(self.device)
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=module,
            optimizer=make_adamw(groups, on_host=offloads(config)),
            config=settings,
            dist_init_required=False,
        )
        self.module = self.engine.module

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.engine(*arguments, **keywords)

    def autocast(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()  # in bfloat16 the weights themselves are

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed averages over ranks and divides by accumulation steps: our losses want the sum.
        self.engine.backward(loss * self.ranks.count, scale_wrt_gas=False)

    def reduce(self, parameters: list[nn.Parameter]) -> None:
        """DeepSpeed adds up in its step."""

    def step(self, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.engine.step()

    def discard(self) -> None:
        raise RuntimeError("ZeRO has reduced the gradients already: decide before the backward")

    def gradient_norm(self) -> float:
        """The joint norm that the last step saw, before clipping; not finite where it refused to step."""
        norm = self.engine.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    @contextlib.contextmanager
    def whole(self, part: nn.Module) -> Iterator[nn.Module]:
        if self.empty_copy is None:
            yield part
            return
        assert part is self.copy_of
        for mine, theirs in zip(self.empty_copy.parameters(), part.parameters(), strict=True):
            with gather.gathered([theirs]):
                mine.data = theirs.data.clone()
        try:
            yield self.empty_copy
        finally:
            empty(self.empty_copy)

    def forget_steps(self, group: int) -> None:
        """Have AdamW count a group's steps from 0 again, since those so far saw no gradient of it."""
        self._set_steps({group: 0.0})

    def state(self) -> dict[str, dict[str, Tensor]] | None:
        from deepspeed.utils import safe_get_full_optimizer_state

        first = self.ranks.rank == 0
        found: dict[str, dict[str, Tensor]] = {"weights": gather.gathered_state(self.module) or {}, "steps": {}}
        found |= {key: {} for key in MOMENTS}
        steps = self._steps()
        self._link()
        for name, p in self.module.named_parameters():
            if not p.requires_grad:
                continue
            taken = steps.get(self.group_of[name], 0.0)
            for key in MOMENTS if taken else ():
                value = safe_get_full_optimizer_state(p, key)
                if first:
                    found[key][name] = on_cpu(value).reshape(shape_of(p))
            if first and taken:
                found["steps"][name] = torch.tensor(taken)
        return found if first else None

    def restore(self, state: Mapping[str, Mapping[str, Tensor]], probe: Callable[[], Tensor]) -> None:
        # AdamW makes its moments in the first step: one without gradient at rate 0 changes nothing else.
        self.backward(0.0 * probe())
        self.step([0.0] * len(self.optimizer.param_groups))
        put_weights(self.module, state["weights"])
        self._link()
        steps = dict.fromkeys(self.group_of.values(), 0.0)
        for name, p in self.module.named_parameters():
            if not p.requires_grad:
                continue
            self._put(p, state["weights"][name].float())
            for key in MOMENTS:
                value = state[key].get(name)
                value = torch.zeros(shape_of(p)) if value is None else value
                self._put(p, value, key)
            if name in state["steps"]:
                group = self.group_of[name]
                steps[group] = max(steps[group], float(state["steps"][name]))
        self._set_steps(steps)

    def _flat_states(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(group, AdamW's state) of each flat slice that this rank updates; none before the first step."""
        zero = self.optimizer
        if self.stage == 3:
            where = [zero.sub_group_to_group_id[i] for i in range(len(zero.fp32_partitioned_groups_flat))]
            slices = zip(where, zero.fp32_partitioned_groups_flat, strict=True)
        else:
            slices = enumerate(zero.single_partition_of_fp32_groups)  # type: ignore[assignment]
        states = zero.optimizer.state
        yield from ((group, states[flat]) for group, flat in slices if "step" in states.get(flat, {}))

    def _put(self, p: Any, value: Tensor, key: str | None = None) -> None:
        """Write a whole tensor over this rank's slice of a master weight or, with `key`, of a moment."""
        from deepspeed.utils import (
            safe_set_full_fp32_param,
            safe_set_full_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        value = value.to(self.device)
        if self.stage < 3:
            safe_set_full_fp32_param(p, value) if key is None else safe_set_full_optimizer_state(p, value, key)
            return
        size = -(-value.numel() // self.ranks.count)  # ZeRO-3 cuts each tensor in equal slices, the last filled up
        flat = nn.functional.pad(value.flatten(), (0, size * self.ranks.count - value.numel()))
        own = flat[size * self.ranks.rank : size * (self.ranks.rank + 1)]
        safe_set_local_fp32_param(p, own) if key is None else safe_set_local_optimizer_state(p, own, key)

    def _link(self) -> None:
        """Show DeepSpeed the moments of every group: by itself it looks once, when only the first group has any."""
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        zero = self.optimizer
        if self.stage < 3 and self._steps():
            for parameters, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
                lazy_init_hp_params_optimizer_state(parameters, flat, zero.optimizer.state)

    def _steps(self) -> dict[int, float]:
        return {group: float(state["step"]) for group, state in self._flat_states()}

    def _set_steps(self, steps: Mapping[int, float]) -> None:
        for group, state in self._flat_states():
            if group in steps:
                kind = state["step"]
                state["step"] = torch.full_like(kind, steps[group]) if isinstance(kind, Tensor) else int(steps[group])


def make_engine(
    config: Config, module: nn.Module, groups: list[dict[str, Any]], device: torch.device, *, max_grad_norm: float = 0.0,
    sampled: nn.Module | None = None,
) -> Engine:  # fmt: skip
    """The engine of deepspeed=…. Raises: UserError where DeepSpeed is not installed.

    groups: AdamW's, with their weights. max_grad_norm: what ZeRO clips the joint norm to (plainly, the loop clips).
    sampled: the part of `module` that `Engine.whole` will be asked for.
    """
    accelerator = make_accelerator(config, device)
    if not zero_stage(config):
        return Engine(module, groups, accelerator)
    return ZeroEngine(module, groups, accelerator, config, max_grad_norm, sampled)


def make_accelerator(config: Config, device: torch.device) -> Accelerator:
    """Accelerate's view of the processes; it opens their connection where there are several."""
    need_deepspeed(config)
    return Accelerator(cpu=device.type == "cpu", mixed_precision="bf16" if wants_bfloat16(config, device) else "no")


def shard_frozen(config: Config, module: nn.Module, device: torch.device) -> nn.Module:
    """A model that does not train, ready to be called: under ZeRO-3 in slices, gathered layer by layer when called.

    Every rank then has to call it as often as the others. In bfloat16 its weights are: all under ZeRO, where the trained
    ones are too; otherwise those that autocast would cast at every call.
    """
    module.to(device)
    if wants_bfloat16(config, device):
        module = module.to(torch.bfloat16) if zero_stage(config) else cast_frozen_products(module)
    if zero_stage(config) < 3:
        return module
    settings = deepspeed_settings(config, bfloat16=wants_bfloat16(config, device))
    settings["zero_optimization"].pop("offload_optimizer", None)
    return import_deepspeed(device).initialize(model=module, config=settings, dist_init_required=False)[0]


def import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed, without its notes, and with a connection of one process where there is no launcher."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", message=".*is deprecated. Please use .torch.distributed", category=FutureWarning)
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    connect_alone(device)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it compiled
        deepspeed.init_distributed(verbose=False)
    return deepspeed


# --- checkpoints on disk ---------------------------------------------------------------------------------------------


def write_state(folder: Path, state: Mapping[str, Mapping[str, Tensor]], notes: Mapping[str, Any]) -> None:
    """Whole tensors as safetensors, the loop's own notes as JSON."""
    for name, tensors in state.items():
        save_file(dict(tensors), str(folder / f"{name}.safetensors"))
    save_file({"rng": torch.get_rng_state()}, str(folder / "rng.safetensors"))
    (folder / "state.json").write_text(json.dumps(notes))


def read_state(folder: Path, *more: str) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """What `write_state` wrote, and torch's random state is put back. more: names beside an engine's own."""
    names = ("weights", *MOMENTS, "steps", *more)
    torch.set_rng_state(load_file(str(folder / "rng.safetensors"))["rng"])
    return {n: load_file(str(folder / f"{n}.safetensors")) for n in names}, json.loads(
        (folder / "state.json").read_text()
    )


# --- tensors ---------------------------------------------------------------------------------------------------------


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, each once."""
    kept = module.state_dict(keep_vars=True).keys()
    buffers = {name: b for name, b in module.named_buffers() if name in kept}
    return dict(module.named_parameters()) | buffers


@torch.no_grad()
def put_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy whole tensors into a module, wherever its own lie."""
    for name, tensor in tensors_of(module).items():
        with gather.gathered([tensor], write=True):
            if tensor.numel():
                tensor.copy_(weights[name].reshape(tensor.shape))


def on_cpu(tensor: Tensor) -> Tensor:
    """A copy in float32 (integers stay) that shares nothing."""
    copied = tensor.detach().cpu().clone()
    return copied.float() if copied.is_floating_point() else copied


def shape_of(parameter: Any) -> torch.Size:
    """The whole shape, also where ZeRO-3 left a slice."""
    return getattr(parameter, "ds_shape", parameter.shape)


def hollow(module: nn.Module) -> nn.Module:
    """A copy whose parameters hold nothing."""
    return empty(copy.deepcopy(module).requires_grad_(False).eval())


def empty(module: nn.Module) -> nn.Module:
    for p in module.parameters():
        p.data = torch.empty(0, dtype=p.dtype, device=p.device)
    return module
