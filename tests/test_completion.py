"""Completion in a real bash: what Tab offers after a line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.config.command_line import candidates

# Defines a command `rlhf` that runs this tree, installs the completion, and prints what it offers for each argument.
SCRIPT = """
rlhf() { "$PYTHON" -m rlhf "$@"; }
eval "$(rlhf -sc install=bash)"
complete -p rlhf
for COMP_LINE in "$@"; do
    COMP_POINT=${#COMP_LINE}
    COMPREPLY=()
    $(complete -p rlhf | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
    printf '%s,' "${COMPREPLY[@]}"
    echo
done
"""


def offered(*lines: str) -> list[str]:
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        ["bash", "-c", SCRIPT, "bash", *lines], capture_output=True, text=True, env=environment, timeout=120, check=True
    )
    first, *found = done.stdout.splitlines()
    assert first.endswith("rlhf") and "-F" in first
    return found


def test_bash_completes_commands_settings_and_values():
    assert offered("rlhf pip", "rlhf ppo deepspeed=zero3", "rlhf sft sft.lr") == [
        "pipeline ,",
        "zero3,zero3_offload,",
        "sft.lr=,",
    ]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("rlhf ", ["pipeline ", "tokenizer ", "pretrain "]),
        ("rlhf ppo ppo.ad", ["ppo.advantages="]),
        ("rlhf ppo seed=1 ppo.advantages=", ["gae", "reinforce", "rloo", "grpo"]),
        ("rlhf sft experiment=go", ["gold"]),
        ("rlhf ppo ppo.whiten_advantages=", ["true", "false"]),
        ("rlhf import dup", ["duplicates="]),
        ("rlhf sft data.demonstrations=", []),  # bash then offers files
        ("rlhf bogus x", []),
    ],
)
def test_candidates(line, found):
    assert candidates(line)[: len(found) or None] == found


def test_settings_that_a_command_does_not_read_are_not_offered():
    assert candidates("rlhf chat pp") == candidates("rlhf chat sft.") == [] != candidates("rlhf chat chat.")
