"""A pretended GPU for tests on a CPU-only build of torch.

Tensors stay on the CPU but say that they are on cuda:0, so all code that branches on the device takes the GPU's path, with real
values. What a real GPU would refuse is refused here: tensors of two devices in one operation, a mask of another type than the
queries, a host synchronisation while a CUDA graph is recorded. CUDA graphs are recorded and replayed: recording computes nothing (outputs
hold NaN until the first replay), so a graph that misses an operation gives wrong values here too. Kernels and synchronisations
are counted by place.

Where a tensor is: a property of its storage. Two modes keep it: `Functions` (TorchFunctionMode) answers .device, .to, .cpu,
device=…; `Kernels` (TorchDispatchMode) checks and counts operations and tags their results.
"""

import contextlib
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tests.gpu.operations import Kernels, Log, PretendError, Where, place

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def gpu_of(device):
    """True for a CUDA device, False for another one, None for none."""
    if device is None:
        return None
    if isinstance(device, int):
        return True
    return torch.device(device).type == "cuda"


T = Tensor = torch.Tensor
GETS = {T.device.__get__, T.is_cuda.__get__, T.is_cpu.__get__}


class Functions(TorchFunctionMode):
    def __init__(self, where, log, kernels, strict_mask=True):
        super().__init__()
        self.where, self.log, self.kernels, self.strict_mask = where, log, kernels, strict_mask

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in GETS:
            x = args[0]
            real = func(x)
            if x not in self.where:
                return real
            return GPU if func == T.device.__get__ else func == T.is_cuda.__get__
        if func is T.get_device:
            return 0 if args[0] in self.where else -1
        if func is T.to:
            return self.to(args, kwargs)
        if func is T.cuda:
            return self.move(args[0], True)
        if func is T.cpu:
            return self.move(args[0], False)
        if func is T.pin_memory:
            return args[0]
        if func is T.is_pinned:
            return False
        if func in (T.numpy, T.__array__) and args[0] in self.where:
            raise TypeError(f"can't convert cuda:0 device type tensor to numpy\n{place()}")
        if func is T.tolist and args[0] in self.where:
            self.kernels.wait("tolist")
            self.kernels.quiet += 1
            try:
                return func(*args, **kwargs)
            finally:
                self.kernels.quiet -= 1
        if func is F.scaled_dot_product_attention:
            return self.attention(args, kwargs)
        if func is torch.mm and kwargs.get("out_dtype") is not None and args[0] in self.where:
            return self.wide_product(*args, kwargs["out_dtype"])
        if func is torch.addmm and kwargs.get("out_dtype") is not None and args[0] in self.where:
            total = args[0] + args[1].float() @ args[2].float()
            return total if kwargs.get("out") is None else kwargs["out"].copy_(total)
        wanted = gpu_of(kwargs.get("device"))
        if wanted is None and func is T.new_tensor and args[0] in self.where:
            wanted = True
        if wanted:
            if "device" in kwargs:
                kwargs["device"] = "cpu"
            if func in (torch.tensor, torch.as_tensor, T.new_tensor, torch.asarray):
                self.kernels.wait("a tensor from Python numbers")
            self.kernels.forced += 1
            try:
                out = func(*args, **kwargs)
            finally:
                self.kernels.forced -= 1
            for t in tree_leaves(out):
                if isinstance(t, Tensor) and t not in self.where:
                    self.where.add(t)
            return out
        return func(*args, **kwargs)

    def to(self, args, kwargs):
        x, rest = args[0], args[1:]
        copy, memory = kwargs.pop("copy", False), kwargs.pop("memory_format", None)
        if (rest and isinstance(rest[0], Tensor)) or "other" in kwargs:
            other = kwargs.pop("other", None)
            other = rest[0] if other is None else other
            device, dtype = (GPU if other in self.where else CPU), other.dtype
        else:
            device, dtype, *_ = torch._C._nn._parse_to(*rest, **kwargs)
        more = {} if memory is None else {"memory_format": memory}
        if device is not None and device.type == "meta":
            return x.to(device="meta", dtype=dtype)
        return self.move(x, gpu_of(device), dtype, copy, more)

    def move(self, x, gpu, dtype=None, copy=False, more=None):
        more, here, dtype = more or {}, x in self.where, dtype or x.dtype
        if gpu is None or gpu == here:
            return x.to(dtype=dtype, copy=copy, **more)
        self.kernels.wait("copy to the CPU" if here else "copy to the GPU")
        self.kernels.quiet += 1
        try:
            out = x.to(dtype=dtype, copy=True, **more)
        finally:
            self.kernels.quiet -= 1
        (self.where.add if gpu else self.where.discard)(out)
        return out

    def attention(self, args, kwargs):
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False)) | kwargs
        q, k, v, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
        if q not in self.where:
            return F.scaled_dot_product_attention(*args, **kwargs)
        cast = torch.is_autocast_enabled("cuda")
        kind = torch.get_autocast_dtype("cuda") if cast else q.dtype
        mask_kind = None if mask is None else kind if cast and mask.is_floating_point() else mask.dtype
        if kind.itemsize < 4 and mask_kind not in (None, torch.bool, kind) and self.strict_mask:
            raise PretendError(
                f"scaled_dot_product_attention: mask {mask_kind}, queries {kind}: cuDNN (the default on an H100 from torch 2.11 on) "
                f"reads the mask as {kind}, silently wrong (pytorch#191612); the memory-efficient kernel refuses it\n{place()}"
            )
        if cast:
            q, k, v = (x.to(kind) for x in (q, k, v))
            mask = mask.to(kind) if mask is not None and mask.is_floating_point() else mask
        if mask is not None and mask.is_floating_point() and mask.dtype != q.dtype:
            mask = mask.to(q.dtype)
        rest = {name: given[name] for name in ("dropout_p", "is_causal", "scale", "enable_gqa") if name in given}
        off = torch.autocast("cuda", enabled=False) if cast else contextlib.nullcontext()
        with off:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **rest)

    def wide_product(self, a, b, dtype):
        if a.dtype.itemsize >= 4 or dtype != torch.float32:
            raise PretendError(f"mm of {a.dtype} with out_dtype={dtype}\n{place()}")
        if a.dtype != b.dtype:
            raise PretendError(f"mm: {a.dtype} and {b.dtype}\n{place()}")
        self.kernels.quiet += 1
        try:
            out = torch.mm(a.float(), b.float()) if self.kernels.capture is None else None
        finally:
            self.kernels.quiet -= 1
        if out is None:  # recorded as three operations
            return torch.mm(a.float(), b.float())
        self.log.kernels["mm"] += 1
        return out


class Graph:
    """torch.cuda.CUDAGraph"""

    def __init__(self, keep_graph=False):
        self.records = []

    def replay(self):
        Pretended.current.kernels.replay(self.records)

    def reset(self):
        self.records = []

    def pool(self):
        return (0, 0)


class Capture:
    """torch.cuda.graph"""

    def __init__(self, cuda_graph, pool=None, stream=None, capture_error_mode="global", **_):
        self.graph = cuda_graph

    def __enter__(self):
        kernels = Pretended.current.kernels
        assert kernels.capture is None
        kernels.log.captures += 1
        kernels.capture = self.graph.records

    def __exit__(self, *_):
        Pretended.current.kernels.capture = None


REAL_AUTOCAST, REAL_ENABLED, REAL_DTYPE = torch.autocast, torch.is_autocast_enabled, torch.get_autocast_dtype


class Autocast(REAL_AUTOCAST):
    def __init__(self, device_type, dtype=None, enabled=True, cache_enabled=None):
        super().__init__("cpu" if device_type == "cuda" else device_type, dtype, enabled, cache_enabled)
        self.nothing = device_type == "cpu"  # the CPU's autocast stands for the GPU's

    def __exit__(self, *error):
        return None if self.nothing else super().__exit__(*error)

    def __enter__(self):
        if self.nothing:
            return self
        prev, kind = REAL_ENABLED(self.device), REAL_DTYPE(self.device)
        super().__enter__()
        self.prev, self.prev_fastdtype = prev, kind
        return self


def is_autocast_enabled(device_type=None):
    return device_type != "cpu" and REAL_ENABLED("cpu" if device_type in (None, "cuda") else device_type)


def get_autocast_dtype(device_type):
    return REAL_DTYPE("cpu" if device_type == "cuda" else device_type)


class Stream:
    def __init__(self, *_, **__): ...
    def synchronize(self): ...
    def wait_stream(self, *_): ...


class Pretended(contextlib.ExitStack):
    """The context in which cuda:0 exists."""

    current = None

    def __init__(self, strict_mask=True):
        super().__init__()
        self.where, self.log = Where(), Log()
        self.kernels = Kernels(self.where, self.log)
        self.functions = Functions(self.where, self.log, self.kernels, strict_mask)

    def __enter__(self):
        super().__enter__()
        Pretended.current = self
        cuda = dict.fromkeys((
            "set_device", "empty_cache", "reset_peak_memory_stats", "manual_seed_all", "manual_seed", "_lazy_init", "init",
        ), lambda *_: None) | {
            "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0, "is_initialized": lambda: True,
            "get_device_capability": lambda d=None: (9, 0), "get_device_name": lambda d=None: "NVIDIA H100 80GB HBM3",
            "mem_get_info": lambda d=None: (60 * 2**30, 80 * 2**30), "is_bf16_supported": lambda including_emulation=True: True,
            "synchronize": lambda d=None: self.kernels.wait("synchronize"),
            "max_memory_allocated": lambda d=None: 0, "memory_allocated": lambda d=None: 0, "memory_reserved": lambda d=None: 0,
            "get_rng_state": lambda d=None: torch.get_rng_state(), "set_rng_state": lambda s, d=None: None,
            "get_rng_state_all": lambda: [torch.get_rng_state()], "set_rng_state_all": lambda s: None,
            "CUDAGraph": Graph, "graph": Capture, "Stream": Stream, "current_stream": lambda d=None: Stream(),
            "graph_pool_handle": lambda: (0, 1), "is_current_stream_capturing": lambda: self.kernels.capture is not None,
        }  # fmt: skip
        for name, value in cuda.items():
            self.enter_context(mock.patch.object(torch.cuda, name, value))
        asked = {"is_autocast_enabled": is_autocast_enabled, "get_autocast_dtype": get_autocast_dtype}
        for name, value in ({"autocast": Autocast} | asked).items():
            self.enter_context(mock.patch.object(torch, name, value))
        self.enter_context(mock.patch.object(torch.amp, "autocast", Autocast))
        self.enter_context(mock.patch.object(torch.amp, "is_autocast_available", lambda d: True))
        import torch.utils.checkpoint as checkpoint

        # its check reads devices while the function mode is off
        def extract(x):
            return {"shape": x.shape, "dtype": x.dtype}

        self.enter_context(mock.patch.dict(checkpoint._allowed_determinism_checks_to_fns, {"default": extract}))
        run = torch.autograd._engine_run_backward

        def run_backward(*args, **kwargs):  # Tensor.backward was called with the mode off
            with contextlib.nullcontext() if torch._C._len_torch_function_stack() else self.functions:
                return run(*args, **kwargs)

        self.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", run_backward))
        self.enter_context(self.functions)
        self.enter_context(self.kernels)
        return self

    def __exit__(self, *error):
        Pretended.current = None
        return super().__exit__(*error)
