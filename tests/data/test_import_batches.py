"""What a batch makes of a row does not depend on the rows beside it."""

import json
import random
from itertools import chain

import pytest

from rlhf.data.importers import formats
from rlhf.data.importing.batches import Plan, process
from rlhf.data.reading.json_rows import Block

PLAN = Plan("f", "f", format=formats()["native"])


def batch_of(lines: list[str]):
    return process(PLAN, Block(1, 0, "\n".join(lines).encode()))


def some_lines(count: int) -> list[str]:
    """Records of all kinds, some with an e-mail address and some bad, in random order."""
    chance = random.Random(0)
    lines = []
    for i in range(count):
        mail = f" Write to {i}@example.com." if chance.random() < 0.2 else ""
        record = {"id": f"r{i}", "prompt": [{"role": "user", "content": f"Question {i}?{mail}"}], "metadata": {"n": i}}
        kind = chance.choice(["ranking", "ranking", "prompt", "demonstration", "unknown"])
        if kind == "ranking":
            record["responses"] = [{"id": name, "text": f"{name} {i}"} for name in "abc"]
            record["ranking"] = [["b"], ["a", "c"]] if i % 2 else None
        elif kind == "demonstration":
            record["response"] = f"Answer {i}."
        lines.append(json.dumps({"kind": kind, **record}))
    return lines


def contents(batches: list, kind: str) -> tuple[list, ...]:
    """The rows of that kind, and the sizes of their prompts and of their responses."""
    tables = chain.from_iterable(one.tables[kind].to_pylist() for one in batches if kind in one.tables)
    sizes = [
        chain.from_iterable(one.sizes[kind][part].tolist() for one in batches if kind in one.sizes) for part in (0, 1)
    ]
    return list(tables), *map(list, sizes)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_rows_together_give_what_each_gives_alone(count):
    lines = some_lines(count)
    together, alone = batch_of(lines), [batch_of([line]) for line in lines]

    assert together.rows == count
    assert [at for at, _ in together.rejects] == [i for i, one in enumerate(alone) if one.rejects]
    at = together.facts.dtype.names.index("row")
    rows = [i for i, one in enumerate(alone) for _ in one.facts]
    facts = chain.from_iterable(one.facts.tolist() for one in alone)
    expected = [(*fact[:at], row, *fact[at + 1 :]) for fact, row in zip(facts, rows, strict=True)]
    assert together.facts.tolist() == expected
    for kind in ("ranking", "prompt", "demonstration"):
        assert contents([together], kind) == contents(alone, kind)
    assert together.judgements == [judgement for one in alone for judgement in one.judgements]


def test_personal_data_is_noted_at_the_record_that_holds_it():
    found = {
        row["id"]: json.loads(row["metadata"]).get("pii")
        for table in batch_of(some_lines(200)).tables.values()
        for row in table.to_pylist()
    }
    mails = {json.loads(line)["id"] for line in some_lines(200) if "@" in line}
    assert found == {name: ["email"] if name in mails else None for name in found}
    assert len(mails & set(found)) > 10
