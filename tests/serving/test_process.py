"""`rlhf serve` as its own processes, on a small gold run: precision, the end of the worker, and of the server."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from rlhf.commands.generate import run as generate

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(params=["float32", "bfloat16"])
def process(request, gold_run, tmp_path):
    """The server of one precision, and its address."""
    command = [
        sys.executable,
        "-m",
        "rlhf",
        "serve",
        f"run={gold_run.name}",
        f"runs_dir={gold_run.runs_dir}",
        "serve.port=0",
        "threads=1",
        "device=cpu",
        f"precision={request.param}",
        f"serve.labels={tmp_path}/labels.jsonl",
        "serve.stages=sft",
    ]
    made = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = []
    while not said or "http://" not in said[-1]:
        said.append(made.stdout.readline())
        assert said[-1], f"the server ended: {said}"
    address = re.search(r"http://[\d.:]+", said[-1])[0]
    yield made, address, request.param
    made.kill()
    made.wait()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def test_precision_is_generates_and_the_worker_ends_with_the_server(process, gold_run, tmp_path):
    server, address, precision = process
    prompts = (gold_run.folder / "world" / "prompts.jsonl").read_text().splitlines()[:8]
    (tmp_path / "in.jsonl").write_text(
        "".join(
            f'{{"id": "p{i}", "prompt": {json.dumps(json.loads(line)["prompt"])}}}\n' for i, line in enumerate(prompts)
        )
    )
    generate(
        gold_run.config(
            f"data.prompts='{tmp_path}/in.jsonl'",
            f"generate.out='{tmp_path}/out.jsonl'",
            "seed=3",
            "generate.logprobs=true",
            "generate.stage=sft",
            f"precision={precision}",
        )
    )
    for line in (tmp_path / "out.jsonl").read_text().splitlines():
        row = json.loads(line)
        body = {
            "model": f"{gold_run.name}/sft",
            "messages": row["prompt"],
            "seed": 3,
            "logprobs": True,
            "return_token_ids": True,
        }
        choice = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]
        found = [token["logprob"] for token in choice["logprobs"]["content"]]
        if precision == "float32":
            assert choice["token_ids"] == row["token_ids"][0] and found == pytest.approx(row["logprobs"][0], abs=1e-4)
        else:  # rounding may change a token; until then they agree, to the 8 bits of bfloat16
            pairs = zip(choice["token_ids"], row["token_ids"][0], strict=False)
            same = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(found))
            assert same and found[:same] == pytest.approx(row["logprobs"][0][:same], abs=0.15)
    workers = children(server.pid)
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=30) in (0, 130, -signal.SIGTERM)
    for _ in range(100):
        if not any(map(is_running, workers)):
            return
        time.sleep(0.1)
    raise AssertionError("the worker goes on")


def test_a_worker_that_is_killed_is_told_of_and_labels_are_still_saved(process, gold_run):
    server, address, _ = process
    worker = max(children(server.pid), key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]))
    os.kill(worker, signal.SIGKILL)
    time.sleep(0.5)
    body = {"model": f"{gold_run.name}/sft", "messages": [{"role": "user", "content": "x"}]}
    for path, asked in (("chat/completions", body), ("chat/completions", body | {"stream": True}),
                        ("score", {"model": body["model"], "prompt": "x", "responses": ["y"]})):  # fmt: skip
        answer = httpx.post(f"{address}/v1/{path}", json=asked, timeout=30)
        assert answer.status_code == 500 and "start the server again" in answer.json()["error"]["message"]
    said = {"messages": body["messages"], "response": "It is one.", "submission": "demo-0001"}
    assert httpx.post(f"{address}/api/demonstrate", json=said, timeout=30).status_code == 200
