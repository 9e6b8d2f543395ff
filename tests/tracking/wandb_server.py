"""A server on the loopback address that stands where W&B's would be, and misbehaves in a chosen way.

`answers` answers GraphQL as far as wandb 0.31 needs it to start a run; `hang` takes the
request and says nothing.
"""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, mode: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.mode = mode
        self.paths: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.release = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        try:
            sent = json.loads(body)
        except ValueError:
            sent = {}
        self.server.paths.append(self.path)
        self.server.bodies.append(sent)
        if self.server.mode == "hang":
            self.server.release.wait(120)
            self.close_connection = True
            return
        if "file_stream" in self.path:
            self.answer(200, {"exitcode": None, "limits": {}})
        else:
            self.answer(200, {"data": graphql(sent)})

    do_GET = do_POST = do_PUT = handle_any

    def answer(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def graphql(sent: dict[str, Any]) -> dict[str, Any]:
    """What a query asks for, as far as starting and finishing a run needs it."""
    query, given = sent.get("query", ""), sent.get("variables") or {}
    name = given.get("name") or "run"
    if "upsertBucket" in query:
        bucket = {
            "id": base64.b64encode(name.encode()).decode(), "name": name, "displayName": name, "description": None,
            "config": given.get("config") or "{}", "sweepName": None, "historyLineCount": 0,
            "project": {"id": "p", "name": given.get("project") or "rlhf", "entity": {"id": "e", "name": "me"}},
        }  # fmt: skip
        return {"upsertBucket": {"bucket": bucket, "inserted": True}}
    if "createRunFiles" in query:
        return {"createRunFiles": {"runID": name, "uploadHeaders": [], "files": []}}
    if "viewer" in query:
        return {"viewer": {"id": "v", "username": "me", "entity": "me", "flags": "{}", "teams": {"edges": []}}}
    if "serverInfo" in query:
        return {"serverInfo": {"cliVersionInfo": {}, "latestLocalVersionInfo": None}}
    return {"model": {"bucket": None}}


@contextmanager
def serve(mode: str) -> Iterator[Server]:
    server = Server(mode)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.release.set()
        server.shutdown()
        server.server_close()
        thread.join(5)
