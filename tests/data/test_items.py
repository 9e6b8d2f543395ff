"""Comparisons as items: one per prompt, with all its answers, whoever judged them, in tokens that fit."""

import pytest

from rlhf.data import encoding as module
from rlhf.data.chat_template import decode_response, encode_prompt, encode_response
from rlhf.data.encoding import join_rankings, token_encoder
from rlhf.data.records import Ranking
from rlhf.data.tokenizer import END, encode_texts

from .ranked import make_items

PROMPT = "Name a colour."
TEXTS = ("Blue.", "Green is a colour.", "The cat.")


def ranking(*order: str | list[str], labeler="x", prompt=PROMPT, texts=TEXTS, **keys) -> Ranking:
    """A ranking of responses a, b, c, best first; a list is a tie."""
    responses = [{"id": chr(97 + i), "text": text, "metadata": {}} for i, text in enumerate(texts)]
    given = [one if isinstance(one, list) else [one] for one in order]
    record = {"id": f"r-{labeler}", "prompt": prompt, "responses": responses, "ranking": given}
    return Ranking.model_validate(record | {"labeler": labeler} | keys)


def test_an_item_is_a_prompt_with_all_its_answers_in_whichever_order_labelers_saw_them(tokenizer):
    [item], unpaired = make_items([ranking("b", "a", "c")], tokenizer, context_length=64, room=32)
    prompt = encode_prompt(tokenizer, PROMPT)
    answers = [encode_response(tokenizer, text) for text in TEXTS]
    assert item.rows == [prompt + answer for answer in answers]
    assert item.lengths == [len(answer) for answer in answers]
    assert all(row[-1] == tokenizer.convert_tokens_to_ids(END) for row in item.rows)
    assert item.pairs() == [(0, 2), (1, 0), (1, 2)]  # b over a, b over c, a over c
    assert item.weights().tolist() == [[0, 0, 1], [1, 0, 1], [0, 0, 0]]
    assert unpaired == 0
    texts = ("Blue.", "Green is a colour.", "The cat.")
    turned = ("The cat.", "Blue.", "Green is a colour.")
    records = [ranking("a", "b", "c", texts=texts), ranking("a", "b", "c", texts=turned, labeler="y")]
    [item], _ = make_items(records, tokenizer, 64, 32)
    assert [text for text, _ in item.answers] == list(texts) and len(item.rows) == 3
    # x: blue > green > cat; y: cat > blue > green
    assert item.weights().tolist() == [[0, 2, 1], [0, 0, 1], [1, 1, 0]]


def test_an_item_grows_no_larger_than_fits_a_forward(tokenizer, monkeypatch):
    monkeypatch.setattr(module, "MOST_ANSWERS", 5)
    records = [ranking("a", "b", texts=(f"Blue {i}.", f"Green {i}."), labeler=str(i)) for i in range(5)]
    items, _ = make_items(records, tokenizer, 64, 32)
    assert [len(item.rows) for item in items] == [4, 4, 2] and len({item.key for item in items}) == 3
    assert [j.labeler for item in items for j in item.judgements] == list("01234")


def test_gaps_are_differences_of_rank_and_equal_answers_say_nothing(tokenizer):
    [item], _ = make_items([ranking("c", "a", "b"), ranking(ranking=None, pairs=[["a", "b"]])], tokenizer, 64, 32)
    ranked, paired = item.judgements
    assert ranked.gap_of == {(0, 1): 1, (2, 0): 1, (2, 1): 2} and paired.gap_of == {(0, 1): None}
    same = ranking("a", "b", "c", texts=("Blue.", "Blue.", "Red."))
    [item], _ = make_items([same], tokenizer, 64, 32)
    assert len(item.rows) == 2 and item.pairs() == [(0, 1)]
    assert make_items([ranking("a", "b", texts=("Blue.", "Blue."))], tokenizer, 64, 32) == ([], 1)


def test_answers_that_are_equal_up_to_where_they_are_cut_teach_nothing():
    def encode(prompt, answers):
        rows = [list(map(ord, text[:6])) for text, _ in answers]
        return rows, list(map(len, rows))

    texts = ("Blue skies.", "Blue sky.", "Red.")
    [item], _ = join_rankings([ranking("a", "b", "c", texts=texts)], encode)
    assert item.pairs() == [(0, 2), (1, 2)] and item.weights().tolist() == [[0, 0, 1], [0, 0, 1], [0, 0, 0]]


def test_labelers_count_by_their_weights(tokenizer):
    records = [ranking("a", "b", "c", labeler="x"), ranking("b", "a", labeler="y"), ranking("c", "a", labeler=None)]
    encode = token_encoder(tokenizer, 64, 32)
    [item], unpaired = join_rankings(records, encode, {"x": 2.0, "y": 0.5})
    assert item.weights().tolist() == [[0, 2, 2], [0.5, 0, 2], [1, 0, 0]] and unpaired == 0
    [item], unpaired = join_rankings(records, encode, {"x": 0.0})
    assert [j.labeler for j in item.judgements] == ["y", None] and len(item.rows) == 3 and unpaired == 1
    assert join_rankings(records[:1], encode, {"x": 0.0}) == ([], 1)


@pytest.mark.parametrize("record", [ranking(["a", "b", "c"]), ranking("a"), ranking(ranking=None)])
def test_a_ranking_without_an_ordered_pair_gives_no_item(tokenizer, record):
    assert make_items([record], tokenizer, 64, 32) == ([], 1)
    items, unpaired = make_items([record, ranking("a", "b", "c", labeler="y")], tokenizer, 64, 32)
    assert [item.pairs() for item in items] == [[(0, 1), (0, 2), (1, 2)]] and unpaired == 1


def test_what_does_not_fit_is_truncated_and_a_long_prompt_is_cut_from_the_left(tokenizer):
    long = "The cat sat on the mat, and the dog sat by the door. " * 3
    [item], _ = make_items([ranking("a", "b", texts=("Blue.", long))], tokenizer, 32, 16)
    whole = encode_prompt(tokenizer, PROMPT) + encode_response(tokenizer, long)
    assert len(whole) > 32 and item.rows[1] == whole[:32]
    assert item.rows[0][-1] == tokenizer.convert_tokens_to_ids(END) != item.rows[1][-1]
    assert item.lengths[1] == 32 - len(encode_prompt(tokenizer, PROMPT))  # as long as the model sees it
    prompt = "The cat sat on the mat, and the dog sat by the door. " * 3 + PROMPT
    [item], _ = make_items([ranking("a", "b", "c", prompt=prompt)], tokenizer, 32, 16)
    answer = encode_response(tokenizer, TEXTS[0])
    kept = item.rows[0][: -len(answer)]
    assert item.rows[0][-len(answer) :] == answer and len(kept) == 32 - 16
    assert kept[0] == encode_prompt(tokenizer, PROMPT)[0]  # the role token stays
    tail = encode_texts(tokenizer, [prompt])[0][-5:]
    assert kept[-len(tail) - 2 : -2] == tail and decode_response(tokenizer, tail).endswith("colour.")
