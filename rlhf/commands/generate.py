"""`rlhf generate`: a stage's model answers a file of prompts; one JSON line per prompt, for judges and labelers.

A line contains `id`, `prompt` (messages), `responses` and `ended` (lists of k), `logprobs` and `token_ids` on request, and
everything that the responses depend on: `model`, `model_hash`, `seed`, `temperature`, `greedy`, `max_new_tokens`.
"""

import json
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
from rlhf.system.files import check_replaceable, held, writing
from rlhf.system.terminal import say


def run(config: Config) -> None:
    """Write the responses to `generate.out`. Raises: UserError if it exists, the model is missing or no prompt fits."""
    settings = config.generate
    if settings.greedy and settings.samples > 1:
        raise UserError(f"generate.samples={settings.samples}: greedy responses are all alike: want 1")
    out = Path(settings.out) if settings.out else run_folder(config) / "generate" / f"{settings.stage}.jsonl"
    refuse_inside_stage(out, "generate.out")
    with held(out):
        check_replaceable(out, config.overwrite, "generate.out", "file of `rlhf generate`", is_ours)
        folder = stage_folder(config, settings.stage)
        made = check_output(folder)
        records = read_prompts(config, lambda line: say(f"generate: {line}"))
        model = {"model": f"{made['run']}/{settings.stage}@{made['hash'][:8]}", "model_hash": made["hash"]}
        temporary = out.with_name(f".{out.name}.tmp")
        try:
            with writing(out):
                notes = answer_file(config, folder, records, model, temporary)
                temporary.replace(out)
        finally:
            temporary.unlink(missing_ok=True)
        say(f"generate: {model['model']}: {notes[0]} -> {out}" + (f" ({'; '.join(notes[1:])})" if notes[1:] else ""))


def is_ours(path: Path) -> bool:
    """Whether the first line of a file is one that this command writes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return {"responses", "model_hash"} <= (parse_line(file.readline()) or {}).keys()


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
    config: Config, folder: Path, records: list[PromptRecord], model: dict[str, str], out: Path
) -> list[str]:
    """Answer every prompt that fits; returns what was done. Raises: UserError if none fits."""
    from rlhf.engines.sampling import make_sampler
    from rlhf.evaluation.policies import draw_in_turn
    from rlhf.training.setup import load_frozen, set_up

    settings, device = config.generate, set_up(config)
    tokenizer, asked, how = fit_records(config, folder, records, settings.temperature, settings.greedy)
    if not asked:
        raise UserError(f"generate: none of {len(records)} prompts fits {tokenizer.model_max_length} tokens")
    engine = make_sampler(config, load_frozen(config, folder / "model", device), tokenizer, **how)
    prompts = [(ids, ("generate", prompt_key(record.prompt))) for record, ids, _ in asked]
    with out.open("wb") as file, progress(len(asked), "generate", unit="prompt") as bar, inference(config, device):
        drawn = draw_in_turn(engine, tokenizer, prompts, settings.samples)
        for (record, _, cut), answers in zip(asked, drawn, strict=True):
            prompt = [message.model_dump(include={"role", "content"}) for message in record.prompt]
            row = {"id": record.id, "prompt": prompt, "cut": cut, **model, "seed": config.seed, **how}
            row |= {"responses": [a.text for a in answers], "ended": [a.ended for a in answers]}
            if settings.logprobs:
                row |= {"token_ids": [a.ids for a in answers], "logprobs": [a.logprobs for a in answers]}
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))
            bar.update()
    left, shortened = len(records) - len(asked), sum(cut for _, _, cut in asked)
    notes = [f"{len(asked):,} prompts with {settings.samples} responses each"]
    notes += [f"{shortened} prompts cut from the left to fit"] if shortened else []
    return notes + ([f"{left} left out: they cannot fit the context"] if left else [])
