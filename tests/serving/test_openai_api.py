import asyncio
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import pytest
import torch

from rlhf.errors import UserError
from rlhf.model.interface import Episodes
from rlhf.ppo.rewards import ServerReward
from rlhf.serving import openai_api
from rlhf.serving.app import make_app
from rlhf.serving.models import ModelThread
from tests.serving.conftest import access, emptied, make_labelling, serving
from tests.stages.test_generate import generated, prompts  # noqa: F401 (a fixture)

pytestmark = pytest.mark.anyio
PROMPT = "what is red ?"
ASKED = [{"role": "user", "content": PROMPT}]


@pytest.fixture
def ask(server):
    import openai  # which takes a second

    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


def chat(ask, **more):
    wanted = {"model": "gold/sft", "messages": ASKED, "seed": 0, "max_tokens": 24}
    return ask.chat.completions.create(**(wanted | more))


def test_models_are_listed(ask):
    import openai

    assert [model.id for model in ask.models.list()] == ["gold/sft", "gold/ppo"]
    with pytest.raises(openai.NotFoundError, match="gold/sft, gold/ppo"):
        chat(ask, model="gold/dpo")


def agreeing(choice, tokens, logprobs, within):
    """The number of leading tokens on which a choice agrees with `rlhf generate`; their log-probs are compared."""
    found = [token["logprob"] for token in choice["logprobs"]["content"]]
    pairs = zip(choice["token_ids"], tokens, strict=False)
    same = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(found))
    assert found[:same] == pytest.approx(logprobs[:same], abs=within)
    return same


async def test_the_server_answers_as_generate_does_whatever_else_is_asked(client, gold_run, prompts, tmp_path):  # noqa: F811
    """120 responses at once through 8 places, with neighbours of other lengths and temperatures; rounding may change a token."""
    how = ("seed=3", "generate.logprobs=true", "generate.stage=sft", "generate.samples=3")
    lines = generated(gold_run, prompts, tmp_path / "out.jsonl", *how)
    gate = asyncio.Semaphore(10)

    async def one(row):
        async with gate:
            body = {"model": "gold/sft", "messages": row["prompt"], "seed": 3, "n": 3, "max_tokens": 24}
            body |= {"logprobs": True, "return_token_ids": True}
            while (answer := await client.post("/v1/chat/completions", json=body)).status_code == 429:
                await asyncio.sleep(0.02)
            return answer.json()

    async def other(i):
        body = {"model": "gold/sft", "messages": [{"role": "user", "content": "x " * i}], "temperature": 1.7}
        await client.post("/v1/chat/completions", json=body | {"max_tokens": 1 + i})

    answers, *_ = await asyncio.gather(asyncio.gather(*map(one, lines)), *(other(i) for i in range(20)))
    alike = 0
    for row, answer in zip(lines, answers, strict=True):
        for j, choice in enumerate(sorted(answer["choices"], key=lambda choice: choice["index"])):
            tokens = row["token_ids"][j]
            if agreeing(choice, tokens, row["logprobs"][j], 1e-4) == len(tokens) == len(choice["token_ids"]):
                alike += 1
                assert choice["message"]["content"].strip() == row["responses"][j]
                assert (choice["finish_reason"] == "stop") == row["ended"][j]
    assert alike >= 117  # a few responses in a thousand have a token next to an edge


def test_an_answer_may_be_sent_back_as_a_turn_and_nulls_count_as_left_out(ask):
    turn = chat(ask).choices[0].message
    second = chat(ask, messages=[*ASKED, turn, ASKED[0]], extra_body={"return_token_ids": None})
    assert second.choices[0].message.content


def test_a_stream_is_the_answer_in_pieces(ask):
    whole = chat(ask, n=2, logprobs=True)
    assert whole.usage.completion_tokens == sum(len(c.logprobs.content) for c in whole.choices)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    texts, tokens, reasons, usage = ["", ""], [[], []], [None, None], None
    for chunk in chat(ask, n=2, logprobs=True, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += choice.logprobs.content
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert tokens == [choice.logprobs.content for choice in whole.choices]
    assert usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it_also_across_tokens(ask, stream):
    whole = chat(ask, seed=5, logprobs=True).choices[0]
    text, ends = whole.message.content, []
    for token in whole.logprobs.content:
        ends.append(sum(ends[-1:]) + len(token.token))
    for end in ends[:4]:  # the last character of one token and the first of the next
        stop = text[end - 1 : end + 1]
        answer = chat(ask, seed=5, stop=[stop, "never"], stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        found = "".join(c.delta.content or "" if stream else c.message.content for c in choices)
        assert found == text[: text.index(stop)] and choices[-1].finish_reason == "stop"


def test_mistakes_have_the_apis_form(ask, server):
    import openai

    for more, message, param in (
        ({"messages": []}, "messages: List should have at least 1", "messages"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "end with one of the user", "messages"),
        ({"temperature": 3}, "less than or equal to 2", "temperature"),
        ({"max_tokens": 65}, "allows at most 64", "max_tokens"),
        ({"messages": [{"role": "user", "content": "red " * 500}]}, "context is", "messages"),
        ({"extra_body": {"tools": []}}, "Extra inputs", "tools"),
        ({"n": 17}, "less than or equal to 16", "n"),
    ):
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            chat(ask, **more)
        assert caught.value.param == param and caught.value.type == "invalid_request_error"
    for body in (b"{", b'{"model": "\\ud800"}', b"[" * 100_000, b'{"model": "x", "seed": 1e999}', b"\xff"):
        answer = httpx.post(f"{server}/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["message"]
    assert httpx.get(f"{server}/v1/nothing").json()["error"]["type"] == "not_found_error"


async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(client, monkeypatch):
    monkeypatch.setattr(openai_api, "encode_prompt", None)
    long = "x " * 300_000
    scores = ({"prompt": long, "responses": ["y"]}, {"prompt": "x", "responses": ["y", long]})
    chatted = "chat/completions", {"messages": [{"role": "user", "content": long}]}
    for path, asked in (chatted, *(("score", given) for given in scores)):
        answer = await client.post(f"/v1/{path}", json={"model": "gold/ppo"} | asked)
        assert answer.status_code == 400 and "this has 600,000 characters: shorten it" in answer.text


async def test_a_full_queue_says_when_to_come_back_and_empties(thread, client):
    body = {"model": "gold/ppo", "messages": ASKED, "max_tokens": 40, "n": 8}
    answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for _ in range(12)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused and len(refused) < 12
    assert all(answer.headers["retry-after"] == "1" for answer in refused)
    assert refused[0].json()["error"]["code"] == "rate_limit_exceeded"
    assert await asyncio.to_thread(emptied, thread)


async def test_a_model_that_fails_answers_and_goes_on(thread, client, monkeypatch):
    def broken(*_):
        raise ValueError("out of memory")

    body = {"model": "gold/ppo", "messages": ASKED, "max_tokens": 8}
    monkeypatch.setattr(thread.queues["gold/ppo"].batch, "advance", broken)
    failed = await client.post("/v1/chat/completions", json=body)
    assert failed.status_code == 500 and failed.json()["error"]["type"] == "server_error"
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


async def test_a_stream_that_never_begins_frees_its_places():
    closed, completion = [], SimpleNamespace(close=lambda: closed.append(True))

    async def events():
        yield "data: x"

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        await asyncio.sleep(10)

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    await asyncio.wait_for(openai_api.EventStream(completion, events())(scope, receive, send), 5)
    assert closed


async def test_models_run_in_a_context_that_their_thread_enters_and_leaves():
    passed = []

    @contextmanager
    def context():
        passed.append(threading.current_thread())
        yield
        passed.append(threading.current_thread())

    thread = ModelThread({}, 1, 1, 64, context)
    assert await thread.call(lambda: [*passed, threading.current_thread()]) == passed[:1] * 2
    thread.stop()
    assert passed == passed[:1] * 2 != [threading.current_thread()] * 2


def test_scores_are_the_reward_models(server, gold_run):
    import rlhf

    responses = ["it is red .", "", "red red red"]
    body = {"model": "gold/ppo", "prompt": PROMPT, "responses": responses}
    answer = httpx.post(f"{server}/v1/score", json=body).json()
    assert answer["model"] == "gold/reward"
    expected = rlhf.load(gold_run.folder, "cpu").score([PROMPT] * 3, responses)
    assert [row["score"] for row in answer["data"]] == pytest.approx(expected, abs=1e-5)


def test_ppo_is_rewarded_by_a_server_with_a_token(thread, gold_run, tmp_path, monkeypatch):
    """One request per prompt; the scores are those of the same model here; a wrong token and a refusal are one line."""
    import rlhf
    from rlhf.data.records import Message, PromptRecord

    asked = ["what is red ?", "name a color"]
    records = [PromptRecord(id=text, prompt=[Message(role="user", content=text)]) for text in asked]
    texts = ["it is red .", "red", "blue .", "it is blue ."]
    which, ended = [0, 1, 1, 0], [True, True, False, False]
    episodes = Episodes([records[i] for i in which], [], [], texts, torch.tensor(ended))
    contents = [asked[i] for i in which]
    run = rlhf.load(gold_run.folder, "cpu")
    expected = run.score(contents, texts, ended)
    assert expected[2:] != run.score(contents, texts)[2:], "a response that was cut is scored without an end token"
    monkeypatch.setenv("REWARD_TOKEN", "t" * 24)
    monkeypatch.setenv("OTHER_TOKEN", "u" * 24)
    for url in serving(make_app(thread, access(token="t" * 24), make_labelling(tmp_path / "labels.jsonl"))):
        found = ServerReward(url, "REWARD_TOKEN", torch.device("cpu"))(episodes)
        assert found.tolist() == pytest.approx(expected, abs=1e-5)
        with pytest.raises(UserError, match=r"the key is refused \(HTTP 401\): check the URL and ppo.reward_key"):
            ServerReward(url, "OTHER_TOKEN", torch.device("cpu"))(episodes)
        long = episodes._replace(texts=["red " * 10_000] * 4)
        with pytest.raises(UserError, match="refused to score prompt"):
            ServerReward(url, "REWARD_TOKEN", torch.device("cpu"))(long)
