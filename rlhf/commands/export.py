"""`rlhf export`: a stage's policy or reward model as a folder that plain transformers loads, with a model card."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf.config import Config
from rlhf.recipe import STAGES, ancestors
from rlhf.runs import folders
from rlhf.runs.folders import is_complete, read_record, read_stage, stage_folder
from rlhf.runs.run_files import entries, with_interval
from rlhf.system.files import check_replaceable, held, replaced, share
from rlhf.system.terminal import one_line, say

NOT_MEASURED = (
    "whether people prefer its answers: the figures above come from models or from a simulated world",
    "safety, bias, and answers to requests that ask for harm",
    "factuality, and languages, lengths or subjects outside the data above",
)


def run(config: Config) -> None:
    stage, source = config.export.stage, stage_folder(config, config.export.stage)
    folders.check_output(source, stage)
    out = Path(config.export.out) if config.export.out else folders.run_folder(config) / "export" / stage
    folders.refuse_inside_stage(out, "export.out")
    with held(out):
        check_replaceable(out, config.overwrite, "export.out", "model", lambda path: (path / "config.json").is_file())
        with replaced(out) as folder:
            loading, notes = write_model(stage, source / "model", folder)
            card = model_card(config, stage, loading.format(out.name), notes)
            (folder / "README.md").write_text(card, encoding="utf-8", errors="backslashreplace")
            share(folder)
    say(f"export: {source / 'model'} -> {out}: {loading.format(out)} loads it")
    for line in notes or use_lines(out):  # a reward model has notes
        say(f"export: {line}")


def use_lines(out: Path) -> list[str]:
    """Commands to copy that use an exported policy of a public class."""
    path, name = shlex.quote(str(out)), shlex.quote(f"{out.name}.gguf")
    code = f'from transformers import pipeline; print(pipeline("text-generation", {json.dumps(str(out))})'
    code += '([{"role": "user", "content": "Hello"}], max_new_tokens=64)[0]["generated_text"][-1]["content"])'
    return [
        f"transformers: python -c {shlex.quote(code)}",
        f"vLLM (serving not tested): vllm serve {path}",
        f"lm-eval (not tested from here): lm_eval --model hf --model_args pretrained={path} --tasks hellaswag",
        f"llama.cpp (not tested): python convert_hf_to_gguf.py {path} --outfile {name} && llama-cli -m {name}",
    ]


def write_model(stage: str, model: Path, folder: Path) -> tuple[str, list[str]]:
    """Write a causal language model, or of a reward model a classifier with one label; returns how to load it, and notes."""
    import torch

    from rlhf.data.tokenizer import load_tokenizer
    from rlhf.model.classifier import load_reward_model
    from rlhf.model.convert import OWN, export, export_reward, why_own
    from rlhf.training.setup import be_quiet, load_policy

    own = "It loads after `import rlhf.model`: no class of transformers expresses this model"
    if stage != "reward":
        policy = load_policy(model)
        is_own = export(policy, load_tokenizer(model), folder) == OWN
        return "AutoModelForCausalLM.from_pretrained('{}')", [f"{own}: {why_own(policy.config)}."] if is_own else []
    be_quiet()
    loaded = load_reward_model(model, torch.device("cpu"))
    name, offset = export_reward(loaded, None if loaded.reads_text else load_tokenizer(model), folder)
    form = "prompt and response as its tokenizer frames them"
    form = form if loaded.reads_text else "rendered with the chat template, read at its last token"
    notes = [f"The logit is the calibrated score of a dialogue: {form}."]
    notes += [f"{own}."] if name == "GPTForSequenceClassification" else []
    if offset:
        bias = f"{name} has no bias for this constant, which changes neither an order nor a difference of scores"
        notes.append(f"score = logit {offset:+.6g} (score_offset in config.json): {bias}.")
    return "AutoModelForSequenceClassification.from_pretrained('{}')", notes


def model_card(config: Config, stage: str, loading: str, notes: list[str]) -> str:
    """Markdown with a header that the hub reads, all from the records of the stages. loading: the Python that loads the folder."""
    places = {name: stage_folder(config, name) for name in (*ancestors(stage), stage)}
    records = {name: read_stage(folder) or {} for name, folder in places.items() if is_complete(folder)}
    adopted = read_record(stage_folder(config, "pretrain") / "adopted.json", "adopted")  # None: pretrained here
    header = ["library_name: transformers", f"tags: [rlhf, {stage}]"]
    record, what = records[stage], STAGES[stage].help
    about = f"{what[0].upper()}{what[1:]}. Made with rlhf {record['versions'].get('rlhf', '')}."
    made_of = ["None: pretrained from random weights by the stages below."]
    if adopted is not None:
        base, licence = shown_name(adopted["source"]), one_line(adopted.get("licence") or "")
        header += [f"license: {licence}"] if licence else []
        header += [f"base_model: {json.dumps(base)}"] if "/" in base else []  # the hub knows no others
        made_of = [
            f"- {base}, revision {one_line(adopted.get('revision') or 'not known')}",
            f"- licence: {licence or 'not stated'}",
            *(f"- `{one_line(name)}` {digest}" for name, digest in adopted["sha256"].items()),
        ]
    stages = []
    for name, made in records.items():
        stages += [f"### {name}", "", f"Hash `{made['hash']}`, {made['seconds']:.0f} s.", ""]
        settings = sorted(made["settings"].items())
        stages += [*(f"    {key}={one_line(json.dumps(shown_name(value)), 200)}" for key, value in settings), ""]
    data = [(name, *row) for name, made in records.items() for row in made["data"].items()]
    rows = [f"| {name} | {cell(shown_name(what))} | `{digest}` |" for name, what, digest in data] or ["| none | | |"]
    parts = [
        ["---", *header, "---"],
        [f"# {one_line(record['run'])}: {stage}", "", about, "", f"    {loading}", *(f"\n{note}" for note in notes)],
        ["## Base model", "", *made_of],
        ["## Data", "", "| stage | what | sha256 |", "| --- | --- | --- |", *rows],
        ["## Stages", "", *stages[:-1]],
        ["## Results", "", *result_lines(config, stage, records)],
        ["## Not measured", "", *(f"- {text}" for text in NOT_MEASURED)],
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


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


def figures(prefix: str, results: Any) -> Iterator[tuple[str, str, str]]:
    """(name, value, interval) of each figure in results.json that is a number."""
    for name, value in entries(results):
        number, low, high = with_interval(value)
        if number is not None and name != "seed":
            yield cell(f"{prefix}{name}"), str(number), "" if low is None else f"{low} to {high}"
        elif number is None and name not in ("seconds", "peak_rss_mb", "scores"):
            yield from figures(f"{prefix}{name}.", value)


def shown_name(value: Any) -> Any:
    """A value without the folders of this machine: of a path its last part; an address and a hub id (owner/name) stay."""
    if isinstance(value, list):
        return [shown_name(one) for one in value]
    if not isinstance(value, str):
        return value
    place, words = Path(value), value.split()
    is_local = place.is_absolute() or (len(words) == 1 and (len(place.parts) > 2 or ("/" in value and place.exists())))
    return one_line(value.rstrip("/").rpartition("/")[2] if is_local and "://" not in value else value)


def cell(text: object) -> str:
    return one_line(text, 200).replace("|", "\\|")
