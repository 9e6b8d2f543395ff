"""Demonstrations and prompts: alpaca, sharegpt, messages, self_instruct, question_answer, decoded and mt_bench."""

from collections.abc import Iterator
from typing import Any

from rlhf.data.formats.shapes import (
    BadRow,
    Turns,
    Values,
    chat_text,
    chat_turns,
    demonstration,
    id_and_rest,
    is_chat,
    is_learned,
    is_list,
    is_text,
    one_answer,
    other_keys,
    preference,
    require,
    require_text,
    user_turn,
    with_system,
)

Made = Iterator[dict[str, Any]]
_INPUTS = ("input", "context")  # Dolly's name for the input is context
_JUDGED = ("chosen", "rejected")


def request(row: Values) -> str:
    """Alpaca's instruction and, after a blank line, the input if any; both stripped."""
    inputs = [require_text(row, key) for key in _INPUTS if row.get(key) is not None]
    parts = [part.strip() for part in (require_text(row, "instruction"), *inputs)]
    return "\n\n".join(part for part in parts if part)


def is_alpaca(row: Values) -> str | None:
    answers = [key for key in ("output", "response") if key in row]
    if "instruction" not in row or len(answers) != 1 or "kto_tag" in row or not isinstance(row[answers[0]], str | None):
        return None
    return f"keys instruction and {answers[0]}"


def from_alpaca(row: Values) -> Made:
    """One demonstration; a `system` text and a `history` of [request, answer] come before the instruction."""
    key = "output" if "output" in row else "response"
    history = row.get("history") or []
    fits = isinstance(history, list) and all(isinstance(two, list) and len(two) == 2 for two in history)
    require(fits, "history", history, "a list of [request, answer]")
    turns: Turns = [
        {"role": role, "content": chat_text(said, f"history.{i}")}
        for i, two in enumerate(history)
        for role, said in zip(("user", "assistant"), two, strict=True)
    ]
    turns = with_system(row.get("system"), turns + user_turn(request(row)))
    name, rest = id_and_rest(row, "instruction", "system", "history", *_INPUTS, key)
    yield {"id": name, **demonstration(turns, require_text(row, key), rest, key)}


def _dialogue(turns: Turns, field: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """A demonstration of a dialogue's last answer, or a prompt if it has no answer.

    Earlier answers are turns of its prompt, which SFT learns too (sft.turns). If turns have a `loss_weight` (or `weight`),
    an answer of weight 0 is context. Turns after the answer are kept as `metadata.later_turns`; other keys of its turn as
    `metadata.answer`.
    """
    learned = [i for i, turn in enumerate(turns) if is_learned(turn)]
    if not learned:
        if any(turn["role"] == "assistant" for turn in turns):
            raise BadRow(field, "every assistant turn has weight 0, want one to learn: remove the row")
        return {"kind": "prompt", "prompt": turns, "metadata": metadata}
    at = learned[-1]
    more = {"answer": other_keys(turns[at], "role", "content"), "later_turns": turns[at + 1 :]}
    return demonstration(turns[:at], turns[at]["content"], metadata | {k: v for k, v in more.items() if v}, field)


def is_sharegpt(row: Values) -> str | None:
    turns: Any = row.get("conversations")
    fits = isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)
    if not fits or any(key in row for key in ("kind", "label", "kto_tag", "messages")):
        return None
    if any(key in row for key in _JUDGED):
        return "key conversations, with chosen and rejected" if all(key in row for key in _JUDGED) else None
    return "key conversations with turns"


def from_sharegpt(row: Values) -> Made:
    """One ranking with K = 2, response "a" the chosen one; or, without judgement, the dialogue's last answer."""
    turns = with_system(row.get("system"), chat_turns(row.get("conversations"), "conversations"))
    name, rest = id_and_rest(row, "system", "conversations", *_JUDGED)
    if any(key in row for key in _JUDGED):
        judged = preference(*(one_answer(row.get(key), key) for key in _JUDGED))
        yield {"id": name, "prompt": turns, **judged, "metadata": rest}
    else:
        yield {"id": name, **_dialogue(turns, "conversations", rest)}


def is_messages(row: Values) -> str | None:
    turns: Any = row.get("messages")
    others = ("kind", "chosen", "rejected", "completion", "label", "kto_tag", "fields")
    fits = is_chat(turns) and all("content" in turn for turn in turns) and not any(key in row for key in others)
    return "key messages with turns of role and content" if fits else None


def from_messages(row: Values) -> Made:
    name, rest = id_and_rest(row, "messages", ids=("id", "prompt_id"))
    yield {"id": name, **_dialogue(chat_turns(row.get("messages"), "messages"), "messages", rest)}


def is_self_instruct(row: Values) -> str | None:
    fits = "instruction" in row and isinstance(row.get("instances"), list)
    return "keys instruction and instances" if fits else None


def from_self_instruct(row: Values) -> Iterator[dict[str, Any] | BadRow]:
    """One demonstration per instance of {input, output}, or a BadRow in its place."""
    instances: Any = row.get("instances")
    require(is_list(instances), "instances", instances, "a list of {input, output}")
    instruction = require_text(row, "instruction")
    name, rest = id_and_rest(row, "instruction", "instances")
    for i, instance in enumerate(instances):
        field = f"instances.{i}"
        try:
            fits = isinstance(instance, dict) and all(isinstance(instance.get(k), str) for k in ("input", "output"))
            require(fits, field, instance, "{input, output}, both strings")
            parts = [instruction, *([instance["input"]] if is_text(instance["input"]) else [])]
            prompt = "\n\n".join(part.strip() for part in parts)
            metadata = rest | other_keys(instance, "input", "output")
            made = demonstration(prompt, instance["output"], metadata, f"{field}.output")
            yield {"id": name if name is None or len(instances) == 1 else f"{name}.{i}", **made}
        except BadRow as error:
            yield error


def is_question_answer(row: Values) -> str | None:
    """Rows that also have passages or choices are not: a prompt without these could not be answered."""
    others = ("kind", "context", "passages", "choices", "options", *_JUDGED, "conversations", "messages")
    both = all(isinstance(row.get(key), str) for key in ("question", "answer"))
    return "keys question and answer" if both and not any(key in row for key in others) else None


def from_question_answer(row: Values) -> Made:
    answer = require_text(row, "answer")
    yield demonstration(require_text(row, "question"), answer, other_keys(row, "question", "answer"), "answer")


def is_decoded(row: Values) -> str | None:
    wanted = ("instruction", "text", "decoded")
    return "keys instruction, text and decoded" if all(isinstance(row.get(key), str) for key in wanted) else None


def from_decoded(row: Values) -> Made:
    """The person's answer; nobody compared it with the model's (`decoded`), which stays in the metadata."""
    answer = require_text(row, "text")
    yield demonstration(require_text(row, "instruction"), answer, other_keys(row, "instruction", "text"), "text")


def is_mt_bench(row: Values) -> str | None:
    fits = is_list(row.get("turns"), str)
    return "key turns with what a user says" if fits and "prompt" not in row and "kind" not in row else None


def from_mt_bench(row: Values) -> Made:
    """A prompt of the first turn; the later ones only make sense after the model's own answer: `metadata.later_turns`."""
    turns: Any = row.get("turns")
    require(is_list(turns, str), "turns", turns, "a list of texts")
    later = {"later_turns": turns[1:]} if turns[1:] else {}
    yield {"kind": "prompt", "prompt": turns[0], "metadata": other_keys(row, "turns") | later}
