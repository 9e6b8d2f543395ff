"""The page for users of TRL and OpenRLHF: its table is the one that the error messages read, and the ported script is short."""

import difflib
import re
from pathlib import Path

from rlhf.config import Config
from rlhf.config.removed import EQUIVALENTS
from rlhf.config.setting import settings_in

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "from_trl.md").read_text(encoding="utf-8")


def test_every_equivalent_is_a_setting():
    known = settings_in(Config)
    for name in EQUIVALENTS.values():
        assert (name if "." in name or name in known else f"ppo.{name}") in known, name


def test_the_page_names_settings_as_the_messages_do():
    rows = re.findall(r"^\| `(\w+)`[^|]*\| `(\w+)`[^|]*\| `([\w.]+)` \|", PAGE, re.M)
    assert len(rows) >= 12
    for trl, openrlhf, ours in rows:
        for theirs in (trl, openrlhf):
            assert theirs in ours or EQUIVALENTS.get(theirs, theirs) in (ours, ours.rpartition(".")[2]), (theirs, ours)


def test_the_ported_script_has_at_most_20_lines_that_are_not_in_the_other():
    before, after = (
        (ROOT / "scripts" / "from_trl" / f"{name}.py").read_text().splitlines() for name in ("before", "after")
    )
    added = [line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line[2:].strip()]
    assert len(added) <= 20, "\n".join(added)
