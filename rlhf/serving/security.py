"""Access control: token, origin, size, time and rate of a request, checked before it reaches any route; and the form of
errors.

On loopback without a token, every user of this machine has full access, and a page of another site has none: its
requests carry its origin, or another host's name. Each labeler has a secret. Errors are written as the OpenAI API
writes them: {"error": {"message", "type", "param", "code"}}.
"""

import asyncio
import hmac
import re
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rlhf.config.commands import ServeConfig
from rlhf.errors import UserError
from rlhf.system.schemas import first_problem
from rlhf.system.terminal import printable

COOKIE = "rlhf_session"
MANAGER = "~manager"  # no labeler can have this name
LOOPBACK = re.compile(r"(127(\.[0-9]{1,3}){3}|localhost|\[::1\])(:[0-9]{1,5})?")  # Host headers, with or without a port
HEAD_SECONDS = 15.0  # seconds in which a connection must bring a request
BODY_SECONDS = 30.0  # seconds in which a request's body must arrive
MOST_CLIENTS = 10_000  # clients in one minute
CHAT = ("/v1/", "/api/compare", "/api/shading")  # labelers may not use all; scores they never see
OPEN = ("/", "/api/session")  # open without a token, as is everything below /page/
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
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


class RefusedError(Exception):
    """A request that is answered with an error. param: the field that is wrong; code: as in the OpenAI API."""

    def __init__(self, status: int, text: str, param: str | None = None, code: str | None = None, headers: Any = None):
        super().__init__(text)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def response(self) -> Response:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        param = self.param and printable(self.param)[:200]
        error = {"message": printable(str(self))[:1000], "type": kind, "param": param, "code": self.code}
        return JSONResponse({"error": error}, self.status, self.headers)


async def error_response(_: Any, error: Exception) -> Response:
    """The answer to a request that failed with one of `ERRORS`."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:])
        error = RefusedError(400, f"{param}: {first['msg']}" if param else first["msg"], param or None)
    elif isinstance(error, ValidationError):  # of a record that a request would make
        param, message = first_problem(error)
        error = RefusedError(400, message, param)
    elif isinstance(error, HTTPException):
        error = RefusedError(error.status_code, str(error.detail), headers=error.headers)
    elif isinstance(error, UserError):
        error = RefusedError(507 if isinstance(error.__cause__, OSError) else 400, str(error))  # 507: the disk is full
    elif not isinstance(error, RefusedError):
        error = RefusedError(500, "the server failed on this request")
    return error.response()


ANSWERED = (RefusedError, RequestValidationError, ValidationError, HTTPException, UserError, Exception)
ERRORS: Any = dict.fromkeys(ANSWERED, error_response)


@dataclass(frozen=True, slots=True)
class Access:
    settings: ServeConfig  # without a token, everyone on this machine is the operator
    labelers: dict[str, str]  # secret by name
    loopback: bool
    manager: str | None = None  # secret of who runs the labelling

    def who(self, secret: str | None) -> str | None:
        """The name that a secret belongs to, "" for the operator; every secret is compared, in constant time."""
        owner, given = None, (secret or "").encode()
        for name, known in {**self.labelers, MANAGER: self.manager, "": self.settings.token}.items():
            if known is not None and hmac.compare_digest(given, known.encode()):
                owner = name
        return owner


class Guard:
    def __init__(self, app: Any, access: Access):
        self.app, self.access, self.active = app, access, 0
        self.minute, self.counts = time.monotonic(), Counter[str]()  # the requests of each client since then

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        self.active += 1
        try:
            self.check(scope, {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]})
            await self.app(scope, bounded(receive, self.access.settings.max_body_bytes), send_with_headers)
        except RefusedError as error:  # of the check; the application answers its own
            await error.response()(scope, receive, send_with_headers)
        finally:
            self.active -= 1

    def count(self, client: str) -> None:
        """Count a client's request. Raises: RefusedError if it has sent too many in this minute."""
        if (now := time.monotonic()) >= self.minute + 60:
            self.minute, self.counts = now, Counter()
        known = client in self.counts or len(self.counts) < MOST_CLIENTS
        if not known or self.counts[client] >= self.access.settings.requests_per_minute:
            retry_after = str(max(1, round(self.minute + 60 - now)))
            raise RefusedError(429, "too many requests: wait a moment", headers={"retry-after": retry_after})
        self.counts[client] += 1

    def check(self, scope: Scope, headers: dict[str, str]) -> None:
        """Raises: RefusedError for a request that must not reach the application."""
        access, settings, path = self.access, self.access.settings, scope["path"]
        is_open = path in OPEN or path.startswith("/page/")
        if self.active > 4 * (settings.batch + settings.queue):
            raise RefusedError(503, "the server is busy: try again in a moment", headers={"retry-after": "1"})
        host = headers.get("host", "")
        if access.loopback and settings.token is None and LOOPBACK.fullmatch(host) is None:
            raise RefusedError(421, "this server answers to 127.0.0.1 and localhost only")
        who, tab = access.who(session_of(headers)), headers.get("x-tab")
        self.count(who if who is not None else str((scope.get("client") or [""])[0]))
        if who is None and settings.token is None:
            who = ""
        if who is None and not is_open:
            message = "this server needs a token: open the link that you were given, or send `Authorization: Bearer`"
            raise RefusedError(401, message, headers={"www-authenticate": "Bearer"})
        if tab is not None and tab != (who or "") and path not in OPEN:
            raise RefusedError(403, f"this tab belongs to {tab or 'the operator'}: open that link again")
        if path.startswith("/api/manage") != (who == MANAGER) and not is_open and path != "/api/me":
            raise RefusedError(403, "the manager's link opens the manager's page, and no other does")
        if who and path.startswith("/v1/score" if settings.labelers_chat else CHAT):
            raise RefusedError(403, "labelers may not do this")
        scope.setdefault("state", {})["who"] = who
        if scope["method"] not in ("GET", "HEAD"):
            origin = headers.get("origin")
            foreign = origin is not None and origin.partition("://")[2] != host
            if foreign or headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
                raise RefusedError(403, "a request from another site")
            if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                raise RefusedError(415, "want a body of the type application/json")


def cookie_of(who: str) -> str:
    """The cookie of a labeler, or of the operator (""): several links can be open in one browser."""
    return f"{COOKIE}.{who}" if who else COOKIE


def session_of(headers: dict[str, str]) -> str | None:
    """The secret that a request carries: of its Authorization header, or of the cookie of the tab's owner. A tab that
    does not say whose it is has the browser's only session.
    """
    kind, _, bearer = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return bearer.strip()
    given = cookie_parser(headers.get("cookie", ""))  # reads past another program's cookie that is malformed
    cookies = {name: value for name, value in given.items() if name.startswith(COOKIE)}
    if (tab := headers.get("x-tab")) is not None:
        return cookies.get(cookie_of(tab))
    return next(iter(cookies.values())) if len(cookies) == 1 else None


def bounded(receive: Receive, most: int) -> Receive:
    """`receive` with a limit on the bytes of the body, and on its time."""
    left, more, deadline = most, True, asyncio.get_running_loop().time() + BODY_SECONDS

    async def limited() -> Message:
        nonlocal left, more
        if not more:
            return await receive()  # waits for the client to disconnect
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            return {"type": "http.disconnect"}
        left -= len(message.get("body", b""))
        more = bool(message.get("more_body"))
        if left < 0:
            raise HTTPException(413, f"the body is too large: at most {most} bytes")
        return message

    return limited


class Connection(H11Protocol):
    """A connection that is closed if it brings no whole request head in HEAD_SECONDS, at first and after each answer."""

    answered: Any = None  # at the previous check: the last request (None before the first) if answered, else self

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(HEAD_SECONDS, self.close_if_idle)

    def close_if_idle(self) -> None:
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.cycle is self.answered:
            self.transport.close()
        else:
            self.answered = self.cycle if idle else self
            self.loop.call_later(HEAD_SECONDS, self.close_if_idle)
