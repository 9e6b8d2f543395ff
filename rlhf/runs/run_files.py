"""A run's files, of which any may be missing: JSON Lines, stages, results; and how the report writes numbers and untrusted text."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from rlhf.errors import UserError
from rlhf.recipe import PIPELINE, STAGES
from rlhf.runs.folders import config_of, read_record, stage_folder, under_way
from rlhf.runs.metric_table import find
from rlhf.system.files import read_json
from rlhf.system.terminal import printable

TEXT_LIMIT = 1500

Points = dict[str, tuple[list[float], list[float]]]  # metric name: xs, ys

# --- JSON Lines ---------------------------------------------------------------------------------------------


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON Lines file; lines that contain none are left out, such as a torn last one. A missing file
    is empty. NaN and Infinity are read as null.
    """
    with path.open(encoding="utf-8", errors="replace") if path.is_file() else contextlib.nullcontext(()) as lines:
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line, parse_constant=lambda _: None)
                if isinstance(row, dict):
                    yield row


def encode_line(row: Mapping[str, Any]) -> str:
    # A lone surrogate cannot be UTF-8: the file's `backslashreplace` writes it as JSON's own escape.
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def truncate_jsonl(path: Path, key: str, last: int) -> list[dict[str, Any]]:
    """Keeps the lines of `path` whose integer `row[key]` is at most `last`, and returns those of the newest step among them."""
    newest: list[dict[str, Any]] = []
    if not path.is_file():
        return newest
    temporary = path.with_name(path.name + ".kept")
    with temporary.open("w", encoding="utf-8", errors="backslashreplace") as out:
        for row in read_jsonl(path):
            if isinstance(row.get(key), int) and row[key] <= last:
                out.write(encode_line(row))
                newest = [*(other for other in newest if other[key] == row[key]), row]
    os.replace(temporary, path)
    return newest


# --- stages and runs ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class StageFiles:
    """The contents of one stage's folder; every part may be missing."""

    status: str  # complete | unfinished | not started
    record: dict[str, Any] = field(default_factory=dict)
    points: Points = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    config: str = ""

    @property
    def last_step(self) -> float:
        """The largest step of its curves; 0 without curves."""
        return max((xs[-1] for xs, _ in self.points.values()), default=0)


@dataclass(slots=True)
class RunFiles:
    """The contents of a run's folder; every part may be missing."""

    name: str
    stages: dict[str, StageFiles]
    results: dict[str, Any] = field(default_factory=dict)  # evaluate/results.json
    samples: list[dict[str, Any]] = field(default_factory=list)  # evaluate/samples.jsonl
    audit: dict[str, Any] = field(default_factory=dict)  # reward/audit.json
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)  # evaluations/<name>.json
    labelled: dict[str, Any] = field(default_factory=dict)  # classify/results.json


def read_run(folder: Path) -> RunFiles:
    """Reads a run's folder. Raises: UserError for a damaged record."""
    places = stage_places(folder)
    stages = {name: read_stage_files(place) for name, place in places.items()}
    shown = [name for name in PIPELINE if not STAGES[name].gold_data]  # even if they were not started
    return RunFiles(
        visible(folder.resolve().name, 100),
        {name: stage for name, stage in stages.items() if stage.status != "not started" or name in shown},
        read_record(folder / "evaluate" / "results.json", "results") or {},
        list(read_jsonl(folder / "evaluate" / "samples.jsonl")),
        read_json(places["reward"] / "audit.json"),
        {path.stem: read_json(path) for path in sorted(folder.glob("evaluations/*.json"))},
        read_json(folder / "classify" / "results.json"),
    )


def stage_places(run: Path) -> dict[str, Path]:
    """The folder of each stage, of those that the run takes from another one (`parents.<stage>`) that run's."""
    places, config = {name: run / name for name in STAGES}, config_of(run)
    for name in STAGES:
        with contextlib.suppress(UserError):  # the other run is gone
            places[name] = stage_folder(config, name)
    return places


def read_stage_files(folder: Path) -> StageFiles:
    """Reads a stage's folder, or if it has no record its replacement; a missing one was not started. Raises: UserError if it is damaged."""
    if not (folder / "stage.json").is_file():
        folder = under_way(folder)
    if not folder.is_dir():
        return StageFiles("not started")
    record = read_record(folder / "stage.json", "stage") or {}
    config = folder / "config.yaml"
    return StageFiles(
        "complete" if record.get("status") == "complete" else "unfinished",
        record,
        read_points(read_jsonl(folder / "metrics.jsonl")),
        list(read_jsonl(folder / "samples.jsonl")),
        config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
    )


def read_points(rows: Iterable[dict[str, Any]]) -> Points:
    """Known metrics by name, each against progress/step; null and non-numbers are gaps."""
    points: Points = {}
    for row in rows:
        if is_figure(step := row.get("progress/step")):
            for name, value in row.items():
                if is_figure(value) and not name.startswith("progress/") and find(name) is not None:
                    xs, ys = points.setdefault(name, ([], []))
                    xs.append(step)
                    ys.append(value)
    return points


# --- values in JSON -----------------------------------------------------------------------------------------


def is_figure(value: object) -> TypeGuard[float]:
    """Whether a value read from JSON is a number that can be shown."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def entry_at(tree: Any, *path: str) -> Any:
    """The value at a path of keys, or None."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def number_at(tree: Any, *path: str) -> float | None:
    """As `entry_at`, if the value is a number that can be shown; else None."""
    value = entry_at(tree, *path)
    return value if is_figure(value) else None


def entries(tree: Any, *path: str) -> list[tuple[str, Any]]:
    """As `entry_at`, the keys and values of a mapping; else none."""
    value = entry_at(tree, *path)
    return list(value.items()) if isinstance(value, dict) else []


def rows_of(tree: Any, *path: str) -> list[dict[str, Any]]:
    """As `entry_at`, the mappings in a list; else none."""
    value = entry_at(tree, *path)
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def with_interval(tree: Any) -> tuple[float | None, float | None, float | None]:
    """(value, low, high) of {"value" or "mean", "ci95": [low, high]}; a bare number has no interval."""
    ci = entry_at(tree, "ci95")
    low, high = ci if isinstance(ci, list) and len(ci) == 2 and all(map(is_figure, ci)) else (None, None)
    found = (number_at(tree, *path) for path in ((), ("value",), ("mean",)))
    return next((value for value in found if value is not None), None), low, high


# --- words and numbers --------------------------------------------------------------------------------------


def visible(text: object, limit: int = TEXT_LIMIT) -> str:
    """Untrusted text with an escape for every character that hides, reorders or breaks text, cut to `limit`."""
    full = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False, default=str)
    shown = printable(full[:limit], keep="\n\t\u200c\u200d")  # the last two join letters and emoji
    return shown + (f" … ({len(full) - limit:,} more characters)" if len(full) > limit else "")


def prompt_text(prompt: object) -> str:
    if isinstance(prompt, list) and all(isinstance(turn, dict) for turn in prompt):
        return visible("\n".join(f"{turn.get('role', '?')}: {turn.get('content', '')}" for turn in prompt))
    return visible(prompt)


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


def decimal(value: float | None, digits: int = 3) -> str:
    """`digits` decimals with a true minus sign, and never -0."""
    return "–" if value is None else f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def memory(mb: float | None) -> str:
    return "–" if mb is None else f"{mb / 1000:.2f} GB" if mb >= 1000 else f"{mb:.0f} MB"


# --- results.json for dashboards ----------------------------------------------------------------------------

# Metric under eval/ by its path in results.json, which is the record; figures that it lacks are left out.
PLACES: dict[str, tuple[str, ...]] = {
    **{f"test/{name}": ("reward_model", name) for name in ("accuracy", "length_baseline", "noise_ceiling",
                                                             "gold_order_accuracy", "labeler_agreement")},
    "test/win_rate": ("gold", "win_rate_vs_sft"),
    "test/win_rate_greedy": ("gold", "win_rate_greedy"),
    "test/scores": ("reward", "ppo"),
    "test/eos_fraction": ("ended", "ppo"),
    "test/kl": ("kl_to_sft_nats",),
    "test/bpb": ("pretrain_bits_per_byte",),
    "test/gold/total": ("gold", "mean_score", "ppo"),
    "held_out_labelers/accuracy": ("reward_model", "held_out_labelers", "accuracy"),
}  # fmt: skip


def figures_of(results: Mapping[str, Any]) -> dict[str, float]:
    """The figures of results.json as metrics under eval/."""
    figures = {name: with_interval(entry_at(results, *place))[0] for name, place in PLACES.items()}
    figures |= {f"test/gold/{name}": number_at(value) for name, value in entries(results, "gold", "parts", "ppo")}
    return {f"eval/{name}": value for name, value in figures.items() if value is not None}
