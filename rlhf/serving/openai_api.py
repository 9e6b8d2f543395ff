"""The OpenAI-style API: models, chat completions, and scores of the reward model.

Log-probs are natural, of the softmax at the request's temperature; temperature 0 takes the most probable token.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from rlhf.data.chat_template import encode_prompt
from rlhf.data.records import Message, Text
from rlhf.data.splits import prompt_key
from rlhf.errors import UserError
from rlhf.serving.models import Chunk, Completion, ModelThread, ServedModel
from rlhf.serving.security import Receive, RefusedError, Scope, Send

MOST_RESPONSES = 16  # n
CHARACTERS = 32  # per token of the context: a longer text is refused before it is encoded, which takes time and memory

Body = dict[str, Any]
to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

# ------------------------------------------------------------------------------------------- requests

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


# ------------------------------------------------------------------------------------------- prompts

Prompt = tuple[ServedModel, list[int], tuple]  # a model, tokens, and the key of their responses' random numbers


def refuse_long(model: ServedModel, texts: Sequence[str], param: str) -> None:
    """Raises: RefusedError for texts of more characters than the context can hold."""
    if (size := sum(map(len, texts))) > CHARACTERS * model.context:
        message = f"the model's context is {model.context} tokens: this has {size:,} characters: shorten it"
        raise RefusedError(400, message, param, "context_length_exceeded")


async def chat_prompt(model: ServedModel, messages: Sequence[Message]) -> Prompt:
    """A dialogue's tokens, and the key under which `rlhf generate` draws its responses. Raises: RefusedError."""
    refuse_long(model, [message.content for message in messages], "messages")
    try:
        ids = await asyncio.to_thread(encode_prompt, model.tokenizer, messages)
    except UserError as error:
        raise RefusedError(400, str(error), "messages") from None
    return model, ids, ("generate", prompt_key(messages))


# ------------------------------------------------------------------------------------------- routes


def make_router(thread: ModelThread) -> APIRouter:
    router, started = APIRouter(prefix="/v1"), int(time.time())

    def card(model: ServedModel) -> Body:
        about = {"id": model.name, "object": "model", "created": started, "owned_by": "rlhf"}
        return about | {"max_model_len": model.context, "fingerprint": model.policy_id}

    @router.get("/models")
    async def list_models() -> Body:
        return {"object": "list", "data": [card(model) for model in thread.models.values()]}

    @router.get("/models/{name:path}")
    async def one_model(name: str) -> Body:
        return card(thread.find(name))

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
        return await respond(Form(completion, asked), request)

    @router.post("/score")
    async def score(asked: ScoreRequest) -> Body:
        model = thread.find(asked.model or next(iter(thread.models)))
        run, prompt = model.run, records_of(asked.prompt)
        refuse_long(model, [message.content for message in prompt], "prompt")
        for response in asked.responses:
            refuse_long(model, [response], "responses")
        messages = [one.model_dump() for one in prompt]
        try:
            scores = await thread.call(run.score, [messages] * len(asked.responses), asked.responses, asked.ended)
        except UserError as error:
            raise RefusedError(400, str(error), "prompt") from None
        data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores)]
        return {"object": "list", "model": f"{run.folder.name}/reward", "data": data}

    return router


# ------------------------------------------------------------------------------------------- responses


class Form:
    """How a completion is written."""

    def __init__(self, completion: Completion, asked: ChatRequest):
        self.completion, self.asked = completion, asked
        self.model = completion.generations[0].model
        self.head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.model.name,
            "system_fingerprint": self.model.policy_id,
        }

    def usage(self) -> Body:
        read, written = self.completion.prompt_tokens, self.completion.completion_tokens
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def choice(self, chunk: Chunk, streamed: bool) -> Body:
        """One choice with its new text."""
        body: Body = {"index": chunk.place, "finish_reason": chunk.finish, "logprobs": None}
        if self.asked.logprobs:
            body["logprobs"] = {"content": self.logprobs(chunk), "refusal": None}
        if self.asked.return_token_ids:
            body["token_ids"] = self.completion.generations[chunk.place].text.ids[chunk.first : chunk.last]
        if not streamed:
            return body | {"message": {"role": "assistant", "content": chunk.text, "refusal": None}}
        return body | {"delta": ({"role": "assistant"} if chunk.first == 0 else {}) | {"content": chunk.text}}

    def logprobs(self, chunk: Chunk) -> list[Body]:
        response, rows = self.completion.generations[chunk.place].response, []
        for place in range(chunk.first, chunk.last):
            text = self.model.spelled(response.tokens[place])
            row = {"token": text, "logprob": response.logprobs[place], "top_logprobs": []}
            rows.append(row | {"bytes": None if "�" in text else list(text.encode())})
        return rows


def event(body: Body) -> str:
    return f"data: {to_json(body)}\n\n"


class EventStream(StreamingResponse):
    """A response of server-sent events, which frees the places of the completion however it ends.

    Unlike starlette's it starts no task group per stream, since that takes time from the models' thread.
    """

    def __init__(self, completion: Completion, events: AsyncIterator[str]):
        super().__init__(events, media_type="text/event-stream")
        self.completion = completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with freed(self.completion, receive):
            try:
                await self.stream_response(send)
            except RefusedError as error:
                told = {"message": str(error), "type": "server_error", "param": None, "code": None}
                await send({"type": "http.response.body", "body": event({"error": told}).encode()})


@asynccontextmanager
async def freed(completion: Completion, receive: Receive) -> AsyncIterator[None]:
    """Free the places at the end, or when the client disconnects: the responses end, and with them the wait for them."""

    async def close_when_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        completion.close()

    leaving = asyncio.create_task(close_when_gone())
    try:
        yield
    finally:
        leaving.cancel()
        completion.close()


async def respond(form: Form, request: Request) -> Response:
    """The responses as one body, or as a stream. Their places are freed if the client disconnects."""
    completion = form.completion
    if form.asked.stream:
        return EventStream(completion, events(form))
    async with freed(completion, request.receive):
        chunks = await completion.whole()
    choices = [form.choice(chunk, streamed=False) for chunk in chunks]
    about = {"object": "chat.completion", "choices": choices, "usage": form.usage(), "seed": completion.seed}
    return JSONResponse(form.head | about)


async def events(form: Form) -> AsyncIterator[str]:
    """The events of a stream: one per chunk of a response; with the last one the usage, if asked for, and [DONE]."""
    usage = form.asked.stream_options is not None and form.asked.stream_options.include_usage
    head = form.head | {"object": "chat.completion.chunk"}
    tail: Body = {"usage": None} if usage else {}
    left = len(form.completion.generations)
    async for chunk in form.completion.chunks():
        text = event(head | {"choices": [form.choice(chunk, streamed=True)]} | tail)
        left -= chunk.finish is not None
        if not left and usage:
            text += event(head | {"choices": [], "usage": form.usage(), "seed": form.completion.seed})
        yield text if left else text + "data: [DONE]\n\n"  # in one write
