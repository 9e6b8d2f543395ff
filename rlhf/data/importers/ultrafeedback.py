"""UltraFeedback's form: an instruction and several completions, each with scores by a model.

The order is that of `fine-grained_score`, the mean of the aspects' ratings, where every completion has one;
else of the mean of its annotations' ratings, else of `overall_score`. That one comes last because the public
set is known to hold 10 where the judge wrote 1. The scales are not 1 to 7, so scores are no ratings: they, the
annotations and the system prompt that a completion was made with are kept under the response's metadata. The
two-answer forms of this set, with chosen and rejected, are those of `trl`.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data.conversion.foreign import answer_of, is_list, letters, ranking_of, require
from rlhf.data.importers import BadRow, Format, other_keys, require_text


def recognise(row: Mapping[str, Any]) -> str | None:
    completions: Any = row.get("completions")
    fits = "instruction" in row and is_list(completions, dict) and all("response" in one for one in completions)
    return "keys instruction and completions with responses" if fits else None


def _as_number(value: Any) -> float | None:
    """Ratings are numbers or text of digits; "N/A" is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _mean_rating(completion: Mapping[str, Any]) -> float | None:
    annotations = completion.get("annotations")
    ratings = [
        rating
        for aspect in (annotations.values() if isinstance(annotations, dict) else ())
        for one in (aspect if isinstance(aspect, list) else [aspect])
        if isinstance(one, dict) and (rating := _as_number(one.get("Rating"))) is not None
    ]
    return sum(ratings) / len(ratings) if ratings else None


def _scores(completions: list[dict[str, Any]]) -> tuple[str, list[float]]:
    """What the completions are ordered by: the first kind of score that each of them has."""
    ways = (
        ("fine-grained_score", lambda one: _as_number(one.get("fine-grained_score"))),
        ("mean of the annotations' ratings", _mean_rating),
        ("overall_score", lambda one: _as_number(one.get("overall_score"))),
    )
    for name, way in ways:
        scores = [score for one in completions if (score := way(one)) is not None]
        if len(scores) == len(completions):
            return name, scores
    raise BadRow("completions", "some have no score, want fine-grained_score, ratings or overall_score in each")


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One ranking; `metadata.ranked_by` says by which score."""
    completions: Any = row.get("completions")
    require(is_list(completions), "completions", completions, "a list of completions with scores")
    names = letters(len(completions))
    responses = [
        answer_of(name, one, f"completions.{i}", "a completion with a response", "response", "model")
        for i, (name, one) in enumerate(zip(names, completions, strict=True))
    ]
    ranked_by, scores = _scores(completions)
    yield {
        "kind": "ranking",
        "prompt": require_text(row, "instruction"),
        "responses": responses,
        "ranking": ranking_of(dict(zip(names, scores, strict=True)), best="highest"),
        "metadata": other_keys(row, "instruction", "completions") | {"ranked_by": ranked_by},
    }


FORMAT = Format("ultrafeedback", "keys instruction and completions with response and scores", recognise, convert)
