"""The OpenAI-style API: models, chat completions, completions, and scores of the reward model.

Log-probs are natural, of the softmax at the request's temperature; temperature 0 takes the most probable token.
"""

import asyncio
import json
import re
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
from rlhf.data.tokenizer import encode_text, encode_texts
from rlhf.errors import UserError
from rlhf.serving.models import Chunk, Completion, ModelFailedError, ModelThread, ServedModel
from rlhf.serving.security import Receive, RefusedError, Scope, Send

MOST_RESPONSES = 16  # n
MOST_PROMPTS = 32
CHARACTERS = 32  # per token of the context: a longer text is refused before it is encoded, which takes time and memory
PHRASE = 4  # words of a phrase that counts as repetition
LONG_WORDS = 12  # least words of a response that is checked for repetition

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


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=200)]


def records_of(messages: str | list[ChatMessage]) -> list[Message]:
    """A dialogue as messages of a record; a string is what a user says, and parts of a text are joined."""
    if isinstance(messages, str):
        return [Message(role="user", content=messages)]
    texts = [m.content if isinstance(m.content, str) else "".join(part.text for part in m.content) for m in messages]
    roles: list[Any] = ["system" if m.role == "developer" else m.role for m in messages]
    return [Message(role=role, content=text) for role, text in zip(roles, texts, strict=True)]


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class Sampling(Strict):
    model: Id
    max_tokens: MostTokens | None = None
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
    return_token_ids: bool = False  # as in vLLM: each choice with the ids of its tokens

    def start(self, thread: ModelThread, prompts: Sequence["Prompt"], **how: Any) -> Completion:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        how |= {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}
        return Completion(thread, prompts, n=self.n or 1, stops=stops, **how)


class ChatRequest(Sampling):
    messages: Messages
    max_completion_tokens: MostTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None


class CompletionRequest(Sampling):
    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[Annotated[list[int], Field(min_length=1)]], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    logprobs: Annotated[int | None, Field(ge=0, le=5)] = None
    echo: Literal[False] | None = None

    def prompts(self) -> list[Any]:
        given: Any = self.prompt
        return given if isinstance(given, list) and not isinstance(given[0], int) else [given]


class ScoreRequest(Strict):
    """Responses to one prompt, for the reward model of a run."""

    model: Id | None = None  # the first one that is served
    prompt: Text | Messages
    responses: Annotated[list[Text], Field(min_length=1, max_length=64)]


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


async def completion_prompt(model: ServedModel, prompt: str | list[int]) -> Prompt:
    """A text's tokens, or the tokens given, and their key. Raises: RefusedError."""
    if isinstance(prompt, str):
        refuse_long(model, [prompt], "prompt")
        ids = await asyncio.to_thread(encode_text, model.tokenizer, prompt)
    else:
        ids = prompt
    if not ids:
        raise RefusedError(400, "the prompt is empty: want at least one token", "prompt")
    if wrong := [i for i in ids if not 0 <= i < model.vocabulary]:
        raise RefusedError(400, f"token {wrong[0]}: the vocabulary has {model.vocabulary}", "prompt")
    return model, ids, ("completion", prompt if isinstance(prompt, str) else tuple(prompt))


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
        if asked.top_logprobs and not asked.logprobs:
            raise RefusedError(400, "want logprobs=true with top_logprobs", "top_logprobs")
        prompt = await chat_prompt(model, records_of(asked.messages))
        most, tops = asked.max_completion_tokens or asked.max_tokens, asked.top_logprobs or 0
        completion = asked.start(thread, [prompt], most=most, alternatives=tops)
        return await respond(Form(completion, True, bool(asked.logprobs)), asked, request)

    @router.post("/completions")
    async def complete(asked: CompletionRequest, request: Request) -> Response:
        model = thread.find(asked.model)
        prompts = [await completion_prompt(model, prompt) for prompt in asked.prompts()]
        completion = asked.start(thread, prompts, most=asked.max_tokens, alternatives=asked.logprobs or 0)
        return await respond(Form(completion, False, asked.logprobs is not None), asked, request)

    @router.post("/score")
    async def score(asked: ScoreRequest) -> Body:
        model = thread.find(asked.model or next(iter(thread.models)))
        run, prompt = model.run, records_of(asked.prompt)
        refuse_long(model, [message.content for message in prompt], "prompt")
        for response in asked.responses:
            refuse_long(model, [response], "responses")
        messages, most = [one.model_dump() for one in prompt], run.max_new_tokens("reward")
        try:
            scores = await thread.call(run.score, [messages] * len(asked.responses), asked.responses)
        except UserError as error:
            raise RefusedError(400, str(error), "prompt") from None
        counts = [len(ids) for ids in await asyncio.to_thread(encode_texts, run.tokenizer, asked.responses)]
        rows = zip(scores, asked.responses, counts, strict=True)
        data = [
            {"index": i, "object": "score", "score": value, "tokens": count, "flags": doubts(text, count, most)}
            for i, (value, text, count) in enumerate(rows)
        ]
        return {"object": "list", "model": f"{run.folder.name}/reward", "data": data}

    return router


def doubts(text: str, tokens: int, limit: int) -> list[str]:
    """Reasons to doubt a score: the response is empty, repeats itself, or is longer than those of training, so that the
    reward model may have read only its beginning.
    """
    words = re.findall(r"\w+", text.lower())
    phrases = [tuple(words[i : i + PHRASE]) for i in range(len(words) - PHRASE + 1)]
    found = {
        "empty": not text.strip(),
        "truncated": tokens > limit,
        "length": 0.9 * limit < tokens <= limit,
        "repetition": len(words) >= LONG_WORDS and len(set(phrases)) < 0.7 * len(phrases),
    }
    return [name for name, applies in found.items() if applies]


# ------------------------------------------------------------------------------------------- responses


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
            body["token_ids"] = self.completion.generations[chunk.place].text.ids[chunk.first : chunk.last]
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
        one, spelled = self.completion.generations[chunk.place], self.model.spelled
        response, places = one.response, range(chunk.first, chunk.last)
        tops = [{spelled(token): value for token, value in response.tops[p]} for p in places if response.tops]
        return {
            "tokens": [spelled(response.tokens[place]) for place in places],
            "token_logprobs": [response.logprobs[place] for place in places],
            "top_logprobs": tops or None,
            "text_offset": [len(one.text.spell(place)) for place in places],
        }


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
            except ModelFailedError as error:
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


async def respond(form: Form, asked: Sampling, request: Request) -> Response:
    """The responses as one body, or as a stream. Their places are freed if the client disconnects."""
    completion = form.completion
    if asked.stream:
        return EventStream(completion, events(form, asked))
    async with freed(completion, request.receive):
        chunks = await completion.whole()
    choices = [form.choice(chunk, False, asked.return_token_ids) for chunk in chunks]
    about = {"object": form.kind, "choices": choices, "usage": form.usage(), "seed": completion.seed}
    return JSONResponse(form.head | about)


async def events(form: Form, asked: Sampling) -> AsyncIterator[str]:
    """The events of a stream: one per chunk of a response; with the last one the usage, if asked for, and [DONE]."""
    usage = asked.stream_options is not None and asked.stream_options.include_usage
    head = form.head | {"object": f"{form.kind}.chunk" if form.chat else form.kind}
    tail: Body = {"usage": None} if usage else {}
    left = len(form.completion.generations)
    async for chunk in form.completion.chunks():
        text = event(head | {"choices": [form.choice(chunk, True, asked.return_token_ids)]} | tail)
        left -= chunk.finish is not None
        if not left and usage:
            text += event(head | {"choices": [], "usage": form.usage(), "seed": form.completion.seed})
        yield text if left else text + "data: [DONE]\n\n"  # in one write
