"""How commands end when the system refuses: one line, exit code 2, 130 or 141. A bug of ours keeps its traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf import cli
from rlhf.commands import report
from rlhf.system.exits import describe

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


def test_an_ascii_locale_shows_escapes():
    done = rlhf("ppo", "--help", env=ASCII)
    assert done.returncode == 0 and not done.stderr and done.stdout.isascii()
    assert "[key=value \\u2026]" in done.stdout


def test_the_locale_decides_no_encoding(tmp_path):
    name = "größe"
    rows = [{"prompt": f"Größe {i}?", "chosen": "zwölf", "rejected": "日本", "rater": "Jürgen"} for i in range(4)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    done = rlhf("import", f"path={name}.jsonl", f"out={name}", env=ASCII, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    read = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / name).glob("ranking/*.jsonl"))
    assert read.count("zwölf") == 4 and "Größe 3?" in read
    (tmp_path / f"{name}.txt").write_text("Straße und Übung. " * 200 + "\n\n" + "Ärger. " * 99, encoding="utf-8")
    settings = [f"data.corpus={name}.txt", "tokenizer.vocab_size=300", "run=x", "device=cpu"]
    done = rlhf("tokenizer", *settings, env=ASCII, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


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
    done = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED, "export", "run=x", "export.stage=sft"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
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
    (UnicodeDecodeError("utf-8", b"ab\xff", 2, 3, "invalid start byte"), "text that is not utf-8 (byte 0xff at 2): convert"),
    (UnicodeEncodeError("ascii", "…", 0, 1, "ordinal"), "cannot write U+2026 as ascii: set a UTF-8 locale"),
    (MemoryError(), "out of memory (the system gave no more): set memory.budget_gb to less"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nto"), "out of memory (DefaultCPUAllocator: can't"),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_what_the_system_refuses_is_one_line(monkeypatch, capsys, error, said):
    code, told = call(monkeypatch, capsys, error)
    assert code == 2 and told.startswith(f"rlhf: error: {said}") and told.count("\n") == 1


def test_a_bug_keeps_its_traceback(monkeypatch, capsys):
    with pytest.raises(KeyError, match="forgotten"):
        call(monkeypatch, capsys, KeyError("forgotten"))
    assert describe(ValueError("shapes")) is None


def test_an_error_after_a_signal_is_the_interruption():
    """A library that imports lazily turns KeyboardInterrupt into its own error."""
    code = (
        "import os, signal, time; from rlhf.system.exits import ending, interrupt_on_signals; interrupt_on_signals()\n"
        "with ending():\n"
        "    try: os.kill(os.getpid(), signal.SIGINT); time.sleep(9)\n"
        "    except BaseException: raise ModuleNotFoundError('Could not import')"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "\nrlhf: interrupted\n")
