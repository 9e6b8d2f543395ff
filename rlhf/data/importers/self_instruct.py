"""Self-Instruct's seed tasks: an instruction and instances of {input, output}, each of them a demonstration."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data.conversion.foreign import demonstration, id_and_rest, is_list, is_text, require
from rlhf.data.importers import BadRow, Format, other_keys, require_text


def recognise(row: Mapping[str, Any]) -> str | None:
    fits = "instruction" in row and isinstance(row.get("instances"), list)
    return "keys instruction and instances" if fits else None


def _instance(instruction: str, instance: Any, field: str, rest: dict[str, Any]) -> dict[str, Any]:
    require(isinstance(instance, dict), field, instance, "{input, output}")
    for key in ("input", "output"):
        require(isinstance(instance.get(key), str), f"{field}.{key}", instance.get(key), "a string")
    if not is_text(instance["output"]):
        raise BadRow(f"{field}.output", "got no text, want the demonstrated answer: remove the instance")
    parts = [instruction, *([instance["input"]] if is_text(instance["input"]) else [])]
    prompt = "\n\n".join(part.strip() for part in parts)
    return demonstration(prompt, instance["output"], rest | other_keys(instance, "input", "output"))


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any] | BadRow]:
    """One demonstration per instance, or a BadRow in its place.

    The prompt is the instruction and, after a blank line, the input if any; both are stripped.
    """
    instances: Any = row.get("instances")
    require(is_list(instances), "instances", instances, "a list of {input, output}")
    instruction = require_text(row, "instruction")
    name, rest = id_and_rest(row, "instruction", "instances")
    for i, instance in enumerate(instances):
        try:
            made = _instance(instruction, instance, f"instances.{i}", rest)
        except BadRow as error:
            yield error
            continue
        yield {"id": name if name is None or len(instances) == 1 else f"{name}.{i}", **made}


FORMAT = Format("self_instruct", "keys instruction and instances of input and output", recognise, convert)
