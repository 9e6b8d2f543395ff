"""What every study does: run cells that are missing, take figures over seeds, print a table, draw a picture.

A cell is one run of its own, <out>/<name>-seed<n>: some commands of rlhf with a dictionary's overrides, on the finished stages of a
parent run. A finished cell is not run again; one that was interrupted resumes. Options of every study:

    --out runs/x          the folder of its cells
    --seeds 0 1 2         one cell of each name per seed
    --parents runs/a …    the runs that the cells build on: one for all, or one per seed
    --cells name …        some of the names only
    --processes 1         cells at the same time
    --picture file.svg    the picture, SVG or PNG
    key=value …           settings of rlhf for all cells
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

Figure = dict[str, Any]  # {"mean", "ci95", "n"}
Found = dict[str, dict[int, dict[str, float]]]  # figures by name and seed
Choices = Mapping[str, Sequence[str]]  # overrides by name of a cell


@dataclass(frozen=True)
class Cell:
    """One run: its commands, each with all its overrides, in order."""

    name: str
    seed: int
    parent: Path
    home: Path
    steps: tuple[tuple[str, ...], ...]

    def beside(self, ending: str) -> Path:
        """A file next to the cell's folder."""
        return self.home.with_name(self.home.name + ending)

    def results(self, stage: str = "evaluate") -> Any:
        return read(self.home / stage / "results.json")

    def changed(self, *settings: str) -> "Cell":
        """The cell with further settings of its only command, in place of those of the same name."""
        ((command, *before),) = self.steps
        names = {text.partition("=")[0] for text in settings}
        kept = (text for text in before if text.partition("=")[0] not in names)
        return replace(self, steps=((command, *kept, *settings),))


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON lines file, whose texts may contain other line separators."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def write_rows(path: Path, made: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    return path


def updates_of(home: Path, key: str = "objective/kl") -> list[dict[str, float]]:
    """The rows of PPO's metrics that have a figure: by default those of updates."""
    return [row for row in rows(home / "ppo" / "metrics.jsonl") if key in row]


def make_parser(doc: str | None, options: Mapping[str, Mapping[str, Any]]) -> argparse.ArgumentParser:
    """options: argparse's arguments by name, as in {"--out": {"type": Path}}."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, arguments in options.items():
        parser.add_argument(name, **arguments)
    return parser


def parse(doc: str | None, argv: Sequence[str] | None = None, **more: Any) -> Any:
    """The options above; more: argparse's arguments of further ones, by name. Overrides may stand anywhere."""
    given = sys.argv[1:] if argv is None else list(argv)
    overrides = [text for text in given if "=" in text and not text.startswith("-")]
    several: dict[str, Any] = {"nargs": "+"}
    options: dict[str, Any] = {
        "out": {"type": Path, "required": True}, "seeds": several | {"type": int, "default": [0, 1, 2]},
        "parents": several | {"type": Path, "default": []}, "cells": several | {"default": []},
        "processes": {"type": int, "default": 1}, "picture": {"type": Path},
    }  # fmt: skip
    parser = make_parser(doc, {f"--{name}": arguments for name, arguments in (options | more).items()})
    asked = parser.parse_args([text for text in given if text not in overrides])
    asked.out, asked.overrides = asked.out.absolute(), overrides
    asked.parents = [parent.absolute() for parent in asked.parents]
    if len(asked.parents) == 1:
        asked.parents *= len(asked.seeds)
    if asked.parents and len(asked.parents) != len(asked.seeds):
        parser.error(f"--parents: {len(asked.parents)} runs for {len(asked.seeds)} seeds: give one, or one per seed")
    asked.out.mkdir(parents=True, exist_ok=True)
    return asked


def make_cells(
    asked: Any, choices: Choices | Callable[[int, Path], Choices], taken: Sequence[str], steps: Choices
) -> list[Cell]:
    """A cell per choice and seed.

    choices: overrides by name, of which --cells chooses; or a function of seed and parent that gives those of one seed. taken: the
    parent's stages; steps: commands, with defaults.
    """
    places = list(zip(asked.seeds, asked.parents or [asked.out] * len(asked.seeds), strict=True))
    if callable(choices):
        wanted = [(name, more, *place) for place in places for name, more in choices(*place).items()]
    else:
        if unknown := [name for name in asked.cells if name not in choices]:
            sys.exit(f"--cells {unknown[0]}: want some of {', '.join(choices)}")
        wanted = [(name, choices[name], *place) for name in asked.cells or choices for place in places]
    cells = []
    for name, more, seed, parent in wanted:
        if missing := [stage for stage in taken if not is_complete(parent / stage)]:
            sys.exit(f"{parent}: has no finished {missing[0]}: run `rlhf {missing[0]}` there first")
        parents = [f"parents.{stage}='{parent / stage}'" for stage in taken]
        own = [f"runs_dir='{asked.out}'", f"run={name}-seed{seed}", f"seed={seed}", "tracking=jsonl"]
        shared = [*asked.overrides, *more, *parents, *own]
        commands = tuple((command, *defaults, *shared) for command, defaults in steps.items())
        cells.append(Cell(name, seed, parent, asked.out / f"{name}-seed{seed}", commands))
    return cells


def is_complete(folder: Path) -> bool:
    """Whether a stage's folder holds its finished output."""
    record = folder / "stage.json"
    return record.exists() and read(record)["status"] == "complete"


def run(cells: Sequence[Cell], asked: Any) -> Sequence[Cell]:
    """Run what is missing; ends the program if a cell fails, or if a finished one had other settings."""
    for cell in cells:
        made = cell.beside(".json")
        if made.exists() and read(made) != [list(step) for step in cell.steps]:
            sys.exit(
                f"{made}: this cell was run with other settings: delete it and {cell.home}, or choose another --out"
            )
    missing = [c for c in cells if not all(is_complete(c.home / last_stage(command)) for command, *_ in c.steps)]
    print(f"{len(cells)} cells, {len(cells) - len(missing)} done", flush=True)
    with ThreadPoolExecutor(asked.processes) as pool:
        failed = [cell for cell, code in zip(missing, pool.map(run_cell, missing), strict=True) if code]
    if failed:
        sys.exit(f"{failed[0].home}: failed: see {failed[0].home}.log; the same command again keeps finished cells")
    return cells


def last_stage(command: str) -> str:
    return "evaluate" if command == "pipeline" else command


def run_cell(cell: Cell) -> int:
    """Run a cell's missing stages in separate processes, logging next to its folder; returns the exit code."""
    cell.beside(".json").write_text(json.dumps(cell.steps), encoding="utf-8")
    with cell.beside(".log").open("a", encoding="utf-8") as log:
        for command, *overrides in cell.steps:
            if is_complete(cell.home / last_stage(command)):
                continue
            shared = [] if command == "pipeline" else ["--shared-settings"]
            if code := call([command, *shared, *overrides], log):
                return code
    print(f"{cell.home.name}: done", flush=True)
    return 0


def call(arguments: list[str], log: Any) -> int:
    """rlhf with these arguments, in a process of its own; returns its exit code."""
    return subprocess.run([sys.executable, "-m", "rlhf", *arguments], stdout=log, stderr=log, check=False).returncode


def call_once(made: bool, arguments: list[str], log: Path) -> None:
    """`call`, unless its result is made; ends the program if it fails."""
    if not made:
        with log.open("a", encoding="utf-8") as file:
            if call(arguments, file):
                sys.exit(f"{log}: rlhf {arguments[0]} failed")


def cached(path: Path, make: Callable[[], Any]) -> Any:
    """The result of `make()`, kept in a JSON file, so that an interrupted study resumes."""
    if not path.exists():
        path.write_text(json.dumps(make()), encoding="utf-8")
    return read(path)


def collect(cells: Iterable[Cell], figures: Callable[[Cell], dict[str, float]]) -> Found:
    """The figures of each cell, by name and seed."""
    found: Found = {}
    for cell in cells:
        found.setdefault(cell.name, {})[cell.seed] = figures(cell)
    return found


def less(found: Found, base: str) -> Found:
    """Each name's figures less those of one name, paired by seed; empty without it."""
    return {
        name: {seed: {k: v - found[base][seed][k] for k, v in row.items() if k in found[base][seed]}
               for seed, row in by_seed.items()}
        for name, by_seed in found.items() if base in found and name != base
    }  # fmt: skip


def mean_interval(values: Sequence[float]) -> Figure:
    """The mean over seeds, with a 95% interval by Student's t; None for one seed."""
    from scipy import stats

    n, mean = len(values), sum(values) / len(values)
    if n < 2:
        return {"mean": mean, "ci95": None, "n": n}
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    half = float(stats.t.ppf(0.975, n - 1)) * error
    return {"mean": mean, "ci95": [mean - half, mean + half], "n": n}


def within(figure: Figure) -> Figure:
    """A share's figure, whose interval is cut to [0, 1]."""
    ends = figure.get("ci95")
    return figure if ends is None else figure | {"ci95": [max(0.0, ends[0]), min(1.0, ends[1])]}


def over_seeds(found: Found) -> dict[str, dict[str, Figure]]:
    """{name: {figure: mean over seeds}}; a figure that a seed lacks is left out."""
    means = {}
    for name, by_seed in found.items():
        keys = [key for key in next(iter(by_seed.values())) if all(key in row for row in by_seed.values())]
        means[name] = {key: mean_interval([row[key] for row in by_seed.values()]) for key in keys}
    return means


def value_of(figure: Any) -> Any:
    """A figure's "mean" or "value", or the number that it is."""
    return figure.get("mean", figure.get("value")) if isinstance(figure, dict) else figure


def show(figure: Any, digits: int = 3, sign: str = "") -> str:
    """A figure with its interval if it has one, a number, or a dash."""
    value = value_of(figure)
    if value is None:
        return "–"
    if isinstance(figure, int):
        return f"{figure:,}"
    ends = figure.get("ci95") if isinstance(figure, dict) else None
    interval = "" if ends is None else " [" + ", ".join(f"{end:{sign}.{digits}f}" for end in ends) + "]"
    return f"{value:{sign}.{digits}f}{interval}"


def table(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
    """Print a Markdown table; cells that are no text are figures."""
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for line in lines:
        print("| " + " | ".join(cell if isinstance(cell, str) else show(cell) for cell in line) + " |")
    print()


def print_means(
    title: str, found: Found, titles: Mapping[str, str] | None = None, sign: str = ""
) -> dict[str, dict[str, Figure]]:
    """Print a table of the means over seeds, and return them. titles: of the figures to print; all of them by default."""
    means = over_seeds(found)
    if means:
        titles = titles or {key: key for key in next(iter(means.values()))}
        lines = [[spaced(name), *(show(row.get(key), sign=sign) for key in titles)] for name, row in means.items()]
        table([title, *titles.values()], lines)
    return means


def spaced(name: str) -> str:
    return name.replace("_", " ")


def draw(
    path: Path | None,
    series: Mapping[str, Sequence[tuple[float, Any]]],
    x: str,
    y: str,
    names: Sequence[str] = (),
    line: bool = True,
    level: float | None = None,
) -> None:
    """One picture: a line (or dots alone) of figures or numbers per series, with intervals.

    names: of x = 0, 1, …; level: drawn across.
    """
    if path is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for label, points in series.items():
        means = np.array([value_of(f) for _, f in points])
        ends = [
            (f.get("ci95") if isinstance(f, dict) else None) or (m, m) for (_, f), m in zip(points, means, strict=True)
        ]
        bars = np.abs(np.transpose(ends) - means)
        axes.errorbar(
            [place for place, _ in points],
            means,
            yerr=bars,
            fmt="o-" if line else "o",
            markersize=4,
            capsize=2,
            label=label,
        )
    if level is not None:
        axes.axhline(level, color="#6f7782", linewidth=1, linestyle="--")
    if names:
        axes.set_xticks(range(len(names)), [spaced(name) for name in names], rotation=32, ha="right")
    axes.set(xlabel=x, ylabel=y)
    axes.grid(color="#ecece7")
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=144)
    pyplot.close(figure)
