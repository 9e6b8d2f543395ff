"""`rlhf import` against its promises: hostile rows, names and folders, partial imports, kills and full disks."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zstandard

from rlhf.commands import sample
from rlhf.config import Config
from rlhf.data.reading import load_all
from rlhf.errors import UserError
from rlhf.evaluation import reward_report
from rlhf.ppo import experience as ppo_setup
from rlhf.runs.sources import hash_sources, read_comparisons, read_demonstrations, read_prompts
from rlhf.stages import evaluate, label, reward

from .imports import PROMPT, RANKING, bytes_of, imported, refused, rejects_of, run, write

DEMONSTRATION = {"kind": "demonstration", "prompt": "Name a town.", "response": "Bern"}  # its id is its place


@pytest.mark.parametrize(("row", "accepted"), [
    (PROMPT | {"prompt": "a" * 400_000 + "@"}, True),  # an e-mail address may begin at each letter
    (PROMPT | {"prompt": "a@" + "a." * 200_000 + "1"}, True),
    (PROMPT | {"prompt": "a" + "\u0315\u0300" * 150_000}, True),  # accents, which normalising sorts
    (PROMPT | {"prompt": "1 " * 200_000}, True),
    ('{"kind": "prompt", "prompt": "x", ' + ", ".join(f'"k{i}": 1' for i in [*range(60_000), 59_999]) + "}", False),
    (
        {"kind": "ranking", "prompt": "p", "responses": [{"id": str(i), "text": "t"} for i in range(30_000)],
         "pairs": [[str(i), str(i + 1)] for i in range(29_999)]},
        False,
    ),
], ids=["letters", "dots", "accents", "digits", "keys", "pairs"])  # fmt: skip
def test_no_row_takes_time_that_grows_with_its_square(tmp_path, capsys, row, accepted):
    """Each takes well under a second; with a quadratic step it takes minutes."""
    path = write(tmp_path / "labels.jsonl", [DEMONSTRATION, row])
    started = time.monotonic()
    code, _, _ = imported(capsys, f"path={path}", f"out={tmp_path / 'out'}")
    assert code == (0 if accepted else 2) and time.monotonic() - started < 20


@pytest.mark.parametrize("where", ["metadata", "group", "ratings", "responses", "kind"])
def test_how_deep_a_row_may_nest_does_not_depend_on_the_stack(tmp_path, capsys, where):
    def row(levels: int) -> str:
        base = (RANKING if where in ("ratings", "responses") else PROMPT) | {"prompt": f"p {levels}"}
        return json.dumps(base | {where: "@"}).replace('"@"', '{"a":' * levels + "1" + "}" * levels)

    depths = [100, 199, 200, 201, 398, 399, 400, 401, 600, 900, 950, 980, 1000, 20_000]
    path = write(tmp_path / "labels.jsonl", [DEMONSTRATION, *map(row, depths)])
    assert imported(capsys, f"path={path}", f"out={tmp_path / 'out'}", "filter_prefixes=false")[0] == 2
    refused = {entry["line"] - 2: entry["message"] for entry in rejects_of(tmp_path / "out.partial")}
    most = 199 if where in ("metadata", "group") else 0
    assert [depth for i, depth in enumerate(depths) if i not in refused] == [depth for depth in depths if depth <= most]
    assert all("nested too deeply" in refused[i] for i, depth in enumerate(depths) if depth > 199)
    found, _ = load_all(str(tmp_path / "out.partial"), allow_partial=True)
    assert all(record.model_dump_json() for record in found)


def test_names_out_of_a_file_cannot_write_to_the_terminal(tmp_path, capsys):
    odd = "\x1b[2J\n\u202e" + "y" * 5000
    rows = [
        DEMONSTRATION, RANKING | {"ranking": [[odd]]}, RANKING | {"ratings": {odd: 9}}, RANKING | {"created": odd},
        RANKING | {"responses": [{"id": odd, "text": "a"}] * 2},
    ]  # fmt: skip
    path = write(tmp_path / "labels.jsonl", rows)
    code, out, _ = imported(capsys, f"path={path}", f"out={tmp_path / 'out'}")
    shown = [line for line in out.splitlines() if "reject: " in line]
    assert code == 2 and len(shown) == 4 and all(len(line) < 1200 for line in shown)
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", out) and "\\x1b[2J \\u202eyyy" in out


def test_a_packed_file_cannot_fill_the_memory(tmp_path):
    """A quarter of a gigabyte of zeros in 10 kB, as one line: streamed past, and a reject."""
    packer = zstandard.ZstdCompressor(level=3).compressobj()
    zeros = bytes(1 << 24)
    path = tmp_path / "bomb.jsonl.zst"
    with path.open("wb") as file:
        file.write(packer.compress(json.dumps(DEMONSTRATION).encode() + b"\n"))
        for _ in range(16):
            file.write(packer.compress(zeros))
        file.write(packer.flush())
    command = [sys.executable, "-m", "rlhf", "import", f"path={path}", f"out={tmp_path / 'out'}", "max_rejects=1"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"RLHF_PROGRESS": "off"})
    peak = 0
    while child.poll() is None:
        found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{child.pid}/status").read_text(encoding="utf-8"))
        peak = max(peak, int(found[1]) if found else 0)
        time.sleep(0.02)
    [entry] = rejects_of(tmp_path / "out")
    assert child.returncode == 0 and "got a longer line" in entry["message"]
    assert path.stat().st_size < 25_000 and 50_000 < peak < 400_000, f"{peak} kB for a line that is not even held"


def test_a_name_that_is_no_utf8_and_what_others_own(tmp_path, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    path = Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.jsonl"))
    write(path, [DEMONSTRATION, "{"])
    code, out, _ = imported(capsys, f"path={folder}", f"out={tmp_path / 'first'}", "max_rejects=1")
    assert code == 0 and "caf\\xe9.jsonl:2: not JSON" in out
    assert [record.id for record in load_all(str(tmp_path / "first"))[0]] == ["caf\\xe9.jsonl:1"]
    assert json.loads((tmp_path / "first" / "report.json").read_text())["files"][0]["file"].endswith("caf\\xe9.jsonl")
    path = write(tmp_path / "labels.jsonl", [DEMONSTRATION, "{"])
    mine = tmp_path / "out.partial"
    mine.mkdir()
    (mine / "thesis.txt").write_text("x")
    code, _, err = imported(capsys, f"path={path}", f"out={tmp_path / 'out'}")
    assert code == 2 and "out.partial: is no import, so it is not replaced" in err and (mine / "thesis.txt").exists()
    write(path, [DEMONSTRATION])
    assert imported(capsys, f"path={path}", f"out={tmp_path / 'real'}")[0] == 0
    (tmp_path / "link").symlink_to(tmp_path / "real")
    code, _, err = imported(capsys, f"path={path}", f"out={tmp_path / 'link'}", "overwrite=true")
    assert code == 2 and "is a link, so it is not replaced" in err and (tmp_path / "real" / "dataset.json").exists()
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.fixture
def partial(tmp_path, capsys) -> Path:
    rows = [kind | {"prompt": f"{kind['prompt']} {i}"} for i in range(40) for kind in (DEMONSTRATION, RANKING, PROMPT)]
    path = write(tmp_path / "labels.jsonl", [*rows, "{"])
    assert imported(capsys, f"path={path}", f"out={tmp_path / 'out'}")[0] == 2
    return tmp_path / "out.partial"


REFUSED = r"out\.partial: an import with more rejects than were allowed: .* data\.allow_partial=true"


def test_every_stage_that_reads_labels_refuses_a_partial_import_unless_allowed(partial):
    """What is refused is refused before a model or tokenizer is looked at, so that none is needed here."""
    config = Config()
    config.data.demonstrations = config.data.comparisons = config.data.prompts = str(partial)
    readers = {
        "a folder above": lambda: load_all(str(partial.parent)),
        "pipeline: comparisons": lambda: read_comparisons(config),
        "pipeline: demonstrations": lambda: read_demonstrations(config),
        "pipeline: prompts": lambda: read_prompts(config),
        "sample": lambda: sample.choose_prompts(config),
        "label": lambda: label.choose_prompts(config),
        "ppo": lambda: ppo_setup.load_ppo_prompts(config, None, None),  # type: ignore[arg-type]
        "evaluate": lambda: evaluate.load_test_prompts(config, None),
        "reward": lambda: reward.training_demonstrations(config),
        "reward figures": lambda: reward_report.evaluate_reward_model(config, None, None),  # type: ignore[arg-type]
    } | {f"{stage}: hashes": partial_hashes(config, stage) for stage in ("sft", "reward", "ppo", "evaluate")}
    for name, read in readers.items():
        with pytest.raises(UserError, match=REFUSED):
            read()
            pytest.fail(f"{name} took it")
    config.data.allow_partial = True
    assert read_comparisons(config) or read_demonstrations(config)
    assert label.choose_prompts(config)
    assert len(hash_sources(config, "evaluate")) == 3


def partial_hashes(config: Config, stage: str):
    """What a stage does first of all, before it trains."""
    return lambda: hash_sources(config, stage)


def start(*arguments: str, **more) -> subprocess.Popen:
    command = [sys.executable, "-m", "rlhf", "import", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def test_a_killed_import_leaves_nothing_that_training_accepts(tmp_path, capsys):
    rows = [RANKING | {"prompt": f"q {i} " + "word " * 200} for i in range(10_000)]
    path, out = write(tmp_path / "labels.jsonl", rows), tmp_path / "out"
    small = write(tmp_path / "small.jsonl", [DEMONSTRATION])
    run(capsys, f"path={small}", f"out={out}")
    before = bytes_of(out)
    child = start(f"path={path}", f"out={out}", "overwrite=true")
    working = tmp_path / ".out.new"
    deadline = time.monotonic() + 60
    while not list(working.glob("unsplit.jsonl")):  # in the middle of its writing
        assert child.poll() is None and time.monotonic() < deadline, child.communicate()
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert bytes_of(out) == before, "the old import stands"
    with pytest.raises(UserError):
        load_all(str(working))
    said = run(capsys, f"path={small}", f"out={out}", "overwrite=true")
    assert "which a killed command left behind" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["labels.jsonl", "out", "small.jsonl"]


def test_a_full_disk_is_one_line(tmp_path, capsys):
    """A limit on the size of files stands for the disk: the system refuses the write half-way in the same manner."""
    rows = [RANKING | {"prompt": f"q {i} " + "word " * 200} for i in range(2000)]
    path = write(tmp_path / "labels.jsonl", rows)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        line, _ = refused(capsys, f"path={path}", f"out={tmp_path / 'out'}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot write: File too large: raise the limit on files (ulimit -f)" in line
    assert [p.name for p in tmp_path.iterdir()] == ["labels.jsonl"]
