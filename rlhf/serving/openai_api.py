"""The OpenAI-style API: models, chat completions, completions, and scores of the reward model.

Log-probs are natural, of the softmax at the request's temperature; temperature 0 takes the most probable token.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from rlhf.data.tokenizer import encode_texts
from rlhf.errors import UserError
from rlhf.serving.model_thread import ModelFailedError, ModelThread, ServedModel, doubts
from rlhf.serving.schemas import ChatRequest, CompletionRequest, Sampling, ScoreRequest, records_of
from rlhf.serving.security import RefusedError
from rlhf.serving.streaming import Chunk, Completion, EventStream, chat_prompt, client_gone, completion_prompt, event

Body = dict[str, Any]


def make_router(thread: ModelThread) -> APIRouter:
    """The routes below /v1."""
    router, started, models = APIRouter(prefix="/v1"), int(time.time()), thread.models

    def card(model: ServedModel) -> Body:
        about = {"id": model.name, "object": "model", "created": started, "owned_by": "rlhf"}
        return about | {"max_model_len": model.context, "fingerprint": model.policy_id}

    def find(name: str) -> ServedModel:
        if name not in models:
            known = ", ".join(models)
            raise RefusedError(404, f"no model of that name: want one of {known}", "model", "model_not_found")
        return models[name]

    @router.get("/models")
    async def list_models() -> Body:
        return {"object": "list", "data": [card(model) for model in models.values()]}

    @router.get("/models/{name:path}")
    async def one_model(name: str) -> Body:
        return card(find(name))

    @router.post("/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Response:
        model = find(asked.model)
        if asked.messages[-1].role != "user":
            raise RefusedError(400, "want messages that end with one of the user", "messages")
        if asked.top_logprobs and not asked.logprobs:
            raise RefusedError(400, "want logprobs=true with top_logprobs", "top_logprobs")
        asked.max_tokens = asked.max_completion_tokens or asked.max_tokens
        prompt = await chat_prompt(model, records_of(asked.messages))
        completion = Completion(thread, [(model, prompt)], asked, asked.top_logprobs or 0)
        return await respond(Form(completion, True, bool(asked.logprobs)), asked, request)

    @router.post("/completions")
    async def complete(asked: CompletionRequest, request: Request) -> Response:
        model = find(asked.model)
        prompts = [(model, await completion_prompt(model, prompt)) for prompt in asked.prompts()]
        completion = Completion(thread, prompts, asked, asked.logprobs or 0)
        return await respond(Form(completion, False, asked.logprobs is not None), asked, request)

    @router.post("/score")
    async def score(asked: ScoreRequest) -> Body:
        run = find(asked.model).run
        messages = [one.model_dump() for one in records_of(asked.prompt)]
        try:
            scores = await thread.call(run.score, [messages] * len(asked.responses), asked.responses)
        except UserError as error:
            raise RefusedError(400, str(error), "prompt") from None
        most = run.max_new_tokens("reward")
        counts = [len(ids) for ids in await asyncio.to_thread(encode_texts, run.tokenizer, asked.responses)]
        rows = zip(scores, asked.responses, counts, strict=True)
        data = [
            {"index": i, "object": "score", "score": value, "tokens": count, "flags": doubts(text, count, most)}
            for i, (value, text, count) in enumerate(rows)
        ]
        return {"object": "list", "model": f"{run.folder.name}/reward", "data": data}

    return router


class Form:
    """How a completion is written: of a chat or of a text, with log-probs or without."""

    def __init__(self, completion: Completion, chat: bool, logprobs: bool):
        self.completion, self.chat, self.logprobs = completion, chat, logprobs
        self.model = completion.generations[0].model
        self.kind = "chat.completion" if chat else "text_completion"
        self.head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.model.name,
            "system_fingerprint": self.model.policy_id,
        }

    def usage(self) -> Body:
        read, written = self.completion.prompt_tokens, self.completion.completion_tokens
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def choice(self, chunk: Chunk, streamed: bool, token_ids: bool) -> Body:
        """One choice with its new text."""
        body: Body = {"index": chunk.place, "finish_reason": chunk.finish, "logprobs": None}
        if self.logprobs:
            body["logprobs"] = self.chat_logprobs(chunk) if self.chat else self.text_logprobs(chunk)
        if token_ids:
            body["token_ids"] = self.completion.texts[chunk.place].ids[chunk.first : chunk.last]
        if not self.chat:
            return body | {"text": chunk.text}
        if not streamed:
            return body | {"message": {"role": "assistant", "content": chunk.text, "refusal": None}}
        return body | {"delta": ({"role": "assistant"} if chunk.first == 0 else {}) | {"content": chunk.text}}

    def chat_logprobs(self, chunk: Chunk) -> Body:
        response, rows = self.completion.generations[chunk.place].response, []
        for place in range(chunk.first, chunk.last):
            top = response.tops[place] if response.alternatives else []
            row = self.spelled_out(response.tokens[place], response.logprobs[place])
            rows.append(row | {"top_logprobs": [self.spelled_out(token, value) for token, value in top]})
        return {"content": rows, "refusal": None}

    def spelled_out(self, token: int, value: float) -> Body:
        text = self.model.spelled(token)
        return {"token": text, "logprob": value, "bytes": None if "�" in text else list(text.encode())}

    def text_logprobs(self, chunk: Chunk) -> Body:
        response, text = self.completion.generations[chunk.place].response, self.completion.texts[chunk.place]
        places, spelled = range(chunk.first, chunk.last), self.model.spelled
        tops = [{spelled(token): value for token, value in response.tops[p]} for p in places if response.tops]
        return {
            "tokens": [spelled(response.tokens[place]) for place in places],
            "token_logprobs": [response.logprobs[place] for place in places],
            "top_logprobs": tops or None,
            "text_offset": [len(text.spell(place)) for place in places],
        }


async def respond(form: Form, asked: Sampling, request: Request) -> Response:
    """The responses as one body, or as a stream. Their places are freed if the client disconnects."""
    completion = form.completion
    if asked.stream:
        return EventStream(completion, events(form, asked))
    drawing = asyncio.create_task(completion.whole())
    leaving = asyncio.create_task(client_gone(request.receive))
    try:
        await asyncio.wait({drawing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not drawing.done():
            return Response(status_code=499)  # nobody reads it
        chunks = drawing.result()
    finally:
        for task in (drawing, leaving):
            task.cancel()
        completion.close()
    choices = [form.choice(chunk, False, asked.return_token_ids) for chunk in chunks]
    about = {"object": form.kind, "choices": choices, "usage": form.usage(), "seed": completion.seed}
    return JSONResponse(form.head | about)


async def events(form: Form, asked: Sampling) -> AsyncIterator[tuple[str, bool]]:
    """The events of a stream: one per chunk of a response; with the last one the usage, if asked for, and [DONE]."""
    usage = asked.stream_options is not None and asked.stream_options.include_usage
    head = form.head | {"object": f"{form.kind}.chunk" if form.chat else form.kind}
    tail: Body = {"usage": None} if usage else {}
    left = len(form.completion.generations)
    try:
        async for chunk in form.completion.chunks():
            text = event(head | {"choices": [form.choice(chunk, True, asked.return_token_ids)]} | tail)
            left -= chunk.finish is not None
            if not left:
                if usage:
                    text += event(head | {"choices": [], "usage": form.usage(), "seed": form.completion.seed})
                text += "data: [DONE]\n\n"
            yield text, left > 0
    except ModelFailedError as error:
        yield event({"error": {"message": str(error), "type": "server_error", "param": None, "code": None}}), False
