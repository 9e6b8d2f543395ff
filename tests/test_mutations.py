"""scripts/mutations.py: a broken line of the source does not go unnoticed."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "mutations.py"
MUTATIONS = runpy.run_path(str(SCRIPT))


def test_every_mutation_can_be_applied():
    """Its fragment is there once and its test exists. If you moved code or renamed a test: mend scripts/mutations/*.yaml."""
    table = MUTATIONS["read_table"]()
    assert len(table) >= 40
    stale = [mutation.wrong for mutation in table if MUTATIONS["place_of"](mutation, ROOT) is None]
    assert not stale
    for test in (test for mutation in table for test in (mutation.float32, mutation.bfloat16) if test):
        path, name = test.split("::")
        assert f"\ndef {name.split('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8"), test


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_no_mutation_survives():
    """Half an hour on one core."""
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10000:] + done.stderr[-2000:]
