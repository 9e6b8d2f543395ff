"""The server as one ASGI application: the API, the labelling routes, the page, and the guard around them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

from rlhf.serving.desk import Desk
from rlhf.serving.engine import Engine
from rlhf.serving.errors import handlers
from rlhf.serving.models import ServedModel
from rlhf.serving.openai_api import make_router
from rlhf.serving.page_api import Server, make_page_router
from rlhf.serving.security import Access, Guard

PAGE = Path(__file__).parent / "page"


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one server does at once."""

    batch: int = 32  # responses of one model that are drawn together
    queue: int = 64  # that wait
    max_new_tokens: int = 1024


def make_app(
    models: dict[str, ServedModel], access: Access, limits: Limits, desk: Desk, instructions: str = ""
) -> Guard:
    """The application; its models' thread starts and stops with it."""
    engine = Engine({name: model.policy for name, model in models.items()}, limits.batch, limits.queue)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        engine.stop()

    app = FastAPI(title="rlhf serve", lifespan=lifespan, docs_url=None, redoc_url=None, exception_handlers=handlers())
    app.include_router(make_router(engine, models, limits.max_new_tokens))
    app.include_router(make_page_router(Server(engine, models, desk, access, limits.max_new_tokens, instructions)))
    app.mount("/page", StaticFiles(directory=PAGE))

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    guard = Guard(app, access)
    guard.engine = engine
    return guard
