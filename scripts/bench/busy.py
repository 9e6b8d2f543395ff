"""Training while other processes use the cores: optimizer steps per second of the demo's model, idle and next to busy loops.

    python scripts/bench/busy.py                    # every way, idle and next to 1, 2 and 4 loops; about 8 minutes on two cores
    python scripts/bench/busy.py --loops 0 2 --ways threads passive --seconds 8 --rounds 3

The loops are started here, one process each, and end with the turn. A turn is one way for so many seconds; ways alternate within
a round, so other load of the machine affects all. The fair share next to n loops, on c cores of which the way uses u, is
min(u, c * u / (u + n)) cores; what counts is steps per second against the same way's idle speed times that share.

Ways: `one` thread; `threads`: one per core, as torch comes; `passive`: the same with OMP_WAIT_POLICY=PASSIVE, so that a thread
with nothing to do sleeps in place of spinning; `processes`: one process of one thread per core, data parallel; `adapting`: as
training does with threads=0 (`rlhf/cpu/machine.py`).
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
WAYS = ("one", "threads", "passive", "processes", "adapting")
ROWS, WIDTH = 16, 128  # the demo's global batch: 2,048 tokens


def work(seconds: float, rank: int, processes: int, port: int) -> None:
    """Train for so many seconds after three steps of warm-up; the first process prints its steps per second."""
    import torch
    import torch.distributed as dist

    from rlhf.model import GPTConfig, GPTForCausalLM
    from rlhf.model.fused_loss import NextToken
    from rlhf.ops.fast import adapting_threads, keep_freed_memory

    keep_freed_memory()
    threads = adapting_threads(0, torch.device("cpu"), processes)  # none where OMP_NUM_THREADS is set
    if processes > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=processes)
    torch.manual_seed(0)
    model = GPTForCausalLM(GPTConfig(vocab_size=1024, n_layer=4, n_head=4, width=128, context_length=WIDTH)).train()
    loss, parameters = NextToken(model), list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    rows = torch.randint(2, 1024, (ROWS // processes, WIDTH))

    def step() -> None:
        for part in rows.chunk(2):
            (loss(part, part[:, 1:].numel(), input_ids=part) / 2).backward()
        if processes > 1:
            flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
            dist.all_reduce(flat)
        optimizer.step()
        optimizer.zero_grad()
        if threads is not None:
            threads.look()

    for _ in range(3):
        step()
    started, steps = time.monotonic(), 0
    while (taken := time.monotonic() - started) < seconds or processes > 1:
        step()
        steps += 1
        if processes > 1:  # all end after the same step
            over = torch.tensor(float(time.monotonic() - started > seconds))
            dist.all_reduce(over, op=dist.ReduceOp.MAX)
            if over:
                taken = time.monotonic() - started
                break
    if rank == 0:
        print(steps / taken, flush=True)


def turn(way: str, seconds: float, loops: int) -> float:
    """Steps per second of one way next to `loops` busy loops."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
    if way != "adapting":
        environment["OMP_NUM_THREADS"] = "1" if way in ("one", "processes") else str(CORES)
    if way == "passive":
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    processes = CORES if way == "processes" else 1
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    workers: list[subprocess.Popen] = []
    try:
        port = 20000 + os.getpid() % 20000
        for rank in range(processes):
            command = [sys.executable, __file__, "--work", str(seconds), str(rank), str(processes), str(port)]
            workers.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        printed = [worker.communicate(timeout=60 + 20 * seconds)[0] for worker in workers]
        return float(printed[0])
    finally:
        for process in [*busy, *workers]:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--loops", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument("--seconds", type=float, default=6.0, help="of one turn; adapting begins with all threads")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(float(given.work[0]), *map(int, given.work[1:]))
        return
    speed: dict[tuple[str, int], list[float]] = {}
    for _ in range(given.rounds):
        for loops in given.loops:
            for way in given.ways:
                speed.setdefault((way, loops), []).append(rate := turn(way, given.seconds, loops))
                print(f"{way}, {loops} loops: {rate:.2f} steps/s", file=sys.stderr, flush=True)
    about = f"{CORES} cores, load before {os.getloadavg()[2]:.1f}, {given.rounds} rounds of {given.seconds:g} s"
    print(f"{about}; medians, steps/s\n")
    print(f"| way | {' | '.join(f'{n} loops' for n in given.loops)} | of the fair share of its idle speed |")
    print("|---" * (len(given.loops) + 2) + "|")
    for way in given.ways:
        medians = {n: statistics.median(speed[way, n]) for n in given.loops}
        used = 1 if way == "one" else CORES
        fair = {n: medians[0] * min(1.0, CORES / (used + n)) for n in given.loops if n and 0 in medians}
        shares = ", ".join(f"{medians[n] / share:.2f}" for n, share in fair.items())
        print(f"| {way} | {' | '.join(f'{medians[n]:.2f}' for n in given.loops)} | {shares} |")


if __name__ == "__main__":
    main()
