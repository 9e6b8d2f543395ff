"""What `rlhf chat` reads: messages, an end, a closed input, and bytes that are no text. The models' tests have its answers."""

import io
import sys

import pytest

from rlhf.commands import chat
from rlhf.config import Config
from rlhf.errors import UserError


def given(monkeypatch: pytest.MonkeyPatch, content: bytes, errors: str = "strict") -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", errors=errors))


def test_messages_are_read_until_the_end(monkeypatch):
    given(monkeypatch, "  naïve 東京 \n\n".encode())
    assert [chat.read_line(False) for _ in range(3)] == ["naïve 東京", "", None]


def test_a_closed_input_is_one_line(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(
        UserError, match=r"chat: standard input is closed: connect it, or ask one question with chat\.message"
    ):
        chat.read_line(False)


def test_bytes_that_are_no_text_are_one_line(monkeypatch):
    given(monkeypatch, b"caf\xe9\n")
    with pytest.raises(UserError, match="chat: the message is not UTF-8: convert the input to UTF-8"):
        chat.read_line(False)


def test_bytes_that_arrive_as_half_characters_are_one_line(monkeypatch):
    """As in the C locale, and in chat.message from a command line."""
    given(monkeypatch, b"caf\xe9\n", errors="surrogateescape")
    with pytest.raises(UserError, match="chat: the message is not UTF-8"):
        chat.read_line(False)
    with pytest.raises(UserError, match="chat: the message is not UTF-8"):
        chat.answer(Config(), None, None, [{"role": "user", "content": "caf\udce9"}], 0)
