import pytest

from rlhf.config.commands import ImportConfig
from rlhf.data.cleaning import DUPLICATE, FILTERED, KEPT, Cleaner, Facts, facts_of, find_pii
from rlhf.data.records import Ranking

RANKING = {
    "id": "r-1", "prompt": "Which one?", "ranking": [["b"], ["a", "c"]], "labeler": "ann",
    "responses": [{"id": "a", "text": "one"}, {"id": "b", "text": "two"}, {"id": "c", "text": "three"}],
}  # fmt: skip


def identity(record, own_id: bool = True) -> int:
    return facts_of(record, own_id, seed=0).identity


@pytest.mark.parametrize(("text", "found"), [
    ("write to ann.lee+x@mail.example.co.uk today", {"email"}), ("@ann, look at a@b", set()),
    ("call +49 30 901820 or", {"phone"}), ("call (212) 555-0123.", {"phone"}), ("call 212-555-0123", {"phone"}),
    ("ring 030 9018 2034 now", {"phone"}), ("+15551234567", {"phone"}), ("2024-01-05 555-123-4567", {"phone"}),
    ("4111 1111 1111 1111", {"card"}), ("4111 1111 1111 1111 12/27 123", {"card"}),
    ("my card is 5500-0000-0000-0004, call 212-555-0123", {"card", "phone"}),
    ("2024-01-05 12 30, 2024-01-05 10-11", set()), ("on 2024-01-02 at 10:30:15, 1000000000 people", set()),
    ("4111 1111 1111 1112", set()),  # the check digit is wrong
    ("0000 0000 0000 0000", set()), ("pi is 3.14159265358979", set()), ("192.168.100.200 and 10.0.0.1", set()),
    ("1990 - 2000, pages 100-200", set()), ("x = 12345678", set()), ("nothing here", set()),
])  # fmt: skip
def test_pii(text, found):
    assert find_pii(text) == found


def test_content_alone_makes_a_duplicate():
    one = Ranking(**RANKING)
    same = {"id": "r-2", "seconds": 3, "created": "2026-05-01T10:00:00Z", "metadata": {"n": 1}}
    assert identity(Ranking(**RANKING | same)) == identity(one)
    renamed = [{"id": name.upper(), "text": r["text"]} for name, r in zip("abc", RANKING["responses"], strict=True)]
    assert identity(Ranking(**RANKING | {"responses": renamed, "ranking": [["B"], ["C", "A"]]})) == identity(one)
    for change in (
        {"labeler": "bob"}, {"labeler": None}, {"prompt": "Which one"}, {"ranking": [["b"], ["a"], ["c"]]},
        {"ranking": None, "pairs": [["b", "a"]]}, {"ratings": {"a": 3}}, {"flags": {"a": ["x"]}},
        {"responses": [*RANKING["responses"][:2], {"id": "c", "text": "four"}]},
    ):  # fmt: skip
        assert identity(Ranking(**RANKING | change)) != identity(one), change


def test_two_unnamed_people_may_agree():
    unnamed = [Ranking(**RANKING | {"labeler": None, "id": name}) for name in ("r-1", "r-2")]
    assert identity(unnamed[0]) != identity(unnamed[1]), "the file tells them apart"
    assert identity(unnamed[0], own_id=False) == identity(unnamed[1], own_id=False), "nothing does"


def test_the_steps_of_cleaning():
    cleaner = Cleaner(ImportConfig(duplicates="drop", pii="drop", filter_prefixes=True, max_prompts_per_user=2))

    def judge(kind: str, identity: int, prefix: int, user: int, pii: bool, by: Cleaner = cleaner) -> int:
        return by.judge(Facts(kind, identity, 0, prefix, user, pii=("email",) if pii else ()))

    # (kind, identity, prefix, user, pii)
    assert judge("prompt", 1, 10, 7, 0) == KEPT
    assert judge("prompt", 1, 10, 7, 0) == DUPLICATE
    assert judge("prompt", 2, 10, 7, 0) == FILTERED, "begins as the first one"
    assert judge("prompt", 3, 11, 7, 1) == FILTERED, "pii=drop"
    assert judge("prompt", 4, 12, 7, 0) == KEPT
    assert judge("prompt", 5, 13, 7, 0) == FILTERED, "the user's third prompt"
    assert judge("demonstration", 6, 10, 7, 0) == KEPT, "only prompts are filtered by user and by beginning"
    assert judge("prompt", 7, 14, 0, 0) == KEPT, "no user"
    assert cleaner.counts == {"duplicates": 1, "pii": 1, "shared_prefix": 1, "prompts_of_user": 1, "gold_accuracy": 0}
    keeping = Cleaner(ImportConfig(duplicates="keep", pii="flag", filter_prefixes=False, max_prompts_per_user=9))
    assert [judge("prompt", 1, 1, 1, 1, by=keeping) for _ in range(3)] == [KEPT] * 3
