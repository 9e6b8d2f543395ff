"""The server as one ASGI application: the API, the page and its routes, and the guard around them.

The page's routes: session, next task, saving an answer, comparisons, the shading of tokens, the most likely next tokens.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles

from rlhf.data.records import Message, RankedResponse, Ranking
from rlhf.engines.likely import document_tokens, judge_tokens, likeliest, show
from rlhf.serving.labelling import Labelling
from rlhf.serving.model_thread import ModelFailedError, ModelThread, ServedModel
from rlhf.serving.openai_api import make_router
from rlhf.serving.schemas import (
    FLAGS,
    CompareRequest,
    DemonstrationRequest,
    NextRequest,
    RankingRequest,
    Sampling,
    ShadingRequest,
    records_of,
)
from rlhf.serving.security import COOKIE, ERRORS, Access, Guard, RefusedError
from rlhf.serving.streaming import Completion, EventStream, chat_prompt, event

Answer = dict[str, Any]
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
    router, labeler = APIRouter(prefix="/api"), Depends(labeler_of)
    add_labelling(router, labelling, labeler)
    add_models(router, thread, labelling, labeler)

    @router.post("/session")
    async def open_session(token: Annotated[str, Body(embed=True)], request: Request) -> Response:
        who = access.who(token)
        if who is None:
            raise RefusedError(401, "this link is not valid: ask for a new one")
        answer = JSONResponse({"labeler": who})
        secure = request.url.scheme == "https"
        answer.set_cookie(COOKIE, token, max_age=30 * 86400, httponly=True, samesite="strict", secure=secure)
        return answer

    @router.get("/me")
    async def me(request: Request) -> Answer:
        who = request.state.who or ("local" if not access.labelers else None)
        about = {"labeler": who, "models": list(thread.models), "tasks": len(labelling.tasks), "flags": FLAGS}
        return about | {"max_tokens": thread.most_tokens, "instructions": instructions}

    app.include_router(router)
    app.mount("/page", StaticFiles(directory=PAGE))

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    return Guard(app, access)


def add_labelling(router: APIRouter, labelling: Labelling, who: Any) -> None:
    """Routes: the next task, the last one again, a ranking, a demonstration. They wait for the disk in threads."""

    def task_body(task: Ranking, labeler: str) -> Answer:
        """A task for its labeler: without the policies that wrote the responses."""
        return {
            "name": task.id,
            "messages": [{"role": m.role, "content": m.content} for m in task.prompt],
            "responses": [{"id": r.id, "text": r.text} for r in labelling.shown(task, labeler)],
        }

    @router.get("/rank/next")
    def next_task(labeler: str = who) -> Answer:
        task = labelling.next_task(labeler)
        return {"task": task and task_body(task, labeler), "progress": labelling.progress(labeler)}

    @router.get("/rank/last")
    def last_task(labeler: str = who) -> Answer:
        record = labelling.last(labeler)
        if record is None:
            raise RefusedError(404, "there is nothing to undo")
        answer = record.model_dump(include={"ranking", "ratings", "flags"})
        answer |= {"note": record.metadata.get("note", ""), "replaces": record.id}
        return {"task": task_body(labelling.tasks[record.metadata["task"]], labeler), "answer": answer}

    @router.post("/rank")
    def rank(asked: RankingRequest, labeler: str = who) -> Answer:
        return {"saved": labelling.rank(labeler, asked).id}

    @router.get("/demonstrate/next")
    def next_prompt(labeler: str = who) -> Answer:
        task = labelling.next_prompt(labeler)
        body = task_body(task, labeler) if task else {"name": None, "messages": None, "responses": []}
        return {"task": body.pop("name")} | body

    @router.post("/demonstrate")
    def demonstrate(asked: DemonstrationRequest, labeler: str = who) -> Answer:
        return {"saved": labelling.demonstrate(labeler, asked).id}

    @router.post("/compare/judge")
    def judge(asked: RankingRequest, labeler: str = who) -> Answer:
        record = labelling.rank(labeler, asked, compared=True)
        return {"saved": record.id, "policies": {r.id: r.policy for r in record.responses}}


def add_models(router: APIRouter, thread: ModelThread, labelling: Labelling, who: Any) -> None:
    """Routes: the shading of a response's tokens, the most likely next tokens, and one prompt to several models."""

    def find(name: str, param: str = "model") -> ServedModel:
        if name not in thread.models:
            raise RefusedError(404, f"no model of that name: want one of {', '.join(thread.models)}", param)
        return thread.models[name]

    @router.post("/shading")
    async def shading(asked: ShadingRequest) -> Answer:
        model, ids = find(asked.model), asked.token_ids
        reference = find(asked.reference or asked.model, "reference")
        prompt, _ = await chat_prompt(model, records_of(asked.messages))
        if len(prompt) + len(ids) > model.context or not all(0 <= i < model.vocabulary for i in ids):
            raise RefusedError(400, "the response does not fit this model", "token_ids")
        if not reference.reads_like(model):
            raise RefusedError(400, "the two models have different tokenizers", "reference")
        logprobs, kl = await thread.call(judge_tokens, model.policy, reference.policy, prompt, ids)
        return {"tokens": [model.spelled(i) for i in ids], "logprobs": logprobs, "kl": kl}

    @router.post("/next")
    async def following(asked: NextRequest) -> Answer:
        model = find(asked.model)
        tokens = await asyncio.to_thread(document_tokens, model.tokenizer, asked.text, model.context)
        found = await thread.call(likeliest, model.policy, tokens, asked.count)
        return {"tokens": [{"text": show(model.tokenizer, i), "probability": p} for i, p in found]}

    @router.post("/compare")
    async def compare(asked: CompareRequest, labeler: str = who) -> EventStream:
        models = [find(name, "models") for name in asked.models]
        secrets.SystemRandom().shuffle(models)  # the labeler sees letters until the judgement
        messages = records_of(asked.messages)
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
            responses[chunk.place].metadata["ended"] = chunk.finish == "stop"
            yield event({"id": responses[chunk.place].id, "text": chunk.text}), True
    except ModelFailedError as error:
        yield event({"error": {"message": str(error)}}), False
        return
    for response, text in zip(responses, completion.texts, strict=True):
        response.text = text.text.strip()
    name = f"comparison-{secrets.token_hex(8)}"
    labelling.add_comparison(Ranking(id=name, prompt=messages, responses=responses, labeler=labeler))
    yield event({"name": name, "responses": [{"id": one.id, "text": one.text} for one in responses]}), False
