"""Results of labelling rounds: Label Studio's JSON exports and task files, with pairwise, ranker, rating and choices
interfaces; and the tasks that `rlhf sample` wrote as CSV and that labelers filled in (tasks_csv).

One annotation is one record; a skipped one is no judgement. A task without any annotation is a ranking still to be made.
Tasks that `rlhf sample` wrote keep their ids; in other tasks the prompt and the responses are found by the names of their
keys. The import joins the pairs of one item into a ranking.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlhf.data.formats.shapes import (
    BadRow,
    Values,
    as_json,
    as_number,
    chat_turns,
    fits_scale,
    is_chat,
    is_empty,
    is_list,
    judged,
    number,
    other_keys,
    ranking_of,
    read_phrase,
    require,
    response_named,
    without_empty,
)
from rlhf.data.tasks import unguarded
from rlhf.system.schemas import shown

_PROMPTS = (
    "prompt", "instruction", "question", "query", "input", "user_input", "request", "context", "messages", "dialogue",
    "conversation", "source", "article", "task", "text",
)  # fmt: skip
_ANSWER = re.compile(
    "(response|answer|completion|output|text|generation|candidate|reply|summary|option)[ _-]?([0-9]+|[a-z])", re.I
)
_TEXTS = ("body", "text", "content", "response", "html", "title")  # of one response in a list


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
    """The prompt and the responses of a task's `data`.

    Responses are a list of texts or of objects with an id and a text; or texts whose keys differ in a number or letter at the
    end (answer1, answer2), or left and right; or the only key named response, answer, completion or output. The prompt is the
    first of _PROMPTS among the other keys, else the only other text. Raises: BadRow that names what was seen.
    """
    if data.keys() >= {"item", "dialogue"} and (data.keys() >= {"left_id", "right_id"} or "responses" in data):
        return _own_task(data)
    is_prompt = {key for key in data if key.lower() in _PROMPTS}
    lists = [key for key, value in data.items() if is_list(value) and not is_chat(value) and key not in is_prompt]
    if lists:
        used = lists[:1]
        responses = [_listed(one, n, f"data.{used[0]}") for n, one in enumerate(data[used[0]], 1)]
        keys = [response["id"] for response in responses]
    else:
        groups: dict[str, list[str]] = {}
        for key in sorted((k for k in data if isinstance(data[k], str)), key=lambda key: (len(key), key)):
            if match := _ANSWER.fullmatch(key):
                groups.setdefault(match[1].lower(), []).append(key)
        sides = [key for key in ("left", "right") if key in data]
        alone = [key for key in ("response", "answer", "completion", "output") if key in data][:1]
        used = keys = next((keys for keys in (*groups.values(), sides) if len(keys) > 1), alone)
        responses = [{"id": key, "text": data[key]} for key in used]
    left = other_keys(data, *used)
    texts = [key for key, value in left.items() if isinstance(value, str)]
    asked = sorted((key for key in is_prompt if left.get(key)), key=lambda key: _PROMPTS.index(key.lower()))
    asked = asked or (texts if len(texts) == 1 else [])
    if not asked or not responses:
        wanted = "the prompt under prompt and the responses under answer1, answer2, … or in a list responses"
        what = "prompt" if responses else "responses"
        raise BadRow("data", f"got the keys {shown(list(data), 200)}, found no {what}, want {wanted}: rename the keys")
    said, rest = left[asked[0]], other_keys(left, asked[0])
    prompt = chat_turns(said, f"data.{asked[0]}") if isinstance(said, list) else said
    return Task(prompt, responses, keys, {"data": rest} if rest else {})


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


def _listed(one: Any, place: int, where: str) -> dict[str, Any]:
    """A response in a list."""
    item = one if isinstance(one, dict) else {"text": one}
    under = next((key for key in _TEXTS if isinstance(item.get(key), str)), "text")
    require(isinstance(item.get(under), str), where, one, "a string, or an object with id and body")
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
    """The ranking of two responses that a choice states ("A", "response 2 is better", "tie"); None if it states none."""
    if len(task.ids) != 2:
        return None
    named = [
        i for i, names in enumerate(zip(task.keys, task.ids, strict=True)) if choice.lower() in map(str.lower, names)
    ]
    winner = named[0] if named else int(choice) - 1 if choice.strip() in ("1", "2") else read_phrase(choice, 2)
    return None if winner is None else judged(winner, task.ids)["ranking"]


def _read_result(result: Values, task: Task, judgement: Judgement) -> None:
    """Add one result of an annotation, an object with a `value` object. Raises: BadRow."""
    value, control = result["value"], str(result.get("from_name", ""))
    target = str(result.get("source") or result.get("to_name") or "").lstrip("$")
    named = response_named(control, task.keys) if not control.isalpha() or control in task.keys else None
    aimed = task.keys.index(target) if target in task.keys else 0 if len(task.ids) == 1 else None
    place = aimed if named is None else named
    about = None if place is None else task.ids[place]
    if "selected" in value:
        require(value["selected"] in ("left", "right"), "value.selected", value["selected"], "left or right")
        require(len(task.ids) == 2, "data", task.ids, "2 responses in a pairwise task")
        judgement.rankings.append(judged(["left", "right"].index(value["selected"]), task.ids)["ranking"])
    elif "ranker" in value:
        columns = {control: value["ranker"]} if isinstance(value["ranker"], list) else value["ranker"]
        unknown = [str(name) for names in columns.values() for name in names if str(name) not in task.ids]
        require(not unknown, "value.ranker", unknown, f"the task's responses, {', '.join(task.ids)}")
        if len(columns) == 1 or control in columns:
            judgement.rankings.append([[str(name)] for name in columns.get(control, next(iter(columns.values())))])
        else:  # several buckets, whose order an export does not state; "_" holds what was not moved
            for bucket, name in ((b, str(name)) for b, names in columns.items() for name in names if b != "_"):
                judgement.flags.setdefault(name, []).append(bucket)
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
        who = who.get("email") or who.get("username") or who.get("id")
    return None if who is None else str(who)


def _record(task: Task, judgement: Judgement, annotation: Values, parts: dict[str, Any]) -> dict[str, Any]:
    """The native record of one annotation, or of none; what else is known of task and annotation is metadata.

    Scores outside 1 to 7 are kept in metadata and still rank.
    """
    scores = judgement.scores
    by_scores = ranking_of(scores, best="highest") if len(scores) > 1 else None
    ranking = judgement.rankings[0] if judgement.rankings else by_scores
    in_scale = fits_scale(scores)
    parts = parts | {"scores": {} if in_scale else scores, "results": judgement.other}
    parts["annotation"] = without_empty(
        other_keys(annotation, "result", "completed_by", "lead_time", "created_at", "unique_id")
    )
    return {
        "kind": "ranking",
        **({"id": annotation["unique_id"]} if annotation.get("unique_id") else {}),
        "prompt": task.prompt,
        "responses": task.responses,
        "ranking": ranking,
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
    records is a reject.
    Predictions are kept in the metadata and judge nothing.
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


# --- tasks of `rlhf sample` as CSV -------------------------------------------------------------------------------------

_COMMON = ("item", "prompt", "labeler", "ids", "about")
_SIDES = ("left", "right")
_LEAVE = "leave this column as it was written (a spreadsheet cuts cells at 32,767 characters)"


def _cell_text(value: Any) -> str:
    """A cell as text, without the apostrophe that guards against formulas; a spreadsheet's number as the text that it shows."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else unguarded(str(value))


def from_tasks_csv(row: Values) -> Iterator[dict[str, Any]]:
    """The ranking of a row; null if nobody has filled it in, as in a task. Raises: BadRow."""
    about = as_json(row["about"])
    parts = [about.get(name, {}) for name in ("responses", "metadata")] if isinstance(about, dict) else []
    require(len(parts) == 2 and is_list(parts, dict), "about", row["about"], f"the JSON of rlhf sample: {_LEAVE}")
    known, metadata = parts
    pair = "winner" in row
    ids = _cell_text(row["ids"]).split()
    columns = list(_SIDES) if pair else [f"response_{n}" for n in range(1, len(ids) + 1)]
    fits = len(ids) == len(columns) and all(column in row for column in columns)
    require(fits, "ids", row["ids"], f"an id for each response: {_LEAVE}")
    require(set(ids) <= known.keys(), "ids", row["ids"], f"some of {shown(list(known))}, which about knows: {_LEAVE}")
    ranking = None
    if not pair:
        scores = {}
        for column, name in enumerate(ids, 1):
            if not is_empty(score := row.get(f"score_{column}")):
                scores[name] = number(score, f"score_{column}", "a number, or nothing")
        ranking = ranking_of(scores, best="highest") if scores else None
    elif not is_empty(row["winner"]):
        winner = read_phrase(_cell_text(row["winner"]), 2)
        if winner is None:
            raise BadRow("winner", f"got {shown(row['winner'])}, want left, right or tie")
        ranking = judged(winner, ids)["ranking"]
    item = _cell_text(row["item"])
    labeler = None if is_empty(row["labeler"]) else _cell_text(row["labeler"]).strip()
    used = [*_COMMON, *(key for key in row if key in (*_SIDES, "winner") or key.startswith(("response_", "score_")))]
    more = without_empty(other_keys(row, *used))
    yield {
        "kind": "ranking",
        "id": (item if labeler is None else f"{item}:{labeler}") if item else None,
        "prompt": about.get("dialogue") or _cell_text(row["prompt"]),
        "responses": [
            {"id": name, "text": _cell_text(row[column]), **known[name]}
            for name, column in zip(ids, columns, strict=True)
        ],
        "ranking": ranking,
        "labeler": labeler,
        # Pairs of one item and labeler are joined by it; rankings are not joined.
        "metadata": metadata | ({"item": item} if pair else {}) | ({"columns": more} if more else {}),
    }
