"""Instructions that a program can check: each rule by hand, our prompt file, and a stage's model."""

import json
from pathlib import Path

import pytest
import torch

from rlhf.data.reading import load_prompts
from rlhf.data.records import PromptRecord
from rlhf.errors import UserError
from rlhf.evaluation import benchmarks as instructions
from rlhf.evaluation.benchmarks import RULES, checks_of, follows
from rlhf.evaluation.policies import models_of

OURS = Path(__file__).parents[2] / "data" / "instructions.jsonl"


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        ({"rule": "max_words", "n": 2}, ["Two words.", "One"], ["", "It is three"]),
        ({"rule": "min_words", "n": 3}, ["one two three", "it's a dog's life"], ["one two", "1 2 3"]),
        ({"rule": "sentences", "n": 2}, ["A. B!", "Is it? Yes"], ["A.", "A. B. C.", ""]),
        ({"rule": "lines", "n": 2}, ["a\n\nb\n"], ["a", "a\nb\nc"]),
        ({"rule": "paragraphs", "n": 2}, ["a\nb\n\nc"], ["a\nb"]),
        ({"rule": "bullets", "n": 2}, ["Here:\n- a\n* b"], ["- a", "-a\n-b"]),
        ({"rule": "numbered", "n": 2}, ["1. a\n2) b"], ["1. a\n3. b", "2. b\n1. a", "1.5 a\n2. b"]),
        ({"rule": "contains", "words": ["red", "big dog"]}, ["A Red, big dog."], ["reds big dog", "red big  dog"]),
        ({"rule": "excludes", "words": ["dog"]}, ["A dogma."], ["A Dog.", ""]),
        ({"rule": "starts_with", "text": "Sure"}, [" Sure, four."], ["sure", "I am Sure"]),
        ({"rule": "ends_with", "text": "Bye."}, ["Well. Bye. "], ["Bye"]),
        ({"rule": "lowercase"}, ["all of it, 3."], ["All", "3"]),
        ({"rule": "uppercase"}, ["HONEY."], ["Honey", ""]),
        ({"rule": "no_commas"}, ["a and b"], ["a, b", " "]),
        ({"rule": "no_digits"}, ["eight"], ["8", ""]),
        ({"rule": "quoted"}, [' "Water." '], ['"Water', '""', '"']),
        ({"rule": "question"}, ["Which one?"], ["Which one", "?!"]),
        ({"rule": "json"}, ['{"a": 1}', "```json\n[1]\n```"], ["3", "{a: 1}", "here: {}", "[" * 100_000]),
    ],
)
def test_a_rule_by_hand(check, right, wrong):
    assert [follows(answer, check) for answer in right] == [True] * len(right)
    assert [follows(answer, check) for answer in wrong] == [False] * len(wrong)


def test_our_file_uses_every_rule_and_each_prompt_is_different():
    records, _ = load_prompts(str(OURS))
    assert len(records) == sum(1 for _ in OURS.open())
    assert {check["rule"] for record in records for check in checks_of(record)} == set(RULES)


def test_a_bad_check_is_one_line():
    for checks, message in (
        (None, "metadata.checks is missing"),
        ([], "metadata.checks is missing"),
        ([{"rule": "rhymes"}], "rule 'rhymes': want one of max_words"),
        ([3], "rule None"),
        ([{"rule": ["json"]}], r"rule \['json'\]: want one of"),
        ([{"rule": "max_words", "n": "5"}], "rule max_words: n is '5', want a number"),
        ([{"rule": "contains", "words": [1]}], "want a list of words"),
    ):
        record = PromptRecord(kind="prompt", id="p", prompt="Hi", metadata={"checks": checks})
        with pytest.raises(UserError, match=message):
            checks_of(record)


def test_shares_by_hand():
    found = instructions.shares_followed([[("json", True), ("question", False)], [("json", True)]])
    assert found["prompts"]["value"] == 0.5 and found["instructions"]["value"] == round(2 / 3, 4)
    assert {rule: row["value"] for rule, row in found["by_rule"].items()} == {"json": 1.0, "question": 0.0}
    rows = [found["prompts"], found["instructions"], *found["by_rule"].values()]
    assert all(row["ci95"] is None for row in rows), "of fewer than ten prompts"


def test_a_stages_model_is_measured(gold_run, tmp_path):
    """On prompts of the gold world: every answer has at most 24 tokens, and none is JSON."""
    checks = {"checks": [{"rule": "json"}, {"rule": "max_words", "n": 99}]}
    rows = [{"kind": "prompt", "id": f"p{i}", "prompt": f"Name colour {i}.", "metadata": checks} for i in range(4)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = gold_run.config(f"evaluate.instructions='{path}'", "evaluate.models=[sft,ppo]")
    found = instructions.evaluate_instructions(config, torch.device("cpu"))
    assert list(found) == ["sft", "ppo"]
    assert all(row["by_rule"]["json"]["value"] == 0.0 and row["prompts"]["n"] == 4 for row in found.values())
    assert any(row["by_rule"]["max_words"]["value"] > 0 for row in found.values())
    with pytest.raises(
        UserError, match=r"evaluate\.models: 'reward': want some of pretrain, sft, rejection, dpo, rate, ppo"
    ):
        models_of(gold_run.config("evaluate.models=[reward]"))
    assert models_of(gold_run.config()) == ["sft", "ppo"]
