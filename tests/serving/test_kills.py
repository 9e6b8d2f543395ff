"""SIGKILL at random moments while labelers submit: what was acknowledged is in the file once."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import httpx
import pytest

KILLS = int(os.environ.get("RLHF_KILLS", "50"))
LABELERS = {name: name * 8 for name in ("anna", "ben", "cleo", "dora")}
SERVER = """
import sys
import uvicorn
from rlhf.config.commands import ServeConfig
from rlhf.serving.app import make_app
from rlhf.serving.labelling import LabelFile, Labelling
from rlhf.serving.models import ModelThread
from tests.serving.conftest import access, tasks
from pathlib import Path
labelling = Labelling(LabelFile(Path(sys.argv[1])), tasks(5_000), ServeConfig(labels_per_prompt=4), 0)
app = make_app(ModelThread({{}}, 1, 1, 64), access(labelers={labelers}), labelling)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="critical", access_log=False)
"""


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_acknowledged_label_is_there_once(tmp_path):
    rng, labels = random.Random(0), tmp_path / "labels.jsonl"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    acknowledged: set[str] = set()
    stopping = threading.Event()
    workers = [threading.Thread(target=label, args=(name, port, acknowledged, stopping)) for name in LABELERS]
    for worker in workers:
        worker.start()
    command = [sys.executable, "-c", SERVER.format(labelers=LABELERS), str(labels), str(port)]
    try:
        for _ in range(KILLS):
            server = subprocess.Popen(command, cwd=Path(__file__).parents[2])
            before = len(acknowledged)
            for _ in range(1200):  # until it answers
                if len(acknowledged) > before:
                    break
                assert server.poll() is None
                time.sleep(0.05)
            time.sleep(rng.random() * 0.5)
            server.send_signal(signal.SIGKILL)
            server.wait()
    finally:
        stopping.set()
        for worker in workers:
            worker.join(30)
    records = [json.loads(line) for line in labels.read_bytes().split(b"\n")[:-1]]
    submissions = [record["metadata"]["submission"] for record in records]
    assert len(submissions) == len(set(submissions)), "a submission is there twice"
    assert acknowledged <= set(submissions) and len(acknowledged) >= KILLS
    pairs = [(record["labeler"], record["metadata"]["task"]) for record in records]
    assert len(pairs) == len(set(pairs)), "a labeler labelled a task twice"


def label(name: str, port: int, acknowledged: set[str], stopping: threading.Event) -> None:
    """Label until told to stop; what was not acknowledged is sent again, as the page does."""
    headers = {"authorization": f"Bearer {LABELERS[name]}"}
    pending = None
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=10) as client:
        while not stopping.is_set():
            try:
                if pending is None:
                    task = client.get("/api/rank/next").json()["task"]
                    names = [response["id"] for response in task["responses"]]
                    pending = {"name": task["name"], "submission": str(uuid.uuid4()), "ranking": [[n] for n in names]}
                answer = client.post("/api/rank", json=pending)
            except httpx.TransportError:
                time.sleep(0.05)
                continue
            assert answer.status_code == 200, answer.text
            acknowledged.add(pending["submission"])
            pending = None
