"""The whole state of training, gathered from the ranks and divided again: weights, their average, moments, checkpoints,
model folders.

A checkpoint contains what trains, as whole float32 tensors by parameter name, in safetensors, which contain no code;
frozen weights come from the parents' folders. It fits any number of processes and any ZeRO stage. The same functions
work without DeepSpeed and under ZeRO-1, 2 and 3.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.errors import UserError
from rlhf.model.linear import exact_weight
from rlhf.system.files import read_json, write_json
from rlhf.system.processes import Ranks, is_first, rank
from rlhf.system.schemas import Schema, read_checked
from rlhf.training.optim import shape_of, steps_on_device


def is_partitioned(parameter: Tensor) -> bool:
    """Whether ZeRO-3 has divided a parameter, so that the tensor itself is empty between its uses."""
    return hasattr(parameter, "ds_id")


@contextlib.contextmanager
def gathered(parameters: Iterable[Tensor], *, write: bool = False) -> Iterator[None]:
    """A context in which the parameters are whole on every rank; all ranks must enter it. write: rank 0's changes are
    kept on every rank; without ZeRO-3 each rank must write the same values itself.
    """
    divided = [p for p in parameters if is_partitioned(p)]
    if not divided:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(divided, modifier_rank=0 if write else None):
        yield


def slice_of_rank(tensor: Tensor, rank: int, count: int) -> Tensor:
    """A rank's slice of a whole tensor under ZeRO-3, which divides the flat tensor into `count` equal slices; the last one is padded."""
    size = -(-tensor.numel() // count)
    flat = nn.functional.pad(tensor.flatten(), (0, size * count - tensor.numel()))
    return flat[size * rank : size * (rank + 1)]


@torch.no_grad()
def gathered_state(module: nn.Module, trained: bool = False) -> dict[str, Tensor] | None:
    """{name: whole tensor on the CPU} of a module, not of an engine around it; None on every rank but the first.

    trained: only of parameters that train, which are not copied on a CPU without ZeRO-3, and of buffers. All ranks must
    call it. Tensors come one by one, so that no rank but the first holds more than one. In bfloat16 under ZeRO they are
    the optimizer's float32 copies. A weight with several names (a tied embedding) appears once, under its first name.
    """
    state: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if trained and not parameter.requires_grad:
            continue
        if parameter.requires_grad and parameter.dtype != torch.float32:
            from deepspeed.utils import safe_get_full_fp32_param

            tensor = safe_get_full_fp32_param(parameter).detach().cpu()
        elif trained and not is_partitioned(parameter):
            tensor = parameter.detach().cpu()
        else:
            with gathered([parameter]):
                tensor = exact_weight(parameter)
        if is_first():
            state[name] = tensor
    return state | {name: x.cpu().clone() for name, x in persistent_buffers(module).items()} if is_first() else None


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    kept = module.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}


def save_model(model: PreTrainedModel, folder: Path, state: Mapping[str, Tensor]) -> None:
    """Write a model folder from gathered weights."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(str(folder), state_dict=dict(state))  # a copy: save_pretrained empties the dictionary
    # the module in memory may have another dtype
    kind = str(next(t for t in state.values() if t.is_floating_point()).dtype).removeprefix("torch.")
    config = read_json(folder / "config.json")
    if config and config.get("dtype") != kind:
        write_json(folder / "config.json", config | {"dtype": kind})


FORM = 2  # of a checkpoint; raised when an older one can no longer be read
# {"weights", "steps", and a tensor kind of the optimizer such as "exp_avg": {parameter's name: tensor}}
SavedState = Mapping[str, Mapping[str, Tensor]]


class Written(Schema):  # state.json
    form: int
    notes: dict[str, Any]


class PlainState:
    """Reads and writes the state of a module whose optimizer holds whole tensors."""

    def __init__(self, module: nn.Module, optimizer: Any):
        self.module, self.optimizer = module, optimizer

    def read(self) -> dict[str, dict[str, Tensor]] | None:
        """See `Engine.state`. Copies would take three times the weights."""
        first = is_first()
        state: dict[str, dict[str, Tensor]] = {"weights": gathered_state(self.module, trained=True) or {}, "steps": {}}
        for name, p, kind, value in self._values():
            if first and kind == "step":
                state["steps"][name] = torch.as_tensor(value).reshape(()).float().cpu()
            elif first and isinstance(value, Tensor):
                state.setdefault(kind, {})[name] = as_cpu_float32(value).reshape(shape_of(p))
        return state if first else None

    def _values(self) -> Iterator[tuple[str, Any, str, Any]]:
        """(name, parameter, kind, value) of everything that the optimizer holds."""
        for name, p in self.module.named_parameters():
            for kind, value in self.optimizer.state.get(p, {}).items():
                yield name, p, kind, value

    @torch.no_grad()
    def write(self, state: SavedState) -> None:
        put_weights(self.module, state["weights"])
        kinds = [kind for kind in state if kind not in ("weights", "steps")]
        on_device = steps_on_device(self.optimizer)
        for name, p in self.module.named_parameters():
            found = (kind for kind in kinds if name in state[kind])
            restored: dict[str, Any] = {kind: state[kind][name].to(p, copy=True) for kind in found}
            if name in state["steps"]:
                restored["step"] = state["steps"][name].to(p.device if on_device else "cpu", copy=True)
            if restored:
                self.optimizer.state[p] = restored


def write_state(folder: Path, state: SavedState, notes: Mapping[str, Any]) -> None:
    """Whole tensors as safetensors, the loop's own notes as JSON."""
    for name, tensors in state.items():
        save_file(dict(tensors), str(folder / f"{name}.safetensors"))
    (folder / "state.json").write_text(json.dumps({"form": FORM, "notes": notes}), encoding="utf-8")


def read_state(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The result of `write_state`. Raises: UserError for a checkpoint of an earlier version."""
    written = read_checked(folder / "state.json", Written, "remove the checkpoint") or {}
    if written.get("form") != FORM:
        raise UserError(f"{folder}: an earlier version's checkpoint, not readable: add overwrite=true to start again")
    files = [path for path in folder.glob("*.safetensors") if path.stem != "rng"]
    return {path.stem: load_file(str(path)) for path in files}, written["notes"]


def random_state() -> dict[str, Tensor]:
    """torch's random state of this process."""
    suffix = f"-{rank()}" if rank() else ""
    on_gpu = {f"cuda{suffix}": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {f"rng{suffix}": torch.get_rng_state()} | on_gpu


def put_random_state(folder: Path) -> None:
    """Restore this rank's random state of torch; a rank that did not exist then keeps its own."""
    state = load_file(str(folder / "rng.safetensors"))
    suffix = f"-{rank()}" if rank() else ""
    if f"rng{suffix}" in state:
        torch.set_rng_state(state[f"rng{suffix}"])
    if f"cuda{suffix}" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state[f"cuda{suffix}"])


@torch.no_grad()
def put_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy whole tensors into a module's parameters and persistent buffers, also under ZeRO; frozen ones may be missing."""
    for name, tensor in (dict(module.named_parameters()) | persistent_buffers(module)).items():
        if name not in weights and isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            continue
        with gathered([tensor], write=True):
            if tensor.numel():
                tensor.copy_(weights[name].reshape(tensor.shape))


def as_cpu_float32(tensor: Tensor) -> Tensor:
    """The tensor on the CPU in float32 (integers keep their type), itself if it is that already."""
    here = tensor.detach().cpu()
    return here.float() if here.is_floating_point() else here


MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's, as torch and DeepSpeed call them


class ZeroState(PlainState):
    """The same for a module whose optimizer DeepSpeed shards. group_of: the parameter group of each trained parameter by name."""

    def __init__(self, module: nn.Module, optimizer: Any, stage: int, group_of: dict[str, int], ranks: Ranks):
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        super().__init__(module, optimizer)
        self.stage, self.group_of, self.ranks = stage, group_of, ranks
        self.trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.states: list[tuple[int, dict[str, Any]]] = []  # (group, AdamW's state) of each slice of this rank
        inner = optimizer.optimizer
        slices = optimizer.fp32_partitioned_groups_flat if stage == 3 else optimizer.single_partition_of_fp32_groups
        for i, flat in enumerate(slices):
            # as the first step would: DeepSpeed looks for moments only once, when only the first group would have any. torch's
            # AdamW counts steps in a tensor, DeepSpeed's in an integer
            step: Any = 0
            if isinstance(inner, torch.optim.AdamW):
                step = torch.zeros((), device=flat.device if steps_on_device(inner) else "cpu")
            inner.state[flat] = {"step": step, **{kind: torch.zeros_like(flat.detach()) for kind in MOMENTS}}
            self.states.append((optimizer.sub_group_to_group_id[i] if stage == 3 else i, inner.state[flat]))
            if stage < 3:
                lazy_init_hp_params_optimizer_state(optimizer.bit16_groups[i], flat, inner.state)

    def _values(self) -> Iterator[tuple[str, Any, str, Any]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        steps = {group: float(state["step"]) for group, state in self.states}
        for name, p in self.trained:
            if taken := steps[self.group_of[name]]:
                yield name, p, "step", taken
                for kind in MOMENTS:
                    yield name, p, kind, safe_get_full_optimizer_state(p, kind)

    @torch.no_grad()
    def write(self, state: SavedState) -> None:
        """Write a whole state to the ranks' slices."""
        from deepspeed import utils

        put, put_moment, whole = utils.safe_set_full_fp32_param, utils.safe_set_full_optimizer_state, self.stage < 3
        if not whole:
            put, put_moment = utils.safe_set_local_fp32_param, utils.safe_set_local_optimizer_state

        def part(value: Tensor) -> Tensor:
            value = value.to(self.ranks.device)
            return value if whole else slice_of_rank(value, self.ranks.rank, self.ranks.count)

        put_weights(self.module, state["weights"])
        steps = dict.fromkeys(self.group_of.values(), 0.0)
        for name, p in self.trained:
            put(p, part(state["weights"][name].float()))
            for kind in MOMENTS:
                value = state.get(kind, {}).get(name)
                put_moment(p, part(torch.zeros(shape_of(p)) if value is None else value), kind)
            group = self.group_of[name]
            steps[group] = max(steps[group], float(state["steps"].get(name, 0.0)))
        self.set_steps(steps)

    def set_steps(self, steps: Mapping[int, float]) -> None:
        """Set the numbers of steps taken, by parameter group."""
        for group, state in self.states:
            if group in steps:
                kind = state["step"]
                state["step"] = torch.full_like(kind, steps[group]) if isinstance(kind, Tensor) else int(steps[group])


class Ema:
    """An exponential moving average of weights: average := average + share * (weights - average), at each step of the
    policy, in float32.

    share = (1 - decay) / (1 - decay^n) at the n-th step, so the weights of k steps ago count in proportion to
    decay^k and the initial weights do not count. Only trained weights are averaged. In bfloat16 too the optimizer's
    float32 weights are averaged, because an average of rounded weights would not move by less than the rounding.

    rank, ranks: under ZeRO each rank averages its slice of every weight; by default all of it.
    Source: Ouyang et al. 2022, appendix C.4 (decay 0.992). Differs: the paper does not say what its average starts
    from. The correction of Kingma & Ba 2015, section 3, matters only in runs shorter than about 1 / (1 - decay) steps.
    """

    def __init__(self, model: nn.Module, decay: float, rank: int = 0, ranks: int = 1):
        self.model, self.decay, self.rank, self.ranks = model, decay, rank, ranks
        self.steps = 0
        self.trained: dict[str, Any] = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.average = {name: self._float32(p).clone() for name, p in self.trained.items()}

    def _slice(self, p: Any) -> Tensor:
        """This rank's slice of a parameter, flat."""
        return p.ds_tensor.detach() if is_partitioned(p) else slice_of_rank(p.detach(), self.rank, self.ranks)

    def _float32(self, p: Any) -> Tensor:
        """This rank's slice of the optimizer's float32 weights of a parameter. Every rank has to call it."""
        if p.dtype == torch.float32 and not is_partitioned(p):
            return self._slice(p)
        from deepspeed import utils

        if is_partitioned(p):
            return utils.safe_get_local_fp32_param(p).detach()
        return slice_of_rank(utils.safe_get_full_fp32_param(p).detach(), self.rank, self.ranks)

    def _whole(self, p: Any, part: Tensor) -> Tensor:
        """The whole tensor from each rank's slice."""
        part, shape = part.to(p.device), shape_of(p)
        if self.ranks > 1:
            parts = [torch.empty_like(part) for _ in range(self.ranks)]
            dist.all_gather(parts, part.contiguous())
            part = torch.cat(parts)
        return part[: shape.numel()].view(shape)

    @torch.no_grad()
    def update(self) -> None:
        self.steps += 1
        share = (1.0 - self.decay) / (1.0 - self.decay**self.steps)
        for name, average in self.average.items():
            average.lerp_(self._float32(self.trained[name]).to(average), share)

    @contextlib.contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """The model with the average as its weights, in their dtype; its own weights are restored afterwards."""
        before = {name: self._slice(p).clone() for name, p in self.trained.items()}
        self._write(self.average)
        try:
            yield self.model
        finally:
            self._write(before)

    @torch.no_grad()
    def _write(self, slices: Mapping[str, Tensor]) -> None:
        for name, p in self.trained.items():
            value = self._whole(p, slices[name])
            with gathered([p], write=True):  # also updates the tensors that ZeRO-3 keeps whole beside its slices
                p.data.copy_(value)

    def state_dict(self) -> dict[str, Tensor]:
        """The average as whole tensors on the CPU. Every rank has to call it."""
        return {name: as_cpu_float32(self._whole(p, self.average[name])).clone() for name, p in self.trained.items()}

    def load_state_dict(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Set the average, given as whole tensors, and the number of its steps."""
        self.steps = steps
        for name, average in self.average.items():
            average.copy_(slice_of_rank(state[name], self.rank, self.ranks).to(average))
