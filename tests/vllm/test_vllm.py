"""rollout.engine=vllm on a CPU: samples, transferred weights, and the stages that sample."""

import contextlib
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf.config import Config
from rlhf.engines.choosing import Samples, Sampling
from rlhf.engines.sampling import sampler_for
from rlhf.engines.vllm import VllmEngine
from rlhf.errors import UserError
from rlhf.model.batching import right_pad
from rlhf.model.fused_loss import response_logprobs
from rlhf.runs.run_files import read_json, read_jsonl
from rlhf.stages import ppo
from rlhf.training.adapters import add_adapters
from rlhf.training.setup import load_policy
from tests.stages.conftest import Run, stopped_in_second

VLLM = "rollout.engine=vllm"
DRAWN = {"max_new_tokens": 12, "eos_token_id": 7}


@pytest.fixture
def config() -> Config:
    made = Config(device="cpu")
    made.rollout.engine = "vllm"
    return made


@pytest.fixture
def policy(gold_run: Run) -> Any:
    return load_policy(gold_run.folder / "sft" / "model", dropout=0.0)


@pytest.fixture
def engine(config: Config, policy: Any) -> VllmEngine:
    return VllmEngine(config, policy, Sampling(**DRAWN, seed=3))


def prompts(count: int = 6) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(10, 700, (3 + 4 * i,), generator=generator).tolist() for i in range(count)]


def worst_gap(policy: Any, asked: list[list[int]], samples: Samples) -> float:
    """The largest difference of the samples' log-probs from a forward's."""
    tokens, _ = right_pad([p + r for p, r in zip(asked, samples.responses, strict=True)], 0)
    starts = torch.tensor(list(map(len, asked)))
    with torch.no_grad():
        logp, _ = response_logprobs(policy, tokens, starts, samples.mask)
    return (logp - samples.logprobs)[samples.mask].abs().max().item()


def test_its_log_probs_are_a_forwards(engine: VllmEngine, policy: Any) -> None:
    samples = engine.sample(prompts())
    assert worst_gap(policy, prompts(), samples) < 1e-5
    assert [len(r) for r in samples.responses] == samples.mask.sum(1).tolist()


def test_greedy_responses_are_the_native_samplers(engine: VllmEngine, policy: Any) -> None:
    native = sampler_for(policy, Sampling(**DRAWN)).sample(prompts(), greedy=True)
    assert engine.sample(prompts(), greedy=True).responses == native.responses


def test_a_response_contains_its_end_token_and_nothing_after_it(engine: VllmEngine) -> None:
    every = engine.sample(prompts(), eos_token_id=None)
    assert every.ended.all()  # without end tokens every response is whole
    end = every.responses[0][3]
    first = every.responses[0].index(end)
    ended = engine.sample(prompts(), eos_token_id=end)
    assert ended.responses[0] == every.responses[0][: first + 1]
    assert bool(ended.ended[0])


def test_a_response_depends_on_its_key_alone(engine: VllmEngine) -> None:
    keys = list("abcdef")
    together = engine.sample(prompts(), keys)
    alone = engine.sample(prompts()[2:3], ["c"])
    assert alone.responses == together.responses[2:3]
    again = engine.sample([prompts()[2]] * 2, ["x", "y"])
    assert again.responses[0] != again.responses[1]


@contextlib.contextmanager
def transfer(engine: VllmEngine, keep: Any) -> Iterator[None]:
    """A transfer that loses the tensors whose names `keep` refuses, or all."""
    send = engine.llm.collective_rpc

    def losing(name: str, kwargs: dict[str, Any]) -> Any:
        kept = [(name, tensor) for name, tensor in kwargs["weights_iterator"] if keep(name)]
        return send(name, kwargs={"weights_iterator": iter(kept)}) if kept else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.llm, "collective_rpc", losing)
        yield


def change(policy: Any, size: float) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(size * torch.randn(p.shape, generator=generator))


@pytest.mark.parametrize(("size", "keep"), [
    (1e-2, lambda name: False),  # nothing arrives
    (1e-5, lambda name: False),  # … after an update so small that rounding would hide it
    (1e-2, lambda name: "lm_head" not in name),  # a tied unembedding keeps its old copy
    (1e-2, lambda name: "wpe" not in name and "rotary" not in name and ".0." not in name),  # one block is lost
])  # fmt: skip
def test_stale_weights_are_refused(engine: VllmEngine, policy: Any, size: float, keep: Any) -> None:
    engine.load(policy)
    change(policy, size)
    with transfer(engine, keep), pytest.raises(UserError, match=r"rollout\.engine=vllm: its log-probs|still has"):
        engine.load(policy)
    engine.load(policy)  # and a whole transfer is accepted
    assert worst_gap(policy, prompts(), engine.sample(prompts())) < 1e-5


def test_weights_must_be_loaded_again_after_sleep(engine: VllmEngine, policy: Any) -> None:
    engine.sample(prompts())
    engine.sleep()
    change(policy, 1e-2)
    engine.wake()
    assert worst_gap(policy, prompts(), engine.sample(prompts())) < 1e-5


def test_adapters_are_merged_while_weights_are_sent(config: Config, policy: Any) -> None:
    config.lora.rank = 4
    add_adapters(policy, config, Path("base"))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if ".lora_" in name:
                p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    engine = VllmEngine(config, policy, Sampling(**DRAWN))
    assert worst_gap(policy, prompts(), engine.sample(prompts())) < 1e-5


def updates_of(run: Run) -> list[dict[str, float]]:
    lines = read_jsonl(run.folder / "ppo" / "metrics.jsonl")
    return [line for line in lines if "rollout/mismatch" in line]


@pytest.fixture(scope="module")
def whole(gold_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """PPO in one go. Only read it."""
    run = gold_run.copy(tmp_path_factory.mktemp("whole"), "ppo")
    run.stage("ppo", VLLM)
    return run


def check_same_policy(run: Run, whole: Run) -> None:
    one, two = (load_file(each.folder / "ppo" / "model" / "model.safetensors") for each in (run, whole))
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-5, rtol=0)


def test_ppo_that_is_stopped_after_its_second_update_and_resumed(gold_run: Run, whole: Run, tmp_path: Path) -> None:
    updates = updates_of(whole)
    assert len(updates) == 3
    assert all(line["rollout/mismatch_p99"] < 1e-4 and line["rollout/corrected"] == 0 for line in updates)
    assert all(line["rollout/mismatch_ess"] == pytest.approx(1, abs=1e-5) for line in updates)
    stopped = gold_run.copy(tmp_path, "ppo")
    with stopped_in_second(ppo, "one_update"):
        stopped.stage("ppo", VLLM)
    stopped.stage("ppo", VLLM)
    check_same_policy(stopped, whole)


def test_ppo_that_is_killed_leaves_no_process_and_resumes(gold_run: Run, whole: Run, tmp_path: Path) -> None:
    run = gold_run.copy(tmp_path, "ppo")
    metrics, words = run.folder / "ppo" / "metrics.jsonl", run.words(VLLM, "checkpoints.every_seconds=0")
    with subprocess.Popen(
        [sys.executable, "-m", "rlhf", "ppo", "--shared-settings", *words], start_new_session=True
    ) as process:
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.05)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    time.sleep(0.5)
    rows = [path.read_text(encoding="utf-8").rpartition(")")[2].split() for path in Path("/proc").glob("[0-9]*/stat")]
    assert not [row for row in rows if int(row[3]) == process.pid and row[0] != "Z"]
    run.stage("ppo", VLLM)
    check_same_policy(run, whole)


@pytest.mark.parametrize("way", ["zero2", "zero3"])
def test_two_processes(gold_run: Run, tmp_path: Path, way: str) -> None:
    """Each process has an engine; the first rollout is that of one process. (Under ZeRO both models' gradients are clipped together,
    so the update is another one.)"""
    one, two = (gold_run.copy(tmp_path, "ppo", name) for name in ("one", "two"))
    short = [VLLM, "ppo.episodes=64", "ppo.critic_warmup_updates=0", "ppo.eval_every=0"]
    one.stage("ppo", *short)
    settings = ["--shared-settings", *two.overrides, f"runs_dir='{tmp_path}'", "run=two", *short, f"deepspeed={way}"]
    launched = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "rlhf", "ppo",
    ]  # fmt: skip
    done = subprocess.run([*launched, *settings], capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (alone,), (shared,) = updates_of(one), updates_of(two)
    for name in ("objective/scores", "objective/kl", "objective/entropy", "rollout/response_len", "gold/total"):
        assert shared[name] == pytest.approx(alone[name], abs=1e-4), name
    assert shared["rollout/mismatch_p99"] < 1e-4


def test_grpo(gold_run: Run, tmp_path: Path) -> None:
    run = gold_run.copy(tmp_path, "ppo")
    grpo = ["ppo.advantages=grpo", "ppo.responses_per_prompt=4", "ppo.critic_warmup_updates=0", "kl.penalty=loss"]
    run.stage("ppo", VLLM, *grpo, "ppo.episodes=128")
    assert len(updates_of(run)) == 2
    assert all(math.isfinite(line["objective/scores"]) and line["objective/kl"] >= 0 for line in updates_of(run))


def test_best_of_16_and_generate(gold_run: Run, tmp_path: Path) -> None:
    run = gold_run.copy(tmp_path, "evaluate")
    folder = run.stage("evaluate", VLLM, "evaluate.best_of=16", "evaluate.prompts=20")
    results = read_json(folder / "results.json")
    assert results["best_of_n"]["n"] == 16
    assert math.isfinite(results["best_of_n"]["reward"])
    answers = tmp_path / "answers.jsonl"
    run.stage(
        "generate", VLLM, f"data.prompts={gold_run.folder / 'world' / 'prompts.jsonl'}", f"generate.out={answers}"
    )
    assert len(list(read_jsonl(answers))) > 20


def test_a_pretrained_model(smollm2: Path, config: Config) -> None:
    """SmolLM2, whose weights and tied unembedding go to vLLM under transformers' names."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32).eval()
    policy.config.quantization_config = None
    engine = VllmEngine(config, policy, Sampling(max_new_tokens=8, eos_token_id=2))
    samples = engine.sample(prompts(3))
    assert worst_gap(policy, prompts(3), samples) < 1e-3  # of logits up to 40; 2.7e-5 was measured
