"""OpenAI's summarisation labels: comparisons of two summaries, and ratings of one on several axes.

The prompt is the post as the paper gave it to the policy, "SUBREDDIT: … TITLE: … POST: … TL;DR:", or the
article of the news set; what a row lacks is left out. The texts in it stay as they are.
Source: Stiennon et al. 2020, "Learning to summarize from human feedback", appendix B.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data.conversion.foreign import answer_of, is_list, is_number, is_text, letters, require
from rlhf.data.importers import BadRow, Format, other_keys

_SHOWN = (("subreddit", "SUBREDDIT: r/"), ("title", "TITLE: "), ("post", "POST: "), ("article", "Article:\n\n"))
_REMOVE = "remove rows without a judgement"


def recognise(row: Mapping[str, Any]) -> str | None:
    if not isinstance(row.get("info"), dict):
        return None
    if "choice" in row and isinstance(row.get("summaries"), list):
        return "keys info, summaries and choice"
    if isinstance(row.get("summary"), dict) and "axes" in row["summary"]:
        return "keys info and summary with axes"
    return None


def _prompt(info: Any) -> str:
    fits = isinstance(info, dict) and any(is_text(info.get(key)) for key in ("post", "article"))
    require(fits, "info", info, "a post or an article to sum up")
    parts = []
    for key, label in _SHOWN:
        require(isinstance(info.get(key), str | None), f"info.{key}", info.get(key), "text or null")
        if is_text(info.get(key)):
            parts.append(label + info[key])
    return "\n\n".join([*parts, "TL;DR:"])


def _response(summary: Any, name: str, field: str) -> dict[str, Any]:
    return answer_of(name, summary, field, "{text, policy}", "text", "policy", "axes")


def _comparison(row: Mapping[str, Any]) -> dict[str, Any]:
    summaries: Any = row.get("summaries")
    choice: Any = row.get("choice")
    require(is_list(summaries) and len(summaries) == 2, "summaries", summaries, "two of {text, policy}")
    require(is_number(choice) and choice in (0, 1), "choice", choice, f"0 or 1, the better summary: {_REMOVE}")
    names = letters(2)
    responses = [_response(s, name, f"summaries.{i}") for i, (s, name) in enumerate(zip(summaries, names, strict=True))]
    return {"responses": responses, "ranking": [[names[int(choice)]], [names[1 - int(choice)]]]}


def _rating(row: Mapping[str, Any]) -> dict[str, Any]:
    summary: Any = row.get("summary")
    response = _response(summary, "a", "summary")
    axes: Any = summary["axes"] if isinstance(summary.get("axes"), dict) else {}
    if axes.get("overall") is None:
        raise BadRow("summary.axes.overall", f"got no rating, want a number from 1 to 7: {_REMOVE}")
    return {"responses": [response], "ratings": {"a": axes["overall"]}}


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One ranking: K = 2 of a comparison; K = 1 with the overall rating, the axes under `metadata.axes`.

    The file's own split is kept as `metadata.original_split`: here a prompt's split is decided by its text.
    """
    judged = _comparison(row) if "summaries" in row else _rating(row)
    prompt = _prompt(row.get("info"))
    metadata = other_keys(row, "info", "summaries", "summary", "choice", "worker", "split")
    about = other_keys(row["info"], *(key for key, _ in _SHOWN))
    if "ratings" in judged:
        about["axes"] = row["summary"]["axes"]
    if row.get("split") is not None:
        about["original_split"] = row["split"]
    yield {
        "kind": "ranking",
        "prompt": prompt,
        **judged,
        "labeler": row.get("worker"),
        "metadata": metadata | {key: value for key, value in about.items() if value is not None},
    }


FORMAT = Format("openai_comparisons", "keys info, and summaries and choice or a summary with axes", recognise, convert)
