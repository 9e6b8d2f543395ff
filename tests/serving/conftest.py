"""One server on the small gold run, asked in this process and, once, over a real socket."""

import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.stages.conftest import gold_run  # noqa: F401 (a fixture)

pytest.importorskip("fastapi", reason="needs the extra `serve`")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@dataclass(frozen=True)
class Served:
    """Models, and what draws with them: the server's worker, in a thread of this process."""

    models: dict[str, Any]
    worker: Any
    engine: Any


def draw_in_thread(policies: dict[str, Any], tasks: dict[str, Any], rows: int, queue: int) -> tuple[Any, Any]:
    """A worker and the engine at the other end of its pipe."""
    import torch

    from rlhf.serving.engine import Engine
    from rlhf.serving.worker import Worker

    here, there = multiprocessing.Pipe()
    worker = Worker(there, policies, tasks, rows)

    def work() -> None:
        with torch.no_grad():
            worker.run()

    threading.Thread(target=work, daemon=True).start()
    return worker, Engine(here, rows, queue)


@pytest.fixture(scope="session")
def served(gold_run) -> Iterator[Served]:  # noqa: F811
    from rlhf.api import LoadedRun
    from rlhf.serving.models import make_models, stages_of
    from rlhf.serving.worker import make_tasks, sizes_of

    run = LoadedRun(gold_run.folder, "cpu")
    stages = stages_of([run], ["sft", "ppo"])
    policies = {name: run.policy(stage) for name, _, stage in stages}
    models = make_models([run], stages, {name: sizes_of(policy) for name, policy in policies.items()})
    worker, engine = draw_in_thread(policies, make_tasks(policies, dict.fromkeys(policies, run)), 8, 16)
    yield Served(models, worker, engine)
    engine.stop()


@pytest.fixture(scope="session")
def models(served) -> Any:
    return served.models


def access(**changes: Any) -> Any:
    from rlhf.serving.security import Access

    return Access(
        **{
            "token": None,
            "labelers": {},
            "loopback": True,
            "max_body_bytes": 2**20,
            "requests_per_minute": 10**6,
            **changes,
        }
    )


def tasks(count: int, responses: int = 3) -> list[Any]:
    """Labelling tasks as `rlhf sample` writes them."""
    from rlhf.data.records import RankedResponse, Ranking

    return [
        Ranking(
            id=f"t{i}",
            prompt=f"what is number {i} ?",
            metadata={"prompt_id": f"p{i}"},
            responses=[
                RankedResponse(id="abcdefg"[j], text=f"answer {j} to {i}", policy="gold/sft@12345678")
                for j in range(responses)
            ],
        )
        for i in range(count)
    ]


def make_desk(path: Any, count: int = 4, labelers: tuple[str, ...] = ("anna", "ben"), per_prompt: int = 2) -> Any:
    from rlhf.serving.desk import Desk
    from rlhf.serving.store import LabelStore

    return Desk(LabelStore(path), tasks(count), labelers, per_prompt, seed=0)


@pytest.fixture(scope="session")
def app(served, tmp_path_factory) -> Any:
    from rlhf.serving.app import make_app

    desk = make_desk(tmp_path_factory.mktemp("desk") / "labels.jsonl", labelers=("local",), per_prompt=1)
    return make_app(served.engine, served.models, access(), desk, 64)


@pytest.fixture
def client(app) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


@pytest.fixture(scope="session")
def server(app) -> Iterator[str]:
    """The address of the same application behind uvicorn, on a free port of loopback."""
    yield from serving(app)


def serving(app: Any) -> Iterator[str]:
    import uvicorn

    from rlhf.serving.protocol import BoundedProtocol

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", http=BoundedProtocol)
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
