"""QA-Feedback: four answers to a question over passages, and a person's verdict on each of the six pairs."""

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from rlhf.data.conversion.foreign import is_list, require
from rlhf.data.importers import BadRow, Format, other_keys, require_text
from rlhf.data.records import CycleError, join_judgements

_ANSWERS = tuple(f"prediction {i}" for i in range(1, 5))
_NAMES = ("1", "2", "3", "4")
_PAIRS = tuple(combinations(range(4), 2))  # 12, 13, 14, 23, 24, 34


def recognise(row: Mapping[str, Any]) -> str | None:
    wanted = ("question", "preference", *_ANSWERS)
    return "keys question, prediction 1 … 4 and preference" if all(key in row for key in wanted) else None


def _passage(passage: Any) -> str:
    """A passage is its title, then sentences, of which the first may repeat the title."""
    require(is_list(passage, str), "passages", passage, "lists of a title and sentences")
    title, *sentences = passage
    text = " ".join(sentence.removeprefix(f"{title}\n\n").strip() for sentence in sentences)
    return f"{title}: {text.strip()}"


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One ranking with K = 4, or `pairs` if the six judgements are not a weak order.

    The prompt is what the answers were written from: the passages, then the question. Pairs judged equal are
    in the ranking as ties; with `pairs` they are under `metadata.ties`.
    """
    verdicts: Any = row.get("preference")
    fits = is_list(verdicts) and len(verdicts) == 6 and all(v in (0, 1, 2) for v in verdicts)
    require(fits, "preference", verdicts, "six of 0 (tie), 1 (first), 2 (second)")
    passages = row.get("passages") or []
    require(isinstance(passages, list), "passages", passages, "a list")
    try:
        joined = join_judgements(4, [(i, j, int(v)) for (i, j), v in zip(_PAIRS, verdicts, strict=True)])
    except CycleError as error:
        circle = " over ".join(_NAMES[i] for i in error.cycle)
        raise BadRow("preference", f"the judgements go in a circle, {circle}: drop the row") from error
    metadata = other_keys(row, "question", "passages", "preference", *_ANSWERS)
    if joined.pairs is not None and joined.ties:
        metadata["ties"] = [[_NAMES[i], _NAMES[j]] for i, j in joined.ties]
    yield {
        "kind": "ranking",
        "prompt": "\n\n".join([*map(_passage, passages), require_text(row, "question").strip()]),
        "responses": [{"id": name, "text": require_text(row, key)} for name, key in zip(_NAMES, _ANSWERS, strict=True)],
        "ranking": joined.ranking and [[_NAMES[i] for i in tie] for tie in joined.ranking],
        "pairs": None if joined.pairs is None else [[_NAMES[i], _NAMES[j]] for i, j in joined.pairs],
        "metadata": metadata,
    }


FORMAT = Format("qa_feedback", "keys question, passages, prediction 1 … 4, preference", recognise, convert)
