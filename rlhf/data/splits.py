"""Which split a prompt belongs to: decided by hash, so that no prompt ever stands in two splits."""

import hashlib
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlhf.errors import UserError

if TYPE_CHECKING:
    from rlhf.data.records import Message, Record


def prompt_key(prompt: "str | Sequence[Message]") -> str:
    """A prompt's normalised text: Unicode NFKC, case and runs of white space do not matter.

    A bare string and the same text as one user turn have the same key; the turns of other roles are named.
    """
    turns = [prompt] if isinstance(prompt, str) else [
        m.content if m.role == "user" else f"{m.role}: {m.content}" for m in prompt
    ]  # fmt: skip
    text = "\n".join(turns)
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def uniform(key: str, seed: int) -> float:
    """A number in [0, 1) that depends on the key and the seed only."""
    digest = hashlib.blake2b(f"{seed}\0{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def split_of(prompt: "str | Sequence[Message]", seed: int, fractions: Mapping[str, float]) -> str:
    """The split of a prompt (or of a group's key): `fractions` maps split names to shares that add up to 1.

    Raises: ValueError where the shares are negative or do not add up to 1.
    """
    if any(share < 0 for share in fractions.values()) or abs(sum(fractions.values()) - 1) > 1e-6:
        raise ValueError(f"split shares are {dict(fractions)}: want shares of at least 0 that add up to 1")
    u = uniform(prompt_key(prompt), seed)
    upper = 0.0
    last = ""
    for name, share in fractions.items():
        if share == 0:
            continue
        upper, last = upper + share, name
        if u < upper:
            return name
    return last  # u lies within rounding of 1


def record_split(record: "Record", seed: int, fractions: Mapping[str, float]) -> str:
    """A record's split: its `split` or `metadata.split` if given, else by `metadata.group`, else by prompt.

    Records of one group (the same request in other words, or one user) are kept together.

    Raises: UserError where the given split is none of `fractions`.
    """
    given = getattr(record, "split", None) or record.metadata.get("split")
    if given is not None:
        if given not in fractions:
            raise UserError(f"record {record.id}: split is {given!r}: want one of {', '.join(fractions)}, or null")
        return given
    group = record.metadata.get("group")
    return split_of(record.prompt if group is None else str(group), seed, fractions)
