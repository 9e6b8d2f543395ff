"""Label Studio's JSON exports and task files, with pairwise, ranker, rating and choices interfaces.

One annotation is one record; a skipped one is no judgement. A task without any annotation is a ranking still to be made.
Tasks that `rlhf sample` wrote keep their ids. Other tasks have the prompt under one of PROMPTS, and the responses as a list
`responses`, under `answer1`, `answer2`, … as in Label Studio's own templates, or as one `response`. The import joins the pairs of
one item.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlhf.data.formats.shapes import (
    BadRow,
    Values,
    as_number,
    chat_turns,
    fits_scale,
    is_list,
    judged,
    other_keys,
    ranking_of,
    read_phrase,
    require,
    response_named,
    without_empty,
)
from rlhf.system.schemas import shown

PROMPTS = ("prompt", "question", "instruction")
_ANSWER = re.compile(r"(?:answer|response)[ _-]?(?:\d+|[a-z])?", re.I)


# --- a task's prompt and responses -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Task:
    """The prompt, the responses in the order shown, and the keys by which results may name them."""

    prompt: Any
    responses: list[dict[str, Any]]  # as in a native record
    keys: list[str]  # the data key or list id of each response
    rest: dict[str, Any]  # metadata of the record

    @property
    def ids(self) -> list[str]:
        return [response["id"] for response in self.responses]


def task_fields(data: Values) -> Task:
    """The prompt and the responses of a task's `data`. Raises: BadRow that names what was seen."""
    if data.keys() >= {"item", "dialogue"}:
        return _own_task(data)
    if is_list(data.get("responses")):
        used = ["responses"]
        responses = [_listed(one, n) for n, one in enumerate(data["responses"], 1)]
    else:
        texts = (key for key, value in data.items() if isinstance(value, str) and _ANSWER.fullmatch(key))
        used = sorted(texts, key=lambda key: (len(key), key))  # answer10 after answer9
        responses = [{"id": key, "text": data[key]} for key in used]
    asked = next((key for key in PROMPTS if data.get(key)), None)
    if asked is None or not responses:
        what = "prompt" if responses else "responses"
        wanted = "the prompt under prompt and the responses under answer1, answer2, … or in a list responses"
        raise BadRow("data", f"got the keys {shown(list(data), 200)}, found no {what}, want {wanted}: rename the keys")
    prompt, rest = data[asked], other_keys(data, asked, *used)
    prompt = chat_turns(prompt, f"data.{asked}") if isinstance(prompt, list) else prompt
    return Task(prompt, responses, [one["id"] for one in responses], {"data": rest} if rest else {})


def _own_task(data: Values) -> Task:
    """A task that `rlhf sample` wrote: its keys are those of `tasks.label_studio_tasks`."""
    texts: dict[Any, Any] = {data.get(f"{side}_id"): data.get(side) or "" for side in ("left", "right")}
    keys = ["left", "right"]
    if isinstance(data.get("responses"), list):
        texts = {one["id"]: one["body"] for one in data["responses"]}
        keys = list(texts)
    about = data.get("about") or {}
    responses = [{"id": name, "text": text, **(about.get(name) or {})} for name, text in texts.items()]
    return Task(data["dialogue"], responses, keys, (data.get("metadata") or {}) | {"item": data["item"]})


def _listed(one: Any, place: int) -> dict[str, Any]:
    """A response in a list: a text, or an object with its text under `body` or `text`."""
    item = one if isinstance(one, dict) else {"text": one}
    under = "body" if "body" in item else "text"
    require(isinstance(item.get(under), str), "data.responses", one, "a string, or an object with id and body")
    more = other_keys(item, "id", under)
    return {"id": str(item.get("id", place)), "text": item[under]} | ({"metadata": more} if more else {})


# --- what one annotation says ----------------------------------------------------------------------------------------


class Judgement(NamedTuple):
    """One annotation's judgements, by response id."""

    rankings: list[list[list[str]]]  # of each control; want one
    scores: dict[str, float]
    flags: dict[str, list[str]]
    other: dict[str, list[Any]]  # {control: values} that judge no response


def _preferred(choice: str, task: Task) -> list[list[str]] | None:
    """The ranking of two responses that a choice states ("answer2", "response 2 is better", "tie"); None if it states none."""
    if len(task.ids) != 2:
        return None
    low = choice.strip().lower()
    named = [i for i, names in enumerate(zip(task.keys, task.ids, strict=True)) if low in map(str.lower, names)]
    winner = named[0] if named else int(low) - 1 if low in ("1", "2") else read_phrase(choice, 2)
    return None if winner is None else judged(winner, task.ids)["ranking"]


def _read_result(result: Values, task: Task, judgement: Judgement) -> None:
    """Add one result of an annotation, an object with a `value` object. Raises: BadRow."""
    value, control = result["value"], str(result.get("from_name", ""))
    target = str(result.get("to_name") or "")
    named = response_named(control, task.keys) if not control.isalpha() or control in task.keys else None
    aimed = task.keys.index(target) if target in task.keys else 0 if len(task.ids) == 1 else None
    place = aimed if named is None else named
    about = None if place is None else task.ids[place]
    order = value.get("ranker")
    if isinstance(order, dict) and len(order) == 1:  # the one bucket of a list
        [order] = order.values()
    if "selected" in value:
        require(value["selected"] in ("left", "right"), "value.selected", value["selected"], "left or right")
        require(len(task.ids) == 2, "data", task.ids, "2 responses in a pairwise task")
        judgement.rankings.append(judged(["left", "right"].index(value["selected"]), task.ids)["ranking"])
    elif isinstance(order, list):
        unknown = [str(name) for name in order if str(name) not in task.ids]
        require(not unknown, "value.ranker", unknown, f"the task's responses, {', '.join(task.ids)}")
        judgement.rankings.append([[str(name)] for name in order])
    elif "choices" in value:
        choices = value["choices"]
        require(choices == [] or is_list(choices, str), "value.choices", choices, "a list of strings")
        ranking = _preferred(choices[0], task) if len(choices) == 1 and named is None else None
        if ranking is not None:
            judgement.rankings.append(ranking)
        elif about:
            judgement.flags.setdefault(about, []).extend(choices)
        else:
            judgement.other.setdefault(control, []).extend(choices)
    elif about and (given := as_number(value.get("rating", value.get("number")))) is not None:
        judgement.scores[about] = given
    else:
        judgement.other.setdefault(control, []).append(value)


# --- records ---------------------------------------------------------------------------------------------------------


def _labeler_of(annotation: Values) -> str | None:
    """The annotator as the export gives it: an e-mail address if there is one, else an id."""
    who = annotation.get("completed_by")
    if isinstance(who, dict):
        who = who.get("email") or who.get("id")
    return None if who is None else str(who)


def _record(task: Task, judgement: Judgement, annotation: Values, parts: dict[str, Any]) -> dict[str, Any]:
    """The native record of one annotation, or of none; what else is known of task and annotation is metadata.

    Scores outside 1 to 7 are kept in metadata and still rank.
    """
    scores = judgement.scores
    by_scores = ranking_of(scores, best="highest") if len(scores) > 1 else None
    in_scale = fits_scale(scores)
    rest = other_keys(annotation, "result", "completed_by", "lead_time", "created_at", "unique_id")
    parts = parts | {
        "scores": {} if in_scale else scores,
        "results": judgement.other,
        "annotation": without_empty(rest),
    }
    return {
        "kind": "ranking",
        "id": annotation.get("unique_id") or None,
        "prompt": task.prompt,
        "responses": task.responses,
        "ranking": judgement.rankings[0] if judgement.rankings else by_scores,
        "ratings": scores if in_scale else {},
        "flags": judgement.flags,
        "labeler": _labeler_of(annotation),
        "seconds": as_number(annotation.get("lead_time")),
        "created": annotation.get("created_at"),
        "metadata": task.rest | without_empty(parts),
    }


def from_label_studio(row: Values) -> Iterator[dict[str, Any]]:
    """One ranking per annotation that judges; one without a judgement if the task has no annotation.

    Annotations without a judgement (skipped, empty, or about no response that can be identified) are listed in the metadata
    of the task's other records: the annotators under `skipped_by`, the results under `unread`. A task that has no other
    records is a reject. Predictions are kept in the metadata and judge nothing.
    """
    if "annotation_id" in row:  # JSON-MIN or CSV, which mix an annotation with its task
        raise BadRow("", "got a row of a flat export, want one with data and annotations: export as JSON")
    if not isinstance(row.get("data"), dict):  # a task file without the wrapping `data`
        row = {"data": other_keys(row, "id")} | ({"id": row["id"]} if "id" in row else {})
    task = task_fields(row["data"])
    about = without_empty(other_keys(row, "data", "annotations"))
    if not row.get("annotations"):
        yield _record(task, Judgement([], {}, {}, {}), {}, {"task": about})
        return
    skipped: list[str] = []
    unread: dict[str, Any] = {}
    judgements: list[tuple[Values, Judgement]] = []
    for annotation in row["annotations"]:
        said = Judgement([], {}, {}, {})
        for result in [] if annotation.get("was_cancelled") else annotation["result"]:
            _read_result(result, task, said)
        first = said.rankings[:1]
        require(said.rankings == first * len(said.rankings), "result", said.rankings, "one judgement: remove the other")
        if said.rankings or said.scores or said.flags:
            judgements.append((annotation, said))
        else:
            skipped.append(_labeler_of(annotation) or "unknown")
            unread |= {skipped[-1]: said.other} if said.other else {}
    if not judgements:
        wanted = f"a ranking, or a choice or rating whose control names one of {', '.join(task.keys)}"
        require(not unread, "result", unread, wanted)
        wanted = "a judgement: label the task or leave it out of the export"
        raise BadRow("annotations", f"got {len(skipped)} that were skipped or left empty, want {wanted}")
    for annotation, said in judgements:
        yield _record(task, said, annotation, {"task": about, "skipped_by": skipped, "unread": unread})
