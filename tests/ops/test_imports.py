"""What the tests of rlhf/ops test is what training computes."""

import ast
from pathlib import Path

import rlhf.ops


def test_every_public_function_is_used_by_the_package():
    """Each name is loaded somewhere in rlhf outside its own definition."""
    package = Path(rlhf.ops.__file__).parent.parent
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))}
    public = {
        node.name: node
        for path, tree in trees.items()
        if path.parent.name == "ops"
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    }
    inside = {name: {id(child) for child in ast.walk(node)} for name, node in public.items()}
    names = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.Name)]
    used = {node.id for node in names if id(node) not in inside.get(node.id, ())}
    assert sorted(set(public) - used) == []
