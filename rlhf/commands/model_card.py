"""The README.md of an exported model: its origin, the data with hashes, every stage's settings, the results, and what was
not measured. Everything in it is read from the records of the run's stages."""

import json
from collections.abc import Iterator
from typing import Any

from rlhf.config import Config
from rlhf.recipe import STAGES, ancestors
from rlhf.runs.folders import is_complete, read_record, read_stage, stage_folder
from rlhf.system.files import read_json
from rlhf.system.terminal import one_line

NOT_MEASURED = (
    "whether people prefer its answers: the figures above come from models or from a simulated world",
    "safety, bias, and answers to requests that ask for harm",
    "factuality, and languages, lengths or subjects outside the data above",
)


def model_card(config: Config, stage: str, loading: str, notes: list[str]) -> str:
    """Markdown with a header that the hub reads. loading: the line of Python that loads the folder."""
    records = stage_records(config, stage)
    adopted = read_json(stage_folder(config, "pretrain") / "adopted.json")  # empty if the stage pretrained a model
    licence = str(adopted.get("licence") or "")
    header = ["library_name: transformers", f"tags: [rlhf, {stage}]"]
    header += [f"license: {one_line(licence)}"] if licence else []
    header += [f"base_model: {json.dumps(one_line(adopted['source']))}"] if adopted.get("source") else []
    record, what = records[stage], STAGES[stage].help
    about = f"{what[:1].upper()}{what[1:]}. Made with rlhf {record['versions'].get('rlhf', '')}."
    parts = [
        ["---", *header, "---"],
        [f"# {one_line(record['run'])}: {stage}", "", about, "", f"    {loading}", *(f"\n{note}" for note in notes)],
        ["## Base model", "", *base_lines(adopted, licence)],
        ["## Data", "", "| stage | what | sha256 |", "| --- | --- | --- |", *data_rows(records)],
        ["## Stages", "", *settings_lines(records)],
        ["## Results", "", *result_lines(config, stage, records)],
        ["## Not measured", "", *(f"- {text}" for text in NOT_MEASURED)],
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def stage_records(config: Config, stage: str) -> dict[str, dict[str, Any]]:
    """The records of a stage and of the stages that it builds on, in the order of the pipeline."""
    folders = {name: stage_folder(config, name) for name in (*ancestors(stage), stage)}
    return {name: read_stage(folder) or {} for name, folder in folders.items() if is_complete(folder)}


def base_lines(adopted: dict[str, Any], licence: str) -> list[str]:
    if not adopted:
        return ["None: pretrained from random weights by the stages below."]
    lines = [
        f"- {one_line(adopted.get('source'))}, revision {one_line(adopted.get('revision') or 'not known')}",
        f"- licence: {one_line(licence or 'not stated')}",
    ]
    return lines + [f"- `{one_line(name)}` {digest}" for name, digest in (adopted.get("sha256") or {}).items()]


def data_rows(records: dict[str, dict[str, Any]]) -> list[str]:
    rows = [
        f"| {name} | {cell(what)} | `{digest}` |" for name, r in records.items() for what, digest in r["data"].items()
    ]
    rows += [
        f"| {name} | {cell(file)}, written by the stage | `{records[name]['files'][file]}` |"
        for name in records
        for file in STAGES[name].gold_data.values()
        if file in (records[name].get("files") or {})
    ]
    return rows or ["| none | | |"]


def settings_lines(records: dict[str, dict[str, Any]]) -> list[str]:
    """Hash and settings of every stage, one line per setting."""
    lines = []
    for name, record in records.items():
        lines += [f"### {name}", "", f"Hash `{record['hash']}`, {record['seconds']:.0f} s.", ""]
        lines += [f"    {key}={one_line(json.dumps(value), 200)}" for key, value in sorted(record["settings"].items())]
        lines.append("")
    return lines[:-1]


def result_lines(config: Config, stage: str, records: dict[str, dict[str, Any]]) -> list[str]:
    """The figures of `rlhf evaluate` with their 95% intervals, if it measured exactly this model."""
    folder = stage_folder(config, "evaluate")
    evaluated = read_stage(folder)
    if evaluated is None or evaluated.get("status") != "complete":
        return ["None: `rlhf evaluate` has not run."]
    if evaluated["parents"].get(stage) != records[stage]["hash"]:
        return [f"None: `rlhf evaluate` measured other models than this {stage}."]
    results = read_record(folder / "results.json", "results") or {}
    rows = [f"| {key} | {value} | {interval} |" for key, value, interval in figures("", results)]
    return ["| figure | value | 95% interval |", "| --- | --- | --- |", *rows]


def figures(prefix: str, results: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(name, value, interval) of each figure in results.json that is a number."""
    for name, value in results.items():
        key = cell(f"{prefix}{name}")
        if isinstance(value, dict) and "value" in value:
            low, high = value.get("ci95") or ("", "")
            yield key, str(value["value"]), f"{low} to {high}" if low != "" else ""
        elif isinstance(value, dict) and name not in ("seconds", "peak_rss_mb", "scores"):
            yield from figures(f"{prefix}{name}.", value)
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "seed":
            yield key, str(value), ""


def cell(text: object) -> str:
    """Text in a table's cell."""
    return one_line(text, 200).replace("|", "\\|")
