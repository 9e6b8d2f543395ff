"""The pages of `rlhf serve` in a headless Chromium, as labelers and the manager use them: widths, colours, mouse, touch and keyboard.

    rlhf sample run=demo sample.prompts=60 sample.responses=3
    python scripts/serve_tour.py --run demo --axe axe.min.js --pictures tour

Twenty rankings by drag alone or by keys, with a reload in the middle, per width and colour; two labelers in two tabs of one browser; then
a manager who decides, adds, pauses and revokes, starts the next round and sees what it changed. Fails on a console error, a request
to another host, or a violation that axe-core finds (its axe.min.js is npm's). --pictures: a folder for a picture of each page.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

VIEWS = [(1280, "light", "mouse"), (1280, "dark", "keyboard"), (390, "light", "touch"), (390, "dark", "touch")]
RANKINGS = 20
problems: list[str] = []


def start(run: str, folder: Path) -> tuple[subprocess.Popen[str], str]:
    """The server of a run, with its own file of labels, and its address."""
    names = [f"{way}-{width}-{scheme}" for width, scheme, way in VIEWS] + ["anna", "ben"]
    command = [
        sys.executable,
        "-u",
        "-m",
        "rlhf",
        "serve",
        f"run={run}",
        f"labelers=[{','.join(names)}]",
        "labels_per_prompt=6",
    ]
    command += [
        "serve.port=0",
        f"serve.labels='{folder}/labels.jsonl'",
        "serve.labelers_chat=true",
        f"serve.pipeline={run}",
    ]
    command += ["serve.stages=[sft,ppo]", "serve.requests_per_minute=1000000"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(r"(http://\S+/) \(Ctrl-C", line):
            return server, found[1]
    raise SystemExit("the server did not start")


def links(folder: Path, address: str) -> dict[str, str]:
    """Each person's link."""
    lines = [
        *(folder / "labelers.txt").read_text("utf-8").splitlines(),
        *(folder / "manager.txt").read_text("utf-8").splitlines(),
    ]
    return {name: address + "#" + link.partition("#")[2] for name, link in (line.split() for line in lines)}


def visit(context: Any, link: str) -> Page:
    page, home = context.new_page(), link.partition("#")[0]
    page.on("console", lambda message: problems.extend([message.text] if message.type == "error" else []))
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
        page.evaluate(
            asked.axe.read_text("utf-8")
        )  # in the page's world; its policy forbids no script of the browser's own
        for found in page.evaluate(
            "axe.run().then((found) => found.violations.map((one) => `${one.id}: ${one.nodes[0].html}`))"
        ):
            problems.append(f"{name}: axe: {found}")
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


def rank(page: Page, way: str) -> None:
    """Put all responses of the task in an order, and save."""
    page.wait_for_selector("#rank .card")
    before = page.get_attribute("#rank [data-task]", "data-task")
    count = page.locator("#rank .card").count()
    for place in range(page.locator("#rank .card.placed").count(), count):
        if way == "keyboard":
            page.keyboard.press(str(place + 1))
            continue
        divider: Any = page.locator("#rank .divider").bounding_box()
        chip = page.locator("#rank .divider ~ .chip").last
        drag(page, chip, divider["x"] + 1, divider["y"] + 5, way == "touch")
    page.wait_for_function("count => document.querySelectorAll('#rank .card.placed').length === count", arg=count)
    if way == "keyboard":
        page.keyboard.press("Enter")
    else:
        page.get_by_role("button", name="Save", exact=True).click()
    page.wait_for_function("before => document.querySelector('#rank [data-task]')?.dataset.task !== before", arg=before)


def label(browser: Any, people: dict[str, str], asked: Any) -> None:
    """Rankings in every view, with a reload in the middle of the tenth."""
    for width, scheme, way in VIEWS:
        context = browser.new_context(
            viewport={"width": width, "height": 850}, color_scheme=scheme, has_touch=way == "touch"
        )
        name = f"{way}-{width}-{scheme}"
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
        for tab in ("Demonstrate", "Chat", "Compare"):
            page.get_by_role("tab", name=tab).click()
            look(page, f"{tab.lower()}-{name}", asked)
        page.locator("#compare").get_by_label("Prompt").fill("what is red ?")
        page.get_by_role("button", name="Ask all").click()
        page.wait_for_selector("#compare .strip .chip")
        page.keyboard.press("d")
        look(page, f"compared-{name}", asked)
        context.close()
        print(f"{name}: {RANKINGS} rankings", flush=True)


def manage(browser: Any, people: dict[str, str], asked: Any) -> None:
    """Two labelers in two tabs of one browser; then the manager, in every width and colour."""
    both = browser.new_context(viewport={"width": 1280, "height": 850})
    anna, ben = visit(both, people["anna"]), visit(both, people["ben"])
    for page in (anna, ben, anna):
        rank(page, "keyboard")
    for width, scheme in dict.fromkeys(view[:2] for view in VIEWS):
        context = browser.new_context(
            viewport={"width": width, "height": 850}, color_scheme=scheme, has_touch=width < 500
        )
        page, name = visit(context, people["manager"]), f"{width}-{scheme}"
        page.locator("#manage tbody tr").first.wait_for()
        look(page, f"manage-{name}", asked)
        page.get_by_role("button", name=re.compile("^Open ")).first.click()
        page.locator("#manage .card .put").first.wait_for()
        look(page, f"manage-task-{name}", asked)
        for _ in range(2):
            page.locator("#manage .card:not(.placed) .put").first.click()
        page.get_by_role("button", name="Save the decision").click()
        page.get_by_text("The decision is saved.").wait_for()
        new = f"new-{name}"
        page.get_by_label("Name").fill(new)
        page.get_by_role("button", name="Add a labeler").click()
        page.get_by_text(f"The link of {new}").wait_for()
        for does, then in (("Pause", "Resume"), ("Resume", "Pause"), ("Revoke", None)):
            page.get_by_role("button", name=f"{does} {new}").click()
            if then:
                page.get_by_role("button", name=f"{then} {new}").wait_for()
        page.get_by_role("button", name=f"Revoke {new}").wait_for(state="detached")
        if width == 1280 and scheme == "light":
            page.get_by_role("button", name="Train on these labels").click()
            page.get_by_text("Running").wait_for()
        page.get_by_text("Pairs that the reward model orders").wait_for(timeout=600_000)
        page.get_by_role("heading", name="Round").scroll_into_view_if_needed()
        look(page, f"round-{name}", asked)
        context.close()
        print(f"manager {name}", flush=True)
    both.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True)
    parser.add_argument("--axe", type=Path)
    parser.add_argument("--pictures", type=Path)
    asked = parser.parse_args()
    if asked.pictures:
        asked.pictures.mkdir(parents=True, exist_ok=True)
    folder = Path("runs") / asked.run / "tour"
    shutil.rmtree(folder, ignore_errors=True)
    server, address = start(asked.run, folder)
    try:
        with sync_playwright() as playwright:
            chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            people = links(folder, address)
            label(browser, people, asked)
            manage(browser, people, asked)
            browser.close()
    finally:
        server.terminate()
        server.wait()
    for problem in problems:
        print(problem)
    sys.exit(f"{len(problems)} problems" if problems else 0)


if __name__ == "__main__":
    main()
