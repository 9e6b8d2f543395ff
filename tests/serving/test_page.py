"""The page in a headless Chromium: chat, compare, rank and demonstrate, on a desktop and on a phone."""

import json
from typing import Any

import pytest

from rlhf.commands.import_data import run as import_data
from rlhf.commands.sample import run as sample
from rlhf.config.compose import compose_config
from rlhf.data.reading import load_comparisons
from rlhf.serving.app import make_app
from rlhf.serving.labelling import LabelFile, Labelling
from tests.serving.conftest import access, serving

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
SECRETS = {"anna": "a" * 32, "ben": "b" * 32}
TASKS = 20


@pytest.fixture(scope="module")
def place(gold_run, thread, tmp_path_factory):
    """A server with twenty tasks of `rlhf sample`, and its file of labels."""
    folder = tmp_path_factory.mktemp("page")
    asked = ["sample.responses=3", f"sample.out='{folder}/tasks'", "data.comparisons=null"]
    sample(gold_run.config(f"sample.prompts={TASKS}", *asked))
    tasks, _ = load_comparisons(str(folder / "tasks" / "tasks.jsonl"), "native")
    labelling = Labelling(LabelFile(folder / "labels.jsonl"), tasks, 2, seed=0)
    app = make_app(thread, access(labelers=SECRETS, labelers_chat=True), labelling, "Be fair.")
    for address in serving(app):
        yield address, folder / "labels.jsonl", len(tasks)


class Visit:
    """One page, and what went wrong on it."""

    def __init__(self, browser: Any, address: str, secret: str = "", width: int = 1200, scheme: str = "light"):
        size = {"width": width, "height": 850}
        context = browser.new_context(viewport=size, color_scheme=scheme, has_touch=width < 500)
        self.page = context.new_page()
        self.problems: list[str] = []
        self.page.on("console", lambda m: self.problems.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda r: r.url.startswith(address) or self.problems.append(f"outside: {r.url}"))
        self.page.goto(f"{address}/#{secret}" if secret else f"{address}/")
        self.page.wait_for_selector("body[data-ready]")

    def close(self) -> None:
        wide = self.page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
        assert self.problems == [] and not wide
        self.page.context.close()


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_chat_streams_edits_and_shades(browser, place, width, scheme):
    visit = Visit(browser, place[0], width=width, scheme=scheme)
    page = visit.page
    page.get_by_role("tabpanel", name="Chat").get_by_label("Model").select_option("gold/ppo")
    page.get_by_label("Seed").fill("3")
    page.get_by_label("Message").fill("what is <b>red</b> ?")
    page.keyboard.press("Control+Enter")
    page.get_by_role("button", name="Regenerate").wait_for()
    first = page.locator(".turn.assistant .text").inner_text()
    assert first.strip() and page.locator(".turn.user .text").inner_text() == "what is <b>red</b> ?"
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_role("button", name="Regenerate").wait_for()
    assert page.locator(".turn.assistant .text").inner_text() == first, "the seed repeats"
    page.get_by_label("Shade tokens by").select_option("kl")
    page.locator(".token").first.wait_for()
    assert "".join(page.locator(".token").all_inner_texts()).startswith(first[:10])
    page.get_by_role("button", name="Edit").first.click()
    assert page.get_by_label("Message").input_value() == "what is <b>red</b> ?" and page.locator(".turn").count() == 0
    visit.close()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_dialogue_is_written_ranked_and_saved_as_a_demonstration(browser, place, width, scheme):
    """Any turn can be written or edited; other answers to it are ranked in Compare; the saved dialogue trains SFT."""
    visit = Visit(browser, place[0], SECRETS["anna"], width, scheme)
    page = visit.page
    page.get_by_role("tab", name="Chat").click()
    page.get_by_label("Message").fill("what is red ?")
    page.get_by_role("button", name="Send, and write").click()
    page.get_by_label("The answer").fill("It is a color .")
    page.get_by_label("Message").fill("and blue ?")
    page.keyboard.press("Control+Enter")
    page.get_by_role("button", name="Regenerate").nth(1).wait_for()
    page.locator("#chat .turn.assistant").nth(1).get_by_role("button", name="Edit").click()
    page.get_by_label("The answer").fill("It is one too .")
    page.get_by_label("Message").focus()
    assert "(edited)" in page.locator("#chat .turn.assistant .name").nth(1).inner_text()
    page.get_by_role("button", name="Save as a demonstration").click()
    page.get_by_text("Saved as a demonstration.").wait_for()
    written = json.loads(place[1].read_text().splitlines()[-1])
    assert [turn["content"] for turn in written["prompt"]] == ["what is red ?", "It is a color .", "and blue ?"]
    assert written["response"] == "It is one too ." and written["labeler"] == "anna"
    page.get_by_role("button", name="Rank 4 answers").last.click()
    page.get_by_role("button", name="Save the judgement").wait_for()
    page.wait_for_selector("#compare .strip .chip")
    assert page.locator("#compare .turn").count() == 3 and page.locator("#compare .card").count() == 4
    for key in "1234":
        page.keyboard.press(key)
    page.keyboard.press("Enter")
    page.get_by_text("Who wrote what").wait_for()
    judged = json.loads(place[1].read_text().splitlines()[-1])
    assert judged["kind"] == "ranking" and len(judged["ranking"]) == 4 and len(judged["prompt"]) == 3
    visit.close()


@pytest.mark.parametrize(("width", "scheme"), [(1200, "dark"), (390, "light")])
def test_a_comparison_is_blind_until_it_is_judged(browser, place, width, scheme):
    visit = Visit(browser, place[0], SECRETS["anna"], width, scheme)
    page = visit.page
    page.get_by_role("tab", name="Compare").click()
    page.locator("#compare textarea").fill("what is red ?")
    page.get_by_role("button", name="Ask all").click()
    page.locator("#compare .card").first.wait_for()
    assert "gold/" not in page.locator("#compare .cards").inner_text()
    page.locator("#compare .put").nth(0).click()
    page.locator("#compare .put").nth(1).click()
    page.get_by_role("button", name="Save the judgement").click()
    page.get_by_text("Who wrote what").wait_for()
    assert "gold/" in page.locator("#compare").inner_text()
    visit.close()


def wait_for_another(page: Any, before: str) -> None:
    """Until the page shows another task than `before`, or says that none is left."""
    page.wait_for_function(
        "before => { const at = document.querySelector('#rank [data-task]');"
        " return !at.querySelector('.card') || at.dataset.task !== before }",
        arg=before,
    )


def rank_with_keys(visit: Visit, count: int) -> None:
    for i in range(count):
        visit.page.wait_for_selector("#rank [data-task]:has(.card)")
        before = visit.page.get_attribute("#rank [data-task]", "data-task")
        for key in ("2", "Backspace", "1", "3", "Shift+Digit2") if i % 2 else ("3", "1", "2"):
            visit.page.keyboard.press(key)
        visit.page.keyboard.press("Enter")
        wait_for_another(visit.page, before)


def rank_with_mouse(visit: Visit, count: int) -> None:
    page = visit.page
    for i in range(count):
        page.wait_for_selector("#rank [data-task]:has(.card)")
        before = page.get_attribute("#rank [data-task]", "data-task")
        while (put := page.locator("#rank .card:not(.placed) .put")).count():
            put.first.click()
        if i % 2:
            page.get_by_role("button", name="Tie with above").last.click()
        page.locator("#rank .rating input").nth(4).click()
        page.locator("#rank details summary", has_text="Flags").first.click()
        page.locator("#rank .flags label").first.click()
        page.get_by_role("button", name="Save", exact=True).click()
        wait_for_another(page, before)


def test_twenty_prompts_are_ranked_by_two_labelers(browser, place, tmp_path):
    address, labels, count = place
    assert count == TASKS
    anna = Visit(browser, address, SECRETS["anna"])
    rank_with_keys(anna, 2)
    anna.page.keyboard.press("u")
    anna.page.get_by_text("Your last answer").wait_for()
    assert anna.page.locator("#rank .card.placed").count() == 3
    undone = anna.page.get_attribute("#rank [data-task]", "data-task")
    anna.page.get_by_role("button", name="Cannot judge").click()
    wait_for_another(anna.page, undone)
    rank_with_keys(anna, count - 2)
    anna.page.get_by_text("Nothing is left").wait_for()
    anna.close()
    ben = Visit(browser, address, SECRETS["ben"], 390, "dark")
    rank_with_mouse(ben, count)
    ben.page.get_by_text("Nothing is left").wait_for()
    assert SECRETS["ben"] not in ben.page.url
    ben.close()

    records, _ = load_comparisons(str(labels))
    ranked = [r for r in records if "task" in r.metadata]
    assert len(ranked) == 2 * count and len({(r.labeler, r.metadata["task"]) for r in ranked}) == 2 * count
    assert sum(r.ranking is None for r in ranked) == 1
    ben_said = [r for r in ranked if r.labeler == "ben"]
    assert all(5 in r.ratings.values() and r.flags and r.seconds > 0 for r in ben_said)
    assert any(len(tie) > 1 for r in ben_said for tie in r.ranking) and any(len(r.ranking) == 3 for r in ben_said)
    import_data(compose_config([f"path='{labels}'", f"out='{tmp_path}/imported'"], "import"))
    counts = json.loads((tmp_path / "imported" / "report.json").read_text())["counts"]
    assert counts["rejected"] == 0 and counts["filtered"] == 1


def test_a_demonstration_is_written(browser, place):
    visit = Visit(browser, place[0], SECRETS["anna"], 390)
    visit.page.get_by_role("tab", name="Demonstrate").click()
    visit.page.locator("#demonstrate .turn").first.wait_for()
    visit.page.get_by_label("The ideal response").fill("It is a color .")
    visit.page.get_by_text("Start from a response").click()
    edit, box = visit.page.get_by_role("button", name="Edit response 2"), visit.page.get_by_label("The ideal response")
    edit.click()
    visit.page.get_by_text("Empty the box first").wait_for()
    assert box.input_value() == "It is a color .", "written text stays"
    save = visit.page.locator("#demonstrate").get_by_role("button", name="Save")
    save.click()
    visit.page.get_by_text("Saved.").wait_for()
    written = json.loads(place[1].read_text().splitlines()[-1])
    assert written["response"] == "It is a color ." and "edited" not in written["metadata"]
    visit.page.get_by_text("Start from a response").click()
    draft = visit.page.locator("#demonstrate details .turn p").nth(1).inner_text()
    edit.press("Enter")
    assert box.input_value() == draft and box.evaluate("box => box === document.activeElement")
    box.press("End")
    box.type(" Really .")
    save.click()
    visit.page.wait_for_function("document.querySelector('#demonstrate textarea:last-of-type').value === ''")
    visit.close()
    edited = json.loads(place[1].read_text().splitlines()[-1])
    assert edited["response"] == f"{draft} Really ." and edited["metadata"]["edited"] in "abcde"


@pytest.mark.parametrize(("width", "scheme"), [(1200, "dark"), (390, "light")])
def test_the_next_tokens_of_a_text_are_listed_as_text(browser, place, width, scheme):
    visit = Visit(browser, place[0], width=width, scheme=scheme)
    page = visit.page
    page.get_by_role("tab", name="Next token").click()
    page.get_by_label("Tokens", exact=True).fill("100")
    page.get_by_label("Text, without a chat template").fill("the <b>red</b> <|end|> apple is")
    page.get_by_role("button", name="Show the next tokens").click()
    page.locator("#next tbody tr").first.wait_for()
    cells = [row.split("\t") for row in page.locator("#next tbody tr").all_inner_texts()]
    assert len(cells) == 100 and all(len(row) == 3 for row in cells)
    sums = [float(row[2]) for row in cells]
    assert sums == sorted(sums) and 0 < sums[0] < sums[-1] <= 1.001
    assert page.locator("#next td b").count() == 0
    visit.close()
