"""Prompts for rollouts, from records of any kind; and prompts cut to the room there is."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rlhf.data.chat_template import encode_prompt
from rlhf.data.label_files import SourceInfo, load_all
from rlhf.data.records import Message, PromptRecord, Record
from rlhf.data.splits import given_split, prompt_key
from rlhf.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def prompts_of(records: Iterable[Record]) -> list[PromptRecord]:
    """The prompts of records of any kind, in order, each once; the first record with a prompt names it.

    The split and group of a demonstration or ranking are kept, since they determine the prompt's split.
    """
    prompt_of: dict[str, PromptRecord] = {}
    for record in records:
        key = prompt_key(record.prompt)
        if key in prompt_of:
            continue
        if isinstance(record, PromptRecord):
            prompt_of[key] = record
            continue
        kept = {"group": record.metadata.get("group"), "split": given_split(record)}
        metadata = {name: value for name, value in kept.items() if value is not None}
        prompt_of[key] = PromptRecord(id=record.id, prompt=record.prompt, metadata=metadata)
    return list(prompt_of.values())


def load_prompts(
    sources: Any, format: str = "auto", allow_partial: bool = False
) -> tuple[list[PromptRecord], SourceInfo]:
    """The distinct prompts of the sources, whose records may be of any kind.

    Raises: UserError if a source cannot be read or a row is bad.
    """
    records, info = load_all(sources, format, allow_partial)
    prompts = prompts_of(records)
    if not prompts:
        raise UserError(f"no prompt in the data: want at least one record. Read: {'; '.join(info.describe())}")
    return prompts, info


def drop_oldest(turns: list[Message]) -> int:
    """Remove the oldest turn and the turns up to the next turn of the user; a system turn and the last turn stay. Returns the
    number of removed turns.
    """
    first = 1 if turns[0].role == "system" and len(turns) > 1 else 0
    users = (i for i in range(first + 1, len(turns)) if turns[i].role == "user")
    until = next(users, first)
    del turns[first:until]
    return until - first


def encode_prompt_within(
    tokenizer: "PreTrainedTokenizerFast", prompt: str | Sequence[Message], room: int
) -> tuple[list[int], bool] | None:
    """Encode a prompt in at most `room` tokens: its ids and whether it was cut; None if it cannot fit.

    Cut from the left: first the oldest turns go (a system turn stays as long as it can), until a user turn
    begins the dialogue; then the last turn loses the beginning of its text. What the template
    writes around it stays.
    """
    ids = encode_prompt(tokenizer, prompt)
    if len(ids) <= room:
        return ids, False
    turns = [Message(role="user", content=prompt)] if isinstance(prompt, str) else list(prompt)
    while drop_oldest(turns):
        ids = encode_prompt(tokenizer, turns)
        if len(ids) <= room:
            return ids, True
    ids = encode_prompt(tokenizer, turns[-1:])
    if len(ids) <= room:
        return ids, True
    # the template's text around a message: the common beginning and end with another message
    other = encode_prompt(tokenizer, [{"role": turns[-1].role, "content": ""}])
    head = next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), len(other))
    if room <= len(other):
        return None
    return [*ids[:head], *ids[len(ids) - (room - head) :]], True


def fitting_prompts(
    tokenizer: "PreTrainedTokenizerFast", records: Iterable[PromptRecord], room: int
) -> Iterator[tuple[PromptRecord, list[int], bool]]:
    """The records whose prompts fit in `room` tokens, with those tokens and whether they were cut, see `encode_prompt_within`."""
    for record in records:
        fitted = encode_prompt_within(tokenizer, record.prompt, room)
        if fitted is not None:
            yield record, *fitted
