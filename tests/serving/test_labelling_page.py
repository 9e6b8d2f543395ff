"""The labelling page in a headless Chromium, without models: whose tab it is, dragging, keys, and that nothing is lost."""

import json
import os

import pytest

from rlhf.data.reading import load_rules
from rlhf.serving.managing import Rounds, Staff
from tests.serving.conftest import SECRETS, access, make_labelling, serving

pytestmark = pytest.mark.timeout(600)
SIZES = [(1280, "light"), (390, "dark")]
RANKED = "#rank .strip .chip:not(.divider ~ .chip)"


@pytest.fixture
def site(tmp_path):
    """A server with three tasks of three responses and no model: its address, and its labelling."""
    from rlhf.serving.app import make_app
    from rlhf.serving.models import ModelThread

    labelling = make_labelling(tmp_path / "labels.jsonl", count=3)
    labelling.rules = load_rules("serve.rules", "data/rules.json")
    thread = ModelThread({}, 1, 1, 64)
    labelling.instructions = "Be fair."
    for address in serving(make_app(thread, access(labelers=SECRETS), labelling)):
        yield address, labelling
    thread.stop()


@pytest.fixture
def managed(tmp_path):
    """As `site`, of anna and ben, with a manager's page."""
    from rlhf.config import Config
    from rlhf.serving.app import make_app
    from rlhf.serving.models import ModelThread

    labelling = make_labelling(tmp_path / "labels.jsonl", count=4)
    thread = ModelThread({}, 1, 1, 64)
    staff = Staff(tmp_path, ["anna", "ben"], "http://127.0.0.1/", tmp_path / "instructions.txt")
    guard = access(labelers=staff.secrets, manager=staff.manager)
    rounds = Rounds(Config(runs_dir=str(tmp_path / "runs")), tmp_path, "x")
    for address in serving(make_app(thread, guard, labelling, staff, rounds)):
        yield address, labelling, staff
    thread.stop()


def rows(labelling):
    return [json.loads(line) for line in labelling.file.path.read_text().splitlines()]


def task_of(page):
    page.wait_for_selector("#rank .card")
    return page.get_attribute("#rank [data-task]", "data-task")


def save(page, name="Save"):
    """Press a button and wait until the page shows another task, or that none is left."""
    before = task_of(page)
    page.get_by_role("button", name=name, exact=True).click()
    page.wait_for_function(
        "before => !document.querySelector('#rank .card') || document.querySelector('#rank [data-task]').dataset.task !== before",
        arg=before,
    )


def drag(page, source, x, y, touch):
    box = source.bounding_box()
    path = [(box["x"] + 10, box["y"] + 10), (x + 30, y), (x, y)]
    if not touch:
        page.mouse.move(*path[0])
        page.mouse.down()
        page.mouse.move(*path[1], steps=4)
        page.mouse.move(*path[2], steps=2)
        page.mouse.up()
        return
    session = page.context.new_cdp_session(page)
    for kind, point in zip(("touchStart", "touchMove", "touchMove"), path, strict=True):
        points = [{"x": point[0], "y": point[1]}]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_rankings_by_drag_alone(visit, site, width, scheme):
    """Mouse on a desktop and touch on a phone: nothing but the drags sets the ranks, in the order of each task's ids."""
    page = visit("anna", width, scheme)
    for _ in range(3):
        task_of(page)
        for place, name in enumerate("cab"):
            chip, divider = page.locator(f"#rank .chip[data-id={name}]"), page.locator("#rank .divider").bounding_box()
            drag(page, chip, divider["x"] + 1, divider["y"] + 5, touch=width < 500)
            assert page.locator(RANKED).count() == place + 1
        save(page)
    page.get_by_text("Nothing is left").wait_for()
    assert [row["ranking"] for row in rows(site[1])] == [[["c"], ["a"], ["b"]]] * 3


def test_a_task_is_ranked_by_buttons_or_is_beyond_judging(visit, site):
    page = visit("anna")
    task_of(page)
    for _ in range(3):
        page.locator("#rank .card:not(.placed) .put").first.click()
    page.get_by_role("button", name="Tie with above").last.click()
    page.locator("#rank .rating input").nth(4).click()
    page.locator("#rank .card summary").first.click()
    rule = "breaks invented: It claims nothing that it cannot know."
    page.locator("#rank .card .flags label", has_text=rule).first.click()
    save(page)
    page.keyboard.press("u")  # the last answer is there again, and is replaced
    page.get_by_text("Your last answer").wait_for()
    assert page.locator("#rank .card.placed").count() == 3
    save(page, "Cannot judge")
    first, second = rows(site[1])
    assert sorted(map(len, first["ranking"])) == [1, 2] and 5 in first["ratings"].values() and first["seconds"] > 0
    assert list(first["flags"].values()) == [["breaks_invented"]]
    assert second["ranking"] is None and second["metadata"]["replaces"] == first["id"]
    assert SECRETS["anna"] not in page.url


def test_a_tab_belongs_to_one_labeler(visit, site):
    """Two links in one browser: each tab saves under its own name, and a tab whose session has gone saves nothing."""
    anna = visit("anna")
    ben = visit("ben", new=False)
    for page, name in ((anna, "anna"), (ben, "ben"), (anna, "anna")):
        for key in "123":
            page.keyboard.press(key)
        save(page)
        assert rows(site[1])[-1]["labeler"] == name and page.locator("#who").inner_text() == name
    anna.reload()
    assert task_of(anna) and anna.locator("#who").inner_text() == "anna"
    anna.context.clear_cookies(name="rlhf_session.anna")
    for key in "123":
        anna.keyboard.press(key)
    anna.get_by_role("button", name="Save", exact=True).click()
    anna.get_by_text("this tab belongs to anna").wait_for()
    assert len(rows(site[1])) == 3
    ben.goto(f"{site[0]}/#{SECRETS['anna']}")  # a link that is pasted into a tab which shows the page
    ben.get_by_text("anna", exact=True).wait_for()
    task_of(ben)
    ben.locator("#tab-rank").click()
    for key in ("1", "2", "3", "Enter"):
        ben.keyboard.press(key)
    ben.get_by_text("Saved.").wait_for()
    assert ben.locator("#who").inner_text() == "anna" and len(rows(site[1])) == 4
    assert rows(site[1])[-1]["labeler"] == "anna" and SECRETS["anna"] not in ben.url


def test_a_demonstration_that_is_not_saved_survives_a_reload(visit, site):
    from playwright.sync_api import expect

    page = visit("anna", 390, "dark")
    for before, typed in (("", "It"), ("It", "It is"), ("It is", "It is red")):
        page.get_by_role("tab", name="Demonstrate").click()
        page.locator("#demonstrate .turn").first.wait_for()
        expect(page.get_by_label("The ideal response")).to_have_value(before)
        page.get_by_label("The ideal response").fill(typed)
        if typed != "It is red":
            page.reload()
    page.get_by_label("The ideal response").press("Control+Enter")
    page.get_by_text("Saved.").wait_for()
    assert rows(site[1])[0]["response"] == "It is red" and page.get_by_label("The ideal response").input_value() == ""


def test_texts_show_code_and_bold_words_and_run_nothing(visit, site):
    text = "Use **this** `x < y`:\n```py\nif x:\n  <b>y</b>\n```\n<img src=x onerror=alert(1)> 2 ** 3 ** 4"
    site[1].tasks["t0"].responses[0].text = text
    page = visit("anna")
    task_of(page)
    card = page.locator("#rank .card[data-id=a] .text")
    assert card.locator("strong").all_inner_texts() == ["this"] and card.locator("code").all_inner_texts() == ["x < y"]
    assert card.locator("pre").inner_text().strip() == "if x:\n  <b>y</b>" and card.locator("b, img").count() == 0
    assert "2 ** 3 ** 4" in card.inner_text()


def test_nothing_is_lost_silently(visit, site):
    page = visit("anna")
    first = task_of(page)
    page.keyboard.press("2")
    page.keyboard.press("1")
    for key in "r6fcfk":  # after a click on a checkbox too
        page.keyboard.press(key)
    page.locator("#rank .flags label", has_text="hallucination").nth(0).click()
    page.keyboard.press("f")
    page.keyboard.press("a")
    page.get_by_label("Note").fill("half done")
    page.reload()  # the draft survives
    assert task_of(page) == first and page.locator(RANKED).all_inner_texts() == ["2", "1"]
    assert page.get_by_label("Response 1: quality 6 of 7").is_checked()
    assert page.get_by_label("Note").input_value() == "half done"
    page.get_by_role("button", name="Save", exact=True).click()  # a partial ranking asks first
    page.get_by_text("2 of 3 responses are ranked").wait_for()
    assert rows(site[1]) == []
    save(page)
    second, [row] = task_of(page), rows(site[1])
    assert [len(tie) for tie in row["ranking"]] == [1, 1] and list(row["ratings"].values()) == [6]
    assert list(row["flags"].values()) == [["fails_instruction", "satisfies_constraint"]]
    assert row["metadata"]["note"] == "half done"
    page.keyboard.press("3")
    page.get_by_role("button", name="Undo the last").click()  # can be cancelled, and the draft is there again
    page.get_by_text("Your last answer").wait_for()
    assert task_of(page) == first
    page.get_by_role("button", name="Cancel").click()
    page.wait_for_selector(f"#rank [data-task={second}]")
    assert page.locator(RANKED).all_inner_texts() == ["3"] and len(rows(site[1])) == 1
    other = visit("anna", new=False)  # a second tab of the same labeler moves on
    for one in (page, other):
        for key in "123":
            one.keyboard.press(key)
    save(other)
    save(page)
    page.get_by_text("you have labelled this task").wait_for()
    assert task_of(page) == task_of(other) and len(rows(site[1])) == 2
    moved = site[1].file.path.with_name("moved.jsonl")
    os.rename(site[1].file.path, moved)  # the file of labels goes: nothing is acknowledged until it is back
    for key in "123":
        page.keyboard.press(key)
    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_text("was moved or removed while serving").wait_for()
    os.rename(moved, site[1].file.path)
    save(page)
    assert len(rows(site[1])) == 3


def test_a_manager_adds_pauses_revokes_decides_and_instructs_without_a_restart(visit, managed):
    _, labelling, staff = managed
    anna, ben, boss = visit("anna"), visit("ben"), visit("manager", 390, "dark")
    assert [tab.inner_text() for tab in boss.get_by_role("tab").all()] == ["Manage"]
    for page, order in ((anna, "abc"), (ben, "cab")):
        task_of(page)
        for name in order:
            page.locator(f"#rank .card[data-id={name}] .put").click()
        page.get_by_label("Note").fill(f"{order} it is")
        save(page)
    boss.reload()
    boss.get_by_text("2 of 8 labels").wait_for()
    cells = boss.locator("tbody").nth(0).locator("tr").nth(0).locator("td").all_inner_texts()
    assert cells[:2] == ["anna", "1"] and cells[3] == "33%"  # a over b is the one pair of three that both order alike
    assert boss.locator("tbody").nth(1).locator("td").all_inner_texts()[1:5] == ["t0", "2", "2 of 3", "–"]
    boss.get_by_role("button", name="Open t0").click()  # a disagreement side by side, and the manager's decision
    boss.get_by_text("abc it is").wait_for()
    assert boss.get_by_text("1 > 2 > 3").count() == boss.get_by_text("3 > 1 > 2").count() == 1
    for key in ("1", "2"):
        boss.locator(f".card[data-id={'ac'[int(key) - 1]}] .put").click()
    boss.get_by_role("button", name="Save the decision").click()
    boss.get_by_text("The decision is saved.").wait_for()
    boss.get_by_role("button", name="Decided t0", exact=True).wait_for()
    decided = rows(labelling)[-1]
    assert (decided["labeler"], decided["ranking"], decided["metadata"]["task"]) == ("manager", [["a"], ["c"]], "t0")
    boss.get_by_role("button", name="Pause ben").click()
    boss.get_by_role("button", name="Resume ben").wait_for()
    for key in "123":
        ben.keyboard.press(key)
    ben.get_by_role("button", name="Save", exact=True).click()
    ben.get_by_text("your labelling is paused").wait_for()
    boss.get_by_role("button", name="Resume ben").click()
    boss.get_by_role("button", name="Pause ben").wait_for()
    save(ben)
    boss.get_by_role("button", name="Revoke anna").click()
    boss.locator("tbody").nth(0).get_by_text("revoked").wait_for()
    anna.reload()
    anna.get_by_text("this tab belongs to anna").wait_for()
    boss.get_by_label("Name").fill("cleo")
    boss.get_by_role("button", name="Add a labeler").click()
    boss.get_by_text("The link of cleo").wait_for()
    assert staff.secrets["cleo"] in boss.get_by_text("The link of cleo").inner_text()
    boss.get_by_label("Mark t1", exact=True).check()
    boss.get_by_label("Mark t3", exact=True).click(modifiers=["Shift"])
    boss.get_by_label("Mark t2", exact=True).uncheck()
    boss.get_by_label("cleo", exact=True).check()
    boss.get_by_role("button", name="Assign the marked tasks").click()
    boss.locator("tr", has_text="t3").get_by_text("cleo").wait_for()
    assert labelling.assigned == {"t1": ["cleo"], "t3": ["cleo"]}
    boss.get_by_label("Shown to every labeler").fill("Be fair, and kind.")
    boss.get_by_role("button", name="Save the instructions").click()
    boss.get_by_text("The instructions are saved.").wait_for()
    cleo = visit("cleo")
    assert cleo.locator("#rank").get_by_text("Be fair, and kind.").is_visible()  # open, until it is closed once
    noted = cleo.evaluate("document.querySelector('#rank summary').click(), Object.values(localStorage)")
    assert noted == ['"Be fair, and kind."']  # at once: a reload may come before any later event
    cleo.reload()
    task_of(cleo)
    assert not cleo.locator("#rank").get_by_text("Be fair, and kind.").is_visible()
    again = Staff(staff.folder, ["anna", "ben"], "http://127.0.0.1/", staff.path)  # a restart with the same command
    assert again.secrets == {name: staff.secrets[name] for name in ("ben", "cleo")} and again.manager == staff.manager
    assert again.assigned == staff.assigned
    assert {(staff.folder / f"{name}.txt").stat().st_mode & 0o777 for name in ("labelers", "manager")} == {0o600}
    status = "path => fetch(path, {headers: {'x-tab': 'cleo'}}).then(answer => answer.status)"
    boss.get_by_role("button", name="Train on these labels").click()  # a pipeline of its own; here it has no data
    boss.get_by_text("Ended with code 2: rlhf: error:").wait_for(timeout=120_000)
    assert "data.corpus" in boss.locator("#manage [role=status]").last.inner_text()
    send = "fetch('/api/manage/round', {method: 'POST', headers: {'content-type': 'application/json', 'x-tab': 'cleo'}, body: '{}'})"
    assert cleo.evaluate(send + ".then(answer => answer.status)") == 403
    assert cleo.evaluate(status, "/api/manage") == 403 and boss.evaluate(status, "/api/rank/next") == 403
