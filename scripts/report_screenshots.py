"""Screenshots of a report in headless Chromium, and the checks that need a browser. Not part of the tests.

    python scripts/report_screenshots.py runs/demo/report.html shots/ axe=axe.min.js

Needs Chromium on the machine and the package playwright. Writes <name>-<light|dark>-<wide|phone>.png. Fails if the page prints
to the console, opens a dialog, requests anything but itself, is wider than the screen, cuts a table at 1280 pixels, or, with
`axe=` the file of npm's package axe-core, breaks one of its rules.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

SCREENS = {"wide": (1280, 800), "phone": (390, 844)}
CUT = """[...document.querySelectorAll('.scroll, nav div, .tile, figure')]
    .filter(e => !e.closest('details:not([open])') && e.scrollWidth > e.clientWidth + 1)
    .map(e => `${e.className || e.tagName} ${e.textContent.trim().slice(0, 40)}`)"""
AXE = "axe.run().then(r => r.violations.flatMap(v => v.nodes.map(n => `${v.id}: ${n.html.slice(0, 100)}`)))"


def listen(page: Any, address: str, problems: list[str]) -> None:
    """Record the page's console messages, errors, dialogs and network requests as problems."""

    def on_dialog(dialog: Any) -> None:
        problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def on_request(request: Any) -> None:
        if request.url != address and not request.url.startswith("data:"):
            problems.append(f"request: {request.url}")

    page.on("console", lambda message: problems.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: problems.append(f"page error: {error}"))
    page.on("dialog", on_dialog)
    page.on("request", on_request)


def shoot(page_path: Path, folder: Path, axe: str | None) -> list[str]:
    """Write the screenshots; returns the problems found."""
    from playwright.sync_api import sync_playwright

    problems: list[str] = []
    folder.mkdir(parents=True, exist_ok=True)
    address = page_path.resolve().as_uri()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for screen, (width, height) in SCREENS.items():
            for scheme in ("light", "dark"):
                context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
                page = context.new_page()
                listen(page, address, problems)
                page.goto(address)
                page.wait_for_load_state("networkidle")
                wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                if wider > 0:
                    problems.append(f"{screen}: the page is {wider} pixels wider than the screen")
                if screen == "wide":
                    problems += [f"cut at 1280 pixels: {text}" for text in page.evaluate(CUT)]
                if axe is not None:
                    page.evaluate(Path(axe).read_text(encoding="utf-8"))
                    problems += [f"axe: {text}" for text in page.evaluate(AXE)]
                page.screenshot(path=str(folder / f"{page_path.stem}-{scheme}-{screen}.png"), full_page=True)
                if (screen, scheme) == ("wide", "light"):
                    problems += use(page)
                context.close()
        browser.close()
    return problems


def use(page: Any) -> list[str]:
    """Use the page: open values by keyboard; returns problems."""
    if page.locator("figure").count() == 0:
        return []  # a run without curves
    page.locator("figure details summary").first.focus()
    page.keyboard.press("Enter")
    shown = page.locator("figure details table").first.is_visible()
    return [] if shown else ["the values do not open by keyboard"]


if __name__ == "__main__":
    given = [word for word in sys.argv[1:] if not word.startswith("axe=")]
    if len(given) < 2:
        sys.exit("usage: python scripts/report_screenshots.py REPORT.html … FOLDER [axe=axe.min.js]")
    axe = next((word.removeprefix("axe=") for word in sys.argv[1:] if word not in given), None)
    by_report = {name: shoot(Path(name), Path(given[-1]), axe) for name in given[:-1]}
    for name, problems in by_report.items():
        shown = "; ".join(dict.fromkeys(problems)) or "no problem"
        print(f"{name}: {Path(name).stat().st_size / 1e6:.2f} MB, {shown}")
    sys.exit(1 if any(by_report.values()) else 0)
