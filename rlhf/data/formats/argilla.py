"""Argilla's records: the `fields` that annotators saw, and under `responses` each annotator's answers to the questions about them.

An export states neither the role of a field nor the kind of a question, so their names decide:

- fields named response, reply, answer, completion, output, generation or summary, perhaps followed by a number or a letter,
  are the responses; a field with a chat is the prompt's turns, and its last answer the response if no field is one; all
  other fields are the prompt, separated by blank lines.
- over several responses: a ranking, the name of one (the best), a word such as "tie", a number under a question named
  best, better, choose or prefer, or ratings under questions that name the response each is about.
- over one response: a number is its rating; labels are flags. Without a response: a text is a demonstration.

One record per annotator and question. Answers that were not submitted, or judge nothing, stay under `metadata`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data.formats.shapes import (
    TIE,
    BadRow,
    Values,
    as_number,
    chat_turns,
    fits_scale,
    id_and_rest,
    is_chat,
    is_text,
    judged,
    last_answer,
    name_end,
    other_keys,
    ranking_of,
    read_phrase,
    response_named,
    without_empty,
)

_RESPONSE = re.compile(
    r"(?:^|[-_ .])(?:response|reply|answer|completion|output|generation|summary)[-_ .]?(\d+|[a-z])?$", re.I
)
_CHOICE = re.compile(r"best|better|choose|choice|prefer|chosen", re.I)
_COMMENT = re.compile(r"comment|feedback|expla|reason|rationale|note|correct|critique|text", re.I)


def _annotators(responses: Any) -> list[dict[str, Any]]:
    """What each annotator gave for a record: labeler, status, created, and the answers by question.

    responses: a list with an annotator's answers each, or by question the annotators' answers.
    """
    questions = responses.items() if isinstance(responses, dict) else [("", responses or [])]
    annotators: dict[Any, dict[str, Any]] = {}  # by name, else by position
    for question, answers in questions:
        for i, answer in enumerate(answers):
            user = answer.get("user_id")
            labeler = user if isinstance(user, str) and user not in ("", "None") else None
            one = annotators.setdefault(
                labeler or i, {"labeler": labeler, "status": "submitted", "created": None, "answers": {}}
            )
            one["status"] = answer.get("status") or one["status"]
            one["created"] = answer.get("updated_at") or answer.get("inserted_at") or one["created"]
            values = answer["values"] if "values" in answer else {question: answer["value"]}
            for name, value in (values or {}).items():
                one["answers"][name] = value["value"] if isinstance(value, dict) and "value" in value else value
    return list(annotators.values())


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


def _about(text: Any, names: list[str]) -> str | None:
    place = response_named(text, names)
    return None if place is None else names[place]


def _order(question: str, value: Any, names: list[str]) -> dict[str, Any] | None:
    """The order that one answer gives to several responses, as `ranking` or `pairs`; None if it gives none."""
    if isinstance(value, list):  # options in their order, or each with its rank
        options = [one if isinstance(one, dict) else {"value": one, "rank": i} for i, one in enumerate(value)]
        ranks = {_about(one.get("value"), names): one.get("rank") for one in options}
        if None in ranks or len(ranks) < max(2, len(value)):
            return None
        return {"ranking": ranking_of(ranks, best="lowest")}  # type: ignore[arg-type]
    if isinstance(value, str):
        winner = response_named(value, names)
        if winner is None and read_phrase(value, len(names)) == TIE:
            winner = TIE
        return None if winner is None else judged(winner, names)
    if _CHOICE.search(question) and value in range(1, len(names) + 1):
        return judged(int(value) - 1, names)
    return None


def _numbers(answers: Values) -> dict[str, Any]:
    return {q: value for q, value in answers.items() if not isinstance(value, str) and as_number(value) is not None}


def _orders(answers: Values, names: list[str]) -> Iterator[dict[str, Any]]:
    """One part of a record for each question that orders several responses, and for each set of ratings."""
    ratings_of: dict[str, dict[str, float]] = {}  # by what is rated: the question's name without its response
    for question, value in _numbers(answers).items():
        if (name := _about(question, names)) is not None:
            part = re.escape(name) if name.lower() in question.lower() else re.escape(name_end(question)) + "$"
            stem = re.sub(part, "", question, flags=re.I).strip("-_ .") or "rating"
            ratings_of.setdefault(stem, {})[name] = value
    for stem, ratings in ratings_of.items():
        if len(ratings) > 1:
            said = {"ratings": ratings} if fits_scale(ratings) else {}
            metadata = {"question": stem} if said else {"question": stem, "scores": ratings}
            yield {"ranking": ranking_of(ratings, best="highest"), **said, "metadata": metadata}
    for question, value in answers.items():
        if (made := _order(question, value, names)) is not None:
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
    about = other_keys(row, "fields", "responses")
    records, left_out = [], []
    for annotator in _annotators(row.get("responses")):
        created, answers = annotator.pop("created"), annotator["answers"]
        made = list(_judgements(answers, responses)) if annotator["status"] == "submitted" else []
        left_out += [] if made else [annotator]
        for one in made:
            one["metadata"]["answers"] = answers
            more = {"created": created} if one["kind"] == "ranking" else {}
            records.append({**one, **more, "prompt": prompt, "labeler": annotator["labeler"]})
    if not records:
        came = ", ".join(f"{one['status']} {list(one['answers'])}" for one in left_out) or "none"
        wanted = f"a submitted one that judges {', '.join(responses) or 'or gives a response'}: label the record or remove it"
        raise BadRow("responses", f"got {came}, want {wanted}")
    name, _ = id_and_rest(row, ids=("id", "external_id"))
    common = without_empty({"record": without_empty(about), "fields": without_empty(rest), "left_out": left_out})
    for i, record in enumerate(records):
        record["metadata"] |= common
        yield {"id": name if name is None or len(records) == 1 else f"{name}.{i}", **record}
