"""A small tokenizer, and ways to write data files and to import them."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from rlhf.commands import import_data
from rlhf.config.compose import compose_config
from rlhf.data.storage import read_records
from rlhf.data.tokenizer import train_tokenizer

TEXT = [
    "The cat sat on the mat, and the dog sat by the door.",
    "What is the capital of France? The capital of France is Paris.",
    "Name a colour. Blue is a colour, and so is green.",
] * 20


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(TEXT, 300, context_length=32)


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(rows: Iterable[Any], name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def imported(tmp_path: Path) -> Callable[..., tuple[list[Any], list[dict[str, Any]], dict[str, Any]]]:
    """What `rlhf import` makes of a file, whatever is rejected: (records, rejects, report)."""

    def run(path: Path, *settings: str) -> tuple[list[Any], list[dict[str, Any]], dict[str, Any]]:
        out = tmp_path / "out"
        import_data.run(compose_config([f"path='{path}'", f"out='{out}'", "max_rejects=9999", *settings], "import"))
        rejects = [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
        return list(read_records(out)), rejects, json.loads((out / "report.json").read_text())

    return run
