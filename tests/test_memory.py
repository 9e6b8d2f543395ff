"""The memory budget: what limits leave, how batches are divided to fit, what does not fit, and how a resumed stage goes on."""

import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from rlhf.config import Config
from rlhf.cpu.machine import keep_freed_memory
from rlhf.errors import UserError
from rlhf.model.batching import by_length
from rlhf.model.fused_loss import NextToken
from rlhf.model.gpt import GPTForCausalLM
from rlhf.system import memory
from rlhf.training import batches
from rlhf.training.batches import Batches, Objective
from rlhf.training.engine import make_engine
from rlhf.training.loop import TrainingLoop
from rlhf.training.usage import kept_per_token, set_budget
from tests.presets import preset

CPU = torch.device("cpu")


def test_groups_have_at_most_so_many_padded_tokens():
    lengths = [3, 90, 5, 4, 100, 6, 30]
    groups = by_length(lengths, most=3, tokens=100)
    assert groups == [[4], [1], [5, 6], [0, 3, 2]]
    assert by_length(lengths, tokens=50) == [[4], [1], [6], [0, 3, 2, 5]], "an item alone may be longer"
    assert by_length([10, 10, 10], tokens=50, rows=[2, 3, 4]) == [[2], [0, 1]]
    # joined items count once, divided by 0.8: 1 / 0.8 * 10 < 25 <= 3 / 0.8 * 10
    assert by_length([10, 10, 10], tokens=25, rows=[2, 3, 4], joined=True) == [[2], [0, 1]]


def fake_kernel(tmp_path, monkeypatch, files: dict[str, str], cgroup: str) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "cgroup").write_text(cgroup)
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "OF_PROCESS", tmp_path / "cgroup")


@pytest.mark.parametrize(("files", "cgroup"), [
    ({"a/b/memory.max": "max", "a/memory.max": "900", "a/memory.current": "500", "a/memory.stat": "inactive_file 100"},
     "0::/a/b"),
    ({"memory/a/memory.limit_in_bytes": "900", "memory/a/memory.usage_in_bytes": "500",
      "memory/a/memory.stat": "total_inactive_file 100"}, "3:cpu:/x\n4:memory:/a"),
    ({"memory.max": "900", "memory.current": "400", "memory.stat": "anon 400"}, "0::/outside/of/this/container"),
])  # fmt: skip
def test_what_a_container_leaves(tmp_path, monkeypatch, files, cgroup):
    fake_kernel(tmp_path, monkeypatch, files, cgroup)
    assert list(memory.left_in_cgroups()) == [500]
    assert memory.free_bytes(CPU) == 500


def test_a_set_budget_and_a_safe_share(monkeypatch):
    assert memory.budget_bytes(4.0, CPU) == 4_000_000_000
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    monkeypatch.setattr(memory, "used_bytes", lambda device: 50)
    assert memory.budget_bytes(None, CPU) == 850
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert memory.budget_bytes(None, CPU) == 450


def make_stage(budget_gb: float, **more):
    config = Config()
    config.memory.budget_gb = budget_gb
    said: list[str] = []
    parts = {"memory": more, "say": said.append, "said": said, "note_progress": lambda: None}
    return SimpleNamespace(config=config, name="sft", **parts)


@pytest.fixture
def engine():
    sizes = {"width": 64, "n_head": 4, "n_layer": 8, "context_length": 4096, "vocab_size": 99}
    model = GPTForCausalLM(preset("tiny", **sizes))
    groups = [{"params": list(model.parameters()), "lr": 0.0}]
    return make_engine(Config(), NextToken(model), Config().sft, CPU, groups=groups)


def test_the_limit_follows_the_budget(engine, monkeypatch):
    monkeypatch.setattr("rlhf.training.usage.used_bytes", lambda device: 10**9)
    stage = make_stage(64)
    set_budget(stage, engine, 100, 10**6)
    assert engine.most_tokens == int(1.5e9 / kept_per_token(engine)), "more would not be faster on a CPU"
    small = make_stage(1.2)
    set_budget(small, engine, 100, 10**6)
    assert 100 < engine.most_tokens < 0.2e9 / kept_per_token(engine)
    assert small.memory["needs_gb"] <= 1.2 and "of 1.2 GB" in small.said[-1]


def test_few_rows_need_less_than_the_limit(engine, monkeypatch):
    monkeypatch.setattr("rlhf.training.usage.used_bytes", lambda device: 10**9)
    few, many = make_stage(64), make_stage(64)
    set_budget(few, engine, 100, 2)
    set_budget(many, engine, 100, 4)
    gap = many.memory["needs_gb"] - few.memory["needs_gb"]
    assert 1e9 * gap == pytest.approx(200 * kept_per_token(engine), abs=2)
    assert few.memory["tokens"] == many.memory["tokens"]


def test_a_row_too_long_is_computed_in_two_passes_or_refused(engine, monkeypatch):
    monkeypatch.setattr("rlhf.training.usage.used_bytes", lambda device: 10**9)
    stage, plain = make_stage(1.2), kept_per_token(engine)
    set_budget(stage, engine, int(0.18e9 / plain), 2)
    assert engine.recomputes and kept_per_token(engine) < 0.5 * plain
    set_budget(make_stage(64), engine, 100, 10**6)
    assert engine.most_tokens == int(1.5e9 / plain), "longer forwards would only be padded more"
    assert all(layer.gradient_checkpointing for layer in engine.module.model.model.layers)
    with pytest.raises(UserError, match=r"its longest row of 100,000 tokens: try lora.rank=16 or data.max_tokens="):
        set_budget(make_stage(1.2), engine, 100_000, 1)


def test_a_measured_forward_corrects_the_estimate_and_gradients_lie_where_room_was_made(engine):
    stage = make_stage(64)
    set_budget(stage, engine, 100, 10**6, lambda most: pytest.fail("measured without need"))
    needed = stage.memory["needs_gb"]
    stage = make_stage(1.05 * needed)
    set_budget(stage, engine, 100, 10**6, lambda most: 2 * kept_per_token(engine))
    assert stage.memory["tokens"] * 2 * kept_per_token(engine) <= 1.05e9 * needed

    def places() -> list[int]:
        tokens = torch.randint(99, (2, 8))
        engine.backward(engine(denominator=1, input_ids=tokens, labels=tokens))
        return [p.grad.data_ptr() for p in engine.module.parameters()]

    first = places()
    kept = torch.zeros(10**6)  # takes what a freed gradient would leave
    assert places() == first and kept.sum() == 0, "added"
    once = [p.grad.clone() for p in engine.module.parameters()]
    engine.step(0.0)
    assert all(p.grad is None for p in engine.module.parameters()) and places() == first
    assert not all(a.equal(p.grad) for a, p in zip(once, engine.module.parameters(), strict=True))


def test_a_resumed_stage_keeps_a_measured_limit(engine):
    stage = make_stage(64)
    set_budget(stage, engine, 100, 10**6)
    budget = 1.05 * stage.memory["needs_gb"]
    stage = make_stage(budget)
    set_budget(stage, engine, 100, 10**6, lambda most: kept_per_token(engine) / 2)
    assert {type(value) for value in stage.memory.values()} == {int, float}, "stage.json's schema has numbers here"
    resumed = make_stage(budget)
    resumed.memory = dict(stage.memory)
    set_budget(resumed, engine, 100, 10**6, lambda most: None)
    assert resumed.memory["tokens"] == stage.memory["tokens"]


def make_loop(engine, total: int):
    said: list[str] = []
    bar = SimpleNamespace(unit="step")
    loop = SimpleNamespace(engine=engine, ranks=engine.ranks, done=1, total=total, bar=bar, said=said)
    loop.stage, loop.say_time = SimpleNamespace(say=said.append), partial(TrainingLoop.say_time, loop)
    return loop


def row_objective(engine) -> Objective:
    def loss_of(part, count, sums):
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in part], batch_first=True)
        return engine(tokens, count, input_ids=tokens), {}

    return Objective(lambda row: [row], loss_of, micro_batch_rows=2, count=len)


def test_measuring_changes_nothing(engine):
    before = {name: x.clone() for name, x in engine.module.state_dict().items()}
    random, loop = torch.get_rng_state(), make_loop(engine, total=3)
    engine.module.model.model.dropout.p = 0.1
    items = Batches([[5, 6, 7]] * 4, 4, lambda count, epoch: range(count))
    batches.say_time(loop, items, row_objective(engine))
    assert len(loop.said) == 1 and torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in engine.module.parameters())
    assert all(torch.equal(x, before[name]) for name, x in engine.module.state_dict().items())


# A process that imports once; each case is a fork of it, since the setting holds for a whole process.
CASES = """
import ctypes, os, re, resource
from pathlib import Path
import torch
from rlhf.cpu.machine import keep_freed_memory, return_freed_memory
from rlhf.model import GPTConfig, GPTForCausalLM
from rlhf.training.usage import LARGE
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def block(size):
    return ctypes.memset(ctypes.c_void_p(libc.malloc(size)), 1, size)

def kilobytes(name):
    return re.search(name + r":\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]

def faults(kept):
    if kept:
        assert keep_freed_memory()
    for times in range(6):
        if times == 3:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for one in [block(34 << 20), block(34 << 20)]:
            libc.free(one)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def gap(returned):
    assert keep_freed_memory()
    libc.free(block(20 << 20))
    freed, _ = block(20 << 20), block(1 << 10)
    libc.free(freed)
    if returned:
        assert return_freed_memory()
    return kilobytes("VmRSS")

def layers(recomputing):
    assert keep_freed_memory(*([LARGE] if recomputing else []))
    model = GPTForCausalLM(GPTConfig(vocab_size=300, context_length=1024, n_layer=8, n_head=4, width=256))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    model.model(torch.zeros(4, 1024, dtype=torch.int64))
    return kilobytes("VmHWM")

for case in (faults, gap, layers):
    for choice in (True, False):
        if not os.fork():
            os.write(1, f"{case.__name__} {choice} {case(choice)}\\n".encode())
            os._exit(0)
        assert os.wait()[1] == 0
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nothing is set")
def test_freed_memory_is_kept_and_returned():
    done = subprocess.run([sys.executable, "-c", CASES], capture_output=True, text=True, check=True)
    found = {(case, choice == "True"): int(value) for case, choice, value in map(str.split, done.stdout.splitlines())}
    # it is not fetched again: 6 blocks of 34 MiB: 4096 bytes per page make 52,224 of them, or 102 if pages are huge
    assert found["faults", True] * 10 < found["faults", False], found
    # it is returned below what is in use
    assert found["gap", True] < found["gap", False] - 15 * 1024, found
    # inputs kept between layers cost no gaps if activations are recomputed
    wide = 4 * 1024 * 4 * 256 * 4 // 2**10  # kB of a block's widest temporary, 16 MB
    assert found["layers", True] < found["layers", False] - 3 * wide, found


def test_what_people_set_stays(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert keep_freed_memory() is False
