"""The pretraining text: documents, packed once into memory-mapped token files, and served as blocks."""

import io
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rlhf.data.inputs import ROW_SUFFIXES, TEXT_SUFFIXES, Source, has_suffix, open_bytes, resolve_sources
from rlhf.data.rows import read_rows
from rlhf.data.splits import uniform
from rlhf.data.tokenizer import SEPARATOR, encode_texts, separator_id, tokenizer_hash
from rlhf.errors import UserError
from rlhf.system.files import sha256_file, sync, write_json
from rlhf.system.schemas import Count, Digest, Schema, read_checked, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_DOCUMENT = 1 << 24  # characters; a longer one becomes several documents, so that memory is bounded
PIECE = 8192  # characters: a document above twice this is tokenised and assigned to a split in such pieces
_CHUNK = 1 << 20  # characters of a text file read at once
_BATCH = 1 << 20  # characters tokenised at once
_SPLITS = ("train", "heldout")


def cut_text(text: str, size: int) -> list[str]:
    """Cut a text into parts of at most `size` characters. A part ends after the last blank line in its second half,
    else after the last line end there, else after the last space there, else at `size`.
    """
    parts = []
    begin = 0
    while len(text) - begin > size:
        places = ((mark, text.rfind(mark, begin + size // 2, begin + size)) for mark in ("\n\n", "\n", " "))
        end = next((at + len(mark) for mark, at in places if at >= 0), begin + size)
        parts.append(text[begin:end])
        begin = end
    return [*parts, text[begin:]] if begin < len(text) else parts


def read_text(path: Path, encoding: str = "utf-8") -> Iterator[str]:
    """Decode a file chunk by chunk, without a BOM and with newlines as line ends. Raises: UserError if that fails."""
    with open_bytes(path) as file:
        try:
            text = io.TextIOWrapper(file, encoding)  # type: ignore[arg-type]
            yield text.read(_CHUNK).removeprefix("\ufeff")
            yield from iter(partial(text.read, _CHUNK), "")
        except UnicodeDecodeError as error:  # error.object ends at the file's position
            at = file.tell() - len(error.object) + error.start
            came = f"byte 0x{error.object[error.start]:02x} at offset {at} is not {encoding} text"
            cure = "set data.encoding=latin-1 (or cp1252, …), or convert the file with iconv"
            raise UserError(f"{path}: {came}: {cure}") from error


def _text_documents(path: Path, encoding: str) -> Iterator[str]:
    """A file's texts between separators; documents longer than MAX_DOCUMENT are yielded in parts."""
    rest = ""
    for chunk in read_text(path, encoding):
        *whole, rest = (rest + chunk).split(SEPARATOR)
        yield from (document.strip() for document in whole)
        if len(rest) >= MAX_DOCUMENT:
            *parts, rest = cut_text(rest, MAX_DOCUMENT // 2)
            yield from parts
    yield rest.strip()


def _row_documents(source: Source) -> Iterator[str]:
    for row in read_rows(source):
        if row.problem:
            raise UserError(str(row))
        text = row.value.get("text")
        if not isinstance(text, str):
            wanted = '{"text": "…"} in each row of a corpus'
            raise UserError(f"{source.name}:{row.line}: text: got {shown(text)}, want {wanted}")
        yield text


def iterate_documents(sources: Any, encoding: str = "utf-8") -> Iterator[str]:
    """The documents of a corpus one by one, blank ones left out, in bounded memory.

    A .txt file is one document, or several separated by `<|endoftext|>`. In .jsonl and .json files and in hub data sets
    each row is one, under the key `text`. `encoding` is that of .txt files. Raises: UserError if a file is missing,
    empty or undecodable, or a row has no text.
    """
    for source in resolve_sources(sources, TEXT_SUFFIXES + ROW_SUFFIXES):
        empty, path = True, source.path
        is_text = path is not None and has_suffix(path, TEXT_SUFFIXES)
        texts = _text_documents(path, encoding) if path and is_text else _row_documents(source)
        for document in filter(str.strip, texts):
            empty = False
            yield from cut_text(document, MAX_DOCUMENT)
        if empty:
            raise UserError(f"{source.name}: the file has no text: remove it from data.corpus, or fill it")


_Unit = tuple[int, int]  # of tokenisation and splitting: the number of a document, and of a part of it


def _batches(documents: Iterable[str]) -> Iterator[list[tuple[_Unit, str]]]:
    """The pieces of the documents with their texts, about _BATCH characters at a time."""
    batch: list[tuple[_Unit, str]] = []
    size = 0
    for number, document in enumerate(documents):
        parts = cut_text(document, PIECE) if len(document) > 2 * PIECE else [document]
        for i, part in enumerate(parts if document.strip() else ()):
            batch.append(((number, i), part))
            size += len(part)
            if size >= _BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def held_out_pieces(u: np.ndarray, tokens: np.ndarray, fraction: float, context: int) -> np.ndarray:
    """Which pieces are held out, (N,) bool: those whose hash `u` is below `fraction`. If these have too few tokens, the
    pieces with the next smallest hashes are added, except the very last. Enough is 8 contexts, but at most a twentieth
    of the corpus; or one context, but at most a quarter of it; whichever is more.
    """
    total = int(tokens.sum())
    share = max(min(8 * context, total // 20), min(context, total // 4), 1)
    order = np.argsort(u, kind="stable")[:-1]
    before = np.cumsum(tokens[order]) - tokens[order]  # tokens held out before each piece
    chosen = order[(u[order] < fraction) | (before < share)]
    limit = u[chosen].max(initial=-1.0)
    return u <= limit


def _write_split(path: Path, pieces: Sequence[_Unit], places: np.ndarray, tokens: np.ndarray, separator: int) -> None:
    """Write the tokens of these pieces; a separator ends each document, and each run of adjacent pieces of a divided one."""
    end = np.asarray([separator], tokens.dtype).tobytes()
    last: _Unit | None = None
    with path.open("wb") as file:
        for (document, part), (start, stop) in zip(pieces, places.tolist(), strict=True):
            if last is not None and last != (document, part - 1):
                file.write(end)
            file.write(tokens[start:stop].tobytes())
            last = document, part
        file.write(end if pieces else b"")
    sync(path)


def pack_corpus(
    documents: Iterable[str],
    tokenizer: "PreTrainedTokenizerFast",
    out: Path | str,
    *,
    held_out_fraction: float,
    seed: int,
    progress: Callable[[int], object] = lambda _: None,
) -> "PackedCorpus":
    """Tokenise documents into `out`/train.bin and heldout.bin, joined by `<|endoftext|>`, with a meta.json.

    The hash of a document's text decides its split, so that equal ones share it, see `held_out_pieces`; documents above
    16k characters are divided first. meta.json is written last, so that a killed run leaves none. `progress(tokens)` is
    called after each batch. Raises: UserError if there is no text, or too little to divide.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").unlink(missing_ok=True)
    dtype = np.dtype("<u2" if len(tokenizer) <= 2**16 else "<u4")
    separator = separator_id(tokenizer)
    context = tokenizer.model_max_length if tokenizer.model_max_length < 10**6 else 1024
    pieces: list[_Unit] = []
    sizes, hashes = array("Q"), array("d")
    packed = folder / "tokens.tmp"  # of all pieces in order
    try:
        with packed.open("wb") as file:
            for batch in _batches(documents):
                for (piece, text), ids in zip(batch, encode_texts(tokenizer, [t for _, t in batch]), strict=True):
                    file.write(np.asarray(ids, dtype).tobytes())
                    pieces.append(piece)
                    sizes.append(len(ids))
                    hashes.append(uniform(text, seed))
                progress(file.tell() // dtype.itemsize)
        count, ends = np.array(sizes, np.int64), np.cumsum(np.array(sizes, np.int64))
        if not count.any():
            raise UserError("the corpus has no text: give data.corpus a file, folder or hub id with documents")
        held_out = held_out_pieces(np.array(hashes), count, held_out_fraction, context)
        places, tokens = np.stack([ends - count, ends], 1), np.memmap(packed, dtype, mode="r")
        for split, chosen in (("train", ~held_out), ("heldout", held_out)):
            which = [pieces[i] for i in np.flatnonzero(chosen)]
            _write_split(folder / f"{split}.bin.tmp", which, places[chosen], tokens, separator)
        if held_out.all() or not held_out.any():
            came = f"the corpus has {ends[-1]} tokens in {len(pieces)} documents, too few to hold a part out"
            raise UserError(f"{came}: want at least two documents, or one of 16,000 characters")
        meta = {"version": 1, "dtype": dtype.str, "separator": separator, "tokenizer": tokenizer_hash(tokenizer)}
        return _finish(folder, meta | {"held_out_fraction": held_out_fraction, "seed": seed})
    finally:
        for name in ("tokens.tmp", "train.bin.tmp", "heldout.bin.tmp"):
            (folder / name).unlink(missing_ok=True)


def _finish(folder: Path, meta: dict[str, Any]) -> "PackedCorpus":
    """Give the written token files their names, then write meta.json."""
    meta = meta | {"splits": {}}
    for split in _SPLITS:
        file = (folder / f"{split}.bin.tmp").replace(folder / f"{split}.bin")
        tokens = file.stat().st_size // np.dtype(meta["dtype"]).itemsize
        meta["splits"][split] = {"tokens": tokens, "sha256": sha256_file(file)}
    write_json(folder / "meta.json", meta)
    return PackedCorpus(folder, meta)


class _Split(Schema):
    tokens: Count
    sha256: Digest


class _Packed(Schema):  # meta.json
    dtype: Literal["<u2", "<u4"]
    separator: Count
    tokenizer: Digest
    splits: Annotated[dict[Literal["train", "heldout"], _Split], Field(min_length=2)]


@dataclass(frozen=True, slots=True)
class PackedCorpus:
    """A tokenised corpus on disk. `splits` is "train" or "heldout"."""

    path: Path
    meta: dict[str, Any]

    @classmethod
    def load_for(cls, setting: str, path: Path, tokenizer: Any, remedy: str) -> "PackedCorpus":
        """`load`, for a later stage whose `setting` needs the text that the base model was pretrained on. Raises:
        UserError as `load` does, and with `remedy` in its message if the text was packed with another tokenizer.
        """
        try:
            corpus = cls.load(path / "corpus")
        except UserError as error:
            raise UserError(f"{setting}: needs the packed corpus of {path}: {error}") from None
        if corpus.meta["tokenizer"] != tokenizer_hash(tokenizer):
            raise UserError(f"{setting}: the corpus of {path} was packed with another tokenizer: {remedy}")
        return corpus

    @classmethod
    def load(cls, path: Path | str) -> "PackedCorpus":
        """Open a packed corpus. Raises: UserError if it is missing, unfinished or not of the size that its meta.json says."""
        folder = Path(path)
        meta = read_checked(folder / "meta.json", _Packed, "pack the corpus again")
        if meta is None:
            raise UserError(f"{folder}: no meta.json, so no finished packed corpus: pack it again")
        for split in _SPLITS:
            file, size = folder / f"{split}.bin", meta["splits"][split]["tokens"] * np.dtype(meta["dtype"]).itemsize
            came = file.stat().st_size if file.is_file() else 0
            if came != size:
                raise UserError(f"{file}: has {came} bytes, meta.json says {size}: pack the corpus again")
        return cls(folder, meta)

    @property
    def separator(self) -> int:
        """The id of `<|endoftext|>`: a token is a separator if and only if it equals this."""
        return self.meta["separator"]

    @property
    def sha256(self) -> dict[str, str]:
        return {f"{split}.bin": self.meta["splits"][split]["sha256"] for split in _SPLITS}

    def token_count(self, split: str) -> int:
        """Tokens of a split, separators included."""
        return self.meta["splits"][split]["tokens"]

    def tokens(self, split: str) -> np.ndarray:
        """All tokens of a split, (token_count,) uint16 or uint32, memory-mapped."""
        return np.memmap(self.path / f"{split}.bin", dtype=self.meta["dtype"], mode="r")

    def blocks(self, split: str, context_length: int) -> "Blocks":
        """The split as full blocks of `context_length` tokens, without the rest. Raises: UserError if it has less than one block."""
        if self.token_count(split) < context_length:
            came = f"{split} has {self.token_count(split)} tokens, less than one block of {context_length}"
            raise UserError(f"{self.path}: {came}: add text, raise data.held_out or lower model.context_length")
        return Blocks(self, split, context_length)


class Blocks(torch.utils.data.Dataset):
    """Block i holds tokens [i * context_length, (i + 1) * context_length) of a split. An item is {"input_ids",
    "labels"}, the same ids twice, (context_length,) int64: the model shifts them. For bits per byte leave out labels
    equal to `separator`; `tokenizer.token_byte_lengths` has the bytes of the others.
    """

    def __init__(self, corpus: PackedCorpus, split: str, context_length: int):
        self.separator, self.context_length = corpus.separator, context_length
        self._tokens = corpus.tokens(split)

    def __len__(self) -> int:
        return len(self._tokens) // self.context_length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        begin = index * self.context_length
        ids = torch.from_numpy(self._tokens[begin : begin + self.context_length].astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}


def make_collator(separator: int, isolate: bool):
    """Stack blocks; with `isolate`, add the position of each token (B, T) within its document, which ends with a
    separator, so that attention keeps documents apart.
    """

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        if isolate:
            tokens = batch["input_ids"]
            index = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            starts = torch.nn.functional.pad(tokens[:, :-1] == separator, (1, 0))
            batch["position_ids"] = index - torch.where(starts, index, 0).cummax(1).values
        return batch

    return collate


# --- several sources, mixed by weight as GPT-3 mixed its five (Brown et al. 2020, table 2.2) ---


def draw_order(weights: Sequence[float], count: int) -> Iterator[int]:
    """The source of each of `count` blocks: the one furthest behind its share, weight / sum(weights) of the blocks so far."""
    total, given = sum(weights), [0] * len(weights)
    for i in range(1, count + 1):
        chosen = max(range(len(weights)), key=lambda s: weights[s] / total * i - given[s])
        given[chosen] += 1
        yield chosen


def mix_corpora(parts: Sequence[tuple[str, float, PackedCorpus]], block: int, tokens: int, out: Path) -> PackedCorpus:
    """Write `out`: `tokens` tokens of training text in blocks of `block`, each block of one source; all held-out text.

    parts: names, weights, and texts that were packed alone, which are removed. The blocks of a source come in its own
    order, and again from its beginning when they are used up. meta.json lists the `sources`, each as {"name", "share",
    "tokens", "drawn", "epochs"}. Raises: UserError if a source has less than one block.
    """
    names, weights, corpora = zip(*parts, strict=True)
    served = [corpus.blocks("train", block) for corpus in corpora]
    texts = [corpus.tokens("train") for corpus in corpora]
    given = [0] * len(parts)
    with (out / "train.bin.tmp").open("wb") as file:
        for s in draw_order(weights, -(-tokens // block)):
            begin = given[s] % len(served[s]) * block
            file.write(texts[s][begin : begin + block].tobytes())
            given[s] += 1
    with (out / "heldout.bin.tmp").open("wb") as file:
        for corpus in corpora:
            file.write(corpus.tokens("heldout").tobytes())
    sources = []
    for name, weight, corpus, n, blocks in zip(names, weights, corpora, given, served, strict=True):
        about = {"name": name, "share": weight / sum(weights), "tokens": corpus.token_count("train")}
        sources.append(about | {"drawn": n * block, "epochs": n / len(blocks)})
    mixed = _finish(out, corpora[0].meta | {"sources": sources})
    for corpus in corpora:
        shutil.rmtree(corpus.path)
    return mixed
