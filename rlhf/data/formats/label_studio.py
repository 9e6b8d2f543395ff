"""Label Studio: exports (JSON, JSON-MIN, CSV) and task files, with pairwise, ranker, rating and choices interfaces.

One annotation is one record; a skipped one is no judgement. A task without any annotation is a ranking still to be made.
Tasks that `rlhf sample` wrote keep their ids; in other tasks the names of the keys tell the prompt and the responses. The
import joins the pairs of one item into a ranking.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rlhf.data.formats.shapes import (
    BadRow,
    Values,
    as_json,
    as_number,
    chat_turns,
    is_chat,
    is_list,
    judged,
    letters,
    other_keys,
    ranking_of,
    read_phrase,
    require,
    without_empty,
)
from rlhf.data.records import shown

_FLAT = ("annotation_id", "annotator", "lead_time")  # the keys of an annotation in a flat export (JSON-MIN, CSV)
_OWN_KEYS = ("item", "prompt", "dialogue", "about", "metadata", "responses", "left", "right", "left_id", "right_id")
_PROMPTS = (
    "prompt", "instruction", "question", "query", "input", "user_input", "request", "context", "messages", "dialogue",
    "conversation", "source", "article", "task", "text",
)  # fmt: skip
_ANSWER = re.compile(
    "(response|answer|completion|output|text|generation|candidate|reply|summary|option)[ _-]?([0-9]+|[a-z])", re.I
)
_TEXTS = ("body", "text", "content", "response", "html", "title")  # of one response in a list
_VALUES = ("selected", "ranker", "rating", "number", "choices")  # keys of a result's value


def is_label_studio(row: Values) -> bool:
    if isinstance(row.get("data"), dict):
        return isinstance(row.get("annotations"), list) or set(row) <= {"data", "id", "meta", "predictions"}
    template = {"prompt", "answer1", "answer2"}  # of the pairwise template, without the wrapping `data`
    return row.keys() >= set(_FLAT) or template <= set(row) <= template | {"id"}


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

    def named(self, text: str) -> str | None:
        """The response that a control's name or a choice refers to: by its key or id, else by its number, letter or side."""
        words = text.strip().lower()
        for i, key in enumerate(self.keys):
            if words in (key.lower(), self.ids[i].lower()):
                return self.ids[i]
        within = [self.ids[i] for i, key in enumerate(self.keys) if len(key) > 1 and key.lower() in words]
        if within:
            return within[0] if len(within) == 1 else None
        parts = re.findall(r"[a-z]+|\d+", words)
        places = [{str(i + 1), name} for i, name in enumerate(letters(len(self.keys)))]
        for place, side in zip(places, ("left", "right"), strict=False):
            place.add(side)
        ends = {parts[0], parts[-1]} if len(parts) > 1 else set(parts)
        meant = [name for name, place in zip(self.ids, places, strict=True) if ends & place]
        return meant[0] if len(meant) == 1 else None


def _is_own(data: Values) -> bool:
    """Whether `rlhf sample` wrote a task: its keys are those of `tasks.label_studio_tasks`."""
    return data.keys() >= {"item", "dialogue"} and (data.keys() >= {"left_id", "right_id"} or "responses" in data)


def _own_task(data: Values) -> Task:
    texts: dict[Any, Any] = {data.get(f"{side}_id"): data.get(side) or "" for side in ("left", "right")}
    keys = ["left", "right"]
    if isinstance(data.get("responses"), list):
        texts = {one["id"]: one["body"] for one in data["responses"]}
        keys = list(texts)
    about = data.get("about") or {}
    responses = [{"id": name, "text": text, **(about.get(name) or {})} for name, text in texts.items()]
    return Task(data["dialogue"], responses, keys, (data.get("metadata") or {}) | {"item": data["item"]})


def task_fields(data: Values) -> Task:
    """The prompt and the responses of a task's `data`.

    Responses are a list of texts or of objects with an id and a text; or texts whose keys differ in a number or letter at the
    end (answer1, answer2), or left and right; or the only key named response, answer, completion or output. The prompt is the
    first of _PROMPTS among the other keys, else the only other text. Raises: BadRow that names what was seen.
    """
    if _is_own(data):
        return _own_task(data)
    is_prompt = {key for key in data if key.lower() in _PROMPTS}
    lists = [key for key, value in data.items() if is_list(value) and not is_chat(value) and key not in is_prompt]
    groups: dict[str, list[str]] = {}
    for key in sorted((k for k in data if isinstance(data[k], str)), key=lambda key: (len(key), key)):
        if match := _ANSWER.fullmatch(key):
            groups.setdefault(match[1].lower(), []).append(key)
    numbered = next((keys for keys in groups.values() if len(keys) > 1), None)
    if lists:
        used = lists[:1]
        responses = []
        for number, one in enumerate(data[used[0]], 1):
            item = one if isinstance(one, dict) else {"text": one}
            under = next((key for key in _TEXTS if isinstance(item.get(key), str)), "text")
            require(isinstance(item.get(under), str), f"data.{used[0]}", one, "a string, or an object with id and body")
            more = other_keys(item, "id", under)
            responses.append(
                {"id": str(item.get("id", number)), "text": item[under]} | ({"metadata": more} if more else {})
            )
        keys = [response["id"] for response in responses]
    else:
        used = numbered or [key for key in ("left", "right") if key in data]
        used = used if len(used) > 1 else [k for k in ("response", "answer", "completion", "output") if k in data][:1]
        keys, responses = used, [{"id": key, "text": data[key]} for key in used]
    left = other_keys(data, *used)
    asked = sorted((key for key in is_prompt if left.get(key)), key=lambda key: _PROMPTS.index(key.lower()))
    texts = [key for key, value in left.items() if isinstance(value, str)]
    asked = asked or (texts if len(texts) == 1 else [])
    if not asked or not responses:
        wanted = "the prompt under prompt and the responses under answer1, answer2, … or in a list responses"
        what = "prompt" if responses else "responses"
        raise BadRow("data", f"got the keys {shown(list(data), 200)}, found no {what}, want {wanted}: rename the keys")
    said, rest = left[asked[0]], other_keys(left, asked[0])
    prompt = chat_turns(said, f"data.{asked[0]}") if isinstance(said, list) else said
    return Task(prompt, responses, keys, {"data": rest} if rest else {})


# --- what one annotation says ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Judgement:
    """One annotation's judgements, by response id."""

    ranking: list[list[str]] | None = None
    scores: dict[str, float] = field(default_factory=dict)
    flags: dict[str, list[str]] = field(default_factory=dict)
    other: dict[str, list[Any]] = field(default_factory=dict)  # {control: values} that judge no response

    @property
    def is_judgement(self) -> bool:
        return self.ranking is not None or bool(self.scores) or bool(self.flags)

    def rank(self, ranking: list[list[str]]) -> None:
        """Set the ranking. Raises: BadRow if another control stated a different one."""
        both = [self.ranking, ranking]
        require(self.ranking in (None, ranking), "result", both, "one judgement: remove the other")
        self.ranking = ranking


def _preferred(choice: str, task: Task) -> list[list[str]] | None:
    """The ranking of two responses that a choice states ("A", "response 2 is better", "tie"); None if it states none."""
    if len(task.ids) != 2:
        return None
    exact = [
        i
        for i, (key, name) in enumerate(zip(task.keys, task.ids, strict=True))
        if choice.lower() in (key.lower(), name.lower())
    ]
    verdict = None if exact else read_phrase(choice, 2)
    if exact or verdict:
        return judged(exact[0] if exact else verdict.winner, task.ids)["ranking"]  # type: ignore[union-attr]
    place = task.named(choice) if choice.strip().isdecimal() else None
    return judged(task.ids.index(place), task.ids)["ranking"] if place else None


def _read_result(result: Values, task: Task, judgement: Judgement) -> None:
    """Add one result of an annotation, an object with a `value` object. Raises: BadRow."""
    value, control = result["value"], str(result.get("from_name", ""))
    target = str(result.get("source") or result.get("to_name") or "").lstrip("$")
    aimed = task.ids[task.keys.index(target)] if target in task.keys else task.ids[0] if len(task.ids) == 1 else None
    about = task.named(control) if not control.isalpha() or control in task.keys else None
    if "selected" in value:
        require(value["selected"] in ("left", "right"), "value.selected", value["selected"], "left or right")
        require(len(task.ids) == 2, "data", task.ids, "2 responses in a pairwise task")
        judgement.rank(judged(["left", "right"].index(value["selected"]), task.ids)["ranking"])
    elif "ranker" in value:
        columns = {control: value["ranker"]} if isinstance(value["ranker"], list) else value["ranker"]
        unknown = [str(name) for names in columns.values() for name in names if str(name) not in task.ids]
        require(not unknown, "value.ranker", unknown, f"the task's responses, {', '.join(task.ids)}")
        if len(columns) == 1 or control in columns:
            judgement.rank([[str(name)] for name in columns.get(control, next(iter(columns.values())))])
        else:  # several buckets, whose order an export does not state; "_" holds what was not moved
            for bucket, name in ((b, str(name)) for b, names in columns.items() for name in names if b != "_"):
                judgement.flags.setdefault(name, []).append(bucket)
    elif "choices" in value:
        choices = value["choices"]
        require(choices == [] or is_list(choices, str), "value.choices", choices, "a list of strings")
        ranking = _preferred(choices[0], task) if len(choices) == 1 and about is None else None
        if ranking is not None:
            judgement.rank(ranking)
        elif about or aimed:
            judgement.flags.setdefault(str(about or aimed), []).extend(choices)
        else:
            judgement.other.setdefault(control, []).extend(choices)
    else:
        given = as_number(value.get("rating", value.get("number")))
        if (about := about or aimed) and given is not None:
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
    ranking, scores = judgement.ranking, judgement.scores
    if ranking is None and len(scores) > 1:
        ranking = ranking_of(scores, best="highest")
    in_scale = all(1 <= score <= 7 for score in scores.values())
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

    Annotations without a judgement (skipped, empty, or of which no response can be told) are named in the metadata of the
    task's other records, under `skipped_by`, what they said under `unread`; a task that has no others is rejected.
    Predictions are kept in the metadata and judge nothing.
    """
    if row.keys() >= set(_FLAT):
        yield _from_flat(row)
        return
    if not isinstance(row.get("data"), dict):  # a task file without the wrapping `data`
        row = {"data": other_keys(row, "id")} | ({"id": row["id"]} if "id" in row else {})
    task = task_fields(row["data"])
    about = without_empty(other_keys(row, "data", "annotations"))
    if not row.get("annotations"):
        yield _record(task, Judgement(), {}, {"task": about})
        return
    skipped: list[str] = []
    unread: dict[str, Any] = {}
    judgements: list[tuple[Values, Judgement]] = []
    for annotation in row["annotations"]:
        said = Judgement()
        for result in [] if annotation.get("was_cancelled") else annotation["result"]:
            _read_result(result, task, said)
        if said.is_judgement:
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


def _from_flat(row: Values) -> dict[str, Any]:
    """The one annotation of a row of JSON-MIN or CSV, whose keys mix the task's data with the controls.

    A control is a list of objects as {"selected": "left"}, or a text that says which response is better. CSV writes lists
    as JSON text.
    """
    values = {key: as_json(value) for key, value in row.items()}
    data = other_keys(values, "id", *_FLAT, "created_at", "updated_at")
    controls = [
        key
        for key, value in data.items()
        if is_list(value, dict) and "id" not in value[0] and value[0].keys() & set(_VALUES)
    ]
    task = task_fields(other_keys(without_empty(data), *controls))
    judgement = Judgement()
    for control in controls:
        _read_result({"from_name": control, "value": data[control][0]}, task, judgement)
    for value in other_keys(data, *_OWN_KEYS, *task.keys, *controls, *_PROMPTS).values():
        if isinstance(value, str) and (ranking := _preferred(value, task)) is not None:
            judgement.rank(ranking)
    require(
        judgement.is_judgement,
        "",
        list(row),
        "a judgement (left or right, an order, a rating, a choice): export as JSON",
    )
    annotation = {"completed_by": values["annotator"], "id": values["annotation_id"], "lead_time": values["lead_time"]}
    annotation |= {key: values.get(key) for key in ("created_at", "updated_at")}
    return _record(task, judgement, annotation, {"task": without_empty({"id": values.get("id")})})
