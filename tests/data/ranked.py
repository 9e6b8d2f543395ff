"""Rankings as items of the reward model, with the policy's own tokens."""

from collections.abc import Sequence
from typing import Any

from rlhf.data.encoding import Item, join_rankings, token_encoder
from rlhf.data.records import Ranking


def make_items(records: Sequence[Ranking], tokenizer: Any, context_length: int, room: int) -> tuple[list[Item], int]:
    return join_rankings(records, token_encoder(tokenizer, context_length, room))
