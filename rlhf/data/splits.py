"""The split of a prompt: chosen by hash, so that no prompt is ever in two splits.

This module handles one record alone. `assignments.py` keeps users and earlier assignments together in an import.
"""

import hashlib
import re
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from rlhf.errors import UserError

if TYPE_CHECKING:
    from rlhf.data.records import Message, Record

PREFIX_CHARACTERS = 200
SPLITS = ("train", "dev", "test")
_NO_LETTER = re.compile(r"[\W_]+")
_NO_ASCII_LETTER = bytes(c for c in range(128) if not chr(c).isalnum())
_MARKS = re.compile(r"[^\w\s\x00-\x7f]{32,}")  # characters that may combine with accents
_FEW = 8  # letters at a cut that may normalise differently when more text follows


def _sorted_marks(text: str) -> str:
    """The text with long runs of accents in canonical order, which changes no normal form.

    Normalising sorts each run by insertion: of a million accents in the wrong order that takes half an hour.
    """
    if text.isascii() or not _MARKS.search(text):
        return text

    def in_order(match: re.Match[str]) -> str:
        marks: list[tuple[int, int, str]] = []
        base = 0  # how many characters that are no accent came before
        for character in match[0]:
            order = unicodedata.combining(character)
            base += order == 0
            marks.append((base, order, character))
        return "".join(character for _, _, character in sorted(marks, key=lambda mark: mark[:2]))

    return _MARKS.sub(in_order, text)


def prompt_key(prompt: "str | Sequence[Message]") -> str:
    """A prompt's normalised text: Unicode NFKC, case and runs of white space do not matter.

    A bare string and the same text as one user turn have the same key; the turns of other roles are named.
    """
    if not isinstance(prompt, str):
        prompt = "\n".join(m.content if m.role == "user" else f"{m.role}: {m.content}" for m in prompt)
    return " ".join(unicodedata.normalize("NFKC", _sorted_marks(prompt)).casefold().split())


def conversation(prompt: "str | Sequence[Message]") -> str:
    """The text of the turns from the first user turn on: a system turn that many prompts share stays out."""
    if isinstance(prompt, str):
        return prompt
    first = next((i for i, m in enumerate(prompt) if m.role == "user"), 0)
    return "\n".join(m.content for m in prompt[first:])


def _letters(text: str) -> str:
    """Only letters and digits, in one case and one Unicode form, without accents."""
    if text.isascii():
        return text.lower().encode().translate(None, _NO_ASCII_LETTER).decode()
    text = unicodedata.normalize("NFKD", _sorted_marks(text)).upper().casefold()
    return unicodedata.normalize("NFKC", _NO_LETTER.sub("", unicodedata.normalize("NFKD", text)))


def split_key(prompt: "str | Sequence[Message]", prefix_characters: int = PREFIX_CHARACTERS) -> str:
    """The key that decides a prompt's split: the letters and digits with which it begins.

    Two prompts that differ in case, white space, punctuation, accents or Unicode form have the same key. So have two that
    share a long beginning, since the key is cut to 3/4 prefix_characters: at least this share of ordinary text is letters
    and digits. Having the same key is an equivalence relation, so a hash of the key determines the split of a prompt,
    whatever else is imported.
    """
    text = conversation(prompt)
    wanted = max(1, prefix_characters * 3 // 4)
    size = 2 * wanted + 64
    while True:
        key = _letters(text[:size])
        if len(key) >= wanted + _FEW or size >= len(text):
            return key[:wanted]
        size *= 2


def hash64(*parts: str) -> int:
    """64 bits of a hash of strings, the same on every machine."""
    text = "\0".join(parts)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def key_hash(prompt: "str | Sequence[Message]", prefix_characters: int = PREFIX_CHARACTERS) -> int:
    """64 bits of a hash of the split key; an import stores only this of a prompt."""
    return hash64(split_key(prompt, prefix_characters))


def seeded_bits(key: str, seed: int) -> int:
    """64 bits that depend on the key and the seed only."""
    return hash64(str(seed), key)


def uniform(key: str, seed: int) -> float:
    """A number in [0, 1) that depends on the key and the seed only."""
    return seeded_bits(key, seed) / 2**64


def choose(u: float, fractions: Mapping[str, float]) -> str:
    """The split at u in [0, 1): `fractions` maps split names to shares that add up to 1.

    Raises: ValueError if the shares are negative or do not add up to 1.
    """
    if min(fractions.values()) < 0 or abs(sum(fractions.values()) - 1) > 1e-6:
        raise ValueError(f"split shares are {dict(fractions)}: want shares of at least 0 that add up to 1")
    names = [name for name, share in fractions.items() if share > 0]
    ends = accumulate(fractions[name] for name in names)
    return next((name for name, end in zip(names[:-1], ends, strict=False) if u < end), names[-1])


def split_of(text: "str | Sequence[Message]", seed: int, fractions: Mapping[str, float]) -> str:
    """The split of a text such as a group's key, by its `prompt_key`.

    Raises: ValueError if the shares are negative or do not add up to 1.
    """
    return choose(uniform(prompt_key(text), seed), fractions)


def given_split(record: "Record") -> str | None:
    """The split that a record states, in `split` or `metadata.split`."""
    stated = record.split if record.kind == "demonstration" else None
    return stated or record.metadata.get("split")


def record_split(record: "Record", seed: int, fractions: Mapping[str, float]) -> str:
    """A record's split: its `split` or `metadata.split` if given, else by `metadata.group`, else by prompt.

    Records of one group (the same request in other words, or one user) are kept together, and so are prompts with
    one `split_key`.

    Raises: UserError if the given split is none of `fractions`.
    """
    given = given_split(record)
    if given is not None:
        if not isinstance(given, str) or given not in fractions:
            raise UserError(f"record {record.id}: split is {given!r}: want one of {', '.join(fractions)}, or null")
        return given
    return choose(uniform(unit_key(record), seed), fractions)


def unit_key(record: "Record") -> str:
    """What records that stay together share: their `metadata.group`, else their prompt's `split_key`."""
    group = record.metadata.get("group")
    return f"{key_hash(record.prompt):016x}" if group is None else prompt_key(str(group))


def record_half(record: "Record", seed: int) -> int:
    """1 or 2: the half of the prompts that a record belongs to, whatever its split. What stays together is in one half."""
    return 1 + int(uniform(f"half {unit_key(record)}", seed) >= 0.5)


def with_split(record: "Record", split: str) -> "Record":
    """The record as it is read back from the file of that split."""
    if record.kind == "demonstration":
        return record.model_copy(update={"split": split})
    return record.model_copy(update={"metadata": record.metadata | {"split": split}})
