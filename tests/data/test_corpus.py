import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data import corpus as corpus_module
from rlhf.data.corpus import PackedCorpus, cut_text, draw_order, iterate_documents, mix_corpora, pack_corpus
from rlhf.data.tokenizer import encode_texts, tokenizer_hash
from rlhf.errors import UserError

SEPARATOR = 1
DOCUMENTS = [f"Document {i}: the cat sat on the mat number {i * i}. Émile said so." for i in range(400)]


def pack(documents, tokenizer, out, held_out_fraction=0.1, seed=0, **options):
    return pack_corpus(documents, tokenizer, out, held_out_fraction=held_out_fraction, seed=seed, **options)


def documents_of(packed, split, tokenizer) -> list[str]:
    """The texts in the file, each of which ends with a separator."""
    tokens = packed.tokens(split).tolist()
    if not tokens:
        return []
    assert tokens[-1] == SEPARATOR
    texts: list[list[int]] = [[]]
    for token in tokens[:-1]:
        if token == SEPARATOR:
            texts.append([])
        else:
            texts[-1].append(token)
    return [tokenizer.backend_tokenizer.decode(ids) for ids in texts]


def test_a_text_file_is_one_document_or_several(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("One.\r\n\r\nStill one.\n", newline="")
    assert list(iterate_documents(path)) == ["One.\n\nStill one."]
    path.write_text("One.\n<|endoftext|>\nTwo<|endo\n<|endoftext|><|endoftext|>  \n<|endoftext|>Three")
    for chunk in (3, 5, 14, 1000):
        monkeypatch.setattr(corpus_module, "_CHUNK", chunk)
        assert list(iterate_documents(path)) == ["One.", "Two<|endo", "Three"]


def test_json_rows_are_documents(write_jsonl, tmp_path):
    write_jsonl([{"title": "t", "text": "One"}, {"text": " "}, {"text": "Two"}], "b.jsonl")
    (tmp_path / "c.json").write_text('[{"text": "Three"}]')
    (tmp_path / "d.txt").write_text("Four")
    assert list(iterate_documents(str(tmp_path))) == ["One", "Two", "Three", "Four"]
    assert list(iterate_documents([str(tmp_path / "d.txt"), tmp_path / "c.json"])) == ["Four", "Three"]


def test_a_document_above_the_limit_becomes_several(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "MAX_DOCUMENT", 100)
    monkeypatch.setattr(corpus_module, "_CHUNK", 30)
    lines = [f"line {i}\n" for i in range(200)]
    (tmp_path / "a.txt").write_text("".join(lines))
    documents = list(iterate_documents(tmp_path / "a.txt"))
    assert max(map(len, documents)) <= 100 and len(documents) > 10
    assert "".join(documents).replace("\n", "") == "".join(lines).replace("\n", "")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "".join(lines)}))
    assert max(map(len, iterate_documents(tmp_path / "b.jsonl"))) <= 100


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.txt", b" \n", "a.txt: the file has no text"),
    ("a.jsonl", b'{"text": "x"}\n{"title": "y", "body": "z"}',
     r'a.jsonl:2: text: got None, want {"text": "…"} in each row'),
    ("a.txt", b"caf\xe9", "a.txt: byte 0xe9 at offset 3 is not utf-8 text: set data.encoding=latin-1"),
])  # fmt: skip
def test_a_bad_corpus_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(iterate_documents(tmp_path / name))


@given(st.text("ab \n", max_size=300), st.integers(2, 40))
def test_cutting_loses_nothing_and_keeps_the_size(text, size):
    parts = cut_text(text, size)
    assert "".join(parts) == text
    assert all(0 < len(part) <= size for part in parts)


def test_a_packed_corpus_holds_every_document_once(tokenizer, tmp_path):
    calls = []
    packed = pack(iter(DOCUMENTS), tokenizer, tmp_path / "corpus", progress=calls.append)
    train, held_out = (documents_of(packed, split, tokenizer) for split in ("train", "heldout"))
    assert train == [text for text in DOCUMENTS if text not in held_out] and len(train + held_out) == 400
    assert held_out == [text for text in DOCUMENTS if text in held_out]
    assert 20 <= len(held_out) <= 60  # 40 expected, standard deviation 6
    assert packed.token_count("train") == sum(len(encode_texts(tokenizer, [text])[0]) + 1 for text in train)
    assert calls[-1] == sum(len(encode_texts(tokenizer, [text])[0]) for text in DOCUMENTS)
    assert packed.meta["tokenizer"] == tokenizer_hash(tokenizer) and packed.separator == SEPARATOR
    assert packed.tokens("train").dtype == np.uint16


LONG = "".join(f"Paragraph {i} of a long book about a cat.\n\n" for i in range(2000))  # 84k characters


def test_one_long_document_is_divided(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "PIECE", 500)  # some 170 pieces
    packed = pack([LONG], tokenizer, tmp_path, held_out_fraction=0.1)
    train, held_out = (documents_of(packed, split, tokenizer) for split in ("train", "heldout"))
    assert held_out and all(part in LONG for part in train + held_out)
    assert sum(map(len, train + held_out)) == len(LONG)
    # Pieces that follow each other are one stretch without a separator.
    assert 8 < len(held_out) < 30 and len(train) <= len(held_out) + 1
    assert packed.token_count("heldout") >= 32


@pytest.mark.parametrize("documents", [DOCUMENTS[:2], DOCUMENTS[:3], DOCUMENTS, [LONG]])
@pytest.mark.parametrize("seed", range(2))
def test_held_out_is_never_empty_and_never_most_of_it(tokenizer, tmp_path, documents, seed):
    packed = pack(documents, tokenizer, tmp_path, held_out_fraction=1e-9, seed=seed)
    train, held_out = packed.token_count("train"), packed.token_count("heldout")
    total = train + held_out
    separators = (packed.tokens("heldout") == SEPARATOR).sum()
    assert held_out > 0 and train > 0
    # 8 contexts of 32, at most a twentieth; or one context, at most a quarter; and at most one piece more
    largest = max(len(encode_texts(tokenizer, [text[:8192]])[0]) for text in documents) + 2
    assert held_out - separators <= max(min(256, total / 20), min(32, total / 4)) + largest


def test_an_interrupted_run_leaves_no_finished_corpus(tokenizer, tmp_path):
    pack(DOCUMENTS, tokenizer, tmp_path)

    def interrupted():
        yield from DOCUMENTS
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(interrupted(), tokenizer, tmp_path)
    assert not list(tmp_path.glob("*.tmp"))
    with pytest.raises(UserError, match=r"no meta.json, so no finished packed corpus"):
        PackedCorpus.load(tmp_path)


def test_a_damaged_corpus_is_noticed(tokenizer, tmp_path):
    packed = pack(DOCUMENTS, tokenizer, tmp_path)
    assert PackedCorpus.load(tmp_path).meta == packed.meta
    whole = (tmp_path / "train.bin").read_bytes()
    (tmp_path / "train.bin").write_bytes(whole[:-2])
    with pytest.raises(UserError, match=rf"train.bin: has {len(whole) - 2} bytes, meta.json says {len(whole)}"):
        PackedCorpus.load(tmp_path)
    (tmp_path / "meta.json").write_text("{}")
    with pytest.raises(UserError, match=r"meta.json: damaged"):
        PackedCorpus.load(tmp_path)


def test_blocks_are_the_stream_cut_evenly(tokenizer, tmp_path):
    packed = pack(DOCUMENTS, tokenizer, tmp_path)
    blocks = packed.blocks("train", 32)
    tokens = packed.tokens("train").astype(np.int64)
    assert len(blocks) == len(tokens) // 32
    for index in (0, 7, len(blocks) - 1):
        item = blocks[index]
        assert item["input_ids"].shape == (32,) and str(item["input_ids"].dtype) == "torch.int64"
        assert item["input_ids"].tolist() == item["labels"].tolist() == tokens[index * 32 : index * 32 + 32].tolist()
        assert item["labels"].data_ptr() != item["input_ids"].data_ptr()
    with pytest.raises(IndexError):
        blocks[len(blocks)]


GPT3 = [60, 22, 8, 8, 3]
BLOCK = 16


def test_every_source_keeps_its_share_within_one_block():
    given = Counter()
    for i, source in enumerate(draw_order(GPT3, 2020), 1):
        given[source] += 1
        assert all(abs(given[s] - weight / 101 * i) < 1 for s, weight in enumerate(GPT3))
    assert [given[s] for s in range(5)] == [20 * weight for weight in GPT3]


def mixed(tokenizer, folder, tokens=101 * BLOCK):
    """Three sources of 40, 10 and 2 documents with words of their own, mixed 3 : 1 : 1."""
    parts = []
    for s, (word, count) in enumerate((("red", 40), ("dog", 10), ("seven", 2))):
        texts = [f"{word} {word} {i} " * 12 for i in range(count)]
        packed = pack_corpus(texts, tokenizer, folder / f"source-{s}", held_out_fraction=0.2, seed=0)
        parts.append((word, (3.0, 1.0, 1.0)[s], packed))
    streams = [corpus.tokens("train").tolist() for _, _, corpus in parts]
    held_out = [corpus.tokens("heldout").tolist() for _, _, corpus in parts]
    return mix_corpora(parts, BLOCK, tokens, folder), streams, held_out


def test_blocks_come_from_their_sources_in_order_and_again(tokenizer, tmp_path):
    found, streams, held_out = mixed(tokenizer, tmp_path / "a")
    blocks = found.blocks("train", BLOCK)
    assert len(blocks) == 101 and found.token_count("train") == 101 * BLOCK
    given = [0, 0, 0]
    for i, s in enumerate(draw_order([3, 1, 1], 101)):
        begin = given[s] % (len(streams[s]) // BLOCK) * BLOCK
        assert blocks[i]["input_ids"].tolist() == streams[s][begin : begin + BLOCK]
        given[s] += 1
    assert found.tokens("heldout").tolist() == [token for part in held_out for token in part]
    assert [source["drawn"] for source in found.meta["sources"]] == [n * BLOCK for n in given]
    epochs = [n / (len(stream) // BLOCK) for n, stream in zip(given, streams, strict=True)]
    assert [source["epochs"] for source in found.meta["sources"]] == epochs and epochs[2] > 1
    assert [source["share"] for source in found.meta["sources"]] == [0.6, 0.2, 0.2]
    assert not list((tmp_path / "a").glob("source-*"))
    again, _, _ = mixed(tokenizer, tmp_path / "b")
    assert PackedCorpus.load(tmp_path / "b").sha256 == found.sha256 == again.sha256
