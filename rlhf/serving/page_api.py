"""The page's routes: session, next task, saving an answer, comparisons, the shading of tokens, the most likely next tokens."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, ValidationError

from rlhf.data.records import Message, RankedResponse, Ranking, Text, first_problem
from rlhf.engines.likely import document_tokens, show
from rlhf.serving.desk import Desk
from rlhf.serving.drawing import Drawn, Wish, chat_prompt, encoded
from rlhf.serving.engine import Engine, ModelFailedError
from rlhf.serving.errors import RefusedError
from rlhf.serving.models import ServedModel
from rlhf.serving.schemas import FLAGS, DemonstrationRequest, Id, Messages, Strict, Verdict
from rlhf.serving.security import COOKIE, Access
from rlhf.serving.streaming import Stream, event, merged

MOST_COMPARED = 6
MOST_NEXT = 100


class SessionRequest(Strict):
    token: Annotated[str, Field(min_length=1, max_length=200)]


class CompareRequest(Strict):
    messages: Messages
    models: Annotated[list[Id], Field(min_length=2, max_length=MOST_COMPARED)]
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    max_tokens: Annotated[int | None, Field(ge=1, le=2**20)] = None


class ShadingRequest(Strict):
    model: Id
    reference: Id | None = None
    messages: Messages
    token_ids: Annotated[list[int], Field(min_length=1, max_length=2048)]


class NextRequest(Strict):
    model: Id
    text: Annotated[Text, Field(min_length=1)]
    count: Annotated[int, Field(ge=1, le=MOST_NEXT)] = 10


@dataclass(frozen=True, slots=True)
class Server:
    """The objects that the routes use."""

    engine: Engine
    models: dict[str, ServedModel]
    desk: Desk
    access: Access
    limit: int  # of max_tokens
    instructions: str

    def labeler(self, request: Request) -> str:
        """The labeler of a request. Raises: RefusedError if it has none."""
        who = request.state.who or ("local" if not self.access.labelers else "")
        if not who:
            raise RefusedError(403, "labels need a labeler: open the link of one")
        return who


def make_page_router(server: Server) -> APIRouter:
    """The routes below /api."""
    router = APIRouter(prefix="/api")
    add_session(router, server)
    add_ranking(router, server)
    add_comparison(router, server)
    return router


def saved(record: Any) -> dict[str, Any]:
    return {"saved": record.id}


def add_session(router: APIRouter, server: Server) -> None:
    """Routes: the session, the shading of a response's tokens, and the most likely next tokens."""
    access, models, engine = server.access, server.models, server.engine

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
        who = request.state.who or ("local" if not access.labelers else None)
        return {
            "labeler": who,
            "models": list(models),
            "tasks": len(server.desk.tasks),
            "flags": FLAGS,
            "max_tokens": server.limit,
            "instructions": server.instructions,
        }

    @router.post("/shading")
    async def shading(asked: ShadingRequest) -> dict[str, Any]:
        for name in (asked.model, asked.reference or asked.model):
            if name not in models:
                raise RefusedError(404, "no model of that name", "model")
        model, ids = models[asked.model], asked.token_ids
        prompt, _ = await encoded(chat_prompt, model, [one.message() for one in asked.messages])
        if len(prompt) + len(ids) > model.context or not all(0 <= i < model.vocabulary for i in ids):
            raise RefusedError(400, "the response does not fit this model", "token_ids")
        if asked.reference and not models[asked.reference].reads_like(model):
            raise RefusedError(400, "the two models have different tokenizers", "reference")
        shades = await engine.call("shade", asked.model, asked.reference, prompt, ids)
        return {"tokens": [model.spelled(i) for i in ids]} | shades

    @router.post("/next")
    async def next_tokens(asked: NextRequest) -> dict[str, Any]:
        if asked.model not in models:
            raise RefusedError(404, "no model of that name", "model")
        model = models[asked.model]
        tokens = await encoded(lambda m, text: document_tokens(m.tokenizer, text, m.context), model, asked.text)
        likeliest = await engine.call("next", asked.model, tokens, asked.count)
        return {"tokens": [{"text": show(model.tokenizer, i), "probability": p} for i, p in likeliest]}


def add_ranking(router: APIRouter, server: Server) -> None:
    """Routes: the next task, the last one again, a ranking, a demonstration."""
    desk, labeler_of = server.desk, server.labeler

    @router.get("/rank/next")
    async def next_task(request: Request) -> dict[str, Any]:
        labeler = labeler_of(request)
        task = await asyncio.to_thread(desk.next_task, labeler)
        about = await asyncio.to_thread(desk.progress, labeler)
        return {"task": None if task is None else task_body(desk, task, labeler), "progress": about}

    @router.get("/rank/last")
    async def last_task(request: Request) -> dict[str, Any]:
        labeler = labeler_of(request)
        record = await asyncio.to_thread(desk.last, labeler)
        if record is None:
            raise RefusedError(404, "there is nothing to undo")
        body = task_body(desk, desk.tasks[record.metadata["task"]], labeler)
        return {
            "task": body,
            "answer": {
                "ranking": record.ranking,
                "ratings": record.ratings,
                "flags": record.flags,
                "note": record.metadata.get("note", ""),
                "replaces": record.id,
            },
        }

    @router.post("/rank")
    async def save_ranking(asked: Verdict, request: Request) -> dict[str, Any]:
        return saved(await checked(desk.rank, labeler_of(request), asked))

    @router.get("/demonstrate/next")
    async def next_prompt(request: Request) -> dict[str, Any]:
        labeler = labeler_of(request)
        task = await asyncio.to_thread(desk.next_prompt, labeler)
        body = task_body(desk, task, labeler) if task else {"name": None, "messages": None, "responses": []}
        return {"task": body.pop("name")} | body

    @router.post("/demonstrate")
    async def demonstrate(asked: DemonstrationRequest, request: Request) -> dict[str, Any]:
        return saved(await checked(desk.demonstrate, labeler_of(request), asked))


def add_comparison(router: APIRouter, server: Server) -> None:
    """Route: one prompt to several models, whose names are shown after the judgement."""
    engine, models, desk, labeler_of = server.engine, server.models, server.desk, server.labeler

    @router.post("/compare")
    async def draw_comparison(asked: CompareRequest, request: Request) -> Stream:
        labeler = labeler_of(request)
        unknown = [name for name in asked.models if name not in models]
        if unknown:
            raise RefusedError(404, f"no model of that name: want some of {', '.join(models)}", "models")
        chosen = [models[name] for name in asked.models]
        secrets.SystemRandom().shuffle(chosen)
        messages, most = [one.message() for one in asked.messages], asked.max_tokens
        wish = Wish(most and min(most, server.limit), asked.temperature)
        drawings: list[Drawn] = []

        def leave() -> None:
            for drawn in drawings:
                drawn.close()

        try:
            for model in chosen:
                prompt, key = await encoded(chat_prompt, model, messages)
                drawings.append(Drawn(engine, model, [prompt], [key], wish))
        except BaseException:
            leave()
            raise
        return Stream(leave, comparison_events(desk, labeler, messages, drawings))

    @router.post("/compare/judge")
    async def judge(asked: Verdict, request: Request) -> dict[str, Any]:
        record = await checked(desk.judge, labeler_of(request), asked)
        return saved(record) | {"policies": {r.id: r.policy for r in record.responses}}


def task_body(desk: Desk, task: Ranking, labeler: str) -> dict[str, Any]:
    """A task for its labeler: without the policies that wrote the responses."""
    return {
        "name": task.id,
        "messages": [{"role": m.role, "content": m.content} for m in task.prompt],
        "responses": [{"id": r.id, "text": r.text} for r in desk.shown(task, labeler)],
    }


async def checked(function: Any, *arguments: Any) -> Any:
    """Run a method of the desk, which waits for the disk, in a thread. Raises: RefusedError for unknown names."""
    try:
        return await asyncio.to_thread(function, *arguments)
    except ValidationError as error:
        field, message = first_problem(error)
        raise RefusedError(400, message, field) from None


async def comparison_events(
    desk: Desk, labeler: str, messages: list[Message], drawings: list[Drawn]
) -> AsyncIterator[tuple[str, bool]]:
    """One response of each model under a letter, as drawn; the last event has the comparison's id, with which it can be judged."""
    letters, ended = "abcdef"[: len(drawings)], [False] * len(drawings)
    try:
        async for i, piece in merged([drawn.pieces(0) for drawn in drawings]):
            ended[i] = piece.finish == "stop"
            yield event({"id": letters[i], "text": piece.text}), True
    except ModelFailedError as error:
        yield event({"error": {"message": str(error)}}), False
        return
    responses = [
        RankedResponse(
            id=letter, text=drawn.texts[0].text.strip(), policy=drawn.model.policy_id, metadata={"ended": whole}
        )
        for letter, drawn, whole in zip(letters, drawings, ended, strict=True)
    ]
    name = f"comparison-{secrets.token_hex(8)}"
    desk.compare(Ranking(id=name, prompt=messages, responses=responses, labeler=labeler))
    yield event({"name": name, "responses": [{"id": one.id, "text": one.text} for one in responses]}), False
