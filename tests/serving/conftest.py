"""One server on the small gold run, asked in this process and, once, over a real socket."""

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rlhf.config.commands import ServeConfig
from tests.stages.conftest import gold_run  # noqa: F401 (a fixture)

pytest.importorskip("fastapi", reason="needs the extra `serve`")
SECRETS = {"anna": "a" * 32, "ben": "b" * 32}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("needs an installed Chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield made
        made.close()


@pytest.fixture
def visit(browser, request):
    """Opens a labeler's link, or the page without one, in the same browser unless a new one is asked for; no console error, no
    request outside.
    """
    site = request.getfixturevalue("managed" if "managed" in request.fixturenames else "site")
    secrets = SECRETS if len(site) == 2 else site[2].secrets
    contexts, problems = [], []

    def open_page(name="", width=1280, scheme="light", new=True):
        if new or not contexts:
            size = {"width": width, "height": 850}
            contexts.append(browser.new_context(viewport=size, color_scheme=scheme, has_touch=width < 500))
        page = contexts[-1].new_page()
        refused = "Failed to load resource: the server responded"  # of requests that a test wants refused
        page.on("console", lambda m: m.type == "error" and refused not in m.text and problems.append(m.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda r: r.url.startswith(site[0]) or problems.append(f"outside: {r.url}"))
        secret = site[2].manager if name == "manager" else secrets[name] if name else ""
        page.goto(f"{site[0]}/#{secret}")
        page.wait_for_selector("body[data-ready]")
        return page

    yield open_page
    for context in contexts:
        for page in context.pages:
            assert not page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
        context.close()
    assert problems == []


@pytest.fixture(scope="session")
def thread(gold_run) -> Iterator[Any]:  # noqa: F811
    """The models of the small run, and the thread that draws with them: 8 responses at a time, 16 more wait."""
    from rlhf.serving.models import ModelThread, served_models

    with served_models(gold_run.config(), gold_run.folder, ["sft", "ppo"], 8) as (models, context):
        thread = ModelThread(models, 8, 16, 64, context)
        yield thread
        thread.stop()


def access(labelers: Any = None, manager: str | None = None, loopback: bool = True, **changes: Any) -> Any:
    from rlhf.serving.security import Access

    return Access(ServeConfig(**{"requests_per_minute": 10**6, **changes}), labelers or {}, loopback, manager)


def tasks(count: int, responses: int = 3) -> list[Any]:
    from rlhf.data.records import RankedResponse, Ranking

    made = []
    for i in range(count):
        texts = {"abcdefg"[j]: f"answer {j} to {i}" for j in range(responses)}
        answers = [RankedResponse(id=name, text=text, policy="gold/sft@12345678") for name, text in texts.items()]
        given = {"prompt": f"what is number {i} ?", "responses": answers, "metadata": {"prompt_id": f"p{i}"}}
        made.append(Ranking(id=f"t{i}", **given))
    return made


def make_labelling(path: Any, count: int = 4, per_prompt: int = 2, gold: Any = (), **settings: Any) -> Any:
    from rlhf.serving.labelling import LabelFile, Labelling

    settings_of = ServeConfig(labels_per_prompt=per_prompt, **settings)
    return Labelling(LabelFile(path), tasks(count), settings_of, 0, gold)


@pytest.fixture(scope="session")
def app(thread, tmp_path_factory) -> Any:
    from rlhf.serving.app import make_app

    labelling = make_labelling(tmp_path_factory.mktemp("labels") / "labels.jsonl", per_prompt=1)
    return make_app(thread, access(), labelling)


@pytest.fixture
def client(app) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


@pytest.fixture(scope="session")
def server(app) -> Iterator[str]:
    """The address of the same application behind uvicorn, on a free port of loopback."""
    yield from serving(app)


def serving(app: Any) -> Iterator[str]:
    from rlhf.commands.serve import make_server

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        server = make_server(app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        for _ in range(500):
            if server.started:
                break
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
        server.should_exit = True
        thread.join(10)


def emptied(thread: Any) -> bool:
    """Whether all places are free within ten seconds."""
    for _ in range(200):
        if not len(thread):
            return True
        time.sleep(0.05)
    return False
