from itertools import combinations, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlhf.data.importer import join_rankings_of_item
from rlhf.data.records import PromptRecord, Ranking, find_cycle, join_judgements
from rlhf.system.schemas import first_problem

RANKING = {
    "kind": "ranking", "id": "r-9", "prompt": [{"role": "user", "content": "Hi"}],
    "responses": [{"id": "a", "text": "A", "policy": "sft-2"}, {"id": "b", "text": "B"}, {"id": "c", "text": ""}],
    "ranking": [["b"], ["a", "c"]], "ratings": {"b": 6, "a": 3.5}, "pairs": None, "flags": {"c": ["harmful"]},
    "labeler": "labeler-2", "seconds": 74.5, "created": "2026-05-01T10:00:00Z", "metadata": {},
}  # fmt: skip


def problem(model, values) -> str:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(values)
    return first_problem(caught.value)[1]


def test_a_record_survives_being_written_and_read():
    record = Ranking.model_validate(RANKING)
    assert Ranking.model_validate_json(record.model_dump_json()) == record
    assert (
        record.model_dump(exclude={"responses"}).items()
        >= {key: value for key, value in RANKING.items() if key != "responses"}.items()
    )
    assert list(record.model_dump()) == list(RANKING)


def test_unknown_keys_are_kept_under_metadata():
    values = {"kind": "prompt", "id": "p", "prompt": "Hi", "topic": "x", "metadata": {"n": 1}}
    assert PromptRecord.model_validate(values).metadata == {"n": 1, "topic": "x"}
    responses = [{"id": "a", "text": "A", "score": 2}]
    assert Ranking.model_validate(
        RANKING | {"responses": responses, "ranking": None, "ratings": {}, "flags": {}}
    ).responses[0].metadata == {"score": 2}
    named = {"role": "user", "content": "Hi", "name": "Ann"}
    kept = PromptRecord.model_validate({"id": "p", "prompt": [named]})
    assert kept.model_dump()["prompt"] == [named]


NAMES = "responses are a, b, c: "


@pytest.mark.parametrize(("change", "message"), [
    ({"ranking": [["b"], ["d"]]}, 'ranking names "d", ' + NAMES + "list each response at most once"),
    ({"ranking": [["b"], ["b"]]}, 'ranking names "b" twice, ' + NAMES + "list each response at most once"),
    ({"ratings": {"d": 3}}, 'ratings names "d", ' + NAMES + "use these names"),
    ({"ratings": {"a": 8}}, "ratings.a: got 8, want less than or equal to 7"),
    ({"pairs": [["a", "b"]]}, "got both ranking and pairs, want one of them: set the other to null"),
    ({"ranking": None, "pairs": [["a", "b"], ["b", "c"], ["c", "a"]]},
     "pairs go in a circle, a over b over c over a: drop one of these judgements"),
    ({"responses": []}, "responses: got [], want at least 1 item after validation, not 0"),
    ({"prompt": [{"role": "assistant", "content": "x"}]},
     'prompt: its last turn is "assistant": want turns that end with role "user"'),
    ({"prompt": " \n"}, "prompt: got no text, want at least one turn that says something"),
    ({"prompt": "\ud800"},
     "prompt.0.content: got a lone surrogate (half of a character), want text that UTF-8 can hold"),
    ({"created": "yesterday"}, "created: got 'yesterday', want a time as 2026-05-01T10:00:00Z"),
])  # fmt: skip
def test_a_bad_ranking_says_what_came_and_what_was_wanted(change, message):
    assert problem(Ranking, RANKING | change) == message


def test_ranks_and_pairs_by_hand():
    record = Ranking.model_validate(RANKING)
    assert record.ranks() == [1, 0, 1]
    assert record.pair_list() == [(1, 0), (1, 2)]
    left_out = Ranking.model_validate(RANKING | {"ranking": [["c"], ["a"]]})
    assert left_out.ranks() == [1, -1, 0]
    assert left_out.pair_list() == [(2, 0)]
    task = Ranking.model_validate(RANKING | {"ranking": None})
    assert task.ranks() == [-1, -1, -1] and task.pair_list() == []
    pairs = Ranking.model_validate(RANKING | {"ranking": None, "pairs": [["c", "a"], ["b", "a"], ["c", "a"]]})
    assert pairs.pair_list() == [(1, 0), (2, 0)]
    with pytest.raises(ValueError, match="use pair_list"):
        pairs.ranks()


PAIRS = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]


def verdicts_of(ranks) -> tuple[int, ...]:
    return tuple(0 if ranks[i] == ranks[j] else 1 if ranks[i] < ranks[j] else 2 for i, j in PAIRS)


def test_all_judgements_of_four_responses_against_enumeration():
    weak_orders = {}
    for ranks in product(range(4), repeat=4):
        weak_orders[verdicts_of(ranks)] = [[i for i in range(4) if ranks[i] == r] for r in sorted(set(ranks))]
    assert len(weak_orders) == 75  # the number of weak orders of four things (Fubini)
    seen = {"ranking": 0, "pairs": 0, "cycle": 0}
    for verdicts in product(range(3), repeat=6):
        judgements = [(i, j, v) for (i, j), v in zip(PAIRS, verdicts, strict=True)]
        strict = sorted((i, j) if v == 1 else (j, i) for i, j, v in judgements if v)
        said, more = join_judgements(range(4), strict, [(i, j) for i, j, v in judgements if v == 0])
        assert said["ranking"] == weak_orders.get(verdicts)
        if said["ranking"] is None:
            assert said["pairs"] == list(map(list, strict))
            assert more.get("ties", []) == [[i, j] for i, j, v in judgements if v == 0]
        seen["cycle" if find_cycle(strict) else "pairs" if said["ranking"] is None else "ranking"] += 1
    # 543 acyclic orientations: labelled directed acyclic graphs on four nodes
    assert seen == {"ranking": 75, "pairs": 543 - 75, "cycle": 729 - 543}


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=15))
def test_a_circle_is_found_if_and_only_if_there_is_one(edges):
    reach = {(a, b) for a, b in edges}
    for _ in range(7):
        reach |= {(a, d) for a, b in reach for c, d in reach if b == c}
    cycle = find_cycle(edges)
    assert (cycle is not None) == any(a == b for a, b in reach)
    if cycle:
        assert cycle[0] == cycle[-1] and set(pairwise(cycle)) <= set(edges)


def judged(number: int, better: str, worse: str, tie: bool = False, **more) -> Ranking:
    """One judgement: `better` comes first."""
    record = {
        "id": f"t{number}", "prompt": "Who?", "labeler": "ann", "metadata": {"item": "i-1", "task": number},
        "responses": [{"id": name, "text": name.upper(), "policy": "sft-2"} for name in (better, worse)],
        "ranking": [[better, worse]] if tie else [[better], [worse]],
    }  # fmt: skip
    return Ranking(**record | more)


def joined(*records: Ranking) -> Ranking:
    return join_rankings_of_item(list(records))


def test_judgements_of_one_labeler_become_one_ranking():
    # b over a, b over c, a = c
    record = joined(judged(0, "b", "a", seconds=2), judged(1, "b", "c", seconds=3), judged(2, "c", "a", tie=True))
    assert record.ranking == [["b"], ["a", "c"]] and record.pairs is None
    assert [(r.id, r.text, r.policy) for r in record.responses] == [(x, x.upper(), "sft-2") for x in "bac"]
    assert (record.id, record.labeler, record.seconds) == ("t0", "ann", 5.0)
    assert record.metadata["item"] == "i-1"
    pairs = enumerate((["b", "a"], ["b", "c"], ["c", "a"]))
    assert record.metadata["judgements"] == [{"id": f"t{i}", "responses": two, "task": i} for i, two in pairs]


@given(st.permutations("abcd"), st.randoms(use_true_random=False), st.lists(st.booleans(), min_size=3, max_size=3))
def test_all_pairs_of_an_order_give_back_the_order(order, random, tied):
    """Any weak order, cut into its pairs, which come in any order and either way round."""
    rank = {order[0]: 0}
    for before, name, tie in zip(order, order[1:], tied, strict=False):
        rank[name] = rank[before] + (not tie)
    held = []
    for one, other in random.sample(list(combinations(order, 2)), 6):
        if rank[one] == rank[other] and random.random() < 0.5:
            one, other = other, one
        held.append(judged(len(held), one, other, tie=rank[one] == rank[other]))
    record = joined(*held)
    assert {name: r for r, tie in enumerate(record.ranking) for name in tie} == rank
