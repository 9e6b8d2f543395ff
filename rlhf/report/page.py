"""report.html: the results of a run as one self-contained page.

It reads only the runs' files (stage.json, metrics.jsonl, samples.jsonl, config.yaml, evaluate/), never a model, and
leaves out what does not exist yet, so an incomplete run has a report too. Model output is untrusted text: the template
escapes everything, and the page's content policy allows neither scripts nor requests.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.report import sections
from rlhf.report.pictures import Mark, draw_svg, make_pictures, make_stage_figures, spread
from rlhf.runs import run_files
from rlhf.runs.progress import format_figure, format_seconds
from rlhf.runs.run_files import RunFiles, decimal, entries, entry_at, number_at, percent, with_interval
from rlhf.system.files import write_text


class Tile(NamedTuple):
    title: str
    value: str
    unit: str
    note: str


def outdated(run: RunFiles) -> list[str]:
    """The stages that were run again after the evaluation that is stored."""
    built = entries(run.stages["evaluate"].record, "parents")
    return [name for name, digest in built if name in run.stages and run.stages[name].record.get("hash") != digest]


def span_of(tree: Any) -> str:
    _, low, high = with_interval(tree)
    return "" if low is None else f"95% interval {percent(low)} to {percent(high)}"


def make_sentence(run: RunFiles) -> str:
    win = entry_at(run.results, "gold", "win_rate_vs_sft")
    value, low, high = with_interval(win)
    if value is None:
        waiting = [name for name, stage in run.stages.items() if stage.status != "complete"]
        return f"This run is not finished; next is {waiting[0]}." if waiting else "Every stage is complete."
    verdict = "cannot be told from"  # also without an interval
    if low is not None and high is not None and not low <= 0.5 <= high:
        verdict = "is preferred to" if low > 0.5 else "is worse than"
    prompts = f"{n:,.0f} held-out prompts" if (n := number_at(win, "n")) is not None else "held-out prompts"
    span = f" ({span_of(win)})" if low is not None else ""
    policy, judge = sections.titled(sections.main_policy(run.results)), sections.judge_name(run.results)
    return f"{policy} {verdict} SFT: by the {judge} it wins {percent(value)} of comparisons on {prompts}{span}."


def make_tiles(run: RunFiles, evaluated: bool = True) -> Iterator[Tile]:
    """The headline numbers that the run has: from its evaluation (unless not `evaluated`), else the newest of its curves; and its cost."""
    stages, results = run.stages, run.results if evaluated else {}
    policy = sections.main_policy(results)

    def span_note(tree: Any, what: str) -> str:
        n = number_at(tree, "n")
        return ", ".join(filter(None, [span_of(tree), "" if n is None else f"{n:,.0f} {what}"]))

    def latest(stage: str, metric: str, evaluated: float | None, note: str) -> tuple[float | None, str]:
        """The evaluation's value and its note; else the newest of a stage's metric, held-out if there is one, and its source."""
        points = stages[stage].points
        names = [n for n in points if n.startswith("eval/") and n.endswith(f"/{metric}")]
        names += [n for n in (f"{stage}/{metric}", f"objective/{metric}") if n in points]
        if evaluated is not None or not names:
            return evaluated, note
        xs, ys = points[names[0]]
        return ys[-1], f"{names[0]} at step {xs[-1]:,.0f}"

    for key, how in (("win_rate_vs_sft", "sampled"), ("win_rate_greedy", "greedy")):
        tree = entry_at(results, "gold", key)
        if (value := with_interval(tree)[0]) is not None:
            title = f"{sections.titled(policy)} against SFT, {how}"
            yield Tile(title, percent(value), "won", span_note(tree, "prompts"))
    accuracy, gold = entry_at(results, "reward_model", "accuracy"), entry_at(results, "gold", "mean_score")
    levels = (("length only", "length_baseline"), ("ceiling", "noise_ceiling"))
    found = ((label, number_at(results, "reward_model", key)) for label, key in levels)
    note = "; ".join([span_note(accuracy, "pairs"), *(f"{label} {percent(y)}" for label, y in found if y is not None)])
    before, after = (number_at(gold or entry_at(results, "reward"), model) for model in ("sft", policy))
    judge = f"{sections.judge_name(results) if gold else 'reward model'}; SFT {decimal(before)}"
    kl, bpb = number_at(results, "kl_to_sft_nats"), number_at(results, "pretrain_bits_per_byte")
    for title, unit, shown, (value, source) in (
        ("Reward model", "of pairs", percent, latest("reward", "accuracy", with_interval(accuracy)[0], note)),
        ("KL to SFT", "nats per response", partial(decimal, digits=2), latest("ppo", "kl", kl, "held-out prompts")),
        ("Mean score", "", decimal, latest("ppo", "scores", None if before is None else after, judge)),
        ("Pretraining", "bits per byte", decimal, latest("pretrain", "bpb", bpb, "held-out text")),
    ):
        if value is not None:
            yield Tile(title, shown(value), unit, source)
    spent = [number_at(stage.record, "seconds") for stage in stages.values()]
    spent += [number_at(seconds) for name, seconds in entries(run.results, "seconds") if "/" in name]  # earlier rounds
    if seconds := sum(filter(None, spent)):
        peaks = filter(None, (number_at(stage.record, "peak_rss_mb") for stage in stages.values()))
        yield Tile("Cost", format_seconds(seconds), "", f"peak memory {run_files.memory(max(peaks, default=None))}")


def compare_runs(folders: Sequence[Path]) -> list[str]:
    """A table as lines of text: the main numbers of each run, of the evaluation if all runs have one."""
    import pandas as pd

    runs = [run_files.read_run(folder) for folder in folders]
    evaluated = all(run.results and not outdated(run) for run in runs)
    tiles = [{tile.title: tile.value for tile in make_tiles(run, evaluated)} for run in runs]
    return pd.DataFrame(tiles, [run.name for run in runs]).fillna("–").to_string().splitlines()


def make_page(run: RunFiles) -> str:
    """The page as HTML. The same files give the same text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    records = [stage.record for stage in run.stages.values()]
    complete = sum(stage.status == "complete" for stage in run.stages.values())
    facts = [f"{complete} of {len(run.stages)} stages complete"]
    facts += [f"the evaluation is of an earlier {s}: `rlhf evaluate overwrite=true` renews it" for s in outdated(run)]
    if seeds := {record["seed"] for record in records if isinstance(record.get("seed"), int)}:
        facts.append(f"seed {', '.join(map(str, sorted(seeds)))}")
    levels = (("noise ceiling, test", "noise_ceiling"), ("length only, test", "length_baseline"))
    known = ((label, number_at(run.results, "reward_model", key)) for label, key in levels)
    marks = {"Pair accuracy": [Mark(label, level) for label, level in known if level is not None]}
    curves = {name: list(make_stage_figures(name, stage.points, marks)) for name, stage in run.stages.items()}
    strict: dict[str, Any] = {"undefined": StrictUndefined, "autoescape": True}
    environment = Environment(trim_blocks=True, lstrip_blocks=True, loader=PackageLoader("rlhf.report", "."), **strict)
    called = (entries, entry_at, number_at, run_files.prompt_text, sections.total, draw_svg, format_figure, spread)
    shown = (decimal, run_files.memory, run_files.visible)
    environment.filters |= {function.__name__: function for function in shown} | {"duration": format_seconds}
    environment.globals |= {function.__name__: function for function in called}
    return environment.get_template("template.html").render(
        run=run,
        facts=facts,
        sentence=make_sentence(run),
        tiles=list(make_tiles(run)),
        warning=sections.audit_lines(run.audit)[:2] if entry_at(run.audit, "verdict", "decision") != "go" else [],
        seconds={name: number_at(stage.record, "seconds") or 0.0 for name, stage in run.stages.items()},
        curves={name: figures for name, figures in curves.items() if figures},
        sections=sections.make_evaluation(run),
        pictures=list(make_pictures(run)),
        models=sections.MODELS,
        samples=[row for row in run.samples if isinstance(row.get("responses"), dict)][: sections.MOST_SAMPLES],
        rollouts=sections.make_rollouts(run),
        differences=sections.make_differences(run),
        provenance=sections.make_provenance(run),
    )


def write_report(folder: Path, path: Path | None = None) -> Path:
    """Writes the page of a run to `path`, by default the run's report.html, and returns the path.

    Works on a run that is complete, incomplete or empty. The same files give the same bytes.
    Raises: FileNotFoundError if the folder is none; UserError if the page cannot be written.
    """
    page, path = make_page(run_files.read_run(folder)), path or folder / "report.html"
    write_text(path, page)
    return path
