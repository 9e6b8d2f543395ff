"""Comparisons as items: one a prompt with all its answers, whoever judged them, in tokens that fit."""

import pytest

from rlhf.data.items import make_items
from rlhf.data.records import Ranking
from rlhf.tokenizer import END, decode_response, encode_prompt, encode_response, encode_text, special_id

PROMPT = "Name a colour."
TEXTS = ("Blue.", "Green is a colour.", "The cat.")


def ranking(*order: str | list[str], labeler="x", prompt=PROMPT, texts=TEXTS, **keys) -> Ranking:
    """A ranking of responses a, b, c, best first; a list is a tie."""
    responses = [{"id": chr(97 + i), "text": text, "metadata": {}} for i, text in enumerate(texts)]
    given = [one if isinstance(one, list) else [one] for one in order]
    record = {"id": f"r-{labeler}", "prompt": prompt, "responses": responses, "ranking": given}
    return Ranking.model_validate(record | {"labeler": labeler} | keys)


def test_an_item_is_a_prompt_with_all_its_answers(tokenizer):
    [item], unpaired = make_items([ranking("b", "a", "c")], tokenizer, context_length=64, room=32)
    prompt = encode_prompt(tokenizer, PROMPT)
    answers = [encode_response(tokenizer, text) for text in TEXTS]
    assert item.rows == [prompt + answer for answer in answers]
    assert item.lengths == [len(answer) for answer in answers]
    assert all(row[-1] == special_id(tokenizer, END) for row in item.rows)
    assert item.pairs() == [(0, 2), (1, 0), (1, 2)]  # b over a, b over c, a over c
    assert item.weights() == [[0, 0, 1], [1, 0, 1], [0, 0, 0]]
    assert unpaired == 0


def test_several_labelers_of_the_same_answers_share_an_item(tokenizer):
    records = [
        ranking("a", "b", "c", labeler="x"),
        ranking("a", ["b", "c"], labeler="y"),
        ranking("b", "a", labeler="z"),
    ]
    [item], unpaired = make_items(records, tokenizer, 64, 32)
    # a over b: x, y; b over a: z; a over c: x, y; b over c: x
    assert item.weights() == [[0, 2, 2], [1, 0, 1], [0, 0, 0]]
    assert item.records == records and len(item.pairs()) == 6 and unpaired == 0


def test_other_answers_or_another_prompt_make_another_item(tokenizer):
    records = [
        ranking("a", "b", "c"),
        ranking("a", "b", "c", texts=("Blue.", "Green is a colour.", "The dog.")),
        ranking("a", "b", "c", prompt="Name a color."),
    ]
    items, _ = make_items(records, tokenizer, 64, 32)
    assert [item.records for item in items] == [[record] for record in records]
    assert len({item.key for item in items}) == 3


def test_pairs_that_are_no_ranking_count_too(tokenizer):
    record = ranking(ranking=None, pairs=[["a", "b"], ["c", "b"]])
    [item], _ = make_items([record], tokenizer, 64, 32)
    assert item.pairs() == [(0, 1), (2, 1)]


@pytest.mark.parametrize("record", [ranking(["a", "b", "c"]), ranking("a"), ranking(ranking=None)])
def test_a_ranking_without_an_ordered_pair_gives_no_item(tokenizer, record):
    assert make_items([record], tokenizer, 64, 32) == ([], 1)
    items, unpaired = make_items([record, ranking("a", "b", "c", labeler="y")], tokenizer, 64, 32)
    assert [item.pairs() for item in items] == [[(0, 1), (0, 2), (1, 2)]] and unpaired == 1


def test_a_response_that_was_cut_off_has_no_end_token(tokenizer):
    responses = [{"id": "a", "text": "Blue", "metadata": {"ended": False}}, {"id": "b", "text": "Blue"}]
    [item], _ = make_items([ranking("b", "a", responses=responses)], tokenizer, 64, 32)
    end = special_id(tokenizer, END)
    assert item.rows[0] + [end] == item.rows[1] and item.lengths[0] + 1 == item.lengths[1]


def test_what_does_not_fit_is_truncated_and_then_has_no_end_token(tokenizer):
    long = "The cat sat on the mat, and the dog sat by the door. " * 3
    [item], _ = make_items([ranking("a", "b", texts=("Blue.", long))], tokenizer, 32, 16)
    whole = encode_prompt(tokenizer, PROMPT) + encode_response(tokenizer, long)
    assert len(whole) > 32 and item.rows[1] == whole[:32]
    assert item.rows[0][-1] == special_id(tokenizer, END) != item.rows[1][-1]
    assert item.lengths[1] == len(encode_response(tokenizer, long))  # as long as its author made it


def test_a_long_prompt_is_cut_from_the_left_and_leaves_room(tokenizer):
    prompt = "The cat sat on the mat, and the dog sat by the door. " * 3 + PROMPT
    [item], _ = make_items([ranking("a", "b", "c", prompt=prompt)], tokenizer, 32, 16)
    answer = encode_response(tokenizer, TEXTS[0])
    kept = item.rows[0][: -len(answer)]
    assert item.rows[0][-len(answer) :] == answer and len(kept) == 32 - 16
    assert kept[0] == encode_prompt(tokenizer, PROMPT)[0]  # the role token stays
    tail = encode_text(tokenizer, prompt)[-5:]
    assert kept[-len(tail) - 2 : -2] == tail and decode_response(tokenizer, tail).endswith("colour.")


def test_a_prompt_for_which_there_is_no_room_gives_no_item(tokenizer):
    assert make_items([ranking("a", "b", "c")], tokenizer, 16, 14) == ([], 1)


def test_no_record_gives_no_item(tokenizer):
    assert make_items([], tokenizer, 64, 32) == ([], 0)
