"""Labelling tasks: rankings that are not filled in yet, written for the labelers' tool.

A task is a `Ranking` whose `ranking` is None, with the responses in the order in which a labeler will see them.
"""

import json
import random
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from rlhf.data.records import Message, RankedResponse, Ranking
from rlhf.system.files import write_jsonl

RANK = "rank"  # the control's name in Label Studio, which exports contain
BETTER = "better"
EQUAL = "equal"
EQUALLY_GOOD = "equally good"


def shuffle_responses(task: Ranking, seed: int) -> Ranking:
    """The task with its responses in an order that depends on (seed, id) only, so that position carries no information.

    Ids stay with their responses: they were given in the order of drawing, and draws are exchangeable.
    """
    responses = list(task.responses)
    random.Random(f"order-{seed}-{task.id}").shuffle(responses)
    return task.model_copy(update={"responses": responses})


def shown_prompt(prompt: Sequence[Message]) -> str:
    """A prompt as shown to labelers: the text of a single user turn, else every turn with its role."""
    if len(prompt) == 1 and prompt[0].role == "user":
        return prompt[0].content
    return "\n\n".join(f"{message.role.capitalize()}: {message.content}" for message in prompt)


def pairs_of(task: Ranking, seed: int) -> Iterator[tuple[int, int]]:
    """All K(K-1)/2 pairs (left, right) of indices into the responses, each side drawn by (seed, id)."""
    rng = random.Random(f"sides-{seed}-{task.id}")
    for i, j in combinations(range(len(task.responses)), 2):
        yield (i, j) if rng.random() < 0.5 else (j, i)


# --- Label Studio ----------------------------------------------------------------------------------------------------


def label_studio_tasks(task: Ranking, interface: str, seed: int) -> Iterator[dict[str, Any]]:
    """The Label Studio tasks of one ranking: one with a list to sort (ranker), or one per pair (pairwise).

    The task also contains data that labelers do not see, so that the export is sufficient to restore the records: the item's
    id, the turns of the prompt, each response's id, policy and metadata.
    """
    common = {"item": task.id, "prompt": shown_prompt(task.prompt)}
    if interface == "ranker":
        listed = [{"id": r.id, "title": f"Response {n}", "body": r.text} for n, r in enumerate(task.responses, 1)]
        yield {"data": common | {"responses": listed} | _unseen(task, task.responses)}
        return
    for left, right in pairs_of(task, seed):
        sides = [task.responses[left], task.responses[right]]
        texts = {"left": sides[0].text, "right": sides[1].text, "left_id": sides[0].id, "right_id": sides[1].id}
        yield {"data": common | texts | _unseen(task, sides)}


def _unseen(task: Ranking, responses: Sequence[RankedResponse]) -> dict[str, Any]:
    return {
        "dialogue": [message.model_dump(mode="json") for message in task.prompt],
        "about": {r.id: {"policy": r.policy, "metadata": r.metadata} for r in responses},
        "metadata": task.metadata,
    }


def label_studio_config(interface: str) -> str:
    """The labelling configuration to paste into a project: what a labeler sees and clicks.

    Prompts and responses are in <Text> and in the `body` of a <List>, which show markup as plain characters.
    """
    prompt, left, right = (
        f'<Text name="{name}" value="${name}" valueType="text" selectionEnabled="false"/>'
        for name in ("prompt", "left", "right")
    )
    if interface == "ranker":
        return f"""<View>
  <Header value="The prompt"/>
  {prompt}
  <Header value="Sort the responses: the best one on top"/>
  <List name="responses" value="$responses" title="Best on top"/>
  <Ranker name="{RANK}" toName="responses" collapsible="false"/>
</View>
"""
    box = '<View style="flex: 1; padding: 1em; border: 1px solid #888888; border-radius: 5px">'
    return f"""<View>
  <Header value="The prompt"/>
  {prompt}
  <Header value="Click the better response"/>
  <Pairwise name="{BETTER}" toName="left,right"/>
  <View style="display: flex; gap: 1em">
    {box}
      {left}
    </View>
    {box}
      {right}
    </View>
  </View>
  <Header value="Or, with neither response clicked:"/>
  <Choices name="{EQUAL}" toName="prompt" choice="single-radio">
    <Choice value="{EQUALLY_GOOD}"/>
  </Choices>
</View>
"""


# --- writing -------------------------------------------------------------------------------------------------------------


def write_tasks(folder: Path, tasks: Sequence[Ranking], tool: str, interface: str, seed: int) -> tuple[list[str], int]:
    """Write tasks for `tool` (native, label_studio) into a folder: the files' names and the number of tasks."""
    if tool == "native":
        return ["tasks.jsonl"], write_jsonl(folder / "tasks.jsonl", (task.model_dump(mode="json") for task in tasks))
    rows = [row for task in tasks for row in label_studio_tasks(task, interface, seed)]
    (folder / "tasks.json").write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    (folder / "config.xml").write_text(label_studio_config(interface), encoding="utf-8")
    return ["tasks.json", "config.xml"], len(rows)


def next_step(folder: Path, tool: str) -> str:
    """What to do with the files: one paragraph for README.md and the screen."""
    out = f"{folder}-imported"
    if tool == "native":
        return (
            "Fill in `ranking` (response ids, best first, a tie as an inner list) and `labeler` in every line of "
            f"tasks.jsonl, then: rlhf import path={folder}/tasks.jsonl out={out}"
        )
    return (
        "In Label Studio create a project, paste config.xml under Settings > Labeling Interface > Code, and import "
        "tasks.json. When the labelers are done, export as JSON, then: "
        f"rlhf import path=export.json format=label_studio out={out}"
    )
