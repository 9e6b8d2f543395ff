"""Several answers with scores, ranks or verdicts: ultrafeedback, nectar, webgpt, openai_comparisons, qa_feedback and oasst."""

from collections.abc import Iterable, Iterator
from itertools import chain, combinations
from statistics import fmean
from typing import Any

from rlhf.data.formats.dialogues import Made, prompt_turns
from rlhf.data.formats.shapes import (
    ROLES,
    BadRow,
    Turns,
    Values,
    as_flag,
    as_number,
    chat_turns,
    is_empty,
    is_list,
    is_text,
    judged_record,
    letters,
    number,
    other_keys,
    ranking_of,
    require,
    require_text,
)
from rlhf.data.records import join_judgements
from rlhf.data.rows import Row
from rlhf.system.schemas import shown


def _answer(name: str, given: Any, text: str, policy: str, *used: str) -> dict[str, Any]:
    """One of several answers, an object with its text and its policy under these keys, as a response."""
    more = other_keys(given, text, policy, *used)
    return {"id": name, "text": require_text(given, text), "policy": given.get(policy), "metadata": more}


def from_ultrafeedback(row: Values) -> Made:
    """One ranking by the first score that every completion has. `overall_score` is last because the public set has 10
    for some answers that its judge gave 1. The scales are not 1 to 7, so scores are no ratings; `metadata.ranked_by`
    says by which score. A response's `qualities` are its mean ratings by aspect; those "N/A" are left out.
    """
    responses = []
    ways: dict[str, dict[str, Any]] = {}  # scores by what they are, then by response
    for name, one in zip(letters(len(row["completions"])), row["completions"], strict=True):
        ratings: dict[str, list[float]] = {}
        for aspect, given in (one.get("annotations") or {}).items():
            numbers = [as_number(each.get("Rating")) for each in (given if isinstance(given, list) else [given])]
            if known := [rating for rating in numbers if rating is not None]:
                ratings[aspect] = known
        responses.append(_answer(name, one, "response", "model"))
        if ratings:
            responses[-1]["metadata"]["qualities"] = {aspect: fmean(known) for aspect, known in ratings.items()}
        mean = fmean(chain(*ratings.values())) if ratings else None
        scores = {"fine-grained_score": one.get("fine-grained_score"), "mean of the annotations' ratings": mean}
        for by, score in (scores | {"overall_score": one.get("overall_score")}).items():
            ways.setdefault(by, {})[name] = as_number(score)
    ranked_by = next((by for by, scores in ways.items() if None not in scores.values()), None)
    if ranked_by is None:
        raise BadRow("completions", "some have no score, want fine-grained_score, ratings or overall_score in each")
    ranking = ranking_of(ways[ranked_by], best="highest")
    rest = other_keys(row, "instruction", "completions") | {"ranked_by": ranked_by}
    yield judged_record(row["instruction"], responses, rest, ranking=ranking)


def from_nectar(row: Values) -> Made:
    """One ranking, rank 1 the best; an answer whose rank is null is left out of the order."""
    answers = dict(zip(letters(len(row["answers"])), row["answers"], strict=True))
    ranks = {name: number(one["rank"], "answers.rank") for name, one in answers.items() if one["rank"] is not None}
    require(len(ranks) > 1, "answers", ranks, "two ranks or more: remove the row")
    responses = [_answer(name, one, "answer", "model", "rank") for name, one in answers.items()]
    rest, ranking = other_keys(row, "prompt", "answers"), ranking_of(ranks, best="lowest")
    yield judged_record(prompt_turns(require_text(row, "prompt")), responses, rest, ranking=ranking)


def from_webgpt(row: Values) -> Made:
    """One ranking with K = 2 by the scores. The quotes that an answer was written from, its tokens and its score are
    kept in the response's metadata.
    """
    question = row["question"]
    rest, about = other_keys(row, "question"), other_keys(question, "full_text")
    responses = []
    for name in ("0", "1"):
        of_answer = {key.removesuffix(f"_{name}"): rest.pop(key) for key in [*rest] if key.endswith(f"_{name}")}
        responses.append({"id": name, "text": row[f"answer_{name}"], "metadata": other_keys(of_answer, "answer")})
    scores = {i: number(row[f"score_{i}"], f"score_{i}") for i in ("0", "1")}
    metadata = rest | ({"question": about} if about else {})
    yield judged_record(question["full_text"], responses, metadata, ranking=ranking_of(scores, best="highest"))


_SHOWN = {"subreddit": "SUBREDDIT: r/", "title": "TITLE: ", "post": "POST: ", "article": "Article:\n\n"}


def from_openai_comparisons(row: Values) -> Made:
    """One ranking: K = 2 of a comparison; K = 1 with the overall rating, the axes under `metadata.axes`.

    The prompt is the post as the paper gave it to the policy, "SUBREDDIT: … TITLE: … POST: … TL;DR:". The file's own
    split is kept as `metadata.original_split`: here a prompt's split is decided by its text.

    Source: Stiennon et al. 2020, "Learning to summarize from human feedback", appendix B.
    """
    info: Any = row["info"]
    require(is_text(info.get("post")) or is_text(info.get("article")), "info", info, "a post or an article to sum up")
    about: dict[str, Any] = {"original_split": row.get("split")} | other_keys(info, *_SHOWN)
    summaries: Any = row["summaries"] if "summaries" in row else [row["summary"]]
    if "summaries" in row:
        fits = row.get("choice") in (0, 1) and len(summaries) == 2
        require(fits, "choice", row.get("choice"), "0 or 1, the better of two summaries: remove the row")
        best = int(row["choice"])
        made: dict[str, Any] = {"ranking": [["ab"[best]], ["ab"[1 - best]]]}
    else:
        axes: Any = row["summary"]["axes"]
        require(axes.get("overall") is not None, "summary.axes.overall", None, "a number from 1 to 7: remove the row")
        made, about["axes"] = {"ratings": {"a": axes["overall"]}}, axes
    prompt = "\n\n".join([*(said + info[key] for key, said in _SHOWN.items() if is_text(info.get(key))), "TL;DR:"])
    responses = [_answer(name, one, "text", "policy", "axes") for name, one in zip("ab", summaries, strict=False)]
    rest = other_keys(row, "info", "summaries", "summary", "choice", "worker", "split")
    rest |= {key: value for key, value in about.items() if value is not None}
    yield judged_record(prompt, responses, rest, labeler=row.get("worker"), **made)


def from_qa_feedback(row: Values) -> Made:
    """One ranking with K = 4 of a person's verdicts on all six pairs, or `pairs` if they are not a weak order. The
    prompt is what the answers were written from: the passages, then the question. With `pairs`, those judged equal are
    under `metadata.ties`.
    """
    verdicts: Any = row["preference"]
    fits = is_list(verdicts) and len(verdicts) == 6 and all(v in (0, 1, 2) for v in verdicts)
    require(fits, "preference", verdicts, "six of 0 (tie), 1 (first), 2 (second), for 12, 13, 14, 23, 24, 34")
    names = ("1", "2", "3", "4")
    judged = list(zip(combinations(names, 2), verdicts, strict=True))
    better = [(one, other) if verdict == 1 else (other, one) for (one, other), verdict in judged if verdict]
    said, ties = join_judgements(names, better, [pair for pair, verdict in judged if not verdict])
    parts = []
    for title, *sentences in row.get("passages") or []:  # the first sentence may repeat the title
        text = " ".join(sentence.removeprefix(f"{title}\n\n").strip() for sentence in sentences)
        parts.append(f"{title}: {text.strip()}")
    rest = other_keys(row, "question", "passages", "preference")
    responses = [{"id": name, "text": rest.pop(f"prediction {name}")} for name in names]
    yield judged_record("\n\n".join([*parts, row["question"].strip()]), responses, rest | ties, **said)


# People wrote every message of a tree, and ranked the answers to the same message. Every set of ranked siblings is one
# ranking, whose prompt is the path to them: rank 0 is best, equal ranks tie. A sibling without a rank is an unranked
# response; one that is marked deleted is left out, and so are the answers if fewer than two of them have a rank. A tree
# without any ranking gives its first message as a prompt. Message ids become the ids of responses.

_OF_TREE = ("message_tree_id", "tree_state")  # the same for all messages of a tree


def _ranking_of_replies(path: Turns, node: Values) -> dict[str, Any] | None:
    """The ranking of the replies to one message; None if fewer than two of them are ranked answers."""
    answers = [reply for reply in node.get("replies") or [] if ROLES.get(reply["role"]) == "assistant"]
    named = {reply.get("message_id") or f"reply-{i}": reply for i, reply in enumerate(answers)}
    kept = {name: reply for name, reply in named.items() if not as_flag(reply.get("deleted"))}
    ranks = {name: number(reply["rank"], "rank") for name, reply in kept.items() if reply.get("rank") is not None}
    if path[-1]["role"] != "user" or len(ranks) < 2:
        return None
    deleted = [reply.get("message_id") for reply in answers if as_flag(reply.get("deleted"))]
    used = ("role", "replies", "message_id", *_OF_TREE)
    responses = [_answer(name, reply, "text", "model_name", *used) for name, reply in kept.items()]
    more = {"deleted_replies": deleted} if deleted else {}
    return judged_record(path, responses, more, id=node.get("message_id"), ranking=ranking_of(ranks, best="lowest"))


def from_oasst(row: Values) -> Made:
    """One ranking for every set of ranked siblings, a message before its replies; else one prompt."""
    root = row.get("prompt", row)
    about = {key: row[key] for key in _OF_TREE if key in row} if root is row else other_keys(row, "prompt")
    if (tree := row.get("message_tree_id") or root.get("message_id")) is not None:
        about = about | {"group": tree}  # a tree's rankings continue each other
    ranked = False
    left: list[tuple[Turns, Values]] = [([], root)]  # (turns above, message); a stack: trees may be deep
    while left:
        above, node = left.pop()
        more = other_keys(node, "role", "text", "replies", *_OF_TREE)
        turn = {"role": node.get("role"), "content": node.get("text"), **more}
        path = [*above, *chat_turns([turn], "message")]
        if (made := _ranking_of_replies(path, node)) is not None:
            ranked = True
            yield made | {"metadata": about | made["metadata"]}
        left += [(path, reply) for reply in reversed(node.get("replies") or [])]
    if not ranked:
        yield {"kind": "prompt", "id": root.get("message_id"), "prompt": path[:1], "metadata": about}


from_oasst_messages = from_oasst  # of the trees that `gather_oasst_messages` makes


def gather_oasst_messages(rows: Iterable[Row]) -> Iterator[Row]:
    """The trees of a file's messages, which come in any order, and a reject for each message whose tree is not whole."""
    held: dict[str, Row] = {}
    below: dict[str | None, list[str]] = {}  # a message's replies; of None: first messages
    for row in rows:
        if row.problem:  # and perhaps no object
            yield row
            continue
        key, parent = row.value.get("message_id"), row.value.get("parent_id") or None
        if not isinstance(key, str) or not isinstance(parent, str | None) or key in held:
            problem = f"message_id: got {shown(key)} in reply to {shown(parent)}, want texts, and each message once"
            yield row._replace(field="message_id", problem=problem)
        else:
            held[key] = row
            below.setdefault(parent, []).append(key)
    for root in below.get(None, []):
        first, keys = held[root], [root]
        nodes: dict[str, dict[str, Any]] = {}
        for key in keys:  # a row of a table has every key, many of them empty
            keys += below.get(key, [])
            given = held.pop(key).value.items()
            nodes[key] = {name: value for name, value in given if name == "text" or not is_empty(value)}
        for key in keys:
            nodes[key]["replies"] = [nodes[reply] for reply in below.get(key, [])]
        yield first._replace(value=nodes[root], raw=None)
    for row in held.values():
        parent = shown(row.value.get("parent_id"))
        problem = f"parent_id: got {parent}, whose tree has no first message: add it, or remove this one"
        yield row._replace(field="parent_id", problem=problem)
