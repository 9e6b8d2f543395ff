"""What the guard lets through: hosts, origins, tokens, sizes and rates; and that the page loads nothing else."""

import os
import re

import httpx
import pytest

from rlhf.commands import serve
from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.serving import managing
from rlhf.serving.app import PAGE
from rlhf.serving.security import Guard, RefusedError
from tests.serving.conftest import access
from tests.stages.test_reward import make_ranking

pytestmark = pytest.mark.anyio
TOKEN = "t" * 24
SCORE = {"model": "gold/ppo", "prompt": "what ?", "responses": ["this ."]}


def behind(app, **changes) -> httpx.AsyncClient:
    """A client of the same application behind a guard of its own."""
    transport = httpx.ASGITransport(Guard(app.app, access(**changes)))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


async def test_the_page_and_its_policy(client):
    answer = await client.get("/")
    assert answer.status_code == 200 and "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    for path in PAGE.iterdir():
        text = path.read_text()
        assert (await client.get(f"/page/{path.name}")).status_code == 200
        outside = re.findall(r"https?://(?!www\.w3\.org/2000/svg)[^\s\"']+", text)
        assert not outside and not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=", text)


async def test_no_path_reaches_other_files(client):
    for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page//etc/passwd", "/page/..%2fapp.py", "/page/"):
        answer = await client.get(path)
        assert answer.status_code == 404 and "import" not in answer.text, path


async def test_pages_of_other_sites_can_do_nothing(client):
    for headers in ({"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
        assert (await client.post("/v1/score", json=SCORE, headers=headers)).status_code == 403
    for host in ("evil.example", "127.0.0.1.evil.example:80", "127.0.0.1:x@evil", "[localhost]evil.com", ""):
        assert (await client.get("/v1/models", headers={"host": host})).status_code == 421, host
    form = {"content-type": "text/plain"}
    assert (await client.post("/v1/score", content=b"{}", headers=form)).status_code == 415
    same = {"origin": "http://127.0.0.1", "sec-fetch-site": "same-origin"}
    assert (await client.post("/v1/score", json=SCORE, headers=same)).status_code == 200
    assert (await client.get("/v1/models", headers={"host": "[::1]:8000"})).status_code == 200


async def test_a_token_opens_everything_and_nothing_else_does(app):
    client = behind(app, token=TOKEN, loopback=False, labelers={"anna": "a" * 32})
    assert (await client.get("/")).status_code == 200 and (await client.get("/page/app.js")).status_code == 200
    for path in ("/v1/models", "/api/me", "/openapi.json", "/api/rank/next"):
        wrong = ({"authorization": text} for text in ("Bearer wrong", f"Basic {TOKEN}"))
        for headers in ({}, *wrong, {"cookie": "rlhf_session="}):
            answer = await client.get(path, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
        assert (await client.get(path, headers={"authorization": "Bearer " + "a" * 32})).status_code != 401
    assert (await client.get("/v1/models", headers={"authorization": f"Bearer {TOKEN}"})).status_code == 200
    assert (await client.get("/v1/models", headers={"cookie": f"rlhf_session={TOKEN}"})).status_code == 200


async def test_a_proxy_with_a_name_of_its_own_needs_a_token(app):
    named = {"host": "labels.example", "authorization": f"Bearer {TOKEN}"}
    assert (await behind(app, token=TOKEN, loopback=True).get("/v1/models", headers=named)).status_code == 200
    assert (await behind(app, loopback=True).get("/v1/models", headers=named)).status_code == 421
    assert (await behind(app, loopback=True).get("/v1/models", headers={"host": "127.0.0.2:80"})).status_code == 200
    others = {"cookie": f'prefs={{"dark": true}}; rlhf_session={TOKEN}'}  # of another program on this host
    assert (await behind(app, token=TOKEN).get("/v1/models", headers=others)).status_code == 200


async def test_sizes_and_rates_have_limits(app):
    small = behind(app, max_body_bytes=2000)
    assert (await small.post("/v1/score", json=SCORE | {"prompt": "x" * 3000})).status_code == 413

    async def chunks():
        for _ in range(10):
            yield b" " * 1000

    headers = {"content-type": "application/json"}
    assert (await small.post("/v1/score", content=chunks(), headers=headers)).status_code == 413
    slow = behind(app, requests_per_minute=5)
    answers = [await slow.get("/v1/models") for _ in range(8)]
    assert [answer.status_code for answer in answers] == [200] * 5 + [429] * 3
    assert int(answers[-1].headers["retry-after"]) >= 1
    busy = await behind(app, batch=0, queue=0).get("/v1/models")
    assert busy.status_code == 503 and busy.headers["retry-after"] == "1"
    guard = Guard(None, access())
    for i in range(10_000):
        guard.count(str(i))
    with pytest.raises(RefusedError, match="too many requests"):
        guard.count("another")
    assert len(guard.counts) == 10_000


def test_other_addresses_need_a_token_and_links_are_private(tmp_path, capsys):
    config = Config()
    assert serve.check_address(config)
    any_address = ("0.0.0.0", None, "set serve.token"), ("0.0.0.0", "short", "at least 16")
    for host, token, message in (*any_address, ("example.org", TOKEN, "want an IP address")):
        config.serve.host, config.serve.token = host, token
        with pytest.raises(UserError, match=message):
            serve.check_address(config)
    config.serve.host, config.serve.token = "0.0.0.0", TOKEN
    assert not serve.check_address(config)
    path = tmp_path / "labelers.txt"
    path.touch(mode=0o644)
    inode = path.stat().st_ino
    first = managing.labeler_secrets(path, ["anna", "ben"], "http://127.0.0.1:1/")
    assert path.stat().st_ino != inode, "replaced as a whole, not truncated"
    assert path.stat().st_mode & 0o777 == 0o600 and f"anna http://127.0.0.1:1/#{first['anna']}\n" in path.read_text()
    assert managing.labeler_secrets(path, ["anna", "cleo"], "http://127.0.0.1:2/")["anna"] == first["anna"]
    assert not any(secret in capsys.readouterr().out for secret in first.values())
    for content in ("anna 0.5\n", "anna http://127.0.0.1:1/#short\n", "my notes", "\xff"):
        path.write_text(content, encoding="latin-1")
        with pytest.raises(UserError, match=r"labelers.txt: line 1 is no link of `rlhf serve`: move this file away"):
            managing.labeler_secrets(path, ["anna"], "http://127.0.0.1:1/")
        assert path.read_text(encoding="latin-1") == content
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: not a regular file"):
        managing.labeler_secrets(tmp_path / "pipe", ["anna"], "http://127.0.0.1:1/")
    (tmp_path / "binary").write_bytes(b"\xff")
    for name, message in (
        ("pipe", "not a regular file"),
        ("none", "not readable .*No such"),
        ("binary", "not readable .*utf-8"),
    ):
        with pytest.raises(UserError, match=f"{name}: {message}"):
            serve.read_instructions(tmp_path / name)


def test_gold_items_have_an_order_and_ids_of_their_own(tmp_path):
    path, config = tmp_path / "gold.jsonl", Config()
    task = make_ranking("x", "Say.", ["Red.", "Blue."], [[0], [1]], "ann")
    known = [task.model_copy(update={"id": name}) for name in ("g1", "g2")]
    path.write_text("".join(one.model_dump_json() + "\n" for one in known))
    config.serve.gold, config.serve.qualification = str(path), 2
    assert list(serve.load_gold(config, [task])) == ["g1", "g2"]
    unordered = task.model_copy(update={"ranking": None})
    for tasks, more in (([known[0]], known), ([], [*known, known[1]]), ([], [unordered])):
        path.write_text("".join(one.model_dump_json() + "\n" for one in more))
        with pytest.raises(UserError, match=r"serve.gold=.*: want rankings with an order, and ids of their own"):
            serve.load_gold(config, tasks)
    path.write_text(known[0].model_dump_json() + "\n")
    with pytest.raises(UserError, match=r"serve.qualification=2: serve.gold has 1 rankings: want as many"):
        serve.load_gold(config, [])
