"""Labelling tasks: order and sides carry no information, markup stays text, and tasks import again."""

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.commands.sample import (
    label_studio_config,
    label_studio_tasks,
    next_step,
    shuffle_responses,
)
from rlhf.config.checks import check_config
from rlhf.config.compose import compose_config
from rlhf.data.formats import FORMATS
from rlhf.data.records import RankedResponse, Ranking

FIXTURES = Path(__file__).parent / "fixtures" / "label_studio"


def make_task(name: str = "p-1@0123", k: int = 4, texts: list[str] | None = None) -> Ranking:
    texts = texts or [f"Answer {i}." for i in range(k)]
    responses = [
        RankedResponse(id=chr(ord("a") + i), text=text, policy="demo/sft@0123", metadata={"ended": i % 2 == 0})
        for i, text in enumerate(texts)
    ]
    return Ranking(id=name, prompt="Say it.", responses=responses, metadata={"split": "train", "group": "g"})  # type: ignore[arg-type]


def test_position_tells_nothing():
    """Each of 4 draws stands first in 400 of 4 x 400 tasks: binomial(1600, 1/4), deviation 17.3; 5 of them are 87."""
    tasks = [shuffle_responses(make_task(f"p-{i}"), seed=0) for i in range(1600)]
    for name in "abcd":
        assert abs(sum(task.responses[0].id == name for task in tasks) - 400) < 87
    assert all(sorted(r.id for r in task.responses) == list("abcd") for task in tasks)
    assert all(r.text == f"Answer {ord(r.id) - ord('a')}." for task in tasks for r in task.responses)


@pytest.mark.parametrize("k", [2, 3, 5])
def test_pairwise_tasks_are_all_pairs_once(k):
    tasks = [row["data"] for row in label_studio_tasks(make_task(k=k), "pairwise", seed=0)]
    pairs = [frozenset((data["left_id"], data["right_id"])) for data in tasks]
    assert len(pairs) == len(set(pairs)) == k * (k - 1) // 2
    assert all(set(data["about"]) == {data["left_id"], data["right_id"]} for data in tasks)


@pytest.mark.parametrize("interface", ["pairwise", "ranker"])
def test_the_configuration_is_the_one_that_a_server_took(interface):
    assert (FIXTURES / interface / "config.xml").read_text() == label_studio_config(interface)


texts = st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=12), min_size=2, max_size=5, unique=True)


@settings(max_examples=60, deadline=None)
@given(texts, st.sampled_from(["pairwise", "ranker"]))
def test_tasks_come_back_as_the_rankings_that_they_are(drawn, interface):
    task = make_task(texts=drawn)
    for row in label_studio_tasks(task, interface, seed=1):
        [values] = FORMATS["label_studio"].convert(json.loads(json.dumps(row)))
        back = Ranking.model_validate(values | {"id": "none"})
        assert back.ranking is None and back.pairs is None and back.prompt == task.prompt
        assert back.metadata == task.metadata | {"item": task.id}
        known = {r.id: r for r in task.responses}
        assert all(r == known[r.id] for r in back.responses)
        assert len(back.responses) == (2 if interface == "pairwise" else len(drawn))


@pytest.mark.parametrize("tool", ["native", "label_studio"])
def test_the_next_step_is_a_command_whose_settings_exist(tool):
    command = next_step(Path("out"), tool).split("rlhf import ", 1)[1]
    check_config(compose_config(shlex.split(command), "import"), "import")
