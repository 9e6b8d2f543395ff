"""Errors as the OpenAI API writes them: {"error": {"message", "type", "param", "code"}}."""

import json
from typing import Any

from rlhf.system.terminal import printable

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class RefusedError(Exception):
    """A request that gets an error in the form of the OpenAI API."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> bytes:
    """The body of an answer with this status."""
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    error = {
        "message": printable(message)[:1000],
        "type": kind,
        "param": param and printable(param)[:200],
        "code": code,
    }
    return json.dumps({"error": error}).encode()


def handlers() -> dict[Any, Any]:
    """The handlers of each exception, for FastAPI."""
    from fastapi import Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import Response
    from starlette.exceptions import HTTPException

    from rlhf.errors import UserError

    def answered(status: int, *about: Any, headers: Any = None) -> Response:
        return Response(error_body(status, *about), status, headers, media_type="application/json")

    async def refused(_: Request, error: RefusedError) -> Response:
        headers = {"retry-after": str(error.retry_after)} if error.retry_after else None
        return answered(error.status, str(error), error.param, error.code, headers=headers)

    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:])
        return answered(400, f"{param}: {first['msg']}" if param else first["msg"], param or None)

    async def http(_: Request, error: HTTPException) -> Response:
        return answered(error.status_code, str(error.detail), headers=error.headers)

    async def mistaken(_: Request, error: UserError) -> Response:
        return answered(400, str(error))

    async def failed(_: Request, error: Exception) -> Response:
        return answered(500, "the server failed on this request")

    return {
        RefusedError: refused,
        RequestValidationError: invalid,
        HTTPException: http,
        UserError: mistaken,
        Exception: failed,
    }
