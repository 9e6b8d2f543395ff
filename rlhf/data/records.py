"""The three label records: what a labeler wrote, how one ranked K responses, and a prompt without a response.

A record validates itself; everything that enters training passes through these models. How foreign files
become records is in `formats/`, one file per family.
"""

import graphlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import chain, combinations, pairwise
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictFloat,
    StrictInt,
    model_validator,
)
from pydantic_core import PydanticCustomError

_SHOWN_NAMES = 30  # of responses, in a message
MOST_RESPONSES = 100  # of a ranking, whose pairs grow with the square


def _problem(field: str, message: str) -> PydanticCustomError:
    """An error whose message is already in the form `got …, want …`, and which `first_problem` shows as it is."""
    return PydanticCustomError("record", "{message}", {"message": message, "field": field})


def _check_prompt(prompt: "list[Message]") -> "list[Message]":
    if prompt[-1].role != "user":
        raise _problem("prompt", f'prompt: its last turn is "{prompt[-1].role}": want turns that end with role "user"')
    if not any(message.content.strip() for message in prompt):
        raise _problem("prompt", "prompt: got no text, want at least one turn that says something")
    return prompt


def _check_time(created: str) -> str:
    with suppress(ValueError):
        datetime.fromisoformat(created)
        return created
    raise PydanticCustomError("time", "a time as 2026-05-01T10:00:00Z")


def _check_response(response: str) -> str:
    if not response.strip():
        raise _problem("response", "response: got no text, want the demonstrated answer: remove the record")
    return response


# The length constraint makes pydantic itself refuse lone surrogates, without a call of Python per text.
Text = Annotated[str, Field(strict=True, min_length=0)]
Name = Annotated[str, Field(strict=True, min_length=1)]
Rating = Annotated[StrictInt | StrictFloat, Field(ge=1, le=7)]


class Message(BaseModel):
    """One turn. Other keys in the file are kept."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "user", "assistant"]
    content: Text


Prompt = Annotated[
    Annotated[list[Message], Field(min_length=1, max_length=1000)],  # encoding time grows with their square
    BeforeValidator(lambda prompt: [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt),
    AfterValidator(_check_prompt),
]


class _Part(BaseModel):
    _file: str = PrivateAttr("")

    @property
    def file(self) -> str:
        """The file that the record was read from; a record made otherwise has none."""
        return self._file

    def read_from(self, file: str) -> Self:
        self._file = file
        return self

    @model_validator(mode="before")
    @classmethod
    def _keep_unknown_keys(cls, values: Any) -> Any:
        """Unknown keys move to `metadata`, so that nothing is dropped; null means empty."""
        if not isinstance(values, dict):
            return values
        values = {k: v for k, v in values.items() if v is not None or k not in ("metadata", "ratings", "flags")}
        unknown = [key for key in values if key not in cls.model_fields]
        metadata = values.get("metadata", {})
        if not unknown or not isinstance(metadata, dict):
            return values
        clash = next((key for key in sorted(unknown) if key in metadata), None)
        if clash is not None:
            raise _problem("metadata", f'"{clash}" is both in the record and under metadata: keep one of them')
        return values | {"metadata": metadata | {key: values.pop(key) for key in unknown}}


class Demonstration(_Part):
    """What a labeler wrote: trains SFT, and calibrates the reward model."""

    kind: Literal["demonstration"] = "demonstration"
    id: Name
    prompt: Prompt
    response: Annotated[Text, AfterValidator(_check_response)]
    labeler: Text | None = None
    source: Text | None = None
    split: Name | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class PromptRecord(_Part):
    """A prompt without a response: rollouts in PPO, and the next labelling round."""

    kind: Literal["prompt"] = "prompt"
    id: Name
    prompt: Prompt
    user: Text | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class RankedResponse(_Part):
    """One of the K responses of a ranking. Its text may be empty: a policy may end at once."""

    id: Name
    text: Text
    policy: Text | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)

    @property
    def answer(self) -> tuple[str, bool]:
        """The text, and whether it ended."""
        return self.text, bool(self.metadata.get("ended", True))


class Ranking(_Part):
    """One labeler's ranking of K responses to one prompt: trains the reward model. `ranking` names response ids, best
    first; an inner list is a tie; a response left out is unranked. `pairs` of (better, worse) replace it if the
    judgements do not form a weak order. Both are None in a labelling task.
    """

    kind: Literal["ranking"] = "ranking"
    id: Name
    prompt: Prompt
    responses: list[RankedResponse] = Field(min_length=1, max_length=MOST_RESPONSES)
    ranking: list[Annotated[list[Name], Field(min_length=1)]] | None = None
    ratings: dict[str, Rating] = Field(default_factory=dict)
    pairs: list[Annotated[list[Name], Field(min_length=2, max_length=2)]] | None = None
    flags: dict[str, list[Text]] = Field(default_factory=dict)
    labeler: Text | None = None
    seconds: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None = None
    created: Annotated[Text, AfterValidator(_check_time)] | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        ids = [response.id for response in self.responses]
        if (twice := first_repeat(ids)) is not None:
            raise _problem("responses", f'responses: id "{twice}" appears twice: give each response a separate id')
        if self.ranking is not None and self.pairs is not None:
            raise _problem("pairs", "got both ranking and pairs, want one of them: set the other to null")
        ranked = list(chain.from_iterable(self.ranking or ()))
        names = ", ".join(ids[:_SHOWN_NAMES]) + (", …" if len(ids) > _SHOWN_NAMES else "")
        once = f"responses are {names}: list each response at most once"
        if (twice := first_repeat(ranked)) is not None:
            raise _problem("ranking", f'ranking names "{twice}" twice, {once}')
        named: dict[str, Iterable[str]] = {"ratings": self.ratings, "flags": self.flags, "ranking": ranked}
        named["pairs"] = chain(*self.pairs or ())
        known = set(ids)
        for field, given in named.items():
            stray = next((name for name in given if name not in known), None)
            if stray is not None:
                wanted = once if field == "ranking" else f"responses are {names}: use these names"
                raise _problem(field, f'{field} names "{stray}", {wanted}')
        if self.pairs and (cycle := find_cycle(self.pairs)):
            raise _problem("pairs", f"pairs go in a circle, {' over '.join(cycle)}: drop one of these judgements")
        return self

    def ranks(self) -> list[int]:
        """The rank of each response in the order of `responses`: 0 best, equal = tie, -1 unranked. Raises: ValueError
        if the judgements are `pairs`, which have no ranks: use `pair_list`.
        """
        if self.pairs is not None:
            raise ValueError(f"ranking {self.id} is given as pairs, which have no ranks: use pair_list")
        rank_of = {name: rank for rank, tie in enumerate(self.ranking or []) for name in tie}
        return [rank_of.get(response.id, -1) for response in self.responses]

    def pair_list(self) -> list[tuple[int, int]]:
        """Every strictly ordered pair once, as (better, worse) indices into `responses`, ascending."""
        index = {response.id: i for i, response in enumerate(self.responses)}
        return sorted({(index[one], index[other]) for one, other, verdict in self.verdicts() if verdict})

    def verdicts(self) -> Iterator[tuple[str, str, int]]:
        """(a, b, verdict) of each judged pair of responses, by their ids: 1 if a is better, 0 a tie."""
        ranked = [(name, rank) for rank, tie in enumerate(self.ranking or ()) for name in tie]
        yield from ((one, other, int(a < b)) for (one, a), (other, b) in combinations(ranked, 2))
        yield from ((better, worse, 1) for better, worse in self.pairs or ())
        ties, known = self.metadata.get("ties"), {response.id for response in self.responses}
        for tie in ties if self.pairs is not None and isinstance(ties, list) else ():
            if isinstance(tie, list) and len(tie) == 2 and all(isinstance(one, str) and one in known for one in tie):
                yield tie[0], tie[1], 0


Record = Demonstration | Ranking | PromptRecord
RecordType = TypeVar("RecordType", bound=Record)
KINDS: dict[str, type[Record]] = {"demonstration": Demonstration, "ranking": Ranking, "prompt": PromptRecord}


def without_replaced(records: Iterable[RecordType]) -> list[RecordType]:
    """The records that count, in their order: a labeler's correction names the one that it replaces in
    `metadata.replaces`. Files of labels are only appended to, so that nothing is lost when a program is killed.
    """
    known = list(records)
    replaced = replaced_by(known)
    return [one for one in known if name_of(one) not in replaced]


def name_of(record: Record) -> tuple[str, str | None]:
    return record.id, getattr(record, "labeler", None)


def replaced_by(records: Iterable[Record]) -> set[tuple[str, str | None]]:
    """The names of the records that are replaced by some of these."""
    named = ((record.metadata.get("replaces"), name_of(record)[1]) for record in records)
    return {(old, labeler) for old, labeler in named if isinstance(old, str)}


def check_of(record: Record) -> dict[str, Any] | None:
    """{"kind", "right", "pairs"} of a ranking that measures its labeler and trains nothing: "gold", of responses with a
    known order, or "again", of a task that the labeler has ranked before. None for all other records.
    """
    found = record.metadata.get("labeler_check")
    return found if isinstance(found, dict) and {"kind", "right", "pairs"} <= found.keys() else None


def sum_checks(records: Iterable[Record]) -> dict[str, dict[str, float]]:
    """{kind: {"right", "pairs"}} over the checks among some records: pairs of responses that were ordered as before, and all."""
    sums: dict[str, dict[str, float]] = {}
    for check in filter(None, map(check_of, records)):
        so_far = sums.setdefault(str(check["kind"]), {"right": 0.0, "pairs": 0.0})
        so_far |= {name: so_far[name] + float(check[name]) for name in so_far}
    return sums


def shown_prompt(prompt: Sequence[Message]) -> str:
    """A prompt as one text: of a single user turn its text, else every turn with its role."""
    if len(prompt) == 1 and prompt[0].role == "user":
        return prompt[0].content
    return "\n\n".join(f"{message.role.capitalize()}: {message.content}" for message in prompt)


def first_repeat(names: Iterable[str]) -> str | None:
    """The first name that appears twice; None if all are different."""
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)  # type: ignore[func-returns-value]


def common_beginning(texts: Sequence[Any]) -> Any:
    """With what all of several texts (or lists) begin."""
    least, most = min(texts), max(texts)
    return least[: next((i for i, (a, b) in enumerate(zip(least, most, strict=False)) if a != b), len(least))]


Node = TypeVar("Node", bound=Hashable)


def find_cycle(edges: Iterable[Sequence[Node]]) -> list[Node] | None:
    """A circle among (better, worse) pairs: [a, b, c, a], each better than the next; None without one."""
    sorter: graphlib.TopologicalSorter[Node] = graphlib.TopologicalSorter()
    for better, worse in edges:
        sorter.add(better, worse)  # for the sorter, worse comes first; hence the reversal below
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]
    return None


def join_judgements(
    names: Sequence[Node], better: Iterable[tuple[Node, Node]], equal: Iterable[tuple[Node, Node]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Join judgements of pairs of the named responses: those of (better, worse), and those judged equal.

    Returns a record's fields and metadata: one `ranking` if the judgements form a weak order, with transitivity
    applied; else they stay `pairs`, which a record refuses if they go in a circle, and the equal ones are
    `metadata.ties`. A response never judged is left out.
    """
    from scipy.cluster.hierarchy import DisjointSet

    place = {name: i for i, name in enumerate(names)}
    sides = {(a, b) if place[a] < place[b] else (b, a) for a, b in equal}
    strict, ties = (sorted(pairs, key=lambda pair: (place[pair[0]], place[pair[1]])) for pairs in (set(better), sides))
    judged = sorted({name for pair in (*strict, *ties) for name in pair}, key=place.__getitem__)
    tied: Any = DisjointSet(judged)
    for a, b in ties:
        tied.merge(a, b)
    levels = {(tied[one], tied[other]) for one, other in strict}
    sorter: graphlib.TopologicalSorter[Node] = graphlib.TopologicalSorter({tied[name]: () for name in judged})
    for one, other in levels:
        sorter.add(other, one)
    with suppress(graphlib.CycleError):  # ties and orders contradict each other
        order = list(sorter.static_order())
        if all(pair in levels for pair in pairwise(order)):  # else the order of two was not judged
            ranking = [[name for name in judged if tied[name] == root] for root in order]
            return {"ranking": ranking, "pairs": None}, {}
    unordered = {"ranking": None, "pairs": [list(pair) for pair in strict]}
    return unordered, {"ties": [list(pair) for pair in ties]} if ties else {}
