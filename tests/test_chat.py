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
    assert list(chat.read_lines(False)) == ["naïve 東京", ""]


def test_a_closed_input_is_one_line(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(
        UserError, match=r"chat: standard input is closed: connect it, or ask one question with chat\.message"
    ):
        next(chat.read_lines(False))


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the latter as in the C locale
def test_bytes_that_are_no_text_are_one_line(monkeypatch, errors):
    given(monkeypatch, b"caf\xe9\n", errors)
    with pytest.raises(UserError, match="chat: the message is not UTF-8: convert the input to UTF-8"):
        next(chat.read_lines(False))


def test_half_characters_from_a_command_line_are_one_line():
    with pytest.raises(UserError, match="chat: the message is not UTF-8"):
        chat.answer(Config(), None, None, [{"role": "user", "content": "caf\udce9"}], 0)
