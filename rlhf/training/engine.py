"""Training of a module in our own loops (reward model, PPO): on one process, on several, or with DeepSpeed ZeRO.

Losses are already divided by GLOBAL counts, so the gradient of a step is the SUM over all ranks and micro-batches of
the losses given to `backward`.
"""

import contextlib
import copy
import io
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from rlhf.config import Config
from rlhf.config.precision import wants_bfloat16
from rlhf.model.half import hold_frozen
from rlhf.system.processes import Ranks, connect_alone
from rlhf.training import gather
from rlhf.training.optim import make_adamw
from rlhf.training.state import PlainState, State
from rlhf.training.zero import deepspeed_settings, need_deepspeed, offloads, zero_stage
from rlhf.training.zero_state import ZeroState, group_numbers


class Engine:
    """A module and its AdamW, with a whole copy on each process; gradients are summed over processes."""

    # whether ZeRO owns the gradients: they cannot be read before the step, which all ranks take together
    sharded = False

    def __init__(self, module: nn.Module, groups: list[dict[str, Any]], accelerator: Accelerator):
        self.module, self.accelerator = module, accelerator
        self.device = accelerator.device
        self.ranks = Ranks(accelerator.device)
        self.bfloat16 = accelerator.mixed_precision == "bf16"
        module.to(self.device)
        self.optimizer: Any = make_adamw(groups)
        self.whole_state: Any = PlainState(module, self.optimizer)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """The module's forward."""
        with self.autocast():
            return self.module(*arguments, **keywords)

    def eval(self) -> "Engine":
        """Set the module to eval mode."""
        self.module.eval()
        return self

    def autocast(self) -> contextlib.AbstractContextManager:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bfloat16 else contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add this micro-batch's gradient."""
        loss.backward()

    def reduce(self, parameters: list[nn.Parameter]) -> None:
        """Sum the gradients over all ranks."""
        if self.ranks.count == 1:
            return
        trained = [p for p in parameters if p.requires_grad]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        for p, total in zip(trained, self.ranks.sum_tensors(gradients), strict=True):
            p.grad = total

    def step(self, rates: list[float]) -> None:
        """One optimizer step, with a learning rate per group; clears the gradients."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()

    @contextlib.contextmanager
    def whole(self, part: nn.Module) -> Iterator[nn.Module]:
        """A part of the module with all its weights on this rank."""
        yield part

    def state(self) -> dict[str, dict[str, Tensor]] | None:
        """{"weights", "exp_avg", "exp_avg_sq", "steps"}: whole float32 tensors by parameter, on rank 0's CPU.

        Moments of parameters that have taken no step yet are absent. Every rank has to call it.
        """
        return self.whole_state.read()

    def restore(self, state: State) -> None:
        """Restore the result of `state`."""
        self.whole_state.write(state)


class ZeroEngine(Engine):
    """The same under DeepSpeed: optimizer state (ZeRO-1), gradients (2) and weights (3) sharded over the ranks.

    DeepSpeed clips the joint norm of all parameters. DeepSpeed's engine is used directly, not through accelerate, whose
    backward steps the optimizer.
    """

    sharded = True

    def __init__(
        self,
        module: nn.Module,
        groups: list[dict[str, Any]],
        accelerator: Accelerator,
        config: Config,
        max_grad_norm: float,
        sampled: nn.Module | None,
    ):
        deepspeed = import_deepspeed(accelerator.device)
        self.accelerator, self.device, self.ranks = accelerator, accelerator.device, Ranks(accelerator.device)
        self.stage, self.bfloat16 = zero_stage(config), wants_bfloat16(config, accelerator.device)
        # Under ZeRO-3 a rank has only slices: this copy without weights receives the whole ones for sampling.
        self.empty_copy: nn.Module | None = None
        if self.stage == 3 and sampled is not None:
            self.empty_copy = empty(copy.deepcopy(sampled).requires_grad_(False).eval())
            # samples by the logits that the sharded unembedding gives
            self.empty_copy.get_output_embeddings().stands_for_shards = True  # type: ignore[operator]
        group_of = group_numbers(module, groups)
        settings = deepspeed_settings(config, bfloat16=self.bfloat16, max_grad_norm=max_grad_norm)
        settings["managed_gradient_accumulation"] = False  # we call the step ourselves, after any number of backwards
        if self.stage == 3:
            # forwards run different parts (policy, critic, both), so prefetched weights could stay in memory
            settings["zero_optimization"]["stage3_prefetch_bucket_size"] = 0
        module.to(self.device)
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=module,
            optimizer=make_adamw(groups, on_host=offloads(config)),
            config=settings,
            dist_init_required=False,
        )
        self.module = self.engine.module
        self.whole_state = ZeroState(self.module, self.optimizer, self.stage, group_of, self.ranks)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.engine(*arguments, **keywords)

    def autocast(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()  # in bfloat16 the weights themselves are bfloat16

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed averages over ranks and divides by accumulation steps; our losses need the sum.
        self.engine.backward(loss * self.ranks.count, scale_wrt_gas=False)

    def reduce(self, parameters: list[nn.Parameter]) -> None:
        """Does nothing: DeepSpeed sums gradients in its step."""

    def step(self, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.engine.step()

    def gradient_norm(self) -> float:
        """The joint norm of the last step before clipping; not finite if DeepSpeed skipped the step."""
        norm = self.engine.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    @contextlib.contextmanager
    def whole(self, part: nn.Module) -> Iterator[nn.Module]:
        if self.empty_copy is None:
            yield part
            return
        for whole, sliced in zip(self.empty_copy.parameters(), part.parameters(), strict=True):
            with gather.gathered([sliced]):
                whole.data = sliced.data.clone()
        try:
            yield self.empty_copy
        finally:
            empty(self.empty_copy)


def make_engine(
    config: Config,
    module: nn.Module,
    groups: list[dict[str, Any]],
    device: torch.device,
    *,
    max_grad_norm: float = 0.0,
    sampled: nn.Module | None = None,
) -> Engine:
    """The engine of deepspeed=…. Raises: UserError if DeepSpeed is not installed.

    groups: AdamW's, with their weights. max_grad_norm: the joint norm to which ZeRO clips (without ZeRO the loop clips).
    sampled: the part of `module` for which `Engine.whole` will be called.
    """
    need_deepspeed(config)
    mixed_precision = "bf16" if wants_bfloat16(config, device) else "no"
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=mixed_precision)
    if not zero_stage(config):
        return Engine(module, groups, accelerator)
    return ZeroEngine(module, groups, accelerator, config, max_grad_norm, sampled)


def shard_frozen(config: Config, module: nn.Module, device: torch.device) -> nn.Module:
    """A model that does not train, ready to be called: under ZeRO-3 in slices, gathered layer by layer when called.

    Under ZeRO-3 every rank must call it the same number of times. In bfloat16, all its weights are cast under ZeRO, as
    the trained ones are; otherwise only those that autocast would cast at every call.
    """
    if not zero_stage(config):
        return hold_frozen(config, module, device)
    module.to(device)
    if wants_bfloat16(config, device):
        module = module.to(torch.bfloat16)
    if zero_stage(config) < 3:
        return module
    settings = deepspeed_settings(config, bfloat16=wants_bfloat16(config, device))
    settings["zero_optimization"].pop("offload_optimizer", None)
    return import_deepspeed(device).initialize(model=module, config=settings, dist_init_required=False)[0]


def import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed, without its messages, and with a connection of one process if there is no launcher."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", message=".*is deprecated. Please use .torch.distributed", category=FutureWarning)
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    connect_alone(device)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints compiler messages
        deepspeed.init_distributed(verbose=False)
    return deepspeed


def empty(module: nn.Module) -> nn.Module:
    """The module with parameters of no elements."""
    for p in module.parameters():
        p.data = torch.empty(0, dtype=p.dtype, device=p.device)
    return module
