"""Argilla's exports: fields that annotators saw, and each annotator's answers to the questions about them.

Read are records with `fields` and `responses` (of versions 1 and 2, the server's own included) and the flat rows of its
data sets ({question: [{user_id, value, status}]}, or the columns `question.responses`, `question.responses.users`,
`question.responses.status`). An export says neither what a field is nor which kind a question has, so names decide:

- fields named response, reply, answer, completion, output, generation, candidate or summary, with a number or a letter
  behind, are the responses; a field with a chat is the prompt's turns, and its last answer the response if no field is
  one; all other fields are the prompt, a blank line apart.
- over several responses: a ranking, the name of one (the best), a word such as "tie", a number under a question named
  best, better, choose or prefer, or ratings under questions that name the response each is about.
- over one response: a number is its rating; labels are flags; texts are comments. Without a response: a text is a
  demonstration.

One record per annotator and question. Answers that were not submitted, or judge nothing, stay under `metadata`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf.data.formats.shapes import (
    BadRow,
    Values,
    best_of,
    chat_turns,
    id_and_rest,
    is_chat,
    is_list,
    is_number,
    is_text,
    last_answer,
    other_keys,
    ranking_of,
    require,
)

_RESPONSE = re.compile(
    r"(?:^|[-_ .])(?:response|reply|answer|completion|output|generation|candidate|summary)[-_ .]?(\d+|[a-z])?$", re.I
)
_CHOICE = re.compile(r"best|better|choose|choice|prefer|chosen", re.I)
_COMMENT = re.compile(r"comment|feedback|explan|expla|reason|rationale|note|correct|critique|text", re.I)
_TIES = ("tie", "equal", "same", "both", "neither", "none", "no preference")
_OWN = ("id", "external_id", "_server_id", "status", "metadata", "vectors", "suggestions", "inserted_at", "updated_at")
_PARTS = {"user_id", "value", "status"}  # of a flat answer

Answers = dict[str, Any]  # by question


@dataclass(slots=True)
class _Annotator:
    """What one annotator gave for one record."""

    labeler: str | None
    status: str = "submitted"
    created: str | None = None
    answers: Answers = field(default_factory=dict)

    def left_out(self) -> dict[str, Any]:
        return {"labeler": self.labeler, "status": self.status, "answers": self.answers}


def _flat_answers(row: Values, key: str) -> list[dict[str, Any]] | None:
    """The answers under one key of a flat row; None if the key is no question."""
    value = row[key]
    if f"{key}.users" in row:
        if not key.endswith(".responses") or not isinstance(value, list):
            return None
        status = row.get(f"{key}.status") or [None] * len(value)
        columns: Any = {"value": value, "user_id": row[f"{key}.users"], "status": status}
    elif isinstance(value, dict) and value.keys() >= _PARTS:
        columns = value
    else:
        return value if is_list(value, dict) and all(one.keys() >= _PARTS for one in value) else None
    if not all(isinstance(column, list) for column in columns.values()) or len(set(map(len, columns.values()))) > 1:
        return None
    return [dict(zip(columns, one, strict=True)) for one in zip(*columns.values(), strict=True)]


def is_argilla(row: Values) -> str | None:
    if "kind" in row:
        return None
    if isinstance(row.get("fields"), dict) and isinstance(row.get("responses"), list | dict):
        return "keys fields and responses"
    question = next((key for key in row if _flat_answers(row, key)), None)
    return f"key {question} holds annotators' answers" if question else None


def _read(row: Values) -> tuple[dict[str, Any], list[tuple[str, list[Any]]], dict[str, Any]]:
    """The fields, (question, answers) pairs, and what else the row has; answers that name their questions are under ""."""
    if "fields" in row:
        fields, given = row["fields"], row.get("responses") or []
        require(isinstance(fields, dict), "fields", fields, "{name: text}")
        nested = list(given.items()) if isinstance(given, dict) else [("", given)]
        return fields, nested, other_keys(row, "fields", "responses")
    found = {key: answers for key in row if (answers := _flat_answers(row, key)) is not None}
    used = {part for key in found for part in (key, f"{key}.users", f"{key}.status")}
    fields = {
        key: value
        for key, value in row.items()
        if key not in used
        and key not in _OWN
        and (isinstance(value, str) or is_chat(value))
        and not re.search(r"[.-]suggestion([.-]|$)|^(metadata|vectors)\.", key)
    }
    questions: list[tuple[str, list[Any]]] = [(key.removesuffix(".responses"), found[key]) for key in found]
    return fields, questions, other_keys(row, *used, *fields)


def _annotators(questions: list[tuple[str, list[Any]]]) -> list[_Annotator]:
    annotators: dict[Any, _Annotator] = {}  # by name, else by position
    for question, answers in questions:
        require(isinstance(answers, list), "responses", answers, "a list of answers")
        for i, answer in enumerate(answers):
            require(isinstance(answer, dict), "responses", answer, "{user_id, value or values}")
            user = answer.get("user_id")
            labeler = user if isinstance(user, str) and user not in ("", "None") else None
            annotator = annotators.setdefault(labeler or i, _Annotator(labeler))
            annotator.status = str(answer.get("status") or annotator.status)
            annotator.created = answer.get("updated_at") or answer.get("inserted_at") or annotator.created
            values = answer.get("values") if "values" in answer else {question: {"value": answer.get("value")}}
            require(isinstance(values, dict), "responses", values, "values by question")
            for name, value in values.items():
                annotator.answers[name] = value["value"] if isinstance(value, dict) and "value" in value else value
    return list(annotators.values())


def _prompt_and_responses(fields: Values) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """The prompt, the responses by field name, and what is neither."""
    named = {key: value for key, value in fields.items() if isinstance(value, str) and _RESPONSE.search(key)}
    others = {key: value for key, value in fields.items() if key not in named and value is not None}
    chat = next((key for key, value in others.items() if is_chat(value)), None)
    if chat is None:
        texts = {key: value for key, value in others.items() if isinstance(value, str)}
        return "\n\n".join(text for text in texts.values() if text.strip()), named, other_keys(others, *texts)
    turns = chat_turns(others.pop(chat), f"fields.{chat}")
    if not named and turns[-1]["role"] == "assistant":
        turns, answer = last_answer(turns, f"fields.{chat}")
        named = {chat: answer["content"]}
    return turns, named, others


def _suffix(name: str) -> str:
    match = re.search(r"(?:^|[-_ .])?(\d+|(?<![a-z])[a-z])$", name.strip(), re.I)
    return match.group(1).lower() if match else ""


def _about(text: Any, names: list[str]) -> str | None:
    """The response that an option or a question's name means: by its name, else by its number or letter."""
    if not isinstance(text, str):
        return None
    exact = [name for name in names if name.lower() == text.strip().lower()]
    alike = exact or [name for name in names if _suffix(name) and _suffix(name) == _suffix(text)]
    return alike[0] if len(alike) == 1 else None


def _order(question: str, value: Any, names: list[str]) -> dict[str, Any] | None:
    """The order that one answer gives to several responses, as `ranking` or `pairs`; None if it gives none."""
    best: str | None = None
    if isinstance(value, list) and value:
        ranked = all(isinstance(v, dict) and "value" in v for v in value)
        ranks: list[Any] = [v.get("rank") for v in value] if ranked else list(range(1, len(value) + 1))
        options: list[Any] = [_about(v["value"] if ranked else v, names) for v in value]
        if None in options or len(set(options)) < max(2, len(options)) or not all(map(is_number, ranks)):
            return None
        return {"ranking": ranking_of(dict(zip(options, ranks, strict=True)), best="lowest")}
    if isinstance(value, str):
        if value.strip().lower() in _TIES:
            return {"ranking": [names]}
        best = _about(value, names)
    elif is_number(value) and _CHOICE.search(question) and value in range(1, len(names) + 1):
        best = names[int(value) - 1]
    return None if best is None else best_of(best, names)


def _orders(answers: Answers, names: list[str]) -> Iterator[dict[str, Any]]:
    """One part of a record for each question that orders several responses, and for each set of ratings."""
    ratings_of: dict[str, dict[str, float]] = {}  # by what is rated: the question's name without its response
    for question, value in answers.items():
        within = [name for name in names if name.lower() in question.lower()]
        name = within[0] if len(within) == 1 else _about(question, names)
        if name is None or not is_number(value):
            continue
        part = re.escape(name) if within else re.escape(_suffix(question)) + "$"
        stem = re.sub(part, "", question, flags=re.I).strip("-_ .") or "rating"
        ratings_of.setdefault(stem, {})[name] = value
    for stem, ratings in ratings_of.items():
        if len(ratings) < 2:
            continue
        order = {"ranking": ranking_of(ratings, best="highest")}
        if _in_scale(ratings):
            yield {**order, "ratings": ratings, "metadata": {"question": stem}}
        else:
            yield {**order, "metadata": {"question": stem, "scores": ratings}}
    for question, value in answers.items():
        if (made := _order(question, value, names)) is not None:
            yield {**made, "metadata": {"question": question}}


def _in_scale(ratings: Mapping[str, float]) -> bool:
    return all(1 <= rating <= 7 for rating in ratings.values())


def _verdict(answers: Answers, name: str) -> dict[str, Any] | None:
    """The rating and the flags of a single response."""
    numbers = {question: value for question, value in answers.items() if is_number(value)}
    overall = {q: v for q, v in numbers.items() if re.search("overall", q, re.I)} or numbers
    made: dict[str, Any] = {}
    if len(overall) == 1 and _in_scale(overall):
        made["ratings"] = {name: next(iter(overall.values()))}
    flags: list[str] = []
    for question, value in answers.items():
        labels = value if isinstance(value, list) else [value]
        if not _COMMENT.search(question) and all(is_text(label) for label in labels):
            flags += labels
    made |= {"flags": {name: flags}} if flags else {}
    return made or ({} if numbers else None)


def _records_of(annotator: _Annotator, responses: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    names = list(responses)
    judged = {
        "kind": "ranking",
        "responses": [{"id": name, "text": text} for name, text in responses.items()],
        "created": annotator.created,
    }
    if not names:
        texts = {question: value for question, value in annotator.answers.items() if is_text(value)}
        written = {q: v for q, v in texts.items() if _RESPONSE.search(q)} or texts
        if len(written) == 1:
            [(question, text)] = written.items()
            yield {"kind": "demonstration", "response": text, "metadata": {"question": question}}
    elif len(names) > 1:
        yield from ({**judged, **order} for order in _orders(annotator.answers, names))
    elif (verdict := _verdict(annotator.answers, names[0])) is not None:
        yield {**judged, **verdict, "metadata": {}}


def from_argilla(row: Values) -> Iterator[dict[str, Any]]:
    """One record for each annotator and question that judges; the answers are kept under `metadata.answers`."""
    fields, questions, about = _read(row)
    annotators = _annotators(questions)
    prompt, responses, rest = _prompt_and_responses(fields)
    submitted = [annotator for annotator in annotators if annotator.status == "submitted"]
    if not submitted:
        came = ", ".join(sorted({annotator.status for annotator in annotators})) or "none"
        raise BadRow("responses", f"got {came}, want a submitted answer: label the record or remove it")
    records = []
    left_out = [annotator.left_out() for annotator in annotators if annotator.status != "submitted"]
    for annotator in submitted:
        judgements = list(_records_of(annotator, responses))
        left_out += [] if judgements else [annotator.left_out()]
        for judgement in judgements:
            judgement["metadata"]["answers"] = annotator.answers
            records.append({**judgement, "prompt": prompt, "labeler": annotator.labeler})
    if not records:
        asked = ", ".join(dict.fromkeys(question for annotator in submitted for question in annotator.answers))
        held = f"fields {', '.join(fields)}; questions {asked}"
        raise BadRow("responses", f"no answer judges a response ({held}): rename them as the format's file says")
    name, _ = id_and_rest(row, ids=("id", "external_id"))
    about = {key: value for key, value in about.items() if value not in (None, {}, [])}
    common = {"record": about, "fields": rest, "left_out": left_out}
    for i, record in enumerate(records):
        record["metadata"] |= {key: value for key, value in common.items() if value}
        yield {"id": name if name is None or len(records) == 1 else f"{name}.{i}", **record}
