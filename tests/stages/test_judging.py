"""`evaluate.judge`: both orders, ties, retries, the cache, length and failures, against a server of our own on loopback."""

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlhf.data.records import Ranking, join_judgements
from rlhf.errors import UserError
from rlhf.evaluation import judging
from rlhf.evaluation.judging import Endpoint, said_of
from rlhf.evaluation.statistics import describe, win
from rlhf.system import endpoint

from .conftest import Run

KEY = "sk-secret-4711"
MESSAGES = [{"role": "user", "content": "Hi"}]


class Judge(BaseHTTPRequestHandler):
    """Prefers the answer with more words; what is queued in server.trouble comes first."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, dict(self.headers), body))
        trouble = self.server.trouble.pop(0) if self.server.trouble else None
        if isinstance(trouble, bytes):
            self.wfile.write(trouble)
            return
        if trouble == "drip":
            with suppress(OSError):  # until the client has gone
                for _ in range(200):
                    self.wfile.write(b"HTTP/1.0 200 OK\r\nX-Long: " if _ == 0 else b"x")
                    time.sleep(0.02)
            return
        if isinstance(trouble, int):
            self.send_response(trouble)
            if trouble == 302:
                self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.send_header("Retry-After", "0")
            self.end_headers()
            return
        content = body["messages"][-1]["content"]
        reply = trouble if isinstance(trouble, str) else self.server.decide(content)
        usage = {"prompt_tokens": 100, "completion_tokens": 1}
        text = json.dumps({"choices": [{"message": {"content": reply}}], "usage": usage}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


def by_words(content: str) -> str:
    first, second = content.split("Answer A:\n")[1].split("\n\nWhich answer")[0].split("\n\nAnswer B:\n")
    a, b = len(first.split()), len(second.split())
    return "A" if a > b else "B" if b > a else "TIE"


@pytest.fixture
def server(monkeypatch) -> Iterator[ThreadingHTTPServer]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(Endpoint, "first_wait", 0.001)
    made = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    made.asked, made.trouble, made.decide = [], [], by_words
    made.url = f"http://127.0.0.1:{made.server_port}/v1"
    thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


def client(server, tmp_path, **more) -> Endpoint:
    return Endpoint(server.url, "m", tmp_path / "cache.jsonl", **more)


def test_a_request_is_openai_s_is_asked_once_and_its_key_is_stored_nowhere(server, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server.trouble = ["TIE"]
    assert client(server, tmp_path, key_variable="JUDGE_KEY").ask(MESSAGES) == "TIE"
    path, headers, body = server.asked[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == f"Bearer {KEY}"
    assert body["model"] == "m" and body["messages"] == MESSAGES and body["temperature"] == 0
    assert KEY not in (tmp_path / "cache.jsonl").read_text()
    with (tmp_path / "cache.jsonl").open("a") as file:
        file.write('{"key": "torn')  # a killed run's last line
    again = client(server, tmp_path)
    assert again.ask(MESSAGES) == "TIE" and len(server.asked) == 1
    assert again.counts == {"cached": 1}


@pytest.mark.parametrize("trouble", [[500, 429, "A"], [503, "A"], [200, "A"]])  # 200: a reply without a body
def test_passing_trouble_is_tried_again(server, tmp_path, trouble):
    server.trouble = list(trouble)
    one = client(server, tmp_path)
    assert one.ask(MESSAGES) == "A"
    assert one.counts["retries"] == len(trouble) - 1 and one.counts["failures"] == 0


OK = b"HTTP/1.0 200 OK\r\n\r\n"


@pytest.mark.parametrize("reply",
    [b"", b"nonsense\r\n", b"HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\n{}", b"HTTP/1.0 200 OK\r\n" + b"a: b\r\n" * 999,
     OK + b"[" * 99999, OK + b"[]",
     OK + b"null", OK + b'{"choices": {"0": 1}}', OK + b'{"choices": [{"message": {"content": 5}}]}', OK + b"\xff\xfe"],
    ids=range(10),
)  # fmt: skip
def test_a_reply_that_is_none_is_tried_again_and_counted(server, tmp_path, reply):
    server.trouble = [reply, reply, "A"]
    one = client(server, tmp_path)
    assert one.ask(MESSAGES) == "A" and one.counts["retries"] == 2


def test_an_endpoint_that_nobody_answers_at_or_that_drips_is_given_up(server, tmp_path, monkeypatch):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dead = Endpoint(f"http://127.0.0.1:{nobody.getsockname()[1]}", "m", tmp_path / "c")
        with pytest.raises(UserError, match=r"no answer in 5 attempts \(.*failed.*\): check the URL and the network"):
            dead.ask(MESSAGES)
    monkeypatch.setattr(endpoint, "TIMEOUT", 1.0)
    server.trouble = ["drip", "drip", "A"]
    one = client(server, tmp_path)
    started = time.monotonic()
    assert one.ask(MESSAGES) == "A" and one.counts["retries"] == 2 and time.monotonic() - started < 6  # of 8


def test_a_lasting_failure_is_counted_and_not_cached(server, tmp_path):
    server.trouble = [500] * endpoint.ATTEMPTS + [400] + [302]
    one = client(server, tmp_path)
    assert [one.ask(MESSAGES) for _ in range(3)] == [None, None, None]  # the last is a redirect, which is not followed
    assert one.refused.startswith("HTTP ")
    assert one.counts["failures"] == 3 and one.counts["requests"] == endpoint.ATTEMPTS + 2
    assert not (tmp_path / "cache.jsonl").exists()


def test_a_key_is_neither_missing_nor_sent_in_the_clear(tmp_path, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(UserError, match="JUDGE_KEY: this environment variable is not set"):
        Endpoint("https://host/v1", "m", tmp_path / "c", "JUDGE_KEY")
    monkeypatch.setenv("JUDGE_KEY", f"{KEY}\nx")
    with pytest.raises(UserError, match="not set to one line") as error:
        Endpoint("https://host/v1", "m", tmp_path / "c", "JUDGE_KEY")
    assert KEY not in str(error.value)
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with pytest.raises(UserError, match="unencrypted") as error:
        Endpoint("http://host/v1", "m", tmp_path / "c", "JUDGE_KEY")
    assert KEY not in str(error.value)


@pytest.mark.parametrize(("reply", "verdict"),
    [("A", "A"), ("b", "B"), ("tie", "TIE"), ("The better one is **B**.", "B"), ("[[A]]", "A"), ("A or B? B", "B"),
     ("a good answer", None), ("", None), (None, None), ("ABBA", None), ("Tie.", "TIE"), ("A tie.", "TIE"), ("b.", "B"),
     ("A is better than B", "A"), ("Answer B is better than answer A.", "B")])  # fmt: skip
def test_a_reply_is_read(reply, verdict):
    assert judging.verdict_of(reply) == verdict


def rows(*lengths: tuple[int, int], **more) -> list[dict]:
    return [{"prompt": "p", "responses": {"ppo": "w " * a, "sft": "w " * b}} | more for a, b in lengths]


def test_figures_by_hand_and_judges_who_disagree():
    # row 1: A then B: ours in both orders; row 2: A then A: the first place; row 3: TIE, TIE; row 4: a failure
    verdicts = ["A", "B", "A", "A", "TIE", "TIE", "A", None]
    found = judging.judged_figures(rows((3, 1), (1, 1), (1, 3), (1, 1)), ("ppo", "sft"), verdicts)
    assert found["win_rate"]["value"] == round((1 + 0.5 + 0.5) / 3, 4) and found["win_rate"]["n"] == 3
    assert found["both_orders_agree"]["value"] == round(2 / 3, 4) and found["left_out"] == 1
    given = rows(*[(3, 1)] * 40, scores={"ppo": 1.0, "sft": 0.0}, gold={"ppo": 0.2, "sft": 0.8})
    found = judging.judged_figures(given, ("ppo", "sft"), ["B", "A"] * 40) | {"judge": "m", "counts": {}}
    assert found["others"]["reward model"]["disagrees"] and found["others"]["reward model"]["agreement"]["value"] == 0.0
    assert not found["others"]["truth"]["disagrees"] and found["others"]["truth"]["agreement"]["value"] == 1.0
    assert sum("disagrees True" in line for line in describe(found, "judge")) == 1


def test_the_answers_of_a_run_are_judged(server, gold_run, tmp_path):
    """Twice: the second time from the cache, with the same figures and no request."""
    shutil.copytree(gold_run.folder / "evaluate", tmp_path / "runs" / "x" / "evaluate")
    run = Run(tmp_path / "runs", "x", gold_run.overrides)
    more = [f"evaluate.judge='{server.url}'", "evaluate.judge_model=words", "evaluate.judge_prompts=10"]
    before = (run.folder / "evaluate" / "results.json").read_bytes()
    run.stage("evaluate", *more)
    path = run.folder / "evaluations" / "judge.json"
    found = json.loads(path.read_text())
    assert len(server.asked) == 20 and found["counts"]["requests"] == 20 and found["win_rate"]["n"] == 10
    assert found["both_orders_agree"]["value"] == 1.0 and set(found["others"]) == {"reward model", "truth"}
    answers = [json.loads(line)["responses"] for line in (run.folder / "evaluate" / "samples.jsonl").open()][:10]
    words = [[len(row[name].split()) for name in ("ppo", "sft")] for row in answers]  # this judge counts them
    assert found["win_rate"]["value"] == pytest.approx(sum(win(*pair) for pair in words) / 10, abs=1e-4)
    run.stage("evaluate", *more)
    again = json.loads(path.read_text())
    assert len(server.asked) == 20 and again["counts"] == {"cached": 20} and again["win_rate"] == found["win_rate"]
    assert (run.folder / "evaluate" / "results.json").read_bytes() == before


def test_a_tie_of_judgements_that_form_no_ranking_counts_half():
    names = ["w", "x", "y", "z"]
    fields, metadata = join_judgements(names, [("y", "z")], [("w", "x")])
    responses = [{"id": name, "text": name} for name in names]
    record = Ranking.model_validate({"id": "1", "prompt": "?", "responses": responses, "metadata": metadata, **fields})
    assert said_of(record) == {(2, 3): 1.0, (3, 2): 0.0, (0, 1): 0.5, (1, 0): 0.5}
