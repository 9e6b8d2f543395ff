"""Several packed corpora mixed by weight into one, as GPT-3 mixed its five (Brown et al. 2020, table 2.2)."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf.data.corpus import SPLITS, PackedCorpus
from rlhf.system.files import sha256_file, write_json


@dataclass(frozen=True, slots=True)
class Part:
    """One source, packed by itself, and its weight."""

    name: str
    weight: float
    corpus: PackedCorpus


def draw_order(weights: Sequence[float], count: int) -> Iterator[int]:
    """The source of each of `count` blocks: the one furthest behind its share.

    After i blocks each source has contributed weight / sum(weights) * i blocks, within one block.
    """
    total, given = sum(weights), [0] * len(weights)
    for i in range(1, count + 1):
        chosen = max(range(len(weights)), key=lambda s: weights[s] / total * i - given[s])
        given[chosen] += 1
        yield chosen


def mix_corpora(parts: Sequence[Part], block: int, tokens: int, out: Path) -> PackedCorpus:
    """Write `out`: `tokens` tokens of training text in blocks of `block`, each block of one source; all held-out text.

    The blocks of a source come in its own order, and again from its beginning when they are used up: `epochs` of the source in
    meta.json. The packed sources are removed.

    Raises: UserError if a source has less than one block.
    """
    served = [part.corpus.blocks("train", block) for part in parts]
    texts = [part.corpus.tokens("train") for part in parts]
    given, count = [0] * len(parts), -(-tokens // block)
    with (out / "train.bin.tmp").open("wb") as file:
        for s in draw_order([part.weight for part in parts], count):
            begin = given[s] % len(served[s]) * block
            file.write(texts[s][begin : begin + block].tobytes())
            given[s] += 1
    with (out / "heldout.bin.tmp").open("wb") as file:
        for part in parts:
            file.write(part.corpus.tokens("heldout").tobytes())
    metas = [part.corpus.meta for part in parts]
    held_out = [meta["splits"]["heldout"] for meta in metas]
    total = sum(part.weight for part in parts)
    meta = metas[0] | {
        "splits": {
            "train": {"tokens": count * block},
            "heldout": {key: sum(one[key] for one in held_out) for key in ("tokens", "bytes", "documents")},
        },
        "sources": [
            {
                "name": part.name,
                "share": part.weight / total,
                "tokens": part.corpus.token_count("train"),
                "drawn": n * block,
                "epochs": n / len(blocks),
            }
            for part, n, blocks in zip(parts, given, served, strict=True)
        ],
    }
    for split in SPLITS:
        meta["splits"][split]["sha256"] = sha256_file(out / f"{split}.bin.tmp")
        (out / f"{split}.bin.tmp").replace(out / f"{split}.bin")
    write_json(out / "meta.json", meta)
    for part in parts:
        shutil.rmtree(part.corpus.path)
    return PackedCorpus(out, meta)
