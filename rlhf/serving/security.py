"""Access control: token, origin, size and rate of a request, checked before it reaches any route.

On loopback without a token, every user of this machine has full access, and a page of another site has none: its requests
carry its origin, or another host's name. Each labeler has a secret.
"""

import asyncio
import hmac
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from rlhf.serving.errors import error_body

COOKIE = "rlhf_session"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
BODY_SECONDS = 30.0  # seconds in which a request's body must arrive
MOST_CLIENTS = 10_000  # clients whose rates are stored
OPEN = ("/", "/favicon.ico", "/api/session")  # open without a token, as is everything below /page/
HEADERS = [
    (b"content-security-policy", b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
     b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]  # fmt: skip

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Access:
    """The settings of the guard."""

    token: str | None  # of the operator; None: everyone on this machine is one
    labelers: dict[str, str]  # secret by name
    loopback: bool
    max_body_bytes: int
    requests_per_minute: int

    def who(self, secret: str | None) -> str | None:
        """The name that a secret belongs to, "" for the operator; every secret is compared, in constant time."""
        owner = None
        given = (secret or "").encode()
        for name, known in [*self.labelers.items(), *([("", self.token)] if self.token else [])]:
            if hmac.compare_digest(given, known.encode()):
                owner = name
        return owner


@dataclass(slots=True)
class Rates:
    """A bucket of requests per client, filled evenly."""

    per_minute: int
    # by client: requests left, and the time of that
    buckets: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)

    def take(self, client: str) -> float:
        """0 if the client may send a request now; otherwise the seconds until it may."""
        now, rate = time.monotonic(), self.per_minute / 60
        left, then = self.buckets.pop(client, (float(self.per_minute), now))
        left = min(float(self.per_minute), left + (now - then) * rate)
        allowed = left >= 1
        self.buckets[client] = (left - allowed, now)
        if len(self.buckets) > MOST_CLIENTS:
            self.buckets.popitem(last=False)
        return 0.0 if allowed else (1 - left) / rate


class Guard:
    """The ASGI application around the server's own."""

    def __init__(self, app: Any, access: Access):
        self.app, self.access = app, access
        self.rates = Rates(access.requests_per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(pair for pair in HEADERS if pair[0] not in given)]
            await send(message)

        refusal = self.check(scope, headers)
        if refusal is not None:
            status, text, more = refusal
            answer = Response(error_body(status, text), status, more, "application/json")
            await answer(scope, receive, send_with_headers)
            return
        await self.app(scope, _Bounded(receive, self.access.max_body_bytes), send_with_headers)

    def check(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str, dict[str, str]] | None:
        """Why a request is refused, with the status and headers of the response; None if it is accepted."""
        access, path = self.access, scope["path"]
        host = headers.get("host", "")
        if access.loopback and host_name(host) not in LOOPBACK:
            return 421, "this server answers to 127.0.0.1 and localhost only", {}
        secret = session_of(headers)
        who = access.who(secret)
        client = f"{who}" if who is not None else str((scope.get("client") or [""])[0])
        if wait := self.rates.take(client):
            return 429, "too many requests: wait a moment", {"retry-after": str(max(1, round(wait)))}
        if who is None and access.token is None:
            who = ""
        if who is None and path not in OPEN and not path.startswith("/page/"):
            return (
                401,
                "this server wants a token: open the link that you were given, or send `Authorization: Bearer`",
                {"www-authenticate": "Bearer"},
            )
        scope.setdefault("state", {})["who"] = who
        if scope["method"] not in ("GET", "HEAD"):
            origin = headers.get("origin")
            if origin is not None and origin.partition("://")[2] != host:
                return 403, "a request from another site", {}
            if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
                return 403, "a request from another site", {}
            if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                return 415, "want a body of the type application/json", {}
            length = headers.get("content-length", "0")
            if not length.isascii() or not length.isdigit() or int(length) > access.max_body_bytes:
                return 413, f"the body is too large: at most {access.max_body_bytes} bytes", {}
        return None


def host_name(host: str) -> str:
    """A Host header without its port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def session_of(headers: dict[str, str]) -> str | None:
    """The secret that a request carries: of its Authorization header, or of its cookie."""
    kind, _, bearer = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return bearer.strip()
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return cookie.value if cookie else None


class _Bounded:
    """`receive` with a limit on the bytes."""

    def __init__(self, receive: Receive, most: int):
        self.receive, self.left, self.more = receive, most, True

    async def __call__(self) -> MutableMapping[str, Any]:
        if not self.more:
            return await self.receive()  # waits for the client to disconnect
        try:
            async with asyncio.timeout(BODY_SECONDS):
                message = await self.receive()
        except TimeoutError:
            return {"type": "http.disconnect"}
        self.left -= len(message.get("body", b""))
        self.more = bool(message.get("more_body"))
        if self.left < 0:
            raise HTTPException(413, "the body is too large")
        return message
