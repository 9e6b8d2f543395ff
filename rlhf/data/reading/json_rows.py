"""JSON as rows: lines in blocks, which several processes can share, and arrays whose objects are parsed as they stream by.

Stricter than the json module: NaN, Infinity, repeated keys, lone surrogates and bytes that are no UTF-8 are rejects.
`readers.py` opens packed files.
"""

import codecs
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

from rlhf.data.reading import readers
from rlhf.data.reading.readers import Reject, Row
from rlhf.data.records import first_repeat, shown

MAX_DEPTH = 400  # levels of lists and objects: few enough that no code that handles a row runs out of stack
BLOCK_BYTES = 1 << 20  # bytes read at once; a block is this long, up to its last line, and its records fit a cache
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # an escape of half a character
_UNDECODABLE = re.compile("[\udc80-\udcff]")
_TOKEN = re.compile(r'\\[^\n]|\n[ \t]{0,99}\{|["{}\[\],]')
_CUT_TOKEN = re.compile(r"(?:\\|\n[ \t]{0,99})\Z")
_PARTNER = {"}": "{", "]": "["}
_TOO_DEEP = f"nested too deeply, more than {MAX_DEPTH} levels"
_LOOK_BACK = 32  # a mistake in this many characters before the end of the read text may only be incomplete text


class Parser:
    """The json module's decoder, stricter: NaN, Infinity, repeated keys and lone surrogates are problems."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object, parse_constant=self._constant)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            twice = shown(first_repeat(key for key, _ in pairs))[1:-1]
            self.problem = self.problem or f'key "{twice}" appears twice in one object: keep one'
        return value

    def _constant(self, name: str) -> float:
        self.problem = self.problem or f"got {name}, which JSON has not: want a number or null"
        return 0.0

    def parse(self, text: str, start: int = 0) -> tuple[Any, int, str | None]:
        """The value that begins at `start`, where it ends, and what is wrong with it."""
        self.problem = None
        try:
            value, end = self._decoder.raw_decode(text, start)
        except RecursionError as error:
            raise ValueError(_TOO_DEEP) from error
        if text.count("[", start, end) + text.count("{", start, end) > MAX_DEPTH and is_deep(value):
            raise ValueError(_TOO_DEEP)
        if not isinstance(value, dict):
            kind = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
            self.problem = self.problem or f"got {kind.get(type(value), 'a number')}, want an object {{…}}"
        elif self.problem is None and _SURROGATE.search(text, start, end):
            try:
                json.dumps(value, ensure_ascii=False).encode("utf-8")
            except UnicodeEncodeError:
                self.problem = "got a lone surrogate (half of a character), want text that UTF-8 can hold"
        return value, end, self.problem


def is_deep(value: Any, most: int = MAX_DEPTH) -> bool:
    """Whether lists and objects nest more than `most` levels."""
    level = [value]
    for _ in range(most + 1):
        inside = [one for one in level if isinstance(one, dict | list)]
        if not inside:
            return False
        level = [one for outer in inside for one in (outer.values() if isinstance(outer, dict) else outer)]
    return True


# --- lines ---------------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """Complete lines of a file, or one line that is longer than a record may be, which is not kept."""

    line: int  # number of its first line
    offset: int  # of its first byte
    data: bytes
    too_long: tuple[str, int] | None = None  # sha256 and length of the line that is not kept


def line_blocks(file: IO[bytes]) -> Iterator[Block]:
    """The lines of a file in blocks; their bounds depend on the file alone."""
    line, offset, rest = 1, 0, bytearray()
    while chunk := file.read(BLOCK_BYTES):
        cut = chunk.rfind(b"\n") + 1
        if cut == 0 and len(rest) + len(chunk) <= readers.MAX_RECORD_BYTES:
            rest += chunk
            continue
        if cut == 0:
            digest, length, chunk = _skip_line(file, bytes(rest) + chunk)
            yield Block(line, offset, b"", (digest, length))
            line, offset, rest = line + 1, offset + length, bytearray(chunk)
            continue
        data, rest = bytes(rest) + chunk[:cut], bytearray(chunk[cut:])
        yield Block(line, offset, data)
        line, offset = line + data.count(b"\n"), offset + len(data)
    if rest:
        yield Block(line, offset, bytes(rest))


def _skip_line(file: IO[bytes], begin: bytes) -> tuple[str, int, bytes]:
    """Skip a line; returns its sha256, its length with the line end, and the bytes read beyond it."""
    digest, length, piece = hashlib.sha256(), 0, begin
    while piece:
        end = piece.find(b"\n") + 1
        if end:
            digest.update(piece[: end - 1])
            return digest.hexdigest(), length + end, piece[end:]
        digest.update(piece)
        length += len(piece)
        piece = file.read(BLOCK_BYTES)
    return digest.hexdigest(), length, b""


def parse_block(block: Block, name: str, read: Callable[[bytes], Any] | None = None) -> Iterator[Row | Reject]:
    """The rows of a block; blank lines give none. A row's `number` is that of its line.

    `read` makes a line's record directly; where it gives None the line is parsed.
    """
    limit = readers.MAX_RECORD_BYTES
    long = f"got a line above {limit >> 20} MB, want a shorter one"
    if block.too_long is not None:
        yield Reject(name, block.line, "", long, block.line, block.offset, None, block.too_long)
        return
    parser = Parser()
    number, offset = block.line - 1, block.offset
    for raw in block.data.split(b"\n"):
        number, start, offset = number + 1, offset, offset + len(raw) + 1
        if len(raw) > limit:
            yield Reject(name, number, "", long, number, start, raw)
            continue
        if start == 0 and raw.startswith(codecs.BOM_UTF8):
            raw, start = raw[3:], 3
        record = None if read is None else read(raw)
        if record is not None:
            yield Row(number, {}, number, start, raw, record)
            continue
        problem: str | None
        try:
            text = raw.decode("utf-8").strip(" \t\r")
        except UnicodeDecodeError as error:
            at = start + error.start
            problem = f"byte 0x{raw[error.start]:02x} at offset {at} is not UTF-8: save the file as UTF-8"
            yield Reject(name, number, "", problem, number, start, raw)
            continue
        if not text:
            continue
        try:
            value, end, problem = parser.parse(text)
            if problem is None and end < len(text):
                problem = "got text after the object, want one object per line"
        except ValueError as error:
            value, problem = None, f"not JSON ({error}): want one object per line"
        if problem:
            yield Reject(name, number, "", problem, number, start, raw)
        else:
            yield Row(number, value, number, start, raw)


# --- arrays --------------------------------------------------------------------------------------------------------


class _Window:
    """The part of a file that is being parsed, as text; bytes that are not UTF-8 become lone surrogates."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self.text, self.at = "", 0  # the text read, and the parser's position
        self.line, self.offset = 1, 0  # of `at` in the file
        self.lead = ""  # the part of the current line before `at`
        self.ended = False

    def read_more(self, characters: int) -> None:
        parts, size = [self.text[self.at :]], 0
        while size < characters and not self.ended:
            chunk = self._file.read(readers._CHUNK)
            self.ended = not chunk
            parts.append(self._decode(chunk, self.ended))
            size += len(parts[-1])
        self.text, self.at = "".join(parts), 0
        if self.offset == 0 and self.text.startswith("\ufeff"):
            self.at, self.offset = 1, 3

    def take(self, end: int) -> bytes:
        """Move to `end`; returns the bytes passed."""
        passed = self.text[self.at : end]
        raw = passed.encode("utf-8", "surrogateescape")
        self.line += passed.count("\n")
        _, newline, after = passed.rpartition("\n")
        self.lead = (after if newline else self.lead + after)[:100]
        self.offset += len(raw)
        self.at = end
        return raw


class _ArrayReader:
    """The objects of a JSON array, or objects one after another."""

    def __init__(self, file: IO[bytes], name: str):
        self.window = _Window(file)
        self.name = name
        self.number = 0
        self.in_array = False
        self.had_array = False  # a comma may follow, even if a bracket too many has closed it
        self.parser = Parser()

    def rows(self) -> Iterator[Row | Reject]:
        window = self.window
        while self._to_next_value():
            character = window.text[window.at]
            if character == "[" and not self.in_array:
                self.in_array = self.had_array = True
                window.take(window.at + 1)
            elif character == "]" and self.in_array:
                self.in_array = False
                window.take(window.at + 1)
            else:
                self.number += 1
                yield self._value()
        if self.in_array:
            message = "the array does not end: the file was cut off, copy it again"
            yield Reject(self.name, window.line, "", message, self.number + 1, window.offset)

    def _to_next_value(self) -> bool:
        """Skip white space and commas; false at the end of the file."""
        window = self.window
        while True:
            at = window.at
            while at < len(window.text) and (window.text[at].isspace() or (self.had_array and window.text[at] == ",")):
                at += 1
            window.take(at)
            if at < len(window.text):
                return True
            if window.ended:
                return False
            window.read_more(readers._CHUNK)

    def _value(self) -> Row | Reject:
        window = self.window
        while True:
            begin = window.at
            try:
                value, end, problem = self.parser.parse(window.text, begin)
                if end < len(window.text) or window.ended or isinstance(value, dict | list | str):
                    break
            except ValueError as error:
                at = getattr(error, "pos", begin)
                near_end = at + _LOOK_BACK > len(window.text) or "Unterminated" in str(error)
                deep = "deeply" in str(error)
                held = len(window.text) - begin
                if window.ended or deep or not near_end or held > readers.MAX_RECORD_BYTES:
                    return self._bad_value(error, at)
            window.read_more(max(readers._CHUNK, len(window.text) - begin))
        line, offset = window.line, window.offset
        undecodable = _UNDECODABLE.search(window.text, begin, end)
        if undecodable:
            problem = self._not_utf8(begin, undecodable)
        raw = window.take(end)
        if len(raw) > readers.MAX_RECORD_BYTES:
            problem = f"got an object above {readers.MAX_RECORD_BYTES >> 20} MB, want a shorter one"
        if problem:
            return Reject(self.name, line, "", problem, self.number, offset, raw)
        return Row(line, value, self.number, offset, raw)

    def _not_utf8(self, begin: int, match: re.Match[str]) -> str:
        at = self.window.offset + len(self.window.text[begin : match.start()].encode("utf-8", "surrogateescape"))
        return f"byte 0x{ord(match[0]) - 0xDC00:02x} at offset {at} is not UTF-8: save the file as UTF-8"

    def _bad_value(self, error: ValueError, at: int) -> Reject:
        """A reject for invalid JSON; parsing continues after it, as well as its end can be found."""
        window = self.window
        line = window.line + window.text.count("\n", window.at, at)
        offset = window.offset
        undecodable = _UNDECODABLE.search(window.text, window.at, at + 1)
        message = f"not JSON ({getattr(error, 'msg', error)}): want an array of objects"
        if undecodable:
            message = self._not_utf8(window.at, undecodable)
        raw, digest = self._skip_value()
        return Reject(self.name, line, "", message, self.number, offset, raw, digest)

    def _skip_value(self) -> tuple[bytes | None, tuple[str, int] | None]:
        """Skip a broken value: in an array up to where its brackets close, else to the end of its line."""
        window = self.window
        digest, length, kept = hashlib.sha256(), 0, b""
        alone = not window.lead.strip(" \t[],")
        scan = _Brackets(window.lead[: len(window.lead) - len(window.lead.lstrip(" \t"))] if alone else None)
        at_end = False
        while not at_end:
            if self.in_array:
                end, at_end = scan.find_end(window.text, window.at)
            else:
                newline = window.text.find("\n", window.at)
                end, at_end = (newline, True) if newline >= 0 else (len(window.text), False)
            if at_end and end == window.at and length == 0:
                end += 1  # always make progress
            raw = window.take(end)
            digest.update(raw)
            length += len(raw)
            kept = kept + raw if length <= readers.KEPT_BYTES else b""
            if not at_end:
                if window.ended:
                    self.in_array = False  # the reject already reports it; that the array does not end follows from it
                    break
                window.read_more(readers._CHUNK)
        return (kept, None) if length <= readers.KEPT_BYTES else (None, (digest.hexdigest(), length))


class _Brackets:
    """Where a broken value of an array ends: where its brackets close, at the array's end, or where, on a line of its
    own, a value begins just as the broken one did (`lead` is the white space before that one; None: it had company).
    """

    def __init__(self, lead: str | None) -> None:
        self.lead = lead
        self.open: list[str] = []
        self.count = {"{": 0, "[": 0}  # of each in `open`
        self.in_string = False
        self.closed_own = False  # the last bracket that closed is the value's, not the array's

    def find_end(self, text: str, start: int) -> tuple[int, bool]:
        """(end, True), or (where to go on when more was read, False)."""
        last = start
        for match in _TOKEN.finditer(text, start):
            token, last = match[0], match.end()
            if token[0] == "\n":
                if token[1:-1] == self.lead:
                    return match.start() + 1, True
                if not self.in_string:
                    self._open("{")
            elif token == '"':
                self.in_string = not self.in_string
            elif self.in_string or len(token) > 1:
                continue
            elif token in "{[":
                self._open(token)
            elif token == ",":
                if not self.open:
                    return match.start(), True
            elif self._close(_PARTNER[token]):
                return match.start() if not self.closed_own else match.end(), True
        cut = _CUT_TOKEN.search(text, last)
        return (cut.start() if cut else len(text)), False

    def _open(self, token: str) -> None:
        self.open.append(token)
        self.count[token] += 1

    def _close(self, partner: str) -> bool:
        """Close the innermost bracket of this kind and those left open in it; true if the value ends."""
        self.closed_own = self.count[partner] > 0
        if not self.closed_own:
            return partner == "["  # the array's own end; a brace too many belongs to the value
        while self._pop() != partner:
            pass
        return not self.open

    def _pop(self) -> str:
        token = self.open.pop()
        self.count[token] -= 1
        return token


def read_json_lines(file: IO[bytes], name: str) -> Iterator[Row | Reject]:
    """The objects of a file with one per line."""
    for block in line_blocks(file):
        yield from parse_block(block, name)


def read_json_values(file: IO[bytes], name: str) -> Iterator[Row | Reject]:
    """The objects of a JSON array, or objects one after another, parsed as the file streams by."""
    return _ArrayReader(file, name).rows()
