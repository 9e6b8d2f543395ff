"""What a pretended GPU checks and counts at each operation: devices, host synchronisations, recorded graphs."""

import sys
from collections import Counter

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
Tensor = torch.Tensor


class PretendError(RuntimeError):
    """What a GPU would refuse, or silently compute wrongly."""


class Where:
    """The storages that are on the pretended GPU."""

    def __init__(self):
        self.refs, self.limit = {}, 20_000

    def add(self, t):
        storage = t.untyped_storage()
        self.refs[storage._cdata] = StorageWeakRef(storage)  # keeps the address from being used again
        if len(self.refs) > self.limit:
            self.refs = {k: r for k, r in self.refs.items() if not r.expired()}
            self.limit = max(20_000, 2 * len(self.refs))

    def discard(self, t):
        self.refs.pop(t.untyped_storage()._cdata, None)

    def __contains__(self, t):
        try:
            return t.untyped_storage()._cdata in self.refs
        except (RuntimeError, NotImplementedError):
            return False


class Log:
    """Launches, host synchronisations in total and by place, recorded graphs and their replays."""

    def __init__(self):
        self.kernels, self.syncs, self.sync_places = Counter(), Counter(), Counter()
        self.captures = self.replays = 0

    def snapshot(self):
        counted = {"kernels": sum(self.kernels.values()), "syncs": sum(self.syncs.values())}
        return counted | {"captures": self.captures, "replays": self.replays}

    def since(self, before):
        now = self.snapshot()
        return {k: now[k] - before[k] for k in now}


def place():
    """The innermost line of this project, else of the caller."""
    f = sys._getframe(2)
    while f is not None:
        name = f.f_code.co_filename
        if "/rlhf/" in name and "site-packages" not in name:
            return f"{name[name.rindex('/rlhf/') + 1 :]}:{f.f_lineno} {f.f_code.co_name}"
        f = f.f_back
    return "elsewhere"


VIEWS = {
    aten._unsafe_view.default, aten._reshape_alias.default, aten.lift_fresh.default, aten.detach.default, aten.alias.default,
}  # fmt: skip
NOTHING = {
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
    aten.new_empty_strided.default, aten.resize_.default, aten.set_.source_Storage, aten.is_same_size.default,
    aten.set_.source_Tensor, aten.set_.source_Storage_storage_offset, aten.record_stream.default,
}  # fmt: skip
WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "_unique2", "unique_dim", "unique_consecutive",
    "is_nonzero", "histc",
}  # fmt: skip
MAY_MIX = {"copy_", "_to_copy", "_copy_from", "set_"}
INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class Kernels(TorchDispatchMode):
    def __init__(self, where, log):
        super().__init__()
        self.where, self.log = where, log
        self.forced = self.quiet = self.inside = 0
        self.capture = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            return self.call(func, args, kwargs)

    def call(self, func, args, kwargs):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on = [t for t in tensors if t in self.where]
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            self.inside += bool(on)
            try:
                with self:
                    result = func.decompose(*args, **kwargs)
            finally:
                self.inside -= bool(on)
            if result is not NotImplemented:
                return result
        if not (on or self.forced):
            out = func(*args, **kwargs)
            if self.inside and not tensors and isinstance(out, Tensor):  # made "like" its composite's tensors
                self.where.add(out)
            return out
        if any(t.device.type == "meta" for t in tensors):
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        self.check(name, func, args, kwargs, tensors, on)
        view = func.is_view or func in VIEWS
        free = view or func in NOTHING
        if self.capture is not None and not free:
            out = self.record(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
            if not free and not self.quiet:
                self.log.kernels[name] += 1
        before = {t.untyped_storage()._cdata for t in tensors}
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t not in self.where and t.untyped_storage()._cdata not in before:
                self.where.add(t)
        return out

    def check(self, name, func, args, kwargs, tensors, on):
        off = [t for t in tensors if t not in self.where]
        if name in WAITS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.wait(name)
        elif name in INDEXES:
            index = [t for t in args[1] if t is not None]
            if any(t not in self.where for t in index) and args[0] in self.where:
                self.wait("index by a list or a CPU tensor")
            elif any(t.dtype in (torch.bool, torch.uint8) for t in index):
                one = name != "index" and len(index) == 1 and args[2].numel() == 1
                if not one:
                    self.wait(f"{name} by a mask")
            if args[0] not in self.where:
                raise PretendError(f"{name}: indices on cuda:0 of a CPU tensor\n{place()}")
        elif name in ("copy_", "_to_copy") and off and on and not self.quiet:
            self.wait("copy to or from the CPU")
        if name in MAY_MIX or name in INDEXES:
            return
        if not self.forced and any(t.dim() > 0 for t in off):
            raise PretendError(
                f"{name}: Expected all tensors to be on the same device, but found cuda:0 and cpu "
                f"({[tuple(t.shape) for t in on]} and {[tuple(t.shape) for t in off]})\n{place()}"
            )

    def wait(self, what):
        if self.capture is not None:
            raise PretendError(f"{what}: operation not permitted when stream is capturing\n{place()}")
        if not self.quiet:
            self.log.syncs[what] += 1
            self.log.sync_places[f"{place()}: {what}"] += 1

    # ------------------------------------------------------------------------------------------------ CUDA graphs

    def record(self, func, args, kwargs):
        """Remember the operation; its results are memory with nonsense in it until a replay."""
        if func._schema.is_mutable:
            self.capture.append((func, args, kwargs, None))
            written = [
                args[i] if i < len(args) else kwargs[a.name]
                for i, a in enumerate(func._schema.arguments)
                if a.alias_info is not None and a.alias_info.is_write
            ]
            return written[0] if len(written) == 1 else tuple(written)

        def as_meta(x):
            return (
                torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x
            )

        more = {
            k: ("meta" if k == "device" else as_meta(v) if not isinstance(v, (list, tuple)) else tree_map(as_meta, v))
            for k, v in kwargs.items()
        }
        shape = func(*tree_map(as_meta, args), **more)

        def allocate(x):
            if not isinstance(x, Tensor):
                return x
            t = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
            t.fill_(float("nan") if t.is_floating_point() else True if t.dtype == torch.bool else -(2**30))
            return t

        out = tree_map(allocate, shape)
        self.capture.append((func, args, kwargs, out))
        return out

    def replay(self, records):
        self.log.replays += 1
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            for func, args, kwargs, out in records:
                result = func(*args, **kwargs)
                if out is not None:
                    for a, b in zip(tree_leaves(out), tree_leaves(result), strict=True):
                        if isinstance(a, Tensor):
                            a.copy_(b)
