"""The requests of the API and of the page: their fields, ranges and defaults."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rlhf.data.records import Message, Text

MOST_RESPONSES = 16  # n
MOST_PROMPTS = 32
MOST_COMPARED = 6
FLAGS = (  # the labels of a response besides its quality (Ouyang et al. 2022, table 3)
    "fails_instruction", "inappropriate", "hallucination", "satisfies_constraint", "sexual", "violent",
    "encourages_violence", "denigrates", "harmful_advice", "opinion", "moral_judgement",
)  # fmt: skip

Stop = Annotated[Text, Field(min_length=1, max_length=200)]
Id = Annotated[Text, Field(min_length=1, max_length=500)]
Submission = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{8,64}$")]
Seconds = Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)]
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
    """The fields of both kinds of completion."""

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

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


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

    model: Id
    prompt: Text | Messages
    responses: Annotated[list[Text], Field(min_length=1, max_length=64)]


class RankingRequest(Strict):
    """A labeler's judgement of the responses of a task or comparison."""

    name: Id
    submission: Submission
    ranking: Annotated[list[list[Id]], Field(min_length=1, max_length=64)] | None  # none: cannot judge
    ratings: dict[Id, Annotated[int, Field(ge=1, le=7)]] = Field(default_factory=dict)
    flags: dict[Id, list[Annotated[str, Field(pattern="^(" + "|".join(FLAGS) + ")$")]]] = Field(default_factory=dict)
    seconds: Seconds = 0.0
    note: Annotated[Text, Field(max_length=2000)] = ""
    replaces: Id | None = None


class DemonstrationRequest(Strict):
    messages: Messages
    response: Annotated[Text, Field(min_length=1, max_length=100_000)]
    submission: Submission
    seconds: Seconds = 0.0
    task: Id | None = None
    edited: Id | None = None  # the task's response from which the labeler started


class CompareRequest(Strict):
    messages: Messages
    models: Annotated[list[Id], Field(min_length=2, max_length=MOST_COMPARED)]
    temperature: Temperature = 1.0
    max_tokens: MostTokens | None = None


class ShadingRequest(Strict):
    model: Id
    reference: Id | None = None
    messages: Messages
    token_ids: Annotated[list[int], Field(min_length=1, max_length=2048)]


class NextRequest(Strict):
    model: Id
    text: Annotated[Text, Field(min_length=1)]
    count: Annotated[int, Field(ge=1, le=100)] = 10
