"""The rows of a source, whatever it is: a file of JSON, a table, or a data set of the hub."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlhf.data.reading.readers import Meter, Reject, Row, open_bytes
from rlhf.data.reading.sources import ROW_SUFFIXES, Source, has_suffix
from rlhf.errors import UserError
from rlhf.system.terminal import say

HUB_SECONDS = 5  # seconds to wait for the hub's first answer


@dataclass(frozen=True, slots=True)
class TableOptions:
    """Options for reading a table."""

    encoding: str = "utf-8"  # of CSV and TSV
    sheet: str | None = None  # of a spreadsheet; none: the first one


def read_rows(
    source: Source, options: TableOptions | None = None, meter: Meter | None = None
) -> Iterator[Row | Reject]:
    """The rows of a file or a hub data set; anything else is a Reject.

    Raises: UserError if the source as a whole cannot be read.
    """
    options = options or TableOptions()
    if source.path is None:
        yield from _read_hub(source.name)
    elif has_suffix(source.path, ROW_SUFFIXES):
        from rlhf.data.reading.json_rows import read_json_lines, read_json_values

        read = read_json_lines if has_suffix(source.path, (".jsonl",)) else read_json_values
        with open_bytes(source.path, meter) as file:
            yield from read(file, source.name)
    else:
        from rlhf.data.reading.tables import read_table

        yield from read_table(source.path, source.name, encoding=options.encoding, sheet=options.sheet)


def _read_hub(name: str) -> Iterator[Row]:
    say(f"rlhf: {name}: no such file or folder: taken for a hub id (owner/name)", sys.stderr)
    try:
        splits = _load_hub(name)
        split = "train" if "train" in splits else next(iter(splits))
        rows = splits[split]
    except Exception as error:  # the hub's client raises many kinds of errors: no network, no such name, gated, scripts
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{name}: no such file or folder; taken for a hub id, but the hub gave no data set of that name ({reason}): "
            "check the path or the name and the network, or download it and give the file"
        ) from error
    for number, row in enumerate(rows, start=1):
        yield Row(number, dict(row), number)


def _load_hub(name: str) -> Any:
    """The splits of a data set of the hub; without a network from the cache, at once (the library would retry for 25 s)."""
    import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    offline = datasets.config.HF_HUB_OFFLINE
    try:
        HfApi().dataset_info(name, timeout=HUB_SECONDS)
    except HfHubHTTPError:
        pass  # the hub answered: the following calls report the problem
    except Exception:  # no answer; the kind of error depends on the client's library
        datasets.config.HF_HUB_OFFLINE = True  # read at each call
    try:
        return datasets.load_dataset(name)
    finally:
        datasets.config.HF_HUB_OFFLINE = offline
