"""Records as tokens that fit the context: prompts, demonstrations for SFT, and comparisons for the reward model."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from rlhf.config import Config
from rlhf.config.setting import listed
from rlhf.data.chat_template import encode_dialogue, encode_prompt, encode_prompts, encode_response, encode_responses
from rlhf.data.formats.shapes import is_learned
from rlhf.data.records import Demonstration, Message, PromptRecord, Ranking, common_beginning
from rlhf.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast


def row_limit(config: Config, tokenizer: Any) -> int:
    """The most tokens of a row, prompt and response: data.max_tokens, and the context."""
    return min(config.data.max_tokens, tokenizer.model_max_length)


def drop_oldest(turns: list[Message]) -> int:
    """Remove the oldest turn and the turns up to the next turn of the user; a system turn and the last turn stay.
    Returns the number of removed turns.
    """
    first = 1 if turns[0].role == "system" and len(turns) > 1 else 0
    users = (i for i in range(first + 1, len(turns)) if turns[i].role == "user")
    until = next(users, first)
    del turns[first:until]
    return until - first


def encode_prompt_within(
    tokenizer: "PreTrainedTokenizerFast", prompt: str | Sequence[Message], room: int
) -> tuple[list[int], bool] | None:
    """Encode a prompt in at most `room` tokens: its ids and whether it was cut; None if it cannot fit. It is cut from
    the left. First the oldest turns are removed (the rest begins with a user turn, after a system turn), then the
    system turn, then the beginning of the last turn's text. The template's text around that is kept.
    """
    turns = [Message(role="user", content=prompt)] if isinstance(prompt, str) else list(prompt)
    whole = ids = encode_prompt(tokenizer, turns)
    while len(ids) > room and drop_oldest(turns):
        ids = encode_prompt(tokenizer, turns)
    if len(ids) > room:
        ids = encode_prompt(tokenizer, turns[-1:])
    if len(ids) <= room:
        return ids, ids is not whole
    # the template's text around a message: the common beginning and end with another message
    other = encode_prompt(tokenizer, [{"role": turns[-1].role, "content": ""}])
    head = len(common_beginning([ids, other]))
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


TokenRow = dict[str, list[int]]  # "prompt", "response", perhaps "earlier"


def encode_demonstrations(
    records: Sequence[Demonstration],
    tokenizer: "PreTrainedTokenizerFast",
    context_length: int,
    *,
    turns: str = "last",
    counts: Counter[str] | None = None,
) -> list[TokenRow]:
    """Encode demonstrations as {"prompt": ids, "response": ids}, together at most `context_length` tokens.

    A response that fits ends with its end token. One that does not is truncated and has no end token, because the
    author did not end it there. A prompt that leaves a response less than a quarter of the context (all of a shorter
    response) is cut from the left, see `encode_prompt_within`; if that is not enough, the demonstration is skipped.

    turns: "all" also learns the assistant's earlier turns, see `encode_dialogue_rows`. counts: increased: kept,
    truncated_responses, cut_prompts, skipped; with turns="all" earlier_turns and further_rows.
    """
    least, counts = context_length // 4, Counter() if counts is None else counts
    prompts = encode_prompts(tokenizer, [record.prompt for record in records])
    responses = encode_responses(tokenizer, [record.response for record in records])
    encoded = []
    for record, prompt, response in zip(records, prompts, responses, strict=True):
        if turns == "all" and (rows := encode_dialogue_rows(record, tokenizer, context_length, least)):
            earlier = sum(map(_is_learned, record.prompt))
            cut = sum(len(row["prompt"] + row["response"]) > context_length for row in rows)
            counts.update(kept=1, earlier_turns=earlier, further_rows=len(rows) - 1, truncated_responses=cut)
            encoded += [row | {"response": row["response"][: context_length - len(row["prompt"])]} for row in rows]
            continue
        if len(prompt) > (room := context_length - min(least, len(response))):
            fitting = encode_prompt_within(tokenizer, record.prompt, room)
            if fitting is None:
                counts["skipped"] += 1
                continue
            prompt = fitting[0]
            counts["cut_prompts"] += 1
        room = context_length - len(prompt)
        if len(response) > room:
            response = response[:room]
            counts["truncated_responses"] += 1
        counts["kept"] += 1
        encoded.append({"prompt": prompt, "response": response})
    return encoded


def _is_learned(turn: Message) -> bool:
    return is_learned(turn.model_dump())


def encode_dialogue_rows(record: Demonstration, tokenizer: Any, context_length: int, least: int) -> list[TokenRow]:
    """The rows of a dialogue with earlier turns of the assistant: each also has `earlier`, with 1 for each token of the
    prompt that is learned. Empty if no earlier turn is to be learned, or if one turn alone is too long for the context.

    If the dialogue does not fit, its oldest turns are learned in further rows, each turn once; a response may still
    reach past the context. least: tokens that a prompt leaves a response.
    """
    if not any(map(_is_learned, record.prompt)):
        return []
    rows: list[TokenRow] = []
    left = [*record.prompt, Message(role="assistant", content=record.response)]
    while left:
        turns = list(left)
        while True:
            silent = [i for i, turn in enumerate(turns[:-1]) if not _is_learned(turn)]
            ids, mask = encode_dialogue(tokenizer, turns, silent)
            start = max((i + 1 for i, learned in enumerate(mask) if not learned), default=0)
            if any(turn.role == "system" for turn in turns) and ids[:start] != encode_prompt(tokenizer, turns[:-1]):
                return []  # a template that shows the system turn before the last request only
            if start <= context_length - min(least, len(ids) - start):
                break
            if not drop_oldest(turns):
                return []
        rows.append({"prompt": ids[:start], "response": ids[start:], "earlier": [int(x) for x in mask[:start]]})
        left = left[: len(left) - len(turns) + (turns[0].role == "system")]
        while left and not _is_learned(left[-1]):
            left.pop()
    return rows


def labels_of(row: TokenRow, ignored: int) -> list[int]:
    """A row's tokens as labels, with `ignored` for those that are not learned."""
    earlier = row.get("earlier", [0] * len(row["prompt"]))
    prompt = [token if learned else ignored for token, learned in zip(row["prompt"], earlier, strict=True)]
    return prompt + row["response"]


MOST_ANSWERS = 64  # per item; further rankings of the prompt form another item

Answer = tuple[str, bool]  # text, and whether it ended
# From a prompt and answers: one model input per answer (anything with a length) and the answers' lengths in tokens; None
# if the prompt does not fit.
Encode = Callable[[Sequence[Message], Sequence[Answer]], tuple[list[Any], list[int]] | None]


@dataclass(slots=True)
class Judgement:
    """One ranking, by the positions of its answers in the item."""

    labeler: str | None
    pairs: list[tuple[int, int]]  # (better, worse), each once
    weight: float = 1.0  # of the labeler
    # the rank difference of each pair; None without ranks
    gap_of: Mapping[tuple[int, int], int | None] = field(default_factory=dict)


@dataclass(slots=True)
class Item:
    """One prompt with K different answers: one batch element."""

    key: str
    rows: list[Any]  # K model inputs, prompt + response
    lengths: list[int]  # K response lengths in tokens, for the length baseline
    record: Any = None  # the prompt's first Ranking, for its metadata
    answers: list[Answer] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)

    def pairs(self) -> list[tuple[int, int]]:
        """(better, worse) of every labeler, repeats included."""
        return [pair for judgement in self.judgements for pair in judgement.pairs]

    def weights(self) -> "Tensor":
        """(K, K) float32: the labelers who found i better than j, each by weight, which `ranking_loss` normalises; 0
        without a judgement. If two labelers disagree, both directions have weight.
        """
        import torch

        weights = torch.zeros(len(self.rows), len(self.rows))
        for one in self.judgements:
            if one.pairs:  # each once
                weights[tuple(zip(*one.pairs, strict=True))] += one.weight
        return weights

    def of_labelers(self, labelers: Collection[str | None]) -> "Item":
        """The same answers with the judgements of these labelers only."""
        return replace(self, judgements=[one for one in self.judgements if one.labeler in labelers])


def token_encoder(
    tokenizer: "PreTrainedTokenizerFast", context_length: int, room: int, counts: Counter[str] | None = None
) -> Encode:
    """The encoder of reward models that read the policy's own tokens. A prompt keeps at most context_length - room
    tokens, cut from the left; a response that is longer than what is left is truncated, and then has no end token.
    `counts`, if given, is increased: cut_prompts, truncated_responses, skipped.
    """
    counts = Counter() if counts is None else counts

    def encode(prompt: Sequence[Message], answers: Sequence[Answer]) -> tuple[list[Any], list[int]] | None:
        fitted = encode_prompt_within(tokenizer, prompt, context_length - room)
        if fitted is None:
            counts["skipped"] += 1
            return None
        encoded = [encode_response(tokenizer, text, ended=ended) for text, ended in answers]
        rows = [(fitted[0] + answer)[:context_length] for answer in encoded]
        counts["cut_prompts"] += fitted[1]
        counts["truncated_responses"] += sum(len(fitted[0] + answer) > context_length for answer in encoded)
        return rows, [len(row) - len(fitted[0]) for row in rows]

    return encode


def join_rankings(
    records: Sequence[Ranking], encode: Encode, labeler_weights: Mapping[str, float] | None = None
) -> tuple[list[Item], int]:
    """One item per prompt with at least one ordered pair, and how many rankings gave none.

    Rankings of one prompt share an item, whoever the labelers are, whatever the order of the answers, and even if only
    some of the answers are the same: each different answer appears once. Answers with the same text and ending are one,
    and a pair of them is ignored. Rankings of a labeler with weight 0, or whose prompt does not fit, give no pair.
    labeler_weights: labelers that are not named have weight 1.
    """
    items_of: dict[str, list[Item]] = {}  # by prompt
    unpaired = 0
    for record in records:
        weight = 1.0 if record.labeler is None else float((labeler_weights or {}).get(record.labeler, 1.0))
        answers = [response.answer for response in record.responses]
        pairs = [(i, j) for i, j in record.pair_list() if answers[i] != answers[j]]
        if not pairs or not weight > 0:
            unpaired += 1
            continue
        key = repr([(m.role, m.content) for m in record.prompt])
        same = items_of.setdefault(key, [])
        if not same or len({*same[-1].answers, *answers}) > MOST_ANSWERS:
            same.append(Item(f"{key}#{len(same)}" if same else key, [], [], record))
        item = same[-1]
        item.answers = list(dict.fromkeys([*item.answers, *answers]))
        place = {answer: i for i, answer in enumerate(item.answers)}
        ranks = record.ranks() if record.pairs is None else None
        gap_of: dict[tuple[int, int], int | None] = {}
        for i, j in pairs:
            gap_of.setdefault((place[answers[i]], place[answers[j]]), ranks[j] - ranks[i] if ranks else None)
        item.judgements.append(Judgement(record.labeler, sorted(gap_of), weight, gap_of))

    items = []
    for item in chain.from_iterable(items_of.values()):
        encoded = encode(item.record.prompt, item.answers)
        item.rows, item.lengths = encoded or ([], [])
        for judgement in item.judgements:  # answers that are equal up to where they are cut teach nothing
            judgement.pairs = [(i, j) for i, j in judgement.pairs if encoded and item.rows[i] != item.rows[j]]
        unpaired += sum(not judgement.pairs for judgement in item.judgements)
        if any(judgement.pairs for judgement in item.judgements):
            items.append(item)
    return items, unpaired


def names_of(given: Any) -> list[str]:
    """The labelers of a setting: none, one, or a list; numbers are names too."""
    return [str(name) for name in listed(given)]


def check_labelers(setting: str, names: Collection[str], records: Sequence[Ranking]) -> None:
    """Raises: UserError if `names` contains someone who judged nothing; the message lists those who did."""
    seen = sorted({record.labeler for record in records if record.labeler is not None})
    unknown = [name for name in names if name not in seen]
    if unknown:
        names_seen = ", ".join(seen[:20]) + (f" and {len(seen) - 20} more" if len(seen) > 20 else "")
        wanted = f"want some of the labelers seen: {names_seen or 'none has a name'}"
        raise UserError(f"{setting}: no ranking is by {', '.join(unknown)}: {wanted}")
