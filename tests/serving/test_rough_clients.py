"""Clients that read slowly, leave, or write what is no HTTP: nobody else waits for them, and their places are free again."""

import json
import random
import socket
import time
from contextlib import suppress
from urllib.parse import urlparse

import httpx
import pytest

from rlhf.serving import security
from tests.serving.conftest import emptied

ASKED = {"model": "gold/ppo", "messages": [{"role": "user", "content": "what is red ?"}], "temperature": 2, "seed": 1}
LONG = ASKED | {"max_tokens": 64, "n": 4, "logprobs": True, "stream": True}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"


def http(body: dict) -> bytes:
    data = json.dumps(body).encode()
    return HEAD + b"content-length: %d\r\n\r\n" % len(data) + data


@pytest.fixture
def connect(server):
    """Make connections with a small receive buffer; they are closed in the end."""
    place, made = urlparse(server), []

    def one(data: bytes) -> socket.socket:
        made.append(socket.socket())
        made[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        made[-1].settimeout(20)
        made[-1].connect((place.hostname, place.port))
        made[-1].sendall(data)
        return made[-1]

    yield one
    for each in made:
        each.close()


def test_a_client_that_does_not_read_holds_up_nobody_and_gets_everything_later(server, thread, connect):
    slow = [connect(http(LONG)) for _ in range(4)]
    for seed in range(3):
        answer = httpx.post(f"{server}/v1/chat/completions", json=ASKED | {"max_tokens": 5, "seed": seed}, timeout=20)
        assert answer.status_code == 200
    assert emptied(thread), "the responses are drawn, though nobody has read them"
    for one in slow:
        data = one.recv(1)  # a byte at a time
        while not data.endswith(b"0\r\n\r\n"):
            data += one.recv(2**16)
        assert data.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in data and data.count(b'"finish_reason":"') == 4


def test_clients_that_leave_at_any_moment_free_their_places(thread, connect):
    rng = random.Random(0)
    for i in range(30):
        whole = http(LONG if i % 2 else LONG | {"stream": False})
        one = connect(whole[: rng.choice([20, 150, len(whole), len(whole), len(whole)])])
        time.sleep(rng.random() * 0.05)
        if i % 3 == 0:  # a reset instead of an orderly end
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        one.close()
    assert emptied(thread)


NO_HTTP = [
    b"\r\n\r\n", b"\0" * 100, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 200, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
    b"GET /" + b"a" * 100_000, b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 100_000, b"GET / HTTP/1.1\r\nhost 127.0.0.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"".join(b"h%d: v\r\n" % i for i in range(9000)) + b"\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET http://evil.example/ HTTP/1.1\r\nhost: evil.example\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n",
    b"GET /%00 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    b"BREW / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", HEAD + b"content-length: -1\r\n\r\n", HEAD + b"content-length: 1e9\r\n\r\n",
    HEAD + b"content-length: 99999999999999999999\r\n\r\n{}", HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", HEAD + b"transfer-encoding: gzip\r\n\r\n{}",
    HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", HEAD + b"transfer-encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n{}", HEAD + b"content-encoding: gzip\r\ncontent-length: 2\r\n\r\n{}",
    HEAD + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n{}",
    HEAD + b"upgrade: websocket\r\nconnection: upgrade\r\ncontent-length: 2\r\n\r\n{}",
]  # fmt: skip


@pytest.mark.parametrize("data", NO_HTTP, ids=range(len(NO_HTTP)))
def test_what_is_no_request_is_refused_and_nothing_else_happens(server, connect, data):
    one = connect(data)
    one.shutdown(socket.SHUT_WR)
    answer = b""
    try:
        while part := one.recv(2**16):
            answer += part
    except ConnectionResetError:
        pass
    assert b"HTTP/1.1 5" not in answer and b"Traceback" not in answer
    assert httpx.get(f"{server}/v1/models").status_code == 200


def test_connections_without_a_request_are_closed_and_block_nobody(server, connect, monkeypatch):
    monkeypatch.setattr(security, "HEAD_SECONDS", 0.2)
    served = connect(b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    assert served.recv(2**16).startswith(b"HTTP/1.1 200")
    served.sendall(b"GET /v1/models HTT")  # a second request that never arrives
    idle = [connect(data) for data in [b"", b"POST /v1/score HTTP/1.1\r\nhost: 12"] * 40]
    assert httpx.get(f"{server}/v1/models").status_code == 200
    assert [one.recv(1) for one in [*idle, served]] == [b""] * 81, "closed by the server"


def test_a_body_that_drips_is_given_up(connect, monkeypatch):
    monkeypatch.setattr(security, "BODY_SECONDS", 0.3)
    one, started = connect(HEAD + b"content-length: 1000\r\n\r\n"), time.monotonic()
    one.settimeout(0.05)
    answer = b""
    while not answer and time.monotonic() < started + 10:
        one.sendall(b" ")
        with suppress(TimeoutError):
            answer = one.recv(2**16)
    assert time.monotonic() < started + 5 and not answer.startswith(b"HTTP/1.1 5")


def test_a_head_or_a_trailer_without_end_is_refused_while_it_comes_and_small_chunks_are_not(server, connect):
    filler = b"x-more: " + b"y" * 1000 + b"\r\n"
    unended = connect(HEAD + b"transfer-encoding: chunked\r\n")
    trailing = connect(HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
    for one in (unended, trailing):
        with pytest.raises(OSError):  # the server closes the connection, long before this ends
            for _ in range(100_000):
                one.sendall(filler)
    body = json.dumps(ASKED | {"max_tokens": 1, "user": "u" * 20_000}).encode()
    chunks = b"".join(b"1\r\n" + bytes([byte]) + b"\r\n" for byte in body)
    small = connect(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
    assert small.recv(15) == b"HTTP/1.1 200 OK"
