"""The splits of imports: hypothesis tries to put one prompt, one user or two look-alikes into two of them."""

import json
import shutil
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.config.commands import ImportConfig
from rlhf.data.importer import Importer
from rlhf.data.inputs import resolve_sources
from rlhf.data.records import PromptRecord
from rlhf.data.splits import SPLITS, hash64, record_split, split_key
from rlhf.data.storage import read_assignments, read_records, seal

SHARES = {"train": 0.4, "dev": 0.3, "test": 0.3}


def run_import(folder: Path, files: list[list[dict]], earlier=(), **settings) -> Path:
    """An import of these rows, one file each, as a sealed folder."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "out").mkdir(parents=True)
    for i, rows in enumerate(files):
        (folder / f"{i}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    paths = [str(folder / f"{i}.jsonl") for i in range(len(files))]
    config = ImportConfig(path=paths, dev=0.3, test=0.3, filter_prefixes=False, **settings)
    known = {}
    for one in earlier:
        known = read_assignments(one) | known
    importer = Importer(config, folder / "out", known, lambda done: None)
    report = importer.run(resolve_sources(config.path, (".jsonl",)))
    assert importer.reject_count == 0, importer.first_rejects
    assert sum(list(report["counts"].values())[1:]) == report["counts"]["input"]
    seal(folder / "out", "complete", {})
    return folder / "out"


def splits_in(folder: Path) -> list[tuple[str, str | None, str]]:
    """(split key, user, split) of every record, its split by its file."""
    found = []
    for record in read_records(folder):
        user = getattr(record, "user", None) or record.metadata.get("user")
        split = record.split if record.kind == "demonstration" else record.metadata["split"]
        found.append((split_key(record.prompt), user, split))
    return found


BEGINNING = "once upon a time there was a town by the sea " * 5
variants = st.sampled_from(
    [lambda t: t, str.upper, lambda t: f"  {t}?!", lambda t: t.replace(" ", "\n "), lambda t: t.replace("a", "á")]
)
prompts = st.builds(
    lambda text, change: change(text),
    st.sampled_from([*"abcdefgh"]).map("name a word that begins with {}".format)
    | st.integers(0, 5).map((BEGINNING + "{}").format),
    variants,
)


@st.composite
def rows(draw):
    row = {"prompt": draw(prompts)}
    user = draw(st.none() | st.sampled_from(["u", "v", "w"]))
    split = draw(st.sampled_from([None, None, None, *SPLITS]))
    group = draw(st.sampled_from([None, None, "g", "h"]))
    metadata = {k: v for k, v in (("split", split), ("group", group)) if v is not None}
    kind = draw(st.sampled_from(["prompt", "demonstration", "ranking"]))
    if kind == "prompt":
        return row | {"kind": kind, "user": user, "metadata": metadata}
    metadata |= {"user": user} if user else {}
    if kind == "demonstration":
        return row | {"kind": kind, "response": "yes", "metadata": metadata}
    responses = [{"id": "a", "text": "A"}, {"id": "b", "text": "B"}]
    return row | {"kind": kind, "responses": responses, "ranking": [["a"], ["b"]], "metadata": metadata}


files = st.lists(st.lists(rows(), max_size=8).filter(bool), min_size=1, max_size=3)


@settings(max_examples=10, deadline=None)
@given(files, files, st.integers(0, 3))
def test_no_prompt_is_in_two_splits_of_one_import_or_of_two(tmp_path_factory, first, second, seed):
    base = tmp_path_factory.getbasetemp() / "splits"
    one = run_import(base / "one", first, seed=seed)
    two = run_import(base / "two", second, [one], seed=seed + 1)
    three = run_import(base / "three", second[::-1] + first, [two], seed=seed + 2)
    where: dict[str, str] = {}
    for folder in (one, two, three):
        for key, _, split in splits_in(folder):
            assert where.setdefault(key, split) == split, (folder, key)
    report = json.loads((one / "report.json").read_text())
    assert len({key for key, _, _ in splits_in(one)}) == sum(report["splits"]["prompts"].values())


def without_split(row):
    return row | {"metadata": {k: v for k, v in row["metadata"].items() if k != "split"}}


@settings(max_examples=10, deadline=None)
@given(st.lists(rows().map(without_split), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_users_stay_together_and_the_order_of_rows_and_files_does_not_matter(tmp_path_factory, given_rows, random):
    base = tmp_path_factory.getbasetemp() / "users"
    one = splits_in(run_import(base / "one", [given_rows]))
    shuffled = random.sample(given_rows, len(given_rows))
    cut = random.randint(0, len(shuffled))
    parts = [part for part in (shuffled[:cut], shuffled[cut:]) if part]
    other = splits_in(run_import(base / "other", parts))
    assert {key: split for key, _, split in one} == {key: split for key, _, split in other}
    users: dict[str, str] = {}
    for _, user, split in one:
        if user is not None:
            assert users.setdefault(user, split) == split


def test_without_users_the_split_is_what_the_stages_compute_from_the_raw_file(tmp_path):
    asked = [{"kind": "prompt", "prompt": f"What is {i}?"} for i in range(200)]
    asked += [{"kind": "prompt", "prompt": f"Why {i}?", "metadata": {"group": f"g{i % 9}"}} for i in range(60)]
    folder = run_import(tmp_path, [asked], seed=5)
    found = {record.prompt[0].content: record.metadata["split"] for record in read_records(folder)}
    wanted = [PromptRecord(id="p", **{k: v for k, v in row.items() if k != "kind"}) for row in asked]
    assert found == {record.prompt[0].content: record_split(record, 5, SHARES) for record in wanted}
    assert len(set(found.values())) == 3


def test_earlier_imports_win_prompt_before_user_before_hash(tmp_path):
    by_hash = record_split(PromptRecord(id="p", prompt="Hi"), 0, SHARES)
    kept, moved = (split for split in SPLITS if split != by_hash)
    one = run_import(tmp_path / "one", [[{"kind": "prompt", "prompt": "Hi", "metadata": {"split": kept}}]])
    # the prompt keeps its split, even if the file states another one, and the user's other prompts get it too
    again = [{"kind": "prompt", "prompt": "HI", "user": "u", "metadata": {"split": moved}}]
    again += [{"kind": "prompt", "prompt": f"Why {i}?", "user": "u"} for i in range(20)]
    two = run_import(tmp_path / "two", [again], [one])
    assert {split for _, _, split in splits_in(two)} == {kept}
    # a third import, with only the second as its earlier one, keeps the split of the user and of the first import's prompt
    others = [{"kind": "prompt", "prompt": f"Where {i}?", "user": "u"} for i in range(20)]
    three = run_import(tmp_path / "three", [[*others, {"kind": "prompt", "prompt": "hi"}]], [two])
    assert {split for _, _, split in splits_in(three)} == {kept}
    key = "prompt", hash64(split_key("Hi"))
    assert read_assignments(three)[key] == kept
    # of two earlier imports that differ, the first one counts
    rows = [{"kind": "prompt", "prompt": "Hi", "metadata": {"split": moved}}]
    four = run_import(tmp_path / "four", [rows])
    assert read_assignments(run_import(tmp_path / "five", [rows], [four, three]))[key] == moved
