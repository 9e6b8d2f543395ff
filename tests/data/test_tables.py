import csv
import gzip
import hashlib
import io
import re
import time
from datetime import datetime
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data.reading import arrow_rows, spreadsheets, tables
from rlhf.data.reading.readers import Reject, Row
from rlhf.data.reading.tables import describe_table, read_table
from rlhf.errors import UserError
from tests.data.sheets import ods_cell, row, text, write_ods, write_xlsx


def read(path, **options):
    return list(read_table(path, path.name, **options))


@pytest.fixture
def table(tmp_path):
    def write(content, name="t.csv"):
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


def values(rows):
    return [one.value for one in rows]


# --- CSV -------------------------------------------------------------------------------------------------------------


def test_rows_know_their_line_number_offset_and_bytes(table):
    rows = read(table(b'q,a\n1,"x\ny"\n\n2,\n'))
    assert rows == [
        Row(2, {"q": "1", "a": "x\ny"}, 1, 4, b'1,"x\ny"\n'),  # "q,a\n" is 4 bytes
        Row(5, {"q": "2", "a": None}, 2, 13, b"2,\n"),  # 4 + 8 and an empty line; the quoted newline counts as a line
    ]


def test_ragged_rows_are_rejects_at_their_line(table):
    short, long, good = read(table(b'q,a\n"1\n2"\n3,4,5\n6,7\n'))
    assert (short.line, short.number, short.message) == (
        2,
        1,
        "got 1 cells, want 2 as in the header: quote cells that contain the delimiter",
    )
    assert (long.line, long.number, long.raw) == (4, 2, b"3,4,5\n")
    assert good.line == 5 and good.value == {"q": "6", "a": "7"}


@pytest.mark.parametrize(
    ("head", "said"), [(b"q,a", "a comma"), (b"q;a", "a semicolon"), (b"q\ta", "a tab"), (b"q;a,b", "a comma")]
)
def test_the_delimiter_that_gives_most_columns_is_taken_and_told(table, head, said):
    path = table(head + b"\n")
    assert describe_table(path, "t") == f"columns divided by {said}"


def test_tsv_and_excels_hint(table):
    assert values(read(table(b"q\ta\n1,5\t2\n", "t.tsv"))) == [{"q": "1,5", "a": "2"}]
    assert values(read(table(b"sep=;\r\nq;a\r\n1;2\r\n"))) == [{"q": "1", "a": "2"}]


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        ("q,a\n1,ä\n".encode("utf-8-sig"), "utf-8"),
        ("q,a\n1,ä\n".encode("cp1252"), "cp1252"),
        ("q,a\n1,ä\n".encode("utf-16"), "utf-16"),
        ("q,a\r1,ä\r".encode(), "utf-8"),
    ],
)
def test_encodings(table, content, encoding):
    assert values(read(table(content), encoding=encoding)) == [{"q": "1", "a": "ä"}]


def test_packed(table):
    assert values(read(table(gzip.compress(b"q\n1\n"), "t.csv.gz"))) == [{"q": "1"}]
    assert values(read(table(zstandard.compress(b"q\n1\n"), "t.tsv.zst"))) == [{"q": "1"}]
    with pytest.raises(UserError, match=r"damaged \.gz"):
        read(table(gzip.compress(b"q\n1\n" * 999)[:-9], "t.csv.gz"))


def test_a_byte_that_is_not_in_the_encoding_spoils_its_row_only(table):
    bad, nul, good = read(table(b"q,a\n\xe4,2\n3,\0\n5,6\n"))
    assert bad.line == 2 and bad.raw == b"\xe4,2\n" and bad.message.startswith("byte 0xe4 is not utf-8 text: set")
    assert nul.message == "got a NUL byte, want text: remove it"
    assert good.value == {"q": "5", "a": "6"}


def test_a_quote_that_never_closes_spoils_its_row_only(table):
    bad, *good = read(table(b'q,a\n1,"open\n3,4\n5,6\n'))
    assert bad.line == 2 and bad.raw == b'1,"open\n' and "never closes" in bad.message
    assert [(one.line, one.offset, one.value["a"]) for one in good] == [(3, 12, "4"), (4, 16, "6")]


def test_text_after_a_closing_quote(table):
    bad, good = read(table(b'q,a\n1,"x"y\n3,4\n'))
    assert bad.message.startswith("not CSV (',' expected after '\"')") and good.line == 3


def test_a_header_of_very_many_columns_is_read_at_once(table):
    """With a step that grows with the square of the columns it takes minutes."""
    started = time.process_time()
    assert read(table(",".join(f"c{i}" for i in range(100_000)).encode())) == []
    assert time.process_time() - started < 5


def test_a_record_above_the_limit_is_a_reject_and_reading_goes_on(table, monkeypatch):
    monkeypatch.setattr(tables, "MAX_RECORD_BYTES", 1 << 20)
    long = b'1,"' + b"x" * (3 << 20) + b'"\n'
    bad, good = read(table(b"q,a\n" + long + b"3,4\n"))
    assert isinstance(bad, Reject) and "above 1 MB" in bad.message
    assert bad.offset == 4 and bad.digest == (hashlib.sha256(long).hexdigest(), len(long)) and bad.raw is None
    assert good.value == {"q": "3", "a": "4"} and good.line == 3 and good.offset == 4 + (3 << 20) + 5


def test_a_large_cell_is_read(table):
    [one] = read(table(b'q,a\n1,"' + b"x" * (3 << 20) + b'"\n'))
    assert len(one.value["a"]) == 3 << 20


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"q,q\n", 't.csv:1: the header names "q" twice: rename one of these columns'),
        (b",q,\n", "t.csv:1: columns 1, 3 have no name in the header: want a name for each column"),
        (b"\xffq,a\n", "t.csv:1: byte 0xff is not utf-8 text: set encoding=utf-16, cp1252, … or mend the file"),
        (
            "q,a\n".encode("utf-16-le"),
            "t.csv:1: the header contains NUL bytes: if the file is UTF-16, set encoding=utf-16",
        ),
        (b'"q,a\n', "t.csv:1: header: a quote opens a cell and never closes"),
    ],
)
def test_bad_headers(table, content, said):
    with pytest.raises(UserError, match=re.escape(said)):
        read(table(content))


@pytest.mark.parametrize("encoding", ["klingon", "base64"])
def test_encodings_that_are_none(table, encoding):
    with pytest.raises(UserError, match=f"encoding={encoding}: no such text encoding"):
        read(table(b"q\n"), encoding=encoding)


CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)


@given(st.lists(st.lists(CELLS, min_size=2, max_size=2), max_size=8), st.sampled_from(",;\t"))
def test_what_the_csv_module_writes_comes_back(tmp_path_factory, rows, delimiter):
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    text_of_file = io.StringIO(newline="")
    csv.writer(text_of_file, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows([["q", "a"], *rows])
    path.write_bytes(text_of_file.getvalue().encode())
    back = read(path)
    assert [[one.value["q"] or "", one.value["a"] or ""] for one in back] == rows
    assert all(path.read_bytes()[one.offset :].startswith(one.raw) for one in back)
    assert b"".join(one.raw for one in back) == path.read_bytes()[len(b'"q","a"\r\n') :]


@given(st.binary(max_size=200))
def test_any_bytes_are_rows_rejects_or_one_line_of_error(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    path.write_bytes(b"q,a\n" + content)
    back = read(path)
    assert sum(len(one.raw) for one in back) <= len(content)
    whole, rest = b"q,a\n" + content, content
    assert all(whole[one.offset : one.offset + len(one.raw)] == one.raw for one in back)
    for one in back:  # what lies between the rows is empty lines
        before, found, rest = rest.partition(one.raw)
        assert found and not before.strip(b"\r\n")
    assert not rest.strip(b"\r\n")


# --- spreadsheets ----------------------------------------------------------------------------------------------------


def test_cells_of_a_spreadsheet(tmp_path):
    rows = (
        row(3, text("B3", "q"), text("C3", "a"))
        + row(4, '<c r="B4"><v>3</v></c>', '<c r="C4"><f>1+1</f><v>2.5</v></c>')
        + row(6, '<c r="B6" t="b"><v>1</v></c>', '<c r="C6" s="1"><v>45000.5</v></c>')
        + row(7, '<c r="B7" t="e"><v>#N/A</v></c>', '<c r="C7" t="str"><f>A1</f><v>saved</v></c>')
        + row(9, '<c r="B9" s="1"/>')
    )
    found = read(write_xlsx(tmp_path / "t.xlsx", {"S": rows}))
    assert [(one.line, one.number, *one.value.values()) for one in found] == [
        (4, 1, 3, 2.5),
        (5, 2, None, None),  # between rows with values
        (6, 3, True, "2023-03-15T12:00:00"),  # day 45000 of Excel's calendar is 2023-03-15
        (7, 4, None, "saved"),
        (9, 6, None, None),  # stored, since it has a cell; row 8 is not in the file
    ]
    assert type(found[0].value["q"]) is int


def test_a_merged_cell_stands_in_every_row(tmp_path):
    rows = row(1, text("A1", "q"), text("B1", "a")) + row(2, text("A2", "x"), text("B2", "1"))
    rows += row(3, text("B3", "2")) + row(4, text("B4", "3"))
    found = read(write_xlsx(tmp_path / "t.xlsx", {"S": rows}, merged="A2:A3"))
    assert [tuple(one.value.values()) for one in found] == [("x", "1"), ("x", "2"), (None, "3")]


def test_sheets_by_name(tmp_path):
    path = write_xlsx(
        tmp_path / "t.xlsx", {"One": row(1, text("A1", "q")), "Two": row(1, text("A1", "z")) + row(2, text("A2", "x"))}
    )
    assert read(path) == [] and values(read(path, sheet="Two")) == [{"z": "x"}]
    assert describe_table(path, "t", sheet="Two") == 'sheet "Two" of 2'
    with pytest.raises(UserError, match=r"sheet=Three: t\.xlsx has no such sheet: it has One, Two"):
        read(path, sheet="Three")


def test_header_of_a_spreadsheet(tmp_path):
    with pytest.raises(UserError, match='sheet "S":1: column 2 has no name'):
        read(write_xlsx(tmp_path / "t.xlsx", {"S": row(1, text("A1", "q")) + row(2, text("B2", "x"))}))


def test_ods(tmp_path):
    empty = '<table:table-cell table:number-columns-repeated="16384"/>'
    rows = (
        f"<table:table-row>{ods_cell('q')}{ods_cell('a')}</table:table-row>"
        f'<table:table-row>{ods_cell("x")}<table:table-cell office:value-type="float" office:value="3"/></table:table-row>'
        f'<table:table-row table:number-rows-repeated="1048570">{empty}</table:table-row>'
    )
    assert values(read(write_ods(tmp_path / "t.ods", rows))) == [{"q": "x", "a": 3}]


def test_two_cells_far_apart_are_refused(tmp_path):
    far = row(1, text("A1", "q")) + row(1048576, text("XFD1048576", "x"))
    with pytest.raises(UserError, match="values span 1048576 rows x 16384 columns, above 20000000 cells"):
        read(write_xlsx(tmp_path / "t.xlsx", {"S": far}))
    wide = ods_cell("x", ' table:number-columns-repeated="16384"')
    with pytest.raises(UserError, match="values span 1048570 rows x 16384 columns"):
        read(
            write_ods(
                tmp_path / "t.ods", f'<table:table-row table:number-rows-repeated="1048570">{wide}</table:table-row>'
            )
        )


def test_a_bomb_is_refused_before_it_unpacks(tmp_path, monkeypatch):
    monkeypatch.setattr(spreadsheets, "MAX_UNPACKED_BYTES", 1 << 20)
    path = write_xlsx(tmp_path / "t.xlsx", {"S": row(1, text("A1", "q" * (2 << 20)))})
    assert path.stat().st_size < 10_000
    with pytest.raises(UserError, match=r"t\.xlsx: unpacks to more than 1 MB"):
        read(path)


@pytest.mark.parametrize("suffix", ["xlsx", "ods", "xls", "parquet", "arrow"])
@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x03\x04junk", b"PAR1" * 9])
def test_damaged_files(table, suffix, content):
    with pytest.raises(UserError, match=rf"^t\.{suffix}: damaged \.{suffix} file \("):
        read(table(content, f"t.{suffix}"))


def test_a_protected_workbook(table):
    with pytest.raises(UserError, match="protected by a password"):
        read(table(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 600, "t.xlsx"))


# --- Parquet and Arrow -----------------------------------------------------------------------------------------------

NESTED = pa.table(
    {
        "q": ["x", None],
        "n": [1, 2],
        "f": [float("nan"), 1.5],
        "l": [[{"k": "v"}], []],
        "d": [datetime(2026, 5, 1, 10), None],
        "m": pa.array([Decimal("2.50"), Decimal("3.00")]),
    }
)


def write_arrow(path, table, kind):
    if kind == "parquet":
        pa.parquet.write_table(table, path)
        return path
    with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


@pytest.mark.parametrize("kind", ["parquet", "stream", "file"])
def test_nested_columns(tmp_path, kind):
    found = read(write_arrow(tmp_path / ("t.parquet" if kind == "parquet" else "t.arrow"), NESTED, kind))
    assert [(one.line, one.number, one.value) for one in found] == [
        (2, 1, {"q": "x", "n": 1, "f": None, "l": [{"k": "v"}], "d": "2026-05-01T10:00:00", "m": 2.5}),
        (3, 2, {"q": None, "n": 2, "f": 1.5, "l": [], "d": None, "m": 3}),
    ]


def test_a_value_that_json_cannot_hold_spoils_its_row_only(tmp_path):
    table = pa.table({"b": [b"\xff", b"x"], "f": [1.0, 2.0]})
    bad, good = read(write_arrow(tmp_path / "t.parquet", table, "parquet"))
    assert bad.line == 2 and "no UTF-8" in bad.message and good.value == {"b": "x", "f": 2.0}


def test_an_arrow_file_whose_offsets_lead_outside_is_refused(tmp_path):
    path = write_arrow(tmp_path / "t.arrow", pa.table({"q": ["x" * 40, "y" * 40]}), "stream")
    offsets = (0).to_bytes(4, "little") + (40).to_bytes(4, "little") + (80).to_bytes(4, "little")
    content = path.read_bytes()
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, offsets[:8] + (1 << 30).to_bytes(4, "little")))
    with pytest.raises(UserError, match=r"damaged \.arrow file"):
        read(path)


def test_columns_of_one_name(tmp_path):
    path = write_arrow(tmp_path / "t.arrow", pa.table([[1], [2]], names=["q", "q"]), "stream")
    with pytest.raises(UserError, match='the header names "q" twice'):
        read(path)


# --- small files that hold much ---------------------------------------------------------------------------------------


def shared_texts(count: int, size: int):
    """A column of `count` cells that share one text."""
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array(["x" * size]))


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("nested", [False, True])
def test_rows_that_share_a_long_text_are_made_a_few_at_a_time(tmp_path, monkeypatch, suffix, nested):
    import pyarrow as pa
    from pyarrow import ipc, parquet

    column = shared_texts(2000, 100_000)
    if nested:
        column = pa.ListArray.from_arrays(pa.array(range(2001), pa.int32()), column)
    table = pa.table({"a": column, "b": pa.array(range(2000))})
    path = tmp_path / f"bomb{suffix}"
    if suffix == ".parquet":
        parquet.write_table(table, path, compression="zstd")
    else:
        with ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    monkeypatch.setattr(arrow_rows, "MAX_RECORD_BYTES", 1_000_000)
    monkeypatch.setattr(arrow_rows, "MAX_EXPANSION", 10**9)
    sizes = []
    turn = arrow_rows._values
    monkeypatch.setattr(arrow_rows, "_values", lambda batch: (sizes.append(batch.num_rows), turn(batch))[1])
    values = [row.value for row in read_table(path, path.name)]
    assert [value["b"] for value in values] == list(range(2000)) and max(sizes) <= 10
    assert values[1999]["a"] == (["x" * 100_000] if nested else "x" * 100_000)
    monkeypatch.setattr(arrow_rows, "MAX_EXPANSION", 1)
    with pytest.raises(UserError, match=r"bomb.* its rows contain more than 1 times what the file does"):
        list(read_table(path, path.name))
    monkeypatch.setattr(arrow_rows, "MAX_RECORD_BYTES", 1000)
    monkeypatch.setattr(arrow_rows, "MAX_EXPANSION", 10**9)
    assert {str(row) for row in list(read_table(path, "x"))[:1]} == {"x:2: got a row above 0 MB, want a shorter one"}


def test_cells_that_share_a_long_text_are_counted_before_the_sheet_is_opened(tmp_path, monkeypatch):
    shared = [f"<si><t>{one}</t></si>" for one in ("question", "answer", "x" * 5000)]
    rows = [row(1, '<c r="A1" t="s"><v>0</v></c>', '<c r="B1" t="s"><v>1</v></c>')]
    rows += [row(n, f'<c r="A{n}" t="s"><v>2</v></c>', f'<c r="B{n}" t="s"><v>2</v></c>') for n in range(2, 62)]
    path = write_xlsx(tmp_path / "bomb.xlsx", {"S": "".join(rows)}, shared="".join(shared))
    assert values(read(path)) == [{"question": "x" * 5000, "answer": "x" * 5000}] * 60
    monkeypatch.setattr(spreadsheets, "MAX_CHARACTERS", 600_013)
    with pytest.raises(
        UserError, match=r'sheet "S": its cells contain 1 million characters, above 1 million: export it'
    ):
        read(path)
    monkeypatch.setattr(spreadsheets, "MAX_CHARACTERS", 600_014)
    assert len(read(path)) == 60


def test_a_text_that_an_ods_file_repeats_counts_as_often_as_it_does(tmp_path, monkeypatch):
    again = ' table:number-columns-repeated="3"'
    head = "".join(f"<table:table-row>{''.join(map(ods_cell, 'abc'))}</table:table-row>")
    path = write_ods(
        tmp_path / "t.ods",
        f'{head}<table:table-row table:number-rows-repeated="5">{ods_cell("y" * 100, again)}</table:table-row>',
    )
    monkeypatch.setattr(spreadsheets, "MAX_CHARACTERS", 1503)
    assert len(read(path)) == 5
    monkeypatch.setattr(spreadsheets, "MAX_CHARACTERS", 1502)
    with pytest.raises(UserError, match=r"t.ods: its cells contain 0 million characters"):
        read(path)
