"""The gold world's files: no held-out request in training text, and the same text from the same seed."""

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
from rlhf.gold.corpus import (
    Cut,
    demonstration_rows,
    divide,
    documents,
    make_passages,
    prompt_rows,
    word_ends,
)
from rlhf.gold.truth import DEMONSTRATION_MIX
from rlhf.gold.world import SPLITS, task_from_metadata

SAMPLES = Path(__file__).parents[2] / "data"
COUNTS = {"train": 400, "dev": 300, "test": 300}


@pytest.fixture(scope="module")
def training_text() -> str:
    """What models are trained on: the pretraining text and the training demonstrations of one seed."""
    rows = [row for row in demonstration_rows(seed=1, split_seed=1, count=400) if row["split"] == "train"]
    return "\n".join([*documents(1, 1, 4000), *(f"{row['prompt']}\n{row['response']}" for row in rows)])


def test_no_held_out_request_occurs_in_training_text(training_text):
    cores: dict[str, set[str]] = {split: set() for split in COUNTS}
    for row in prompt_rows(1, 1, COUNTS):
        cores[row["metadata"]["split"]].add(row["metadata"]["group"])
    found = {split: sum(core in training_text for core in cores[split]) for split in cores}
    assert found["dev"] == found["test"] == 0
    assert found["train"] > 20  # so the search would have found one


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
        task = task_from_metadata(json.loads(json.dumps(row["metadata"]["gold"])))
        assert task.prompt == row["prompt"] and task.core == row["metadata"]["group"]
        assert split_of(task.core, 0, SPLITS) == row["metadata"]["split"]


# --- the sample files under data/ ---


def test_the_sample_files_are_in_the_import_format():
    demonstrations, _ = load_demonstrations(str(SAMPLES / "demonstrations.jsonl"))
    comparisons, _ = load_comparisons(str(SAMPLES / "comparisons.jsonl"))
    prompts, _ = load_prompts(str(SAMPLES / "prompts.jsonl"))
    texts = list(iterate_documents(str(SAMPLES / "corpus.jsonl")))
    assert [len(x) for x in (demonstrations, comparisons, prompts, texts)] == [20, 20, 20, 20]
    assert all(record.pair_list() for record in comparisons)
    assert len({record.prompt[0].content for record in comparisons}) == 16
    for record in prompts:
        assert task_from_metadata(record.metadata["gold"]).prompt == record.prompt[0].content


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


CUT = Cut(least=4, most=6, continuation=3)


def text(count: int) -> str:
    rng = random.Random(1)
    words = ["the", "old", "man", "saw", "a", "red", "house", "on", "hill", "and", "said", "nothing", "to", "her"]
    return "\n\n".join("  ".join(rng.choice(words) for _ in range(12)) + f"\n{i}." for i in range(count))


def test_a_passage_is_cut_after_a_word_and_continues_with_the_space():
    whole = "One two, three four five six seven eight."
    for seed in range(8):
        prompt, continuation = divide(whole, CUT, word_ends(whole), random.Random(seed))
        assert whole.startswith(prompt + continuation) and continuation.startswith(" ") and not prompt.endswith(" ")
        assert 4 <= len(word_ends(prompt)) <= 6 and len(word_ends(continuation)) == 3


def test_splits_are_disjoint_and_stay_when_another_one_grows():
    few, many = (
        list(make_passages([text(60)], {"test": 5, "dev": 3, "train": n}, CUT, word_ends, seed=0)) for n in (10, 40)
    )
    assert few == many[: len(few)] and [p.split for p in few] == ["test"] * 5 + ["dev"] * 3 + ["train"] * 10
    assert len({p.prompt + p.continuation for p in many}) == 48
    other = list(make_passages([text(60)], {"test": 5}, CUT, word_ends, seed=1))
    assert other != few[:5]
