"""Screenshots of a report in headless Chromium, and the checks that need a browser. Not part of the tests.

    python scripts/report_screenshots.py runs/demo/report.html shots/

Needs Chromium on the machine and the package playwright. Writes <name>-<light|dark>-<wide|phone>.png. Fails if the page prints
to the console, opens a dialog, requests anything but itself, is wider than the screen, or has a switch that does not work.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

SCREENS = {"wide": (1360, 900), "phone": (390, 844)}


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


def shoot(page_path: Path, folder: Path) -> list[str]:
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
                page.screenshot(path=str(folder / f"{page_path.stem}-{scheme}-{screen}.png"), full_page=True)
                if (screen, scheme) == ("wide", "light"):
                    problems += use(page)
                context.close()
        browser.close()
    return problems


def use(page: Any) -> list[str]:
    """Use the page: choose a logarithmic axis, open values by keyboard; returns problems."""
    if page.locator("figure").count() == 0:
        return []  # a run without curves
    problems = []
    logs = page.locator("figure .over-log")
    if logs.count():
        box = page.locator("figure .log input").first
        box.check()
        if not logs.first.is_visible():
            problems.append("a logarithmic axis is not shown")
        box.uncheck()
    values = page.locator("figure details summary").first
    values.focus()
    page.keyboard.press("Enter")
    if not page.locator("figure details table").first.is_visible():
        problems.append("the values do not open by keyboard")
    return problems


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python scripts/report_screenshots.py REPORT.html … FOLDER")
    by_report = {name: shoot(Path(name), Path(sys.argv[-1])) for name in sys.argv[1:-1]}
    for name, problems in by_report.items():
        shown = "; ".join(dict.fromkeys(problems)) or "no problem"
        print(f"{name}: {Path(name).stat().st_size / 1e6:.2f} MB, {shown}")
    sys.exit(1 if any(by_report.values()) else 0)
