"""What reaches the terminal: no control character out of a name, a label, a record or an answer; and what `rlhf chat` reads."""

import ast
import io
import re
import sys
from pathlib import Path

import pytest

import rlhf
from rlhf.commands import chat
from rlhf.config import compose
from rlhf.data.tokenizer import encode_text, train_tokenizer
from rlhf.engines import running
from rlhf.errors import UserError
from rlhf.system.terminal import one_line, printable, say

# A title and the clipboard by OSC, a cursor by CSI, the same with C1's single characters, a right-to-left override, an
# isolate, a zero-width space, a byte order mark, a tag, a soft hyphen, DEL, a bell, a line separator, a carriage return.
HOSTILE = (
    "\x1b]0;owned\x07\x1b]52;c;eA==\x1b\\\x1b[2J\x9b1A\x9d0;x\x9c\u202egnp.exe\u2066\u200b\ufeff\U000e0041\u00ad\x7f"
    "\u2028\roverwritten\x08"
)
SPOKEN = "naïve 東京\u3000\u00a0 ελ العربية é"
LETTERS = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f]"
)


def assert_clean(text: str) -> None:
    assert not LETTERS.search(text), ascii(text)
    assert "\\x1b" in text, "shown, not dropped"


def test_every_control_is_shown_as_its_escape_and_every_letter_as_it_is():
    assert_clean(printable(HOSTILE))
    assert printable("a\x1b[1m\u202eb\n") == "a\\x1b[1m\\u202eb\\n"
    assert printable("a\n\tb", keep="\n\t") == "a\n\tb"
    assert printable(SPOKEN) == SPOKEN
    assert printable("\ud800") == "\\ud800"
    assert one_line(" a\n\n b\x00 ") == "a b\\x00" and len(one_line("x" * 5000)) == 1000


def test_a_line_that_is_said_is_one_line(capsys):
    say("one\ntwo\rthree" + HOSTILE)
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and out.startswith("one\\ntwo\\rthree")
    assert_clean(out)


def test_an_answer_is_streamed_without_controls_however_tokens_split_them(capsys, monkeypatch):
    """Byte-level tokens: ESC, its bracket and each byte of a right-to-left override come one by one."""
    tokenizer = train_tokenizer(["some text to learn from"] * 4, 290, context_length=64)
    ids = [token for character in HOSTILE + "\nnext\t" + SPOKEN for token in encode_text(tokenizer, character)]
    assert len(ids) > len(HOSTILE) + 3

    class Batch:
        def __init__(self, *_):
            self.response = None

        def advance(self, new=()):
            [self.response] = new or [self.response]
            self.response.tokens.append(ids[len(self.response.tokens)])

    monkeypatch.setattr(running, "RunningBatch", Batch)
    config = compose.compose_config([f"rollout.max_new_tokens={len(ids)}"])
    tokenizer.model_max_length = 4 * len(ids)
    answer = chat.answer(config, None, tokenizer, [{"role": "user", "content": "hello"}], 0)
    assert HOSTILE in answer, "the dialogue goes on with what the model wrote"
    out = capsys.readouterr().out
    assert_clean(out.replace("\n", "").replace("\t", ""))
    assert "\nnext\t" + SPOKEN in out


def test_nothing_prints_past_the_one_function():
    """Only rlhf/system/terminal.py names print or a stream's own write."""
    for path in Path(rlhf.__file__).parent.rglob("*.py"):
        if path.name == "terminal.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Name | ast.Attribute):
                name = ast.unparse(node)
                assert name not in ("print", "sys.stdout.write", "sys.stderr.write"), f"{path}:{node.lineno}: {name}"


def test_standard_output_that_is_gone_is_named(monkeypatch):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError) as refusal:
        say("text", Full())
    assert refusal.value.filename == "standard output"
    monkeypatch.setattr(sys, "stdout", None)
    say("nobody listens")


def given(monkeypatch: pytest.MonkeyPatch, content: bytes, errors: str = "strict") -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", errors=errors))


def test_messages_are_read_until_the_end(monkeypatch):
    given(monkeypatch, "  naïve 東京 \n\n".encode())
    assert list(chat.read_lines(False)) == ["naïve 東京", ""]


def test_a_closed_input_is_one_line(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match=r"chat: standard input is closed: connect it, or ask .* chat\.message"):
        next(chat.read_lines(False))


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the latter as in the C locale
def test_bytes_that_are_no_text_are_one_line(monkeypatch, errors):
    given(monkeypatch, b"caf\xe9\n", errors)
    with pytest.raises(UserError, match="chat: the message is not UTF-8: convert the input to UTF-8"):
        next(chat.read_lines(False))
