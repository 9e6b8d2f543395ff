"""`rlhf serve` as a process of its own, on a small gold run."""

import re
import signal
import subprocess
import sys
import time
from functools import partial

import httpx
import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def command_of(gold_run, tmp_path) -> list[str]:
    settings = [f"run={gold_run.name}", f"runs_dir={gold_run.runs_dir}", "serve.port=0", "threads=1", "device=cpu"]
    labels = f"serve.labels={tmp_path}/labels.jsonl"
    return [sys.executable, "-m", "rlhf", "serve", *settings, labels, "serve.stages=sft"]


@pytest.mark.parametrize("seconds", [1.0, 3.0, 5.0, 8.0])
def test_two_ctrl_c_while_it_starts_are_one_line(gold_run, tmp_path, seconds):
    command = command_of(gold_run, tmp_path)
    restore = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=restore)
    time.sleep(seconds)
    server.send_signal(signal.SIGINT)
    time.sleep(0.2)
    server.send_signal(signal.SIGINT)
    _, told = server.communicate(timeout=60)
    # -2: the second one came after Python had given its handlers back
    assert server.returncode in (130, -signal.SIGINT) and told == "\nrlhf: interrupted\n"


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_server_answers_until_a_signal_ends_it(gold_run, tmp_path, sent):
    command = command_of(gold_run, tmp_path)
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = []
        while not said or "http://" not in said[-1]:
            said.append(server.stdout.readline())
            assert said[-1], f"the server ended: {said}"
        address = re.search(r"http://[\d.:]+", said[-1])[0]
        body = {"model": f"{gold_run.name}/sft", "messages": [{"role": "user", "content": "what is red ?"}], "n": 2}
        answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200 and len(answer.json()["choices"]) == 2
        server.send_signal(sent)
        assert server.wait(timeout=30) in (0, 130, -sent)
    finally:
        server.kill()
        server.wait()
