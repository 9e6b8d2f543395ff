"""The server as one ASGI application: the API, the page and its routes, and the guard around them.

The page's routes: session, next task, saving an answer, comparisons, the shading of tokens, the most likely next tokens.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic import ValidationError

from rlhf.data.records import Message, RankedResponse, Ranking, first_problem
from rlhf.engines.likely import document_tokens, show
from rlhf.serving.labelling import Labelling
from rlhf.serving.models import ModelFailedError, ModelThread, ServedModel, next_tokens, shade
from rlhf.serving.openai_api import make_router
from rlhf.serving.schemas import (
    FLAGS,
    CompareRequest,
    DemonstrationRequest,
    NextRequest,
    Sampling,
    SessionRequest,
    ShadingRequest,
    Verdict,
)
from rlhf.serving.security import COOKIE, ERRORS, Access, Guard, RefusedError
from rlhf.serving.streaming import Completion, EventStream, chat_prompt, event

PAGE = Path(__file__).parent / "page"


def make_app(thread: ModelThread, access: Access, labelling: Labelling, instructions: str = "") -> Guard:
    """The application. instructions: for labelers."""

    def labeler_of(request: Request) -> str:
        who = request.state.who or ("local" if not access.labelers else "")
        if not who:
            raise RefusedError(403, "labels need a labeler: open the link of one")
        return who

    app = FastAPI(title="rlhf serve", docs_url=None, redoc_url=None, exception_handlers=ERRORS)
    app.include_router(make_router(thread))
    router = APIRouter(prefix="/api")
    add_labelling(router, labelling, labeler_of)
    add_models(router, thread, labelling, labeler_of)

    @router.post("/session")
    async def open_session(asked: SessionRequest, request: Request) -> Response:
        who = access.who(asked.token)
        if who is None:
            raise RefusedError(401, "this link is not valid: ask for a new one")
        answer = JSONResponse({"labeler": who})
        secure = request.url.scheme == "https"
        answer.set_cookie(COOKIE, asked.token, max_age=30 * 86400, httponly=True, samesite="strict", secure=secure)
        return answer

    @router.get("/me")
    async def me(request: Request) -> dict[str, Any]:
        return {
            "labeler": request.state.who or ("local" if not access.labelers else None),
            "models": list(thread.models),
            "tasks": len(labelling.tasks),
            "flags": FLAGS,
            "max_tokens": thread.most_tokens,
            "instructions": instructions,
        }

    app.include_router(router)
    app.mount("/page", StaticFiles(directory=PAGE))

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    return Guard(app, access)


# ------------------------------------------------------------------------------------------------- labelling


def add_labelling(router: APIRouter, labelling: Labelling, labeler_of: Any) -> None:
    """Routes: the next task, the last one again, a ranking, a demonstration."""

    def task_body(task: Ranking, labeler: str) -> dict[str, Any]:
        """A task for its labeler: without the policies that wrote the responses."""
        return {
            "name": task.id,
            "messages": [{"role": m.role, "content": m.content} for m in task.prompt],
            "responses": [{"id": r.id, "text": r.text} for r in labelling.shown(task, labeler)],
        }

    @router.get("/rank/next")
    async def next_task(request: Request) -> dict[str, Any]:
        labeler = labeler_of(request)
        task = await asyncio.to_thread(labelling.next_task, labeler)
        progress = await asyncio.to_thread(labelling.progress, labeler)
        return {"task": None if task is None else task_body(task, labeler), "progress": progress}

    @router.get("/rank/last")
    async def last_task(request: Request) -> dict[str, Any]:
        labeler = labeler_of(request)
        record = await asyncio.to_thread(labelling.last, labeler)
        if record is None:
            raise RefusedError(404, "there is nothing to undo")
        answer = record.model_dump(include={"ranking", "ratings", "flags"})
        answer |= {"note": record.metadata.get("note", ""), "replaces": record.id}
        return {"task": task_body(labelling.tasks[record.metadata["task"]], labeler), "answer": answer}

    @router.post("/rank")
    async def rank(asked: Verdict, request: Request) -> dict[str, Any]:
        return {"saved": (await saved(labelling.rank, labeler_of(request), asked)).id}

    @router.get("/demonstrate/next")
    async def next_prompt(request: Request) -> dict[str, Any]:
        labeler = labeler_of(request)
        task = await asyncio.to_thread(labelling.next_prompt, labeler)
        body = task_body(task, labeler) if task else {"name": None, "messages": None, "responses": []}
        return {"task": body.pop("name")} | body

    @router.post("/demonstrate")
    async def demonstrate(asked: DemonstrationRequest, request: Request) -> dict[str, Any]:
        return {"saved": (await saved(labelling.demonstrate, labeler_of(request), asked)).id}

    @router.post("/compare/judge")
    async def judge(asked: Verdict, request: Request) -> dict[str, Any]:
        record = await saved(labelling.judge, labeler_of(request), asked)
        return {"saved": record.id, "policies": {r.id: r.policy for r in record.responses}}


async def saved(save: Any, *arguments: Any) -> Any:
    """Save a label, which waits for the disk, in a thread. Raises: RefusedError for unknown names."""
    try:
        return await asyncio.to_thread(save, *arguments)
    except ValidationError as error:
        field, message = first_problem(error)
        raise RefusedError(400, message, field) from None


# ------------------------------------------------------------------------------------------------- models


def add_models(router: APIRouter, thread: ModelThread, labelling: Labelling, labeler_of: Any) -> None:
    """Routes: the shading of a response's tokens, the most likely next tokens, and one prompt to several models."""

    def find(name: str, param: str = "model") -> ServedModel:
        if name not in thread.models:
            raise RefusedError(404, f"no model of that name: want one of {', '.join(thread.models)}", param)
        return thread.models[name]

    @router.post("/shading")
    async def shading(asked: ShadingRequest) -> dict[str, Any]:
        model, ids = find(asked.model), asked.token_ids
        reference = find(asked.reference, "reference") if asked.reference else None
        prompt, _ = await chat_prompt(model, [one.message() for one in asked.messages])
        if len(prompt) + len(ids) > model.context or not all(0 <= i < model.vocabulary for i in ids):
            raise RefusedError(400, "the response does not fit this model", "token_ids")
        if reference is not None and not reference.reads_like(model):
            raise RefusedError(400, "the two models have different tokenizers", "reference")
        shades = await thread.call(shade, model, reference, prompt, ids)
        return {"tokens": [model.spelled(i) for i in ids]} | shades

    @router.post("/next")
    async def following(asked: NextRequest) -> dict[str, Any]:
        model = find(asked.model)
        tokens = await asyncio.to_thread(document_tokens, model.tokenizer, asked.text, model.context)
        likeliest = await thread.call(next_tokens, model, tokens, asked.count)
        return {"tokens": [{"text": show(model.tokenizer, i), "probability": p} for i, p in likeliest]}

    @router.post("/compare")
    async def compare(asked: CompareRequest, request: Request) -> EventStream:
        labeler = labeler_of(request)
        models = [find(name, "models") for name in asked.models]
        secrets.SystemRandom().shuffle(models)  # the labeler sees letters until the judgement
        messages = [one.message() for one in asked.messages]
        prompts = [(model, await chat_prompt(model, messages)) for model in models]
        settings = Sampling(model="compared", temperature=asked.temperature, max_tokens=asked.max_tokens)
        completion = Completion(thread, prompts, settings)
        return EventStream(completion, comparison_events(labelling, labeler, messages, completion))


async def comparison_events(
    labelling: Labelling, labeler: str, messages: list[Message], completion: Completion
) -> AsyncIterator[tuple[str, bool]]:
    """One response of each model under a letter, as drawn; the last event has the comparison's id, with which it can be judged."""
    responses = [
        RankedResponse(id=letter, text="", policy=one.model.policy_id)
        for letter, one in zip("abcdef", completion.generations, strict=False)
    ]
    try:
        async for chunk in completion.chunks():
            responses[chunk.index].metadata["ended"] = chunk.finish == "stop"
            yield event({"id": responses[chunk.index].id, "text": chunk.text}), True
    except ModelFailedError as error:
        yield event({"error": {"message": str(error)}}), False
        return
    for response, text in zip(responses, completion.texts, strict=True):
        response.text = text.text.strip()
    name = f"comparison-{secrets.token_hex(8)}"
    labelling.add_comparison(Ranking(id=name, prompt=messages, responses=responses, labeler=labeler))
    yield event({"name": name, "responses": [{"id": one.id, "text": one.text} for one in responses]}), False
