"""The progress of a long loop: a live line on a terminal, a plain line now and then in a log, or nothing.

Set RLHF_PROGRESS=off to silence it. Of several processes only the main one shows it, on standard error.
"""

import math
import os
import shutil
import sys
import time
from contextlib import AbstractContextManager

from rlhf.system.processes import is_first
from rlhf.system.terminal import printable, say, write

# Seconds between two states of the live line, and between two plain lines.
LIVE_INTERVAL, PLAIN_INTERVAL = 0.2, 10.0


class Progress(AbstractContextManager["Progress"]):
    """Counts a loop of `total` units (None: unknown), `initial` of them done before this process began, and shows the
    count on standard error: on a terminal one line that is drawn again, otherwise whole lines; both at the first
    update, every few seconds, and at the end. The rate and the time left count only what this process did.
    """

    def __init__(self, total: int | None, label: str, unit: str = "step", initial: int = 0) -> None:
        silent = not is_first() or os.environ.get("RLHF_PROGRESS", "").lower() in ("off", "0", "false")
        self.total, self.label, self.unit, self.initial, self.done = total, label, unit, initial, initial
        self._stream, self._figures = None if silent else sys.stderr, dict[str, str]()
        self.started, self._printed_at, self._printed = time.monotonic(), -math.inf, initial
        self._live = self._stream is not None and self._stream.isatty() and os.environ.get("TERM") != "dumb"

    def update(self, n: int = 1, **figures: float) -> None:
        """Moves on by `n` units and shows `figures`, which stay until replaced."""
        self.done += n
        self._figures |= {name: format_figure(value) for name, value in figures.items()}
        if time.monotonic() - self._printed_at >= (LIVE_INTERVAL if self._live else PLAIN_INTERVAL):
            self._print()

    def close(self) -> None:
        """Shows the last state; a second call does nothing."""
        if self.done != self._printed:
            self._print()
        if self._live and self.done != self.initial:
            write("\n", self._stream)
        self._live = False

    def _print(self) -> None:
        self._printed, self._printed_at = self.done, time.monotonic()
        if self._stream is None:
            return
        seconds = self._printed_at - self.started
        rate = (self.done - self.initial) / seconds if seconds > 0 else 0.0
        remaining = f"{format_seconds(seconds)} taken"
        if self.total is not None and self.done < self.total:
            remaining = f"{format_seconds((self.total - self.done) / rate) if rate > 0 else '?'} left"
        speed = f"{rate:.3g} {self.unit}/s" if rate >= 1 or rate == 0 else f"{1 / rate:.3g} s/{self.unit}"
        figures = (f"{name} {value}" for name, value in self._figures.items())
        count = format_count(self.unit, self.done, self.total)
        line = "  ".join((f"{self.label}: {count}", remaining, speed, *figures))
        if self._live:
            write(f"\r\x1b[K{printable(line)[: shutil.get_terminal_size().columns - 1]}", self._stream)
        else:
            say(line, self._stream)

    def __exit__(self, *raised: object) -> None:
        self.close()


def format_count(unit: str, done: int, total: int | None) -> str:
    """step 3, or step 3/12 (25%)."""
    return f"{unit} {done:,}" + (f"/{total:,} ({100 * done / max(total, 1):.0f}%)" if total is not None else "")


def format_figure(value: float) -> str:
    """At most four figures, short for axes: 0.0312, 12.35, 1.2e-5, 18k, 2.5M."""
    size = abs(value)
    if 0 < size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    return f"{value / 1e3:.3g}k" if size >= 1e4 else f"{value + 0.0:.4g}"


def format_seconds(seconds: float) -> str:
    """12 s, 3:05 (minutes) or 2:03:05 (hours)."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02} min" if minutes else f"{rest} s"
