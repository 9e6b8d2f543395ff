"""Files of rows read: what is chosen and refused, counted and hashed. What each format does is in `importers/`."""

import pytest

from rlhf.data.reading import load_all
from rlhf.errors import UserError

ALPACA = {"instruction": "Name a colour.", "input": "", "output": "Blue."}
HH = {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello", "rejected": "\n\nHuman: Hi\n\nAssistant: Go away"}
NATIVE = {"kind": "demonstration", "id": "d-1", "prompt": "Hi", "response": "Hello"}


def test_the_wrong_format_is_refused_with_what_it_looks_like(write_jsonl):
    with pytest.raises(UserError, match=r"not of data.format=hh, .* looks like alpaca .*: set data.format=alpaca"):
        load_all(write_jsonl([ALPACA]), "hh")
    with pytest.raises(UserError, match=r"data.format=nope: no such format: want auto, alpaca, .*hh, .*native"):
        load_all(write_jsonl([ALPACA]), "nope")


def test_bad_rows_are_counted_and_the_first_five_shown(write_jsonl):
    rows = [
        NATIVE,
        *({"kind": "ranking", "prompt": "x"} for _ in range(3)),
        NATIVE | {"response": 3},
        {"kind": "rank", "prompt": "x"},
        NATIVE | {"prompt": ""},
        NATIVE,
    ]
    path = write_jsonl(rows)
    with pytest.raises(UserError) as caught:
        load_all(path)
    assert str(caught.value) == (
        f"6 of 8 rows cannot be used: correct or remove them: {path}:2: responses: missing; "
        f"{path}:3: responses: missing; "
        f"{path}:4: responses: missing; {path}:5: response: got 3, want a valid string; "
        f"{path}:6: kind: got 'rank', want demonstration, ranking, prompt; …"
    )
