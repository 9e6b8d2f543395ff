"""The server as one ASGI application: the API, the page and its routes, and the guard around them."""

import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import torch
from fastapi import Body, Depends, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic import Field

from rlhf.data.records import RankedResponse, Ranking
from rlhf.serving import openai_api
from rlhf.serving.labelling import Labelling, make_label_router, task_body
from rlhf.serving.managing import Rounds, Staff, make_manage_router
from rlhf.serving.models import Completion, ModelThread
from rlhf.serving.openai_api import Id, Messages, MostTokens, Reply, Strict, Temperature
from rlhf.serving.security import ERRORS, MANAGER, Access, Guard, RefusedError, cookie_of

PAGE = Path(__file__).parent / "page"
MOST_COMPARED = 6


class CompareRequest(Strict):
    messages: Messages
    models: Annotated[list[Id], Field(min_length=2, max_length=MOST_COMPARED)]
    temperature: Temperature | None = 1.0
    max_tokens: MostTokens | None = None


class ShadingRequest(Strict):
    model: Id
    reference: Id | None = None
    messages: Messages
    token_ids: Annotated[list[int], Field(min_length=1, max_length=2048)]


def judge_tokens(policy: Any, reference: Any, prompt: list[int], ids: list[int]) -> tuple[list[float], list[float]]:
    """Per token of a response log pi(token) in nats, and KL(pi || reference) over the vocabulary at its position."""

    def logprobs(model: Any) -> torch.Tensor:
        tokens = torch.tensor([prompt + ids], device=next(model.parameters()).device)
        return model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)

    logp, logp_ref = logprobs(policy), logprobs(reference)
    chosen = logp.gather(-1, torch.tensor(ids, device=logp.device)[:, None])[:, 0]
    return chosen.tolist(), (logp.exp() * (logp - logp_ref)).sum(-1).clamp(min=0).tolist()


def make_app(
    thread: ModelThread, access: Access, labelling: Labelling, staff: Staff | None = None, rounds: Rounds | None = None
) -> Guard:
    """The application; without staff, labels are those of one labeler, `local`."""
    local = "" if access.labelers or staff else "local"

    def labeler_of(request: Request) -> str:
        who = request.state.who or local
        if not who:
            raise RefusedError(403, "labels need a labeler: open the link of one")
        if staff and staff.paused(who, labelling):
            raise RefusedError(403, "your labelling is paused: ask who runs it")
        return who

    app = FastAPI(title="rlhf serve", docs_url=None, redoc_url=None, exception_handlers=ERRORS)
    app.include_router(openai_api.make_router(thread))
    app.include_router(make_label_router(labelling, Depends(labeler_of)))
    add_model_routes(app, thread, labelling, Depends(labeler_of))
    if staff:
        app.include_router(make_manage_router(labelling, staff, rounds))

    @app.post("/api/session")
    async def open_session(token: Annotated[str, Body(embed=True)]) -> Response:
        who = access.who(token)
        if who is None:
            raise RefusedError(401, "this link is not valid: ask for a new one")
        answer = JSONResponse({"labeler": who})
        answer.set_cookie(cookie_of(who), token, max_age=30 * 86400, httponly=True, samesite="strict")
        return answer

    @app.get("/api/me")
    async def me(request: Request) -> Reply:
        who = request.state.who or local
        tabs = ["chat", "compare", "rank", "demonstrate"]
        if request.state.who:
            tabs = ["manage"] if who == MANAGER else tabs if access.settings.labelers_chat else ["rank", "demonstrate"]
        return {
            "labeler": who.lstrip("~") or None,
            "tab": request.state.who or "",
            "tabs": tabs,
            "flags": labelling.flags(),
            "models": list(thread.models),
            "tasks": len(labelling.tasks),
            "rounds": rounds is not None,
            "instructions": labelling.instructions,
        }

    app.mount("/page", StaticFiles(directory=PAGE))

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    return Guard(app, access)


def add_model_routes(app: FastAPI, thread: ModelThread, labelling: Labelling, who: Any) -> None:
    """The shading of a response's tokens, and one prompt to several models. who: gives the labeler."""

    @app.post("/api/shading")
    async def shading(asked: ShadingRequest) -> Reply:
        model, ids = thread.find(asked.model), asked.token_ids
        reference = thread.find(asked.reference or asked.model, "reference")
        _, prompt, _ = await openai_api.chat_prompt(model, openai_api.records_of(asked.messages))
        if len(prompt) + len(ids) > model.context or not all(0 <= i < model.policy.config.vocab_size for i in ids):
            raise RefusedError(400, "the response does not fit this model", "token_ids")
        logprobs, kl = await thread.call(judge_tokens, model.policy, reference.policy, prompt, ids)
        return {"tokens": [model.spelled(i) for i in ids], "logprobs": logprobs, "kl": kl}

    @app.post("/api/compare")
    async def compare(asked: CompareRequest, labeler: str = who) -> Response:
        models = [thread.find(name, "models") for name in asked.models]
        secrets.SystemRandom().shuffle(models)  # the labeler sees letters until the judgement
        messages = openai_api.records_of(asked.messages)
        drawn = [await openai_api.chat_prompt(model, messages) for model in models]
        prompts = [(model, ids, (*key, place)) for place, (model, ids, key) in enumerate(drawn)]  # each its own numbers
        completion = Completion(thread, prompts, most=asked.max_tokens, temperature=asked.temperature)

        async def events() -> AsyncIterator[str]:
            """One response of each model under a letter; the last event has the comparison's id, with which it can be judged."""
            letters, responses = "abcdef", []
            async for chunk in completion.chunks():
                yield openai_api.event({"id": letters[chunk.place], "text": chunk.text})
            for letter, one in zip(letters, completion.generations, strict=False):
                text, ended = one.text.text.strip(), {"ended": one.finish == "stop"}
                responses.append(RankedResponse(id=letter, text=text, policy=one.model.policy_id, metadata=ended))
            name = f"comparison-{secrets.token_hex(8)}"
            comparison = Ranking(id=name, prompt=messages, responses=responses, labeler=labeler)
            labelling.add_comparison(comparison)
            yield openai_api.event(task_body(comparison))

        return openai_api.EventStream(completion, events())
