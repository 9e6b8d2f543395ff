"""The OpenAI-style API: models, chat completions, completions, and scores of the reward model.

Log-probs are natural, of the softmax at the request's temperature; temperature 0 takes the most probable token.
"""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from rlhf.data.tokenizer import encode_texts
from rlhf.errors import UserError
from rlhf.serving.drawing import Drawn, Piece, Wish, chat_prompt, encoded, text_prompt
from rlhf.serving.engine import Engine, ModelFailedError
from rlhf.serving.errors import RefusedError
from rlhf.serving.models import ServedModel, audit
from rlhf.serving.schemas import ChatRequest, CompletionRequest, Sampling, ScoreRequest
from rlhf.serving.streaming import Stream, client_gone, event

Body = dict[str, Any]


def make_router(engine: Engine, models: dict[str, ServedModel], limit: int) -> APIRouter:
    """The routes below /v1. limit: of max_tokens."""
    router, started = APIRouter(prefix="/v1"), int(time.time())

    def card(model: ServedModel) -> Body:
        return {
            "id": model.name,
            "object": "model",
            "created": started,
            "owned_by": "rlhf",
            "max_model_len": model.context,
            "fingerprint": model.policy_id,
        }

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
        messages = [one.message() for one in asked.messages]
        prompt, key = await encoded(chat_prompt, model, messages)
        most = asked.max_completion_tokens or asked.max_tokens
        drawn = Drawn(engine, model, [prompt], [key], wish_of(asked, most, limit, (asked.top_logprobs or 0)))
        return await answer(drawn, asked, request, ChatForm(drawn, bool(asked.logprobs)))

    @router.post("/completions")
    async def complete(asked: CompletionRequest, request: Request) -> Response:
        model = find(asked.model)
        prompts = [await encoded(text_prompt, model, prompt) for prompt in asked.prompts()]
        wish = wish_of(asked, asked.max_tokens, limit, asked.logprobs or 0, asked.logprobs is not None)
        drawn = Drawn(engine, model, [prompt for prompt, _ in prompts], [key for _, key in prompts], wish)
        return await answer(drawn, asked, request, TextForm(drawn, asked.logprobs is not None))

    @router.post("/score")
    async def score(asked: ScoreRequest) -> Body:
        run = find(asked.model).run
        messages = [one.model_dump() for one in asked.messages()]
        try:
            scores = await engine.call("score", asked.model, messages, asked.responses)
        except UserError as error:
            raise RefusedError(400, str(error), "prompt") from None
        most = run.max_new_tokens("reward")
        counts = [len(ids) for ids in await asyncio.to_thread(encode_texts, run.tokenizer, asked.responses)]
        rows = zip(scores, asked.responses, counts, strict=True)
        return {
            "object": "list",
            "model": f"{run.folder.name}/reward",
            "data": [
                {"index": i, "object": "score", "score": value, "tokens": count, "flags": audit(text, count, most)}
                for i, (value, text, count) in enumerate(rows)
            ],
        }

    return router


def wish_of(asked: Sampling, most: int | None, limit: int, alternatives: int, offsets: bool = False) -> Wish:
    """How a request is drawn. Raises: RefusedError if it asks for more tokens than the server allows."""
    if most is not None and most > limit:
        raise RefusedError(400, f"max_tokens={most}: this server allows at most {limit}", "max_tokens")
    temperature = 1.0 if asked.temperature is None else asked.temperature
    return Wish(most, temperature, asked.top_p or 1.0, asked.n or 1, asked.seed, asked.stops(), alternatives, offsets)


# ------------------------------------------------------------------------------------------------ two forms


class Form(ABC):
    """The differences between chat and text completions."""

    kind: str
    kind_streamed: str
    prefix: str

    def __init__(self, drawn: Drawn, logprobs: bool):
        self.drawn, self.logprobs = drawn, logprobs
        self.head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": drawn.model.name,
            "system_fingerprint": drawn.model.policy_id,
        }

    def choice(self, piece: Piece, streamed: bool) -> Body:
        """One choice with its new text."""
        body: Body = {"index": piece.index, "finish_reason": piece.finish, "logprobs": None}
        if self.logprobs:
            body["logprobs"] = self.logprobs_of(piece)
        return body | self.content(piece, streamed)

    @abstractmethod
    def content(self, piece: Piece, streamed: bool) -> Body:
        """The text of a piece, as this endpoint writes it."""

    @abstractmethod
    def logprobs_of(self, piece: Piece) -> Body:
        """The log-probs of a piece, as this endpoint writes them."""

    def usage(self) -> Body:
        written = self.drawn.completion_tokens
        read = self.drawn.prompt_tokens
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


class ChatForm(Form):
    kind, kind_streamed, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def content(self, piece: Piece, streamed: bool) -> Body:
        if streamed:
            role = {"role": "assistant"} if piece.first == 0 else {}
            return {"delta": role | {"content": piece.text}}
        return {"message": {"role": "assistant", "content": piece.text, "refusal": None}}

    def logprobs_of(self, piece: Piece) -> Body:
        response, rows = self.drawn.generations[piece.index], []
        for place in range(piece.first, piece.last):
            top = response.tops[place] if response.alternatives else []
            rows.append(
                self.spelled_out(response.tokens[place], response.logprobs[place])
                | {"top_logprobs": [self.spelled_out(token, value) for token, value in top]}
            )
        return {"content": rows, "refusal": None}

    def spelled_out(self, token: int, value: float) -> Body:
        text = self.drawn.model.spelled(token)
        return {"token": text, "logprob": value, "bytes": None if "�" in text else list(text.encode())}


class TextForm(Form):
    kind, kind_streamed, prefix = "text_completion", "text_completion", "cmpl"

    def content(self, piece: Piece, streamed: bool) -> Body:
        return {"text": piece.text}

    def logprobs_of(self, piece: Piece) -> Body:
        response, ends = self.drawn.generations[piece.index], self.drawn.texts[piece.index].ends
        places = range(piece.first, piece.last)
        tops = [
            {self.drawn.model.spelled(token): value for token, value in response.tops[p]}
            for p in places
            if response.tops
        ]
        return {
            "tokens": [self.drawn.model.spelled(response.tokens[place]) for place in places],
            "token_logprobs": [response.logprobs[place] for place in places],
            "top_logprobs": tops or None,
            "text_offset": [ends[place - 1] if place else 0 for place in places],
        }


# ------------------------------------------------------------------------------------------------- answering


async def answer(drawn: Drawn, asked: Sampling, request: Request, form: Form) -> Response:
    """The responses as one body, or as a stream. Their places are freed if the client disconnects."""
    if asked.stream:
        usage = asked.stream_options is not None and asked.stream_options.include_usage
        return Stream(drawn.close, events(drawn, asked, form, usage))
    waiting = asyncio.create_task(drawn.whole())
    leaving = asyncio.create_task(client_gone(request.receive))
    try:
        await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            return Response(status_code=499)  # nobody reads it
        reasons = waiting.result()
    finally:
        for task in (waiting, leaving):
            task.cancel()
        drawn.close()
    choices = []
    for i, (text, reason) in enumerate(zip(drawn.texts, reasons, strict=True)):
        choice = form.choice(Piece(i, text.text, 0, len(text.ids), reason), False)
        choices.append(choice | ({"token_ids": text.ids} if asked.return_token_ids else {}))
    return JSONResponse(
        form.head | {"object": form.kind, "choices": choices, "usage": form.usage(), "seed": drawn.seed}
    )


async def events(drawn: Drawn, asked: Sampling, form: Form, usage: bool) -> AsyncIterator[tuple[str, bool]]:
    """The events of a stream: one per piece of a response; with the last one the usage, if asked for, and [DONE]."""
    head = form.head | {"object": form.kind_streamed}
    tail: Body = {"usage": None} if usage else {}
    left = len(drawn.generations)
    try:
        async for piece in drawn.all_pieces():
            ids = drawn.texts[piece.index].ids[piece.first : piece.last]
            more = {"token_ids": ids} if asked.return_token_ids else {}
            text = event(head | {"choices": [form.choice(piece, True) | more]} | tail)
            left -= piece.finish is not None
            if not left:
                if usage:
                    text += event(head | {"choices": [], "usage": form.usage(), "seed": drawn.seed})
                text += "data: [DONE]\n\n"
            yield text, left > 0
    except ModelFailedError as error:
        yield event({"error": {"message": str(error), "type": "server_error", "param": None, "code": None}}), False
