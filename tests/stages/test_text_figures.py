"""Figures of responses as text, against hand counts."""

import math

import pytest

from rlhf.evaluation.statistics import distinct, repetition, text_figures


def test_perplexity_is_over_all_tokens_and_a_prompt_is_the_unit():
    # 2 prompts with 1 response of 2 and 6 tokens: -(-2 - 10) / 8 = 1.5 nats per token
    figures = text_figures([["a b"], ["a b"]], [[2], [6]], [[-2.0], [-10.0]])
    assert figures["perplexity"]["value"] == pytest.approx(math.exp(1.5), abs=1e-3)
    assert figures["tokens"]["value"] == 4.0 and figures["words"]["value"] == 2.0


def test_repeated_and_different_ngrams_are_counted_over_the_first_responses():
    figures = text_figures(
        [["the cat sat", "x"], ["The cat sat", "y"], ["a dog ran", "z"]], [[3, 1]] * 3, [[-3.0, -1.0]] * 3
    )
    assert figures["repeated"]["value"] == pytest.approx(2 / 3, abs=1e-4)
    assert figures["distinct_1"]["value"] == pytest.approx(6 / 9, abs=1e-4)  # the cat sat a dog ran, of 9
    assert figures["distinct_2"]["value"] == pytest.approx(4 / 6, abs=1e-4)


def test_the_interval_of_different_ngrams_is_the_jackknifes():
    # Rows {a}, {a}, {b}: 2 of 3. Without each: 2/2, 2/2, 1/2; mean 5/6, squares 1/36 + 1/36 + 4/36 = 1/6;
    # 2/3 x 1/6 = 1/9, so the standard error is 1/3
    assert distinct([[("a",)], [("a",)], [("b",)]]) == {"value": 0.6667, "ci95": [0.0133, 1.32], "n": 3}


def test_a_response_that_says_a_triple_twice_repeats_itself():
    assert repetition(["so", "so", "so", "so", "so"]) == pytest.approx(2 / 3)  # 3 triples, 1 kind
    assert repetition(["a", "b", "c", "d"]) == repetition(["a"]) == 0.0
