"""OpenAI's summarisation labels: comparisons of two summaries, and ratings of one on several axes.

The prompt is the post as the paper gave it to the policy, "SUBREDDIT: … TITLE: … POST: … TL;DR:", or the
article of the news set; what a row lacks is left out. The texts in it stay as they are.
Source: Stiennon et al. 2020, "Learning to summarize from human feedback", appendix B.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data.conversion.foreign import is_text, letters
from rlhf.data.importers import BadRow, Format, other_keys
from rlhf.data.records import shown

_SHOWN = (("subreddit", "SUBREDDIT: r/"), ("title", "TITLE: "), ("post", "POST: "), ("article", "Article:\n\n"))


def recognise(row: Mapping[str, Any]) -> str | None:
    if not isinstance(row.get("info"), dict):
        return None
    if "choice" in row and isinstance(row.get("summaries"), list):
        return "keys info, summaries and choice"
    if isinstance(row.get("summary"), dict) and "axes" in row["summary"]:
        return "keys info and summary with axes"
    return None


def _prompt(info: Any) -> str:
    if not isinstance(info, dict) or not any(is_text(info.get(key)) for key in ("post", "article")):
        raise BadRow("info", f"got {shown(info)}, want a post or an article to sum up")
    parts = []
    for key, label in _SHOWN:
        if info.get(key) is not None and not isinstance(info[key], str):
            raise BadRow(f"info.{key}", f"got {shown(info[key])}, want text or null")
        if is_text(info.get(key)):
            parts.append(label + info[key])
    return "\n\n".join([*parts, "TL;DR:"])


def _response(summary: Any, name: str, field: str) -> dict[str, Any]:
    if not isinstance(summary, dict) or not isinstance(summary.get("text"), str):
        raise BadRow(field, f"got {shown(summary)}, want {{text, policy}}")
    more = other_keys(summary, "text", "policy", "axes")
    return {"id": name, "text": summary["text"], "policy": summary.get("policy"), "metadata": more}


def _comparison(row: Mapping[str, Any]) -> dict[str, Any]:
    summaries, choice = row.get("summaries"), row.get("choice")
    if not isinstance(summaries, list) or len(summaries) != 2:
        raise BadRow("summaries", f"got {shown(summaries)}, want two of {{text, policy}}")
    if isinstance(choice, bool) or choice not in (0, 1):
        raise BadRow("choice", f"got {shown(choice)}, want 0 or 1, the better summary: remove rows without a judgement")
    names = letters(2)
    responses = [_response(s, name, f"summaries.{i}") for i, (s, name) in enumerate(zip(summaries, names, strict=True))]
    return {"responses": responses, "ranking": [[names[int(choice)]], [names[1 - int(choice)]]]}


def _rating(row: Mapping[str, Any]) -> dict[str, Any]:
    summary = row.get("summary")
    response = _response(summary, "a", "summary")
    axes = summary.get("axes") if isinstance(summary, dict) else None
    overall = axes.get("overall") if isinstance(axes, dict) else None
    if overall is None:
        raise BadRow(
            "summary.axes.overall", "got no rating, want a number from 1 to 7: remove rows without a judgement"
        )
    return {"responses": [response], "ratings": {"a": overall}}


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One ranking: K = 2 of a comparison; K = 1 with the overall rating, the axes under `metadata.axes`.

    The file's own split is kept as `metadata.original_split`: here a prompt's split is decided by its text.
    """
    judged = _comparison(row) if "summaries" in row else _rating(row)
    metadata = other_keys(row, "info", "summaries", "summary", "choice", "worker", "split")
    about = other_keys(row["info"], *(key for key, _ in _SHOWN)) if isinstance(row.get("info"), dict) else {}
    if "ratings" in judged:
        about["axes"] = row["summary"]["axes"]
    if row.get("split") is not None:
        about["original_split"] = row["split"]
    yield {
        "kind": "ranking",
        "prompt": _prompt(row.get("info")),
        **judged,
        "labeler": row.get("worker"),
        "metadata": metadata | {key: value for key, value in about.items() if value is not None},
    }


FORMAT = Format("openai_comparisons", "keys info, and summaries and choice or a summary with axes", recognise, convert)
