"""Fast paths against their plain versions, as ratios of interleaved runs: a regression shows, a slow machine does not.

The bounds are far below what is measured on a quiet machine (docs/PERFORMANCE.md). Processor time of one thread counts, so
that other jobs hardly do. Not here: absolute times, peers, and whether the results agree (each path's own tests).
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rlhf.cpu.products import by_torch_alone
from rlhf.engines.choosing import Sampling, make_uniforms
from rlhf.engines.sampling import GenerateEngine, sample
from rlhf.model import GPTForCausalLM
from tests.presets import preset

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> GPTForCausalLM:
    torch.manual_seed(0)
    return GPTForCausalLM(preset("tiny", vocab_size=2048)).eval()


# The gain with few rows depends on the processor (docs/PERFORMANCE.md): 1.5 on one AMD with AVX-512, 1.16 on one Intel, and 1.1 to
# 1.3 with AVX2 alone, where a busy neighbour takes away more of the memory's bandwidth.
FEW_ROWS_BOUND = 1.05 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1.0


def speed_up(plain: Callable[[], object], fast: Callable[[], object], rounds: int = 4) -> float:
    """The plain version's least processor time over the fast one's: other jobs only ever add to a time."""

    def seconds(work: Callable[[], object]) -> float:
        begun = time.thread_time()
        work()
        return time.thread_time() - begun

    plain_times, fast_times = [], []
    for number in range(rounds):
        if number % 2:
            plain_times.append(seconds(plain))
            fast_times.append(seconds(fast))
        else:
            fast_times.append(seconds(fast))
            plain_times.append(seconds(plain))
    return min(plain_times) / min(fast_times)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler named cc")
def test_the_compiled_loops_beat_torch(model):
    prompts = [list(range(2, 10 + i % 16)) for i in range(32)]

    def fast() -> None:
        sample(model, prompts, max_new_tokens=48, eos_token_id=None, pad_token_id=0)

    def plain() -> None:
        with by_torch_alone():
            fast()

    assert speed_up(plain, fast) > FEW_ROWS_BOUND


def test_the_sampler_beats_generate(model):
    prompts = [list(range(2, 10 + i % 16)) for i in range(32)]
    eos, how = torch.tensor([1]), Sampling(max_new_tokens=24, eos_token_id=1)
    uniforms = make_uniforms(0, list(range(32)), 24)

    @torch.inference_mode()
    def plain() -> None:
        GenerateEngine(model, how).draw(prompts, uniforms, eos, how)

    def fast() -> None:
        sample(model, prompts, max_new_tokens=24, eos_token_id=1, pad_token_id=0)

    assert speed_up(plain, fast) > 1.2


@pytest.mark.long  # a process of its own, which imports the libraries
@pytest.mark.parametrize("subject", ["reward", "pretraining", "generation", "sft"])
def test_a_benchmark_runs(subject, tmp_path):
    out = tmp_path / "figures.json"
    words = [sys.executable, BENCH / f"{subject}.py", *["--quick", "--threads", "1", "--device", "cpu", "--out"], out]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "over " in done.stdout and out.stat().st_size > 500
