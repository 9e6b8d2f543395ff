"""`rlhf sample`: draw K responses per prompt from a model of the run, and write the tasks of a labelling round."""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from rlhf.commands.generate import answer_prompts
from rlhf.config import Config
from rlhf.config.checks import BY_REWARD
from rlhf.config.setting import listed
from rlhf.data.records import PromptRecord, RankedResponse, Ranking, first_repeat, shown_prompt
from rlhf.data.splits import prompt_key, uniform
from rlhf.errors import UserError
from rlhf.recipe import POLICY_STAGES
from rlhf.runs.folders import check_output, read_record, refuse_inside_stage, run_folder, stage_folder
from rlhf.runs.sources import data_source, in_split, read_comparisons, read_prompts, reward_folder
from rlhf.system.files import check_replaceable, hash_files, held, replaced, write_json, write_jsonl
from rlhf.system.terminal import say

RECORD = "sample.json"
SPARE = 3  # draws beyond K, to replace duplicates


def run(config: Config) -> None:
    """Write the tasks, and a record of how they were sampled, to runs/<run>/sample or `sample.out`."""
    settings, stages = config.sample, listed(config.sample.stages)
    out = Path(settings.out) if settings.out else run_folder(config) / "sample"
    refuse_inside_stage(out, "sample.out")
    with held(out):
        check_free(out, config.overwrite)
        policies = [find_policy(config, name) for name in stages or [settings.stage]]
        if twice := first_repeat(policy_id for policy_id, _ in policies):
            raise UserError(f"sample.stages: {twice} is named twice: name each policy once")
        rewards = (listed(settings.rewards) or [None]) if settings.choose in BY_REWARD else []  # None is the run's own
        for name in rewards:
            check_output(reward_folder(config, name, "sample.rewards"))
        prompts, labelled = choose_prompts(config)
        drawn, alike, too_long = draw_tasks(config, policies, prompts)
        tasks = drawn
        if rewards and drawn:
            from rlhf.evaluation.scoring import choose_prompts_by, value_tasks

            values, keys = value_tasks(config, drawn, settings.choose, rewards), [task.id for task in drawn]
            chosen = choose_prompts_by(values, keys, settings.prompts, settings.random_fraction, config.seed)
            for place, at_random in chosen.items():
                drawn[place].metadata["chosen"] = "random" if at_random else settings.choose
            tasks = [drawn[place] for place in sorted(chosen)]
        left = f"{alike:,} prompts with fewer than 2 distinct responses, {too_long:,} too long, {labelled:,} labelled already"
        if not tasks:
            raise UserError(f"sample: no task is left ({left}): raise sample.temperature or sample.prompts")
        with replaced(out) as temporary:
            count = write_tasks(temporary, tasks, settings.tool, settings.interface, config.seed)
            counts = {"prompts": len(prompts), "items": len(tasks), "tasks": count, "chosen_of": len(drawn)}
            counts |= {"alike": alike, "too_long": too_long, "already_labelled": labelled}
            how = {"policy": ", ".join(policy_id for policy_id, _ in policies), "seed": config.seed}
            how |= {"max_new_tokens": config.rollout.max_new_tokens, "counts": counts, "files": hash_files(temporary)}
            write_json(temporary / RECORD, asdict(settings) | how)
            step = next_step(out, settings.tool)
            (temporary / "README.md").write_text(step + "\n", encoding="utf-8")
    prompts_with = f"{len(tasks):,} prompts with {sum(len(task.responses) for task in tasks):,} responses"
    say(f"sample: {prompts_with}, {count:,} {settings.tool} tasks -> {out} (left out: {left})")
    say(f"sample: next: {step}")


def check_free(out: Path, overwrite: bool) -> None:
    """Raises: UserError unless `out` may be written: overwrite=true replaces an earlier round, but never labels of people."""
    check_replaceable(out, overwrite, "sample.out", "labelling round", lambda path: (path / RECORD).is_file())
    written = (read_record(out / RECORD, "round") or {"files": {}})["files"]
    files = hash_files(out, skip=(RECORD, "README.md"))
    if changed := [name for name, digest in files.items() if digest != written.get(name)]:
        remedy = "move what you need and remove the folder, or choose another sample.out=…"
        raise UserError(f"{out}: {', '.join(changed[:3])} appeared or changed after `rlhf sample` (labels?): {remedy}")


def choose_prompts(config: Config) -> tuple[list[PromptRecord], int]:
    """Up to `sample.prompts` prompts of the split in the order of sample.choose (more if reward models choose among
    them), and how many were skipped, since the run's comparisons rank responses to them; to judge policies
    (sample.stages) those will do.
    """
    records, split = read_prompts(config), config.sample.split
    if config.sample.turn == "random":
        for record in records:  # cut after a turn of the user that (seed, id) draws
            ends = [i for i, message in enumerate(record.prompt, 1) if message.role == "user"]
            record.prompt = record.prompt[: random.Random(f"turn-{config.seed}-{record.id}").choice(ends)]
    candidates = in_split(config, records, split)
    if not candidates:
        raise UserError(f"sample.split={split}: none of {len(records)} prompts is in it: choose another, or data.dev=…")
    source = data_source(config, "comparisons")
    given = source is not None and (config.data.comparisons is not None or Path(source).is_file())
    compared = read_comparisons(config) if given and not config.sample.stages else []
    labelled = {prompt_key(r.prompt) for r in compared if r.ranking is not None or r.pairs is not None}
    fresh = [record for record in candidates if prompt_key(record.prompt) not in labelled]
    if not fresh:
        all_of = f"all {len(candidates)} prompts of it are labelled already"
        raise UserError(f"sample.split={split}: {all_of}: give new ones with data.prompts=…")
    pool = config.sample.prompts * (config.sample.pool if config.sample.choose in BY_REWARD else 1)
    if config.sample.choose != "first":
        fresh.sort(key=lambda record: uniform(f"sample {record.id}", config.seed))
    return fresh[:pool], len(candidates) - len(fresh)


def find_policy(config: Config, name: str) -> tuple[str, Path]:
    """The id and folder of a stage of the run, or of another run as run/stage. Raises: UserError if it is not complete."""
    run_name, _, stage = name.rpartition("/")
    if stage not in POLICY_STAGES:
        raise UserError(f"sample.stages: {name!r}: want a stage, or run/stage, of {', '.join(POLICY_STAGES)}")
    folder = Path(config.runs_dir) / run_name / stage if run_name else stage_folder(config, stage)
    made = check_output(folder, stage)
    return f"{made['run']}/{stage}@{made['hash'][:8]}", folder


def draw_tasks(
    config: Config, policies: list[tuple[str, Path]], prompts: list[PromptRecord]
) -> tuple[list[Ranking], int, int]:
    """Tasks of K distinct responses (at least 2) of one policy, or of one response of each of several; the number of
    prompts with fewer, and the number that do not fit the context.
    """
    alone, drawn = len(policies) == 1, []
    count = config.sample.responses + SPARE if alone else 1
    for name, folder in policies:
        answered = answer_prompts(config, "sample", folder, prompts, count, () if alone else (name,))
        drawn.append({id(record): answers for record, _, answers, _ in answered})
    tasks, seen = list[Ranking](), Counter[str]()
    hashes = "+".join(policy_id.rsplit("@", 1)[-1] for policy_id, _ in policies)
    whole = [record for record in prompts if all(id(record) in answers for answers in drawn)]
    for record in whole:
        seen[record.id] += 1  # tasks with the same id would be joined
        task_id = f"{record.id}@{hashes}" + (f"#{seen[record.id]}" if seen[record.id] > 1 else "")
        by_policy = zip(policies, drawn, strict=True)
        given = [(one.text, one.ended, name) for (name, _), by in by_policy for one in by[id(record)]]
        if alone:  # a labeler sees only the text
            texts = [text for text, *_ in given]
            given = [one for i, one in enumerate(given) if texts.index(one[0]) == i][: config.sample.responses]
        else:  # equal ones are a tie; letters in the order of the policies would tell who wrote what
            random.Random(f"letters-{config.seed}-{task_id}").shuffle(given)
        if len(given) >= 2:
            responses = [
                RankedResponse(id=chr(ord("a") + place), text=text, policy=name, metadata={"ended": ended})
                for place, (text, ended, name) in enumerate(given)
            ]
            # so that position carries no information; ids are in the order of drawing, and draws are exchangeable
            random.Random(f"order-{config.seed}-{task_id}").shuffle(responses)
            known = {"prompt_id": record.id, "split": config.sample.split}  # its labels stay in this split
            metadata = record.metadata | known | ({"user": record.user} if record.user else {})
            texts = sorted(one.text for one in responses)  # labels of other texts are of another task
            task_id += "-" + hashlib.sha256(repr(texts).encode()).hexdigest()[:8]
            tasks.append(Ranking(id=task_id, prompt=record.prompt, responses=responses, metadata=metadata))
    return tasks, len(whole) - len(tasks), len(prompts) - len(whole)


def label_studio_tasks(task: Ranking, interface: str, seed: int) -> Iterator[dict[str, Any]]:
    """The Label Studio tasks of one ranking: one with a list to sort (ranker), or one per pair (pairwise), whose sides
    are drawn by (seed, id); with data that labelers do not see, from which the export restores the records.
    """

    def data(shown: dict[str, Any], responses: Sequence[RankedResponse]) -> dict[str, Any]:
        about = {r.id: {"policy": r.policy, "metadata": r.metadata} for r in responses}
        unseen = {"dialogue": [message.model_dump(mode="json") for message in task.prompt], "about": about}
        prompt = {"item": task.id, "prompt": shown_prompt(task.prompt)}
        return {"data": prompt | shown | unseen | {"metadata": task.metadata}}

    if interface == "ranker":
        listed = [{"id": r.id, "title": f"Response {n}", "body": r.text} for n, r in enumerate(task.responses, 1)]
        yield data({"responses": listed}, task.responses)
        return
    rng = random.Random(f"sides-{seed}-{task.id}")
    for one, other in combinations(task.responses, 2):
        left, right = (one, other) if rng.random() < 0.5 else (other, one)
        yield data({"left": left.text, "right": right.text, "left_id": left.id, "right_id": right.id}, [left, right])


def label_studio_config(interface: str) -> str:
    """What a labeler sees and clicks. <Text> and the `body` of a <List> show markup as plain characters."""
    text = '<Text name="{0}" value="${0}" valueType="text" selectionEnabled="false"/>'.format
    if interface == "ranker":
        body = """  <Header value="Sort the responses: the best one on top"/>
  <List name="responses" value="$responses" title="Best on top"/>
  <Ranker name="rank" toName="responses" collapsible="false"/>
"""
    else:
        box = '<View style="flex: 1; padding: 1em; border: 1px solid #888888; border-radius: 5px">'
        body = f"""  <Header value="Click the better response"/>
  <Pairwise name="better" toName="left,right"/>
  <View style="display: flex; gap: 1em">
    {box}
      {text("left")}
    </View>
    {box}
      {text("right")}
    </View>
  </View>
  <Header value="Or, with neither response clicked:"/>
  <Choices name="equal" toName="prompt" choice="single-radio">
    <Choice value="equally good"/>
  </Choices>
"""
    return f'<View>\n  <Header value="The prompt"/>\n  {text("prompt")}\n{body}</View>\n'


def write_tasks(folder: Path, tasks: Sequence[Ranking], tool: str, interface: str, seed: int) -> int:
    """Write tasks for `tool` (native, label_studio) into a folder; returns their number."""
    if tool == "native":
        return write_jsonl(folder / "tasks.jsonl", (task.model_dump(mode="json") for task in tasks))
    rows = [row for task in tasks for row in label_studio_tasks(task, interface, seed)]
    (folder / "tasks.json").write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    (folder / "config.xml").write_text(label_studio_config(interface), encoding="utf-8")
    return len(rows)


def next_step(folder: Path, tool: str) -> str:
    """What to do with the files: one paragraph for README.md and the screen."""
    do = "Rank them in the browser (`rlhf serve`), or fill in `labeler` and `ranking` (response ids, best first, a tie as an inner "
    do += "list) in every line of tasks.jsonl"
    path = f"{folder}/tasks.jsonl"
    if tool == "label_studio":
        do = "In Label Studio create a project, paste config.xml under Settings > Labeling Interface > Code, "
        do += "and import tasks.json. When the labelers are done, export as JSON"
        path = "export.json format=label_studio"
    return f"{do}, then: rlhf import path={path} out={folder}-imported"
