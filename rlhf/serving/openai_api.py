"""The OpenAI-style API: models, chat completions, and scores of the reward model.

Log-probs are natural, of the softmax at the request's temperature; temperature 0 takes the most probable token.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Receive, Scope, Send

from rlhf.data.chat_template import encode_prompt
from rlhf.data.records import Message, Text
from rlhf.data.splits import prompt_key
from rlhf.serving.models import Chunk, Completion, ModelThread, ServedModel
from rlhf.serving.security import RefusedError

MOST_RESPONSES = 16  # n
CHARACTERS = 32  # per token of the context: a longer text is refused before it is encoded, which takes time and memory

Reply = dict[str, Any]
to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

Stop = Annotated[Text, Field(min_length=1, max_length=200)]
Id = Annotated[Text, Field(min_length=1, max_length=500)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
MostTokens = Annotated[int, Field(ge=1, le=2**20)]
Zero = Annotated[float, Field(ge=0, le=0)]


class Strict(BaseModel):
    """Unknown fields are refused, so that none is ignored silently."""

    model_config = ConfigDict(extra="forbid")


class TextPart(Strict):
    type: Literal["text"]
    text: Text


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: Text | None = None
    refusal: None = None  # as an answer has it, which clients send back as a turn


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=200)]


def records_of(messages: str | list[ChatMessage]) -> list[Message]:
    """A dialogue as messages of a record; a string is what a user says, and parts of a text are joined."""
    if isinstance(messages, str):
        return [Message(role="user", content=messages)]
    texts = [m.content if isinstance(m.content, str) else "".join(part.text for part in m.content) for m in messages]
    roles: list[Any] = ["system" if m.role == "developer" else m.role for m in messages]
    return [Message(role=role, content=text) for role, text in zip(roles, texts, strict=True)]


class StreamOptions(Strict):
    include_usage: bool | None = False
    include_obfuscation: bool = False


class ChatRequest(Strict):
    model: Id
    messages: Messages
    max_tokens: MostTokens | None = None
    max_completion_tokens: MostTokens | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float | None, Field(gt=0, le=1, allow_inf_nan=False)] = None
    n: Annotated[int | None, Field(ge=1, le=MOST_RESPONSES)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    user: Text | None = None
    return_token_ids: bool | None = False  # as in vLLM: each choice with the ids of its tokens
    logprobs: bool | None = None


class ScoreRequest(Strict):
    """Responses to one prompt, for the reward model of a run."""

    model: Id | None = None  # the first one that is served
    prompt: Text | Messages
    responses: Annotated[list[Text], Field(min_length=1, max_length=64)]
    ended: list[bool] = []  # whether each has its end token; all unless given


def refuse_long(model: ServedModel, texts: Sequence[str], param: str) -> None:
    """Raises: RefusedError for texts of more characters than the context can hold."""
    if (size := sum(map(len, texts))) > CHARACTERS * model.context:
        message = f"the model's context is {model.context} tokens: this has {size:,} characters: shorten it"
        raise RefusedError(400, message, param, "context_length_exceeded")


async def chat_prompt(model: ServedModel, messages: Sequence[Message]) -> tuple[ServedModel, list[int], tuple]:
    """A dialogue's tokens, and the key under which `rlhf generate` draws its responses. Raises: RefusedError, UserError."""
    refuse_long(model, [message.content for message in messages], "messages")
    ids = await asyncio.to_thread(encode_prompt, model.tokenizer, messages)
    return model, ids, ("generate", prompt_key(messages))


def make_router(thread: ModelThread) -> APIRouter:
    router, started = APIRouter(prefix="/v1"), int(time.time())

    @router.get("/models")
    async def list_models() -> Reply:
        about = {"object": "model", "created": started, "owned_by": "rlhf"}
        cards = [about | {"id": name, "max_model_len": model.context} for name, model in thread.models.items()]
        return {"object": "list", "data": cards}

    @router.post("/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Response:
        model = thread.find(asked.model)
        if asked.messages[-1].role != "user":
            raise RefusedError(400, "want messages that end with one of the user", "messages")
        completion = Completion(
            thread,
            [await chat_prompt(model, records_of(asked.messages))],
            n=asked.n or 1,
            most=asked.max_completion_tokens or asked.max_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            stops=(asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ()),
            seed=asked.seed,
        )
        form = Form(completion, asked)
        if asked.stream:
            return EventStream(completion, form.events())
        try:
            async for _ in completion.chunks(request.is_disconnected):
                pass
            return JSONResponse(form.whole())
        finally:
            completion.close()

    @router.post("/score")
    async def score(asked: ScoreRequest) -> Reply:
        model = thread.find(asked.model or next(iter(thread.models)))
        run, prompt = model.run, records_of(asked.prompt)
        refuse_long(model, [message.content for message in prompt], "prompt")
        for response in asked.responses:
            refuse_long(model, [response], "responses")
        messages = [one.model_dump() for one in prompt]
        scores = await thread.call(run.score, [messages] * len(asked.responses), asked.responses, asked.ended)
        data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores)]
        return {"object": "list", "model": f"{run.folder.name}/reward", "data": data}

    return router


class Form:
    """How a completion is written."""

    def __init__(self, completion: Completion, asked: ChatRequest):
        self.completion, self.asked = completion, asked
        self.model = completion.generations[0].model
        about = {"model": self.model.name, "system_fingerprint": self.model.policy_id}
        self.head: Reply = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time())} | about

    def usage(self) -> Reply:
        read, written = self.completion.prompt_tokens, sum(len(one.text.ids) for one in self.completion.generations)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def choice(self, chunk: Chunk, streamed: bool) -> Reply:
        """One choice with its new text."""
        one = self.completion.generations[chunk.place]
        tokens, logprobs = one.tokens[chunk.first : chunk.last], one.logprobs[chunk.first : chunk.last]
        body: Reply = {"index": chunk.place, "finish_reason": chunk.finish, "logprobs": None}
        if self.asked.logprobs:
            texts = [self.model.spelled(token) for token in tokens]
            coded = (None if "�" in text else list(text.encode()) for text in texts)
            rows = zip(texts, logprobs, coded, strict=True)
            content = [{"token": text, "logprob": y, "bytes": code, "top_logprobs": []} for text, y, code in rows]
            body["logprobs"] = {"content": content, "refusal": None}
        if self.asked.return_token_ids:
            body["token_ids"] = tokens
        if not streamed:
            return body | {"message": {"role": "assistant", "content": chunk.text, "refusal": None}}
        return body | {"delta": ({"role": "assistant"} if chunk.first == 0 else {}) | {"content": chunk.text}}

    def whole(self) -> Reply:
        told = enumerate(self.completion.generations)
        chunks = (Chunk(i, one.text.text, 0, len(one.text.ids), one.finish) for i, one in told)
        choices = [self.choice(chunk, streamed=False) for chunk in chunks]
        return self.head | {"object": "chat.completion", "choices": choices, "usage": self.usage()}

    async def events(self) -> AsyncIterator[str]:
        """The events of a stream: one per chunk of a response; with the last one the usage, if asked for, and [DONE]."""
        usage = self.asked.stream_options is not None and self.asked.stream_options.include_usage
        head = self.head | {"object": "chat.completion.chunk"} | ({"usage": None} if usage else {})
        left = len(self.completion.generations)
        async for chunk in self.completion.chunks():
            text = event(head | {"choices": [self.choice(chunk, streamed=True)]})
            left -= chunk.finish is not None
            if not left and usage:
                text += event(head | {"choices": [], "usage": self.usage()})
            yield text if left else text + "data: [DONE]\n\n"  # in one write


def event(body: Reply) -> str:
    return f"data: {to_json(body)}\n\n"


class EventStream(StreamingResponse):
    """A response of server-sent events, which frees the places of the completion however it ends. If the models fail,
    the last event says so.
    """

    def __init__(self, completion: Completion, events: AsyncIterator[str]):
        super().__init__(self.with_error(events), media_type="text/event-stream")
        self.completion = completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.completion.close()

    async def with_error(self, events: AsyncIterator[str]) -> AsyncIterator[str]:
        try:
            async for text in events:
                yield text
        except RefusedError as error:
            yield event({"error": {"message": str(error), "type": "server_error", "param": None, "code": None}})
