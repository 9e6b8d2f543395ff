"""What is handed to other libraries: W&B's labels, a DeepSpeed JSON of one's own, and the token of the hub."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb

from rlhf.config.checks import check_config
from rlhf.config.compose import compose_config
from rlhf.errors import UserError
from rlhf.training.engine import deepspeed_settings
from rlhf.training.setup import open_tracker

LABELS = ["tracking.entity=team", "tracking.name=trial", "tracking.group=sweep", "tracking.tags=[one,two]"]


def test_wandb_gets_entity_name_group_and_tags(tmp_path, monkeypatch):
    given: list[dict[str, Any]] = []

    def init(**options: Any) -> None:
        given.append(options)
        raise ConnectionError("no more is needed")

    monkeypatch.setattr(wandb, "init", init)
    for words in ([], LABELS):
        config = compose_config(["run=x", "tracking=wandb", *words])
        stage: Any = SimpleNamespace(name="sft", config=config, folder=tmp_path, writes=True, record=lambda status: {})
        open_tracker(stage).finish()
    kept = [
        [options.get(key) for key in ("entity", "name", "group", "tags", "job_type")]
        for options in (given[0], given[-1])
    ]
    assert kept == [[None, "x/sft", "x", None, "sft"], ["team", "trial/sft", "sweep", ["one", "two"], "sft"]]


def deepspeed_file(folder: Path, settings: dict[str, Any]) -> list[str]:
    (folder / "ds.json").write_text(json.dumps(settings))
    return ["deepspeed=zero3", f"sharding.file={folder}/ds.json"]


def test_a_deepspeed_file_is_added_to_ours(tmp_path):
    more = {
        "zero_optimization": {"stage": 3, "sub_group_size": 1e9, "reduce_bucket_size": "auto"},
        "wall_clock_breakdown": True,
    }
    plain = deepspeed_settings(compose_config(["deepspeed=zero3"]), bfloat16=True)
    found = deepspeed_settings(
        compose_config(deepspeed_file(tmp_path, more | {"bf16": {"enabled": True}})), bfloat16=True
    )
    wanted = plain | {"wall_clock_breakdown": True}
    wanted["zero_optimization"] = plain["zero_optimization"] | {"sub_group_size": 1e9}
    assert found == wanted


def test_conflicts_of_a_deepspeed_file_are_named_in_one_line(tmp_path):
    other = {
        "zero_optimization": {"stage": 2, "offload_param": {"device": "nvme"}},
        "bf16": {"enabled": True},
        "optimizer": {},
    }
    config = compose_config(deepspeed_file(tmp_path, other))
    with pytest.raises(UserError) as caught:
        deepspeed_settings(config, bfloat16=False)
    assert str(caught.value) == (
        f"sharding.file={tmp_path}/ds.json: zero_optimization.stage (ours: 3), zero_optimization.offload_param (deepspeed=…_offload), "
        "bf16.enabled (ours: false), optimizer (<stage>.lr): other settings decide this: leave it out"
    )
    with pytest.raises(UserError, match="contains no settings: want a JSON object"):
        deepspeed_settings(compose_config(["deepspeed=zero2", f"sharding.file={tmp_path}/none.json"]), bfloat16=False)
    with pytest.raises(UserError, match="is for DeepSpeed: set deepspeed=zero1 to zero3"):
        check_config(compose_config(["sharding.file=ds.json"]), "sft")


class Hub(BaseHTTPRequestHandler):
    """A hub whose models are gated (owner/gated) or not there; without a token both answer as the hub does."""

    def do_GET(self) -> None:
        gated = "/gated" in self.path
        if gated and "/resolve/" not in self.path:  # what is in it is public
            files = [{"type": "file", "path": "config.json", "size": 2, "oid": "1" * 40}]
            body = {"id": "owner/gated", "sha": "0" * 40, "siblings": [{"rfilename": "config.json"}]}
            return self.answer(200, json.dumps(files if "/tree/" in self.path else body).encode())
        return self.answer(403 if gated else 401, b"{}", "GatedRepo" if gated else "RepoNotFound")

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes, code: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


ASK = """
import sys
from rlhf.errors import UserError
from rlhf.model.checkpoint import read_checkpoint
from rlhf.runs.sources import hub_folder

for ask in (read_checkpoint, lambda name: hub_folder(name, "ppo.rewards")):
    for name in ("owner/gated", "owner/private"):
        try:
            ask(name)
        except UserError as error:
            print(error)
"""


def test_a_gated_model_and_a_missing_token_are_one_line_that_says_what_to_do(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    where = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    environment = {k: v for k, v in os.environ.items() if k not in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")} | where
    said = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, timeout=120)
    server.shutdown()
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    assert len(lines) == 4, "each in one line"
    for gated, private in (lines[:2], lines[2:]):
        assert gated.endswith(
            "it is gated: accept its terms on https://huggingface.co/owner/gated, then set HF_TOKEN to a token of that account"
        )
        assert "check the name" in private and private.endswith(
            "if it is private, set HF_TOKEN to a token that may read it"
        )


def test_a_gated_data_set_says_the_same(monkeypatch):
    """By the error of the hub that datasets wraps in its own."""
    import datasets
    import httpx
    from huggingface_hub.errors import GatedRepoError

    from rlhf.data.reading import _read_hub

    def load(name: str) -> None:
        try:
            raise GatedRepoError("403", response=httpx.Response(403, request=httpx.Request("GET", "http://hub")))
        except GatedRepoError as error:
            raise datasets.exceptions.DatasetNotFoundError(
                f"Dataset '{name}' is a gated dataset on the Hub."
            ) from error

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(
        UserError, match=r"gated: accept its terms on https://huggingface.co/datasets/owner/gated, then set HF_TOKEN"
    ):
        list(_read_hub("owner/gated"))
