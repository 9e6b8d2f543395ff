"""A small tokenizer, and a way to write data files."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

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
