"""Requests to another machine's HTTP API: retries, one deadline per request, a key that is never written."""

import asyncio
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import httpx

from rlhf.errors import UserError
from rlhf.system.processes import is_loopback
from rlhf.system.terminal import one_line

T = TypeVar("T")
ATTEMPTS = 5
LONGEST_WAIT = 60.0  # seconds
TIMEOUT = 120.0  # seconds of one request, from connecting to the end of the reply
LARGEST_REPLY = 2**20  # bytes
TEMPORARY = (408, 409, 425, 429, 500, 502, 503, 504, 529)
WRONG_SETTINGS = {401: "the key is refused", 403: "the key may not do this", 404: "no such endpoint or model"}
# No reply, or a malformed one.
NO_REPLY = (httpx.HTTPError, TimeoutError, ValueError, LookupError, TypeError, RecursionError)


class Client:
    """A client of a JSON API. `post` may be called from several threads.

    The key is read from an environment variable when a request is sent, and never written. Redirects are not followed,
    since they would send the key to another host.
    """

    first_wait = 1.0  # seconds before the second attempt; the next waits double

    def __init__(self, setting: str, url: str, key_setting: str, key_variable: str | None = None):
        """setting, key_setting: names for messages; url: the base, such as https://host/v1.
        Raises: UserError for an invalid URL, an unset key, or a key that would be sent unencrypted.
        """
        self.named, self.url, self.key_setting = f"{setting}={url}", url, key_setting
        self.key_variable = key_variable
        self.counts: Counter[str] = Counter()  # requests, retries, failures, and what the caller adds
        self.reached = False  # whether any HTTP server has answered
        self.refused = ""  # status and reason of the last request that failed permanently
        self.lock = threading.Lock()
        try:
            parts = httpx.URL(url)
        except httpx.InvalidURL:
            parts = httpx.URL()
        if parts.scheme not in ("http", "https") or not parts.host or " " in url or (parts.port or 1) > 65535:
            raise UserError(f"{self.named}: want a base URL such as https://host/v1")
        if key_variable is not None:
            key = os.environ.get(key_variable, "").strip()
            if not (key and key.isascii() and key.isprintable()):  # else errors would show it
                variable = f"{key_setting}={key_variable}: this environment variable"
                raise UserError(f"{variable} is not set to one line of ASCII: set it to the key")
            if parts.scheme == "http" and not is_loopback(parts.host):
                raise UserError(f"{self.named}: would send the key unencrypted: use https")

    def post(self, path: str, body: dict[str, Any], read: Callable[[bytes], T]) -> T | None:
        """What `read` makes of a reply, after at most ATTEMPTS attempts; None if the request failed permanently, which
        is counted.
        read: raises ValueError, LookupError or TypeError for a malformed reply. Raises: UserError if the settings are
        wrong.
        """
        address, trouble = f"{self.url.rstrip('/')}/{path}", ""
        key = os.environ.get(self.key_variable or "", "").strip()
        headers = {"Authorization": f"Bearer {key}"} if self.key_variable else {}
        for attempt in range(ATTEMPTS):
            with self.lock:
                self.counts.update(requests=1, retries=int(attempt > 0))
            wait = min(LONGEST_WAIT, self.first_wait * 2**attempt) * random.uniform(0.5, 1.5)
            try:
                status, reply_headers, content = asyncio.run(self._post(address, body, headers))
                if status == 200:
                    return read(content)
            except NO_REPLY as error:
                trouble = one_line(str(error) or "no reply in time", 200)
            else:
                asked = reply_headers.get("Retry-After", "")  # in seconds
                if status in WRONG_SETTINGS:
                    wrong = f"{self.named}: {WRONG_SETTINGS[status]} (HTTP {status})"
                    raise UserError(f"{wrong}: check the URL and {self.key_setting}")
                if status not in TEMPORARY:
                    self.refused = f"HTTP {status}: {one_line(content.decode('utf-8', 'replace'), 200)}"
                    break
                wait = max(wait, min(LONGEST_WAIT, float(asked) if asked.isdecimal() else 0.0))
            if attempt < ATTEMPTS - 1:
                time.sleep(wait)
        if not self.reached:
            failed = f"{self.named}: no answer in {ATTEMPTS} attempts ({trouble})"
            raise UserError(f"{failed}: check the URL and the network")
        with self.lock:
            self.counts["failures"] += 1
        return None

    async def _post(
        self, address: str, body: dict[str, Any], headers: dict[str, str]
    ) -> tuple[int, httpx.Headers, bytes]:
        """Status, headers and body of a reply. Raises: TimeoutError if it has not arrived whole after TIMEOUT seconds."""
        async with (
            asyncio.timeout(TIMEOUT),
            httpx.AsyncClient(timeout=TIMEOUT) as client,
            client.stream("POST", address, json=body, headers=headers) as answer,
        ):
            self.reached, content = True, b""
            async for part in answer.aiter_bytes():
                if len(content := content + part) > LARGEST_REPLY:
                    raise ValueError("the reply is too long")
            return answer.status_code, answer.headers, content
