"""A cell of a study: one run of it with its own settings, and the figures of cells over seeds."""

import hashlib
import json
import math
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.config import Config
from rlhf.config.compose import compose_config
from rlhf.runs.folders import is_complete
from rlhf.system.files import read_json, write_json
from rlhf.system.terminal import say

EVAL_PROMPTS = 256


@dataclass(frozen=True, slots=True)
class Cell:
    """One PPO run of a study."""

    name: str
    seed: int
    parent: Path  # the run whose stages it builds on
    folder: Path  # runs_dir of the study
    overrides: tuple[str, ...]  # all overrides of its PPO run
    stages: dict[str, Path]  # the folder of each stage that it does not run itself
    commands: tuple[str, ...] = ("ppo",)
    last: str = "ppo"  # the stage that is complete when the cell is

    @property
    def run(self) -> str:
        return f"{self.name}-seed{self.seed}"

    @property
    def home(self) -> Path:
        return self.folder / self.run

    @property
    def ppo(self) -> Path:
        return self.home / "ppo"

    @property
    def builds_on_cell(self) -> bool:
        return any(path.is_relative_to(self.folder) for path in self.stages.values())

    @property
    def compared(self) -> str:
        """The stage whose recorded settings must equal the cell's, or the cell is run again."""
        return "ppo" if self.last == "evaluate" else self.last


def cell_config(cell: Cell) -> Config:
    """The configuration of the cell's PPO run, or of its only stage."""
    return compose_config(list(cell.overrides))


def run_cell(cell: Cell) -> int:
    """Run the cell's missing stages in separate processes, logging next to its folder; returns the exit code."""
    cell.folder.mkdir(parents=True, exist_ok=True)
    started, code, anew = time.monotonic(), 0, "overwrite=true" in cell.overrides
    with (cell.folder / f"{cell.run}.log").open("a") as log:
        for name in cell.commands:
            if not code and (anew or not is_complete(cell.home / name)):
                flag = [] if name == "pipeline" else ["--shared-settings"]
                command = [sys.executable, "-m", "rlhf", name, *flag, *cell.overrides]
                code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
    say(f"study: {cell.run}: {'done' if not code else 'failed'} in {time.monotonic() - started:.0f} s")
    return code


def mean_interval(values: list[float]) -> dict[str, Any]:
    """{"mean", "ci95", "n"} over seeds, by Student's t; the interval is None for one seed."""
    from scipy import stats

    n, mean = len(values), sum(values) / len(values)
    if n < 2:
        return {"mean": mean, "ci95": None, "n": n}
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    half = float(stats.t.ppf(0.975, n - 1)) * error
    return {"mean": mean, "ci95": [mean - half, mean + half], "n": n}


def cached(folder: Path, name: str, basis: Any, make: Any) -> Any:
    """The result of `make()`, cached in a JSON file for the same `basis`, so that an interrupted study can be resumed."""
    path = folder / f"{name}.json"
    digest = hashlib.sha256(json.dumps(basis, sort_keys=True, default=str).encode()).hexdigest()
    entry = read_json(path)
    if entry.get("basis") != digest or "value" not in entry:
        entry = {"basis": digest, "value": make()}
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, entry)
    return entry["value"]
