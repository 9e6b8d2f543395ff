"""rlhf/ops imports torch and itself; of the standard library, whatever it likes."""

import ast
import sys
from pathlib import Path

import rlhf.ops


def test_ops_imports_torch_and_nothing_else():
    found = set()
    files = sorted(Path(rlhf.ops.__file__).parent.glob("*.py"))
    assert len(files) == 9
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                found.add(node.module)
    foreign = {name for name in found if name.split(".")[0] not in sys.stdlib_module_names}
    assert {name for name in foreign if name.split(".")[0] != "torch"} == {
        "rlhf.ops",
        "rlhf.ops.masked",
        "rlhf.ops.fast",
        *(f"rlhf.cpu.{name}" for name in ("allocator", "kernels", "products", "threads")),
    }


def test_modules_are_reached_through_the_package():
    from rlhf import ops

    assert callable(ops.gae.gae) and callable(ops.masked.masked_mean) and callable(ops.ppo.policy_loss)
    assert callable(ops.kl.kl_estimate) and callable(ops.ranking.pair_weights)
    assert callable(ops.logprobs.token_logprobs) and callable(ops.gae.compute_advantages)


def test_every_public_function_is_used_by_the_package():
    """What the tests test is what training computes: each name is loaded somewhere in rlhf outside its own definition."""
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
    used = {
        node.id
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and id(node) not in inside.get(node.id, ())
    }
    assert sorted(set(public) - used) == []
