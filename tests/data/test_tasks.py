"""Labelling tasks: order and sides carry no information, markup stays text, and filled-in tasks import again."""

import csv
import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.data.formats import FORMATS, BadRow, recognise
from rlhf.data.inputs import Source
from rlhf.data.reading import read_rows
from rlhf.data.records import Message, RankedResponse, Ranking
from rlhf.data.tasks import (
    csv_rows,
    guarded,
    label_studio_config,
    label_studio_tasks,
    next_step,
    pairs_of,
    shown_prompt,
    shuffle_responses,
    unguarded,
    write_tasks,
)

FIXTURES = Path(__file__).parent / "fixtures" / "label_studio"
HTML = "<script>alert(1)</script> & <b>bold</b>"


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


def test_sides_tell_nothing():
    """The first drawn of a pair stands left in half of 1600 x 6 pairs: deviation 49; 5 of them are 245."""
    left = sum(i < j for n in range(1600) for i, j in pairs_of(make_task(f"p-{n}"), seed=0))
    assert abs(left - 4800) < 245


@pytest.mark.parametrize("k", [2, 3, 5])
def test_pairwise_tasks_are_all_pairs_once(k):
    tasks = [row["data"] for row in label_studio_tasks(make_task(k=k), "pairwise", seed=0)]
    pairs = [frozenset((data["left_id"], data["right_id"])) for data in tasks]
    assert len(pairs) == len(set(pairs)) == k * (k - 1) // 2
    assert all(set(data["about"]) == {data["left_id"], data["right_id"]} for data in tasks)


@pytest.mark.parametrize("interface", ["pairwise", "ranker"])
def test_the_configuration_is_the_one_that_a_server_took(interface):
    assert (FIXTURES / interface / "config.xml").read_text() == label_studio_config(interface)


def test_a_dialogue_is_shown_with_its_roles():
    turns = [("system", "Be kind."), ("user", "Hi."), ("assistant", "Hello."), ("user", "Who?")]
    prompt = [Message(role=role, content=content) for role, content in turns]  # type: ignore[arg-type]
    assert shown_prompt(prompt) == "System: Be kind.\n\nUser: Hi.\n\nAssistant: Hello.\n\nUser: Who?"
    assert shown_prompt(prompt[1:2]) == "Hi."
    assert shown_prompt(prompt[:1]) == "System: Be kind."


texts = st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=12), min_size=2, max_size=5, unique=True)


@settings(max_examples=60, deadline=None)
@given(texts, st.sampled_from(["pairwise", "ranker"]))
def test_tasks_come_back_as_the_rankings_that_they_are(drawn, interface):
    task = make_task(texts=drawn)
    for row in label_studio_tasks(task, interface, seed=1):
        [values] = FORMATS["label_studio"].convert(json.loads(json.dumps(row)))
        back = Ranking.model_validate({"id": "none"} | values)
        assert back.ranking is None and back.pairs is None and back.prompt == task.prompt
        assert back.metadata == task.metadata | {"item": task.id}
        known = {r.id: r for r in task.responses}
        assert all(r == known[r.id] for r in back.responses)
        assert len(back.responses) == (2 if interface == "pairwise" else len(drawn))


FORMULAS = [
    '=HYPERLINK("http://x.example")',
    "\t=1",
    " +1",
    "\r\n@SUM(A1)",
    "-1",
    "\ufeff=1",
    "\uff1d1",
    "'=1",
    "''\t-1",
    "'",
]


def test_no_cell_is_a_formula_and_all_texts_come_back(tmp_path):
    tasks = [make_task(f"={i}", texts=[text, "Plain."]) for i, text in enumerate(FORMULAS)]
    write_tasks(tmp_path, tasks, "csv", "ranker", seed=0)
    raw = (tmp_path / "tasks.csv").read_text(encoding="utf-8-sig")
    cells = [cell for row in csv.reader(io.StringIO(raw, newline="")) for cell in row]
    assert not any(re.match("[\\s\ufeff]*[=+@\uff1d-]", cell) for cell in cells)
    rows = [item.value for item in read_rows(Source("tasks.csv", tmp_path / "tasks.csv"))]
    made = [record for row in rows for record in FORMATS["tasks_csv"].convert(row)]
    assert [record["id"] for record in made] == [task.id for task in tasks]
    assert [[r["text"] for r in m["responses"]] for m in made] == [[r.text for r in t.responses] for t in tasks]


@given(st.text(st.sampled_from("'=+-@ \t\nx"), max_size=6))
def test_what_guards_a_cell_is_taken_away_exactly(text):
    assert unguarded(guarded(text)) == text and not guarded(text).lstrip().startswith(("=", "+", "-", "@"))


@pytest.mark.parametrize("tool", ["native", "label_studio", "csv"])
@pytest.mark.parametrize("interface", ["pairwise", "ranker"])
def test_the_next_step_is_a_command_whose_settings_exist(tool, interface):
    import shlex

    from rlhf.config.checks import check_config
    from rlhf.config.compose import compose_config

    command = next_step(Path("out"), tool, interface, 3).split("rlhf import ", 1)[1]
    config = compose_config(shlex.split(command), "import")
    check_config(config, "import")
    if tool == "csv":
        [row, *_] = csv_rows([make_task(k=3)], interface, seed=0)
        assert recognise(row) == config.format == "tasks_csv"


@pytest.mark.parametrize("interface", ["pairwise", "ranker"])
def test_csv_that_was_filled_in_comes_back_by_the_command_that_is_told(tmp_path, interface):
    """Labelers order the responses by length, longest first; one row is left empty. Ids, policies, whether a response
    ended, turns, splits and groups come back, and the pairs of an item and labeler are one ranking.
    """
    import shlex

    from rlhf.commands.import_data import run
    from rlhf.config.compose import compose_config
    from rlhf.data.reading import load_kind

    tasks = [make_task("p-1", texts=["x" * 9, HTML, "=1+1, and\na line", ""]), make_task("p-2", texts=["yes", "no"])]
    turns = [("system", "Be kind."), ("user", "Hi."), ("assistant", "Hello."), ("user", "Who?")]
    dialogue = [Message(role=role, content=content) for role, content in turns]  # type: ignore[arg-type]
    tasks += [make_task("p-3", k=3).model_copy(update={"prompt": dialogue}), make_task("p-4", texts=["s", "t"])]
    folder = tmp_path / "round"
    folder.mkdir()
    write_tasks(folder, tasks, "csv", interface, seed=0)
    with (folder / "tasks.csv").open(encoding="utf-8-sig", newline="") as file:
        tasks_rows = list(csv.DictReader(file))
    rows = []
    for labeler in ("kim", "lee"):
        for row in [dict(row) for row in tasks_rows if row["item"] != "p-4" or labeler == "kim"]:
            row["labeler"] = labeler
            if row["item"] != "p-4":
                fill_in(row)
            rows.append(row)
    with (folder / "tasks.csv").open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    command = next_step(folder, "csv", interface, 4).split("rlhf import ", 1)[1]
    run(compose_config(shlex.split(command), "import"))
    records = load_kind(Ranking, str(tmp_path / "round-imported"), "auto")[0]
    assert sorted(record.id for record in records) == sorted(
        [f"{item}:{labeler}" for item in ("p-1", "p-2", "p-3") for labeler in ("kim", "lee")] + ["p-4:kim"]
    )
    for record in records:
        [task] = [task for task in tasks if task.id == record.id.split(":")[0]]
        assert record.prompt == task.prompt and record.metadata["group"] == "g" and record.metadata["split"] == "train"
        known = {response.id: response for response in task.responses}
        assert {response.id: response for response in record.responses} == known  # text, policy, whether it ended
        if task.id == "p-4":
            assert record.ranking is None and record.pairs is None
            continue
        levels = [{len(known[name].text) for name in tie} for tie in record.ranking or []]
        assert [len(level) for level in levels] == [1] * len(levels)
        assert levels == sorted(levels, key=max, reverse=True) and sum(map(len, record.ranking or [])) == len(known)


def fill_in(row: dict[str, str]) -> None:
    """The longer text is the better one, equal lengths are a tie."""
    if "winner" in row:
        gap = len(row["left"]) - len(row["right"])
        row["winner"] = "tie" if gap == 0 else "left" if gap > 0 else "Right "
    for n, _ in enumerate(row["ids"].split() if "score_1" in row else (), 1):
        row[f"score_{n}"] = str(len(row[f"response_{n}"]))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"winner": "1"}, "winner: got '1', want left, right or tie"),
        ({"about": '{"responses": {"a": {"po'}, "about: got .* want the JSON of rlhf sample: leave this column"),
        ({"ids": "a"}, "ids: got 'a', want an id for each response"),
        ({"ids": "a z"}, "ids: got 'a z', want some of"),
        ({"ids": None}, "ids: got None, want an id for each response"),
        ({"about": "[]"}, "about: got"),
        ({"about": '{"responses": 3}'}, "about: got"),
    ],
)
def test_a_broken_row_of_tasks_says_what_to_do(change, told):
    [row] = csv_rows([make_task(k=2)], "pairwise", seed=0)
    with pytest.raises(BadRow) as caught:
        list(FORMATS["tasks_csv"].convert(row | change))
    assert re.match(told, caught.value.message), caught.value.message


def test_a_score_that_is_no_number_is_refused():
    [row] = csv_rows([make_task(k=2)], "ranker", seed=0)
    with pytest.raises(BadRow) as caught:
        list(FORMATS["tasks_csv"].convert(row | {"score_2": "good"}))
    assert caught.value.message == "score_2: got 'good', want a number, or nothing"
    [record] = FORMATS["tasks_csv"].convert(
        row | {"score_1": 2.0, "score_2": 3, "comment": "hm"}
    )  # as a spreadsheet gives them
    assert record["ranking"] == [[row["ids"].split()[1]], [row["ids"].split()[0]]]
    assert record["metadata"]["columns"] == {"comment": "hm"}
