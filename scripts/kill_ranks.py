"""Kill a rank with SIGKILL at random moments: reward model, PPO, PPO with LoRA on two ranks of ZeRO-2 and ZeRO-3; PPO with vLLM.

    python scripts/kill_ranks.py OUT [only=TEXT] [kills=20] [seed=0]

`kills` of ZeRO-2, of ZeRO-3 and of vLLM are shared by the ways of each (only: those whose name contains TEXT, as "zero3" or "ppo zero2").
Those with vLLM need its environment (`make .venv-vllm/ready`, then .venv-vllm/bin/python). Of each way one run is not disturbed; in the
other, launches are killed and started again until the kills are used up, then it may finish. After each kill the launcher must have
ended with 137, no process of the launch may live and none of its ports listen; at the end all losses must equal those of the undisturbed
run to 1e-5. Prints a table and writes OUT/kills.json; if it is stopped, the same command continues with the next kill. The exit code is
1 if anything differs. A run of two layers, on the CPU, without a GPU.
"""

import contextlib
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fault_run import SMALL, arguments, import_everything, numbers, run_stage

from rlhf.system.files import read_json, write_json

PARENTS = ("world", "tokenizer", "pretrain", "sft", "label", "reward")
WAYS = {
    "reward zero2": ("reward", "deepspeed=zero2"), "ppo zero2": ("ppo", "deepspeed=zero2"),
    "ppo zero2 lora": ("ppo", "deepspeed=zero2", "lora.rank=4"), "ppo zero3 lora": ("ppo", "deepspeed=zero3", "lora.rank=4"),
    "reward zero3": ("reward", "deepspeed=zero3"), "ppo zero3": ("ppo", "deepspeed=zero3"),
    "ppo vllm": ("ppo", "rollout.engine=vllm"), "ppo vllm lora": ("ppo", "rollout.engine=vllm", "lora.rank=4"),
}  # fmt: skip
# As the pipeline starts a stage.
LAUNCH = """
import sys
from rlhf.commands.launch import import_once, run_processes
import_once(["hydra", f"rlhf.stages.{sys.argv[1]}"])
sys.exit(run_processes(sys.argv[1:], 2, threads=1))
"""
SHORT = ("checkpoints.every_seconds=0", "reward.epochs=1", "reward.audit=0", "ppo.episodes=96")
TOLERANCE, PATIENCE = 1e-5, 600.0
LEAVING = 60.0  # seconds in which the server that forks the ranks must end after the launcher: 17 s were measured on a busy machine


class Launch(subprocess.Popen):
    """A stage in a session of its own: a launcher and its two ranks, or with vLLM one process."""

    def __init__(self, way: str, home: Path):
        self.ranks, self.mark = 1 if "vllm" in way else 2, f"RLHF_KILL_RANKS={home}"
        stage, *more = WAYS[way]
        words = [stage, "--shared-settings", *SMALL, "runs_dir=runs", "run=small", *SHORT, *more]
        command = [sys.executable, *(["-m", "rlhf"] if self.ranks == 1 else ["-c", LAUNCH]), *words]
        environment = os.environ | {"RLHF_KILL_RANKS": str(home)}
        with (home / "log.txt").open("a", encoding="utf-8") as log:
            super().__init__(command, cwd=home, stdout=log, stderr=log, start_new_session=True, env=environment)

    def processes(self) -> dict[int, int]:
        """{process: its parent} of its session, or with its environment; zombies left out."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                state, parent, _, session, *_ = (path / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                marked = f"{self.mark}\0".encode() in (path / "environ").read_bytes()
            except OSError:
                continue
            if (marked or int(session) == self.pid) and state != "Z":
                found[int(path.name)] = int(parent)
        return found

    def running_ranks(self) -> list[int]:
        """The ranks: what the launcher's server of processes has forked."""
        parents = self.processes()
        if self.ranks == 1:
            return [self.pid] * (self.pid in parents)
        return sorted(pid for pid, parent in parents.items() if parents.get(parent) == self.pid)

    def ports(self) -> set[str]:
        """The addresses at which its processes listen."""
        sockets, found = listening(), set[str]()
        for handle in [handle for pid in self.processes() for handle in Path(f"/proc/{pid}/fd").glob("*")]:
            with contextlib.suppress(OSError):
                found.add(sockets.get(os.readlink(handle).removeprefix("socket:[").rstrip("]"), ""))
        return found - {""}


def listening() -> dict[str, str]:
    """{inode: address} of the TCP sockets that listen on this machine."""
    lines = [line for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text("utf-8").splitlines()[1:]]
    return {row[9]: row[1] for row in map(str.split, lines) if row[3] == "0A"}


def commands(processes: Iterable[int]) -> list[str]:
    """The beginnings of their command lines."""
    found = []
    for pid in processes:
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80])
    return found


def lines_of(folder: Path) -> int:
    return len((folder / "metrics.jsonl").read_bytes().splitlines()) if (folder / "metrics.jsonl").exists() else 0


def kill_once(way: str, home: Path, chance: random.Random, seconds: float, in_training: bool) -> dict[str, Any] | None:
    """Launch and kill one rank; a record of the kill with the promises it broke, or None if the stage ended first."""
    folder = home / "runs" / "small" / WAYS[way][0]
    process, begun, done = Launch(way, home), time.monotonic(), lines_of(folder)
    until = begun + PATIENCE
    while process.poll() is None and time.monotonic() < until and in_training and lines_of(folder) <= done:
        time.sleep(0.01)
    moment = time.monotonic() + chance.uniform(0.0, 2.0 if in_training else seconds)
    while process.poll() is None and (time.monotonic() < moment or len(process.running_ranks()) < process.ranks):
        time.sleep(0.01)
    if process.poll() == 0:
        return None
    victim = chance.choice(process.running_ranks() or [0])
    if not victim and process.wait(60) == 0:
        return None
    if not victim:
        sys.exit(f"{way}: the launch ended by itself, see {home / 'log.txt'}")
    broken, ports = list[str](), process.ports()
    os.kill(victim, signal.SIGKILL)
    after = time.monotonic() - begun
    code = -1
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(60)
    if code == 0:  # the rank had done its work
        return None
    broken += [] if code in (137, -9) else [f"the launcher ended with {code}"]
    until = time.monotonic() + LEAVING
    while process.processes() and time.monotonic() < until:
        time.sleep(0.1)
    broken += [f"{len(left)} processes are left: {commands(left)}"] if (left := process.processes()) else []
    broken += [f"still listening at {sorted(held)}"] if (held := ports & set(listening().values())) else []
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    return {"way": way, "after_s": round(after, 2), "steps_done": lines_of(folder), "broken": broken}


def differences(whole: Path, killed: Path) -> list[str]:
    """Figures of metrics.jsonl that differ by more than TOLERANCE, absolute and of the value."""
    one, two = numbers(whole), numbers(killed)
    if len(one) != len(two):
        return [f"{len(two)} lines instead of {len(one)}"]
    return [
        f"{name} of line {i + 1}: {b.get(name)} instead of {x}"
        for i, (a, b) in enumerate(zip(one, two, strict=True))
        for name, x in a.items()
        if name not in b or (x != b[name] and not abs(x - b[name]) <= TOLERANCE * max(1.0, abs(x)))
    ]


def run_way(way: str, out: Path, kills: int, seed: int, found: dict[str, Any], keep: Callable[[], None]) -> None:
    """Adds to `found` the kills of a way, how its losses differ, and the seconds of the undisturbed launch; keep: called after each."""
    homes = [out / f"{way.replace(' ', '-')}-{kind}" for kind in ("whole", "killed")]
    stage, hits = WAYS[way][0], found.setdefault("kills", [])
    if "undisturbed_s" not in found:
        for home in homes:
            shutil.rmtree(home, ignore_errors=True)
            shutil.copytree(out / "base", home)
            shutil.rmtree(home / "runs" / "small" / stage, ignore_errors=True)
        begun = time.monotonic()
        if code := Launch(way, homes[0]).wait(PATIENCE):
            sys.exit(f"{way}: ended with {code}, see {homes[0] / 'log.txt'}")
        found["undisturbed_s"] = round(time.monotonic() - begun, 1)
        keep()
    begun_again = 0
    while len(hits) < kills:
        chance = random.Random(f"ranks-{seed}-{way}-{len(hits)}-{begun_again}")
        hit = kill_once(way, homes[1], chance, found["undisturbed_s"], in_training=len(hits) % 2 == 1)
        if hit is None:  # it ended first: begin again
            shutil.rmtree(homes[1] / "runs" / "small" / stage)
            begun_again += 1
            continue
        hits.append(hit)
        keep()
        told = f"{way}: killed after {hit['after_s']} s with {hit['steps_done']} steps done"
        print(told, hit["broken"] or "", flush=True)
    code = Launch(way, homes[1]).wait(PATIENCE)
    folders = [home / "runs" / "small" / stage for home in homes]
    found["differences"] = [f"the last launch ended with {code}"] if code else differences(*folders)
    keep()


def main(out: Path, only: str, kills: int, seed: int) -> int:
    """Run the ways; returns the exit code."""
    if not (out / "base" / "whole").exists():
        import_everything()
        for stage in PARENTS:
            run_stage(stage, out / "base", [])
        (out / "base" / "whole").touch()
    file, wrong = out / "kills.json", 0
    result = read_json(file)
    kinds = ("zero2", "zero3", *(["vllm"] if importlib.util.find_spec("vllm") else []))
    if not any(only in way for way in WAYS for kind in kinds if kind in way):
        sys.exit(f"only={only}: no way of {', '.join(WAYS)} that runs in this environment")
    for names in ([way for way in WAYS if kind in way] for kind in kinds):
        for i, way in enumerate(names):
            if only not in way:
                continue
            found = result.setdefault(f"{way} seed {seed}", {})
            if "differences" not in found:
                share = kills // len(names) + (i < kills % len(names))
                run_way(way, out, share, seed, found, lambda: write_json(file, result))
            bad = [hit for hit in found["kills"] if hit["broken"]]
            wrong += len(bad) + len(found["differences"])
            outcome = "; ".join(found["differences"][:3]) or "losses equal to 1e-5"
            print(f"{way}: {len(found['kills'])} kills, {len(bad)} left something behind; {outcome}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*arguments(only="", kills=20, seed=0)))
