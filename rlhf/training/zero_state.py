"""The whole state of a module under DeepSpeed: weights and AdamW's moments, gathered from the ranks' slices and divided again."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.system.processes import Ranks
from rlhf.training.gather import gathered_state, slice_of_rank
from rlhf.training.optim import steps_on_device
from rlhf.training.state import State, on_cpu, put_weights

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's, as torch and DeepSpeed call them


def group_numbers(module: nn.Module, groups: list[dict[str, Any]]) -> dict[str, int]:
    """The parameter group of each trained parameter by name; call it before DeepSpeed puts its flat slices into the groups."""
    names = {id(p): name for name, p in module.named_parameters()}
    return {names[id(p)]: i for i, group in enumerate(groups) for p in group["params"]}


class ZeroState:
    """Reads and writes the state of a module whose optimizer DeepSpeed shards.

    optimizer: ZeRO's. stage: 1 to 3. group_of: as `group_numbers` gives it.
    """

    def __init__(self, module: nn.Module, optimizer: Any, stage: int, group_of: dict[str, int], ranks: Ranks):
        self.module, self.optimizer, self.stage, self.group_of, self.ranks = module, optimizer, stage, group_of, ranks

    def read(self) -> dict[str, dict[str, Tensor]] | None:
        """As `PlainState.read`. Every rank has to call it."""
        from deepspeed.utils import safe_get_full_optimizer_state

        first = self.ranks.rank == 0
        state: dict[str, dict[str, Tensor]] = {"weights": gathered_state(self.module) or {}, "steps": {}}
        state |= {kind: {} for kind in MOMENTS}
        steps = self.steps()
        self._link()
        for name, p in self._trained():
            taken = steps.get(self.group_of[name], 0.0)
            for kind in MOMENTS if taken else ():
                value = safe_get_full_optimizer_state(p, kind)
                if first:
                    state[kind][name] = on_cpu(value).reshape(shape_of(p))
            if first and taken:
                state["steps"][name] = torch.tensor(taken)
        return state if first else None

    @torch.no_grad()
    def write(self, state: State) -> None:
        """Write a whole state to the ranks' slices."""
        put_weights(self.module, state["weights"])
        self._make_moments()
        self._link()
        steps = dict.fromkeys(self.group_of.values(), 0.0)
        for name, p in self._trained():
            self._put(p, state["weights"][name].float())
            for kind in MOMENTS:
                value = state.get(kind, {}).get(name)
                self._put(p, torch.zeros(shape_of(p)) if value is None else value, kind)
            if name in state["steps"]:
                group = self.group_of[name]
                steps[group] = max(steps[group], float(state["steps"][name]))
        self.set_steps(steps)

    def steps(self) -> dict[int, float]:
        """Steps taken by parameter group; none before the first."""
        return {group: float(state["step"]) for group, state in self.flat_states()}

    def set_steps(self, steps: Mapping[int, float]) -> None:
        for group, state in self.flat_states():
            if group in steps:
                kind = state["step"]
                state["step"] = torch.full_like(kind, steps[group]) if isinstance(kind, Tensor) else int(steps[group])

    def flat_states(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(group, AdamW's state) of each flat slice that this rank updates; none before the first step."""
        states = self.optimizer.optimizer.state
        yield from ((group, states[flat]) for group, flat in self._slices() if "step" in states.get(flat, {}))

    def _trained(self) -> Iterator[tuple[str, Any]]:
        return ((name, p) for name, p in self.module.named_parameters() if p.requires_grad)

    def _slices(self) -> Iterator[tuple[int, Tensor]]:
        zero = self.optimizer
        if self.stage == 3:
            where = [zero.sub_group_to_group_id[i] for i in range(len(zero.fp32_partitioned_groups_flat))]
            return zip(where, zero.fp32_partitioned_groups_flat, strict=True)
        return enumerate(zero.single_partition_of_fp32_groups)

    def _make_moments(self) -> None:
        """Initialise AdamW's state as its first step would, so that it can be overwritten."""
        inner = self.optimizer.optimizer
        on_device = steps_on_device(inner)
        for _, flat in self._slices():
            if "step" in inner.state.get(flat, {}):
                continue
            # torch's AdamW counts steps in a tensor, DeepSpeed's in an integer
            step: Any = 0
            if isinstance(inner, torch.optim.AdamW):
                step = torch.zeros((), device=flat.device if on_device else "cpu")
            inner.state[flat] = {"step": step, **{kind: torch.zeros_like(flat.detach()) for kind in MOMENTS}}

    def _put(self, p: Any, value: Tensor, kind: str | None = None) -> None:
        """Write a whole tensor over this rank's slice of a master weight or, with `kind`, of a moment."""
        from deepspeed import utils

        whole = self.stage < 3
        value = value.to(self.ranks.device)
        if not whole:
            value = slice_of_rank(value, self.ranks.rank, self.ranks.count)
        if kind is None:
            (utils.safe_set_full_fp32_param if whole else utils.safe_set_local_fp32_param)(p, value)
        else:
            (utils.safe_set_full_optimizer_state if whole else utils.safe_set_local_optimizer_state)(p, value, kind)

    def _link(self) -> None:
        """Make DeepSpeed find the moments of every group: it looks only once, when only the first group has any."""
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        zero = self.optimizer
        if self.stage < 3 and self.steps():
            for parameters, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
                lazy_init_hp_params_optimizer_state(parameters, flat, zero.optimizer.state)


def shape_of(parameter: Any) -> torch.Size:
    """The whole shape, also of a parameter that ZeRO-3 has divided."""
    return getattr(parameter, "ds_shape", parameter.shape)
