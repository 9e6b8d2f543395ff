"""Label Studio: exports (JSON, JSON-MIN, CSV) and task files, with pairwise, ranker, rating and choices interfaces.

One annotation is one record; a skipped one is no judgement. A task without any annotation is a ranking still to be made.
Tasks that `rlhf sample` wrote keep their ids; in other tasks the names of the keys tell the prompt and the responses. The
import joins the pairs of one item into a ranking.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf.data.formats.shapes import (
    BadRow,
    Values,
    as_json,
    as_number,
    chat_turns,
    is_list,
    is_number,
    is_text,
    other_keys,
    ranking_of,
    require,
    without_empty,
)
from rlhf.data.formats.verdicts import Verdict, ordered, read_phrase
from rlhf.data.records import shown

_FLAT = ("annotation_id", "annotator", "lead_time")  # the keys of an annotation in a flat export (JSON-MIN, CSV)
_OWN_KEYS = ("item", "prompt", "dialogue", "about", "metadata", "responses", "left", "right", "left_id", "right_id")
_PROMPTS = (
    "prompt", "instruction", "question", "query", "input", "user_input", "request", "context", "messages", "dialogue",
    "conversation", "source", "article", "task", "text",
)  # fmt: skip
_LISTS = ("responses", "answers", "items", "candidates", "completions", "generations", "outputs", "options")
_SINGLES = ("response", "answer", "completion", "output")
_STEMS = {*_SINGLES, "text", "generation", "candidate", "reply", "summary", "option", "result"}
_TEXTS = ("body", "text", "content", "response", "html", "title")  # of one response in a list
_VALUES = ("selected", "ranker", "rating", "number", "choices")  # keys of a result's value
_PLACES = (("left", "first", "one"), ("right", "second", "two"))


def is_label_studio(row: Values) -> str | None:
    if isinstance(row.get("data"), dict):
        if isinstance(row.get("annotations"), list):
            return "keys data and annotations"
        if set(row) <= {"data", "id", "meta", "predictions"}:
            return "a task without annotations: key data"
    if all(key in row for key in _FLAT):
        return "keys " + ", ".join(_FLAT)
    if {"prompt", "answer1", "answer2"} <= set(row) <= {"id", "prompt", "answer1", "answer2"}:
        return "a task of the pairwise template: keys prompt, answer1, answer2"
    return None


# --- a task's prompt and responses -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Task:
    """The prompt, the responses in the order shown, and the keys by which results may name them."""

    prompt: Any
    responses: list[dict[str, Any]]  # as in a native record
    keys: list[str]  # the data key or list id of each response
    rest: dict[str, Any] = field(default_factory=dict)  # metadata of the record

    @property
    def ids(self) -> list[str]:
        return [response["id"] for response in self.responses]

    def marks(self) -> list[set[str]]:
        """The names of each response, in lower case: its key or id, and its position if no other response has that name."""
        names_of = [{key.lower(), name.lower()} for key, name in zip(self.keys, self.ids, strict=True)]
        taken = set().union(*names_of)
        places = [{str(i + 1), chr(ord("a") + i), *(_PLACES[i] if i < 2 else ())} for i in range(len(names_of))]
        return [names | (place - taken) for names, place in zip(names_of, places, strict=True)]


def _is_own(data: Values) -> bool:
    """Whether `rlhf sample` wrote a task: its keys are those of `tasks.label_studio_tasks`."""
    pair = {"left", "right", "left_id", "right_id"} <= set(data)
    own = isinstance(data.get("item"), str) and isinstance(data.get("dialogue"), list)
    return own and (pair or isinstance(data.get("responses"), list))


def _own_task(data: Values) -> Task:
    named_texts: list[tuple[Any, Any]] = [(data.get(f"{side}_id"), data.get(side)) for side in ("left", "right")]
    keys = ["left", "right"]
    if isinstance(data.get("responses"), list):
        named_texts = [(r.get("id"), r.get("body")) if isinstance(r, dict) else (None, r) for r in data["responses"]]
        keys = [str(name) for name, _ in named_texts]
    about, metadata = (value if isinstance(value := data.get(key), dict) else {} for key in ("about", "metadata"))
    responses: list[dict[str, Any]] = []
    for name, text in named_texts:
        fits = isinstance(name, str) and isinstance(text, str)
        require(fits, "data", {"id": name, "body": text}, "a response with an id and a text")
        known = about.get(name)
        responses.append({"id": name, "text": text} | (known if isinstance(known, dict) else {}))
    return Task(data["dialogue"], responses, keys, metadata | {"item": data["item"]})


def _listed(items: Sequence[Any], key: str) -> Task:
    """Responses of a list: strings, or objects with an id and a text."""
    responses: list[dict[str, Any]] = []
    for number, one in enumerate(items, 1):
        under = next((k for k in _TEXTS if isinstance(one.get(k), str)), "") if isinstance(one, dict) else ""
        text = one.get(under) if isinstance(one, dict) else one
        require(isinstance(text, str), f"data.{key}", one, "a string, or an object with id and body")
        more = other_keys(one, "id", under) if isinstance(one, dict) else {}
        name = str(one.get("id", number) if isinstance(one, dict) else number)
        responses.append({"id": name, "text": text} | ({"metadata": more} if more else {}))
    return Task(None, responses, [response["id"] for response in responses])


def _numbered_keys(data: Values) -> list[str]:
    """Keys that differ in a number or letter at their end, as answer1 and answer2, or in their side; [] without such."""
    stems: dict[str, dict[str, str]] = {}
    for key, value in data.items():
        match = re.fullmatch(r"(.*[a-zA-Z])[ _-]?(\d+)|(.+)[ _-]([a-zA-Z])", key)
        if match and isinstance(value, str):
            stems.setdefault((match[1] or match[3]).lower(), {})[(match[2] or match[4]).lower()] = key
    groups = {stem: ends for stem, ends in stems.items() if len(ends) > 1 and {"0", "1", "a"} & set(ends)}
    likely = [stem for stem in groups if len(groups) == 1 or stem in _STEMS]
    if len(likely) == 1:
        ends = groups[likely[0]]
        return [ends[end] for end in sorted(ends, key=lambda end: (len(end), end))]
    sides = [
        pair for pair in (("left", "right"), ("first", "second")) if all(isinstance(data.get(s), str) for s in pair)
    ]
    return list(sides[0]) if sides and not groups else []


def task_fields(data: Values, named: Sequence[str] = ()) -> Task:
    """The prompt and the responses of a task's `data`.

    Responses are the first of these that there is: two or more keys that the results name (by toName or as `$variable`); a
    list under one of _LISTS or of the named keys; keys that differ in a number or letter at the end, or left and right; one
    key that the results name; one of _SINGLES. Keys that differ only at their end stay together, so that a response which
    nobody judged is not lost. The prompt is the first of _PROMPTS among the other keys, else the only other text.

    Raises: BadRow that names what was seen.
    """
    if _is_own(data):
        return _own_task(data)
    is_prompt = {key for key in data if key.lower() in _PROMPTS}
    texts = [key for key in dict.fromkeys(named) if isinstance(data.get(key), str) and key not in is_prompt]
    lists = [key for key in (*named, *_LISTS) if isinstance(data.get(key), list) and key not in is_prompt]
    if len(texts) < 2 and lists:
        task, used = _listed(data[lists[0]], lists[0]), lists[:1]
    else:
        numbered = _numbered_keys(data)
        if len(texts) < 2 or set(texts) < set(numbered):
            texts = numbered or texts or [key for key in _SINGLES if isinstance(data.get(key), str)][:1]
        task, used = Task(None, [{"id": key, "text": data[key]} for key in texts], texts), texts
    left = other_keys(data, *used)
    asked = sorted(
        (k for k in is_prompt if isinstance(left.get(k), str | list)), key=lambda k: _PROMPTS.index(k.lower())
    )
    plain = [key for key, value in left.items() if is_text(value)]
    asked = asked or (plain if len(plain) == 1 else [])
    if not asked or not task.responses:
        what = "prompt" if task.responses else "responses"
        wanted = "the prompt under prompt and the responses under answer1, answer2, … or in a list responses"
        raise BadRow("data", f"got the keys {shown(list(data), 200)}, found no {what}, want {wanted}: rename the keys")
    said, rest = left[asked[0]], other_keys(left, asked[0])
    task.prompt = chat_turns(said, f"data.{asked[0]}") if isinstance(said, list) else said
    task.rest = {"data": rest} if rest else {}
    return task


# --- what one annotation says ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Judgement:
    """One annotation's judgements, by response id."""

    ranking: list[list[str]] | None = None
    scores: dict[str, float] = field(default_factory=dict)
    flags: dict[str, list[str]] = field(default_factory=dict)
    other: dict[str, list[Any]] = field(default_factory=dict)  # {control: values} that judge no response
    control: str = ""  # the control that gave the ranking

    @property
    def is_judgement(self) -> bool:
        return self.ranking is not None or bool(self.scores) or bool(self.flags)

    def rank(self, ranking: list[list[str]], control: str) -> None:
        """Set the ranking. Raises: BadRow if another control stated a different one."""
        if self.ranking is not None and self.ranking != ranking:
            both = f"{shown(self.ranking)} from {self.control} and {shown(ranking)} from {control}"
            raise BadRow("result", f"got {both}, want one judgement: remove the other")
        self.ranking, self.control = ranking, control


def _named_response(control: str, task: Task, *, glued: bool = True) -> str | None:
    """The response that a control's name refers to: it contains its key (answer1_rating), or ends or begins with a mark of it.

    The mark is a word of its own (rating_a, left-flags); `glued` allows a number right after a word too (rating2).
    """
    words = re.findall(r"[a-z]+|\d+", control.lower())
    ends = re.split(r"[ _\-]+", control.lower())
    told = {ends[0], ends[-1]} if len(ends) > 1 else set()
    if glued and len(words) > 1 and words[-1].isdecimal():
        told.add(words[-1])
    meant = []
    for key, name, marks in zip(task.keys, task.ids, task.marks(), strict=True):
        parts = re.findall(r"[a-z]+|\d+", key.lower())
        if told & marks or any(words[i : i + len(parts)] == parts for i in range(len(words))):
            meant.append(name)
    return meant[0] if len(meant) == 1 else None


def _preferred(choice: str, task: Task) -> list[list[str]] | None:
    """The ranking of two responses that a choice states ("A", "response 2 is better", "tie"); None if it states none."""
    if len(task.responses) != 2:
        return None
    named = [i for i, marks in enumerate(task.marks()) if choice.strip().lower() in marks]
    verdict = Verdict(named[0]) if named else read_phrase(choice, 2)
    return None if verdict is None else ordered(verdict.winner, task.ids)


def _read_ranker(ranker: Any, control: str, task: Task, judgement: Judgement) -> None:
    """A sorted list is a ranking; several buckets, whose order an export does not state, become flags."""
    columns = {control: ranker} if isinstance(ranker, list) else ranker
    fits = isinstance(columns, dict) and all(isinstance(ids, list) for ids in columns.values())
    require(fits, "value.ranker", ranker, "lists of response ids")
    for name in (str(name) for ids in columns.values() for name in ids):
        if name not in task.ids:
            raise BadRow("value.ranker", f"got {shown(name)}, the task's responses are {', '.join(task.ids)}")
    if control in columns or len(columns) == 1:
        if order := columns.get(control, next(iter(columns.values()))):
            judgement.rank([[str(name)] for name in order], control)
        return
    for bucket, ids in columns.items():
        for name in ids if bucket != "_" else []:
            judgement.flags.setdefault(str(name), []).append(str(bucket))


def _targets(result: Values) -> list[str]:
    """The data keys that a result names: as `$variable` under source, and its toName, which may list several."""
    source, to_name = result.get("source"), result.get("to_name")
    names = [source.lstrip("$")] if isinstance(source, str) else []
    return names or ([name.strip() for name in to_name.split(",")] if isinstance(to_name, str) else [])


def _read_result(result: Values, task: Task, judgement: Judgement) -> None:
    """Add one result of an annotation, an object with a `value` object. Raises: BadRow."""
    value, control, kind = result["value"], str(result.get("from_name", "")), str(result.get("type", ""))
    aimed = [name for key, name in zip(task.keys, task.ids, strict=True) if [key] == _targets(result)]
    aimed_at = aimed[0] if aimed else task.ids[0] if len(task.ids) == 1 else None
    if kind == "pairwise" or "selected" in value:
        selected = value.get("selected")
        require(selected in ("left", "right"), "value.selected", selected, "left or right")
        if len(task.responses) != 2:
            raise BadRow("data", f"got {len(task.responses)} responses in a pairwise task, want 2")
        judgement.rank(ordered(0 if selected == "left" else 1, task.ids), control)
    elif kind == "ranker" or "ranker" in value:
        _read_ranker(value.get("ranker"), control, task, judgement)
    elif kind == "choices" or "choices" in value:
        choices: Any = value.get("choices")
        require(choices == [] or is_list(choices, str), "value.choices", choices, "a list of strings")
        about = _named_response(control, task, glued=False)
        if about is None and len(choices) == 1 and (ranking := _preferred(choices[0], task)) is not None:
            judgement.rank(ranking, control)
        elif (about := about or aimed_at) is None:
            judgement.other.setdefault(control, []).extend(choices)
        else:
            judgement.flags.setdefault(about, []).extend(choices)
    else:
        given: Any = value.get("rating", value.get("number"))
        about = _named_response(control, task) or aimed_at
        if about is None or not is_number(given) or not abs(given) < 1e300:
            judgement.other.setdefault(control, []).append(value)
        else:
            judgement.scores[about] = given


# --- records ---------------------------------------------------------------------------------------------------------


def _labeler_of(annotation: Values) -> str | None:
    """The annotator as the export gives it: an e-mail address if there is one, else an id."""
    who = annotation.get("completed_by")
    if isinstance(who, dict):
        who = who.get("email") or who.get("username") or who.get("id")
    return None if who is None else str(who)


def _record(task: Task, judgement: Judgement) -> dict[str, Any]:
    """The native record of one annotation, or of none. Scores outside 1 to 7 are kept in metadata and still rank."""
    ranking, scores = judgement.ranking, judgement.scores
    if ranking is None and len(scores) > 1:
        ranking = ranking_of(scores, best="highest")
    fits = all(1 <= score <= 7 for score in scores.values())
    more = {"scores": {} if fits else scores, "results": judgement.other}
    return {
        "kind": "ranking",
        "prompt": task.prompt,
        "responses": task.responses,
        "ranking": ranking,
        "ratings": scores if fits else {},
        "flags": judgement.flags,
        "metadata": task.rest | {name: value for name, value in more.items() if value},
    }


def _annotated(annotation: Values, record: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """The record with who judged, when and for how long; what else is known of task and annotation is metadata."""
    seconds: Any = annotation.get("lead_time")
    created, name = annotation.get("created_at"), annotation.get("unique_id")
    used = ["result", "completed_by"]
    record["labeler"] = _labeler_of(annotation)
    if is_number(seconds) and 0 <= seconds < 1e300:
        record["seconds"] = seconds
        used.append("lead_time")
    if isinstance(created, str):
        record["created"] = created
        used.append("created_at")
    if isinstance(name, str) and name:
        record["id"] = name
        used.append("unique_id")
    parts["annotation"] = without_empty(other_keys(annotation, *used))
    record["metadata"] |= {key: value for key, value in parts.items() if value}
    return record


def from_label_studio(row: Values) -> Iterator[dict[str, Any]]:
    """One ranking per annotation that judges; one without a judgement if the task has no annotation.

    Annotations without a judgement (skipped, empty, or of which no response can be told) are named in the metadata of the
    task's other records, under `skipped_by`, what they said under `unread`; a task that has no others is rejected.
    Predictions are kept in the metadata and judge nothing.
    """
    if all(key in row for key in _FLAT):
        yield _from_flat(row)
        return
    if not isinstance(row.get("data"), dict):  # a task file without the wrapping `data`
        row = {"data": other_keys(row, "id")} | ({"id": row["id"]} if "id" in row else {})
    annotations: Any = row.get("annotations") or []
    require(annotations == [] or is_list(annotations, dict), "annotations", annotations, "a list of objects")
    for annotation in annotations:
        results = annotation.get("result")
        require(isinstance(results, list), "annotations", annotation, "objects with a list result")
        for result in results:
            fits = isinstance(result, dict) and isinstance(result.get("value"), dict)
            require(fits, "result", result, "an object with value")
    task = task_fields(row["data"], [name for a in annotations for result in a["result"] for name in _targets(result)])
    about = without_empty(other_keys(row, "data", "annotations"))
    if not annotations:
        record = _record(task, Judgement())
        yield record | {"metadata": record["metadata"] | ({"task": about} if about else {})}
        return
    skipped: list[str] = []
    unread: dict[str, Any] = {}
    judged: list[tuple[Values, Judgement]] = []
    for annotation in annotations:
        said = Judgement()
        for result in [] if annotation.get("was_cancelled") else annotation["result"]:
            _read_result(result, task, said)
        if said.is_judgement:
            judged.append((annotation, said))
            continue
        skipped.append(_labeler_of(annotation) or "unknown")
        unread |= {skipped[-1]: said.other} if said.other else {}
    if not judged:
        wanted = f"a ranking, or a choice or rating whose control names one of {', '.join(task.keys)}"
        require(not unread, "result", unread, wanted)
        wanted = "a judgement: label the task or leave it out of the export"
        raise BadRow("annotations", f"got {len(skipped)} that were skipped or left empty, want {wanted}")
    for annotation, said in judged:
        yield _annotated(annotation, _record(task, said), task=about, skipped_by=skipped, unread=unread)


def _from_flat(row: Values) -> dict[str, Any]:
    """The one annotation of a row of JSON-MIN or CSV, whose keys mix the task's data with the controls.

    A control is a list of objects as {"selected": "left"}, or a text that says which response is better. CSV writes lists
    as JSON text.
    """
    values = (
        {key: _unpacked(value) for key, value in row.items()} if isinstance(row["annotation_id"], str) else dict(row)
    )
    data = other_keys(values, "id", *_FLAT, "created_at", "updated_at")
    controls = {key: value for key, value in data.items() if _is_control(value)}
    data = other_keys(data, *controls)
    if _is_own(data):
        data |= {side: "" for side in ("left", "right") if side in data and data[side] is None}  # an empty cell
    task = task_fields(data)
    if "data" in task.rest:
        task.rest["data"] = without_empty(task.rest["data"])  # CSV has a cell for every control
    judgement = Judgement()
    for control, value in controls.items():
        _read_result({"from_name": control, "value": value[0]}, task, judgement)
    for control, value in (other_keys(data, *_OWN_KEYS) if _is_own(data) else task.rest.get("data", {})).items():
        if isinstance(value, str) and (ranking := _preferred(value, task)) is not None:
            judgement.rank(ranking, control)
    if not judgement.is_judgement:
        wanted = "left or right, an order, a rating or a choice: export as JSON"
        raise BadRow("", f"got the keys {shown(list(row), 200)}, found no judgement among them, want {wanted}")
    annotation = {"completed_by": values["annotator"], "id": values["annotation_id"]}
    annotation |= {key: values.get(key) for key in ("created_at", "updated_at")}
    annotation["lead_time"] = as_number(values["lead_time"])
    return _annotated(annotation, _record(task, judgement), task=without_empty({"id": values.get("id")}))


def _unpacked(value: Any) -> Any:
    """A cell of CSV that holds an object or a list of objects, as these; any other as it is."""
    parsed = as_json(value)
    objects = parsed if isinstance(parsed, list) else [parsed]
    return parsed if objects and all(isinstance(one, dict) for one in objects) else value


def _is_control(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and any(kind in first for kind in _VALUES) and "id" not in first
