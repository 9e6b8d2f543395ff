"""The pretraining text: documents, packed once into memory-mapped token files, and served as blocks."""

import codecs
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhf.data.inputs import ROW_SUFFIXES, TEXT_SUFFIXES, Reject, Source, open_bytes, resolve_sources
from rlhf.data.reading import read_rows
from rlhf.data.records import shown
from rlhf.data.splits import uniform
from rlhf.data.tokenizer import SEPARATOR, encode_texts, separator_id, tokenizer_hash
from rlhf.errors import UserError
from rlhf.system.files import sha256_file, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_DOCUMENT = 1 << 24  # characters; a longer one becomes several documents, so that memory is bounded
PIECE = 8192  # characters: a document above twice this is tokenised and assigned to a split in such pieces
_CHUNK = 1 << 16  # bytes of a text file read at once
_BATCH = 1 << 20  # characters tokenised at once
_KEPT_TOKENS = 1 << 22  # most tokens that wait until it is decided what is held out
SPLITS = ("train", "heldout")


def cut_text(text: str, size: int) -> list[str]:
    """Cut a text into parts of at most `size` characters that join to the same text.

    A cut comes after a blank line, else after a line, else after a space, in the part's second half; else at
    `size`.
    """
    parts = []
    begin = 0
    while len(text) - begin > size:
        end = begin + size
        for mark in ("\n\n", "\n", " "):
            at = text.rfind(mark, begin + size // 2, begin + size)
            if at >= 0:
                end = at + len(mark)
                break
        parts.append(text[begin:end])
        begin = end
    return [*parts, text[begin:]] if begin < len(text) else parts


def read_text(path: Path, encoding: str = "utf-8") -> Iterator[str]:
    """Decode a file chunk by chunk; a BOM is dropped and line ends become a single newline.

    Raises: UserError if the encoding is unknown or the bytes are not in it, naming the byte's offset.
    """
    try:
        decoder = codecs.getincrementaldecoder(encoding)()
    except LookupError as error:
        raise UserError(f"data.encoding={encoding}: no such encoding: want utf-8, latin-1, cp1252, …") from error
    newlines = io.IncrementalNewlineDecoder(decoder, translate=True)
    with open_bytes(path) as file:
        offset = 0  # of the chunk in the file
        ended = False
        while not ended:
            chunk = file.read(_CHUNK)
            ended = not chunk
            try:
                text = newlines.decode(chunk, final=ended)
            except UnicodeDecodeError as error:
                # the decoder's input: the rest of the last chunk, then this chunk
                at = offset - (len(error.object) - len(chunk)) + error.start
                byte = error.object[error.start]
                cure = "set data.encoding=latin-1 (or cp1252, …), or convert the file with iconv"
                raise UserError(f"{path}: byte 0x{byte:02x} at offset {at} is not {encoding} text: {cure}") from error
            text = text.removeprefix("\ufeff") if offset == 0 else text
            offset += len(chunk)
            if text:
                yield text


def _text_documents(source: Source, encoding: str) -> Iterator[str]:
    """A file's texts between separators; documents longer than MAX_DOCUMENT are yielded in parts."""
    assert source.path is not None
    chunks: list[str] = []
    size = 0
    tail = ""  # of the previous chunk, for a separator that spans two chunks
    for chunk in read_text(source.path, encoding):
        chunks.append(chunk)
        size += len(chunk)
        seam = tail + chunk
        tail = seam[1 - len(SEPARATOR) :]
        if SEPARATOR in seam or size >= MAX_DOCUMENT:
            *whole, rest = "".join(chunks).split(SEPARATOR)
            yield from (document.strip() for document in whole)
            if len(rest) >= MAX_DOCUMENT:
                *parts, rest = cut_text(rest, MAX_DOCUMENT // 2)
                yield from parts
            chunks, size, tail = [rest], len(rest), rest[1 - len(SEPARATOR) :]
    yield "".join(chunks).strip()


def _row_documents(source: Source) -> Iterator[str]:
    for row in read_rows(source):
        if isinstance(row, Reject):
            raise UserError(str(row))
        text = row.value.get("text")
        if not isinstance(text, str):
            keys = ", ".join(str(key) for key in list(row.value)[:8])
            came = f"text: got {shown(text)}" if "text" in row.value else f"the keys are {keys}"
            raise UserError(f'{source.name}:{row.line}: {came}: want {{"text": "…"}} in each row of a corpus')
        yield text


def iterate_documents(sources: Any, encoding: str = "utf-8") -> Iterator[str]:
    """The documents of a corpus one by one, blank ones left out, in bounded memory.

    A .txt file is one document, or several separated by `<|endoftext|>`; in .jsonl and .json
    files and in hub data sets each row is one, under the key `text`. `encoding` is that of .txt files.

    Raises: UserError if a file is missing, empty or undecodable, or a row has no text.
    """
    for source in resolve_sources(sources, TEXT_SUFFIXES + ROW_SUFFIXES):
        empty = True
        documents = _text_documents(source, encoding) if source.is_text else _row_documents(source)
        for document in documents:
            if not document.strip():
                continue
            empty = False
            yield from cut_text(document, MAX_DOCUMENT) if len(document) > MAX_DOCUMENT else (document,)
        if empty:
            raise UserError(f"{source.name}: the file has no text: remove it from data.corpus, or fill it")


class _Piece(NamedTuple):
    """A unit of tokenisation and splitting: a document, or a part of a long one."""

    text: str
    document: int
    part: int


def _pieces(documents: Iterable[str]) -> Iterator[_Piece]:
    for number, document in enumerate(documents):
        if document.strip():
            parts = cut_text(document, PIECE) if len(document) > 2 * PIECE else [document]
            yield from (_Piece(part, number, i) for i, part in enumerate(parts))


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Writer:
    """Appends pieces to one token file; a separator ends each document, or each run of pieces of a divided one."""

    def __init__(self, path: Path, dtype: np.dtype, separator: int):
        self.path, self.dtype, self.separator = path, dtype, separator
        self.file = path.open("wb")
        self.tokens = self.bytes = self.documents = 0
        self.last: tuple[int, int] | None = None

    def _write(self, ids: Sequence[int] | np.ndarray) -> None:
        self.file.write(np.asarray(ids, dtype=self.dtype).tobytes())
        self.tokens += len(ids)

    def add(self, piece: _Piece, ids: Sequence[int] | np.ndarray) -> None:
        begins = self.last != (piece.document, piece.part - 1)
        if begins and self.last is not None:
            self._write([self.separator])
        self.documents += begins
        self._write(ids)
        self.bytes += len(piece.text.encode("utf-8"))
        self.last = (piece.document, piece.part)

    def finish(self) -> dict[str, Any]:
        if self.last is not None:
            self._write([self.separator])
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return {
            "tokens": self.tokens,
            "bytes": self.bytes,
            "documents": self.documents,
            "sha256": sha256_file(self.path),
        }


class _Divider:
    """Assigns pieces to train or held-out by the hash of their text, so that equal documents share a split.

    The held-out share of a small corpus may be too small. The first pieces are therefore kept back until enough of
    them are held out; if the corpus ends or the buffer is full before, those with the next smallest hashes are
    added.
    """

    def __init__(self, train: _Writer, held_out: _Writer, fraction: float, seed: int, context_length: int):
        self.train, self.held_out, self.fraction, self.seed = train, held_out, fraction, seed
        self.context_length = context_length
        self.wanted = 8 * context_length
        self.kept: list[tuple[float, _Piece, np.ndarray]] | None = []  # None once decided
        self.kept_tokens = self.kept_held_out = self.pieces = 0

    def add(self, piece: _Piece, ids: list[int]) -> None:
        u = uniform(piece.text, self.seed)
        self.pieces += 1
        if self.kept is None:
            (self.held_out if u < self.fraction else self.train).add(piece, ids)
            return
        self.kept.append((u, piece, np.asarray(ids, dtype=np.uint32)))
        self.kept_tokens += len(ids)
        self.kept_held_out += len(ids) if u < self.fraction else 0
        enough = self.wanted <= self.kept_held_out < self.kept_tokens
        if enough or self.kept_tokens >= _KEPT_TOKENS:
            self.decide()

    def decide(self) -> None:
        """Write the pieces that were kept back, in the order of the text."""
        if self.kept is None:
            return
        share = max(min(self.wanted, self.kept_tokens // 20), min(self.context_length, self.kept_tokens // 4), 1)
        by_hash = sorted((u, len(ids)) for u, _, ids in self.kept)
        limit, tokens = -1.0, 0  # pieces whose hash is at most `limit` are held out
        for u, size in by_hash[:-1]:  # never all of them
            if u >= self.fraction and tokens >= share:
                break
            limit, tokens = u, tokens + size
        for u, piece, ids in self.kept:
            (self.held_out if u <= limit else self.train).add(piece, ids)
        self.kept = None


def pack_corpus(
    documents: Iterable[str],
    tokenizer: "PreTrainedTokenizerFast",
    out: Path | str,
    *,
    held_out_fraction: float,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> "PackedCorpus":
    """Tokenise documents into `out`/train.bin and heldout.bin, joined by `<|endoftext|>`, with a meta.json.

    Documents are assigned to held-out by hash; those above 16k characters are divided first. While
    `held_out_fraction` gives less than 8 contexts of tokens, more is held out: up to that, at most a
    twentieth of the corpus, or one context if that is at most a quarter. Bounded memory; meta.json is
    written last, so that a killed run leaves none. `progress(documents, tokens)` is called after each batch.

    Raises: UserError if there is no text, or too little to divide.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").unlink(missing_ok=True)
    dtype = np.dtype("<u2" if len(tokenizer) <= 2**16 else "<u4")
    separator = separator_id(tokenizer)
    writers = {split: _Writer(folder / f"{split}.bin.tmp", dtype, separator) for split in SPLITS}
    context = tokenizer.model_max_length if tokenizer.model_max_length < 10**6 else 1024
    divider = _Divider(writers["train"], writers["heldout"], held_out_fraction, seed, context)
    tokens = 0
    try:
        for batch in _batches(_pieces(documents)):
            for piece, ids in zip(batch, encode_texts(tokenizer, [p.text for p in batch]), strict=True):
                divider.add(piece, ids)
                tokens += len(ids)
            if progress is not None:
                progress(batch[-1].document + 1, tokens)
        if tokens == 0:
            raise UserError("the corpus has no text: give data.corpus a file, folder or hub id with documents")
        divider.decide()
        splits = {split: writer.finish() for split, writer in writers.items()}
        if not splits["train"]["tokens"] or not splits["heldout"]["tokens"]:
            raise UserError(
                f"the corpus has {tokens} tokens in {divider.pieces} documents, too few to hold a part out: "
                "want at least two documents, or one of 16,000 characters"
            )
    except BaseException:
        for writer in writers.values():
            writer.file.close()
            writer.path.unlink(missing_ok=True)
        raise
    for split, writer in writers.items():
        writer.path.replace(folder / f"{split}.bin")
    meta = {
        "version": 1,
        "dtype": dtype.str,
        "separator": separator,
        "tokenizer": tokenizer_hash(tokenizer),
        "held_out_fraction": held_out_fraction,
        "seed": seed,
        "splits": splits,
    }
    write_json(folder / "meta.json", meta)
    return PackedCorpus(folder, meta)


@dataclass(frozen=True, slots=True)
class PackedCorpus:
    """A tokenised corpus on disk. `splits` is "train" or "heldout"."""

    path: Path
    meta: dict[str, Any]

    @classmethod
    def load_for(cls, setting: str, path: Path, tokenizer: Any, remedy: str) -> "PackedCorpus":
        """`load`, for a later stage whose `setting` needs the text that the base was pretrained on.

        Raises: UserError as `load` does, and with `remedy` if it was packed with another tokenizer.
        """
        try:
            corpus = cls.load(path / "corpus")
        except UserError as error:
            raise UserError(f"{setting}: needs the packed corpus of {path}: {error}") from None
        if corpus.tokenizer_hash != tokenizer_hash(tokenizer):
            raise UserError(f"{setting}: the corpus of {path} was packed with another tokenizer: {remedy}")
        return corpus

    @classmethod
    def load(cls, path: Path | str) -> "PackedCorpus":
        """Open a packed corpus.

        Raises: UserError if it is missing, unfinished or not of the size that its meta.json says.
        """
        folder = Path(path)
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            width = np.dtype(meta["dtype"]).itemsize
            sizes = {split: meta["splits"][split]["tokens"] * width for split in SPLITS}
        except FileNotFoundError as error:
            raise UserError(f"{folder}: no meta.json, so no finished packed corpus: pack it again") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder}/meta.json: damaged ({error}): pack the corpus again") from error
        for split, size in sizes.items():
            file = folder / f"{split}.bin"
            came = file.stat().st_size if file.is_file() else 0
            if came != size:
                raise UserError(f"{file}: has {came} bytes, meta.json says {size}: pack the corpus again")
        return cls(folder, meta)

    @property
    def tokenizer_hash(self) -> str:
        return self.meta["tokenizer"]

    @property
    def separator(self) -> int:
        """The id of `<|endoftext|>`: a token is a separator if and only if it equals this."""
        return self.meta["separator"]

    @property
    def sources(self) -> list[dict[str, Any]]:
        """{"name", "share", "tokens", "drawn", "epochs"} of each source that was mixed in by weight."""
        return self.meta.get("sources", [])

    @property
    def sha256(self) -> dict[str, str]:
        return {f"{split}.bin": self.meta["splits"][split]["sha256"] for split in SPLITS}

    def token_count(self, split: str) -> int:
        """Tokens of a split, separators included."""
        return self.meta["splits"][split]["tokens"]

    def tokens(self, split: str) -> np.ndarray:
        """All tokens of a split, (token_count,) uint16 or uint32, memory-mapped."""
        return np.memmap(self.path / f"{split}.bin", dtype=self.meta["dtype"], mode="r")

    def blocks(self, split: str, context_length: int) -> "Blocks":
        """The split as full blocks of `context_length` tokens; the incomplete rest is left out.

        Raises: UserError if the split has less than one block.
        """
        if self.token_count(split) < context_length:
            mend = "raise data.held_out" if split == "heldout" else "add text"
            raise UserError(
                f"{self.path}: {split} has {self.token_count(split)} tokens, less than one block of "
                f"{context_length}: {mend} or lower model.context_length"
            )
        return Blocks(self, split, context_length)


class Blocks(torch.utils.data.Dataset):
    """Block i holds tokens [i * context_length, (i + 1) * context_length) of a split.

    An item is {"input_ids", "labels"}, the same ids twice, (context_length,) int64: the model shifts them.
    Nats of text tokens over bytes of text: leave out labels equal to `separator`, and take the bytes of the
    labels that were scored from `tokenizer.token_byte_lengths`.
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


def document_positions(tokens: Tensor, separator: int) -> Tensor:
    """Position of each token (B, T) within its document, which ends with a separator.

    Positions that restart separate the documents of a block: attention does not cross them.
    """
    index = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    starts = torch.nn.functional.pad(tokens[:, :-1] == separator, (1, 0))
    return index - torch.where(starts, index, 0).cummax(1).values


def make_collator(separator: int, isolate: bool):
    """Stack blocks; with `isolate`, add the positions that keep documents apart."""

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}
        if isolate:
            batch["position_ids"] = document_positions(batch["input_ids"], separator)
        return batch

    return collate
