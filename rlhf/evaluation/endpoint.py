"""A client of any OpenAI-style chat endpoint: retries with backoff, a cache on disk, and counts of requests and failures.

The key is read from an environment variable when a request is sent, and never written. Only the standard library is used.
"""

import hashlib
import http.client
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlhf.errors import UserError
from rlhf.runs.run_files import read_jsonl
from rlhf.system.terminal import one_line

ATTEMPTS = 5
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds
TIMEOUT = 120.0
LARGEST_REPLY = 2**20  # bytes
MOST_TOKENS = 10**9  # at most, for the usage that one request reports
TEMPORARY = (408, 409, 425, 429, 500, 502, 503, 504, 529)
WRONG_SETTINGS = {401: "the key is refused", 403: "the key may not do this", 404: "no such endpoint or model"}
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Redirects are not followed, since they would send the key to another host."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


@dataclass(slots=True)
class Endpoint:
    """`ask` may be called from several threads."""

    url: str  # base URL, such as https://host/v1
    model: str
    cache: Path  # JSON lines: key (hash of URL and request), reply, usage
    key_variable: str | None = None
    first_wait: float = FIRST_WAIT
    # requests, cached, retries, failures, prompt_tokens, completion_tokens
    counts: Counter[str] = field(default_factory=Counter)
    reached: bool = False  # whether any HTTP server has answered
    _known: dict[str, str] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Raises: UserError for an invalid URL, an unset key, or a key that would be sent unencrypted."""
        try:
            parts = urlsplit(self.url)
            fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # for an invalid port, or an unbalanced bracket
            fits = False
        if not fits or not self.url.isprintable() or " " in self.url:
            raise UserError(f"evaluate.judge={self.url}: want a base URL such as https://host/v1")
        if self.key_variable is not None and not os.environ.get(self.key_variable):
            raise UserError(
                f"evaluate.judge_key={self.key_variable}: this environment variable is not set: set it to the key"
            )
        if self.key_variable is not None and parts.scheme == "http" and parts.hostname not in LOOPBACK:
            raise UserError(f"evaluate.judge={self.url}: would send the key unencrypted: use https")
        if self.cache.exists() and not self.cache.is_file():
            raise UserError(f"{self.cache}: not a regular file: remove it, so that replies can be stored there")
        known = ((row.get("key"), row.get("reply")) for row in read_jsonl(self.cache))
        self._known = {key: reply for key, reply in known if isinstance(key, str) and isinstance(reply, str)}

    def ask(self, messages: list[dict[str, str]]) -> str | None:
        """The reply's text; None if the request failed permanently, which is counted. Raises: UserError if the settings are wrong."""
        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": 16}
        key = hashlib.sha256(json.dumps([self.url, body], sort_keys=True).encode()).hexdigest()
        with self._lock:
            if key in self._known:
                self.counts["cached"] += 1
                return self._known[key]
        answered = self._request(body)
        with self._lock:
            if answered is None:
                self.counts["failures"] += 1
                return None
            reply, usage = answered
            for name in ("prompt_tokens", "completion_tokens"):
                count = usage.get(name)
                self.counts[name] += count if isinstance(count, int) and 0 <= count < MOST_TOKENS else 0
            self._known[key] = reply
            self.cache.parent.mkdir(parents=True, exist_ok=True)
            with self.cache.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "reply": reply, "usage": usage}) + "\n")
        return reply

    def _request(self, body: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """Reply and usage, after at most ATTEMPTS attempts."""
        opener = urllib.request.build_opener(_NoRedirect)
        headers = {"Content-Type": "application/json"}
        if self.key_variable is not None:
            headers["Authorization"] = f"Bearer {os.environ[self.key_variable]}"
        for attempt in range(ATTEMPTS):
            with self._lock:
                self.counts["requests"] += 1
                if attempt:
                    self.counts["retries"] += 1
            wait = min(LONGEST_WAIT, self.first_wait * 2**attempt) * random.uniform(0.5, 1.5)
            try:
                request = urllib.request.Request(
                    f"{self.url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers
                )
                with opener.open(request, timeout=TIMEOUT) as answer:
                    self.reached = True
                    body_of_reply = json.loads(answer.read(LARGEST_REPLY))
                text = body_of_reply["choices"][0]["message"]["content"]
                if isinstance(text, str):
                    usage = body_of_reply.get("usage")
                    return text, usage if isinstance(usage, dict) else {}
            except urllib.error.HTTPError as error:
                self.reached = True
                if error.code in WRONG_SETTINGS:
                    raise UserError(
                        f"evaluate.judge={self.url}: {WRONG_SETTINGS[error.code]} (HTTP {error.code}): check the URL, "
                        "evaluate.judge_model and evaluate.judge_key"
                    ) from None
                if error.code not in TEMPORARY:
                    return None
                wait = max(wait, retry_after(error.headers.get("Retry-After")))
            except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, RecursionError) as error:
                trouble = one_line(str(error), 200)  # no connection, or not a reply of this form
            if attempt < ATTEMPTS - 1:
                time.sleep(wait)
        if not self.reached:
            raise UserError(
                f"evaluate.judge={self.url}: no answer in {ATTEMPTS} attempts ({trouble}): check the URL and the network"
            )
        return None


def retry_after(text: str | None) -> float:
    """Seconds that a server asks to wait, at most LONGEST_WAIT; 0 if it does not say."""
    try:
        return min(LONGEST_WAIT, max(0.0, float(text or 0)))
    except ValueError:
        return 0.0


def shown_counts(counts: Mapping[str, int]) -> str:
    shown = ", ".join(f"{counts[name]:,} {name.replace('_', ' ')}" for name in sorted(counts))
    return one_line(shown or "no requests")
