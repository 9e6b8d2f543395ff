import math

import numpy as np
import pytest

from rlhf.data.agreement import ratio_interval
from rlhf.evaluation.policies import Answer
from rlhf.evaluation.statistics import distinct, interval, length_controlled, show, text_figures, wilson, win_rate


def answers(texts, lengths):
    return [[Answer(*one) for one in zip(row, [True] * 9, [[0] * n for n in of], [[]] * 9, strict=False)]
            for row, of in zip(texts, lengths, strict=True)]  # fmt: skip


def test_intervals_of_means_and_ratios_by_hand():
    # mean 2.5; variance 3 * (2.25 + .25 + .25 + 2.25) / 11 = 1.3636; 1.96 * sqrt(1.3636 / 12) = .6607
    assert interval([1, 2, 3, 4] * 3) == {"value": 2.5, "ci95": [1.8393, 3.1607], "n": 12}
    # 24 of 40 = .6; residuals 1 - .6 * 2 = -.2, 3 - .6 * 4 = .6, 2 - .6 * 4 = -.4: squares add up to 4 * .56
    # 1.96 * sqrt(12/11 * 2.24) / 40 = 1.96 * 1.56321 / 40 = .0766
    assert ratio_interval([1, 3, 2] * 4, [2, 4, 4] * 4) == {"value": 0.6, "ci95": [0.5234, 0.6766], "n": 40}


def test_fewer_than_ten_prompts_have_no_interval():
    assert interval([1, 2, 3] * 3) == {"value": 2.0, "ci95": None, "n": 9} and interval([1, 2] * 5)["ci95"] is not None
    assert show(interval([1, 2, 3] * 3)) == "2.000"
    rows = [["the cat sat"], ["a dog ran"]] * 4
    few = text_figures(answers(rows, [[3]] * 8), [[-3.0]] * 8)
    assert all(figure["ci95"] is None for figure in few.values())
    assert length_controlled([[1.0], [0.0], [0.5]] * 3, [[-1.0], [1.0], [0.0]] * 3)["ci95"] is None


def test_the_interval_of_a_share_near_its_edges_is_wilsons():
    """Of 20 comparisons all are won, or all but one; of 20 prompts with four comparisons each, which agree: the same."""
    for right in (20, 19, 0, 1):
        won = [1.0] * right + [0.0] * (20 - right)
        low, high = wilson(right, 20)["ci95"]
        assert interval(won, share=True)["ci95"] == pytest.approx([low, high], abs=0.01)
        assert 0 <= low < high <= 1
        assert ratio_interval([4 * one for one in won], [4.0] * 20, share=True)["ci95"] == interval(won, True)["ci95"]
    assert interval([1.0] * 20, share=True)["ci95"] == pytest.approx(wilson(20, 20)["ci95"], abs=1e-4)
    middle = [1.0] * 10 + [0.0] * 10
    assert interval(middle, share=True) == interval(middle), "in the middle it is the normal one"
    assert win_rate([[2]] * 12, [[1]] * 12)["ci95"] == pytest.approx(wilson(12, 12)["ci95"], abs=1e-4)


def test_the_prompt_is_the_unit():
    # The same 40 comparisons, all right or all wrong within a prompt, are only 10 observations.
    apart = ratio_interval([1.0] * 24 + [0.0] * 16, [1.0] * 40)
    together = ratio_interval([4.0, 4.0, 4.0, 0.0, 0.0] * 2, [4.0] * 10)
    assert apart["value"] == together["value"] == 0.6
    widths = [(high - low) / 2 for low, high in (apart["ci95"], together["ci95"])]
    # 1.96 * sqrt(.24 / 39) and 1.96 * sqrt(.24 / 9)
    assert widths == pytest.approx([1.96 * math.sqrt(0.24 / 39), 1.96 * math.sqrt(0.24 / 9)], abs=1e-4)


def test_win_rate_by_hand():
    # prompt 1: 2 beats 1, loses to 3; 1 ties 1, loses to 3: (1 + 0 + .5 + 0) / 4 = .375
    # prompt 2: 5 beats 1 and 4: 1; mean .6875; of ten of each: variance 20/19 * .3125^2 = .1028; 1.96 * sqrt(.1028 / 20) = .1405
    found = win_rate([[2, 1], [5]] * 10, [[1, 3], [1, 4]] * 10)
    assert found == {"value": 0.6875, "ci95": [0.547, 0.828], "n": 20}
    scores = [[0.1, 0.2, 0.2], [0.9], [0.5, 0.5]]
    assert win_rate(scores, scores) == {"value": 0.5, "ci95": None, "n": 3}
    assert win_rate([[0.1 + 0.2]], [[0.3]])["value"] == 0.5, "rounding is no win"
    assert win_rate([[0.3 + 1e-6]], [[0.3]])["value"] == 1.0


def test_judges_who_pay_for_length_are_even_at_equal_length():
    import statsmodels.api as sm  # which takes a second

    rng = np.random.default_rng(0)
    d = rng.normal(2, 3, 2000)
    points = (rng.random(2000) < 1 / (1 + np.exp(-d))).astype(float)
    raw, controlled = points.mean(), length_controlled(points[:, None].tolist(), d[:, None].tolist())
    assert raw > 0.65
    assert controlled["ci95"][0] < 0.5 < controlled["ci95"][1]
    fit = sm.GLM(points, sm.add_constant(d / d.std()), family=sm.families.Binomial()).fit(cov_type="HC0")
    low, high = fit.conf_int()[0]
    assert controlled["value"] == pytest.approx(1 / (1 + np.exp(-fit.params[0])), abs=1e-3)
    assert controlled["ci95"] == pytest.approx([1 / (1 + np.exp(-low)), 1 / (1 + np.exp(-high))], abs=1e-3)
    # The longer answer always wins, and ours is the longer one in four of five comparisons.
    d = np.random.default_rng(1).integers(-5, 21, (300, 2)).astype(float)
    points = np.where(d > 0, 1.0, np.where(d < 0, 0.0, 0.5))
    assert points.mean() > 0.75
    assert length_controlled(points.tolist(), d.tolist())["value"] == pytest.approx(0.5, abs=0.03)


def test_length_control_by_hand():
    """d is -1 for three prompts, of which one is won, and +1 for four, of which three are: log-odds of -log 2 and log 3, so that
    a = (log 3 - log 2) / 2 and the win rate at equal length is sqrt(1.5) / (1 + sqrt(1.5)) = 0.5505; raw it is 4 / 7."""
    points, d = [[1], [0], [0], [1], [1], [1], [0]], [[-1], [-1], [-1], [1], [1], [1], [1]]
    found = length_controlled([[float(p) for p in row] for row in points], d)
    assert found["value"] == pytest.approx(0.5505, abs=1e-3) and found["n"] == 7


@pytest.mark.parametrize("point", [1.0, 0.5, 0.0])
def test_length_control_has_a_value_where_one_side_always_wins(point):
    found = length_controlled([[point]] * 20, [[-1.0], [1.0]] * 10)
    assert 0 <= found["ci95"][0] <= found["value"] <= found["ci95"][1] <= 1
    assert (found["value"] - 0.5) * (point - 0.5) >= 0
    assert point == 0.5 or found["ci95"][1] - found["ci95"][0] > 0.01


def test_perplexity_is_over_all_tokens_and_a_prompt_is_the_unit():
    # 2 prompts with 1 response of 2 and 6 tokens: -(-2 - 10) / 8 = 1.5 nats per token
    figures = text_figures(answers([["a b"], ["a b"]], [[2], [6]]), [[-2.0], [-10.0]])
    assert figures["perplexity"]["value"] == pytest.approx(math.exp(1.5), abs=1e-3)
    assert figures["tokens"]["value"] == 4.0 and figures["words"]["value"] == 2.0


def test_different_ngrams_by_hand_and_the_jackknife_interval():
    texts = [["the cat sat", "x"], ["The cat sat", "y"], ["a dog ran", "z"]]
    figures = text_figures(answers(texts, [[3, 1]] * 3), [[-3.0, -1.0]] * 3)
    assert figures["distinct_1"]["value"] == pytest.approx(6 / 9, abs=1e-4)  # the cat sat a dog ran, of 9
    assert figures["distinct_2"]["value"] == pytest.approx(4 / 6, abs=1e-4)
    # Eleven rows {a}, one {b}: 2 of 12. Without one: 2/11 eleven times, 1/11; mean 23/132, squares (11 + 121) / 132^2 = 1/132;
    # 11/12 x 1/132 = 1/144, so the standard error is 1/12
    assert distinct([[("a",)]] * 11 + [[("b",)]]) == {"value": 0.1667, "ci95": [0.0033, 0.33], "n": 12}
    assert distinct([[("a",)]] * 2 + [[(str(i),)] for i in range(10)])["ci95"][1] == 1.0, "a share"
    assert distinct([[(str(i),)] for i in range(12)]) == {"value": 1.0, "ci95": None, "n": 12}, "no row differs"


def test_an_interval_of_repetition_has_no_negative_end():
    # one of 41 repeats a quarter of its 3-grams
    texts = [["a b c a b c"], *([f"{n} {n + 1} {n + 2}"] for n in range(40))]
    repeats = text_figures(answers(texts, [[3]] * 41), [[-3.0]] * 41)["repetition"]
    assert repeats["value"] == pytest.approx(0.25 / 41, abs=1e-4) and 0 < repeats["ci95"][0] < repeats["value"]
