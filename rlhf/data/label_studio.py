"""The prompt and responses of a Label Studio task, and the meaning of an annotation's results.

`task_fields` finds the prompt and the responses among the keys of a task, `read_result` reads one result.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf.data.conversion.foreign import chat_turns, is_list, is_number, is_text, require
from rlhf.data.conversion.verdicts import Verdict, ordered, read_phrase
from rlhf.data.importers import BadRow, other_keys
from rlhf.data.records import shown

PROMPT_KEYS = (
    "prompt", "instruction", "question", "query", "input", "user_input", "request", "context", "messages", "dialogue",
    "conversation", "source", "article", "task", "text",
)  # fmt: skip
LIST_KEYS = ("responses", "answers", "items", "candidates", "completions", "generations", "outputs", "options")
SINGLE_KEYS = ("response", "answer", "completion", "output")
RESPONSE_STEMS = {*SINGLE_KEYS, "text", "generation", "candidate", "reply", "summary", "option", "result"}
SIDES = (("left", "right"), ("first", "second"))
TEXT_KEYS = ("body", "text", "content", "response", "html", "title")  # of one response in a list
VALUES = ("selected", "ranker", "rating", "number", "choices")  # keys of a result's value
SIDES_OF_TWO = (("left", "first", "one"), ("right", "second", "two"))


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


def is_own(data: Mapping[str, Any]) -> bool:
    """Whether `rlhf sample` wrote a task: its keys are those of `tasks.label_studio_tasks`."""
    return (
        isinstance(data.get("item"), str)
        and isinstance(data.get("dialogue"), list)
        and (isinstance(data.get("responses"), list) or {"left", "right", "left_id", "right_id"} <= set(data))
    )


def own_task(data: Mapping[str, Any]) -> Task:
    """A task that `rlhf sample` wrote. Raises: BadRow if its responses lack an id or a text."""
    named_texts: list[tuple[Any, Any]]
    if isinstance(data.get("responses"), list):
        named_texts = [(r.get("id"), r.get("body")) if isinstance(r, dict) else (None, r) for r in data["responses"]]
        keys = [str(name) for name, _ in named_texts]
    else:
        keys = ["left", "right"]
        named_texts = [(data[f"{side}_id"], data[side]) for side in keys]
    about, metadata = (value if isinstance(value := data.get(key), dict) else {} for key in ("about", "metadata"))
    responses: list[dict[str, Any]] = []
    for name, text in named_texts:
        if not isinstance(name, str) or not isinstance(text, str):
            raise BadRow("data", f"got a response {shown({'id': name, 'body': text})}, want an id and a text")
        known = about.get(name)
        responses.append({"id": name, "text": text} | (dict(known) if isinstance(known, dict) else {}))
    return Task(data["dialogue"], responses, keys, dict(metadata) | {"item": data["item"]})


def listed_responses(listed: Sequence[Any], key: str) -> Task:
    """Responses of a list: strings, or objects with an id and a text. Raises: BadRow."""
    responses = []
    for number, one in enumerate(listed, 1):
        response: dict[str, Any] = {"id": str(number), "text": one}
        if isinstance(one, dict):
            under = next((k for k in TEXT_KEYS if isinstance(one.get(k), str)), None)
            response = {"id": str(one.get("id", number)), "text": one.get(under)}
            if rest := other_keys(one, "id", str(under)):
                response["metadata"] = rest
        require(isinstance(response["text"], str), f"data.{key}", one, "a string, or an object with id and body")
        responses.append(response)
    return Task(None, responses, [response["id"] for response in responses])


def numbered_keys(data: Mapping[str, Any]) -> list[str]:
    """Keys that differ in a number or letter at their end, as answer1 and answer2, or in their side; [] without such."""
    stems: dict[str, dict[str, str]] = {}
    for key, value in data.items():
        match = re.fullmatch(r"(.*[a-zA-Z])[ _-]?(\d+)|(.+)[ _-]([a-zA-Z])", key)
        if match and isinstance(value, str):
            stems.setdefault((match[1] or match[3]).lower(), {})[(match[2] or match[4]).lower()] = key
    groups = {stem: ends for stem, ends in stems.items() if len(ends) > 1 and {"0", "1", "a"} & set(ends)}
    likely = [stem for stem in groups if len(groups) == 1 or stem in RESPONSE_STEMS]
    if len(likely) == 1:
        ends = groups[likely[0]]
        return [ends[end] for end in sorted(ends, key=lambda end: (len(end), end))]
    if not groups:
        for sides in SIDES:
            if all(isinstance(data.get(side), str) for side in sides):
                return list(sides)
    return []


def task_fields(data: Mapping[str, Any], named: Sequence[str] = ()) -> Task:
    """The prompt and the responses of a task's `data`.

    Responses are the first of these that there is: two or more keys that the results name (by toName or as
    `$variable`); a list under one of LIST_KEYS or of the named keys; keys that differ in a number or letter at the end,
    or left and right; one key that the results name; one of SINGLE_KEYS. Keys that differ only at their end stay together,
    so that a response which nobody judged is not lost. The prompt is the first of PROMPT_KEYS among
    the other keys, else the only other text.

    Raises: BadRow that names what was seen.
    """
    if is_own(data):
        return own_task(data)
    is_prompt = {key for key in data if key.lower() in PROMPT_KEYS}
    texts = [key for key in dict.fromkeys(named) if isinstance(data.get(key), str) and key not in is_prompt]
    listing = next(
        (key for key in (*named, *LIST_KEYS) if isinstance(data.get(key), list) and key not in is_prompt), ""
    )
    if len(texts) < 2 and listing:
        task, used = listed_responses(data[listing], listing), [listing]
    else:
        numbered = numbered_keys(data)
        if len(texts) < 2 or set(texts) < set(numbered):
            single = [key for key in SINGLE_KEYS if isinstance(data.get(key), str)]
            texts = numbered or texts or single[:1]
        task = Task(None, [{"id": key, "text": data[key]} for key in texts], texts)
        used = texts
    left = {key: value for key, value in data.items() if key not in used}
    candidates = [(PROMPT_KEYS.index(key.lower()), key) for key in is_prompt if isinstance(left.get(key), str | list)]
    plain = [key for key, value in left.items() if is_text(value)]
    asked = min(candidates)[1] if candidates else plain[0] if len(plain) == 1 else None
    if asked is None or not task.responses:
        what = "prompt" if task.responses else "responses"
        wanted = "the prompt under prompt and the responses under answer1, answer2, … or in a list responses"
        raise BadRow("data", f"got the keys {shown(list(data), 200)}, found no {what}, want {wanted}: rename the keys")
    rest = {key: value for key, value in left.items() if key != asked}
    task.prompt = chat_turns(left[asked], f"data.{asked}") if isinstance(left[asked], list) else left[asked]
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


def _marks(task: Task) -> list[set[str]]:
    """The names of each response, in lower case: its key or id, and its position if no other response has that name."""
    names_of = [{key.lower(), name.lower()} for key, name in zip(task.keys, task.ids, strict=True)]
    taken = set().union(*names_of)
    places = [{str(i + 1), chr(ord("a") + i), *(SIDES_OF_TWO[i] if i < 2 else ())} for i in range(len(names_of))]
    return [names | (place - taken) for names, place in zip(names_of, places, strict=True)]


def named_response(control: str, task: Task, *, glued: bool = True) -> str | None:
    """The response that a control's name refers to: it contains its key (answer1_rating), or ends or begins with a mark of it.

    The mark is a word of its own (rating_a, left-flags); `glued` allows a number right after a word too (rating2).
    """
    words = re.findall(r"[a-z]+|\d+", control.lower())
    ends = re.split(r"[ _\-]+", control.lower())
    told = {ends[0], ends[-1]} if len(ends) > 1 else set()
    if glued and len(words) > 1 and words[-1].isdecimal():
        told.add(words[-1])
    meant = []
    for key, name, marks in zip(task.keys, task.ids, _marks(task), strict=True):
        parts = re.findall(r"[a-z]+|\d+", key.lower())
        if told & marks or any(words[i : i + len(parts)] == parts for i in range(len(words))):
            meant.append(name)
    return meant[0] if len(meant) == 1 else None


def preferred(choice: str, task: Task) -> list[list[str]] | None:
    """The ranking of two responses that a choice states ("A", "response 2 is better", "tie"); None if it states none."""
    if len(task.responses) != 2:
        return None
    named = [i for i, marks in enumerate(_marks(task)) if choice.strip().lower() in marks]
    verdict = Verdict(named[0]) if named else read_phrase(choice, 2)
    return None if verdict is None else ordered(verdict.winner, task.ids)


def usable_number(value: Any) -> float | None:
    """A number unchanged; None for anything else, including infinite and enormous numbers."""
    return value if is_number(value) and abs(value) < 1e300 else None


def read_ranker(ranker: Any, control: str, task: Task, judgement: Judgement) -> None:
    """A sorted list is a ranking; several buckets, whose order an export does not state, become flags. Raises: BadRow."""
    columns = {control: ranker} if isinstance(ranker, list) else ranker
    fits = isinstance(columns, dict) and all(isinstance(ids, list) for ids in columns.values())
    require(fits, "value.ranker", ranker, "lists of response ids")
    known = set(task.ids)
    for name in (str(name) for ids in columns.values() for name in ids):
        if name not in known:
            raise BadRow("value.ranker", f"got {shown(name)}, the task's responses are {', '.join(task.ids)}")
    if control in columns or len(columns) == 1:
        order = columns.get(control, next(iter(columns.values())))
        if order:
            judgement.rank([[str(name)] for name in order], control)
        return
    for bucket, ids in columns.items():
        for name in ids if bucket != "_" else []:
            judgement.flags.setdefault(str(name), []).append(str(bucket))


def read_choices(choices: Any, control: str, targets: Sequence[str], task: Task, judgement: Judgement) -> None:
    """Choices: which of two responses is better, else flags of the response that the control is about. Raises: BadRow."""
    require(choices == [] or is_list(choices, str), "value.choices", choices, "a list of strings")
    about = named_response(control, task, glued=False)
    if about is None and len(choices) == 1 and (ranking := preferred(choices[0], task)) is not None:
        judgement.rank(ranking, control)
        return
    about = about or aimed_at(targets, task)
    if about is None:
        judgement.other.setdefault(control, []).extend(choices)
    else:
        judgement.flags.setdefault(about, []).extend(choices)


def aimed_at(targets: Sequence[str], task: Task) -> str | None:
    """The response that a result's toName is; the only one if there is just one."""
    meant = [name for key, name in zip(task.keys, task.ids, strict=True) if [key] == list(targets)]
    return meant[0] if meant else task.ids[0] if len(task.ids) == 1 else None


def read_result(result: Mapping[str, Any], task: Task, judgement: Judgement) -> None:
    """Add one result of an annotation, an object with a `value` object. Raises: BadRow."""
    value, control, kind = result["value"], str(result.get("from_name", "")), str(result.get("type", ""))
    targets = target_keys(result)
    if kind == "pairwise" or "selected" in value:
        selected = value.get("selected")
        require(selected in ("left", "right"), "value.selected", selected, "left or right")
        if len(task.responses) != 2:
            raise BadRow("data", f"got {len(task.responses)} responses in a pairwise task, want 2")
        judgement.rank(ordered(0 if selected == "left" else 1, task.ids), control)
    elif kind == "ranker" or "ranker" in value:
        read_ranker(value.get("ranker"), control, task, judgement)
    elif kind == "choices" or "choices" in value:
        read_choices(value.get("choices"), control, targets, task, judgement)
    else:
        score = usable_number(value.get("rating", value.get("number")))
        about = named_response(control, task) or aimed_at(targets, task)
        if score is None or about is None:
            judgement.other.setdefault(control, []).append(value)
        else:
            judgement.scores[about] = score


def target_keys(result: Mapping[str, Any]) -> list[str]:
    """The data keys that a result names: as `$variable` under source, and its toName, which may list several."""
    source, to_name = result.get("source"), result.get("to_name")
    names = [source.lstrip("$")] if isinstance(source, str) else []
    return names or ([name.strip() for name in to_name.split(",")] if isinstance(to_name, str) else [])
