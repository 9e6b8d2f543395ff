"""One server on the small gold run, asked in this process and, once, over a real socket."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.stages.conftest import gold_run  # noqa: F401 (a fixture)

pytest.importorskip("fastapi", reason="needs the extra `serve`")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def models(gold_run) -> Any:  # noqa: F811
    from rlhf.api import LoadedRun
    from rlhf.serving.models import load_models

    return load_models([LoadedRun(gold_run.folder, "cpu")], ["sft", "ppo"])


def access(**changes: Any) -> Any:
    from rlhf.serving.security import Access

    return Access(**{"token": None, "labelers": {}, "loopback": True, "max_body_bytes": 2**20,
                     "requests_per_minute": 10**6, **changes})  # fmt: skip


def tasks(count: int, responses: int = 3) -> list[Any]:
    """Labelling tasks as `rlhf sample` writes them."""
    from rlhf.data.records import RankedResponse, Ranking

    return [
        Ranking(id=f"t{i}", prompt=f"what is number {i} ?", metadata={"prompt_id": f"p{i}"},
                responses=[RankedResponse(id="abcdefg"[j], text=f"answer {j} to {i}", policy="gold/sft@12345678")
                           for j in range(responses)])
        for i in range(count)
    ]  # fmt: skip


def make_desk(path: Any, count: int = 4, labelers: tuple[str, ...] = ("anna", "ben"), per_prompt: int = 2) -> Any:
    from rlhf.serving.desk import Desk
    from rlhf.serving.store import LabelStore

    return Desk(LabelStore(path), tasks(count), labelers, per_prompt, seed=0)


@pytest.fixture(scope="session")
def app(models, tmp_path_factory) -> Iterator[Any]:
    from rlhf.serving.app import Limits, make_app

    desk = make_desk(tmp_path_factory.mktemp("desk") / "labels.jsonl", labelers=("local",), per_prompt=1)
    made = make_app(models, access(), Limits(batch=8, queue=16, max_new_tokens=64), desk)
    yield made
    made.engine.stop()


@pytest.fixture
def client(app) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


@pytest.fixture(scope="session")
def server(app) -> Iterator[str]:
    """The address of the same application behind uvicorn, on a free port of loopback."""
    yield from serving(app)


def serving(app: Any) -> Iterator[str]:
    import uvicorn

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        for _ in range(500):
            if server.started:
                break
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
        server.should_exit = True
        thread.join(10)
