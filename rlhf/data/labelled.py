"""Labelled examples from a file of any kind, and the four input transformations that make token rows of them.

    classification     [start] text [extract]
    entailment         [start] text [delimiter] second [extract]
    similarity         the same, and a second row with the two texts in the other order
    multiple choice    a row per choice: [start] text [delimiter] choice [extract]

Source: Radford et al. 2018, section 3.3 and figure 1.
"""

from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from rlhf.config.compose import nearest
from rlhf.config.stages import ClassifyConfig
from rlhf.data.formats.table import MISSING, lookup
from rlhf.data.inputs import RECORD_SUFFIXES, resolve_sources
from rlhf.data.rows import Row, read_rows
from rlhf.data.splits import split_of
from rlhf.data.tokenizer import END, ROLES, encode_texts, separator_id
from rlhf.errors import UserError
from rlhf.system.schemas import shown

MADE = ("<|delimiter|>", "<|extract|>")  # tokens that are added to a vocabulary without our role tokens


@dataclass(frozen=True, slots=True)
class Example:
    """One example: the parts of each of its input rows, which the delimiter separates, and its label."""

    where: str  # file:line
    rows: tuple[tuple[str, ...], ...]
    label: str

    @property
    def split_key(self) -> str:
        """A key that is equal for the same texts in any order, and different from that of a prompt with this text."""
        return "\n".join(["labelled", *sorted({part for row in self.rows for part in row})])


def load_examples(setting: str, sources: Any, columns: ClassifyConfig, encoding: str) -> list[Example]:
    """Every row of the sources as an example. Raises: UserError for a row without one of the columns, or with an empty one."""
    examples: list[Example] = []
    for source in resolve_sources(sources, RECORD_SUFFIXES):
        source.encoding = encoding
        examples += [_example(row, columns) for row in read_rows(source)]
    if not examples:
        raise UserError(f"{setting}: no row to read: want labelled examples")
    return _placed(examples, columns) if columns.choices else examples


def _example(row: Row, columns: ClassifyConfig) -> Example:
    if row.problem:
        raise UserError(f"{row}: repair or remove this row")
    where = f"{row.file}:{row.line}"

    def cell(setting: str, path: str) -> Any:
        value = lookup(row.value, path)
        if value is MISSING:
            raise UserError(f"{where}: classify.{setting}={path}: no such column{nearest(path, list(row.value))}")
        return value

    named = {"label": columns.label, "text": columns.text, "second": columns.second}
    label, *first = (_text(f"{where}: {path}", cell(name, path)) for name, path in named.items() if path is not None)
    if columns.choices:
        cells = [cell("choices", path) for path in columns.choices]
        listed = cells[0] if len(cells) == 1 and isinstance(cells[0], list) else cells
        choices = [_text(f"{where}: choice {i}", value) for i, value in enumerate(listed, 1)]
        return Example(where, tuple(("\n".join(first), choice) for choice in choices), label)
    texts = tuple(first)
    return Example(where, (texts, texts[::-1]) if columns.both_orders else (texts,), label)


def _placed(examples: list[Example], columns: ClassifyConfig) -> list[Example]:
    """Labels that are a column's name or a choice's text as places. A number is a text only if every row's label is one."""
    names = columns.choices if len(columns.choices) > 1 else ()
    texts = [tuple(row[1] for row in one.rows) for one in examples]
    all_texts = all(one.label in of_row for one, of_row in zip(examples, texts, strict=True))

    def place(label: str, of_row: tuple[str, ...]) -> str:
        if label in names:
            return str(names.index(label))
        return str(of_row.index(label)) if label in of_row and (all_texts or not label.isdecimal()) else label

    return [replace(one, label=place(one.label, of_row)) for one, of_row in zip(examples, texts, strict=True)]


def _text(where: str, value: Any) -> str:
    """A cell as text. Raises: UserError if it is empty, or a list or an object."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # as spreadsheets hold 1
    if not isinstance(value, str | int | float) or not (text := str(value).strip()):
        raise UserError(f"{where}: got {shown(value)}, want text: fill it in or remove this row")
    return text


def classes_of(examples: list[Example], columns: ClassifyConfig) -> list[str]:
    """The labels in order; of multiple choice the numbers of the choices, from 0 or from 1 as the labels count. Raises:
    UserError if there is only one label, or one that is not a choice, or rows have different numbers of choices.
    """
    labels = sorted({example.label for example in examples})
    if len(labels) < 2:
        raise UserError(f"classify.label={columns.label}: every row has the label {labels[0]!r}: want two or more")
    if not columns.choices:
        return labels
    count = len(examples[0].rows)
    lowest = 1 if str(count) in labels and "0" not in labels else 0
    classes = [str(lowest + i) for i in range(count)]
    for one in examples:
        if len(one.rows) != count:
            came = f"{one.where}: has {len(one.rows)} choices, the first row has {count}"
            raise UserError(f"{came}: want as many in each row")
        if one.label not in classes:
            wanted = f"its column's name, or its number from {classes[0]} to {classes[-1]}"
            raise UserError(f"{one.where}: {columns.label} is {one.label!r}: want the right choice's text, {wanted}")
    return classes


def divide(examples: list[Example], held_out: float, seed: int) -> tuple[list[Example], list[Example]]:
    """(training, held-out) examples by a hash of the texts, so that a text is in only one of them."""
    parts: dict[str, list[Example]] = {"train": [], "dev": []}
    for example in examples:
        parts[split_of(example.split_key, seed, {"train": 1.0 - held_out, "dev": held_out})].append(example)
    return parts["train"], parts["dev"]


def find_marks(tokenizer: Any) -> tuple[tuple[int, int, int], list[str]]:
    """The ids of the start, delimiter and extract tokens, and those that were added because the vocabulary lacks them.

    The start token is the separator between documents in pretraining. Of our own special tokens the end of a turn is
    the delimiter, and the assistant's role, after which an answer follows, is the extract token; after pretraining on
    plain text both embeddings are still random.
    """
    vocabulary, names = tokenizer.get_vocab(), (END, ROLES["assistant"])
    names = names if vocabulary.keys() >= {*names} else MADE
    added = [name for name in names if name not in vocabulary]
    tokenizer.add_tokens(added, special_tokens=True)
    delimiter, extract = map(tokenizer.backend_tokenizer.token_to_id, names)
    return (separator_id(tokenizer), delimiter, extract), added


def encode_examples(
    examples: list[Example], tokenizer: Any, marks: tuple[int, int, int], context: int
) -> tuple[list[list[list[int]]], int]:
    """The token rows of each example, and how many rows were cut to the context: the longest part from its end."""
    ids = iter(encode_texts(tokenizer, [part for example in examples for row in example.rows for part in row]))
    encoded, cut, (start, delimiter, extract) = [], 0, marks
    for example in examples:
        rows = []
        for row in example.rows:
            pieces = [next(ids) for _ in row]
            over = sum(map(len, pieces)) - (context - len(pieces) - 1)
            cut += over > 0
            for _ in range(over):
                max(pieces, key=len).pop()
            marked = chain.from_iterable([delimiter, *piece] for piece in pieces)
            rows.append([start, *islice(marked, 1, None), extract])
        encoded.append(rows)
    return encoded, cut
