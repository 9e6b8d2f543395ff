"""Small rows to import, `rlhf import` in this process, and what it left."""

import json
from pathlib import Path

from ..conftest import run_command

DEMONSTRATION = {"kind": "demonstration", "id": "d", "prompt": "Name a town.", "response": "Bern"}
RANKING = {
    "kind": "ranking", "prompt": "Who?", "ranking": [["b"], ["a", "c"]], "labeler": "ann",
    "responses": [{"id": "a", "text": "A"}, {"id": "b", "text": "B"}, {"id": "c", "text": "C"}],
}  # fmt: skip
PROMPT = {"kind": "prompt", "prompt": "Why is the sky blue?", "user": "u"}


def write(path: Path, rows: list) -> Path:
    """JSON Lines; text and bytes are lines as they are."""
    lines = [row if isinstance(row, str | bytes) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
    return path


def imported(capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit code, and what was printed to the screen and as an error."""
    return run_command(capsys, "import", *map(str, arguments))


def run(capsys, *arguments: object) -> str:
    """What an import that succeeds prints."""
    code, out, err = imported(capsys, *arguments)
    assert code == 0, err
    return out


def refused(capsys, *arguments: object) -> tuple[str, str]:
    """The one line with which an import ends that does not succeed, and what it printed."""
    code, out, err = imported(capsys, *arguments)
    lines = [line for line in err.splitlines() if not line.startswith("import: ")]  # progress
    assert code == 2 and len(lines) == 1 and lines[0].startswith("rlhf: error: "), err
    return lines[0], out


def report_of(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def rejects_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "rejects.jsonl").read_bytes().split(b"\n")[:-1]]


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
