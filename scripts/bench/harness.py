"""Shared by the benchmarks: contestants in separate processes that take turns, medians, ratios, spread, JSON.

A benchmark names its contestants: functions f(spec, turns) that set up and then do one repeat a turn. Each runs in a
separate process (the peer of PPO in a separate environment), all are started by one parent, and only one works at a time.
Rounds alternate the order, so that drift affects all equally. Ratios are taken within a round. Next to the elapsed time
the processor time is reported, which other jobs on the machine hardly change.

Needs only the standard library and torch, since it also runs in the environment of a peer.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PEERS = Path(os.environ.get("BENCH_PEERS", HERE.parents[1] / ".venv-bench"))  # where setup.sh puts them
PACKAGES = ("torch", "transformers", "trl", "accelerate")

Spec = dict[str, Any]


# ------------------------------------------------------------------------------------------- in the contestant's process


class Turns:
    """The contestant's side: `for _ in turns:` does one repeat per turn; `done` stops the turn's clock and reports figures."""

    def __init__(self, device: str, answers: int) -> None:
        self._answers = os.fdopen(answers, "w", buffering=1, encoding="utf-8")
        self.device = device
        self.base = memory("VmRSS") if device == "cpu" else 0.0  # on a GPU imports allocate nothing
        self._begun: tuple[float, float] | None = None

    def __iter__(self) -> Iterator[None]:
        reset_peak(self.device)
        self._answer({"ready": True, "versions": versions()})
        for line in sys.stdin:
            if line.strip() != "go":
                break
            self.restart()
            yield
            if self._begun is not None:
                self.done()
        self._answer({"peak_mb": peak_mb(self.device), "base_mb": self.base / 1e6})

    def restart(self) -> None:
        """Restart the clock: the work so far in this turn was preparation."""
        self._begun = (time.perf_counter(), time.process_time())

    def done(self, **figures: float) -> None:
        """The turn's work is finished. figures: `units` of work (default 1), and other figures to keep."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        assert self._begun is not None
        seconds, processor = time.perf_counter() - self._begun[0], time.process_time() - self._begun[1]
        self._begun = None
        self._answer({"units": 1.0} | figures | {"seconds": seconds, "processor_seconds": processor})

    def _answer(self, value: dict[str, Any]) -> None:
        self._answers.write(json.dumps(value) + "\n")


Contestant = Callable[[Spec, Turns], None]


def memory(name: str) -> float:
    """Bytes of VmRSS (held now) or VmHWM (the peak) of this process, as Linux tells; elsewhere the peak."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.findall(rf"{name}:\s*(\d+) kB", status.read_text(encoding="utf-8"))[0]) * 1024.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)


def reset_peak(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak counts from here


def peak_mb(device: str) -> float:
    """Megabytes: on a GPU what torch allocated there, else resident memory."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 1e6
    return memory("VmHWM") / 1e6


def versions() -> dict[str, str]:
    installed = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def serve(contestants: Mapping[str, Contestant]) -> None:
    """Run as the contestant of the command line: `--worker NAME SPEC`."""
    name, spec = sys.argv[2], json.loads(sys.argv[3])
    answers = os.dup(1)
    os.dup2(2, 1)  # libraries' output goes to stderr, so that the parent reads only answers
    sys.path.insert(0, str(HERE.parents[1]))
    import torch
    import transformers
    from transformers import GPT2LMHeadModel, Trainer  # noqa: F401 (on both sides, so that neither counts as work)

    torch.set_num_threads(spec["threads"])
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    contestants[name](spec, Turns(spec["device"], answers))


# ---------------------------------------------------------------------------------------------- in the parent's process


@dataclass
class Worker:
    """A contestant's process."""

    name: str
    process: subprocess.Popen
    reported: dict[str, Any] = field(default_factory=dict)
    turns: list[dict[str, float]] = field(default_factory=list)

    def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: ended with exit code {self.process.wait()} before its turn was over")
        return json.loads(line)


def arguments(doc: str, repeats: int, *flags: str) -> argparse.Namespace:
    """The command line that all benchmarks share; flags: further options without a value."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add(name: str, what: str, **more: Any) -> None:
        parser.add_argument(f"--{name}", help=what, **more)

    on: dict[str, Any] = {"action": "store_true"}
    add("quick", "small shapes and few rounds: that it runs, not how fast", **on)
    add("device", "auto: a GPU if there is one", choices=("auto", "cpu", "cuda"), default="auto")
    add("threads", "CPU threads of each contestant; 0: as many as cores", type=int, default=0)
    add("checkpoint", "a folder of a pretrained causal LM: compare on it, not on the cases", default="")
    add("case", "only the cases whose names have this in them", default="")
    add("only", "only these contestants, by name, separated by semicolons", default="")
    add("apart", "one contestant after the other: on a GPU their memory adds up", **on)
    add("repeats", "rounds that count", type=int, default=repeats)
    add("out", "write the figures here as JSON", type=Path)
    for flag in flags:
        add(flag, "see above", **on)
    options = parser.parse_args()
    if options.device == "auto":
        import torch

        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.threads = options.threads or os.cpu_count() or 1
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.quick:
        options.repeats = min(options.repeats, 2)
    return options


def pick(
    options: argparse.Namespace, fields: str, quick: dict, cpu: dict, cuda: dict, checkpoint: tuple = ()
) -> dict[str, Spec]:
    """The cases that the command line asks for, by name. fields: what their values are; "size" is the name of a shape."""
    cases = quick if options.quick else cuda if options.device == "cuda" else cpu
    chosen = {name: case for name, case in cases.items() if options.case in name}
    if options.checkpoint:
        chosen = {options.checkpoint: (options.checkpoint, *checkpoint)}
    if not chosen:
        raise SystemExit(f"--case {options.case}: none of {', '.join(cases)}")
    specs = {name: dict(zip(fields.split(), case, strict=True)) for name, case in chosen.items()}
    return {name: spec | {"shape": shape_of(spec["size"])} for name, spec in specs.items()}


def compare(
    script: str, names: list[str], spec: Spec, options: argparse.Namespace, pythons: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run the contestants of `script` in turns; returns the figures of each and the ratios to the first one.

    pythons: interpreters of contestants that need another environment.
    """
    spec = spec | {"threads": options.threads, "device": options.device}
    names, workers = only(options, names), []
    for group in [[name] for name in names] if options.apart else [names]:
        workers += take_turns(script, group, spec, options, pythons or {})
        if options.apart:
            keep(workers[-1], spec, options)
    return {"spec": spec, "contestants": {w.name: figures_of(w) for w in workers}, "ratios": ratios_of(workers)}


def keep(worker: Worker, spec: Spec, options: argparse.Namespace) -> None:
    """Report a contestant's figures as soon as it has ended, also to a JSON Lines file, since a time limit may stop later ones."""
    line = {"contestant": worker.name, **context(options), "spec": spec, **figures_of(worker)}
    print(f"{worker.name}: {line['units_per_second']:.1f}/s, peak {line['peak_mb']:.0f} MB", flush=True)
    if options.out:
        with options.out.with_suffix(".jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def only(options: argparse.Namespace, names: list[str]) -> list[str]:
    """The contestants that --only names, in the benchmark's order; all of them without it."""
    wanted = [name.strip() for name in options.only.split(";") if name.strip()]
    if unknown := [name for name in wanted if name not in names]:
        raise SystemExit(f"--only {options.only}: no contestant {', '.join(unknown)}: want some of {'; '.join(names)}")
    return [name for name in names if not wanted or name in wanted]


def take_turns(
    script: str, names: list[str], spec: Spec, options: argparse.Namespace, pythons: dict[str, str]
) -> list[Worker]:
    """Start these contestants, run them in turns, of which the first is for warming up, and stop them."""
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "false"}
    piped: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    workers: list[Worker] = []
    try:
        for name in names:
            command = [pythons.get(name, sys.executable), script, "--worker", name, json.dumps(spec)]
            workers.append(Worker(name, subprocess.Popen(command, **piped)))
        for worker in workers:
            worker.reported |= worker.read()
        for number in range(1 + options.repeats):
            for worker in workers if number % 2 else workers[::-1]:
                turn = worker.ask("go")
                if number:
                    worker.turns.append(turn)
        for worker in workers:
            worker.reported |= worker.ask("end")
    finally:
        for worker in workers:
            if worker.process.poll() is None:
                worker.process.terminate()
            worker.process.wait()
    return workers


def rate(turn: dict[str, float], clock: str) -> float:
    return turn["units"] / max(1e-9, turn[clock])


def figures_of(worker: Worker) -> dict[str, Any]:
    """Medians over the rounds, the spread of the rate, memory and versions."""
    rates = [rate(turn, "seconds") for turn in worker.turns]
    medians = {name: statistics.median(turn[name] for turn in worker.turns) for name in worker.turns[0]}
    return medians | {
        "units_per_second": statistics.median(rates),
        "units_per_second_range": [min(rates), max(rates)],
        "units_per_processor_second": statistics.median(rate(turn, "processor_seconds") for turn in worker.turns),
        "peak_mb": worker.reported["peak_mb"],
        "working_mb": worker.reported["peak_mb"] - worker.reported["base_mb"],
        "versions": worker.reported["versions"],
    }


def ratios_of(workers: list[Worker]) -> dict[str, Any]:
    """The first contestant's rate over each other one's, within rounds; and its memory over theirs."""
    ours, by_peer = workers[0], {}
    for peer in workers[1:]:
        pairs = list(zip(ours.turns, peer.turns, strict=True))
        figures: dict[str, Any] = {}
        for name, clock in (("speed", "seconds"), ("speed_by_processor_time", "processor_seconds")):
            each = sorted(rate(a, clock) / rate(b, clock) for a, b in pairs)
            figures[name] = {"median": statistics.median(each), "range": [each[0], each[-1]]}
        figures["memory"] = ours.reported["peak_mb"] / peer.reported["peak_mb"]
        figures["memory_beyond_imports"] = figures_of(ours)["working_mb"] / figures_of(peer)["working_mb"]
        by_peer[peer.name] = figures
    return by_peer


def report(subject: str, unit: str, cases: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Print a table in Markdown, and write everything as JSON if requested."""
    print(f"{subject}: {machine(options)}; medians of {options.repeats} rounds, the range in brackets\n")
    clocks = ("speed", "speed_by_processor_time")
    head = f"case | contestant | {unit}/s | by processor time | ours over it | by processor time | peak MB (beyond imports)"
    print(f"| {head} |\n" + "|---" * 7 + "|")
    for case, figures in cases.items():
        for name, row in figures["contestants"].items():
            low, high = row["units_per_second_range"]
            cells = [case, name, f"{row['units_per_second']:,.1f} [{low:,.1f}, {high:,.1f}]"]
            cells.append(f"{row['units_per_processor_second']:,.1f}")
            ratios = figures["ratios"].get(name)
            found = [(ratios[clock]["median"], *ratios[clock]["range"]) for clock in clocks] if ratios else []
            cells += ["{:.2f} [{:.2f}, {:.2f}]".format(*one) for one in found] or [""] * 2
            print("| " + " | ".join([*cells, f"{row['peak_mb']:.0f} ({row['working_mb']:.0f})"]) + " |")
    if options.out:
        about = {"subject": subject, "unit": unit, "repeats": options.repeats, "apart": options.apart} | context(
            options
        )
        options.out.write_text(json.dumps(about | {"cases": cases}, indent=1) + "\n", encoding="utf-8")


def context(options: argparse.Namespace) -> dict[str, Any]:
    about = {"machine": machine(options), "device": options.device, "commit": commit()}
    return about | {"python": platform.python_version()}


def machine(options: argparse.Namespace) -> str:
    """Device, threads and load, as text."""
    if options.device == "cuda":
        import torch

        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"CPU {platform.machine()}, {os.cpu_count()} cores, {options.threads} threads{load}, float32"


def commit() -> str | None:
    """The commit of this code, with + if files differ from it; None outside a repository."""
    git: list[str] = ["git", "-C", str(HERE)]
    how: dict[str, Any] = {"text": True, "stderr": subprocess.DEVNULL}
    try:
        head = subprocess.check_output([*git, "rev-parse", "HEAD"], **how).strip()
        changed = subprocess.check_output([*git, "status", "--porcelain", "--untracked-files=no"], **how)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def is_worker() -> bool:
    return len(sys.argv) == 4 and sys.argv[1] == "--worker"


def peer_python(name: str) -> str:
    """The interpreter of a peer's environment."""
    path = PEERS / name / "bin" / "python"
    if not path.exists():
        raise SystemExit(f"{path} is missing: run scripts/bench/setup.sh, or set BENCH_PEERS to where it put the peers")
    return str(path)


# --------------------------------------------------------------------------------------------------- models and data

SIZES: dict[str, dict[str, Any]] = {
    "quick": {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 96, "vocab_size": 256},
    "shallow": {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 96, "vocab_size": 256},
    "tiny": {"n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": 128, "vocab_size": 2048},
    "small": {"n_layer": 6, "n_head": 6, "n_embd": 384, "n_positions": 256, "vocab_size": 2048},
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257},
    "350m": {"n_layer": 24, "n_head": 16, "n_embd": 1024, "n_positions": 1024, "vocab_size": 50272},
    "1.3b": {"n_layer": 24, "n_head": 32, "n_embd": 2048, "n_positions": 1024, "vocab_size": 50272},
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600, "n_positions": 1024, "vocab_size": 50257},
}
PAD, EOS = 0, 1


def shape_of(size: str) -> dict[str, int]:
    """The sizes of a named GPT-2, or of the checkpoint in a folder."""
    if size in SIZES:
        return SIZES[size]
    from transformers import AutoConfig

    theirs = {
        "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size",
        "n_positions": "max_position_embeddings", "vocab_size": "vocab_size",
    }  # fmt: skip
    config = AutoConfig.from_pretrained(size, trust_remote_code=False)
    return {name: getattr(config, their) for name, their in theirs.items()}


def trainer_settings(spec: Spec, batch: int, **more: Any) -> dict[str, Any]:
    """Settings of a peer's Trainer that saves, reports and prints nothing."""
    gpu = spec["device"] == "cuda"
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 10**6}
    device = {"use_cpu": not gpu, "bf16": gpu, "gradient_checkpointing": False}
    return {"per_device_train_batch_size": batch, "max_steps": 100_000, "eos_token": "t1"} | quiet | device | more


def gpt2(size: str, seed: int = 0, activation: str = "gelu_new", **more: Any) -> Any:
    """transformers' GPT-2 with weights that depend on the seed alone; or the checkpoint in a folder, of its own class."""
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    if size not in SIZES:
        return AutoModelForCausalLM.from_pretrained(size, dtype=torch.float32, trust_remote_code=False)
    torch.manual_seed(seed)
    more |= SIZES[size] | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)  # without dropout
    more |= {"bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": PAD}
    return GPT2LMHeadModel(GPT2Config(activation_function=activation, **more))


def ours_like(model: Any) -> Any:
    """Our GPT with the weights of a GPT-2."""
    from rlhf.model.convert import from_transformers

    return from_transformers(model)


def update(model: Any, optimizer: Any) -> None:
    """An optimizer step on clipped gradients, which are then cleared."""
    import torch

    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def half(device: str) -> Any:
    """bf16 on a GPU, float32 elsewhere, as a context."""
    import torch

    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
