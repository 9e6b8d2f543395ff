"""The pages of `rlhf serve` in a headless Chromium, as labelers and their manager use them: widths, colours, mouse, touch and keyboard.

    rlhf pipeline run=demo experiment=gold                 # or any other run with an SFT model and comparisons
    head -n 2000 runs/demo/label/comparisons.jsonl > labelled.jsonl   # prompts without labels are left for the tasks
    rlhf pipeline run=tour rounds=2 parents.tokenizer=demo parents.pretrain=demo parents.sft=demo sample.prompts=24 \\
        sample.responses=3 data.comparisons=labelled.jsonl data.prompts=runs/demo/world/prompts.jsonl \\
        reward.batch_prompts=16 reward.lr=6e-4 ppo.episodes=512 ppo.episodes_per_update=128 ppo.lr=1.5e-4 \\
        ppo.critic_lr=5e-4 rollout.max_new_tokens=40
    python scripts/serve_tour.py --run tour --axe axe.min.js --pictures tour

The last pipeline stops where the tasks of round 2 wait for labels. For each width, colour and way of pointing, one labeler then gives
twenty rankings by drag alone or by keys, with a reload in the middle, saves a dialogue from Chat as a demonstration, and ranks answers in
Compare. Two labelers work in two tabs of one browser. The manager decides, adds a labeler, assigns a task, pauses, revokes, starts the
training on these labels and sees what it changed. Nine long answers are ranked without scrolling. At the end the file of labels is
compared with what was done on the pages. Problems are a console error, a request to another host, a page wider than its window, and
what axe-core finds (its axe.min.js is npm's). --pictures: a folder for a picture of each page.
"""

import argparse
import itertools
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

VIEWS = list(itertools.product((1280, 390), ("light", "dark"), ("mouse", "touch", "keyboard")))
HEIGHT = {1280: 850, 390: 700}
RANKINGS = 20
LONG = " ".join(f"This is sentence {i} of a long answer, which goes on and on." for i in range(60))
problems: list[str] = []


def start(run: str) -> tuple[subprocess.Popen[str], str]:
    """The server of a run whose tasks have no labels yet, and its address."""
    names = ",".join(["-".join(map(str, view)) for view in VIEWS] + ["anna", "ben"])
    settings = f"serve.port=0 serve.labelers_chat=true serve.pipeline={run} serve.requests_per_minute=1000000".split()
    settings += [f"run={run}", f"labelers=[{names}]", f"labels_per_prompt={len(VIEWS) + 4}"]
    command = [sys.executable, "-u", "-m", "rlhf", "serve", *settings]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(r"(http://\S+/) \(Ctrl-C", line):
            return server, found[1]
    raise SystemExit("the server did not start")


def links(folder: Path, address: str) -> dict[str, str]:
    """Each person's link."""
    lines = "".join((folder / name).read_text("utf-8") for name in ("labelers.txt", "manager.txt")).splitlines()
    return {name: address + "#" + link.partition("#")[2] for name, link in (line.split() for line in lines)}


def open_view(browser: Any, width: int, scheme: str, touch: bool = False) -> Any:
    return browser.new_context(viewport={"width": width, "height": HEIGHT[width]}, color_scheme=scheme, has_touch=touch)


def visit(context: Any, link: str, refused: bool = False) -> Page:
    """A person's page. refused: the server is to refuse some of its requests, which Chromium logs as errors."""
    page, home = context.new_page(), link.partition("#")[0]
    known = "Failed to load resource: the server responded with a status of 4" if refused else "\0"
    page.on("console", lambda said: problems.extend([said.text] * (said.type == "error" and known not in said.text)))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda asked: problems.extend([] if asked.url.startswith(home) else [f"outside: {asked.url}"]))
    page.goto(link)
    page.wait_for_selector("body[data-ready]")
    return page


def look(page: Page, name: str, asked: Any) -> None:
    """axe-core on what is shown, and a picture."""
    if page.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
        problems.append(f"{name}: wider than the window")
    if asked.axe:
        page.evaluate(asked.axe.read_text("utf-8"))  # the page's policy forbids no script of the browser's own
        found = "axe.run().then((found) => found.violations.map((one) => `${one.id}: ${one.nodes[0].html}`))"
        problems.extend(f"{name}: axe: {one}" for one in page.evaluate(found))
    if asked.pictures:
        page.screenshot(path=asked.pictures / f"{name}.png")


def drag(page: Page, chip: Any, x: float, y: float, touch: bool) -> None:
    box = chip.bounding_box()
    first = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    if not touch:
        page.mouse.move(*first)
        page.mouse.down()
        page.mouse.move(x, y, steps=6)
        page.mouse.up()
        return
    session = page.context.new_cdp_session(page)
    for kind, (to_x, to_y) in (("touchStart", first), ("touchMove", (x + 20, y)), ("touchMove", (x, y))):
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": to_x, "y": to_y}]})
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


def place_all(page: Page, way: str) -> None:
    """Put all responses of the task in an order, those that a draft holds first."""
    page.wait_for_selector("#rank .card")
    count = page.locator("#rank .card").count()
    for place in range(page.locator("#rank .card.placed").count(), count):
        if way == "keyboard":
            page.keyboard.press(str(place + 1))
            continue
        divider: Any = page.locator("#rank .divider").bounding_box()
        drag(page, page.locator("#rank .divider ~ .chip").last, divider["x"] + 1, divider["y"] + 5, way == "touch")
    page.wait_for_function("count => document.querySelectorAll('#rank .card.placed').length === count", arg=count)


def save(page: Page, way: str) -> None:
    """Save, and wait for the next task, or for the word that none is left."""
    before = page.get_attribute("#rank [data-task]", "data-task")
    if way == "keyboard":
        page.keyboard.press("Enter")
    else:
        page.get_by_role("button", name="Save", exact=True).click()
    left = "before => !document.querySelector('#rank .card') || document.querySelector('#rank [data-task]').dataset.task !== before"
    page.wait_for_function(left, arg=before)


def rank(page: Page, way: str) -> None:
    place_all(page, way)
    save(page, way)


def label(browser: Any, people: dict[str, str], asked: Any) -> None:
    """Rankings in every view, with a reload in the middle of the tenth; then the other tabs."""
    for width, scheme, way in VIEWS:
        name = f"{width}-{scheme}-{way}"
        context = open_view(browser, width, scheme, way == "touch")
        page = visit(context, people[name])
        look(page, f"rank-{name}", asked)
        page.locator("#rank summary", has_text="Instructions").click()
        for number in range(RANKINGS):
            if number == 9:
                page.keyboard.press("1")
                page.reload()
                page.wait_for_selector("#rank .card.placed")  # what was begun is there
                look(page, f"rank-begun-{name}", asked)
            rank(page, way)
        page.get_by_role("tab", name="Demonstrate").click()
        page.locator("#demonstrate .turn").first.wait_for()
        look(page, f"demonstrate-{name}", asked)
        talk(page, name, asked)
        context.close()
        print(f"{name}: {RANKINGS} rankings", flush=True)


def talk(page: Page, name: str, asked: Any) -> None:
    """A dialogue with a turn of the model, changed, and one of the labeler's own, saved as a demonstration; four answers to its first
    turn are ranked, and two models compared.
    """
    page.get_by_role("tab", name="Chat").click()
    page.get_by_label("Message").fill("Tell me three animals.")
    page.get_by_role("button", name="Send", exact=True).click()
    page.get_by_role("button", name="Regenerate").wait_for()
    page.locator(".turn.assistant").get_by_role("button", name="Edit").click()
    page.get_by_label("The answer").fill("Dog, cat and cow.")
    page.get_by_label("Message").fill("And one more?")
    page.get_by_role("button", name="Send, and write").click()
    page.get_by_label("The answer").fill("Duck.")
    page.get_by_role("button", name="Save as a demonstration").click()
    page.get_by_text("Saved as a demonstration.").wait_for()
    look(page, f"chat-{name}", asked)
    page.get_by_role("button", name="Rank 4 answers").first.click()
    judge(page, 4)
    asking = page.get_by_label("Prompt").and_(page.locator("#compare textarea"))
    asking.fill("Find the people. Ben met Lily at the school.")
    page.get_by_role("button", name="Ask all").click()
    judge(page, 2)
    look(page, f"compared-{name}", asked)


def judge(page: Page, count: int) -> None:
    page.wait_for_function("count => document.querySelectorAll('#compare .strip .chip').length === count", arg=count)
    for _ in range(count):
        page.locator("#compare .card:not(.placed) .put").first.click()
    page.get_by_role("button", name="Save the judgement").click()
    page.get_by_role("heading", name="Who wrote what").wait_for()


def rank_long(browser: Any, link: str, asked: Any) -> None:
    """Nine long answers: the prompt, all chips and Save are in view before, during and after the ranking, wherever the page is scrolled."""
    responses = [{"id": letter, "text": LONG} for letter in "abcdefghi"]
    messages = [{"role": "user", "content": "Write something long."}]
    body = {"task": {"name": "long", "messages": messages, "responses": responses}, "progress": {"done": 0, "left": 1}}
    hidden = """() => [...document.querySelectorAll('#rank .turn, #rank .chip, #rank .bar button.main')].filter((one) => {
        const { left, right, top, bottom } = one.getBoundingClientRect();
        return top < 0 || left < 0 || bottom > innerHeight || right > innerWidth
            || !one.contains(document.elementFromPoint((left + right) / 2, (top + bottom) / 2));
    }).length"""
    for width, scheme, way in VIEWS:
        context = open_view(browser, width, scheme, way == "touch")
        context.route("**/api/rank/next", lambda route: route.fulfill(json=body))
        page = visit(context, link)
        page.locator("#rank summary", has_text="Instructions").click()
        before = page.evaluate("scrollY")
        covered = page.evaluate(hidden)
        place_all(page, way)
        covered += page.evaluate(hidden)
        if page.evaluate("scrollY") != before:
            problems.append(f"nine answers, {width} {scheme} {way}: the page was scrolled")
        look(page, f"nine-{width}-{scheme}-{way}", asked)
        page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
        covered += page.evaluate(hidden)
        if covered or page.get_by_role("button", name="Save", exact=True).is_disabled():
            problems.append(f"nine answers, {width} {scheme} {way}: {covered} elements out of view")
        context.close()
    print("nine long answers", flush=True)


def manage(browser: Any, people: dict[str, str], asked: Any) -> None:
    """Two labelers in two tabs of one browser; then the manager, in every width and colour."""
    both = open_view(browser, 1280, "light")
    anna, ben = visit(both, people["anna"]), visit(both, people["ben"])
    for page in (anna, ben, anna, ben):
        rank(page, "keyboard")
    first = True
    for width, scheme in dict.fromkeys(view[:2] for view in VIEWS):
        context = open_view(browser, width, scheme, width < 500)
        page, name = visit(context, people["manager"]), f"{width}-{scheme}"
        page.locator("#manage tbody tr").first.wait_for()
        look(page, f"manage-{name}", asked)
        page.locator("#manage tbody button", has_text=re.compile("^Open$")).first.click()
        page.locator("#manage .card .put").first.wait_for()
        look(page, f"manage-task-{name}", asked)
        for _ in range(2):
            page.locator("#manage .card:not(.placed) .put").first.click()
        page.get_by_role("button", name="Save the decision").click()
        page.get_by_text("The decision is saved.").wait_for()
        staff(browser, page, f"new-{name}", people["manager"])
        if first:
            for other in (anna, ben):  # every task needs a label before the round can be trained on
                other.reload()
                other.wait_for_selector("#rank .card")
                while other.locator("#rank .card").count():
                    rank(other, "keyboard")
            page.get_by_role("button", name="Train on these labels").click()
            page.get_by_text("Running").wait_for()
            look(page, f"training-{name}", asked)
        page.get_by_text("Pairs that the reward model orders").wait_for(timeout=1_800_000)
        page.get_by_role("heading", name="Round").scroll_into_view_if_needed()
        look(page, f"round-{name}", asked)
        first = False
        context.close()
        print(f"manager {name}", flush=True)
    both.close()


def staff(browser: Any, page: Page, new: str, link: str) -> None:
    """A labeler who is added gets the task that is assigned to nobody else, is paused, let in again, and revoked."""
    page.get_by_label("Name", exact=True).fill(new)
    page.get_by_role("button", name="Add a labeler").click()
    told = page.get_by_text(f"The link of {new}")
    told.wait_for()
    secret = told.inner_text().partition("#")[2]
    box = page.get_by_label(re.compile("^Mark ")).last
    task = str(box.get_attribute("value"))
    box.check()
    page.get_by_label(new, exact=True).check()
    page.get_by_role("button", name="Assign the marked tasks").click()
    page.locator("#manage tr", has=page.get_by_label(f"Mark {task}", exact=True)).get_by_text(new).wait_for()
    context = open_view(browser, 390, "light")
    labeler = visit(context, f"{link.partition('#')[0]}#{secret}", refused=True)
    labeler.wait_for_selector(f"#rank [data-task='{task}']")
    place_all(labeler, "keyboard")
    page.get_by_role("button", name=f"Pause {new}").click()
    page.get_by_role("button", name=f"Resume {new}").wait_for()
    labeler.keyboard.press("Enter")
    labeler.get_by_text("your labelling is paused").wait_for()
    page.get_by_role("button", name=f"Resume {new}").click()
    page.get_by_role("button", name=f"Pause {new}").wait_for()
    save(labeler, "keyboard")
    page.get_by_role("button", name=f"Revoke {new}").click()
    page.get_by_role("button", name=f"Revoke {new}").wait_for(state="detached")
    labeler.reload()
    labeler.get_by_text(f"this tab belongs to {new}").wait_for()
    context.close()


def check(labels: Path, tasks: int) -> None:
    """The file holds what each page did, under its own name."""
    rows = [json.loads(line) for line in labels.read_text("utf-8").splitlines()]
    ranked = Counter(row["labeler"] for row in rows if "task" in row["metadata"] and row["kind"] == "ranking")
    compared = Counter(row["labeler"] for row in rows if "comparison" in row["metadata"])
    written = {row["labeler"]: row for row in rows if row["kind"] == "demonstration"}
    for view in VIEWS:
        name = "-".join(map(str, view))
        turns = [message["content"] for message in written[name]["prompt"]] + [written[name]["response"]]
        if (ranked[name], compared[name], turns[1:]) != (RANKINGS, 2, ["Dog, cat and cow.", "And one more?", "Duck."]):
            problems.append(f"{name}: {ranked[name]} rankings, {compared[name]} comparisons, the dialogue {turns}")
    new = [name for name in ranked if name.startswith("new-")]
    if (ranked["anna"], ranked["ben"]) != (tasks, tasks) or any(ranked[name] != 1 for name in new) or len(new) != 4:
        problems.append(f"of the others: {ranked}")
    if wrong := [row["id"] for row in rows if row["kind"] == "ranking" and "comparison" not in row["metadata"]
                 and row["labeler"] != "manager" and [len(tie) for tie in row["ranking"]] != [1] * len(row["responses"])]:  # fmt: skip
        problems.append(f"not all responses are ranked: {wrong}")
    print(f"{len(rows)} records of {len({row['labeler'] for row in rows})} people")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True)
    parser.add_argument("--axe", type=Path)
    parser.add_argument("--pictures", type=Path)
    asked = parser.parse_args()
    if asked.pictures:
        asked.pictures.mkdir(parents=True, exist_ok=True)
    folder = Path("runs") / asked.run
    if (folder / "serve").exists():
        parser.error(f"{folder / 'serve'} is there: want a run whose tasks have no labels")
    server, address = start(asked.run)
    try:
        with sync_playwright() as playwright:
            chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            people = links(folder / "serve", address)
            rank_long(browser, people["anna"], asked)
            label(browser, people, asked)
            manage(browser, people, asked)
            browser.close()
    finally:
        server.terminate()
        server.wait()
    check(folder / "serve" / "labels.jsonl", len((folder / "sample" / "tasks.jsonl").read_text("utf-8").splitlines()))
    for problem in problems:
        print(problem)
    sys.exit(f"{len(problems)} problems" if problems else 0)


if __name__ == "__main__":
    main()
