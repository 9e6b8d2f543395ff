"""Dialogues that demonstrate or ask (alpaca, sharegpt, messages, self_instruct, question_answer, decoded, mt_bench),
and judgements of their last answers: hh, trl, pairs, choices (several chosen and several rejected answers) and kto.
"""

import re
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

from rlhf.data.formats.shapes import (
    ROLES,
    BadRow,
    Turns,
    Values,
    as_flag,
    as_json,
    chat_turns,
    is_chat,
    is_learned,
    is_list,
    is_text,
    judged_record,
    letters,
    number,
    one_answer,
    other_keys,
    preference,
    ranking_of,
    require,
    require_text,
    response_of,
    with_system,
)
from rlhf.data.records import common_beginning

Made = Iterator[dict[str, Any]]
_INPUTS = ("input", "context")  # Dolly's name for the input is context
_JUDGED = ("chosen", "rejected")
_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
_ASKED = re.compile("(prompt|query|request|input|question|instruction)s?$", re.I)  # a request under another name
_TURN = re.compile(r"\n\n(Human|Assistant):")


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
    for asked, answered in as_json(row.get("history")) or []:
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    turns = with_system(row.get("system"), [*turns, {"role": "user", "content": request(row)}])
    yield _demonstration(turns, row[key], other_keys(row, "instruction", "system", "history", *_INPUTS, key))


def from_messages(row: Values, key: str = "messages") -> Made:
    """A demonstration of a dialogue's last answer, or a prompt if it has no answer. Earlier answers are turns of its
    prompt, which SFT learns too (sft.turns). If turns have a `loss_weight` (or `weight`), an answer of weight 0 is
    context. Turns after the answer are kept as `metadata.later_turns`; other keys of its turn as `metadata.answer`.
    """
    turns = with_system(row.get("system"), chat_turns(row.get(key), key))
    metadata = other_keys(row, key, "system")
    if learned := [i for i, turn in enumerate(turns) if is_learned(turn)]:
        at = learned[-1]
        more = {"answer": other_keys(turns[at], "role", "content"), "later_turns": turns[at + 1 :]}
        yield _demonstration(turns[:at], turns[at]["content"], metadata | {k: v for k, v in more.items() if v})
    elif any(turn["role"] == "assistant" for turn in turns):
        raise BadRow(key, "every assistant turn has weight 0, want one to learn: remove the row")
    else:
        yield {"kind": "prompt", "prompt": turns, "metadata": metadata}


def from_sharegpt(row: Values) -> Made:
    """One ranking with K = 2, response "a" the chosen one; or, without judgement, the dialogue's last answer."""
    if row.keys().isdisjoint(_JUDGED):
        yield from from_messages(row, "conversations")
        return
    turns = with_system(row.get("system"), chat_turns(row.get("conversations"), "conversations"))
    answers = (one_answer(row.get(key), key) for key in _JUDGED)
    yield preference(turns, answers, other_keys(row, "system", "conversations", *_JUDGED))


def from_self_instruct(row: Values) -> Made:
    """One demonstration per instance of {input, output}."""
    rest = other_keys(row, "instruction", "instances")
    for instance in row["instances"]:
        prompt = request({"instruction": row["instruction"], "input": instance["input"]})
        yield _demonstration(prompt, instance["output"], rest | other_keys(instance, "input", "output"))


def from_question_answer(row: Values, asked: str = "question", answered: str = "answer") -> Made:
    yield _demonstration(row[asked], row[answered], other_keys(row, asked, answered))


# The person's answer; nobody compared it with the model's (`decoded`), which stays in the metadata.
from_decoded = partial(from_question_answer, asked="instruction", answered="text")


def from_mt_bench(row: Values) -> Made:
    """A prompt of the first turn; the later ones only make sense after the model's own answer: `metadata.later_turns`."""
    require(is_list(row.get("turns"), str), "turns", row.get("turns"), "a list of texts")
    first, *later = row["turns"]
    more = {"later_turns": later} if later else {}
    yield {"kind": "prompt", "prompt": first, "metadata": other_keys(row, "turns") | more}


def _hh_text(text: str) -> str:
    return "\n\n" + text.lstrip()


def is_dialogue(value: Any) -> bool:
    return isinstance(value, str) and _hh_text(value).startswith(_HUMAN)


def _hh_turns(text: str) -> Turns:
    """The turns of a dialogue; one speaker's turns in a row are one turn, its parts a blank line apart."""
    _, *parts = _TURN.split(text)  # role, text, role, text, …
    spoken = zip(parts[::2], parts[1::2], strict=True)
    turns = ((speaker, [said.strip() for _, said in group]) for speaker, group in groupby(spoken, key=itemgetter(0)))
    return [{"role": ROLES[speaker.lower()], "content": "\n\n".join(texts)} for speaker, texts in turns]


def prompt_turns(prompt: Any) -> Any:
    """A prompt as turns: a list of them, or the turns of a text that ends with "Assistant:". Any other value is
    returned unchanged: a record takes a text as one user turn, and refuses what is neither.
    """
    if is_chat(prompt):
        return chat_turns(prompt, "prompt")
    if is_dialogue(prompt) and (whole := _hh_text(prompt).rstrip()).endswith(_ASSISTANT):
        return _hh_turns(whole.removesuffix(_ASSISTANT))
    return prompt


def from_hh(row: Values) -> Made:
    """One ranking with K = 2: response "a" is the chosen one, or the first text, whose higher score wins.

    The prompt ends at the last "Assistant:" that both dialogues share, not at each one's own last one: an answer may
    itself contain that marker, and two answers may begin with the same words. White space around each turn belongs to
    the markers.
    """
    scored = "text" in row and "chosen" not in row
    texts: Any = row["text"] if scored else [require_text(row, key) for key in _JUDGED]
    field = "text" if scored else "chosen"
    fits = is_list(texts, str) and len(texts) == 2 and all(map(is_dialogue, texts))
    require(fits, field, texts, 'two dialogues that begin with "Human:"')
    first, second = map(_hh_text, texts)
    at = common_beginning([first, second]).rfind(_ASSISTANT)
    answers = [text[at + len(_ASSISTANT) :] for text in (first, second)]
    if at < 0 or any(_HUMAN in answer for answer in answers):
        raise BadRow(field, "the two dialogues part before the last answer: want the same dialogue up to it")
    rest = other_keys(row, *(("text",) if scored else _JUDGED))
    made = preference(_hh_turns(first[:at]), ({"content": answer.strip()} for answer in answers), rest)
    if scored:
        scores = {name: number(score, "score") for name, score in zip("ab", row["score"], strict=True)}
        made["ranking"] = ranking_of(scores, best="highest")
    yield made


def is_prompt_alone(row: Values) -> bool:
    """Whether a row holds nothing besides its prompt that could be an answer or a judgement."""
    words = (*_JUDGED, "completion", "response", "answer", "output", "label", "winner", "messages")
    others = (value for key, value in row.items() if key != "prompt")
    return not any(word in key for key in row for word in words) and not any(is_list(value, dict) for value in others)


def _split_strings(chosen: str, rejected: str) -> tuple[str, list[str]]:
    """An implicit prompt: what both strings share, up to the last white space that leaves both an answer."""
    at = len(common_beginning([chosen.rstrip()[:-1], rejected.rstrip()[:-1]]))
    while at > 0 and not chosen[at - 1].isspace():
        at -= 1
    if not chosen[:at].strip():
        raise BadRow("chosen", "chosen and rejected share no beginning that could be the prompt: give the key prompt")
    return chosen[:at].strip(), [chosen[at:].strip(), rejected[at:].strip()]


def from_trl(row: Values) -> Made:
    """One ranking with K = 2, response "a" the chosen one; or one demonstration of a completion; or one prompt."""
    keys = ("prompt", *_JUDGED, "completion")
    row = {**row, **{key: chat for key in keys if is_chat(chat := as_json(row.get(key)))}}  # as text, in a CSV
    prompt, system = prompt_turns(row.get("prompt")), row.get("system")
    rest = other_keys(row, "prompt", "system", *_JUDGED)
    if any(isinstance(row.get(key), str) for key in _JUDGED):
        both = [require_text(row, key) for key in _JUDGED]
        if prompt is None:
            other = next((key for key in row if _ASKED.search(key) and is_text(row[key])), None)
            require(other is None, "prompt", other, "the key prompt: rename this column, or set format=table")
            prompt, both = _split_strings(*both)
        yield preference(with_system(system, prompt), ({"content": text} for text in both), rest)
    elif "chosen" in row or "rejected" in row:
        turns = {key: chat_turns(row[key], key) for key in _JUDGED}
        # an equal last turn is still an answer
        said = [[(one["role"], one["content"]) for one in chat[:-1]] for chat in turns.values()]
        shared = len(common_beginning(said))
        answers = [one_answer(chat[shared:], key) for key, chat in turns.items()]
        # Some sets give the prompt, or its last turns, before both answers again; in others the turns go on from it.
        start = turns["chosen"][:shared]
        asked = [{"role": "user", "content": prompt}] if is_text(prompt) else prompt or []
        known = [turn["content"] for turn in asked]
        if start and start[0]["content"] in known:
            start = asked[: known.index(start[0]["content"])] + start
        elif not start or start[0]["role"] == "assistant":
            start = asked + start
        yield preference(with_system(system, start), answers, rest)
    elif "completion" in row:
        answer = rest.pop("completion")
        if isinstance(answer, list):
            turn = one_answer(answer, "completion")
            answer, more = turn["content"], other_keys(turn, "role", "content")
            rest |= {"answer": more} if more else {}
        yield _demonstration(with_system(system, prompt), answer, rest)
    else:
        user = rest.pop("user", None)
        inner = rest.pop("metadata") if isinstance(rest.get("metadata"), dict) else {}
        yield {"kind": "prompt", "prompt": with_system(system, prompt), "user": user, "metadata": inner | rest}


def pair_keys(row: Values) -> tuple[str, str, str] | None:
    """Which keys hold the prompt, the better and the worse answer."""
    asked = ("prompt", "question", "instruction", "input")
    prompt = next((key for key in asked if isinstance(row.get(key), str)), None)
    ways = (("chosen_response", "rejected_response"), ("response_j", "response_k"), _JUDGED)
    answers = next((pair for pair in ways if all(key in row for key in pair)), None)
    if prompt is None or answers is None or (prompt == "prompt" and answers == _JUDGED):
        return None
    return prompt, *answers


def from_pairs(row: Values) -> Made:
    """One ranking with K = 2: response "a" is the better one. Texts stay as they are, a maker's special tokens included."""
    keys = pair_keys(row)
    if keys is None:
        raise BadRow("prompt", "missing: want prompt, question, instruction or input, and two answers")
    more = ["input"] if keys[0] == "instruction" else []
    prompt = "\n\n".join([row[keys[0]], *(row[key] for key in more if is_text(row.get(key)))])
    answers = ({"content": require_text(row, key)} for key in keys[1:])
    yield preference(with_system(row.get("system"), prompt), answers, other_keys(row, *keys, "system", *more))


def from_choices(row: Values) -> Made:
    """One ranking, as in reward benchmarks: every chosen answer beats every rejected one; answers of the same side are tied."""
    for key in _JUDGED:
        require(is_list(row.get(key), str), key, row.get(key), "a list of strings")
    texts, count = [*row["chosen"], *row["rejected"]], len(row["chosen"])
    names = letters(len(texts))
    prompt = with_system(row.get("system"), prompt_turns(require_text(row, "prompt")))
    responses = [{"id": i, "text": text} for i, text in zip(names, texts, strict=True)]
    rest = other_keys(row, "prompt", *_JUDGED, "system")
    yield judged_record(prompt, responses, rest, ranking=[names[:count], names[count:]])


def has_one_answer(row: Values) -> bool:
    """Whether a row has a request and an answer, apart or as the turns of a chat."""
    chat = any(isinstance(row.get(key), list) for key in ("messages", "conversations"))
    return chat or row.keys() >= {"prompt", "completion"} or row.keys() >= {"instruction", "output"}


def from_kto(row: Values) -> Made:
    """One answer labelled true or false: a ranking with K = 1, rated 7 or 1; the label is kept under `metadata`."""
    key = "label" if "label" in row else "kto_tag"
    label: Any = as_flag(row[key])
    require(isinstance(label, bool), key, label, "true or false: remove rows without a judgement")
    chat = next((key for key in ("messages", "conversations") if key in row), None)
    prompt: Any
    if chat is not None:
        *prompt, answer = chat_turns(row[chat], chat)
        require(answer["role"] == "assistant", chat, answer["role"], "a last turn that is the assistant's answer")
    elif "instruction" in row:
        prompt, answer = request(row), {"content": row["output"]}
    else:
        prompt, completion = prompt_turns(row["prompt"]), row["completion"]
        answer = one_answer(completion, "completion") if isinstance(completion, list) else {"content": completion}
    used = ("messages", "conversations", "instruction", "input", "context", "output", "prompt", "completion", "system")
    about = with_system(row.get("system"), prompt), [response_of("a", answer)], other_keys(row, *used)
    yield judged_record(*about, ratings={"a": 7 if label else 1})
