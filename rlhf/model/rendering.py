"""Prompt and response as one input of a text classifier, in its own tokenizer's words.

How a dialogue is rendered, in this order of preference:
- template: the tokenizer has a chat template: prompt and response go through it as they are
- pair: the tokenizer joins two texts with tokens between them: the prompt is the first, the response the second
- plain: everything is one text, the response after "Assistant: "
Without a template, a prompt of one user turn is its text; several turns are "User: …", "Assistant: …" and "System: …",
with a blank line between them. The token that closes the response (its separator or end token) appears only if the
response ended. Text that spells a special token is broken up, so that it stays text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.data.chat_template import encode_scored
from rlhf.data.records import Message
from rlhf.errors import UserError

LEAST_PROMPT = 4  # a long response leaves the prompt at least one token in this many


@dataclass(slots=True)
class TextRow:
    """One input: token ids and, of the same length, token types (0 prompt, 1 response, as the tokenizer says)."""

    ids: list[int]
    types: list[int]

    def __len__(self) -> int:
        return len(self.ids)


def render_prompt(messages: Sequence[Message]) -> str:
    """A prompt as one text, for tokenizers without a chat template."""
    if len(messages) == 1 and messages[0].role == "user":
        return messages[0].content
    return "\n\n".join(f"{message.role.capitalize()}: {message.content}" for message in messages)


class TextEncoder:
    """Makes rows of at most `limit` tokens (None: no limit) with any transformers tokenizer."""

    def __init__(self, tokenizer: Any, limit: int | None):
        self.tokenizer, self.limit = tokenizer, limit
        added = [tokenizer.num_special_tokens_to_add(pair=pair) for pair in (False, True)]
        self.form = "template" if tokenizer.chat_template else "pair" if added[1] > added[0] else "plain"
        if self.form == "template" and not tokenizer.is_fast:
            raise UserError("reward.model: a chat template, but no tokenizer.json: save its tokenizer as a fast one")
        # spellings of special tokens in messages are marked when the template is rendered
        special = [] if self.form == "template" else tokenizer.all_special_tokens
        spellings = sorted((token for token in special if len(token) > 1), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, spellings))) if spellings else None
        self._special_ids = set(tokenizer.all_special_ids)
        self._closing = {tokenizer.sep_token_id, tokenizer.eos_token_id} - {None}

    def encode(self, prompt: Sequence[Message], response: str, ended: bool = True) -> TextRow:
        """One row. If it is too long, the oldest turns are dropped, then the beginning of the last one; a response that
        leaves the prompt less than a quarter of the room is cut at its end instead, and then has no closing token.

        Raises: UserError if the chat template refuses the dialogue.
        """
        messages = [Message(role=m.role, content=self._as_text(m.content)) for m in prompt]
        response = self._as_text(response)
        row = self._row(messages, response, ended)
        if self.limit is None or len(row) <= self.limit:
            return row
        while (over := len(row) - self.limit) > 0:
            spare = self._count(render_prompt(messages)) - self.limit // LEAST_PROMPT
            if spare <= 0:
                break
            messages = self._shorten(messages, min(over, spare))
            row = self._row(messages, response, ended)
        if len(row) > self.limit:
            row = self._row(messages, response, ended=False)
        while (over := len(row) - self.limit) > 0 and response:
            response = self._cut(response, max(0, self._count(response) - over), keep_start=True)
            row = self._row(messages, response, ended=False)
        return TextRow(row.ids[-self.limit :], row.types[-self.limit :])

    def count(self, response: str) -> int:
        """The number of tokens of a response, without special ones."""
        return self._count(self._as_text(response))

    def _row(self, messages: list[Message], response: str, ended: bool) -> TextRow:
        if self.form == "pair":
            encoded = self.tokenizer(render_prompt(messages), response, return_token_type_ids=True)
        elif self.form == "template":
            ids = encode_scored(self.tokenizer, [*messages, Message(role="assistant", content=response)], ended)
            return TextRow(ids, [0] * len(ids))
        else:
            turns = [f"{m.role.capitalize()}: {m.content}" for m in messages]
            encoded = self.tokenizer("\n\n".join([*turns, f"Assistant: {response}"]), return_token_type_ids=True)
        ids, types = list(encoded["input_ids"]), list(encoded["token_type_ids"])
        at = self._find_closing(ids)
        if at is not None and not ended:
            del ids[at], types[at]
        elif at is None and ended and self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
            types.append(types[-1] if types else 0)
        return TextRow(ids, types)

    def _find_closing(self, ids: list[int]) -> int | None:
        """The position of the token that closes the response, among the special tokens at the end."""
        for at in range(len(ids) - 1, -1, -1):
            if ids[at] in self._closing:
                return at
            if ids[at] not in self._special_ids:
                return None
        return None

    def _as_text(self, text: str) -> str:
        return self._special.sub(lambda m: f"{m[0][0]} {m[0][1:]}", text) if self._special else text

    def _count(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _shorten(self, messages: list[Message], tokens: int) -> list[Message]:
        """Drop the oldest turn (a system turn is kept as long as possible), or the first tokens of the last one."""
        first = 1 if messages[0].role == "system" and len(messages) > 1 else 0
        if len(messages) > first + 1:
            rest = messages[first + 1 :]
            while rest[0].role != "user":
                rest = rest[1:]
            return [*messages[:first], *rest]
        if first:
            return messages[1:]
        text = messages[0].content
        return [Message(role="user", content=self._cut(text, max(0, self._count(text) - tokens), keep_start=False))]

    def _cut(self, text: str, keep: int, keep_start: bool) -> str:
        """The first or the last `keep` tokens of a text."""
        if not keep:
            return ""
        if not self.tokenizer.is_fast:
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            return self.tokenizer.decode(ids[:keep] if keep_start else ids[-keep:])
        offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return text[: offsets[keep - 1][1]] if keep_start else text[offsets[-keep][0] :]
