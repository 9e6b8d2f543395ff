"""Chats as tokens, rendered with the tokenizer's own chat template, and the mask of the assistant's tokens.

The assistant's text is found by rendering twice, with and without the turn; the template is only called, never parsed.
Text in a message that spells a special token stays text: such spellings are marked before rendering, and a marked one
is encoded as ordinary text.

Completion (data.form=completion) is a template too: it writes prompt and response one after the other and nothing else,
and no token ends a response. The stages therefore need no special case.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import Any

from rlhf.data.records import common_beginning
from rlhf.data.tokenizer import encode_texts, separator_id
from rlhf.errors import UserError, reading

Turn = dict[str, Any]
PROBE = [{"role": "user", "content": "a"}]  # the prompt that a response is rendered after
CONTEXT = "context"  # key of an assistant's turn that is not to be learned
ENDS = "end_token_ids"  # the field of tokenizer_config.json that lists the end tokens
COMPLETION = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class _Marks:
    """Two characters that no message contains: `mark` breaks spellings of special tokens, `probe` stands for a text."""

    def __init__(self, tokenizer: Any, texts: Sequence[str] = ()):
        self.ids = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.ids |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        spellings = sorted((s for s in self.ids if len(s) > 1), key=len, reverse=True)
        self.special = re.compile(f"({'|'.join(map(re.escape, spellings)) or '(?!)'})")
        used = set().union(*map(set, texts))
        self.mark, self.probe = islice((chr(c) for c in range(0xE000, 0xF8FF) if chr(c) not in used), 2)

    def put(self, text: str) -> str:
        return self.special.sub(lambda m: f"{m[0][0]}{self.mark}{m[0][1:]}", text)

    def around(self, text: str) -> tuple[str, str]:
        """The text before and after the probe. Raises: UserError if the template does not write it exactly once."""
        before, probe, after = text.partition(self.probe)
        if not probe or self.probe in after:
            came = "the chat template does not write the assistant's text once, as it is"
            raise UserError(f"{came}: use another tokenizer")
        return before, after


def _encode_rendered(tokenizer: Any, texts: Sequence[str], marks: _Marks) -> list[list[int]]:
    """Ids of rendered text; special tokens are recognised except marked ones. No BOS is added: the template writes it."""
    plain = iter(encode_texts(tokenizer, [text for text in texts if marks.mark not in text], special=True))
    return [_encode_marked(tokenizer, text, marks) if marks.mark in text else next(plain) for text in texts]


def _encode_marked(tokenizer: Any, text: str, marks: _Marks) -> list[int]:
    """Encode the text between real special tokens as plain text; if pieces encode differently alone than in place (some
    tokenizers begin every text with a space), a space breaks the spelling instead.
    """

    def piecewise(text: str) -> list[int]:
        ids: list[int] = []
        for place, piece in enumerate(marks.special.split(text)):  # text, special token, text, …
            if place % 2:
                ids.append(marks.ids[piece])
            elif words := piece.replace(marks.mark, ""):
                ids += encode_texts(tokenizer, [words])[0]
        return ids

    unlike = text.replace(marks.mark, "x")
    if piecewise(unlike) == encode_texts(tokenizer, [unlike], special=True)[0]:
        return piecewise(text)
    return encode_texts(tokenizer, [text.replace(marks.mark, " ")], special=True)[0]


def _call(tokenizer: Any, turns: list[Turn], generate: bool = False) -> str:
    """The text of a dialogue. Raises: UserError if the template refuses it."""
    if not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template: adopt it with model.pretrained, which gives it ours")
    with reading("the chat template refuses a dialogue", "change its turns, or use another tokenizer"):
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generate)


def _render(tokenizer: Any, turns: list[Turn], generate: bool) -> tuple[str, list[Turn]]:
    """The text, and the turns as the template takes them: if it refuses them as they are, a system turn becomes part of
    the first user turn, and neighbours of one role become one turn. Raises: UserError if it refuses those too.
    """
    with suppress(UserError):
        return _call(tokenizer, turns, generate), turns
    system_first = [turn["role"] for turn in turns[:2]] == ["system", "user"]
    joined: list[Turn] = []
    for turn in [{**turns[0], "role": "user"}, *turns[1:]] if system_first else turns:
        if joined and joined[-1]["role"] == turn["role"]:
            joined[-1] = {**joined[-1], **turn, "content": f"{joined[-1]['content']}\n\n{turn['content']}"}
        else:
            joined.append(turn)
    return _call(tokenizer, joined, generate), joined


def _marked(tokenizer: Any, dialogues: Sequence[Any]) -> tuple[list[list[Turn]], _Marks]:
    """Turns with marks: of messages with keys or attributes `role` and `content`, or of a string, which is one user turn."""
    chats = []
    for messages in dialogues:
        given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        chats.append([(m["role"], m["content"]) if isinstance(m, Mapping) else (m.role, m.content) for m in given])
    marks = _Marks(tokenizer, [text for chat in chats for _, text in chat])
    return [[{"role": role, "content": marks.put(text)} for role, text in chat] for chat in chats], marks


def end_ids(tokenizer: Any, base: bool = False) -> list[int]:
    """The tokens that end a response, the one that training uses first; empty for a completion. base: of the pretrained
    model, which has learned where documents end: the separator too.
    """
    kept = tokenizer.init_kwargs.get(ENDS)
    ends = [i for i in [tokenizer.eos_token_id] if i is not None] if kept is None else list(kept)
    return [*ends, separator_id(tokenizer)] if base else ends


def find_end_of_turn(tokenizer: Any) -> int | None:
    """The special token that the template writes after the assistant's text, or None."""
    marks = _Marks(tokenizer)
    _, after = marks.around(_call(tokenizer, [*PROBE, {"role": "assistant", "content": marks.probe}]))
    end = marks.special.search(after)
    return marks.ids[end[0]] if end else None


def _after_end(tokenizer: Any, text: str, start: int, marks: _Marks) -> int | None:
    """The position after the first end token of text[start:]; None without one."""
    ends = set(end_ids(tokenizer))
    return next((f.end() for f in marks.special.finditer(text, start) if marks.ids[f[0]] in ends), None)


def use_completion(tokenizer: Any) -> None:
    """Make prompts and responses raw text. If the tokenizer adds a BOS to every text, prompts begin with it."""
    begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    tokenizer.chat_template = ("{{ bos_token }}" if begins else "") + COMPLETION
    tokenizer.init_kwargs[ENDS] = []


def is_completion(tokenizer: Any) -> bool:
    return str(tokenizer.chat_template).endswith(COMPLETION)


def encode_prompts(tokenizer: Any, prompts: Sequence[str | Sequence[Any]]) -> list[list[int]]:
    """Prompts as the template renders them, generation prompt included. A prompt is a list of messages (with keys or
    attributes `role` and `content`); a string means one user turn. Raises: UserError if the tokenizer has no template,
    or it refuses a dialogue.
    """
    chats, marks = _marked(tokenizer, prompts)
    return _encode_rendered(tokenizer, [_render(tokenizer, c, True)[0] for c in chats], marks)


def encode_prompt(tokenizer: Any, messages: str | Sequence[Any]) -> list[int]:
    """One prompt, see `encode_prompts`."""
    return encode_prompts(tokenizer, [messages])[0]


def encode_dialogue(
    tokenizer: Any, messages: Sequence[Any], context: Collection[int] = ()
) -> tuple[list[int], list[bool]]:
    """The tokens of a dialogue, and the mask of the assistant's: in each of its turns, everything after the generation
    prompt up to and including the end token.

    context: turns that are left out of the mask. If the template writes no end token after the last turn, the
    tokenizer's is added. Raises: UserError as `encode_prompts`, or if a turn cannot be found in the rendered text.
    """
    [turns], marks = _marked(tokenizer, [messages])
    for place in context:
        turns[place][CONTEXT] = True
    text, turns = _render(tokenizer, turns, False)
    answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    spans = [_find_turn(tokenizer, turns, i, text, marks) for i in answers]
    last = turns[-1]["role"] == "assistant"
    if last:
        text = text[: spans[-1][1]]
    pieces = [text, *(text[:place] for span in spans for place in span)]
    whole, *cuts = _encode_rendered(tokenizer, pieces, marks)
    mask = [False] * len(whole)
    for i, start, stop in zip(answers, cuts[::2], cuts[1::2], strict=True):
        if CONTEXT in turns[i]:
            continue
        first, end = (len(common_beginning([whole, cut])) for cut in (start, stop))
        mask[first:end] = [True] * (end - first)
    ends = end_ids(tokenizer)
    if last and ends and whole[-1] not in ends:
        whole, mask = [*whole, ends[0]], [*mask, True]
    return whole, mask


def encode_scored(tokenizer: Any, messages: Sequence[Any], ended: bool) -> list[int]:
    """A dialogue that ends with the assistant, as the template renders it; if the response was cut off (`ended` is
    false), up to its last word. Raises: UserError as `encode_prompts`.
    """
    [turns], marks = _marked(tokenizer, [messages])
    if ended:
        return _encode_rendered(tokenizer, [_render(tokenizer, turns, False)[0]], marks)[0]
    last = {**turns[-1], "content": turns[-1]["content"].rstrip() + marks.probe}
    text, _ = marks.around(_render(tokenizer, [*turns[:-1], last], False)[0])
    return _encode_rendered(tokenizer, [text], marks)[0]


def _find_turn(tokenizer: Any, turns: list[Turn], index: int, text: str, marks: _Marks) -> tuple[int, int]:
    """The positions in the dialogue's text at which a turn of the assistant begins, after the generation prompt, and at
    which its end token ends. The dialogue is rendered again with the probe in this turn; the text around it is the
    same.
    """
    probed = [*turns[:index], {**turns[index], "content": marks.probe}, *turns[index + 1 :]]
    before, after = marks.around(_call(tokenizer, probed))
    prompt = _call(tokenizer, turns[:index], True) if index else ""
    if prompt and not text.startswith(before) and before.startswith(prompt):
        before = prompt  # what the template writes between depends on the text
    if not text.startswith(before) or not text.endswith(after):
        raise UserError(f"the chat template hides what the assistant says in turn {index + 1}: set sft.turns=last")
    start = len(prompt) if prompt and before.startswith(prompt) else len(before)
    stop = len(text) - len(after)
    closing = _after_end(tokenizer, text, stop, marks)
    closed = closing is not None and not marks.special.sub("", text[stop:closing]).strip()
    return start, closing if closed and closing else stop


@lru_cache(maxsize=8)
def _frame(tokenizer: Any, _: str) -> tuple[str, str, str, bool]:
    """What the template writes around a response: the prompt (empty if a response encodes alone as it does after its
    prompt), the text before, that after up to and including the end token (empty without one), and whether it strips
    responses.
    """
    marks = _Marks(tokenizer)
    prompt = _call(tokenizer, PROBE, True)
    turns = ({"role": "assistant", "content": text} for text in (marks.probe, f"\n{marks.probe}\n"))
    plain, spaced = (_call(tokenizer, [*PROBE, turn]) for turn in turns)
    before, after = marks.around(plain)
    before = before[len(prompt) :] if before.startswith(prompt) else ""
    after = after[: _after_end(tokenizer, after, 0, marks) or 0]
    if is_completion(tokenizer):
        prompt = "\n"  # a completion follows any text; a newline joins no word
    texts = [f"{prompt}{before}x{after}", prompt, f"{before}x{after}"]
    whole, first, second = encode_texts(tokenizer, texts, special=True)
    return "" if whole == first + second else prompt, before, after, plain == spaced


def encode_responses(tokenizer: Any, texts: Sequence[str], ended: bool = True) -> list[list[int]]:
    """Responses as the template writes them after a prompt, with the end token unless they were cut off."""
    prompt, before, after, strips = _frame(tokenizer, str(tokenizer.chat_template))
    marks = _Marks(tokenizer, texts)
    said = [marks.put(text.strip() if strips else text) for text in texts]
    # Some write an empty thought, <think></think>, before the text: one with a thought of its own needs none.
    tag = re.match(r"\s*(<[^<>\s]+>)", before)
    opening = tag[1] if tag else ""
    own = [bool(opening) and text.lstrip().startswith(opening) for text in said]
    pieces = [f"{prompt}{'' if o else before}{text}{after if ended else ''}" for o, text in zip(own, said, strict=True)]
    first = len(encode_texts(tokenizer, [prompt], special=True)[0])
    missing = end_ids(tokenizer)[:1] if ended and not after else []
    return [ids[first:] + missing for ids in _encode_rendered(tokenizer, pieces, marks)]


def encode_response(tokenizer: Any, text: str, ended: bool = True) -> list[int]:
    """One response, see `encode_responses`."""
    return encode_responses(tokenizer, [text], ended)[0]


def decode_response(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of a sampled response up to its first end token; other special tokens are left out. Bytes that are not
    valid UTF-8 (a model may stop within a character) become U+FFFD.
    """
    ends, ids = set(end_ids(tokenizer)), [int(i) for i in ids]
    until = next((place for place, i in enumerate(ids) if i in ends), len(ids))
    before = encode_texts(tokenizer, ["x"])[0] if is_completion(tokenizer) else []  # else some drop the first space
    text = tokenizer.backend_tokenizer.decode([*before, *ids[:until]], skip_special_tokens=True)
    return text[1:] if before else text


def response_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """As `decode_response`, without the white space around what the assistant says; a completion keeps its own, which
    joins it to the prompt.
    """
    text = decode_response(tokenizer, ids)
    return text if is_completion(tokenizer) else text.strip()
