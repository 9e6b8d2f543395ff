"""report.html: what a run did and how well, as one page that opens anywhere and fetches nothing.

It reads the run's files only (stage.json, metrics.jsonl, samples.jsonl, config.yaml, evaluate/), never a
model, and leaves out what is not there yet: a half-done run has a report too. Model output is untrusted text:
the template escapes everything, and the page's content policy allows neither scripts nor requests.
"""

import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.tracking.charts import make_calibration, make_stage_figures
from rlhf.tracking.figures import Mark, format_value, is_number
from rlhf.tracking.run_files import (
    StageFiles,
    decimal,
    duration,
    get,
    memory,
    number,
    percent,
    prompt_text,
    read_json,
    read_stage,
    visible,
)
from rlhf.tracking.writers import read_jsonl

# In the order of the pipeline; the optional ones are shown only where they have a folder.
STAGES = ("world", "tokenizer", "pretrain", "sft", "label", "reward", "ppo", "evaluate")
OPTIONAL_STAGES = ("world", "label")
MODELS = ("base", "sft", "ppo")
SHOWN_SAMPLES, MORE_SAMPLES = 4, 20
ROLLOUT_PROMPTS, ROLLOUT_STEPS = 6, 6


class Bar(NamedTuple):
    """A number on a scale, with its interval and the levels to compare with."""

    low: float
    high: float
    value: float
    ci_low: float | None
    ci_high: float | None
    ticks: list[tuple[float, str]]

    def place(self, value: float) -> str:
        """Where `value` stands on the scale, as a CSS length."""
        return f"{100 * min(max((value - self.low) / (self.high - self.low), 0.0), 1.0):.2f}%"

    @property
    def crowded(self) -> bool:
        """Whether the ticks' labels would run into each other on one line."""
        levels = sorted(level for level, _ in self.ticks)
        return any(b - a < 0.42 * (self.high - self.low) for a, b in itertools.pairwise(levels))


class Tile(NamedTuple):
    """One headline number."""

    title: str
    value: str
    unit: str
    note: str
    bar: Bar | None = None


# --- sections -----------------------------------------------------------------------------------------------


def make_overview(stages: dict[str, StageFiles], results: dict[str, Any]) -> dict[str, Any]:
    """The first screen: one sentence, the numbers that matter with their intervals, and what the run cost."""
    records = [stage.record for stage in stages.values()]
    seconds = [s for record in records if (s := number(record, "seconds")) is not None]
    peaks = [mb for record in records if (mb := number(record, "peak_rss_mb")) is not None]
    complete = sum(stage.status == "complete" for stage in stages.values())
    seeds = {record["seed"] for record in records if isinstance(record.get("seed"), int)}
    facts = [f"{complete} of {len(stages)} stages complete"]
    facts += [f"seed {', '.join(map(str, sorted(seeds)))}"] if seeds else []
    tiles = [*_win_tiles(results), *_reward_tiles(stages, results), *_kl_tiles(stages, results)]
    bpb, note = number(results, "pretrain_bits_per_byte"), "held-out text"
    if bpb is None:
        bpb, note = _latest(stages, "pretrain", "bpb")
    if bpb is not None:
        tiles.append(Tile("Pretraining", decimal(bpb), "bits per byte", note))
    if seconds:
        tiles.append(Tile("Cost", duration(sum(seconds)), "", f"peak memory {memory(max(peaks, default=None))}"))
    return {"facts": facts, "sentence": _sentence(stages, results), "tiles": tiles}


def _sentence(stages: dict[str, StageFiles], results: dict[str, Any]) -> str:
    win = get(results, "gold", "win_rate_vs_sft")
    value, low, high = _interval(win)
    if value is None:
        waiting = [name for name, stage in stages.items() if stage.status != "complete"]
        if not waiting:
            return "Every stage is complete."
        return f"This run is not finished; next is {waiting[0]}."
    verdict = "is preferred to"
    if low is not None and high is not None:
        verdict = "is preferred to" if low > 0.5 else "is worse than" if high < 0.5 else "cannot be told from"
    prompts = f"{n:,.0f} held-out prompts" if (n := number(win, "n")) is not None else "held-out prompts"
    span = f" (95% interval {percent(low)} to {percent(high)})" if low is not None else ""
    return f"PPO {verdict} SFT: by the gold judge it wins {percent(value)} of {prompts}{span}."


def _interval(tree: Any) -> tuple[float | None, float | None, float | None]:
    """(value, low, high) of {"value", "ci95": [low, high]}; a bare number has no interval."""
    ci = get(tree, "ci95")
    low, high = ci if isinstance(ci, list) and len(ci) == 2 and all(map(is_number, ci)) else (None, None)
    return (number(tree, "value") if isinstance(tree, dict) else number(tree)), low, high


def _span_note(tree: Any, what: str) -> str:
    _, low, high = _interval(tree)
    n = number(tree, "n")
    parts = [f"95% interval {percent(low)} to {percent(high)}"] if low is not None else []
    return ", ".join(parts + ([f"{n:,.0f} {what}"] if n is not None else []))


def _win_tiles(results: dict[str, Any]) -> Iterator[Tile]:
    for key, title in (
        ("win_rate_vs_sft", "PPO against SFT, sampled"),
        ("win_rate_greedy", "PPO against SFT, greedy"),
    ):
        tree = get(results, "gold", key)
        value, low, high = _interval(tree)
        if value is not None:
            bar = Bar(0.0, 1.0, value, low, high, [(0.5, "even")])
            yield Tile(title, percent(value), "won", _span_note(tree, "prompts"), bar)


def _reward_tiles(stages: dict[str, StageFiles], results: dict[str, Any]) -> Iterator[Tile]:
    tree = get(results, "reward_model", "accuracy")
    value, low, high = _interval(tree)
    note = _span_note(tree, "pairs")
    if value is None:
        value, note = _latest(stages, "reward", "accuracy")
    if value is not None:
        ticks = [
            (level, label)
            for key, label in (("length_baseline", "length only"), ("noise_ceiling", "ceiling"))
            if (level := number(results, "reward_model", key)) is not None
        ]
        least = min([0.5, value, *(level for level, _ in ticks)])
        bar = Bar(min(0.4, least - 0.05), 1.0, value, low, high, ticks)
        yield Tile("Reward model", percent(value), "of pairs", note, bar)


def _kl_tiles(stages: dict[str, StageFiles], results: dict[str, Any]) -> Iterator[Tile]:
    kl, note = number(results, "kl_to_sft_nats"), "held-out prompts"
    if kl is None:
        kl, note = _latest(stages, "ppo", "kl")
    if kl is not None:
        yield Tile("KL to SFT", decimal(kl, 2), "nats per response", note)
    scores = get(results, "gold", "mean_score") or get(results, "reward")
    before, after = number(scores, "sft"), number(scores, "ppo")
    if before is not None and after is not None:
        judge = "gold judge" if get(results, "gold", "mean_score") else "reward model"
        yield Tile("Mean score", decimal(after), "", f"{judge}; SFT {decimal(before)}")


def _latest(stages: dict[str, StageFiles], stage: str, metric: str) -> tuple[float | None, str]:
    """The newest value of a stage's metric, held-out if there is one, and where it comes from."""
    points = stages[stage].points
    names = [n for n in points if n.startswith("eval/") and n.endswith(f"/{metric}")]
    names += [n for n in (f"{stage}/{metric}", f"objective/{metric}") if n in points]
    if not names:
        return None, ""
    xs, ys = points[names[0]]
    return ys[-1], f"{names[0]} at step {xs[-1]:,.0f}"


def make_pipeline(stages: dict[str, StageFiles]) -> list[dict[str, Any]]:
    """A box a stage: state, cost, and whether the parents it was built on are the ones that lie here now."""
    slowest = max((number(stage.record, "seconds") or 0.0 for stage in stages.values()), default=0.0)
    boxes = []
    for name, stage in stages.items():
        seconds = number(stage.record, "seconds")
        steps = [xs[-1] for xs, _ in stage.points.values()]
        parents = []
        declared = get(stage.record, "parents")
        for parent, digest in (declared if isinstance(declared, dict) else {}).items():
            here = get(stages[parent].record, "hash") if parent in stages else None
            state = "elsewhere" if here is None else "same" if here == digest else "changed"
            parents.append({"name": visible(parent), "hash": str(digest)[:8], "state": state})
        boxes.append({
            "name": name,
            "status": stage.status,
            "seconds": seconds,
            "memory": number(stage.record, "peak_rss_mb"),
            "share": 100 * (seconds or 0.0) / slowest if slowest else 0.0,
            "step": max(steps, default=None),
            "hash": str(get(stage.record, "hash") or "")[:8],
            "parents": parents,
        })  # fmt: skip
    return boxes


def make_curves(stages: dict[str, StageFiles], results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The stages that have curves, each with its pictures."""
    levels = [
        Mark(label, level)
        for key, label in (("noise_ceiling", "noise ceiling"), ("length_baseline", "length only"))
        if (level := number(results, "reward_model", key)) is not None
    ]
    for name, stage in stages.items():
        figures = list(make_stage_figures(name, stage.points, {"Pair accuracy": levels}))
        if figures:
            yield {
                "stage": name,
                "figures": [figure for figure in figures if not figure.get("rest")],
                "rest": [figure for figure in figures if figure.get("rest")],
            }


def make_evaluation(results: dict[str, Any]) -> dict[str, Any]:
    """The tables of evaluate/results.json: gold parts by model, the reward model, its calibration."""
    means, parts = get(results, "gold", "mean_score"), get(results, "gold", "parts")
    names = dict.fromkeys(part for model in MODELS for part in _keys(get(parts, model)))
    rows = [("all parts", {model: number(means, model) for model in MODELS})] if means else []
    rows += [(visible(part), {model: number(parts, model, part) for model in MODELS}) for part in names]
    gold = [
        (name, [row[model] for model in MODELS],
         row["ppo"] - row["sft"] if row["ppo"] is not None and row["sft"] is not None else None)
        for name, row in rows
    ]  # fmt: skip
    reward_model = [
        (label, *_interval(tree), number(tree, "n"))
        for key, label in (
            ("accuracy", "Accuracy on held-out pairs"),
            ("noise_ceiling", "Ceiling that the labels' noise allows"),
            ("length_baseline", "Length alone"),
            ("gold_order_accuracy", "Accuracy on the gold order"),
            ("labeler_agreement", "Labelers' agreement with each other"),
        )
        if (tree := get(results, "reward_model", key)) is not None
    ]
    listed = get(results, "reward_model", "calibration")
    calibration = [
        tuple(row[key] for key in ("gap", "predicted", "observed", "n"))
        for row in (listed if isinstance(listed, list) else [])
        if all(number(row, key) is not None for key in ("gap", "predicted", "observed", "n"))
    ]
    return {
        "gold": gold,
        "reward_model": reward_model,
        "calibration": calibration,
        "calibration_svg": make_calibration(calibration),
        "json": visible(json.dumps(results, indent=1, ensure_ascii=False), 20_000) if results else "",
    }


def _keys(tree: Any) -> list[str]:
    return list(tree) if isinstance(tree, dict) else []


def make_samples(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Responses of the models to the same prompts, side by side."""
    samples = []
    for row in rows:
        responses = row.get("responses")
        if not isinstance(responses, dict):
            continue
        shown = [
            {"model": model, "text": visible(responses[model]), "gold": _total(get(row, "gold", model))}
            for model in MODELS
            if model in responses
        ]
        samples.append(
            {
                "id": visible(row.get("id", "")),
                "prompt": prompt_text(row.get("prompt", "")),
                "responses": shown,
            }
        )
        if len(samples) == SHOWN_SAMPLES + MORE_SAMPLES:
            break
    return samples


def _total(gold: Any) -> float | None:
    return number(gold, "total") if isinstance(gold, dict) else number(gold)


def make_rollouts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How the answers to the first few fixed prompts changed over PPO, each at a few steps."""
    prompts: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if is_number(row.get("step")):
            prompts.setdefault(str(row.get("id")), []).append(row)
    shown = []
    for key, answers in list(prompts.items())[:ROLLOUT_PROMPTS]:
        last = len(answers) - 1
        picked = sorted({round(i * last / (ROLLOUT_STEPS - 1)) for i in range(ROLLOUT_STEPS)})
        shown.append({
            "id": visible(key),
            "prompt": prompt_text(answers[0].get("prompt", "")),
            "answers": [
                {
                    "step": answers[i]["step"],
                    "text": visible(answers[i].get("response", "")),
                    "score": number(answers[i], "score"),
                    "kl": number(answers[i], "kl"),
                    "gold": _total(answers[i].get("gold")),
                }
                for i in picked
            ],
        })  # fmt: skip
    return shown


def make_provenance(stages: dict[str, StageFiles]) -> dict[str, Any]:
    """What would be needed to do it again: settings, versions, data, and what each stage took."""
    versions: dict[str, dict[str, list[str]]] = {}
    data: dict[tuple[str, str], list[str]] = {}
    configs: dict[str, list[str]] = {}
    for name, stage in stages.items():
        for package, version in _items(stage.record, "versions"):
            versions.setdefault(package, {}).setdefault(version, []).append(name)
        for file, digest in _items(stage.record, "data"):
            data.setdefault((file, digest), []).append(name)
        if stage.config:
            configs.setdefault(stage.config, []).append(name)
    return {
        "versions": sorted(versions.items()),
        "data": sorted(data.items()),
        "configs": [(", ".join(names), visible(text, 50_000)) for text, names in configs.items()],
        "stages": [
            (name, _items(stage.record, "settings"), _items(stage.record, "summary"))
            for name, stage in stages.items()
            if _items(stage.record, "settings") or _items(stage.record, "summary")
        ],
    }


def _items(record: dict[str, Any], key: str) -> list[tuple[str, str]]:
    tree = record.get(key)
    if not isinstance(tree, dict):
        return []
    return [
        (
            visible(name),
            format_value(value) if isinstance(value, float) and is_number(value) else visible(value, 300),
        )
        for name, value in tree.items()
    ]


# --- the page -----------------------------------------------------------------------------------------------


def write_report(run_folder: Path) -> Path:
    """Writes run_folder/report.html from the files of the run and returns its path.

    Works on a run that is complete, half done or empty. The same files give the same bytes.
    Raises: FileNotFoundError where run_folder is no folder.
    """
    if not run_folder.is_dir():
        raise FileNotFoundError(f"{run_folder}: no such run folder")
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("rlhf.tracking", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "decimal": decimal, "memory": memory, "duration": duration}
    stages = {name: read_stage(run_folder / name) for name in STAGES}
    stages = {
        name: stage for name, stage in stages.items() if stage.status != "not started" or name not in OPTIONAL_STAGES
    }
    results = read_json(run_folder / "evaluate" / "results.json")
    page = environment.get_template("report_template.html").render(
        run=visible(run_folder.resolve().name),
        overview=make_overview(stages, results),
        pipeline=make_pipeline(stages),
        curves=list(make_curves(stages, results)),
        evaluation=make_evaluation(results),
        samples=make_samples(read_jsonl(run_folder / "evaluate" / "samples.jsonl")),
        shown_samples=SHOWN_SAMPLES,
        rollouts=make_rollouts(stages["ppo"].samples),
        provenance=make_provenance(stages),
    )
    path = run_folder / "report.html"
    temporary = path.with_name(f".report.{os.getpid()}.tmp")
    temporary.write_text(page, encoding="utf-8", errors="replace")
    os.replace(temporary, path)
    return path
