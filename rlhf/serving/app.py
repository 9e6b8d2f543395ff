"""The server as one ASGI application: the API, the labelling routes, the page, and the guard around them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from rlhf.serving.engine import Engine
from rlhf.serving.errors import handlers
from rlhf.serving.models import ServedModel
from rlhf.serving.openai_api import make_router
from rlhf.serving.security import Access, Guard


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one server does at once."""

    batch: int = 32  # responses of one model that are drawn together
    queue: int = 64  # that wait
    max_new_tokens: int = 1024


def make_app(models: dict[str, ServedModel], access: Access, limits: Limits, desk: Any = None) -> Guard:
    """The application; its models' thread starts and stops with it. desk: the labelling desk, if there is one."""
    engine = Engine({name: model.policy for name, model in models.items()}, limits.batch, limits.queue)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        engine.stop()

    app = FastAPI(title="rlhf serve", lifespan=lifespan, docs_url=None, redoc_url=None, exception_handlers=handlers())
    app.include_router(make_router(engine, models, limits.max_new_tokens))
    app.state.engine = engine
    guard = Guard(app, access)
    guard.engine = engine  # type: ignore[attr-defined]
    return guard
