"""Demonstrations and prompts: alpaca, sharegpt, messages, self_instruct, question_answer, decoded and mt_bench."""

from collections.abc import Iterator
from typing import Any

from rlhf.data.formats.shapes import (
    BadRow,
    Turns,
    Values,
    chat_turns,
    id_and_rest,
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


def _demonstration(prompt: Any, response: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "demonstration", "prompt": prompt, "response": response, "metadata": metadata}


def request(row: Values) -> str:
    """Alpaca's instruction and, after a blank line, the input if any; both stripped."""
    keys = ["instruction", *(key for key in _INPUTS if row.get(key) is not None)]
    return "\n\n".join(text for key in keys if (text := require_text(row, key).strip()))


def from_alpaca(row: Values) -> Made:
    """One demonstration; a `system` text and a `history` of [request, answer] come before the instruction."""
    key = "output" if "output" in row else "response"
    turns: Turns = []
    for asked, answered in row.get("history") or []:
        turns += [*user_turn(asked), {"role": "assistant", "content": answered}]
    turns = with_system(row.get("system"), turns + user_turn(request(row)))
    name, rest = id_and_rest(row, "instruction", "system", "history", *_INPUTS, key)
    yield {"id": name, **_demonstration(turns, row[key], rest)}


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
    return _demonstration(turns[:at], turns[at]["content"], metadata | {k: v for k, v in more.items() if v})


def from_sharegpt(row: Values) -> Made:
    """One ranking with K = 2, response "a" the chosen one; or, without judgement, the dialogue's last answer."""
    turns = with_system(row.get("system"), chat_turns(row.get("conversations"), "conversations"))
    name, rest = id_and_rest(row, "system", "conversations", *_JUDGED)
    if any(key in row for key in _JUDGED):
        judged = preference(*(one_answer(row.get(key), key) for key in _JUDGED))
        yield {"id": name, "prompt": turns, **judged, "metadata": rest}
    else:
        yield {"id": name, **_dialogue(turns, "conversations", rest)}


def from_messages(row: Values) -> Made:
    name, rest = id_and_rest(row, "messages", ids=("id", "prompt_id"))
    yield {"id": name, **_dialogue(chat_turns(row.get("messages"), "messages"), "messages", rest)}


def from_self_instruct(row: Values) -> Made:
    """One demonstration per instance of {input, output}."""
    name, rest = id_and_rest(row, "instruction", "instances")
    instances: Any = row["instances"]
    for i, instance in enumerate(instances):
        parts = [require_text(row, "instruction"), require_text(instance, "input")]
        prompt = "\n\n".join(part.strip() for part in parts if is_text(part))
        made = _demonstration(prompt, instance["output"], rest | other_keys(instance, "input", "output"))
        yield {"id": name if name is None or len(instances) == 1 else f"{name}.{i}", **made}


def from_question_answer(row: Values) -> Made:
    yield _demonstration(row["question"], row["answer"], other_keys(row, "question", "answer"))


def from_decoded(row: Values) -> Made:
    """The person's answer; nobody compared it with the model's (`decoded`), which stays in the metadata."""
    yield _demonstration(row["instruction"], row["text"], other_keys(row, "instruction", "text"))


def from_mt_bench(row: Values) -> Made:
    """A prompt of the first turn; the later ones only make sense after the model's own answer: `metadata.later_turns`."""
    require(is_list(row.get("turns"), str), "turns", row.get("turns"), "a list of texts")
    first, *later = row["turns"]
    yield {
        "kind": "prompt",
        "prompt": first,
        "metadata": other_keys(row, "turns") | ({"later_turns": later} if later else {}),
    }
