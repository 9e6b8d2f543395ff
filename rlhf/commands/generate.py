"""`rlhf generate`: a stage's model answers a file of prompts; one JSON line per prompt, for judges and labelers.

A line contains the prompt, the lists `responses` and `ended`, `logprobs` and `token_ids` on request, and what the
responses depend on.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.data.records import PromptRecord
from rlhf.data.splits import prompt_key
from rlhf.errors import UserError
from rlhf.runs.folders import check_output, refuse_inside_stage, run_folder, stage_folder
from rlhf.runs.progress import Progress
from rlhf.runs.run_files import read_jsonl
from rlhf.runs.sources import read_prompts
from rlhf.system.files import check_replaceable, held, write_jsonl, writing
from rlhf.system.terminal import say


def run(config: Config) -> None:
    """Write the responses to a file beside `generate.out`, which takes its place when all are there. Raises: UserError
    if it exists, the model is missing or no prompt fits.
    """
    settings = config.generate
    out = Path(settings.out) if settings.out else run_folder(config) / "generate" / f"{settings.stage}.jsonl"
    refuse_inside_stage(out, "generate.out")
    with held(out):
        check_replaceable(out, config.overwrite, "generate.out", "file of `rlhf generate`", is_ours)
        folder = stage_folder(config, settings.stage)
        made = check_output(folder, settings.stage)
        records = read_prompts(config, lambda line: say(f"generate: {line}"))
        model = {"model": f"{made['run']}/{settings.stage}@{made['hash'][:8]}", "model_hash": made["hash"]}

        def rows() -> Iterator[dict[str, Any]]:
            for record, cut, answers, how in answer_prompts(config, "generate", folder, records, settings.samples):
                prompt = [message.model_dump(include={"role", "content"}) for message in record.prompt]
                row = {"id": record.id, "prompt": prompt, "cut": cut, **model, "seed": config.seed, **how}
                row |= {"responses": [a.text for a in answers], "ended": [a.ended for a in answers]}
                if settings.logprobs:
                    row |= {"token_ids": [a.ids for a in answers], "logprobs": [a.logprobs for a in answers]}
                yield row

        part = out.with_name(f"{out.name}.part")
        with writing(part, "generate.out", only_full=True):
            count = write_jsonl(part, rows())
        if not count:
            part.unlink()
            raise UserError(f"generate: none of {len(records)} prompts fits the model's context")
        part.replace(out)
        prompts = f"{count:,} of {len(records):,} prompts with {settings.samples} responses each"
        say(f"generate: {model['model']}: {prompts} -> {out}")


def is_ours(path: Path) -> bool:
    return {"responses", "model_hash"} <= next(read_jsonl(path), {}).keys()


def answer_prompts(
    config: Config, command: str, folder: Path, records: list[PromptRecord], count: int, key: tuple[str, ...] = ()
) -> Iterator[tuple[PromptRecord, bool, list[Any], dict[str, Any]]]:
    """Each prompt that fits a policy's context, whether it was cut, `count` answers by the command's settings, and how
    they were drawn.
    key: makes policies independent. `rlhf sample` leaves out prompts that were cut, which the model would see only in
    part.
    """
    from rlhf.data.chat_template import end_ids
    from rlhf.data.encoding import fitting_prompts
    from rlhf.data.tokenizer import load_tokenizer
    from rlhf.engines.sampling import make_sampler
    from rlhf.evaluation.policies import draw_in_turn, room_for
    from rlhf.training.setup import load_frozen, set_up

    device, tokenizer, settings = set_up(config), load_tokenizer(folder / "model"), getattr(config, command)
    length, room = room_for(tokenizer.model_max_length, config.rollout.max_new_tokens)
    fitting = fitting_prompts(tokenizer, records, room)
    to_label = command == "sample"
    asked = [(record, ids, cut) for record, ids, cut in fitting if not (to_label and cut)]
    how = {"temperature": settings.temperature, "greedy": getattr(settings, "greedy", False), "max_new_tokens": length}
    ends = end_ids(tokenizer, base=folder.name == "pretrain")
    engine = make_sampler(config, load_frozen(config, folder / "model", device), tokenizer, eos_token_id=ends, **how)
    keyed = [(ids, (command, r.id if to_label else prompt_key(r.prompt), *key), count) for r, ids, _ in asked]
    with Progress(len(asked), command, unit="prompt") as bar, inference(config, device):
        for (record, _, cut), answers in zip(asked, draw_in_turn(engine, tokenizer, keyed), strict=True):
            yield record, cut, answers, how
            bar.update()
