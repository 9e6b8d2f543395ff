"""WebGPT's comparisons: a question, two answers and a score each, from -1 to 1; equal scores are a tie.

The quotes that an answer was written from belong to that answer, not to the prompt; they, its tokens and its
score are kept under the response's metadata.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data.conversion.foreign import number, ranking_of, require
from rlhf.data.importers import Format, other_keys, require_text

_WANTED = ("answer_0", "answer_1", "score_0", "score_1")


def recognise(row: Mapping[str, Any]) -> str | None:
    if "question" in row and all(key in row for key in _WANTED):
        return "keys question, answer_0, answer_1, score_0 and score_1"
    return None


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One ranking with K = 2, in the order of the scores."""
    question = row.get("question")
    text = question.get("full_text") if isinstance(question, dict) else question
    require(isinstance(text, str), "question", question, "{full_text}")
    scores = {str(i): number(row.get(f"score_{i}"), f"score_{i}", "a number from -1 to 1") for i in (0, 1)}
    used = ["question"]
    responses = []
    for name in scores:
        more = {key.removesuffix(f"_{name}"): row[key] for key in row if key.endswith(f"_{name}")}
        used += [key for key in row if key.endswith(f"_{name}")]
        more.pop("answer", None)
        responses.append({"id": name, "text": require_text(row, f"answer_{name}"), "metadata": more})
    about = {"question": other_keys(question, "full_text")} if isinstance(question, dict) else {}
    yield {
        "kind": "ranking",
        "prompt": text,
        "responses": responses,
        "ranking": ranking_of(scores, best="highest"),
        "metadata": other_keys(row, *used) | {key: value for key, value in about.items() if value},
    }


FORMAT = Format("webgpt", "keys question with full_text, answer_0, answer_1, score_0 and score_1", recognise, convert)
