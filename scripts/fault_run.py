"""Kill a very small gold run a hundred times: SIGKILL at random moments of all stages.

    python scripts/fault_run.py OUT [kills=100] [saves=20] [seed=0]

One run is not disturbed. The others write a checkpoint after every step and are killed repeatedly before they may finish a stage:
mostly at a random moment, sometimes while a checkpoint is being written. At the end all output files must be equal byte for byte to
those of the undisturbed run, and all metrics equal in value. Prints a table and writes OUT/faults.json; the exit code is 1 if
anything differs. Stages run in processes forked from this one, which has imported their modules, so a start takes about a second.
Run nothing else meanwhile: the machine's load shifts the moments of the kills.
"""

import contextlib
import importlib
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from rlhf.runs.run_files import read_jsonl
from rlhf.system.files import read_json, write_json

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "DS_ACCELERATOR": "cpu"}
os.environ |= {"HF_HUB_OFFLINE": "1", "RLHF_PROGRESS": "off"}

SMALL = (
    "experiment=gold", "rounds=1", "tracking=jsonl", "device=cpu", "threads=1", "model.n_layer=2", "model.width=64", "model.n_head=2",
    "tokenizer.vocab_size=768", "pretrain.tokens=60_000", "pretrain.eval_sequences=16", "gold.documents=4000",
    "gold.demonstrations=300", "gold.train_prompts=150", "gold.dev_prompts=20", "gold.test_prompts=30",
    "gold.comparison_prompts=80", "gold.comparison_test_prompts=30", "sft.epochs=1", "reward.epochs=2",
    "reward.batch_prompts=16", "reward.calibration_samples=32", "ppo.episodes=256", "ppo.episodes_per_update=32",
    "ppo.micro_batch_episodes=16", "ppo.eval_prompts=16", "kl.target=2.0", "kl.horizon=500", "evaluate.prompts=30",
    "evaluate.samples=2", "rollout.max_new_tokens=24", "tracking.log_every=1",
)  # fmt: skip
# Kills of one run, by stage; a stage that ends earlier gets fewer.
PLAN = {"world": 1, "tokenizer": 1, "pretrain": 6, "sft": 5, "label": 2, "reward": 6, "ppo": 6, "evaluate": 2}
SAVING = ("pretrain", "sft", "reward", "ppo")  # the stages that write checkpoints
SAVE_EVERY = 3  # every third kill of these stages waits for a checkpoint to be written
SAVE_SECONDS = 0.03  # the kill then follows within this time
RUN = Path("runs", "small")
PATIENCE = 120.0  # seconds after which a stage that neither ends nor saves is an error


def arguments(**defaults: Any) -> tuple[Any, ...]:
    """The command line `OUT [name=value] …`: the folder, and the value of each name, of its default's type."""
    given = dict(argument.partition("=")[::2] for argument in sys.argv[2:])
    if len(sys.argv) < 2 or not given.keys() <= defaults.keys():
        usage = " ".join(f"[{name}={value}]" for name, value in defaults.items())
        sys.exit(f"usage: python {sys.argv[0]} OUT {usage}")
    return Path(sys.argv[1]).absolute(), *(type(value)(given.get(name, value)) for name, value in defaults.items())


def start(stage: str, home: Path, overrides: list[str]) -> int:
    """Start the stage's command in a new process, in the folder `home` that contains the run; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    home.mkdir(parents=True, exist_ok=True)
    os.chdir(home)  # so that stored paths are the same in all runs
    out = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1), os.dup2(out, 2)

    def stage_command() -> None:
        from rlhf.cli import main

        main([stage, "--shared-settings", *SMALL, "runs_dir=runs", "run=small", *overrides])

    leave_after(stage_command)


def leave_after(work: Callable[[], None]) -> NoReturn:
    """Do the work of a forked process, which ends with the exit code that Python would end with."""
    code = 0
    try:
        work()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1 if error.code else 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def wait(pid: int, seconds: float) -> int | None:
    """The exit code of a process that ends within `seconds`; None if it is still running."""
    until = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        left = until - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(left, 0.002))


def unsealed(folder: Path) -> set[str]:
    """Checkpoints without a manifest: being written, or interrupted by a kill."""
    return {path.name for path in (folder / "checkpoints").glob("*-*") if not (path / "manifest.json").exists()}


def wait_for_save(pid: int, folder: Path) -> int | None:
    """Wait until a new checkpoint is being written, or return the exit code of a stage that ends before."""
    before = unsealed(folder)
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if unsealed(folder) - before:
            return None
        if (code := wait(pid, 0.0005)) is not None:
            return code
    raise TimeoutError(f"{folder}: neither saved nor ended within {PATIENCE:.0f} s")


def run_stage(stage: str, home: Path, overrides: list[str]) -> float:
    """Run the stage to its end; returns the seconds. Exits if it fails."""
    begun = time.monotonic()
    code = wait(start(stage, home, overrides), PATIENCE)
    if code != 0:
        sys.exit(f"{stage}: ended with {code}, see {home / 'log.txt'}")
    return time.monotonic() - begun


def kill_stage(
    stage: str, home: Path, overrides: list[str], chance: random.Random, seconds: float, in_save: bool
) -> dict[str, Any] | None:
    """Start the stage and kill it; returns a record of the kill, or None if the stage ended first.

    seconds: the random moment is at most this long after the start.
    """
    folder = home / RUN / stage
    before = unsealed(folder)
    pid = start(stage, home, overrides)
    begun = time.monotonic()
    code = wait_for_save(pid, folder) if in_save else None
    if code is None:
        code = wait(pid, chance.uniform(0, SAVE_SECONDS if in_save else seconds))
    if code is not None:
        if code:
            sys.exit(f"{stage}: ended with {code}, see {home / 'log.txt'}")
        return None
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    hit = {"stage": stage, "after_s": round(time.monotonic() - begun, 3), "aimed_at": "save" if in_save else "moment"}
    return hit | {"in_save": bool(unsealed(folder) - before)}


def numbers(folder: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl without figures of speed and memory."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "memory/")) and "per_s" not in k}
        for row in read_jsonl(folder / "metrics.jsonl")
    ]


def differences(whole: Path, killed: Path) -> list[str]:
    """The differences between two runs: output files by hash, figures by value."""
    differing = []
    for stage in PLAN:
        one, two = (read_json(run / stage / "stage.json") for run in (whole, killed))
        names = sorted((one["files"].keys() | two["files"].keys()) - {"results.json"})
        differing += [f"{stage}/{name}" for name in names if one["files"].get(name) != two["files"].get(name)]
        differing += [f"{stage}: {key}" for key in ("summary", "parents") if one[key] != two[key]]
        if numbers(whole / stage) != numbers(killed / stage):
            differing.append(f"{stage}/metrics.jsonl")
    results = [read_json(run / "evaluate" / "results.json") for run in (whole, killed)]
    figures = [{k: v for k, v in one.items() if k not in ("seconds", "peak_rss_mb")} for one in results]
    return differing + (["evaluate/results.json"] if figures[0] != figures[1] else [])


def import_everything() -> None:
    """Import the stages' modules and libraries once, before forking."""
    from rlhf.cli import COMMANDS
    from rlhf.config.compose import compose_config

    compose_config(list(SMALL))
    for stage in PLAN:
        importlib.import_module(COMMANDS[stage][0])
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    import hydra  # noqa: F401
    import trl  # noqa: F401
    from transformers import Trainer  # noqa: F401
    from trl import SFTTrainer  # noqa: F401

    with contextlib.suppress(ImportError):
        import deepspeed  # noqa: F401


def kill_a_run(home: Path, chance: random.Random, times: dict[str, float], left: int) -> list[dict[str, Any]]:
    """One whole run with at most `left` kills."""
    hits: list[dict[str, Any]] = []
    overrides = ["checkpoints.every_seconds=0"]
    for stage, planned in PLAN.items():
        for number in range(min(planned, left - len(hits))):
            in_save = stage in SAVING and number % SAVE_EVERY == 0
            hit = kill_stage(stage, home, overrides, chance, times[stage], in_save)
            if hit is None:
                break
            hits.append(hit | {"run": home.name})
        else:
            run_stage(stage, home, overrides)
    return hits


def main(out: Path, kills: int, saves: int, seed: int) -> int:
    """Make runs until there were enough kills; returns the exit code."""
    started = time.monotonic()
    import_everything()
    chance = random.Random(f"faults-{seed}")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    times = {stage: run_stage(stage, out / "whole", []) for stage in PLAN}
    print("undisturbed: " + ", ".join(f"{stage} {took:.1f} s" for stage, took in times.items()), flush=True)
    hits: list[dict[str, Any]] = []
    runs: dict[str, list[str]] = {}
    while len(hits) < kills or sum(hit["in_save"] for hit in hits) < saves:
        name = f"killed-{len(runs)}"
        left = max(kills - len(hits), 1)
        hits += kill_a_run(out / name, chance, times, left)
        runs[name] = differences(out / "whole" / RUN, out / name / RUN)
        outcome = "equal to the undisturbed run" if not runs[name] else "differs: " + ", ".join(runs[name][:5])
        print(f"{name}: {sum(hit['run'] == name for hit in hits)} kills, {outcome}", flush=True)
    seconds = time.monotonic() - started
    result: dict[str, Any] = {"kills": len(hits), "in_save": sum(hit["in_save"] for hit in hits), "runs": runs}
    result |= {"seed": seed, "seconds": round(seconds, 1), "undisturbed_s": {k: round(v, 2) for k, v in times.items()}}
    write_json(out / "faults.json", result | {"hits": hits})
    print(f"\n{'stage':<11}{'kills':>7}{'in a save':>11}")
    for stage in PLAN:
        of_stage = [hit for hit in hits if hit["stage"] == stage]
        print(f"{stage:<11}{len(of_stage):>7}{sum(hit['in_save'] for hit in of_stage):>11}")
    equal = sum(not differing for differing in runs.values())
    print(
        f"{'all':<11}{len(hits):>7}{result['in_save']:>11}\n{equal} of {len(runs)} killed runs equal the undisturbed one, "
        f"bit for bit; {seconds:.0f} s -> {out / 'faults.json'}"
    )
    return 0 if equal == len(runs) else 1


if __name__ == "__main__":
    sys.exit(main(*arguments(kills=100, saves=20, seed=0)))
