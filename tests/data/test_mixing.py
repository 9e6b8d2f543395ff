"""Corpora mixed by weight: counts of blocks, epochs, the same bytes again, and the stage's own packing."""

from collections import Counter

import pytest

from rlhf.config.checks import check_config
from rlhf.config.compose import compose_config
from rlhf.data.corpus import PackedCorpus, Part, draw_order, mix_corpora, pack_corpus
from rlhf.errors import UserError

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
        parts.append(Part(word, (3.0, 1.0, 1.0)[s], packed))
    streams = [part.corpus.tokens("train").tolist() for part in parts]
    held_out = [part.corpus.tokens("heldout").tolist() for part in parts]
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


def test_weights_and_entries_must_be_as_many():
    for given in (["data.corpus=[a.txt,b.txt]", "data.corpus_weights=[1,2,3]"], ["data.corpus_weights=[1]"]):
        with pytest.raises(
            UserError, match=r"data\.corpus_weights=\[.*\]: want one weight for each of the . entries of data\.corpus"
        ):
            check_config(compose_config(["experiment=gold", *given]), "pretrain")
    with pytest.raises(UserError, match=r"data\.corpus_weights=\[1, 0\]: want a list of numbers above 0"):
        check_config(
            compose_config(["experiment=gold", "data.corpus=[a.txt,b.txt]", "data.corpus_weights=[1,0]"]), "pretrain"
        )
