"""Exports of labelling tools: Label Studio and Argilla.

Label Studio's JSON exports and task files, with pairwise, ranker, rating and choices interfaces: one annotation is one
record. A task without any annotation is a ranking still to be made. Tasks that `rlhf sample` wrote keep their ids.
Other tasks have the prompt under one of PROMPTS, and the responses as a list `responses`, under `answer1`, `answer2`, …
as in Label Studio's own templates, or as one `response`. The import joins the pairs of one item.

Argilla's records (version 2): the `fields` that annotators saw, and under `responses` their answers to each question.
An export states neither the role of a field nor the kind of a question, so their names decide:

- fields named response, reply, answer, completion, output, generation or summary, perhaps followed by a number or a
  letter, are the responses; a field with a chat is the prompt's turns, and its last answer the response if no field is
  one; all other fields are the prompt, separated by blank lines.
- over several responses: a ranking, a verdict (see `_winner`), or ratings under questions that name the response each
  is about.
- over one response: a number is its rating; labels are flags. Without a response: a text is a demonstration.

One record per annotator and question. Answers that judge nothing stay under `metadata`.
"""

import re
from collections.abc import Iterator
from typing import Any

from rlhf.data.formats.shapes import (
    BadRow,
    Values,
    as_number,
    chat_turns,
    is_chat,
    is_list,
    is_text,
    judged,
    judged_record,
    name_end,
    other_keys,
    ranking_of,
    read_phrase,
    require,
)
from rlhf.system.schemas import shown

PROMPTS = ("prompt", "question", "instruction")
_ANSWER = re.compile(r"(?:answer|response)[ _-]?(?:\d+|[a-z])?", re.I)
_RESPONSE = re.compile(
    r"(?:^|[-_ .])(?:response|reply|answer|completion|output|generation|summary)[-_ .]?(\d+|[a-z])?$", re.I
)
# Not "preference", of which a number that is no text may be a scale's.
_CHOICE = re.compile(r"best|better|choose|choice|chosen|preferred", re.I)
_COMMENT = re.compile(r"comment|feedback|expla|reason|rationale|note|correct|critique|text", re.I)


def _without_empty(values: Values) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None and value not in ([], {}, "")}


def _scored(scores: dict[str, float]) -> tuple[dict[str, Any], dict[str, float]]:
    """What numbers about responses say: an order if there are several, and ratings; and those that are no ratings, from 1 to 7."""
    said = {"ranking": ranking_of(scores, best="highest")} if len(scores) > 1 else {}
    if all(1 <= score <= 7 for score in scores.values()):
        return said | {"ratings": scores}, {}
    return said, scores


def _named(control: str, names: list[str]) -> int | None:
    """Which response a control, a question or an option means: by its name, else by the number or letter at its end."""
    low, end, every = control.strip().lower(), name_end(control), list(enumerate(names))
    ways = (
        [i for i, name in every if name.lower() == low],
        [i for i, name in every if len(name) > 1 and name.lower() in low],
        [i for i, name in every if end and name_end(name) == end],
        [i for i, _ in every if end in (str(i + 1), chr(ord("a") + i))],
    )
    found = next(filter(None, ways), [])
    return found[0] if len(found) == 1 else None


def _winner(control: str, value: Any, names: list[str]) -> int | None:
    """The response that an answer calls best, or TIE: by its name, a usual phrase, or a number if the control asks for the best one."""
    if (place := as_number(value)) is not None:
        asks = _CHOICE.search(control) or (isinstance(value, str) and "prefer" in control.lower())
        return int(place) - 1 if asks and place in range(1, len(names) + 1) else None
    if not isinstance(value, str):
        return None
    same = [i for i, name in enumerate(names) if name.lower() == value.strip().lower()]
    return same[0] if same else read_phrase(value, len(names))


def _task(data: Values) -> tuple[Any, list[dict[str, Any]], dict[str, Any]]:
    """(prompt, responses in the order shown, metadata) of a task. Raises: BadRow that names what was seen."""
    if data.keys() >= {"item", "dialogue"}:  # from `label_studio_tasks` of `rlhf sample`
        pair = [{"id": data.get(f"{side}_id"), "body": data.get(side) or ""} for side in ("left", "right")]
        listed, about = data.get("responses") or pair, data.get("about") or {}
        own = [{"id": one["id"], "text": one["body"], **(about.get(one["id"]) or {})} for one in listed]
        return data["dialogue"], own, (data.get("metadata") or {}) | {"item": data["item"]}
    if is_list(data.get("responses")):
        used = ["responses"]
        items = [one if isinstance(one, dict) else {"text": one} for one in data["responses"]]
        texts = [(item.get("id", n), item.get("body", item.get("text")), item) for n, item in enumerate(items, 1)]
        responses = [other_keys(item, "body") | {"id": str(name), "text": text} for name, text, item in texts]
    else:
        keys = (key for key, value in data.items() if isinstance(value, str) and _ANSWER.fullmatch(key))
        used = sorted(keys, key=lambda key: (len(key), key))  # answer10 after answer9
        responses = [{"id": key, "text": data[key]} for key in used]
    asked = next((key for key in PROMPTS if data.get(key)), None)
    if asked is None or not responses:
        what = "prompt" if responses else "responses"
        wanted = "the prompt under prompt and the responses under answer1, answer2, … or in a list responses"
        raise BadRow("data", f"got the keys {shown(list(data), 200)}, found no {what}, want {wanted}: rename the keys")
    prompt, rest = data[asked], other_keys(data, asked, *used)
    prompt = chat_turns(prompt, f"data.{asked}") if isinstance(prompt, list) else prompt
    return prompt, responses, {"data": rest} if rest else {}


def _read_annotation(annotation: Values, ids: list[str]) -> dict[str, Any]:
    """What an annotation says: the `order` of responses, their `scores` and `flags`; under `other`, by control, what judges none."""
    said: dict[str, Any] = {"order": {}, "scores": {}, "flags": {}, "other": {}}
    for result in [] if annotation.get("was_cancelled") else annotation.get("result", ()):
        value, control, target = result["value"], str(result.get("from_name", "")), result.get("to_name")
        named = _named(control, ids) if not control.isalpha() or control in ids else None
        aimed = ids.index(target) if target in ids else 0 if len(ids) == 1 else None
        place = aimed if named is None else named
        ranked, choices = value.get("ranker"), value.get("choices", ())
        require(not isinstance(choices, str), "value.choices", choices, "a list of strings")
        if isinstance(ranked, dict) and len(ranked) == 1:  # the one bucket of a list
            [ranked] = ranked.values()
        order: dict[str, Any] | None = None
        winner: int | None = None
        if "selected" in value:
            require(value["selected"] in ("left", "right"), "value.selected", value["selected"], "left or right")
            winner = ["left", "right"].index(value["selected"])
        elif isinstance(ranked, list):
            order = {"ranking": [[str(name)] for name in ranked]}
        elif len(choices) == 1 and len(ids) == 2 and (named is None or target not in ids):
            winner = _winner(control, choices[0], ids)
        if winner is not None:
            order = judged(winner, ids)
        if order is not None:
            both = [said["order"], order]
            require(said["order"] in ({}, order), "result", both, "one judgement: remove the other")
            said["order"] = order
        elif place is not None and choices:
            said["flags"].setdefault(ids[place], []).extend(choices)
        elif place is not None and (given := as_number(value.get("rating", value.get("number")))) is not None:
            said["scores"][ids[place]] = given
        else:
            said["other"].setdefault(control, []).extend(choices or [value])
    return said


def _labeler_of(annotation: Values) -> str | None:
    """The annotator as the export gives it: an e-mail address if there is one, else an id."""
    who = annotation.get("completed_by")
    who = (who.get("email") or who.get("id")) if isinstance(who, dict) else who
    return None if who is None else str(who)


def from_label_studio(row: Values) -> Iterator[dict[str, Any]]:
    """One ranking per annotation that judges; one without a judgement if the task has no annotation. Annotations
    without a judgement (skipped, empty, or about no response that can be identified) are listed in the metadata of the
    task's other records: the annotators under `skipped_by`, the results under `unread`.
    """
    prompt, responses, rest = _task(row["data"])
    ids = [response["id"] for response in responses]
    judging, silent = list[Any](), list[Any]()  # (annotation, what it says)
    for annotation in row.get("annotations") or [{"result": []}]:
        said = _read_annotation(annotation, ids)
        judges = said["order"] or said["scores"] or said["flags"] or not row.get("annotations")
        (judging if judges else silent).append((annotation, said))
    if not judging:
        wanted = f"a ranking, or a choice or rating whose control names one of {', '.join(ids)}"
        raise BadRow("annotations", f"got {len(silent)} that were skipped or judge nothing, want {wanted}")
    left_out = {_labeler_of(annotation) or "unknown": said["other"] for annotation, said in silent}
    about: dict[str, Any] = {"task": _without_empty(other_keys(row, "data", "annotations"))}
    about |= {"skipped_by": list(left_out), "unread": _without_empty(left_out)}
    for annotation, said in judging:
        by_scores, scores = _scored(said["scores"])
        more = other_keys(annotation, "result", "completed_by", "lead_time", "created_at", "unique_id")
        more = about | {"scores": scores, "results": said["other"], "annotation": _without_empty(more)}
        yield judged_record(
            prompt,
            responses,
            rest | _without_empty(more),
            id=annotation.get("unique_id") or None,
            **by_scores | said["order"],
            flags=said["flags"],
            labeler=_labeler_of(annotation),
            seconds=as_number(annotation.get("lead_time")),
            created=annotation.get("created_at"),
        )


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
        return turns[:-1], {chat: turns[-1]["content"]}, others
    return turns, named, others


def _demonstrations(answers: Values, _: list[str]) -> Iterator[dict[str, Any]]:
    """The text that an annotator wrote, if it is clear which one it is."""
    texts = {question: value for question, value in answers.items() if is_text(value)}
    written = {question: value for question, value in texts.items() if _RESPONSE.search(question)} or texts
    if len(written) == 1:
        [(question, text)] = written.items()
        yield {"kind": "demonstration", "response": text, "metadata": {"question": question}}


def _orders(answers: Values, names: list[str]) -> Iterator[dict[str, Any]]:
    """What each question that orders several responses says, and each set of ratings."""
    ratings_of: dict[str, dict[str, float]] = {}  # by what is rated: the question's name without its response
    for question, value in answers.items():
        place, winner = _named(question, names), _winner(question, value, names)
        if place is not None and not isinstance(value, str) and as_number(value) is not None:
            about = rf"{re.escape(names[place])}|{re.escape(name_end(question))}$"
            stem = re.sub(about, "", question, flags=re.I).strip("-_ .")
            ratings_of.setdefault(stem or "rating", {})[names[place]] = value
        elif isinstance(value, list):  # options in their order
            places = [_named(str(option), names) for option in value]
            if len(value) > 1 and len({*places, None}) == len(value) + 1:
                yield {"ranking": [[names[at]] for at in places if at is not None], "metadata": {"question": question}}
        elif winner is not None and not _COMMENT.search(question):
            yield judged(winner, names) | {"metadata": {"question": question}}
    for stem, ratings in ratings_of.items():
        if len(ratings) > 1:
            said, scores = _scored(ratings)
            yield said | {"metadata": _without_empty({"question": stem, "scores": scores})}


def _verdict(answers: Values, names: list[str]) -> Iterator[dict[str, Any]]:
    """The rating and the flags of a single response, if there are any."""
    numbers = {q: value for q, value in answers.items() if not isinstance(value, str) and as_number(value) is not None}
    overall = {q: value for q, value in numbers.items() if "overall" in q.lower()} or numbers
    labels = [value if isinstance(value, list) else [value] for q, value in answers.items() if not _COMMENT.search(q)]
    flags = [label for one in labels if all(map(is_text, one)) for label in one]
    rating = next(iter(overall.values())) if len(overall) == 1 else 0
    if numbers or flags:
        ratings = dict.fromkeys(names, rating) if 1 <= rating <= 7 else {}
        yield {"ratings": ratings, "flags": dict.fromkeys(names, flags) if flags else {}, "metadata": {}}


def from_argilla(row: Values) -> Iterator[dict[str, Any]]:
    """One record for each annotator and question that judges; the answers are kept under `metadata.answers`."""
    prompt, responses, rest = _prompt_and_responses(row["fields"])
    names = list(responses)
    answers_of: dict[Any, dict[str, Any]] = {}  # by annotator, else by position
    for question, given in row["responses"].items():
        for i, answer in enumerate(given):
            answers_of.setdefault(answer.get("user_id") or i, {})[question] = answer["value"]
    read = _orders if len(names) > 1 else _verdict if names else _demonstrations
    made = {annotator: list(read(answers, names)) for annotator, answers in answers_of.items()}
    left_out = {str(annotator): answers_of[annotator] for annotator, judgements in made.items() if not judgements}
    if len(left_out) == len(made):
        came = ", ".join(str(list(answers)) for answers in left_out.values()) or "none"
        wanted = f"one that judges {', '.join(names) or 'or gives a response'}: label the record or remove it"
        raise BadRow("responses", f"got {came}, want {wanted}")
    about = _without_empty(other_keys(row, "fields", "responses", "id"))
    common = {"record": about, "fields": _without_empty(rest), "left_out": left_out, "id": row.get("id")}
    listed = [{"id": name, "text": text} for name, text in responses.items()]
    shared = {"kind": "ranking", "prompt": prompt, "responses": listed} if names else {"prompt": prompt}
    for annotator, judgements in made.items():
        labeler = None if isinstance(annotator, int) else annotator
        for one in judgements:
            metadata = one["metadata"] | {"answers": answers_of[annotator]} | _without_empty(common)
            yield shared | one | {"labeler": labeler, "metadata": metadata}
