"""`rlhf sample`: draw K responses per prompt from a model of the run, and write the tasks of a labelling round.

`rlhf import` reads the export of the labelers' tool.
"""

from collections.abc import Iterator
from pathlib import Path

from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.data.records import PromptRecord, RankedResponse, Ranking
from rlhf.data.splits import prompt_key
from rlhf.data.tasks import next_step, shuffle_responses, write_tasks
from rlhf.errors import UserError
from rlhf.runs.folders import check_output, refuse_inside_stage, run_folder, stage_folder
from rlhf.runs.progress import progress
from rlhf.runs.sources import data_source, in_split, read_comparisons, read_prompts
from rlhf.system.files import held, read_json, replaced, sha256_file, write_json
from rlhf.system.terminal import say

RECORD = "sample.json"
SPARE = 3  # draws beyond K, to replace duplicates
MOST_RESPONSES = 26  # K: response ids are the letters


def run(config: Config) -> None:
    """Write the tasks, and a record of how they were sampled, to runs/<run>/sample or `sample.out`.

    Raises: UserError if the output exists, the model is missing, or no prompt is left to label.
    """
    settings = config.sample
    if not 2 <= settings.responses <= MOST_RESPONSES:
        raise UserError(
            f"sample.responses={settings.responses}: want 2 to {MOST_RESPONSES}, since one response cannot be ranked"
        )
    out = Path(settings.out) if settings.out else run_folder(config) / "sample"
    refuse_inside_stage(out, "sample.out")
    with held(out):
        sample_into(config, out)


def sample_into(config: Config, out: Path) -> None:
    """As `run`, into a folder that this process has locked."""
    settings = config.sample
    check_free(out, config.overwrite)
    folder = stage_folder(config, settings.stage)
    made = check_output(folder)
    policy_id = f"{made['run']}/{settings.stage}@{made['hash'][:8]}"
    prompts, labelled = choose_prompts(config)

    # 1. Sample
    tasks, alike, too_long = draw_tasks(config, folder, prompts, policy_id)
    if not tasks:
        raise UserError(
            f"sample: {alike} prompts gave fewer than 2 distinct responses and {too_long} do not fit the context, which "
            "leaves no task: raise sample.temperature or sample.prompts"
        )

    # 2. Write
    most = max(len(task.responses) for task in tasks)
    with replaced(out) as temporary:
        files, count = write_tasks(temporary, tasks, settings.tool, settings.interface, config.seed)
        step = next_step(out, settings.tool, settings.interface, most)
        (temporary / "README.md").write_text(step + "\n", encoding="utf-8")
        write_json(
            temporary / RECORD,
            {
                "policy": policy_id,
                "seed": config.seed,
                "temperature": settings.temperature,
                "max_new_tokens": config.rollout.max_new_tokens,
                "split": settings.split,
                "responses": settings.responses,
                "tool": settings.tool,
                "interface": settings.interface if settings.tool != "native" else None,
                "counts": {
                    "prompts": len(prompts),
                    "items": len(tasks),
                    "tasks": count,
                    "alike": alike,
                    "too_long": too_long,
                    "already_labelled": labelled,
                },
                "files": {name: sha256_file(temporary / name) for name in files},
            },
        )
    report(config, tasks, count, out, alike=alike, too_long=too_long, labelled=labelled)
    say(f"sample: next: {step}")


def check_free(out: Path, overwrite: bool) -> None:
    """Check that `out` may be written: overwrite=true replaces an earlier round, but never labels that people have filled in.

    Raises: UserError otherwise.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    record = read_json(out / RECORD)
    if not isinstance(record.get("files"), dict):
        raise UserError(f"{out}: exists and was not written by `rlhf sample`: choose another sample.out=…")
    if not overwrite:
        raise UserError(
            f"{out}: contains the tasks of an earlier round: choose another sample.out=…, or add overwrite=true"
        )
    written = record["files"]
    changed = [
        path.name
        for path in sorted(out.iterdir())
        if path.name not in (RECORD, "README.md")
        and not (path.is_file() and sha256_file(path) == written.get(path.name))
    ]
    if changed:
        raise UserError(
            f"{out}: {', '.join(changed[:3])} appeared or changed after `rlhf sample` (labels?): move what you need "
            "and remove the folder, or choose another sample.out=…"
        )


def choose_prompts(config: Config) -> tuple[list[PromptRecord], int]:
    """Up to `sample.prompts` prompts of the split in the order of the data, and how many were skipped as labelled.

    A prompt is labelled if the run's comparisons rank responses to it.

    Raises: UserError if none is left.
    """
    records = read_prompts(config)
    split = config.sample.split
    candidates = in_split(config, records, split)
    if not candidates:
        raise UserError(f"sample.split={split}: none of {len(records)} prompts is in it: choose another, or data.dev=…")
    labelled = labelled_prompts(config)
    fresh = [record for record in candidates if prompt_key(record.prompt) not in labelled]
    if not fresh:
        raise UserError(
            f"sample.split={split}: all {len(candidates)} prompts of it are labelled already: give new ones with data.prompts=…"
        )
    return fresh[: config.sample.prompts], len(candidates) - len(fresh)


def labelled_prompts(config: Config) -> set[str]:
    """Keys of the prompts whose responses the run's comparisons rank; empty if there are none yet."""
    source = data_source(config, "comparisons")
    if source is None or (config.data.comparisons is None and not Path(source).is_file()):
        return set()
    return {prompt_key(r.prompt) for r in read_comparisons(config) if r.ranking is not None or r.pairs is not None}


def draw_tasks(
    config: Config, folder: Path, prompts: list[PromptRecord], policy_id: str
) -> tuple[list[Ranking], int, int]:
    """Tasks of K distinct responses (at least 2); the number of prompts with fewer, and the number that do not fit the context."""
    from rlhf.data.tokenizer import load_tokenizer
    from rlhf.evaluation.answers import Drawing, draw_in_turn, fit_prompts, room_for
    from rlhf.training.setup import load_frozen, set_up

    device = set_up(config)
    policy, tokenizer = load_frozen(config, folder / "model", device), load_tokenizer(folder / "model")
    length, room = room_for(tokenizer, config.rollout.max_new_tokens)
    fitted = fit_prompts(tokenizer, [record.prompt for record in prompts], room)
    # Otherwise a labeler would judge an answer to a prompt that the model had seen only in part.
    whole = [(record, found[0]) for record, found in zip(prompts, fitted, strict=True) if found and not found[1]]
    asked = [(tokens, ("sample", record.id)) for record, tokens in whole]
    how = Drawing(config.seed, length, config.sample.temperature, batch_size=config.rollout.batch_size)
    ids = unique_ids([f"{record.id}@{policy_id.rsplit('@', 1)[-1]}" for record, _ in whole])
    tasks: list[Ranking] = []
    with progress(len(whole), "sample", unit="prompt") as bar, inference(config, device):
        drawn = draw_in_turn(policy, tokenizer, asked, config.sample.responses + SPARE, how)
        for task_id, (record, _), answers in zip(ids, whole, drawn, strict=True):
            distinct: dict[str, bool] = {}
            for answer in answers:
                distinct.setdefault(answer.text, answer.ended)  # a labeler sees only the text
            responses = list(distinct.items())[: config.sample.responses]
            if len(responses) >= 2:
                tasks.append(make_task(task_id, record, responses, policy_id, config.seed))
            bar.update()
    return tasks, len(whole) - len(tasks), len(prompts) - len(whole)


def make_task(
    task_id: str, record: PromptRecord, responses: list[tuple[str, bool]], policy_id: str, seed: int
) -> Ranking:
    """An unlabelled ranking, its responses in random order."""
    metadata = dict(record.metadata) | {"prompt_id": record.id}
    if record.user is not None:
        metadata["user"] = record.user
    task = Ranking(
        id=task_id,
        prompt=record.prompt,
        responses=[
            RankedResponse(id=chr(ord("a") + i), text=text, policy=policy_id, metadata={"ended": ended})
            for i, (text, ended) in enumerate(responses)
        ],
        metadata=metadata,
    )
    return shuffle_responses(task, seed)


def unique_ids(ids: list[str]) -> Iterator[str]:
    """The ids, with a number added to repeated ones, because two items with one id would be joined."""
    seen: dict[str, int] = {}
    for name in ids:
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name}#{seen[name]}"


def report(
    config: Config, tasks: list[Ranking], count: int, out: Path, *, alike: int, too_long: int, labelled: int
) -> None:
    """Print a summary of the round."""
    responses = sum(len(task.responses) for task in tasks)
    notes = [f"{alike} left out: fewer than 2 distinct responses"] if alike else []
    notes += [f"{too_long} left out: longer than the context"] if too_long else []
    notes += [f"{labelled:,} passed over: labelled already"] if labelled else []
    say(
        f"sample: {len(tasks):,} prompts with {responses:,} responses, {count:,} {config.sample.tool} tasks -> {out}"
        + (f" ({'; '.join(notes)})" if notes else "")
    )
