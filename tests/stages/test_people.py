"""People as judges of policies, with simulated labelers of the gold world: their figures tend to the gold measures, a judge's many
verdicts narrow them as its correlation predicts, and tasks of several policies are blind."""

import json
import math
import random
from collections import Counter

import numpy as np
import pytest

from rlhf.commands.sample import run as sample
from rlhf.data.reading import load_comparisons
from rlhf.data.records import PromptRecord
from rlhf.errors import UserError
from rlhf.evaluation.judging import people_figures, policy_names
from rlhf.evaluation.statistics import interval, prediction_powered, win, win_rate
from rlhf.gold.corpus import prompt_rows
from rlhf.gold.truth import DEMONSTRATION_MIX, TASTE, Labeler, Requests, answer, judge, pick_style, rank_responses
from rlhf.gold.world import Task
from rlhf.report.sections import tables_of
from rlhf.stages.evaluate import run as evaluate

POLICIES = {"x/a": {"good": 0.6, "plain": 0.4}, "x/b": DEMONSTRATION_MIX, "x/c": {"rude": 0.5, "wrong": 0.5}}


@pytest.fixture(scope="module")
def answered():
    """600 prompts, each with one answer of each policy, and the gold scores of the answers."""
    rng, found = random.Random(0), []
    for row in prompt_rows(0, 0, {"test": 600}):
        task = Task(**row["metadata"]["gold"])
        texts = [answer(task, pick_style(mix, rng), rng) for mix in POLICIES.values()]
        found.append((row["prompt"], texts, [judge(task, text) for text in texts]))
    return found


def labelled(answered, labelers, seed=0):
    rng, records = random.Random(seed), []
    for i, (prompt, texts, judged) in enumerate(answered):
        given, labeler = PromptRecord(id=str(i), prompt=prompt), rng.choice(labelers)
        record = rank_responses(given, judged, [(text, True) for text in texts], labeler, rng, policy="")
        for response, name in zip(record.responses, POLICIES, strict=True):
            response.policy = f"{name}@12345678"
        record.flags = {r.id: ["wrong"] for r, x in zip(record.responses, judged, strict=True) if x["correct"] < 0.5}
        records.append(record)
    return records


def errors(answered, noise):
    """How far people's figures are from the gold ones: of win rates, of ratings, and of the share of wrong answers."""
    figures = people_figures(rows := labelled(answered, [Labeler("o", TASTE, 0.0, 0.0, noise)]), policy_names(rows))
    totals = {name: [[judged[i]["total"]] for _, _, judged in answered] for i, name in enumerate(POLICIES)}
    gold = {(a, b): win_rate(totals[a], totals[b]) for a in POLICIES for b in POLICIES if a < b}
    wins = {tuple(row["pair"]): row["win_rate"] for row in figures["win_rates"]}
    assert set(wins) == set(gold)
    rated = {name: np.mean([min(7, max(1, 1 + round(6 * x[0]))) for x in totals[name]]) for name in POLICIES}
    ratings = [figures["policies"][name]["rating"]["value"] - rated[name] for name in POLICIES]
    for i, name in enumerate(POLICIES):
        wrong = interval([float(judged[i]["correct"] < 0.5) for _, _, judged in answered])
        assert figures["policies"][name]["wrong"]["value"] == wrong["value"]
    return max(abs(wins[pair]["value"] - gold[pair]["value"]) for pair in gold), np.abs(ratings).max(), wins, gold


def test_people_without_noise_give_the_gold_measures(answered):
    """Exactly at no noise, intervals included, and the more nearly the less noise there is; ties are ties."""
    win_errors, rating_errors = zip(*(errors(answered, noise)[:2] for noise in (4.0, 1.0, 0.1)), strict=True)
    assert sorted(win_errors, reverse=True) == list(win_errors) and win_errors[0] > 0.05 > 0.02 > win_errors[-1]
    assert sorted(rating_errors, reverse=True) == list(rating_errors)
    win_error, rating_error, wins, gold = errors(answered, 0.0)
    assert win_error == 0 and rating_error < 1e-4
    assert all(wins[pair] == gold[pair] for pair in gold)


def test_the_prompt_is_the_unit_by_hand(answered):
    """Two judgements of one prompt count once: (1 + 0)/2 and nine of 1 give .95, sd .1581, 1.96 sd / sqrt 10 = .098, beyond 1. So
    Wilson's, 1.96^2 / n = .098^2 / .0475 = .2022: (.95 + .1011 ± sqrt(.2022 .0475 + .1011^2)) / 1.2022.
    """
    records = [record.model_copy(deep=True) for record in labelled(answered[:10], Requests().labelers())]
    records.append(records[0].model_copy(update={"labeler": "another"}, deep=True))
    for record, order in zip(records, ([["a"]] * 10 + [["b"]]), strict=True):
        record.ranking = [order, ["b" if order == ["a"] else "a"], ["c"]]
    figures = people_figures(records, policy_names(records))
    first = figures["win_rates"][0]
    assert first["pair"] == ["x/a", "x/b"] and first["win_rate"] == {"value": 0.95, "ci95": [0.7572, 0.9914], "n": 10}
    assert figures["judgements"] == 11


@pytest.mark.parametrize("judge_noise", [0.3, 20.0])
def test_prediction_powered_intervals_cover_and_are_as_narrow_as_the_correlation_says(answered, judge_noise):
    """1,000 repeats, whose standard error is 0.7%, with 200 labels and 2,000 verdicts of a biased judge: the truth is inside in
    93 to 97%, and the width is within 5% of sqrt(1 - rho^2 N / (n + N)) of the people's own.
    """
    rng, n, N = random.Random(1), 200, 2000
    people = Requests().labelers()
    biased = Labeler("judge", TASTE | {"correct": 2.0, "complete": 3.0}, 0.05, 0.5, judge_noise)

    def points(labeler, texts, judged):
        a, b = (labeler.utility(judged[i], texts[i]) + rng.gauss(0, labeler.noise) for i in (0, 1))
        return win(a, b)

    both = np.array([[points(rng.choice(people), *x[1:]), points(biased, *x[1:])] for x in answered for _ in range(20)])
    truth, rho = both[:, 0].mean(), np.corrcoef(both.T)[0, 1]
    draws, hits, ratios, rhos = np.random.default_rng(0), 0, [], []
    for _ in range(1000):
        drawn = both[draws.integers(len(both), size=n + N)]
        found = prediction_powered(dict(enumerate(drawn[:n, 0])), dict(enumerate(drawn[:, 1])))
        low, high = found["corrected"]["ci95"]
        hits += low <= truth <= high
        own = found["people"]["ci95"]
        ratios.append((high - low) / (own[1] - own[0]))
        rhos.append(found["rho"])
        assert found["judged"] == N and found["people"]["n"] == n
    predicted = math.sqrt(1 - rho**2 * N / (n + N))
    assert 0.93 <= hits / 1000 <= 0.97
    assert np.mean(ratios) == pytest.approx(predicted, rel=0.05) and np.mean(rhos) == pytest.approx(rho, abs=0.02)


def test_few_or_unanimous_labels_correct_nothing():
    judged = {i: float(i % 2) for i in range(40)}
    few = prediction_powered({i: 1.0 - i % 2 for i in range(9)}, judged)
    unanimous = prediction_powered(dict.fromkeys(range(20), 1.0), judged)
    assert few["corrected"] == few["people"] and few["people"]["ci95"] is None
    assert unanimous["corrected"] == unanimous["people"] and unanimous["people"]["ci95"][0] < 0.9  # Wilson's


def test_tasks_of_several_policies_are_blind_and_are_evaluated(gold_run, tmp_path):
    out = tmp_path / "tasks"
    base = [f"sample.out='{out}'", "sample.prompts=30", "sample.split=train"]
    for wrong, message in (
        ("sample.stages=[sft,gold/sft]", "named twice"), ("sample.stages=[sft,what]", "want a stage, or run/stage"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            sample(gold_run.config(*base, wrong))
    sample(gold_run.config(*base, "sample.stages=[sft,gold/ppo]"))
    tasks, _ = load_comparisons(str(out / "tasks.jsonl"), "native")
    assert len(tasks) == json.loads((out / "sample.json").read_text())["counts"]["items"]
    assert all({r.policy.split("@")[0] for r in t.responses} == {"gold/sft", "gold/ppo"} for t in tasks)
    letters = Counter(r.id for t in tasks for r in t.responses if r.policy.startswith("gold/sft"))
    assert min(letters["a"], letters["b"]) > len(tasks) / 5, "a letter does not tell the policy"
    rng, labels = random.Random(0), tmp_path / "labels.jsonl"
    rows = []
    for i, task in enumerate(tasks[:20]):
        order = sorted(task.responses, key=lambda r: r.policy.startswith("gold/sft") == (rng.random() < 0.8))
        more = {"ranking": [[r.id] for r in order], "labeler": f"l{i % 2}", "ratings": {order[0].id: 6, order[1].id: 2}}
        rows.append(task.model_copy(update=more | {"id": f"r{i}", "flags": {order[1].id: ["hallucination"]}}))
    labels.write_text("".join(row.model_dump_json() + "\n" for row in rows))
    run = gold_run.copy(tmp_path, None, "judged")
    given = f"evaluate.labels=['{labels}','{out / 'tasks.jsonl'}']"
    evaluate(run.config(given, "data.held_out_labelers=[l1]", "evaluate.labels_model=judged"))
    found = json.loads((run.folder / "evaluations" / "labels.json").read_text())
    everyone = found["all labelers"]
    assert everyone["judgements"] == 20 and found["held-out labelers"]["judgements"] == 10
    [wins] = everyone["win_rates"]
    share = sum(r.ranking[0][0] in [x.id for x in r.responses if "ppo" in x.policy] for r in rows) / 20
    assert wins["pair"] == ["gold/ppo", "gold/sft"] and wins["win_rate"]["value"] == pytest.approx(share)
    of = everyone["policies"]["gold/ppo"]
    assert of["rating"]["value"] == pytest.approx(6 * share + 2 * (1 - share))
    assert of["hallucination"]["value"] == pytest.approx(1 - share)
    [corrected] = found["corrected"]
    assert corrected["people"]["n"] == 20 and corrected["judged"] == len(tasks) - 20
    tables = {table.caption: table for table in tables_of("People", found)}
    assert ["judgements", "20"] in tables["People: all labelers"].rows
    assert tables["People: all labelers: policies"].columns == ["", "rating", "hallucination"]
    with pytest.raises(UserError, match="no label compares two policies"):
        evaluate(run.config(f"evaluate.labels='{out / 'tasks.jsonl'}'"))
