"""The rules of the layout: imports point one way, and heavy packages stay where they are needed."""

import ast
import functools
from pathlib import Path

import pytest

from .syntax import nodes_of

PACKAGE = Path(__file__).parents[1] / "rlhf"
# From the bottom up: a module imports from its own line or from the lines above it. Names without a folder are modules.
LAYERS = [line.split() for line in (
    "__init__ errors recipe",
    "config ops cpu system",
    "runs gold model data",
    "engines training planning",
    "ppo evaluation report api",
    "stages serving",
    "commands",
    "cli __main__",
)]  # fmt: skip
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
HEAVY = {"deepspeed", "wandb", "hydra", "omegaconf"}


def part_of(module: str) -> str:
    """ "ops" for rlhf.ops.gae, "cli" for rlhf.cli."""
    return [*module.split("."), "__init__"][1]


@functools.cache
def imports(path: Path) -> list[str]:
    """The modules that a file imports, also inside functions; imports for types only are left out."""
    found: list[str] = []
    nodes = nodes_of(path)[:1]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            nodes += node.orelse
        elif not isinstance(node, ast.expr):
            nodes += ast.iter_child_nodes(node)
    return found


MODULES = {".".join(("rlhf", *p.relative_to(PACKAGE).with_suffix("").parts)): p for p in PACKAGE.rglob("*.py")}


@functools.cache
def edges() -> list[tuple[str, str]]:
    """(module, what it imports)."""
    return [(module, target) for module, path in MODULES.items() for target in imports(path)]


def test_every_part_of_the_package_has_a_layer_and_imports_point_down():
    assert {part_of(module) for module in MODULES} <= set(LEVEL)
    inside = [(module, target) for module, target in edges() if target.split(".")[0] == "rlhf"]
    assert [pair for pair in inside if LEVEL[part_of(pair[1])] > LEVEL[part_of(pair[0])]] == []


def test_no_module_imports_itself_through_others():
    graph = {module: set(imports(path)) & MODULES.keys() for module, path in MODULES.items()}
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way[way.index(module) :], module))
        if module not in done:
            for target in graph[module]:
                visit(target, (*way, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("folder", ["ops", "model"])
def test_ops_and_model_never_import_deepspeed_wandb_or_hydra(folder):
    found = {target.split(".")[0] for module, target in edges() if part_of(module) == folder}
    assert not found & HEAVY
    if folder == "ops":
        standard = {"collections", "math", "typing", "dataclasses", "enum", "functools", "contextlib"}
        assert found <= {"torch", "rlhf", *standard}


def test_cpu_is_imported_in_one_place():
    found = {module for module, target in edges() if target.startswith("rlhf.cpu")}
    assert {module for module in found if part_of(module) != "cpu"} == {"rlhf.ops.fast"}


def test_only_some_see_more_of_the_gold_world_than_its_truth_or_import_the_web_framework():
    simulating = {"rlhf.stages.world", "rlhf.stages.label"}
    others = [target for module, target in edges() if part_of(module) != "gold" and module not in simulating]
    assert {target for target in others if target.startswith("rlhf.gold")} <= {"rlhf.gold.truth", "rlhf.gold.labelled"}
    web = {"fastapi", "starlette"}
    assert {part_of(module) for module, target in edges() if target.split(".")[0] in web} == {"serving"}


ROOT = PACKAGE.parent
SOURCES = sorted(path for folder in ("rlhf", "scripts", "tests") for path in (ROOT / folder).rglob("*.py"))


def test_every_public_function_of_ops_is_used_by_the_package():
    of_ops = [node for path in (PACKAGE / "ops").glob("*.py") for node in nodes_of(path)[0].body]
    kinds = ast.FunctionDef | ast.ClassDef
    public = {n.name: n for n in of_ops if isinstance(n, kinds) and not n.name.startswith("_")}
    inside = {name: {id(child) for child in ast.walk(node)} for name, node in public.items()}
    names = [node for path in PACKAGE.rglob("*.py") for node in nodes_of(path) if isinstance(node, ast.Name)]
    used = {node.id for node in names if id(node) not in inside.get(node.id, ())}
    assert sorted(set(public) - used) == []


def test_files_and_functions_fit_on_a_few_screens():
    long = []
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        lines = text.count("\n")
        long += [f"{path.relative_to(ROOT)}: {lines} lines"] * (lines > 450)
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                long += [f"{path.relative_to(ROOT)}: {node.name}: {lines} lines"] * (lines > 70)
    assert long == []


def test_text_files_name_their_encoding():
    """Also where the linter does not know that something is a path."""

    def unnamed(call: ast.Call) -> bool:
        name, words = getattr(call.func, "attr", None), {word.arg for word in call.keywords}
        modes = [a.value for a in call.args if isinstance(a, ast.Constant)]
        opens = name == "open" and bool({"r", "w", "a", "x"} & {*modes})
        return (opens or (name, len(call.args)) in (("read_text", 0), ("write_text", 1))) and "encoding" not in words

    paths = [path for folder in (PACKAGE, PACKAGE.parent / "scripts") for path in folder.rglob("*.py")]
    nodes = [(path, node) for path in paths for node in nodes_of(path)]
    assert [f"{p}:{node.lineno}" for p, node in nodes if isinstance(node, ast.Call) and unnamed(node)] == []
