"""The page in a headless Chromium: chat, compare, rank and demonstrate, on a desktop and on a phone."""

import json

import pytest

from rlhf.commands.sample import run as sample
from rlhf.config.commands import ServeConfig
from rlhf.data.reading import load_comparisons
from rlhf.serving.app import make_app
from rlhf.serving.labelling import LabelFile, Labelling
from tests.serving.conftest import SECRETS, access, serving

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def site(gold_run, thread, tmp_path_factory):
    """A server with tasks of `rlhf sample`, and its labelling."""
    folder = tmp_path_factory.mktemp("page")
    asked = ["sample.responses=3", f"sample.out='{folder}/tasks'", "data.comparisons=null"]
    sample(gold_run.config("sample.prompts=4", *asked))
    tasks, _ = load_comparisons(str(folder / "tasks" / "tasks.jsonl"), "native")
    labelling = Labelling(LabelFile(folder / "labels.jsonl"), tasks, ServeConfig(labels_per_prompt=2), 0)
    labelling.instructions = "Be fair."
    app = make_app(thread, access(labelers=SECRETS, labelers_chat=True), labelling)
    for address in serving(app):
        yield address, labelling


def last(site):
    return json.loads(site[1].file.path.read_text().splitlines()[-1])


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_chat_streams_edits_and_shades(visit, site, width, scheme):
    page = visit("", width, scheme)
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
    page.locator(".turn .token").first.wait_for()
    assert page.get_by_text("KL in nats, about").is_visible()
    assert "".join(page.locator(".turn .token").all_inner_texts()).startswith(first[:10])
    page.get_by_role("button", name="Edit").first.click()
    assert page.get_by_label("Message").input_value() == "what is <b>red</b> ?" and page.locator(".turn").count() == 0


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_dialogue_is_written_ranked_and_saved_as_a_demonstration(visit, site, width, scheme):
    """Any turn can be written or edited; other answers to it are ranked in Compare; the saved dialogue trains SFT."""
    page = visit("anna", width, scheme)
    page.get_by_role("tab", name="Chat").click()
    page.get_by_label("Message").fill("what is red ?")
    page.get_by_role("button", name="Send, and write").click()
    page.get_by_label("The answer").fill("It is a color .")
    page.get_by_label("Message").fill("and blue ?")
    page.keyboard.press("Control+Enter")
    page.get_by_role("button", name="Regenerate").nth(1).wait_for()
    page.locator("#chat .turn.assistant").nth(1).get_by_role("button", name="Edit").click()
    page.get_by_label("The answer").fill("It is one too .")
    # at once, though the box closes and the button moves
    page.get_by_role("button", name="Save as a demonstration").click()
    page.get_by_text("Saved as a demonstration.").wait_for()
    assert "(edited)" in page.locator("#chat .turn.assistant .name").nth(1).inner_text()
    written = last(site)
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
    judged = last(site)
    assert judged["kind"] == "ranking" and len(judged["ranking"]) == 4 and len(judged["prompt"]) == 3
