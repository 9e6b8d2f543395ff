"""Several answers with scores, ranks or verdicts: ultrafeedback, nectar, webgpt, openai_comparisons and qa_feedback."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from rlhf.data.formats.preferences import text_prompt
from rlhf.data.formats.shapes import (
    BadRow,
    Values,
    answer_of,
    as_number,
    is_list,
    is_number,
    is_text,
    letters,
    number,
    other_keys,
    ranking_of,
    require,
    require_text,
)
from rlhf.data.records import CycleError, join_judgements

Made = Iterator[dict[str, Any]]
_REMOVE = "remove rows without a judgement"


def is_ultrafeedback(row: Values) -> str | None:
    completions: Any = row.get("completions")
    fits = "instruction" in row and is_list(completions, dict) and all("response" in one for one in completions)
    return "keys instruction and completions with responses" if fits else None


def _mean_rating(completion: Values) -> float | None:
    """The mean of a completion's annotations' ratings; "N/A" is none."""
    annotations = completion.get("annotations")
    aspects = annotations.values() if isinstance(annotations, dict) else ()
    listed = [one for aspect in aspects for one in (aspect if isinstance(aspect, list) else [aspect])]
    ratings = [as_number(one.get("Rating")) for one in listed if isinstance(one, dict)]
    known = [rating for rating in ratings if rating is not None]
    return sum(known) / len(known) if known else None


def from_ultrafeedback(row: Values) -> Made:
    """One ranking by `fine-grained_score` where every completion has one, else by the mean of its annotations' ratings,
    else by `overall_score`, which is last because the public set is known to hold 10 where the judge wrote 1.

    The scales are not 1 to 7, so scores are no ratings; `metadata.ranked_by` says by which score.
    """
    completions: Any = row.get("completions")
    require(is_list(completions), "completions", completions, "a list of completions with scores")
    names = letters(len(completions))
    wanted = "a completion with a response"
    responses = [
        answer_of(name, one, f"completions.{i}", wanted, "response", "model")
        for i, (name, one) in enumerate(zip(names, completions, strict=True))
    ]
    ways = {
        "fine-grained_score": lambda one: as_number(one.get("fine-grained_score")),
        "mean of the annotations' ratings": _mean_rating,
        "overall_score": lambda one: as_number(one.get("overall_score")),
    }
    for name, way in ways.items():
        scores = {
            letter: score for letter, one in zip(names, completions, strict=True) if (score := way(one)) is not None
        }
        if len(scores) == len(completions):
            ranked_by = name
            break
    else:
        raise BadRow("completions", "some have no score, want fine-grained_score, ratings or overall_score in each")
    yield {
        "kind": "ranking",
        "prompt": require_text(row, "instruction"),
        "responses": responses,
        "ranking": ranking_of(scores, best="highest"),
        "metadata": other_keys(row, "instruction", "completions") | {"ranked_by": ranked_by},
    }


def is_nectar(row: Values) -> str | None:
    answers: Any = row.get("answers")
    fits = "prompt" in row and "kind" not in row and is_list(answers, dict)
    fits = fits and all("answer" in answer and "rank" in answer for answer in answers)
    return "keys prompt and answers, each with a rank" if fits else None


def from_nectar(row: Values) -> Made:
    """One ranking, rank 1 the best; an answer whose rank is null is left out of the order."""
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
    yield {
        "kind": "ranking",
        "prompt": text_prompt(require_text(row, "prompt")),
        "responses": responses,
        "ranking": ranking_of(ranks, best="lowest"),
        "metadata": other_keys(row, "prompt", "answers"),
    }


def is_webgpt(row: Values) -> str | None:
    wanted = ("question", "answer_0", "answer_1", "score_0", "score_1")
    return f"keys {', '.join(wanted[:-1])} and score_1" if all(key in row for key in wanted) else None


def from_webgpt(row: Values) -> Made:
    """One ranking with K = 2 by the scores. The quotes that an answer was written from, its tokens and its score are kept
    in the response's metadata.
    """
    question = row.get("question")
    text = question.get("full_text") if isinstance(question, dict) else question
    require(isinstance(text, str), "question", question, "{full_text}")
    scores = {str(i): number(row.get(f"score_{i}"), f"score_{i}", "a number from -1 to 1") for i in (0, 1)}
    used = ["question"]
    responses = []
    for name in scores:
        keys = [key for key in row if key.endswith(f"_{name}")]
        used += keys
        more = {key.removesuffix(f"_{name}"): row[key] for key in keys if key != f"answer_{name}"}
        responses.append({"id": name, "text": require_text(row, f"answer_{name}"), "metadata": more})
    about = other_keys(question, "full_text") if isinstance(question, dict) else {}
    yield {
        "kind": "ranking",
        "prompt": text,
        "responses": responses,
        "ranking": ranking_of(scores, best="highest"),
        "metadata": other_keys(row, *used) | ({"question": about} if about else {}),
    }


# --- OpenAI's summarisation labels -------------------------------------------------------------------------------------

_SHOWN = (("subreddit", "SUBREDDIT: r/"), ("title", "TITLE: "), ("post", "POST: "), ("article", "Article:\n\n"))


def is_openai_comparisons(row: Values) -> str | None:
    if not isinstance(row.get("info"), dict):
        return None
    if "choice" in row and isinstance(row.get("summaries"), list):
        return "keys info, summaries and choice"
    rated = isinstance(row.get("summary"), dict) and "axes" in row["summary"]
    return "keys info and summary with axes" if rated else None


def _post(info: Any) -> str:
    """The post as the paper gave it to the policy, "SUBREDDIT: … TITLE: … POST: … TL;DR:"; what a row lacks is left out.

    Source: Stiennon et al. 2020, "Learning to summarize from human feedback", appendix B.
    """
    fits = isinstance(info, dict) and any(is_text(info.get(key)) for key in ("post", "article"))
    require(fits, "info", info, "a post or an article to sum up")
    for key, _ in _SHOWN:
        require(isinstance(info.get(key), str | None), f"info.{key}", info.get(key), "text or null")
    return "\n\n".join([*(label + info[key] for key, label in _SHOWN if is_text(info.get(key))), "TL;DR:"])


def from_openai_comparisons(row: Values) -> Made:
    """One ranking: K = 2 of a comparison; K = 1 with the overall rating, the axes under `metadata.axes`.

    The file's own split is kept as `metadata.original_split`: here a prompt's split is decided by its text.
    """
    made: dict[str, Any]
    about: dict[str, Any] = {"original_split": row.get("split")}
    summaries: Any = row.get("summaries") if "summaries" in row else [row.get("summary")]
    places = ["summary"] if "summaries" not in row else [f"summaries.{i}" for i in range(2)]
    require(is_list(summaries) and len(summaries) == len(places), "summaries", summaries, "two summaries")
    responses = [
        answer_of(name, summary, place, "{text, policy}", "text", "policy", "axes")
        for name, summary, place in zip("ab", summaries, places, strict=False)
    ]
    if "summaries" in row:
        choice: Any = row.get("choice")
        fits = is_number(choice) and choice in (0, 1)
        require(fits, "choice", choice, f"0 or 1, the better summary: {_REMOVE}")
        made = {"ranking": [["ab"[int(choice)]], ["ab"[1 - int(choice)]]]}
    else:
        axes: Any = summaries[0].get("axes")
        overall = axes.get("overall") if isinstance(axes, dict) else None
        require(overall is not None, "summary.axes.overall", overall, f"a number from 1 to 7: {_REMOVE}")
        made, about["axes"] = {"ratings": {"a": overall}}, axes
    prompt = _post(row.get("info"))
    about |= other_keys(row["info"], *(key for key, _ in _SHOWN))
    rest = other_keys(row, "info", "summaries", "summary", "choice", "worker", "split")
    yield {
        "kind": "ranking",
        "prompt": prompt,
        "responses": responses,
        **made,
        "labeler": row.get("worker"),
        "metadata": rest | {key: value for key, value in about.items() if value is not None},
    }


# --- QA-Feedback -------------------------------------------------------------------------------------------------------

_PREDICTIONS = tuple(f"prediction {i}" for i in range(1, 5))


def is_qa_feedback(row: Values) -> str | None:
    wanted = ("question", "preference", *_PREDICTIONS)
    return "keys question, prediction 1 … 4 and preference" if all(key in row for key in wanted) else None


def _passage(passage: Any) -> str:
    """A passage is its title, then sentences, of which the first may repeat the title."""
    require(is_list(passage, str), "passages", passage, "lists of a title and sentences")
    title, *sentences = passage
    text = " ".join(sentence.removeprefix(f"{title}\n\n").strip() for sentence in sentences)
    return f"{title}: {text.strip()}"


def from_qa_feedback(row: Values) -> Made:
    """One ranking with K = 4 of a person's verdicts on all six pairs, or `pairs` if they are not a weak order.

    The prompt is what the answers were written from: the passages, then the question. With `pairs`, those judged equal
    are under `metadata.ties`.
    """
    verdicts: Any = row.get("preference")
    fits = is_list(verdicts) and len(verdicts) == 6 and all(v in (0, 1, 2) for v in verdicts)
    require(fits, "preference", verdicts, "six of 0 (tie), 1 (first), 2 (second), for 12, 13, 14, 23, 24, 34")
    passages = row.get("passages") or []
    require(isinstance(passages, list), "passages", passages, "a list")
    try:
        joined = join_judgements(
            4, [(i, j, int(v)) for (i, j), v in zip(combinations(range(4), 2), verdicts, strict=True)]
        )
    except CycleError as error:
        circle = " over ".join(str(i + 1) for i in error.cycle)
        raise BadRow("preference", f"the judgements go in a circle, {circle}: drop the row") from error
    names = ("1", "2", "3", "4")
    yield {
        "kind": "ranking",
        "prompt": "\n\n".join([*map(_passage, passages), require_text(row, "question").strip()]),
        "responses": [{"id": name, "text": require_text(row, f"prediction {name}")} for name in names],
        **joined.named(names),
        "metadata": other_keys(row, "question", "passages", "preference", *_PREDICTIONS) | joined.named_ties(names),
    }
