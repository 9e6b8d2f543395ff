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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figure = dict[str, Any]  # {"mean", "ci95", "n"}
RLHF = ("-m", "rlhf")
Step = tuple[str, ...]  # a command of rlhf, and its overrides


@dataclass(frozen=True)
class Cell:
    """One run: its commands, each with all its overrides, in order."""

    name: str
    seed: int
    parent: Path
    home: Path
    steps: tuple[Step, ...]
    program: tuple[str, ...] = RLHF  # what runs them

    def beside(self, ending: str) -> Path:
        """A file next to the cell's folder."""
        return self.home.with_name(self.home.name + ending)

    def results(self, stage: str = "evaluate") -> Any:
        return read(self.home / stage / "results.json")


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON lines file, whose texts may contain other line separators."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def parse(doc: str, argv: Sequence[str] | None = None, **more: Any) -> Any:
    """The options above; more: argparse's arguments of further ones, by name. Overrides may stand anywhere."""
    given = sys.argv[1:] if argv is None else list(argv)
    overrides = [text for text in given if "=" in text and not text.startswith("-")]
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--parents", type=Path, nargs="+", default=[])
    parser.add_argument("--cells", nargs="+", default=[])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--picture", type=Path)
    for name, arguments in more.items():
        parser.add_argument(f"--{name}", **arguments)
    asked = parser.parse_args([text for text in given if text not in overrides])
    asked.out, asked.overrides = asked.out.absolute(), overrides
    asked.parents = [parent.absolute() for parent in asked.parents]
    if len(asked.parents) == 1:
        asked.parents *= len(asked.seeds)
    if asked.parents and len(asked.parents) != len(asked.seeds):
        parser.error(
            f"--parents: {len(asked.parents)} runs for {len(asked.seeds)} seeds: give one run, or one per seed"
        )
    return asked


def make_cells(
    asked: Any, choices: Mapping[str, Sequence[str]], taken: Sequence[str], steps: Mapping[str, Sequence[str]]
) -> list[Cell]:
    """A cell per choice and seed. choices: overrides by name; taken: the parent's stages; steps: commands, with defaults."""
    unknown = [name for name in asked.cells if name not in choices]
    if unknown:
        sys.exit(f"--cells {unknown[0]}: want some of {', '.join(choices)}")
    cells = []
    for name in asked.cells or choices:
        for seed, parent in zip(asked.seeds, asked.parents or [asked.out] * len(asked.seeds), strict=True):
            missing = [stage for stage in taken if not is_complete(parent / stage)]
            if missing:
                sys.exit(f"{parent}: has no finished {missing[0]}: run `rlhf {missing[0]}` there first")
            parents = [f"parents.{stage}='{parent / stage}'" for stage in taken]
            own = [f"runs_dir='{asked.out}'", f"run={name}-seed{seed}", f"seed={seed}", "tracking=jsonl"]
            shared = [*asked.overrides, *choices[name], *parents, *own]
            commands = tuple((command, *defaults, *shared) for command, defaults in steps.items())
            cells.append(Cell(name, seed, parent, asked.out / f"{name}-seed{seed}", commands))
    return cells


def is_complete(folder: Path) -> bool:
    """Whether a stage's folder holds its finished output."""
    record = folder / "stage.json"
    return record.exists() and read(record)["status"] == "complete"


def run(cells: Sequence[Cell], processes: int = 1) -> None:
    """Run what is missing; ends the program if a cell fails, or if a finished one had other settings."""
    for cell in cells:
        made = cell.beside(".json")
        if made.exists() and read(made) != [list(step) for step in cell.steps]:
            sys.exit(
                f"{made}: this cell was run with other settings: delete it and {cell.home}, or choose another --out"
            )
    missing = [c for c in cells if not all(is_complete(c.home / last_stage(command)) for command, *_ in c.steps)]
    print(f"{len(cells)} cells, {len(cells) - len(missing)} done", flush=True)
    with ThreadPoolExecutor(processes) as pool:
        failed = [cell for cell, code in zip(missing, pool.map(run_cell, missing), strict=True) if code]
    if failed:
        sys.exit(f"{failed[0].home}: failed: see {failed[0].home}.log; the same command again keeps finished cells")


def last_stage(command: str) -> str:
    return "evaluate" if command == "pipeline" else command


def run_cell(cell: Cell) -> int:
    """Run a cell's missing stages in separate processes, logging next to its folder; returns the exit code."""
    cell.home.parent.mkdir(parents=True, exist_ok=True)
    cell.beside(".json").write_text(json.dumps(cell.steps), encoding="utf-8")
    with cell.beside(".log").open("a", encoding="utf-8") as log:
        for command, *overrides in cell.steps:
            if is_complete(cell.home / last_stage(command)):
                continue
            shared = [] if command == "pipeline" else ["--shared-settings"]
            if code := call([command, *shared, *overrides], log, cell.program):
                return code
    print(f"{cell.home.name}: done", flush=True)
    return 0


def call(arguments: list[str], log: Any, program: Sequence[str] = RLHF) -> int:
    """The program with these arguments, in a process of its own; returns its exit code."""
    return subprocess.run([sys.executable, *program, *arguments], stdout=log, stderr=log, check=False).returncode


def cached(path: Path, make: Callable[[], Any]) -> Any:
    """The result of `make()`, kept in a JSON file, so that an interrupted study resumes."""
    if not path.exists():
        path.write_text(json.dumps(make()), encoding="utf-8")
    return read(path)


def mean_interval(values: Sequence[float]) -> Figure:
    """The mean over seeds, with a 95% interval by Student's t; None for one seed."""
    from scipy import stats

    n, mean = len(values), sum(values) / len(values)
    if n < 2:
        return {"mean": mean, "ci95": None, "n": n}
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    half = float(stats.t.ppf(0.975, n - 1)) * error
    return {"mean": mean, "ci95": [mean - half, mean + half], "n": n}


def within(figure: Figure, low: float = 0.0, high: float = 1.0) -> Figure:
    """A figure whose interval is cut to the values that are possible, by default a share's."""
    ends = figure.get("ci95")
    return figure if ends is None else figure | {"ci95": [max(low, ends[0]), min(high, ends[1])]}


def over_seeds(figures: Mapping[str, Mapping[int, Mapping[str, float]]]) -> dict[str, dict[str, Figure]]:
    """{name: {figure: mean over seeds}} of {name: {seed: figures}}; a figure that a seed lacks is left out."""
    means = {}
    for name, by_seed in figures.items():
        keys = [key for key in next(iter(by_seed.values())) if all(key in found for found in by_seed.values())]
        means[name] = {key: mean_interval([found[key] for found in by_seed.values()]) for key in keys}
    return means


def show(figure: Any, digits: int = 3, sign: str = "") -> str:
    """A figure ("mean" or "value") with its interval if it has one, a number, or a dash."""
    if figure is None:
        return "–"
    if not isinstance(figure, dict):
        return f"{figure:,}" if isinstance(figure, int) else f"{figure:{sign}.{digits}f}"
    value = figure["mean"] if "mean" in figure else figure["value"]
    if value is None:
        return "–"
    ends = figure.get("ci95")
    interval = "" if ends is None else " [" + ", ".join(f"{end:{sign}.{digits}f}" for end in ends) + "]"
    return f"{value:{sign}.{digits}f}{interval}"


def table(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
    """Print a Markdown table; cells that are no text are figures."""
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for line in lines:
        print("| " + " | ".join(cell if isinstance(cell, str) else show(cell) for cell in line) + " |")
    print()


def spaced(name: str) -> str:
    return name.replace("_", " ")


Points = Sequence[tuple[float, Any]]  # x, and a figure or a number


def draw(
    path: Path | None,
    series: Mapping[str, Points],
    x: str,
    y: str,
    names: Sequence[str] = (),
    line: bool = True,
    level: float | None = None,
) -> None:
    """One picture: a line (or dots alone) per series, with intervals; names: of x = 0, 1, …; level: drawn across."""
    if path is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for label, points in series.items():
        xs = [place for place, _ in points]
        means = [f if not isinstance(f, dict) else f["mean"] if "mean" in f else f["value"] for _, f in points]
        ends = [
            (f.get("ci95") if isinstance(f, dict) else None) or (m, m) for (_, f), m in zip(points, means, strict=True)
        ]
        bars = [[m - low for m, (low, _) in zip(means, ends, strict=True)]]
        bars.append([high - m for m, (_, high) in zip(means, ends, strict=True)])
        axes.errorbar(xs, means, yerr=bars, fmt="o-" if line else "o", markersize=4, capsize=2, label=label)
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
