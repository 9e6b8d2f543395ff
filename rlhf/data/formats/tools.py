"""Exports of labelling tools: Label Studio and Argilla.

Label Studio's JSON exports and task files, with pairwise, ranker, rating and choices interfaces: one annotation is one record; a
skipped one is no judgement. A task without any annotation is a ranking still to be made. Tasks that `rlhf sample` wrote keep their
ids. Other tasks have the prompt under one of PROMPTS, and the responses as a list `responses`, under `answer1`, `answer2`, … as in
Label Studio's own templates, or as one `response`. The import joins the pairs of one item.

Argilla's records (version 2): the `fields` that annotators saw, and under `responses` the annotators' answers to each question.
An export states neither the role of a field nor the kind of a question, so their names decide:

- fields named response, reply, answer, completion, output, generation or summary, perhaps followed by a number or a letter,
  are the responses; a field with a chat is the prompt's turns, and its last answer the response if no field is one; all
  other fields are the prompt, separated by blank lines.
- over several responses: a ranking, the name of one (the best), a word such as "tie", a number under a question named
  best, better, choose or prefer, or ratings under questions that name the response each is about.
- over one response: a number is its rating; labels are flags. Without a response: a text is a demonstration.

One record per annotator and question. Answers that judge nothing stay under `metadata`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf.data.formats.shapes import (
    TIE,
    BadRow,
    Values,
    as_number,
    chat_turns,
    fits_scale,
    is_chat,
    is_list,
    is_text,
    judged,
    last_answer,
    name_end,
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
_RESPONSE = re.compile(
    r"(?:^|[-_ .])(?:response|reply|answer|completion|output|generation|summary)[-_ .]?(\d+|[a-z])?$", re.I
)
_NAMES_ONE = re.compile(r"best|choose|choice|chosen|preferred", re.I)
_CHOICE = re.compile(r"best|better|choose|choice|prefer|chosen", re.I)
_COMMENT = re.compile(r"comment|feedback|expla|reason|rationale|note|correct|critique|text", re.I)


# --- a Label Studio task's prompt and responses ----------------------------------------------------------------------


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
    """A task that `rlhf sample` wrote: its keys are those of `label_studio_tasks`."""
    if isinstance(data.get("responses"), list):
        texts: dict[Any, Any] = {one["id"]: one["body"] for one in data["responses"]}
        keys = list(texts)
    else:
        keys = ["left", "right"]
        texts = {data.get(f"{side}_id"): data.get(side) or "" for side in keys}
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


@dataclass(slots=True)
class Judgement:
    """One annotation's judgements, by response id."""

    ranking: list[list[str]] | None = None
    scores: dict[str, float] = field(default_factory=dict)
    flags: dict[str, list[str]] = field(default_factory=dict)
    other: dict[str, list[Any]] = field(default_factory=dict)  # {control: values} that judge no response

    def rank(self, ranking: list[list[str]]) -> None:
        both = [self.ranking, ranking]
        require(self.ranking in (None, ranking), "result", both, "one judgement: remove the other")
        self.ranking = ranking


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
    value, control, target = result["value"], str(result.get("from_name", "")), result.get("to_name")
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
        judgement.rank(judged(["left", "right"].index(value["selected"]), task.ids)["ranking"])
    elif isinstance(order, list):
        unknown = [str(name) for name in order if str(name) not in task.ids]
        require(not unknown, "value.ranker", unknown, f"the task's responses, {', '.join(task.ids)}")
        judgement.rank([[str(name)] for name in order])
    elif "choices" in value:
        choices = value["choices"]
        require(choices == [] or is_list(choices, str), "value.choices", choices, "a list of strings")
        compares = named is None or target not in task.keys  # a control beside all responses may be called q1
        compares &= not choices[:1] or not choices[0].isdecimal() or bool(_CHOICE.search(control))  # else a scale
        ranking = _preferred(choices[0], task) if len(choices) == 1 and compares else None
        if ranking is not None:
            judgement.rank(ranking)
        elif about:
            judgement.flags.setdefault(about, []).extend(choices)
        else:
            judgement.other.setdefault(control, []).extend(choices)
    elif about and (given := as_number(value.get("rating", value.get("number")))) is not None:
        judgement.scores[about] = given
    else:
        judgement.other.setdefault(control, []).append(value)


# --- Label Studio's records ------------------------------------------------------------------------------------------


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
    scores, in_scale = judgement.scores, fits_scale(judgement.scores)
    by_scores = ranking_of(scores, best="highest") if len(scores) > 1 else None
    rest = other_keys(annotation, "result", "completed_by", "lead_time", "created_at", "unique_id")
    parts = parts | {"scores": {} if in_scale else scores, "results": judgement.other}
    return {
        "kind": "ranking",
        "id": annotation.get("unique_id") or None,
        "prompt": task.prompt,
        "responses": task.responses,
        "ranking": judgement.ranking or by_scores,
        "ratings": scores if in_scale else {},
        "flags": judgement.flags,
        "labeler": _labeler_of(annotation),
        "seconds": as_number(annotation.get("lead_time")),
        "created": annotation.get("created_at"),
        "metadata": task.rest | without_empty(parts | {"annotation": without_empty(rest)}),
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
        yield _record(task, Judgement(), {}, {"task": about})
        return
    skipped: list[str] = []
    unread: dict[str, Any] = {}
    judgements: list[tuple[Values, Judgement]] = []
    for annotation in row["annotations"]:
        said = Judgement()
        for result in [] if annotation.get("was_cancelled") else annotation["result"]:
            _read_result(result, task, said)
        if said.ranking or said.scores or said.flags:
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


# --- Argilla ---------------------------------------------------------------------------------------------------------


def _prompt_and_responses(fields: Values) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """The prompt, the responses by field name, and what is neither."""
    named = {key: value for key, value in fields.items() if isinstance(value, str) and _RESPONSE.search(key)}
    others = other_keys(fields, *named)
    chat = next((key for key, value in others.items() if is_chat(value)), None)
    if chat is None:
        texts = {key: value for key, value in others.items() if isinstance(value, str)}
        return "\n\n".join(text for text in texts.values() if text.strip()), named, other_keys(others, *texts)
    turns = chat_turns(others.pop(chat), f"fields.{chat}")
    if not named and turns[-1]["role"] == "assistant":
        turns, answer = last_answer(turns, f"fields.{chat}")
        named = {chat: answer["content"]}
    return turns, named, others


def _order(question: str, value: Any, names: list[str]) -> dict[str, Any] | None:
    """The order that one answer gives to several responses, as `ranking` or `pairs`; None if it gives none."""
    if isinstance(value, list):  # options in their order
        places = [response_named(option, names) for option in value]
        whole = len(value) > 1 and len({*places, None}) == len(value) + 1
        return {"ranking": [[names[place]] for place in places if place is not None]} if whole else None
    if isinstance(value, str):
        winner = response_named(value, names)
        if winner is None and read_phrase(value, len(names)) == TIE:
            winner = TIE
        return None if winner is None else judged(winner, names)
    if _NAMES_ONE.search(question) and value in range(1, len(names) + 1):  # of "preference" it may be a scale's
        return judged(int(value) - 1, names)
    return None


def _numbers(answers: Values) -> dict[str, Any]:
    return {q: value for q, value in answers.items() if not isinstance(value, str) and as_number(value) is not None}


def _orders(answers: Values, names: list[str]) -> Iterator[dict[str, Any]]:
    """One part of a record for each question that orders several responses, and for each set of ratings."""
    ratings_of: dict[str, dict[str, float]] = {}  # by what is rated: the question's name without its response
    for question, value in _numbers(answers).items():
        if (place := response_named(question, names)) is not None:
            name = names[place]
            part = re.escape(name) if name.lower() in question.lower() else re.escape(name_end(question)) + "$"
            stem = re.sub(part, "", question, flags=re.I).strip("-_ .") or "rating"
            ratings_of.setdefault(stem, {})[name] = value
    for stem, ratings in ratings_of.items():
        if len(ratings) > 1:
            said = {"ratings": ratings} if fits_scale(ratings) else {}
            metadata = {"question": stem} if said else {"question": stem, "scores": ratings}
            yield {"ranking": ranking_of(ratings, best="highest"), **said, "metadata": metadata}
    for question, value in answers.items():
        if not _COMMENT.search(question) and (made := _order(question, value, names)) is not None:
            yield {**made, "metadata": {"question": question}}


def _verdict(answers: Values, name: str) -> Iterator[dict[str, Any]]:
    """The rating and the flags of a single response, if there are any."""
    numbers = _numbers(answers)
    overall = {q: value for q, value in numbers.items() if "overall" in q.lower()} or numbers
    labels = [value if isinstance(value, list) else [value] for q, value in answers.items() if not _COMMENT.search(q)]
    flags = [label for one in labels if all(map(is_text, one)) for label in one]
    ratings = {name: next(iter(overall.values()))} if len(overall) == 1 and fits_scale(overall) else {}
    if numbers or flags:
        yield {"ratings": ratings, "flags": {name: flags} if flags else {}, "metadata": {}}


def _judgements(answers: Values, responses: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    names = list(responses)
    if not names:
        texts = {question: value for question, value in answers.items() if is_text(value)}
        written = {q: v for q, v in texts.items() if _RESPONSE.search(q)} or texts
        if len(written) == 1:
            [(question, text)] = written.items()
            yield {"kind": "demonstration", "response": text, "metadata": {"question": question}}
        return
    listed = [{"id": name, "text": text} for name, text in responses.items()]
    for one in _orders(answers, names) if len(names) > 1 else _verdict(answers, names[0]):
        yield {"kind": "ranking", "responses": listed, **one}


def from_argilla(row: Values) -> Iterator[dict[str, Any]]:
    """One record for each annotator and question that judges; the answers are kept under `metadata.answers`."""
    prompt, responses, rest = _prompt_and_responses(row["fields"])
    answers_of: dict[Any, dict[str, Any]] = {}  # by annotator, else by position
    for question, given in row["responses"].items():
        for i, answer in enumerate(given):
            answers_of.setdefault(answer.get("user_id") or i, {})[question] = answer["value"]
    made = {annotator: list(_judgements(answers, responses)) for annotator, answers in answers_of.items()}
    left_out = {str(annotator): answers_of[annotator] for annotator, judgements in made.items() if not judgements}
    if len(left_out) == len(made):
        came = ", ".join(str(list(answers)) for answers in left_out.values()) or "none"
        wanted = f"one that judges {', '.join(responses) or 'or gives a response'}: label the record or remove it"
        raise BadRow("responses", f"got {came}, want {wanted}")
    about = without_empty(other_keys(row, "fields", "responses", "id"))
    common = without_empty({"record": about, "fields": without_empty(rest), "left_out": left_out, "id": row.get("id")})
    for annotator, judgements in made.items():
        labeler = None if isinstance(annotator, int) else annotator
        for one in judgements:
            metadata = one["metadata"] | {"answers": answers_of[annotator]} | common
            yield {**one, "prompt": prompt, "labeler": labeler, "metadata": metadata}
