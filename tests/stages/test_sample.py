import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.commands.sample import draw_tasks, label_studio_config, label_studio_tasks, next_step, run
from rlhf.config import Config
from rlhf.config.checks import check_config
from rlhf.config.compose import compose_config
from rlhf.data.reading import FORMATS, load_kind, load_prompts
from rlhf.data.records import PromptRecord, RankedResponse, Ranking
from rlhf.errors import UserError
from rlhf.evaluation.policies import Answer
from rlhf.evaluation.scoring import value_of, value_tasks


def sampled(gold_run: Any, out: Path, *more: str) -> list[Ranking]:
    """Native tasks of a round of ten prompts."""
    run(gold_run.config(f"sample.out='{out}'", "sample.prompts=10", "sample.responses=3", *more))
    return load_kind(Ranking, str(out / "tasks.jsonl"), "auto")[0]


@pytest.fixture(scope="module")
def tasks(gold_run, tmp_path_factory) -> tuple[Path, list[Ranking]]:
    out = tmp_path_factory.mktemp("sample") / "out"
    return out, sampled(gold_run, out)


def test_prompts_are_of_the_split_and_not_labelled_yet(gold_run, tasks, tmp_path):
    out, found = tasks
    prompts, _ = load_prompts(str(gold_run.folder / "world" / "prompts.jsonl"))
    train = [record for record in prompts if record.metadata["split"] == "train"]
    labelled, _ = load_kind(Ranking, str(gold_run.folder / "label" / "comparisons.jsonl"), "auto")
    known = {record.prompt[-1].content for record in labelled}
    fresh = [record for record in train if record.prompt[-1].content not in known]
    assert [task.metadata["prompt_id"] for task in found] == [record.id for record in fresh[:10]]
    assert [task.prompt for task in found] == [record.prompt for record in fresh[:10]]
    unranked = f"data.comparisons='{out / 'tasks.jsonl'}'"
    dev = sampled(gold_run, tmp_path / "dev", "sample.split=dev", unranked)
    assert {task.metadata["split"] for task in dev} == {"dev"}


@pytest.mark.parametrize("how", ["uncertain", "disagreement"])
def test_reward_models_choose_the_prompts_except_a_part_drawn_at_random(gold_run, tmp_path, how):
    """By hand: scores 0 and log 3 give p = 1/4 of the first being better, and 0 and 0 give 1/2."""
    even, odd = [0.0, 0.0], [0.0, math.log(3)]
    assert value_of("uncertain", [odd]) == pytest.approx(3 / 16) and value_of("uncertain", [even]) == 0.25
    assert value_of("disagreement", [even, odd]) == pytest.approx(1 / 64) and value_of("disagreement", [odd, odd]) == 0
    # twice the same: no disagreement
    rewards = [gold_run.config().run, str(gold_run.folder)] if how == "disagreement" else [None]
    pool = sampled(gold_run, tmp_path / "pool", "sample.choose=random", "sample.prompts=20")
    more = ["sample.choose=" + how, "sample.pool=2", "sample.random_fraction=0.2"]
    more += [f"sample.rewards=[{','.join(map(repr, rewards))}]"] if how == "disagreement" else []
    found = sampled(gold_run, tmp_path / "chosen", *more)
    assert len(found) == 10 and [task.metadata["chosen"] for task in found].count("random") == 2
    values = dict(zip([task.id for task in pool], value_tasks(gold_run.config(), pool, how, rewards), strict=True))
    chosen = [values[task.id] for task in found if task.metadata["chosen"] == how]
    assert min(chosen) >= max(value for name, value in values.items() if name not in {task.id for task in found})
    assert all(value == 0 for value in values.values()) == (how == "disagreement")
    assert json.loads((tmp_path / "chosen" / "sample.json").read_text())["counts"]["chosen_of"] == len(pool)


def test_a_turn_of_a_dialogue_is_drawn(gold_run, tmp_path):
    """Of dialogues with three turns of the user, about a third end at each."""
    turns = [{"role": who, "content": f"what is {n} ?"} for n, who in enumerate(("user", "assistant") * 2 + ("user",))]
    rows = [{"kind": "demonstration", "id": f"d{i}", "response": "red .", "split": "train",
             "prompt": [{"role": "user", "content": f"{i} ?"}, *turns[1:]]} for i in range(60)]  # fmt: skip
    (tmp_path / "saved.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    saved = [f"data.prompts='{tmp_path / 'saved.jsonl'}'", "sample.prompts=60", "sample.stages=[sft,ppo]"]
    lengths = {}
    for turn in ("last", "random"):
        found = sampled(gold_run, tmp_path / turn, *saved, f"sample.turn={turn}")
        lengths[turn] = [sum(m.role == "user" for m in task.prompt) for task in found]
    assert set(lengths["last"]) == {3} and all(lengths["random"].count(n) > 8 for n in (1, 2, 3))


def test_output_is_replaced_only_when_asked_and_only_where_it_is_our_own(gold_run, tmp_path):
    out = tmp_path / "out"
    sampled(gold_run, out, "sample.prompts=2")
    with pytest.raises(UserError, match=r"out: exists: choose another sample.out=…, or add overwrite=true"):
        sampled(gold_run, out, "sample.prompts=3")
    assert len(sampled(gold_run, out, "sample.prompts=3", "overwrite=true")) == 3
    with (out / "tasks.jsonl").open("a") as file:  # a labeler works in it
        file.write("\n")
    with pytest.raises(UserError, match=r"tasks.jsonl appeared or changed after .* \(labels\?\): move"):
        sampled(gold_run, out, "overwrite=true")
    assert len((out / "tasks.jsonl").read_text().splitlines()) == 4
    stranger = tmp_path / "home"
    stranger.mkdir()
    (stranger / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="is no labelling round, so it is not replaced"):
        sampled(gold_run, stranger, "overwrite=true")
    assert (stranger / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("interface", ["pairwise", "ranker"])
def test_label_studio_files_hold_the_same_responses(gold_run, tasks, interface, tmp_path):
    _, found = tasks
    out = tmp_path / "out"
    config = [f"sample.out='{out}'", "sample.prompts=10", "sample.responses=3", "sample.tool=label_studio"]
    run(gold_run.config(*config, f"sample.interface={interface}"))
    rows = [row["data"] for row in json.loads((out / "tasks.json").read_text())]
    wanted = {task.id: {r.id: r.text for r in task.responses} for task in found}
    got: dict[str, dict[str, str]] = {}
    for data in rows:
        texts = {r["id"]: r["body"] for r in data.get("responses", ())}  # of the ranker
        texts = texts or {data["left_id"]: data["left"], data["right_id"]: data["right"]}
        got.setdefault(data["item"], {}).update(texts)
    assert got == wanted
    assert "config.xml" in json.loads((out / "sample.json").read_text())["files"]
    assert "rlhf import" in (out / "README.md").read_text()


FIXTURES = Path(__file__).parents[1] / "data" / "fixtures" / "label_studio"


def make_task(name: str = "p-1@0123", k: int = 4, texts: list[str] | None = None) -> Ranking:
    texts = texts or [f"Answer {i}." for i in range(k)]
    each = [{"id": "abcde"[i], "text": text, "metadata": {"ended": i % 2 == 0}} for i, text in enumerate(texts)]
    responses = [RankedResponse(policy="demo/sft@0123", **one) for one in each]  # type: ignore[arg-type]
    return Ranking(id=name, prompt="Say it.", responses=responses, metadata={"split": "train", "group": "g"})  # type: ignore[arg-type]


def test_position_tells_nothing(monkeypatch):
    """Each of 4 draws stands first in 400 of 4 x 400 tasks: binomial(1600, 1/4), deviation 17.3; 5 of them are 87."""
    prompts = [PromptRecord(id=f"p-{i}", prompt="Say it.") for i in range(1600)]  # type: ignore[arg-type]
    drawn = [Answer(f"Answer {i}.", True, [], []) for i in range(4)]
    answered = lambda *_: ((prompt, False, drawn, {}) for prompt in prompts)  # noqa: E731
    monkeypatch.setattr("rlhf.commands.sample.answer_prompts", answered)
    tasks, _, _ = draw_tasks(Config(), [("demo/sft@0123", Path())], prompts)
    for name in "abcd":
        assert abs(sum(task.responses[0].id == name for task in tasks) - 400) < 87
    assert all(sorted(r.id for r in task.responses) == list("abcd") for task in tasks)
    assert all(r.text == f"Answer {ord(r.id) - ord('a')}." for task in tasks for r in task.responses)
    drawn[0] = drawn[0]._replace(text="Another.")
    again, _, _ = draw_tasks(Config(), [("demo/sft@0123", Path())], prompts)
    assert not {task.id for task in tasks} & {task.id for task in again}, "labels of other texts are of another task"


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
