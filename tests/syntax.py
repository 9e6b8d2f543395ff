"""The syntax trees of the package and its scripts, parsed once for all tests that look at them."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
