"""Models named by hub ids: from a hub (a server on this machine that answers what the client asks), and from the cache without one."""

import hashlib
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from rlhf.errors import UserError
from rlhf.model.adopt import adopt
from rlhf.model.checkpoint import read_checkpoint
from tests.stages.test_adopted import save

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """One repository, me/tiny, whose only commit has the tag v2."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.folder = folder
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.wfile.write(self.answer())

    def answer(self) -> bytes:
        """Send the headers; the body."""
        path, names = self.path.partition("?")[0], sorted(file.name for file in self.folder.iterdir())
        status, body = 404, b"{}"
        if path in [f"/api/models/me/tiny/revision/{revision}" for revision in ("v2", COMMIT)]:
            about = {"id": "me/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            status, body = 200, json.dumps(about).encode()
        elif path == f"/api/models/me/tiny/tree/{COMMIT}":
            about = [
                {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": f.name} for f in self.folder.iterdir()
            ]
            status, body = 200, json.dumps(about).encode()
        elif path.removeprefix(f"/me/tiny/resolve/{COMMIT}/") in names:
            status, body = 200, (self.folder / path.rpartition("/")[2]).read_bytes()
        self.send_response(status)
        digest = hashlib.sha256(body).hexdigest()
        for name, value in (("Content-Length", len(body)), ("X-Repo-Commit", COMMIT), ("ETag", f'"{digest}"')):
            self.send_header(name, str(value))
        self.end_headers()
        return body

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    save(tmp_path / "tiny", "llama")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, tmp_path / "tiny")) as server:  # type: ignore[arg-type]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_hub_id_with_a_revision_from_the_hub_and_then_from_the_cache(tmp_path, hub, monkeypatch):
    url = f"{hub}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with monkeypatch.context() as online:
        for name, value in {"ENDPOINT": hub, "HUGGINGFACE_CO_URL_TEMPLATE": url, "HF_HUB_OFFLINE": False,
                            "HF_HUB_DISABLE_XET": True}.items():  # fmt: skip
            online.setattr(constants, name, value)
        fetched = adopt("me/tiny@v2", say=[].append).record
    kept = adopt("me/tiny@v2", say=[].append).record  # this process is offline (conftest.py)
    assert kept == fetched and kept["revision"] == COMMIT and kept["source"] == "me/tiny@v2"
    weights = hashlib.sha256((tmp_path / "tiny/model.safetensors").read_bytes()).hexdigest()
    assert kept["sha256"] == {"model.safetensors": weights}
    for wrong in ("me/tiny@v3", "me/other"):  # neither is in the cache
        with pytest.raises(UserError, match=f"^model.pretrained={wrong[:7]}.*: not readable from the hub") as told:
            read_checkpoint(wrong)
        assert "\n" not in str(told.value)
