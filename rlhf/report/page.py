"""report.html: the results of a run, or of several on the same axes, as one self-contained page.

It reads only the runs' files (stage.json, metrics.jsonl, samples.jsonl, config.yaml, evaluate/), never a model, and
leaves out what does not exist yet, so an incomplete run has a report too. Model output is untrusted text: the template
escapes everything, and the page's content policy allows neither scripts nor requests.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf.recipe import STAGES
from rlhf.report import details, overview
from rlhf.report.drawing import SERIES_COLOURS, Mark
from rlhf.report.evaluation_tables import labels_section, make_evaluation
from rlhf.report.pictures import make_pictures, make_stage_figures
from rlhf.runs.run_files import RunFiles, decimal, duration, entry_at, memory, number_at, percent, read_run
from rlhf.system.files import write_text, writing


def make_curves(runs: Sequence[RunFiles]) -> Iterator[dict[str, Any]]:
    """The stages that have curves in any run, each with its pictures."""
    levels = []
    for key, label in (("noise_ceiling", "noise ceiling, test"), ("length_baseline", "length only, test")):
        level = number_at(runs[0].results, "reward_model", key)
        if len(runs) == 1 and level is not None:
            levels.append(Mark(label, level))
    for name in STAGES:
        points = [(run.name, run.stages[name].points if name in run.stages else {}) for run in runs]
        figures = list(make_stage_figures(name, points, {"Pair accuracy": levels}))
        if figures:
            rest = [figure for figure in figures if figure.rest]
            yield {"stage": name, "figures": [figure for figure in figures if not figure.rest], "rest": rest}


def make_page(runs: Sequence[RunFiles]) -> str:
    """The page as HTML. The same files give the same text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("rlhf.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "decimal": decimal, "memory": memory, "duration": duration}
    listed = list(runs)
    splits = [entry_at(run.stages["evaluate"].record, "settings", "evaluate.split") for run in listed]
    same_split = all(run.results and split == splits[0] for run, split in zip(listed, splits, strict=True))
    overviews = [overview.make_overview(run, same_split or len(listed) == 1) for run in listed]
    tiles_by_run = [{tile.title: tile for tile in one["tiles"]} for one in overviews]
    titles = dict.fromkeys(title for tiles in tiles_by_run for title in tiles)
    comparison = [(title, [tiles.get(title) for tiles in tiles_by_run]) for title in titles]
    rollouts = details.make_rollouts(listed)
    samples, odd = details.make_samples(listed)
    return environment.get_template("template.html").render(
        title=", ".join(run.name for run in listed),
        runs=[{"name": run.name, "colour": i % SERIES_COLOURS} for i, run in enumerate(listed)],
        several=len(listed) > 1,
        overviews=overviews,
        comparison=comparison if len(listed) > 1 else [],
        pipelines=[overview.make_pipeline(run) for run in listed],
        curves=list(make_curves(listed)),
        evaluations=[make_evaluation(run) for run in listed],
        pictures=make_pictures(listed),
        samples=samples,
        odd=odd,
        judged=sum("gold" in row for row in listed[0].samples),
        labelled=[(run.name, section) for run in listed if (section := labels_section(run)).tables],
        same_split=same_split,
        rollouts=rollouts,
        shaded=any(answer["tokens"] for prompt in rollouts for answer in prompt["answers"]),
        differences=details.make_differences(listed),
        skipped=[(run.name, details.make_skipped(run)) for run in listed],
        provenances=[details.make_provenance(run) for run in listed],
    )


def write_report(*folders: Path, path: Path | None = None) -> Path:
    """Writes the page of these runs to `path`, and returns the path; the default is a run's report.html, or report-a+b.html
    beside several runs.

    Works on a run that is complete, incomplete or empty. The same files give the same bytes.
    Raises: FileNotFoundError if a folder is none; UserError if the page cannot be written.
    """
    page = make_page([read_run(folder) for folder in folders])
    if path is None:
        names = "+".join(folder.name for folder in folders)[:120]
        path = folders[0] / "report.html" if len(folders) == 1 else folders[0].parent / f"report-{names}.html"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)
    return path
