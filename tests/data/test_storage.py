from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.data.reading import load_all, load_kind
from rlhf.data.records import KINDS, Demonstration, Message, PromptRecord, RankedResponse, Ranking
from rlhf.data.splits import with_split
from rlhf.data.storage import create, read_records, seal, to_line
from rlhf.errors import UserError

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
metadata = st.dictionaries(texts.filter(lambda key: key != "split"), values, max_size=3)
extra = st.dictionaries(names.filter(lambda k: k not in ("role", "content") and k.isidentifier()), values, max_size=2)


@st.composite
def turns(draw):
    roles = [*draw(st.lists(st.sampled_from(["system", "user", "assistant"]), max_size=2)), "user"]
    messages = [Message(role=role, content=draw(texts), **draw(extra)) for role in roles]
    return [*messages[:-1], Message(role="user", content="x" + draw(texts), **draw(extra))]


@st.composite
def records(draw):
    common = {"id": draw(names), "prompt": draw(turns()), "metadata": draw(metadata)}
    kind = draw(st.sampled_from(["demonstration", "prompt", "ranking"]))
    maybe = st.none() | texts
    if kind == "demonstration":
        return Demonstration(**common, response="y" + draw(texts), labeler=draw(maybe), source=draw(maybe))
    if kind == "prompt":
        return PromptRecord(**common, user=draw(maybe))
    ids = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    responses = [RankedResponse(id=name, text=draw(texts), policy=draw(maybe), metadata=draw(metadata)) for name in ids]
    form = draw(st.sampled_from(["ranking", "pairs", "none"]))
    order = draw(st.permutations(ids))
    return Ranking(
        **common,
        responses=responses,
        ranking=[order[:1], order[1:]] if form == "ranking" and len(ids) > 1 else None,
        pairs=[list(pair) for pair in pairwise(order)] if form == "pairs" else None,
        ratings={name: draw(st.integers(1, 7) | st.floats(1, 7)) for name in ids[:2]},
        flags={name: draw(st.lists(texts, max_size=2)) for name in ids[:1]},
        labeler=draw(maybe),
        seconds=draw(st.none() | st.floats(0, 1e6) | st.integers(0, 100)),
        created=draw(st.sampled_from([None, "2026-05-01T10:00:00Z"])),
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(records(), min_size=1, max_size=5), st.sampled_from(["train", "dev", "test"]))
def test_records_come_back_as_they_were_written(tmp_path_factory, written, split):
    folder = tmp_path_factory.mktemp("import")
    for record in written:
        path = folder / record.kind / f"{split}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text((path.read_text() if path.exists() else "") + to_line(record))
    seal(folder, "complete", {})
    wanted = [with_split(record, split) for kind in KINDS for record in written if record.kind == kind]
    assert list(read_records(folder)) == wanted


DEMONSTRATION = Demonstration(id="d", prompt="Hi", response="Hello")
RESPONSES = [{"id": "a", "text": "A"}, {"id": "b", "text": "B"}]
RANKING = Ranking(id="r", prompt="Hi", responses=RESPONSES, ranking=[["a"], ["b"]])


@pytest.fixture
def folder(tmp_path):
    for record, split in ((DEMONSTRATION, "train"), (RANKING, "test")):
        with create(tmp_path / "out" / record.kind / f"{split}.jsonl") as file:
            file.write(to_line(record))
    seal(tmp_path / "out", "complete", {"records": {}})
    return tmp_path / "out"


def test_the_files_are_json_lines_and_a_source_beside_raw_files(folder, write_jsonl):
    import datasets

    data = datasets.load_dataset("json", data_files=str(folder / "ranking" / "test.jsonl"), split="train")
    assert data[0]["ranking"] == [["a"], ["b"]] and data[0]["prompt"] == [{"role": "user", "content": "Hi"}]
    [record], _ = load_kind(Ranking, str(folder / "ranking" / "test.jsonl"), "native")
    assert record.model_dump() == RANKING.model_dump()
    raw = write_jsonl([{"kind": "demonstration", "id": "raw", "prompt": "x", "response": "y"}])
    found, info = load_all([str(folder), str(raw)])
    assert [(r.id, r.kind) for r in found] == [("d", "demonstration"), ("r", "ranking"), ("raw", "demonstration")]
    assert found[0].split == "train" and found[1].metadata == {"split": "test"} and found[2].split is None
    assert [file.format for file in info] == ["import", "native"] and sum(file.rows for file in info) == 3
    assert [r.id for r in load_kind(Ranking, str(folder), "auto")[0]] == ["r"]
    # a folder above it: its other files are read too, and those inside the import are not taken for raw ones
    (folder / "rejects.jsonl").write_text("not JSON\n")
    seal(folder, "complete", {})
    assert [r.id for r in load_all(str(folder.parent))[0]] == ["raw", "d", "r"]


def test_a_damaged_import_is_refused(folder):
    data = folder / "demonstration" / "train.jsonl"
    data.write_bytes(data.read_bytes().replace(b"Hello", b"Jello"))
    with pytest.raises(
        UserError, match=r"train.jsonl: missing, or changed since it was imported: run `rlhf import` again"
    ):
        load_all(str(folder))
    data.unlink()
    with pytest.raises(UserError, match=r"train.jsonl: missing, or changed"):
        load_all(str(folder))
    manifest = folder / "dataset.json"
    manifest.write_text(manifest.read_text().replace('"rlhf_import": 2', '"rlhf_import": 1'))
    with pytest.raises(UserError, match=r"rlhf_import: got 1, want 2\): run `rlhf import` again"):
        load_all(str(folder))


@pytest.mark.parametrize(("part", "message"), [
    ('"files": {}', "files"), ('"files": {"../x": {"sha256": "' + "0" * 64 + '", "bytes": 1}}', "files"),
    ('"files": {"a": {"sha256": "x", "bytes": 1}}', "files"),
    ('"files": ' + '{"a":' * 100_000 + "1" + "}" * 100_000, "recursion"),
])  # fmt: skip
def test_a_manifest_of_another_shape_is_refused_in_one_line(folder, part, message):
    (folder / "dataset.json").write_text('{"rlhf_import": 2, "status": "complete", ' + part + "}")
    with pytest.raises(UserError, match=rf"dataset.json: damaged [^\n]*{message}") as caught:
        load_all(str(folder))
    assert len(str(caught.value)) < 400
