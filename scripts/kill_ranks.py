"""Kill one of two ranks with SIGKILL at random moments, under ZeRO-2 and ZeRO-3: reward model, PPO, PPO with LoRA.

    python scripts/kill_ranks.py OUT [kills=20] [seed=0] [ways=5]

`kills` of each ZeRO stage are shared by its ways. Of each way one run is not disturbed; in the other, launches are killed and started
again until the kills are used up, then it may finish. After each kill the launcher must have ended with 137, no process of the launch may
live and no new port listen; at the end all losses must equal those of the undisturbed run to 1e-5. Prints a table and writes
OUT/kills.json; the exit code is 1 if anything differs. A run of two layers, on the CPU, without a GPU.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fault_run import SMALL, import_everything, numbers, run_stage

PARENTS = ("world", "tokenizer", "pretrain", "sft", "label", "reward")
WAYS = {
    "reward zero2": ("reward", "deepspeed=zero2"), "ppo zero2": ("ppo", "deepspeed=zero2"),
    "ppo zero2 lora": ("ppo", "deepspeed=zero2", "lora.rank=4"),  # adapters do not go with ZeRO-3
    "reward zero3": ("reward", "deepspeed=zero3"), "ppo zero3": ("ppo", "deepspeed=zero3"),
}  # fmt: skip
LAUNCH = (
    "import sys; from rlhf.commands.launch import run_processes; sys.exit(run_processes(sys.argv[1:], 2, threads=1))"
)
SHORT = ("checkpoints.every_seconds=0", "reward.epochs=1", "reward.audit=0", "ppo.episodes=96")
TOLERANCE, PATIENCE = 1e-5, 300.0


def launch(way: str, home: Path) -> subprocess.Popen:
    """Two ranks of a stage in a session of their own."""
    stage, *more = WAYS[way]
    words = [stage, "--shared-settings", *SMALL, "runs_dir=runs", "run=small", *SHORT, *more]
    with (home / "log.txt").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *words], cwd=home, stdout=log, stderr=log, start_new_session=True
        )


def of_session(session: int) -> dict[int, int]:
    """{process: its parent} of a session, zombies left out."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, _, of = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of) == session and state != "Z":
            found[int(path.parent.name)] = int(parent)
    return found


def listening() -> dict[str, str]:
    """{inode: address} of the TCP sockets that listen on this machine."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {row[9]: row[1] for row in rows if row[3] == "0A"}


def ports_of(session: int) -> set[str]:
    """The addresses at which a session's processes listen."""
    sockets = listening()
    handles = [handle for pid in of_session(session) for handle in Path(f"/proc/{pid}/fd").glob("*")]
    found = set()
    for handle in handles:
        with contextlib.suppress(OSError):
            found.add(sockets.get(os.readlink(handle).removeprefix("socket:[").rstrip("]"), ""))
    return found - {""}


def ranks_of(launcher: int) -> list[int]:
    """The ranks: what the launcher's server of processes has forked."""
    parents = of_session(launcher)
    return sorted(pid for pid, parent in parents.items() if parents.get(parent) == launcher)


def lines_of(folder: Path) -> int:
    return len((folder / "metrics.jsonl").read_bytes().splitlines()) if (folder / "metrics.jsonl").exists() else 0


def kill_once(way: str, home: Path, chance: random.Random, seconds: float, in_training: bool) -> dict[str, Any] | None:
    """Launch and kill one rank; a record of the kill with the promises it broke, or None if the stage ended first."""
    folder = home / "runs" / "small" / WAYS[way][0]
    process, begun, done = launch(way, home), time.monotonic(), lines_of(folder)
    until = begun + PATIENCE
    while process.poll() is None and time.monotonic() < until and in_training and lines_of(folder) <= done:
        time.sleep(0.01)
    moment = time.monotonic() + chance.uniform(0.0, 2.0 if in_training else seconds)
    while process.poll() is None and (time.monotonic() < moment or len(ranks_of(process.pid)) < 2):
        time.sleep(0.01)
    if process.poll() == 0:
        return None
    victim = chance.choice(ranks_of(process.pid) or [0])
    if not victim and process.wait(60) == 0:
        return None
    if not victim:
        sys.exit(f"{way}: the launch ended by itself, see {home / 'log.txt'}")
    broken, ports = list[str](), ports_of(process.pid)
    os.kill(victim, signal.SIGKILL)
    after = time.monotonic() - begun
    try:
        code = process.wait(60)
    except subprocess.TimeoutExpired:
        code = -1
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code == 0:  # the rank had done its work
        return None
    broken += [] if code == 137 else [f"the launcher ended with {code}"]
    time.sleep(0.5)
    broken += [f"{len(left)} processes are left"] if (left := of_session(process.pid)) else []
    broken += [f"still listening at {sorted(held)}"] if (held := ports & set(listening().values())) else []
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


def run_way(way: str, out: Path, kills: int, chance: random.Random) -> tuple[list[dict[str, Any]], list[str], float]:
    """The kills of a way, how its losses differ, and the seconds of the undisturbed launch."""
    homes = [out / f"{way.replace(' ', '-')}-{kind}" for kind in ("whole", "killed")]
    stage = WAYS[way][0]
    for home in homes:
        shutil.copytree(out / "base", home)
        shutil.rmtree(home / "runs" / "small" / stage, ignore_errors=True)
    begun = time.monotonic()
    if code := launch(way, homes[0]).wait(PATIENCE):
        sys.exit(f"{way}: ended with {code}, see {homes[0] / 'log.txt'}")
    seconds, hits = time.monotonic() - begun, list[dict[str, Any]]()
    while len(hits) < kills:
        hit = kill_once(way, homes[1], chance, seconds, in_training=len(hits) % 2 == 1)
        if hit is None:  # it ended first: begin again
            shutil.rmtree(homes[1] / "runs" / "small" / stage)
        else:
            hits.append(hit)
            print(
                f"{way}: killed after {hit['after_s']} s with {hit['steps_done']} steps done {hit['broken'] or ''}",
                flush=True,
            )
    code = launch(way, homes[1]).wait(PATIENCE)
    folders = [home / "runs" / "small" / stage for home in homes]
    return hits, [f"the last launch ended with {code}"] if code else differences(*folders), seconds


def main(out: Path, kills: int, seed: int, ways: int) -> int:
    """Run all ways; returns the exit code."""
    chance = random.Random(f"ranks-{seed}")
    for old in out.glob("*-*"):
        shutil.rmtree(old)
    if not (out / "base").exists():
        import_everything()
        for stage in PARENTS:
            run_stage(stage, out / "base", [])
    shared = [[way for way in list(WAYS)[:ways] if zero in way] for zero in ("zero2", "zero3")]
    result, wrong = dict[str, Any](), 0
    for names in shared:
        for i, way in enumerate(names):
            share = kills // len(names) + (i < kills % len(names))
            hits, differing, seconds = run_way(way, out, share, chance)
            result[way] = {"kills": hits, "differences": differing, "undisturbed_s": round(seconds, 1)}
            bad = [hit for hit in hits if hit["broken"]]
            wrong += len(bad) + len(differing)
            outcome = "losses equal to 1e-5" if not differing else "; ".join(differing[:3])
            print(f"{way}: {len(hits)} kills, {len(bad)} left something behind; {outcome}", flush=True)
    (out / "kills.json").write_text(json.dumps(result, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    if len(sys.argv) < 2 or any("=" not in argument for argument in sys.argv[2:]):
        sys.exit("usage: python scripts/kill_ranks.py OUT [kills=20] [seed=0] [ways=5]")
    given = {key: int(value) for key, value in (argument.split("=", 1) for argument in sys.argv[2:])}
    sys.exit(main(Path(sys.argv[1]).absolute(), given.get("kills", 20), given.get("seed", 0), given.get("ways", 5)))
