"""Counts the characters and words of a batch's texts in Arrow's columns; texts that are not ASCII go through `str.split`."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa


def count_text(texts: "pa.StringArray") -> np.ndarray:
    """Characters and words of each text, (N, 2) int64: `len(text)` and `len(text.split())`."""
    if len(texts) == 0:
        return np.zeros((0, 2), np.int64)
    _, offset_buffer, buffer = texts.buffers()
    ends = np.frombuffer(offset_buffer, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    data = np.frombuffer(buffer or b"", np.uint8)[ends[0] : ends[-1]]
    ends = ends - ends[0]
    space = (data == 32) | (data - np.uint8(9) < 5) | (data - np.uint8(28) < 4)  # as `str.isspace` has it
    begins = ~space  # a word begins where a character follows a space, or the text does
    begins[1:] &= space[:-1]
    sizes = np.stack([np.diff(ends), np.zeros(len(texts), np.int64)], 1)
    full = sizes[:, 0] > 0
    first = ends[:-1][full]
    begins[first] = ~space[first]
    if len(first):
        sizes[full, 1] = np.add.reduceat(begins.view(np.uint8), first, dtype=np.uint32)
    beyond = np.flatnonzero(data >= 128) if data.max(initial=0) >= 128 else np.zeros(0, np.int64)
    for i in np.unique(np.searchsorted(ends, beyond, "right") - 1).tolist():
        text = texts[i].as_py()
        sizes[i] = len(text), len(text.split())
    return sizes


def batch_sizes(kind: str, table: "pa.RecordBatch") -> tuple[np.ndarray, np.ndarray]:
    """Characters and words of each prompt, (R, 2), and of each response of all records, in their order, (L, 2)."""
    prompts = table.column("prompt")
    turns = count_text(prompts.values.field("content"))
    totals = np.concatenate([np.zeros((1, 2), np.int64), np.cumsum(turns, 0)])[prompts.offsets.to_numpy()]
    if kind == "ranking":
        texts = table.column("responses").values.field("text")
    elif kind == "demonstration":
        texts = table.column("response")
    else:
        return np.diff(totals, axis=0), np.zeros((0, 2), np.int64)
    return np.diff(totals, axis=0), count_text(texts)
