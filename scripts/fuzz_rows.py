"""Rows of every format that `rlhf import` reads, and ways to damage them, for fuzz_import.py."""

import json
import random
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.data.importers.samples import SAMPLES

# --- good rows -------------------------------------------------------------------------------------------------------

# What is asked in the tests' samples: a row's marker follows it.
ASKED = re.compile(r"\b(Hi|Name a colour|Who|My cat|Rain fell|Why|Add|1 \+ 1|Say a|It is)\b")


def _label_studio(m: str) -> dict[str, Any]:
    result = {"value": {"selected": "left"}, "from_name": "better", "to_name": "left", "type": "pairwise"}
    about: dict[str, Any] = {"a": {"policy": "p"}, "b": {"policy": "p"}}
    data: dict[str, Any] = {
        "item": m,
        "prompt": f"Say {m}.",
        "left": "L.",
        "right": "R.",
        "left_id": "a",
        "right_id": "b",
    }
    data |= {"dialogue": [{"role": "user", "content": f"Say {m}."}], "about": about, "metadata": {}}
    return {"id": 1, "data": data, "annotations": [{"id": 1, "completed_by": 1, "result": [result], "lead_time": 2.5}]}


def _native(m: str) -> dict[str, Any]:
    responses = [{"id": name, "text": f"Text {name}.", "policy": "p"} for name in "abc"]
    row: dict[str, Any] = {"kind": "ranking", "id": m, "prompt": [{"role": "user", "content": f"Say {m}."}]}
    row |= {"ranking": [["b"], ["a", "c"]], "responses": responses, "ratings": {"a": 3}, "flags": {"c": ["harmful"]}}
    row |= {"labeler": "ann", "seconds": 3.5}
    return row | {"created": "2026-05-01T10:00:00Z", "metadata": {"user": m, "group": m}}


def _sample(row: dict[str, Any], marker: str) -> dict[str, Any]:
    return json.loads(ASKED.sub(rf"\1 {marker}", json.dumps(row)))


GOOD: dict[str, Callable[[str], dict[str, Any]]] = {
    "native": _native,
    "native demonstration": lambda m: {"kind": "demonstration", "prompt": f"Say {m}.", "response": "Yes."},
    "native prompt": lambda m: {"kind": "prompt", "prompt": f"Say {m}.", "user": "u"},
    "hh": lambda m: {"chosen": f"\n\nHuman: {m}\n\nAssistant: Yes", "rejected": f"\n\nHuman: {m}\n\nAssistant: No"},
    "hh scores": lambda m: {"text": [f"\n\nHuman: {m}\n\nAssistant: {a}" for a in ("Yes", "No")], "score": [1.0, 0.0]},
    "trl": lambda m: {"prompt": f"Say {m}.", "chosen": "Yes.", "rejected": "No."},
    "label_studio": _label_studio,
}  # fmt: skip
for _name, _row, _ in SAMPLES:
    if _name not in ("native", "hh"):
        GOOD[f"{_name} {len(GOOD)}" if _name in GOOD else _name] = partial(_sample, _row)
FLAT = ("trl", "pairs", "alpaca", "kto", "question_answer")  # their rows are as good in CSV


# --- damage ----------------------------------------------------------------------------------------------------------


def _somewhere(value: Any, random_: random.Random) -> tuple[Any, Any]:
    """A random container in a row, at any depth, and one of its keys."""
    key = random_.choice(list(value) if isinstance(value, dict) else range(len(value)))
    inner = value[key]
    if isinstance(inner, dict | list) and inner and random_.random() < 0.7:
        return _somewhere(inner, random_)
    return value, key


def swapped(row: dict[str, Any], random_: random.Random) -> Any:
    """The row with one value of another type."""
    row = json.loads(json.dumps(row))
    where, key = _somewhere(row, random_)
    odd = ["", " ", "a", "left", 0, -1, 7, 1.5, 1e308, True, False, None, [], {}, [[]], [None], {"": ""}, "\0", "\x1b[31m",
           "\u2028", "\ufeff", "NaN", [where[key]], {"a": where[key]}, str(where[key]), 10**400, "0" * 50, ["x"] * 60,
           "2026-13-45", "\U0001f600" * 3, "a\u0300\u0315" * 20, json.loads(json.dumps(row))]  # fmt: skip
    where[key] = random_.choice(odd)
    if isinstance(where, dict) and random_.random() < 0.2:
        del where[key]
    return row


def _with_token(row: dict[str, Any], random_: random.Random, token: str) -> bytes:
    """The row as JSON with one value replaced by text that json.dumps would not write."""
    row = json.loads(json.dumps(row))
    where, key = _somewhere(row, random_)
    where[key] = "@@@"
    return json.dumps(row).replace('"@@@"', token, 1).encode("utf-8", "surrogatepass")


def byte_flip(raw: bytes, row: Any, random_: random.Random) -> bytes:
    data = bytearray(raw)
    for _ in range(random_.choice((1, 1, 2, 8))):
        data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
    return bytes(data)


def cut(raw: bytes, row: Any, random_: random.Random) -> bytes:
    begin, end = sorted(random_.choices(range(len(raw) + 1), k=2))
    return random_.choice((raw[:end], raw[begin:], raw[:begin] + raw[end:], raw + raw[begin:end]))


def _insert(raw: bytes, random_: random.Random, what: bytes) -> bytes:
    at = random_.randrange(len(raw) + 1)
    return raw[:at] + what + raw[at:]


def control(raw: bytes, row: Any, random_: random.Random) -> bytes:
    return _insert(raw, random_, bytes([random_.choice([*range(1, 10), *range(11, 32), 127])]))


def _nested(raw: bytes, row: Any, random_: random.Random) -> bytes:
    depth = random_.choice((90, 150, 190, 200, 210, 300, 450, 600, 900, 940, 980, 1000, 3000, 10_000))
    opening, closing = random_.choice((("[", "]"), ('{"a":', "}"), ('[{"b":', "}]")))
    inner = "1" if random_.random() < 0.7 else ""
    return _with_token(
        row, random_, opening * depth + inner + closing * (depth if random_.random() < 0.9 else depth // 2)
    )


def _number(raw: bytes, row: Any, random_: random.Random) -> bytes:
    numbers = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 300, "9" * 5000, "-0", "1e-999", "0x10", "01")
    return _with_token(row, random_, random_.choice(numbers))


def _surrogate(raw: bytes, row: Any, random_: random.Random) -> bytes:
    kinds = ('"\\ud800"', '"a\\udfffb"', '"\\udc00\\ud800"', '"\ud800"', '{"\\ud800": 1}', '"\\ud83d\\ude00"')
    return _with_token(row, random_, random_.choice(kinds))


def _twice(raw: bytes, row: Any, random_: random.Random) -> bytes:
    key = json.dumps(random_.choice(list(row))).encode()
    return raw[:-1] + b", " + key + b": 1}"


def _long(raw: bytes, row: Any, random_: random.Random) -> bytes:
    if random_.random() > 0.1:  # a few of them are enough
        return _number(raw, row, random_)
    unit = random_.choice(("a", "a@", "1 ", "\\u0315\\u0300", "\\n", '\\"', "é", "a.", "a@a.", "(", " ", "mk"))
    text = unit * (random_.choice((200_000, 1_100_000)) // len(unit)) + random_.choice(("", "@", "1", "x"))
    if random_.random() < 0.5:
        return _with_token(row, random_, f'"{text}"')
    return re.sub(rb"mk\w+z", lambda _: text.encode(), raw, count=1)  # in the prompt, or next to it


def _crowd(raw: bytes, row: Any, random_: random.Random) -> bytes:
    """Tens of thousands of keys, responses or judgements."""
    if random_.random() > 0.05:
        return _twice(raw, row, random_)
    many = range(random_.choice((1000, 40_000)))
    responses = json.dumps([{"id": str(i), "text": "t"} for i in many])
    chain = json.dumps([[str(i), str(i + 1)] for i in many[:-1]])
    repeated_key = "{" + ",".join(f'"k{i}": 1' for i in (*many, many[-1])) + "}"
    ones, ratings = "[" + "1," * len(many) + "1]", json.dumps({str(i): 5 for i in many})
    token = random_.choice((repeated_key, responses, chain, ones, ratings))
    if random_.random() < 0.5:
        return _with_token(row, random_, token)
    judgement = random_.choice((f'"pairs": {chain}', f'"ranking": [{json.dumps(list(map(str, many)))}]'))
    return f'{{"kind": "ranking", "prompt": "p", "responses": {responses}, {judgement}}}'.encode()


def _encoded(raw: bytes, row: Any, random_: random.Random) -> bytes:
    text = json.dumps(row | {"note": "café"}, ensure_ascii=False)
    return text.encode(
        random_.choice(("latin-1", "utf-16", "utf-16-le", "utf-32", "cp1252", "utf-8-sig", "utf-7")), "replace"
    )


DAMAGES: dict[str, Callable[[bytes, dict[str, Any], random.Random], bytes]] = {
    "byte flips": byte_flip,
    "cuts": cut,
    "NUL": lambda raw, row, random_: _insert(raw, random_, b"\0" * random_.choice((1, 5))),
    "control characters": control,
    "lone surrogates": _surrogate,
    "numbers": _number,
    "duplicate keys": _twice,
    "deep nesting": _nested,
    "swapped types": lambda raw, row, random_: json.dumps(swapped(row, random_), default=str).encode(),
    "encodings": _encoded,
    "BOM": lambda raw, row, random_: random_.choice((b"\xef\xbb\xbf" + raw, _insert(raw, random_, b"\xef\xbb\xbf"))),
    "line ends": lambda raw, row, random_: random_.choice((raw + b"\r", raw.replace(b" ", b"\r\n", 1), raw + b"\n\n\r\n")),
    "text around": lambda raw, row, random_: random_.choice((raw + raw, raw + b",", b"[" + raw, b"// x", b"null", b"{}")),
    "megabytes": _long,
    "crowds": _crowd,
}  # fmt: skip
