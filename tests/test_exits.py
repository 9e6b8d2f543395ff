"""How commands end when the system refuses: one line, exit code 2, 130 or 141. A bug of ours keeps its
traceback. And what reaches the terminal: no control character of a name, a label, a record or an answer."""

import ast
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf import cli
from rlhf.commands import chat, report
from rlhf.config import Config, compose
from rlhf.data.tokenizer import encode_texts, train_tokenizer
from rlhf.engines import running
from rlhf.errors import UserError
from rlhf.system.exits import describe
from rlhf.system.terminal import one_line, printable, say

from .syntax import nodes_of

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "RLHF_PROGRESS": "off"}


def rlhf(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A real process: streams and rights are the operating system's."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": ENVIRONMENT, "timeout": 100} | options
    done = subprocess.run([sys.executable, "-m", "rlhf", *arguments], **options)
    streams = [None if text is None else text.decode() for text in (done.stdout, done.stderr)]
    return subprocess.CompletedProcess(done.args, done.returncode, *streams)


def assert_one_line(done: subprocess.CompletedProcess[str], said: str, code: int = 2) -> None:
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("rlhf: error: "), done.stderr
    assert said in done.stderr


ASCII = ENVIRONMENT | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_an_ascii_locale_shows_escapes_and_decides_no_encoding(tmp_path):
    done = rlhf("ppo", "--help", env=ASCII)
    assert done.returncode == 0 and not done.stderr and done.stdout.isascii()
    assert "[key=value \\u2026]" in done.stdout
    name = "größe"
    rows = [{"prompt": f"Größe {i}?", "chosen": "zwölf", "rejected": "日本", "rater": "Jürgen"} for i in range(4)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    done = rlhf("import", f"path={name}.jsonl", f"out={name}", env=ASCII, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    read = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / name).glob("ranking/*.jsonl"))
    assert read.count("zwölf") == 4 and "Größe 3?" in read


def test_a_full_standard_output_is_one_line(tmp_path):
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = rlhf("--help", stdout=full, cwd=tmp_path)
    assert_one_line(done, "standard output: No space left on device: free space, or write elsewhere")


@pytest.mark.parametrize(("arguments", "code"), [("--version >&-", 0), ("watch >&- 2>&-", 2)])
def test_standard_output_and_error_may_be_closed(tmp_path, arguments, code):
    shell = ["sh", "-c", f'"$0" -m rlhf {arguments}', sys.executable]
    done = subprocess.run(shell, env=ENVIRONMENT, cwd=tmp_path, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")


def test_a_reader_that_leaves_ends_it_quietly():
    reading, writing = os.pipe()
    os.close(reading)
    done = rlhf("--help", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


# Root may read everything: without its capabilities (none effective) it is held to the file's mode like anybody else.
UNPRIVILEGED = """
import ctypes, os, sys
if os.getuid() == 0:
    ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
from rlhf.cli import main
main(sys.argv[1:])
"""


def test_a_record_that_may_not_be_read_is_one_line(tmp_path):
    folder = tmp_path / "runs" / "x" / "sft"
    folder.mkdir(parents=True)
    (folder / "stage.json").write_text("{}")
    (folder / "stage.json").chmod(0)
    command = [sys.executable, "-c", UNPRIVILEGED, "export", "run=x", "export.stage=sft"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert_one_line(done, "stage.json: Permission denied: give this user the right")


def call(monkeypatch, capsys, error: BaseException) -> tuple[int, str]:
    """`rlhf report` with a command that raises: its exit code and what it says."""

    def refuse(config: Any) -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["rlhf"])
    monkeypatch.setattr(report, "run", refuse)
    with pytest.raises(SystemExit) as stop:
        cli.main(["report"])
    return int(stop.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize(("error", "said"), [
    (PermissionError(13, "Permission denied", "a/b"), "a/b: Permission denied: give this user the right to read and write it"),
    (IsADirectoryError(21, "Is a directory", "a/b"), "a/b: Is a directory: check it"),
    (UnicodeDecodeError("utf-8", b"ab\xff", 2, 3, "invalid start byte"), "'utf-8' codec can't decode byte 0xff in position 2: "),
    (UnicodeEncodeError("ascii", "…", 0, 1, "ordinal"), "'ascii' codec can't encode character '\\u2026' in position 0: ordinal: convert"),
    (MemoryError(), "out of memory (the system gave no more): set memory.budget_gb to less"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nto"), "out of memory (DefaultCPUAllocator: can't"),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_what_the_system_refuses_is_one_line(monkeypatch, capsys, error, said):
    code, told = call(monkeypatch, capsys, error)
    assert code == 2 and told.startswith(f"rlhf: error: {said}") and told.count("\n") == 1


def test_a_bug_keeps_its_traceback_and_an_error_after_a_signal_is_the_interruption(monkeypatch, capsys):
    with pytest.raises(KeyError, match="forgotten"):
        call(monkeypatch, capsys, KeyError("forgotten"))
    assert describe(ValueError("shapes")) is None
    # A library that imports lazily turns KeyboardInterrupt into its own error.
    code = (
        "import os, signal, time; from rlhf.system.exits import ending, interrupt_on_signals; interrupt_on_signals()\n"
        "with ending():\n"
        "    try: os.kill(os.getpid(), signal.SIGINT); time.sleep(9)\n"
        "    except BaseException: raise ModuleNotFoundError('Could not import')"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "\nrlhf: interrupted\n")


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


def test_every_control_is_shown_as_its_escape_and_a_line_is_one_line(capsys):
    assert_clean(printable(HOSTILE))
    assert printable("a\x1b[1m\u202eb\n") == "a\\x1b[1m\\u202eb\\n"
    assert printable("a\n\tb", keep="\n\t") == "a\n\tb"
    assert printable(SPOKEN) == SPOKEN
    assert printable("\ud800") == "\\ud800"
    assert one_line(" a\n\n b\x00 ") == "a b\\x00" and len(one_line("x" * 5000)) == 1000
    say("one\ntwo\rthree" + HOSTILE)
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and out.startswith("one\\ntwo\\rthree")
    assert_clean(out)


def test_an_answer_is_streamed_without_controls_however_tokens_split_them(capsys, monkeypatch):
    """Byte-level tokens: ESC, its bracket and each byte of a right-to-left override come one by one."""
    tokenizer = train_tokenizer(["some text to learn from"] * 4, 290, context_length=64)
    ids = [token for character in HOSTILE + "\nnext\t" + SPOKEN for token in encode_texts(tokenizer, [character])[0]]
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
    for path in (ROOT / "rlhf").rglob("*.py"):
        if path.name == "terminal.py":
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Name | ast.Attribute):
                name = ast.unparse(node)
                assert name not in ("print", "sys.stdout.write", "sys.stderr.write"), f"{path}:{node.lineno}: {name}"


def given(monkeypatch: pytest.MonkeyPatch, content: bytes, errors: str = "strict") -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", errors=errors))


def test_messages_are_read_until_the_end_and_a_closed_input_is_one_line(monkeypatch):
    given(monkeypatch, "  naïve 東京 \n\n".encode())
    assert list(chat.read_lines(False)) == ["naïve 東京", ""]
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match=r"chat: standard input is closed: connect it, or ask .* chat\.message"):
        next(chat.read_lines(False))


def test_bytes_that_are_no_text_are_one_line(monkeypatch):
    given(monkeypatch, b"caf\xe9\n")
    with pytest.raises(UnicodeDecodeError) as refusal:
        next(chat.read_lines(False))
    assert "can't decode byte 0xe9 in position 3: invalid continuation byte: convert" in (describe(refusal.value) or "")
    given(monkeypatch, b"caf\xe9\n", "surrogateescape")  # as in the C locale
    said = [{"role": "user", "content": next(chat.read_lines(False))}]
    with pytest.raises(UserError, match="chat: the message is not UTF-8: convert the input to UTF-8"):
        chat.answer(Config(), None, None, said, 0)
