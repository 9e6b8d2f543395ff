"""Printing. Text from files and models is printed through this module, without the terminal's control characters.

A terminal obeys escape sequences: they write to the clipboard, or hide what was printed before. `printable` shows each
such character, also right-to-left overrides, as its escape, one at a time, so that it does not matter how a sequence is
split over tokens or calls.
"""

import os
import sys
import unicodedata
from typing import TextIO

# Unicode categories that a terminal executes or does not show: controls (C0, C1, DEL), format characters (bidi, zero
# width, tags), surrogates, and the separators of lines and paragraphs.
HIDDEN = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))


def printable(text: object, keep: str = "") -> str:
    """A text with every control, bidi and zero-width character as its escape (\\x1b, \\u202e), except those in `keep`."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(repr(c)[1:-1] if unicodedata.category(c) in HIDDEN and c not in keep else c for c in text)


def one_line(text: object, limit: int = 1000) -> str:
    """A text as one printable line of at most `limit` characters; runs of white space become single spaces."""
    line = printable(" ".join(str(text).split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def say(text: object = "", stream: TextIO | None = None) -> None:
    """Print one line on standard output, or on `stream`, at once. A line break inside it is shown as its escape.
    Raises: OSError that names standard output if it is full or gone.
    """
    write(printable(text) + "\n", stream)


def write(text: str, stream: TextIO | None = None) -> None:
    """Print trusted or already `printable` text unchanged. Raises: OSError as `say` does."""
    target = stream or sys.stdout
    try:
        target.write(text)
        target.flush()
    except OSError as error:
        name = "standard error" if target is sys.stderr else "standard output"
        raise OSError(error.errno, error.strerror, name) from None


def accept_any_text() -> None:
    """Make standard output and error escape characters that their encoding lacks, such as "…" in an ASCII locale.

    One with which the process was started closed discards what is written.
    """
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w", encoding="utf-8") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
