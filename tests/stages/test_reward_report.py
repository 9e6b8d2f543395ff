"""The figures of the reward model: by hand, against other libraries, and as evaluation writes them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data.chat_template import encode_prompt, encode_response
from rlhf.data.encoding import Item, Judgement
from rlhf.evaluation import reward_report as report
from rlhf.evaluation.reward_report import gold_regression
from rlhf.evaluation.scoring import accuracy, judged_pairs
from rlhf.evaluation.statistics import mean_by
from rlhf.gold.truth import WEIGHTS, Requests, utilities
from rlhf.model.classifier import load_reward_model

from ..data.ranked import make_items
from .test_reward import make_ranking

CPU = torch.device("cpu")


def item(key: str, lengths: list[int], *judgements: tuple[str, list[list[int]]]) -> Item:
    """Answers of given lengths, each labeler's ranking best first."""
    made = []
    for labeler, order in judgements:
        rank = {i: r for r, tie in enumerate(order) for i in tie}
        pairs = sorted((i, j) for i in rank for j in rank if rank[i] < rank[j])
        made.append(Judgement(labeler, pairs, gap_of={(i, j): rank[j] - rank[i] for i, j in pairs}))
    return Item(key, [[1]] * len(lengths), lengths, judgements=made)


ITEMS = [item("1", [3, 5, 4], ("x", [[0], [1], [2]]), ("y", [[1], [0, 2]])), item("2", [2, 2], ("x", [[1], [0]]))]
SCORES = [[2.0, 1.0, 1.5], [0.5, 0.5]]


def test_accuracy_by_hand_and_by_gap_in_rank():
    # x on 1: 0>1 right, 0>2 right, 1>2 wrong; y: 1>0 wrong, 1>2 wrong; x on 2: equal scores, half: 2.5 of 6
    pairs = judged_pairs(ITEMS, SCORES)
    found = accuracy(pairs)
    assert found["value"] == round(2.5 / 6, 4) and found["n"] == 6
    assert found["ci95"] is None, "of two prompts"
    # gap 1: x: 0>1 right, 1>2 wrong, on item 2 half; y: 1>0 and 1>2 wrong: 1.5 of 5. gap 2: x: 0>2 right
    rows = report.comparison_figures([], set(), (ITEMS, SCORES), gain=1.0)["by_rank_gap"]
    assert [(row["gap"], row["value"], row["n"]) for row in rows] == [(1, 0.3, 5), (2, 1.0, 1)]
    unranked = Item("3", [[1]] * 2, [1, 1], judgements=[Judgement("x", [(0, 1)])])
    assert report.comparison_figures([], set(), ([unranked], [[1.0, 0.0]]), gain=1.0)["by_rank_gap"] == []


def test_calibration_curve_by_hand():
    """Scores are twice the raw ones. Gaps 0.2 (won), 1.2 (lost) and 1.4 (won), the latter two in one bin."""
    items = [item("1", [1, 1, 1], ("x", [[0], [1], [2]]))]  # 0>1, 0>2, 1>2
    scores = [[0.2, 0.0, 1.4]]  # 0 over 1 by .2; 0 over 2 by -1.2; 1 over 2 by -1.4
    found = report.comparison_figures([], set(), (items, scores), gain=2.0)
    low, high = found["calibration"]
    assert (low["gap"], low["n"], low["observed"]) == (0.2, 1, 1.0)
    assert low["predicted"] == pytest.approx(1 / (1 + math.exp(-0.1)), abs=1e-4)
    assert (high["gap"], high["n"], high["observed"]) == (1.3, 2, 0.0)
    assert high["predicted"] == pytest.approx((1 / (1 + math.exp(-0.6)) + 1 / (1 + math.exp(-0.7))) / 2, abs=1e-4)
    wanted = (abs(low["predicted"] - 1) + 2 * high["predicted"]) / 3
    assert found["calibration_error"] == pytest.approx(wanted, abs=1e-4)


def test_agreement_of_training_and_of_held_out_labelers():
    """a and b agree on all 3 pairs; c is held out, and d, who judged something else alone."""
    texts = ["Red.", "Blue.", "Green."]
    records = [
        make_ranking(n, "Say.", texts, o, n)
        for n, o in (("a", [[0], [1], [2]]), ("b", [[0], [1], [2]]), ("c", [[0], [2], [1]]))
    ]
    records.append(make_ranking("d", "Else.", texts, [[0], [1], [2]], "d"))
    found = report.comparison_figures(records, {"c", "d"}, (ITEMS, SCORES), gain=1.0)["agreement"]
    assert (found["training"]["value"], found["training"]["pairs"]) == (1.0, 3)
    assert found["held_out"]["value"] is None


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 1)), min_size=1, max_size=50))
def test_intervals_of_shares_stay_within_0_and_1(parts):
    found = mean_by([key for key, _ in parts], [float(right) for _, right in parts], share=True)
    low, high = found["ci95"] or (0, 1)
    assert (found["ci95"] is None) == (len({key for key, _ in parts}) < 10)
    assert 0 <= low <= found["value"] <= high <= 1


def test_weights_by_hand_and_a_column_that_never_varies_has_none():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 3)) * [1.0, 5.0, 0.2] + [0.0, 3.0, 1.0]
    x[:, 1] = 1.0
    y = 2.0 * x[:, 0] - 7.0 * x[:, 2]
    judged = [[dict(zip("abc", row, strict=True))] for row in x.tolist()]
    found = [row["weight"] for row in gold_regression("abc", judged, y[:, None].tolist()).values()]
    assert found == pytest.approx([2.0 * x[:, 0].std() / y.std(), None, -7.0 * x[:, 2].std() / y.std()], abs=1e-4)
    assert all(row["weight"] is None for row in gold_regression("abc", judged, [[1.0]] * 500).values())


def test_a_reward_that_is_the_labelers_taste_shows_their_weights(gold_run):
    truth, noise = Requests(), gold_run.config().gold.labeler_noise
    items, _ = make_items(gold_run.comparisons(), gold_run.tokenizer(), 128, 24)
    wanted = [utilities(truth, noise, one.record, one.answers) for one in items]
    judged = [[truth.judge(one.record, *answer) for answer in one.answers] for one in items]
    found = gold_regression(truth.parts, judged, [[0.3 * u + 1 for u in row] for row in wanted])
    assert found == gold_regression(truth.parts, judged, wanted)
    assert set(found) == set(WEIGHTS) and any(row["weight"] is not None for row in found.values())


def test_the_figures_are_the_models_own(gold_run):
    """Recomputed from the saved model, one response at a time: the accuracy on training labelers and held-out ones."""
    results, tokenizer = gold_run.results()["reward_model"], gold_run.tokenizer()
    model = load_reward_model(gold_run.folder / "reward" / "model", CPU)
    right, count = {True: 0.0, False: 0.0}, {True: 0, False: 0}
    for record in gold_run.comparisons():
        if record.metadata["split"] != "test":
            continue
        prompt = encode_prompt(tokenizer, record.prompt)
        scores = []
        for response in record.responses:
            row = prompt + encode_response(tokenizer, response.text, ended=response.metadata["ended"])
            with torch.no_grad():
                scores.append(model(torch.tensor([row]), torch.tensor([len(row)])).item())
        held_out = record.labeler in ("labeler-6", "labeler-7")
        for i, j in record.pair_list():
            right[held_out] += scores[i] > scores[j]
            count[held_out] += 1
    for held_out, wanted in ((False, results["accuracy"]), (True, results["held_out_labelers"]["accuracy"])):
        assert count[held_out] == wanted["n"]
        assert right[held_out] / count[held_out] == pytest.approx(wanted["value"], abs=2e-3)


def test_accuracy_by_labeler_and_above_length():
    items = [item("1", [1, 2, 3], ("x", [[0], [1], [2]]), ("y", [[2], [1], [0]]))]
    found = report.comparison_figures([], {"y"}, (items, [[3.0, 2.0, 1.0]]), gain=1.0)
    assert {name: (row["value"], row["n"], row["held_out"]) for name, row in found["by_labeler"].items()} == {
        "x": (1.0, 3, False),
        "y": (0.0, 3, True),
    }
    # of x, a labeler of the training data, the shorter answer is always the better one
    assert (found["length_prefers"], found["length_baseline"], found["above_length"]["value"]) == ("shorter", 1.0, 0.0)
