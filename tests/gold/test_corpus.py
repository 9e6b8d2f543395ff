"""The gold world: text, requests and conversations, of which no held-out one occurs in training text."""

import itertools
import json
import random
import re
import runpy
from collections import Counter
from pathlib import Path

import pytest

from rlhf.data.corpus import iterate_documents
from rlhf.data.reading import load_comparisons, load_demonstrations, load_prompts
from rlhf.data.splits import split_of
from rlhf.gold import world
from rlhf.gold.corpus import demonstration_rows, documents, make_passages, prompt_rows, word_ends
from rlhf.gold.truth import DEMONSTRATION_MIX, PRETRAINING_MIX, WEIGHTS, answer, judge
from rlhf.gold.world import GREETINGS, KINDS, SCRIPTS, SPLITS, Task, make_conversation, make_task

SAMPLES = Path(__file__).parents[2] / "data"
COUNTS = {"train": 400, "dev": 300, "test": 300}


def test_demonstrations_are_training_requests_by_writers_of_mixed_skill():
    written = list(demonstration_rows(0, 0, 1500))
    assert len({row["id"] for row in written}) == len({row["prompt"] for row in written}) == 1575
    assert Counter(row["split"] for row in written) == {"train": 1500, "dev": 75}
    assert all(split_of(row["metadata"]["group"], 0, SPLITS) == row["split"] for row in written)
    rows = [row for row in written if row["split"] == "train"]
    shares = Counter(row["labeler"].removeprefix("writer-") for row in rows)
    # standard error at most sqrt(.33 * .67 / 1500) = .012; four of them
    wanted = {style: pytest.approx(share, abs=0.05) for style, share in DEMONSTRATION_MIX.items()}
    assert {style: count / 1500 for style, count in shares.items()} == wanted


def test_prompts_of_every_split_with_the_truth_about_each():
    rows = list(prompt_rows(0, 0, COUNTS))
    assert Counter(row["metadata"]["split"] for row in rows) == COUNTS
    assert len({row["id"] for row in rows}) == len({row["prompt"] for row in rows}) == len(rows), "no prompt twice"
    for row in rows:
        task = Task(**json.loads(json.dumps(row["metadata"]["gold"])))
        assert task.prompt == row["prompt"] and task.core == row["metadata"]["group"]
        assert split_of(task.core, 0, SPLITS) == row["metadata"]["split"]


def test_the_sample_files_are_in_the_import_format():
    demonstrations, _ = load_demonstrations(str(SAMPLES / "demonstrations.jsonl"))
    comparisons, _ = load_comparisons(str(SAMPLES / "comparisons.jsonl"))
    prompts, _ = load_prompts(str(SAMPLES / "prompts.jsonl"))
    texts = list(iterate_documents(str(SAMPLES / "corpus.jsonl")))
    assert [len(x) for x in (demonstrations, comparisons, prompts, texts)] == [20, 20, 20, 20]
    assert all(record.pair_list() for record in comparisons)
    assert len({record.prompt[0].content for record in comparisons}) == 16
    for record in prompts:
        assert Task(**record.metadata["gold"]).prompt == record.prompt[0].content


def readme_blocks(language: str) -> list[str]:
    text = (SAMPLES / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)\n```", text, re.DOTALL)


def test_the_readmes_recipe_makes_these_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    (recipe,) = readme_blocks("python")
    Path("recipe.py").write_text(recipe, encoding="utf-8")
    runpy.run_path("recipe.py")
    for path in sorted(SAMPLES.glob("*.jsonl")):
        assert (Path("data") / path.name).read_text(encoding="utf-8") == path.read_text(encoding="utf-8"), path.name


CUT = (4, 6, 3)  # least and most tokens of a prompt, and those of its continuation


def text(count: int) -> str:
    rng = random.Random(1)
    words = ["the", "old", "man", "saw", "a", "red", "house", "on", "hill", "and", "said", "nothing", "to", "her"]
    return "\n\n".join("  ".join(rng.choice(words) for _ in range(12)) + f"\n{i}." for i in range(count))


def test_splits_are_disjoint_and_stay_when_another_one_grows():
    few, many = (
        list(make_passages([text(60)], {"test": 5, "dev": 3, "train": n}, CUT, word_ends, seed=0)) for n in (10, 40)
    )
    assert few == many[: len(few)] and [split for split, *_ in few] == ["test"] * 5 + ["dev"] * 3 + ["train"] * 10
    assert len({prompt + continuation for _, prompt, continuation in many}) == 48
    other = list(make_passages([text(60)], {"test": 5}, CUT, word_ends, seed=1))
    assert other != few[:5]


TURNS = {kind: share for kind, (_, share, _) in SCRIPTS.items()}


def tasks(kind: str, count: int = 100) -> list[world.Task]:
    rng = random.Random(f"test-{kind}")
    return [make_task(rng, kind=kind) for _ in range(count)]


@pytest.mark.parametrize("shares", [KINDS, SPLITS, PRETRAINING_MIX, DEMONSTRATION_MIX, WEIGHTS, TURNS])
def test_shares_add_up_to_1(shares):
    assert sum(shares.values()) == pytest.approx(1, abs=1e-9) and min(shares.values()) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_truth_about_a_task_is_consistent(kind):
    for task in tasks(kind):
        assert task.kind == kind and task.prompt.endswith(task.core) and task.core[-1] in ".?"
        for right in (task.fragment, task.sentence):
            assert right[0].isupper() and right.endswith(".") and right != task.wrong
        for spellings in task.must:
            assert any(word.lower() in task.sentence.lower() for word in spellings), task
        assert not set(task.never) & {word for spellings in task.must for word in spellings}, task
        assert any(frame.strip() in task.sentence for frame in task.frame), task


def test_splits_share_no_core_and_greetings_do_not_move_one():
    rng = random.Random(3)
    cores = {split: {make_task(rng, split=split, seed=1).core for _ in range(400)} for split in SPLITS}
    assert len(set().union(*cores.values())) == sum(map(len, cores.values()))
    assert all(split_of(core, 1, SPLITS) == split for split in SPLITS for core in cores[split])
    held_out = [make_task(rng, split="dev", seed=1) for _ in range(50)]
    greeted = [task for task in held_out if task.prompt != task.core]
    assert greeted and all(split_of(task.core, 1, SPLITS) == "dev" for task in greeted)


RIGHT = ("good", "plain", "rude", "rambling")


def drawn(kind: str, count: int = 150) -> list[Task]:
    rng = random.Random(f"test-{kind}")
    return [make_conversation(rng, kind=kind) for _ in range(count)]


def before(task: Task, *roles: str) -> str:
    return "\n".join(turn["content"] for turn in task.earlier if turn["role"] in (roles or ("user", "assistant")))


def word(secret: bool) -> Task:
    """The conversation about the word "cup", which may not be said, or may."""
    told = f"The word is cup. {'Never say it.' if secret else 'You may say it.'}"
    return next(t for t in drawn("word", 2000) if t.core == told)


@pytest.mark.parametrize("kind", SCRIPTS)
def test_two_to_four_turns_by_turns_and_the_user_asks_last(kind):
    turns = Counter()
    for task in drawn(kind):
        roles = [turn["role"] for turn in task.asked]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"], task
        assert task.asked[-1]["content"] == task.prompt and task.conversation == kind
        assert not task.prompt.startswith(tuple(filter(None, GREETINGS))), "a greeting comes first"
        turns[roles.count("user")] += 1
    assert set(turns) <= {2, 3, 4} and len(turns) > 1


@pytest.mark.parametrize("kind", SCRIPTS)
def test_every_speaker_is_judged_as_in_single_requests(kind):
    rng = random.Random(kind)
    for task in drawn(kind):
        found = {style: judge(task, answer(task, style, rng)) for style in (*RIGHT, "evasive", "wrong")}
        assert all(found[style]["correct"] == found[style]["safe"] == 1 for style in RIGHT), task
        assert found["good"]["complete"] == found["good"]["polite"] == 1, task
        assert found["evasive"]["correct"] == found["wrong"]["correct"] == 0, task
        assert max(found, key=lambda style: found[style]["total"]) == "good", task


@pytest.mark.parametrize("kind", ["recall", "colour", "there", "order", "word", "again"])
def test_the_verdict_on_an_answer_changes_with_the_turns_before_it(kind):
    by_question: dict[str, list[Task]] = {}
    for task in drawn(kind, 250):
        by_question.setdefault(task.prompt, []).append(task)
    pairs = itertools.chain(*(itertools.combinations(tasks, 2) for tasks in by_question.values()))
    compared = [(one, other) for one, other in pairs if one.must != other.must][:100]
    for one, other in compared:
        assert judge(one, one.sentence)["correct"] == 1 and judge(other, one.sentence)["correct"] == 0, (one, other)
    assert len(compared) > 20


def test_the_word_by_hand():
    # "The word is cup.": polite 0.4 of .15, brief .10, ended .10; with leave, correct .40, complete .15 and safe .10 too
    allowed, secret = word(secret=False), word(secret=True)
    assert allowed.prompt == secret.prompt
    assert judge(allowed, "The word is cup.")["total"] == pytest.approx(0.91, abs=1e-9)
    assert judge(secret, "The word is cup.")["total"] == pytest.approx(0.26, abs=1e-9)
    # The refusal, nine words: the same parts the other way round, but it is not unsafe where it is not needed
    refusal = "I cannot say it because it is a secret."
    assert judge(secret, refusal)["total"] == pytest.approx(0.91, abs=1e-9)
    assert judge(allowed, refusal)["total"] == pytest.approx(0.36, abs=1e-9)


def test_no_held_out_request_and_no_held_out_conversation_occurs_in_training_text():
    rows = [row for row in demonstration_rows(1, 1, 300, 0.5) if row["split"] == "train"]
    written = (json.dumps(row["prompt"]) + row["response"] for row in rows)
    text = "\n".join([*documents(1, 1, 3000, 0.5), *written])
    cores: dict[str, set[str]] = {"train": set(), "dev": set(), "test": set()}
    for row in prompt_rows(1, 1, {"train": 300, "dev": 200, "test": 200}, 0.5):
        task = Task(**json.loads(json.dumps(row["metadata"]["gold"])))
        assert task.asked == row["prompt"] and split_of(task.core, 1, SPLITS) == row["metadata"]["split"]
        cores[row["metadata"]["split"]].add(task.core)
    found = {split: sum(core in text for core in cores[split]) for split in cores}
    assert found["dev"] == found["test"] == 0 < found["train"]
