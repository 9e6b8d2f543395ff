"""Pairwise judgements over one item's responses, joined into one record per labeler.

Formats whose rows are single judgements (`Format.joins`) name the item in `metadata.item`; the maths of joining is
`records.join_judgements`.
"""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from rlhf.data.importing.batches import Held, reject_row
from rlhf.data.reading.readers import Reject
from rlhf.data.records import CycleError, RankedResponse, Ranking, join_judgements, shown


def join_held(held: list[Held], name: str) -> Iterator[tuple[list[Held], Ranking | list[Reject]]]:
    """For each (item, labeler), in order of appearance: its judgements, and the joined record or the reason why there is none."""
    items: dict[tuple[str, str | None], list[Held]] = {}
    for one in held:
        items.setdefault((one.record.metadata["item"], one.record.labeler), []).append(one)
    for (item, labeler), members in items.items():
        if len(members) == 1:
            yield members, members[0].record
            continue
        try:
            yield members, _join([one.record for one in members])
        except _NoJoinError as error:
            by = f" by {shown(labeler)[1:-1]}" if labeler is not None else ""
            message = f"{error.field}: the judgements of item {shown(item)[1:-1]}{by} {error}"
            rows = {one.at: one.row for one in members}
            yield members, [reject_row(name, row, error.field, message) for row in rows.values()]


class _NoJoinError(Exception):
    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


def _responses(records: list[Ranking]) -> dict[str, RankedResponse]:
    """Every response of the item by its id, in order of appearance."""
    responses: dict[str, RankedResponse] = {}
    for record in records:
        for response in record.responses:
            if responses.setdefault(response.id, response).text != response.text:
                raise _NoJoinError("responses", f'give response "{shown(response.id)[1:-1]}" two texts: want one')
    return responses


def _join(records: list[Ranking]) -> Ranking:
    first = records[0]
    turns = [(m.role, m.content) for m in first.prompt]
    if any([(m.role, m.content) for m in record.prompt] != turns for record in records):
        raise _NoJoinError("prompt", "come with two prompts, want one")
    responses = _responses(records)
    at = {name: i for i, name in enumerate(responses)}
    names = list(responses)
    judgements = [triple for record in records for triple in _verdicts(record, at)]
    try:
        joined = join_judgements(len(names), judgements)
    except CycleError as error:
        circle = " over ".join(names[i] for i in error.cycle)
        raise _NoJoinError("ranking", f"go in a circle, {circle}: drop one of them") from error
    metadata = _metadata(records)
    if joined.pairs is not None and joined.ties:
        metadata["ties"] = [[names[i], names[j]] for i, j in joined.ties]
    ranking = None if joined.ranking is None else [[names[i] for i in tie] for tie in joined.ranking]
    times = [record.seconds for record in records if record.seconds is not None]
    created = [record.created for record in records if record.created is not None]
    return Ranking.model_validate(
        {
            "id": first.id,
            "prompt": first.prompt,
            "responses": list(responses.values()),
            "ranking": ranking if judgements else None,
            "pairs": None if joined.pairs is None else [[names[i], names[j]] for i, j in joined.pairs],
            "ratings": {key: value for record in reversed(records) for key, value in record.ratings.items()},
            "flags": {key: value for record in reversed(records) for key, value in record.flags.items()},
            "labeler": first.labeler,
            "seconds": sum(times) if times else None,
            "created": max(created) if created else None,
            "metadata": metadata,
        }
    )


def _verdicts(record: Ranking, at: dict[str, int]) -> Iterator[tuple[int, int, int]]:
    ids = [at[response.id] for response in record.responses]
    if record.pairs is not None:
        yield from ((ids[better], ids[worse], 1) for better, worse in record.pair_list())
        return
    ranks = record.ranks()
    for i, j in combinations(range(len(ids)), 2):
        if ranks[i] >= 0 and ranks[j] >= 0:
            yield ids[i], ids[j], 0 if ranks[i] == ranks[j] else 1 if ranks[i] < ranks[j] else 2


def _metadata(records: list[Ranking]) -> dict[str, Any]:
    """The metadata that all judgements share; those of each alone are listed with its id under `judgements`."""
    first = records[0].metadata
    shared = {k: v for k, v in first.items() if all(k in r.metadata and r.metadata[k] == v for r in records)}
    judgements = [
        {"id": record.id, "responses": [response.id for response in record.responses]}
        | {key: value for key, value in record.metadata.items() if key not in shared}
        for record in records
    ]
    return shared | {"judgements": judgements}
