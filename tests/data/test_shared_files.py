"""The real files in ../shared/data, where present; each behaviour is also covered on small data elsewhere."""

from collections import Counter

import pytest

from rlhf.data.comparisons import load_comparisons
from rlhf.data.corpus import iterate_documents
from rlhf.data.demonstrations import load_demonstrations
from rlhf.data.prompts import load_prompts
from rlhf.errors import UserError


def test_hh_gives_one_pair_a_row(shared):
    rankings, info = load_comparisons(str(shared / "comparisons/hh-harmless-first-1500.jsonl.gz"))
    assert info.files[0].format == "hh" and len(rankings) == info.rows == 1500
    assert all(r.ranks() == [0, 1] and r.prompt[0].role == "user" for r in rankings)
    assert all(a.role != b.role for r in rankings for a, b in zip(r.prompt, r.prompt[1:], strict=False))
    assert Counter(not response.text for r in rankings for response in r.responses) == {False: 2996, True: 4}


def test_qa_feedback_gives_rankings_pairs_and_ties(shared):
    rankings, info = load_comparisons(str(shared / "comparisons/qa-feedback-500x4.json.gz"))
    assert info.files[0].format == "qa_feedback" and len(rankings) == 500
    joined = [r for r in rankings if r.ranking is not None]
    unjoined = [r for r in rankings if r.pairs is not None]
    assert (len(joined), len(unjoined)) == (478, 22)
    in_rankings = sum(r.ranks()[i] == r.ranks()[j] for r in joined for i in range(4) for j in range(i))
    assert in_rankings + sum(len(r.metadata["ties"]) for r in unjoined) == 384
    assert sum(len(r.pair_list()) for r in rankings) == 3000 - 384


@pytest.mark.parametrize(
    ("name", "count"),
    [("alpaca-en-999.json", 999), ("alpaca-zh-1000.json", 1000), ("gpteacher-roleplay-1923.json.gz", 1923)],
)
def test_alpaca_files(shared, name, count):
    records, info = load_demonstrations(str(shared / "demonstrations" / name))
    assert info.files[0].format == "alpaca" and len(records) == info.rows == count


def test_prompts_are_taken_from_demonstrations_and_comparisons(shared):
    sources = [
        str(shared / "demonstrations/alpaca-en-999.json"),
        str(shared / "comparisons/qa-feedback-500x4.json.gz"),
    ]
    prompts, _ = load_prompts(sources)
    assert 1400 < len(prompts) <= 1499


@pytest.mark.parametrize("name", ["sharegpt-500.json", "messages-500.jsonl", "dolly-6400-no-context.jsonl.gz"])
def test_other_formats_are_named_as_unknown(shared, name):
    with pytest.raises(UserError, match="no format recognised: rows have the keys"):
        load_demonstrations(str(shared / "demonstrations" / name))


def test_books(shared):
    documents = list(iterate_documents(str(shared / "text/gutenberg-books.jsonl.gz")))
    assert len(documents) == 38 and sum(map(len, documents)) > 15_000_000


def test_latin1_text(shared):
    path = shared / "text/little_women_latin1.txt"
    raw = path.read_bytes()
    offset = next(i for i, byte in enumerate(raw) if byte > 127)
    with pytest.raises(UserError, match=f"byte 0x{raw[offset]:02x} at offset {offset} is not utf-8 text"):
        list(iterate_documents(path))
    [document] = iterate_documents(path, encoding="latin-1")
    assert "Jo" in document and "\r" not in document and len(document) > 1_000_000
