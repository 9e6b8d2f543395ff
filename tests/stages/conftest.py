"""One small gold run, made once per session by the stages themselves; tests copy what they change."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rlhf.commands.launch import import_once, run_processes
from rlhf.report.page import write_report

os.environ["RLHF_PROGRESS"] = "off"

# A world so small that all stages take half a minute; the models learn something, but little.
SMALL_MODEL = ["tracking=jsonl", "device=cpu", "threads=1", "model.n_layer=2", "model.width=64", "model.n_head=2"]
GOLD = [
    "experiment=gold", *SMALL_MODEL, "tokenizer.vocab_size=768", "pretrain.tokens=150_000", "pretrain.eval_sequences=32",
    "gold.documents=6000", "gold.demonstrations=400", "gold.train_prompts=200", "gold.dev_prompts=20",
    "gold.test_prompts=40", "rounds=1", "gold.comparison_prompts=80", "gold.comparison_test_prompts=30", "sft.epochs=2",
    "reward.epochs=1", "reward.calibration_samples=64", "reward.audit=8", "ppo.episodes=192", "ppo.episodes_per_update=64",
    "ppo.ema_decay=null", "ppo.micro_batch_episodes=16", "kl.target=2.0", "kl.horizon=500", "evaluate.prompts=40", "evaluate.samples=2",
    "evaluate.best_of=4", "rollout.max_new_tokens=24", "tracking.log_every=1",
]  # fmt: skip
GOLD_STAGES = ("world", "tokenizer", "pretrain", "sft", "label", "reward", "ppo", "evaluate")


def run_stage(name: str, config: Any) -> None:
    from rlhf.cli import module_of

    module_of(name).run(config)


PRELOADED = [f"rlhf.stages.{stage}" for stage in ("pretrain", "sft", "reward", "ppo")]


def run_ranks(script: str, processes: int, *arguments: str) -> None:
    """tests/stages/<script>.py as so many processes of one thread each, forked from one that has imported what they need."""
    import_once(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        assert run_processes(arguments, processes, threads=1, module=f"tests.stages.{script}") == 0


@cache
def composed(*overrides: str) -> Any:
    """Hydra takes a tenth of a second, and most tests want what another one had."""
    from rlhf.config.compose import compose_config

    return compose_config(list(overrides))


@dataclass(frozen=True)
class Run:
    """A run and the overrides that made it."""

    runs_dir: Path
    name: str
    overrides: list[str]

    @property
    def folder(self) -> Path:
        return self.runs_dir / self.name

    def words(self, *more: str) -> list[str]:
        return [*self.overrides, f"runs_dir={self.runs_dir}", f"run={self.name}", *more]

    def config(self, *more: str) -> Any:
        config = deepcopy(composed(*self.overrides, *more))
        for name, value in (("runs_dir", str(self.runs_dir)), ("run", self.name)):
            if not any(word.startswith(f"{name}=") for word in more):
                setattr(config, name, value)
        return config

    def tokenizer(self, stage: str = "sft") -> Any:
        from rlhf.data.tokenizer import load_tokenizer

        return load_tokenizer(self.folder / stage / "model")

    def policy(self, stage: str = "sft") -> Any:
        from rlhf.training.setup import load_policy

        return load_policy(self.folder / stage / "model")

    def comparisons(self) -> list[Any]:
        from rlhf.data.reading import load_comparisons

        return load_comparisons(str(self.folder / "label" / "comparisons.jsonl"))[0]

    def demonstrations(self) -> list[Any]:
        from rlhf.data.reading import load_demonstrations

        return load_demonstrations(str(self.folder / "world" / "demonstrations.jsonl"))[0]

    def record(self, stage: str) -> dict[str, Any]:
        return json.loads((self.folder / stage / "stage.json").read_text())

    def results(self) -> dict[str, Any]:
        return json.loads((self.folder / "evaluate" / "results.json").read_text())

    def values(self, stage: str, metric: str) -> list[tuple[int, float]]:
        """(step, value) of every line of metrics.jsonl that has the metric, in the order of the file."""
        lines = (self.folder / stage / "metrics.jsonl").read_text().splitlines()
        return [(row["progress/step"], row[metric]) for row in map(json.loads, lines) if metric in row]

    def stage(self, name: str, *more: str) -> Path:
        run_stage(name, self.config(*more))
        return self.folder / name

    def copy(self, runs_dir: Path, until: str | None, name: str = "copy") -> "Run":
        """A run of its own that has the stages before `until`; None: all."""
        for stage in GOLD_STAGES[: None if until is None else GOLD_STAGES.index(until)]:
            if (self.folder / stage).is_dir():
                shutil.copytree(self.folder / stage, runs_dir / name / stage)
        if until is None and (self.folder / "report.html").exists():
            shutil.copy(self.folder / "report.html", runs_dir / name)
        return Run(runs_dir, name, self.overrides)


@contextlib.contextmanager
def stopped_in_second(module: Any, function: str) -> Iterator[None]:
    """A context that gets SIGTERM in the second call of a module's function and must end with KeyboardInterrupt."""
    real, calls = getattr(module, function), []

    def second_is_signalled(*arguments: Any, **keywords: Any) -> Any:
        calls.append(function)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, function, second_is_signalled)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.fixture(scope="session")
def gold_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All stages of the embedded world, complete. Only read it; `copy` gives one to change.

    The workers of pytest-xdist share one, made by the first that needs it. RLHF_GOLD_RUN names a folder in which it stays
    from one call of pytest to the next; remove that folder when the code has changed.
    """
    if given := os.environ.get("RLHF_GOLD_RUN"):
        folder = Path(given)
    elif os.environ.get("PYTEST_XDIST_WORKER"):
        folder = tmp_path_factory.getbasetemp().parent / "gold"
    else:
        folder = tmp_path_factory.mktemp("runs")
    folder.mkdir(parents=True, exist_ok=True)
    run, complete = Run(folder, "gold", GOLD), folder / "complete"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            shutil.rmtree(run.folder, ignore_errors=True)  # of a call that was killed
            for stage in GOLD_STAGES:
                run.stage(stage)
            write_report(run.folder)
            complete.touch()
    return run


ONE_LABELER = ["data.held_out_labelers=[labeler-2,labeler-3,labeler-4,labeler-5]"]  # 25 rankings
SHORT = {  # so that each stage has few steps; every other setting is that of the gold run
    "pretrain": ["pretrain.tokens=16384", "pretrain.eval_sequences=8"],  # 8 steps
    "sft": ["sft.epochs=1", "sft.batch_size=100", "sft.dropout=0.1"],  # 4 steps
    "reward": [  # 8 steps, across the epochs' border
        "reward.epochs=2", "reward.batch_prompts=8", "reward.audit=0", "reward.calibration_samples=16", *ONE_LABELER,
    ],
    "ppo": [],  # 3 updates
}  # fmt: skip


@pytest.fixture(scope="session")
def undisturbed(gold_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """undisturbed("sft"): a run whose last stage is that one, SHORT, done in one go and without any checkpoint. Only read it."""
    made = {"ppo": gold_run}  # whose every setting is that of the gold run

    def make(stage: str) -> Run:
        if stage not in made:
            run = made[stage] = gold_run.copy(tmp_path_factory.mktemp("undisturbed"), stage)
            run.stage(stage, *SHORT[stage])
        return made[stage]

    return make


@pytest.fixture
def copy_until(gold_run: Run, tmp_path: Path) -> Callable[..., Run]:
    """copy_until("sft"): a run that lacks SFT and what comes after it."""
    return lambda until, name="copy": gold_run.copy(tmp_path, until, name)
