"""Reads the .wandb file that W&B keeps of a run, record by record: what the tests compare with what was logged.

The file is a 7-byte header (":W&B", a 16-bit magic number, a version byte), then LevelDB log blocks of 32 KiB. A block
holds chunks: CRC-32 (4 bytes), length (2), kind (1), data. Kind 1 is a whole record, 2 the first part of one, 3 a middle
and 4 the last; a chunk never crosses a block, and fewer than 7 bytes at a block's end are padding.
"""

import json
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER_BYTES = 7
BLOCK_BYTES = 32 * 1024
CHUNK_HEADER_BYTES = 7
IDENT, MAGIC = b":W&B", 0xBEE1
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
SETTLE_SECONDS = 5.0


def read_chunks(path: Path) -> Iterator[tuple[int, bytes]]:
    """(kind, data) of every chunk whose checksum is right, until the file ends or is torn."""
    data = path.read_bytes()
    if len(data) < HEADER_BYTES or data[:4] != IDENT or struct.unpack("<H", data[4:6])[0] != MAGIC:
        return
    at = HEADER_BYTES
    while at + CHUNK_HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES  # blocks are counted from the file's first byte
        if left < CHUNK_HEADER_BYTES:
            at += left
            continue
        checksum, length, kind = struct.unpack("<IHB", data[at : at + CHUNK_HEADER_BYTES])
        body = data[at + CHUNK_HEADER_BYTES : at + CHUNK_HEADER_BYTES + length]
        if kind not in (FULL, FIRST, MIDDLE, LAST) or len(body) < length:
            return  # zeros of a block that is being written, or a tail that a kill cut
        if zlib.crc32(bytes([kind]) + body) != checksum:
            return
        yield kind, body
        at += CHUNK_HEADER_BYTES + length


def read_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file, in order, as `wandb.proto.wandb_internal_pb2.Record`."""
    from wandb.proto import wandb_internal_pb2 as protocol

    parts: list[bytes] = []
    for kind, body in read_chunks(path):
        if kind in (FULL, FIRST):
            parts = []
        parts.append(body)
        if kind in (FULL, LAST):
            record = protocol.Record()  # type: ignore[attr-defined,unused-ignore]
            record.ParseFromString(b"".join(parts))
            yield record


def history_row(record: Any) -> dict[str, Any]:
    """{name: value} of a history record, nested keys joined by dots."""
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def read_history(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for record in read_records(path):
        if record.WhichOneof("record_type") == "history":
            row = history_row(record)
            yield int(row.get("_step", record.history.step.num)), row


def run_files(home: Path, run_id: str) -> list[Path]:
    """The .wandb files of a run in all its folders, oldest first; W&B says that it is done some moments before the last is."""
    files = sorted(home.glob(f"*run-*-{run_id}/run-{run_id}.wandb"))
    until = time.monotonic() + SETTLE_SECONDS
    while files and time.monotonic() < until:
        if any(record.WhichOneof("record_type") == "exit" for record in read_records(files[-1])):
            break
        time.sleep(0.02)
    return files
