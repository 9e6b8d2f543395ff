"""The compiled loops of sampling against float64 and against torch, and what happens where they cannot be compiled."""

import math
import os
import platform
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlhf.cpu import kernels
from rlhf.cpu.kernels import BLOCK, attend, invert
from rlhf.engines.choosing import Choice, choose_tokens

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler named cc")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attend_exactly(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """`attend` in float64, one row and head at a time, after keys and values are stored."""
    group = q.shape[1] // keys.shape[1]
    y = torch.zeros(q.shape, dtype=torch.float64)
    for n, length in enumerate(lengths.tolist()):
        for h in range(q.shape[1]):
            k, v = (side[n, h // group, : length + 1].double() for side in (keys, values))
            y[n, h] = ((k @ q[n, h].double()) / math.sqrt(q.shape[2])).softmax(-1) @ v
    return y.flatten(1)


@needs_compiler
@pytest.mark.parametrize("width", [16, 48, 160, 256])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("columns", [3, 16, BLOCK + 5])
def test_attention_is_that_of_float64(width, heads, key_heads, columns):
    rows = 5
    cache = (normal(rows, key_heads, columns + 9, width, seed=1), normal(rows, key_heads, columns + 9, width, seed=2))
    before = [side.clone() for side in cache]
    q = 3 * normal(rows, heads, width)
    k, v = normal(rows, key_heads, width, seed=4), normal(rows, key_heads, width, seed=5)
    lengths = torch.tensor([0, 1, columns // 2, columns - 1, columns])
    y = attend((q, k, v), cache, lengths)
    for side, old, new in zip(cache, before, (k, v), strict=True):
        assert torch.equal(side[torch.arange(rows), :, lengths], new)
        old[torch.arange(rows), :, lengths] = new
        assert torch.equal(side, old), "only the new columns change"
    assert (y - attend_exactly(q, *cache, lengths)).abs().max() < 4e-6, "float32 rounds scores of ten by 1e-6"


@needs_compiler
def test_strided_operands_and_large_scores():
    qkv = 40 * normal(6, 12, 32)  # scores of thousands: a softmax without its largest score would overflow
    q, k, v = qkv.split((4, 4, 4), dim=1)
    whole = normal(2, 9, 4, 30, 32)
    cache = (whole[0, :6], whole[1, :6])
    lengths = torch.full((6,), 7)
    y = attend((q, k, v), cache, lengths)
    assert (y - attend_exactly(q, *cache, lengths)).abs().max() < 1e-4 * 40
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(attend((turned, k, v), cache, lengths), y)


@needs_compiler
@pytest.mark.parametrize("size", [2, 17, BLOCK, BLOCK + 1, 1024, 5003])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_inversion_finds_the_token_of_the_cumulative_sum(size, temperature):
    rows = 2000
    logits, uniforms = 3 * normal(1, size).expand(rows, -1).contiguous(), torch.linspace(0, 1 - 2**-24, rows)
    tokens, logprobs = invert(logits, uniforms, temperature)
    exact = (logits[0].double() / temperature).softmax(0)
    cumulative = exact.cumsum(0)
    below, u = torch.cat((torch.zeros(1), cumulative))[tokens], uniforms.double()
    assert (below <= u + 2e-6).all() and (u <= cumulative[tokens] + 2e-6).all()
    assert torch.allclose(logprobs.double(), exact[tokens].log(), atol=2e-6, rtol=2e-6)
    wanted, _ = choose_tokens(logits, uniforms, Choice(temperature))
    assert torch.equal(tokens, wanted), "choose_tokens uses it"


@needs_compiler
def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((4, 300), -torch.inf)
    logits[:, [7, 200]] = 0.0
    tokens, logprobs = invert(logits, torch.tensor([0.0, 0.49, 0.5, 1 - 2**-24]), 1.0)
    assert tokens.tolist() == [7, 7, 200, 200] and logprobs.tolist() == pytest.approx([-math.log(2)] * 4)


@needs_compiler
def test_nan_logits_give_a_token_of_the_vocabulary_and_a_nan_log_prob():
    logits = normal(3, 100)
    logits[1, 40] = torch.nan
    tokens, logprobs = invert(logits, torch.full((3,), 0.9), 1.0)
    assert tokens.ge(0).all() and tokens.lt(100).all() and logprobs.isnan().tolist() == [False, True, False]


@needs_compiler
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the flags are those of x86")
@pytest.mark.parametrize("flags", [["-mno-avx512f"], ["-mno-avx2"]], ids=["at most AVX2", "at most AVX"])
def test_older_processors_compute_the_same(flags, tmp_path, monkeypatch):
    """Other sizes of vectors differ only in the order of sums."""
    cache = (normal(5, 2, 150, 48, seed=1), normal(5, 2, 150, 48, seed=2))
    qkv = (3 * normal(5, 6, 48), normal(5, 2, 48, seed=4), normal(5, 2, 48, seed=5))
    lengths = torch.tensor([0, 1, 70, 139, 140])
    logits = 3 * normal(9, 1003)

    def results() -> list[Tensor]:
        return [attend(qkv, cache, lengths), *invert(logits, torch.linspace(0, 0.99, 9), 1.1)]

    native = results()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    other = kernels.load_with(["-march=native", *flags])
    monkeypatch.setattr(kernels, "_load", lambda: other)
    for a, b in zip(results(), native, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


Loads = Callable[..., bool]


@pytest.fixture
def loads(tmp_path, monkeypatch) -> Loads:
    """Whether a new process has the library, with these variables and `tmp_path` for compiled files."""

    def answer(**environment: str) -> bool:
        for name, value in {"XDG_CACHE_HOME": str(tmp_path), **environment}.items():
            monkeypatch.setenv(name, value)
        return kernels._load.__wrapped__() is not None

    return answer


@needs_compiler
def test_it_is_compiled_once_and_others_may_not_write_to_it_whatever_the_umask(loads, tmp_path):
    before = os.umask(0)
    try:
        assert loads()
    finally:
        os.umask(before)
    (path,) = (tmp_path / "rlhf").iterdir()
    assert path.stat().st_mode & 0o777 == (tmp_path / "rlhf").stat().st_mode & 0o777 == 0o700
    time = path.stat().st_mtime_ns
    assert loads() and path.stat().st_mtime_ns == time
    assert [*(tmp_path / "rlhf").iterdir()] == [path]
    (tmp_path / "rlhf").chmod(0o777)
    assert not loads(), "a folder where others may write is not used"


@pytest.mark.parametrize("compiler", ["/nonexistent/cc", "true", "gcc'"])
def test_without_a_compiler_torch_does_it(loads, tmp_path, compiler):
    """`true` succeeds and writes nothing; a quote without its second one is no command."""
    assert not loads(CC=compiler)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
