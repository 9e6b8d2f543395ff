"""`rlhf generate`: a stage's model answers a file of prompts; one JSON line per prompt, for judges and labelers.

A line contains `id`, `prompt` (messages), `responses` and `ended` (lists of k), `logprobs` and `token_ids` on request, and
everything that the responses depend on: `model`, `model_hash`, `seed`, `temperature`, `greedy`, `max_new_tokens`. An
interrupted call therefore continues where it stopped: it writes to `<out>.partial`, which becomes `out` at the end.
"""

import json
import os
from pathlib import Path
from typing import Any

from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.data.records import PromptRecord
from rlhf.data.splits import prompt_key
from rlhf.errors import UserError
from rlhf.runs.folders import check_output, refuse_inside_stage, run_folder, stage_folder
from rlhf.runs.progress import progress
from rlhf.runs.run_files import parse_line
from rlhf.runs.sources import read_prompts
from rlhf.system.files import held, writing
from rlhf.system.terminal import say


def run(config: Config) -> None:
    """Write the responses to `generate.out`. Raises: UserError if it exists, the model is missing or no prompt fits."""
    settings = config.generate
    if settings.greedy and settings.samples > 1:
        raise UserError(f"generate.samples={settings.samples}: greedy responses are all alike: want 1")
    out = Path(settings.out) if settings.out else run_folder(config) / "generate" / f"{settings.stage}.jsonl"
    refuse_inside_stage(out, "generate.out")
    with held(out):
        partial = out.with_name(f"{out.name}.partial")
        check_free(out, partial, config.overwrite)
        folder = stage_folder(config, settings.stage)
        made = check_output(folder)
        records = read_prompts(config, lambda line: say(f"generate: {line}"))
        model = {"model": f"{made['run']}/{settings.stage}@{made['hash'][:8]}", "model_hash": made["hash"]}
        with writing(out):
            notes = answer_file(config, folder, records, model, partial)
            partial.replace(out)
        say(f"generate: {model['model']}: {notes[0]} -> {out}" + (f" ({'; '.join(notes[1:])})" if notes[1:] else ""))


def check_free(out: Path, partial: Path, overwrite: bool) -> None:
    """Raises: UserError if `out` exists, unless it contains responses that overwrite=true may replace; or its partial file is not ours."""
    if out.is_dir():
        raise UserError(f"{out}: is a folder, want a file: choose another generate.out=…")
    if out.exists() and not overwrite:
        raise UserError(f"{out}: exists: choose another generate.out=…, or add overwrite=true")
    for path in (out, partial):
        ours = not path.exists()
        if path.is_file():  # empty, or its first line is one of ours, complete or torn
            with path.open("rb") as file:
                line = file.readline()
            torn = path == partial and line.startswith(b'{"id": '[: len(line)]) and not line.endswith(b"\n")
            ours = torn or {"responses", "model_hash"} <= (parsed(line) or {}).keys()
        if not ours:
            raise UserError(f"{path}: was not written by `rlhf generate`: choose another generate.out=…")


def fit_records(
    config: Config, folder: Path, records: list[PromptRecord], temperature: float, greedy: bool = False
) -> tuple[Any, list[tuple[PromptRecord, list[int], bool]], dict[str, Any]]:
    """A policy's tokenizer; the prompts that fit its context, with their tokens and whether they were cut; and how they are answered."""
    from rlhf.data.encoding import fitting_prompts
    from rlhf.data.tokenizer import load_tokenizer
    from rlhf.evaluation.policies import room_for

    tokenizer = load_tokenizer(folder / "model")
    length, room = room_for(tokenizer.model_max_length, config.rollout.max_new_tokens)
    asked = list(fitting_prompts(tokenizer, records, room))
    return tokenizer, asked, {"temperature": temperature, "greedy": greedy, "max_new_tokens": length}


def answer_file(
    config: Config, folder: Path, records: list[PromptRecord], model: dict[str, str], partial: Path
) -> list[str]:
    """Answer every prompt that fits, after those that `partial` answers; returns what was done. Raises: UserError if none fits."""
    from rlhf.engines.sampling import make_sampler
    from rlhf.evaluation.policies import draw_in_turn
    from rlhf.training.setup import load_frozen, set_up

    settings, device = config.generate, set_up(config)
    tokenizer, asked, how = fit_records(config, folder, records, settings.temperature, settings.greedy)
    if not asked:
        raise UserError(f"generate: none of {len(records)} prompts fits {tokenizer.model_max_length} tokens")
    heads = []
    for record, _, cut in asked:
        prompt = [message.model_dump(include={"role", "content"}) for message in record.prompt]
        heads.append({"id": record.id, "prompt": prompt, "cut": cut, **model, "seed": config.seed, **how})
    with partial.open("a+b") as file, progress(len(asked), "generate", unit="prompt") as bar, inference(config, device):
        file.seek(0)
        done = size = 0  # leading prompts that the file answers as this call would; the rest of it is cut off
        for head, line in zip(heads, file, strict=False):
            row = parsed(line)
            if row is None or any(row.get(name) != value for name, value in head.items()):
                break
            if len(row["responses"]) != settings.samples or ("logprobs" in row) != settings.logprobs:
                break
            done, size = done + 1, size + len(line)
        file.truncate(size)
        if done:
            say(f"generate: {done} of {len(asked)} prompts are answered in {partial}: continues from there")
            bar.update(done)
        engine = make_sampler(config, load_frozen(config, folder / "model", device), tokenizer, **how)
        prompts = [(ids, ("generate", prompt_key(record.prompt))) for record, ids, _ in asked[done:]]
        drawn = draw_in_turn(engine, tokenizer, prompts, settings.samples)
        for head, answers in zip(heads[done:], drawn, strict=True):
            row = head | {"responses": [a.text for a in answers], "ended": [a.ended for a in answers]}
            if settings.logprobs:
                row |= {"token_ids": [a.ids for a in answers], "logprobs": [a.logprobs for a in answers]}
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))
            file.flush()
            bar.update()
        os.fsync(file.fileno())
    left, shortened = len(records) - len(asked), sum(cut for _, _, cut in asked)
    notes = [f"{len(asked):,} prompts with {settings.samples} responses each"]
    notes += [f"{shortened} prompts cut from the left to fit"] if shortened else []
    return notes + ([f"{left} left out: they cannot fit the context"] if left else [])


def parsed(line: bytes) -> dict[str, Any] | None:
    """The object of a complete line; None if the line is torn or not an object."""
    return parse_line(line) if line.endswith(b"\n") else None
