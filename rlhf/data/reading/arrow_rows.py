"""Parquet and Arrow files as rows, a few hundred at a time, in bounded memory.

A file of kilobytes can contain one long text that a million cells share. Texts therefore stay shared, as Arrow's
dictionaries, until their rows are converted to Python objects, and only as many rows are converted at once as are small
enough together.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf.data.reading.cells import check_header, plain
from rlhf.data.reading.readers import MAX_RECORD_BYTES, Reject, Row
from rlhf.errors import UserError

_BATCH = 256  # most rows converted at a time
MAX_EXPANSION = 10_000  # limit of its rows' content, as a multiple of the file's size (at least MAX_RECORD_BYTES)


def _batches(path: Path, name: str, suffix: str) -> Iterator[Any]:
    """Record batches of at most `_BATCH` rows, after a check of the header."""
    import pyarrow
    from pyarrow import ipc, parquet

    if suffix == ".parquet":
        columns = parquet.read_metadata(path).schema
        texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
        with parquet.ParquetFile(path, read_dictionary=texts) as file:
            check_header(file.schema_arrow.names, name, 1)
            yield from file.iter_batches(batch_size=_BATCH)
        return
    with pyarrow.memory_map(str(path)) as mapped:
        try:
            opened = ipc.open_stream(mapped)
            stream = iter(opened)
        except pyarrow.ArrowInvalid:  # not the form for streams: the one for files
            mapped.seek(0)
            opened = ipc.open_file(mapped)
            stream = (opened.get_batch(i) for i in range(opened.num_record_batches))
        check_header(opened.schema.names, name, 1)
        for batch in stream:
            batch.validate(full=True)  # Arrow trusts the offsets in a file, and would read outside of it
            for start in range(0, batch.num_rows, _BATCH):
                yield batch.slice(start, _BATCH)


def _expanded(array: Any) -> int:
    """Bytes of a column's values, counting shared texts for each value; 0 for types that are always small.

    Raises: ValueError for a type whose values can share more than a text.
    """
    import pyarrow as pa
    from pyarrow import compute

    kind = array.type
    if pa.types.is_dictionary(kind):
        if len(array.dictionary) == 0:
            return 0
        inside = array.dictionary
        if pa.types.is_nested(kind.value_type) or pa.types.is_dictionary(kind.value_type):
            return len(array) * _expanded(inside)
        texts = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
        lengths = compute.binary_length(inside) if kind.value_type in texts else pa.array([8] * len(inside))
        return compute.sum(lengths.take(array.indices.drop_null())).as_py() or 0
    if pa.types.is_struct(kind):
        return sum(map(_expanded, array.flatten()))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _expanded(array.flatten())
    if pa.types.is_map(kind):
        return _expanded(array.keys) + _expanded(array.items)
    if pa.types.is_nested(kind) or "view" in str(kind) or "run_end" in str(kind):
        raise ValueError(f"a column of type {kind}, want plain strings, numbers, lists and structures: convert it")
    return array.nbytes


def _without_dictionaries(kind: Any) -> Any:
    """The type without dictionary encoding, which converts to Python objects ten times as fast."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_list(kind):
        return pa.list_(_without_dictionaries(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _without_dictionaries(field.type)) for field in kind])
    return kind


def _small_enough(batch: Any) -> Iterator[tuple[Any, int]]:
    """The batch in parts that are no larger than a record may be, or of one row, each with its bytes."""
    size = sum(map(_expanded, batch.columns))
    if size <= MAX_RECORD_BYTES or batch.num_rows == 1:
        yield batch, size
        return
    half = batch.num_rows // 2
    yield from _small_enough(batch.slice(0, half))
    yield from _small_enough(batch.slice(half))


def _values(batch: Any) -> Iterator[dict[str, Any] | str]:
    """The rows of a batch; for a row that cannot be read, its problem."""
    import pyarrow as pa

    schema = pa.schema([(field.name, _without_dictionaries(field.type)) for field in batch.schema])
    try:
        rows = batch.cast(schema).to_pylist()
    except (pa.ArrowException, ValueError, OverflowError):  # invalid UTF-8, a date before the year 1: find the row
        rows = [batch.slice(i, 1) for i in range(batch.num_rows)]
    for row in rows:
        try:
            yield plain(row if isinstance(row, dict) else row.to_pylist()[0])
        except (ValueError, OverflowError, RecursionError) as error:
            yield _one_line(error)


def read_arrow_rows(path: Path, name: str, suffix: str) -> Iterator[Row | Reject]:
    """The rows of a file; `line` counts the header as line 1. Raises: UserError if the file is damaged."""
    import pyarrow

    number = total = 0
    most = max(MAX_RECORD_BYTES, MAX_EXPANSION * path.stat().st_size)
    long = f"got a row above {MAX_RECORD_BYTES >> 20} MB, want a shorter one"
    try:
        for batch, size in (part for whole in _batches(path, name, suffix) for part in _small_enough(whole)):
            total += size
            if total > most:
                raise UserError(
                    f"{name}: its rows contain more than {MAX_EXPANSION:,} times what the file does: export them "
                    "as JSON Lines"
                )
            for value in _values(batch) if size <= MAX_RECORD_BYTES else [long]:
                number += 1
                line = number + 1
                yield Reject(name, line, "", value, number) if isinstance(value, str) else Row(line, value, number)
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError, NotImplementedError) as error:
        reason = _one_line(error)[:200]
        raise UserError(f"{name}: damaged {suffix} file ({reason}): copy or download it again") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
