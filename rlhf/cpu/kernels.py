"""Two loops of sampling in C (`kernels.c`), compiled at first use by the machine's own compiler.

They replace some dozens of small operations of torch per step, which take more time than the arithmetic. The library is
kept in the user's cache folder, one for each version of the source and each processor. Without a compiler, on other
devices and in other precisions torch does the same, more slowly.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.cpu import products

SOURCE = Path(__file__).with_name("kernels.c")
BLOCK, MOST_WIDTH = 128, 256  # as in kernels.c
# The first that compiles and loads counts. OpenMP is not linked: its functions are those of torch's copy, so that both use
# the same threads.
FLAGS = (["-march=native", "-fopenmp"], ["-march=native", "-fopenmp-simd"], ["-mcpu=native"])
COMMON = ["-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math"]
COMPILE_SECONDS = 60
_POINTER, _WHOLE, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def compiled() -> Any:
    """The compiled functions; None without a compiler and within `by_torch_alone`."""
    return None if products.off else _load()


@cache
def _load() -> Any:
    for flags in FLAGS:
        try:
            return load_with(flags)
        # no compiler, flag or home; CC is no command; or it does not load
        except (OSError, RuntimeError, ValueError, subprocess.SubprocessError):
            continue
    return None


def load_with(flags: list[str]) -> ctypes.CDLL:
    """The functions, compiled with these flags and kept for the next process.
    Raises: OSError, RuntimeError, ValueError, subprocess.SubprocessError.
    """
    compiler = shlex.split(os.environ.get("CC") or "cc")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = folder.stat()
    if owner.st_uid != os.getuid() or owner.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder}: others may write here")
    # what the processor can do decides what `native` means
    can = [x for x in products.processor().splitlines() if x.lower().startswith(("flags", "features"))][:1]
    made_of = "\0".join([SOURCE.read_text(encoding="utf-8"), *compiler, *flags, platform.machine(), *can])
    path = folder / f"kernels-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            objects, shared = f"{work}/kernels.o", f"{work}/kernels.so"
            compiling = [*compiler, *flags, *COMMON, "-c", str(SOURCE), "-o", objects]
            for command in (compiling, [*compiler, "-shared", objects, "-lm", "-o", shared]):
                quietly: Any = {"capture_output": True, "stdin": subprocess.DEVNULL}
                subprocess.run(command, check=True, timeout=COMPILE_SECONDS, **quietly)
            os.chmod(shared, 0o700)  # whatever the umask
            os.replace(shared, path)
    loaded = ctypes.CDLL(str(path))
    loaded.attend.argtypes = [*[_POINTER] * 7, *[_WHOLE] * 9, _REAL]
    loaded.invert.argtypes = [*[_POINTER] * 5, *[_WHOLE] * 3, _REAL]
    return loaded


def can_attend(cache: Tensor) -> bool:
    """Whether `attend` serves keys and values like these, (rows, heads, columns, width)."""
    width = cache.shape[-1]
    return _plain(cache) and width % 16 == 0 and width <= MOST_WIDTH and compiled() is not None


def attend(qkv: tuple[Tensor, Tensor, Tensor], cache: tuple[Tensor, Tensor], lengths: Tensor) -> Tensor:
    """Attention of one new token per row to a cache, (N, H * W): softmax(q K^T / sqrt(W)) V.

    qkv: queries (N, H, W), keys and values (N, KV, W) of the tokens; the last two are written to the cache first, to
    column lengths[n] of row n, up to which the token attends. cache: keys and values (N, KV, C, W) in float32. lengths:
    (N,) int64.
    """
    q, k, v = (t if t.stride()[1:] == (t.shape[2], 1) else t.contiguous() for t in map(Tensor.float, qkv))
    keys, values = cache
    (tokens, heads, width), key_heads = q.shape, k.shape[1]
    y = q.new_empty(tokens, heads * width)
    pointers = (t.data_ptr() for t in (q, k, v, keys, values, y, lengths))
    sizes = (tokens, heads, key_heads, width)
    strides = (q.stride(0), k.stride(0), v.stride(0), keys.stride(0), keys.stride(1))
    compiled().attend(*pointers, *sizes, *strides, width**-0.5)
    return y


def can_invert(logits: Tensor) -> bool:
    """Whether `invert` serves logits like these, (B, V)."""
    return _plain(logits) and logits.stride(-1) == 1 and compiled() is not None


def invert(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The first tokens (B,) at which the cumulative sum of softmax(logits / temperature) exceeds `uniforms`, and their
    log-probs (B,).

    logits: (B, V) float32. uniforms: (B,) float32 in [0, 1).
    """
    rows, size = logits.shape
    tokens, logprobs = torch.empty(rows, dtype=torch.int64, device=logits.device), logits.new_empty(rows)
    block_sums, uniforms = logits.new_empty(rows, -(-size // BLOCK)), uniforms.contiguous()
    tensors = (logits, uniforms, tokens, logprobs, block_sums)
    compiled().invert(*(t.data_ptr() for t in tensors), rows, size, logits.stride(0), temperature)
    return tokens, logprobs


def _plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32 and not torch.compiler.is_compiling()
