"""`python -m tests.snippet <code> <arguments>`: Python code as the module of a launch."""

import subprocess
import sys
from pathlib import Path

LAUNCH = """
import sys
from rlhf.commands.launch import run_processes
from rlhf.system.exits import interrupt_on_signals
interrupt_on_signals()
sys.exit(run_processes(sys.argv[2:], 2, 1, module=sys.argv[1]))
"""


def start_two(module: str, *arguments: str) -> subprocess.Popen[str]:
    """Two processes of `python -m <module> <arguments>`, started as the pipeline starts a stage."""
    words = [sys.executable, "-c", LAUNCH, module, *arguments]
    return subprocess.Popen(words, cwd=Path(__file__).parents[1], stderr=subprocess.PIPE, text=True)


def run_two(module: str, *arguments: str) -> tuple[int, list[str]]:
    """As `start_two`; the exit code and the lines of standard error."""
    process = start_two(module, *arguments)
    try:
        _, errors = process.communicate(timeout=400)
    finally:
        process.kill()  # its processes end with it
    return process.returncode, errors.splitlines()


if __name__ == "__main__":
    exec(sys.argv.pop(1), {"__name__": "__main__"})
