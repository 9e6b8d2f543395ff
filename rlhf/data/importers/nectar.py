"""Nectar's form: a prompt and several answers of {answer, model, rank}, 1 the best; equal ranks are a tie.

A prompt in the form "Human: … Assistant:" becomes turns; another one is a user turn as it is.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data.conversion.foreign import answer_of, is_list, letters, number, ranking_of, require
from rlhf.data.importers import BadRow, Format, hh, other_keys, require_text


def recognise(row: Mapping[str, Any]) -> str | None:
    answers: Any = row.get("answers")
    if "prompt" not in row or "kind" in row or not is_list(answers, dict):
        return None
    fits = all("answer" in answer and "rank" in answer for answer in answers)
    return "keys prompt and answers, each with a rank" if fits else None


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One ranking; an answer whose rank is null is left out of the order.

    Raises: BadRow if no two answers have a rank.
    """
    answers: Any = row.get("answers")
    require(is_list(answers), "answers", answers, "a list of {answer, model, rank}")
    ranks: dict[str, float] = {}
    responses = []
    for i, (name, answer) in enumerate(zip(letters(len(answers)), answers, strict=True)):
        field = f"answers.{i}"
        responses.append(answer_of(name, answer, field, "{answer, model, rank}", "answer", "model", "rank"))
        if answer.get("rank") is not None:
            ranks[name] = number(answer["rank"], f"{field}.rank", "a number, 1 for the best")
    if len(ranks) < 2:
        raise BadRow("answers", f"got {len(ranks)} answers with a rank, want two or more: remove the row")
    prompt = require_text(row, "prompt")
    yield {
        "kind": "ranking",
        "prompt": hh.prompt_turns(prompt) or prompt,
        "responses": responses,
        "ranking": ranking_of(ranks, best="lowest"),
        "metadata": other_keys(row, "prompt", "answers"),
    }


FORMAT = Format("nectar", "keys prompt and answers, a list of answer, model and rank", recognise, convert)
