"""Artifacts on request: a stage's files with their lineage, in W&B's own record."""

import json
import os
from pathlib import Path

import pytest

from rlhf.runs.wandb_run import data_artifact, publish
from tests.tracking.wandb_file import read_records, run_files
from tests.tracking.wandb_server import serve


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_") and name != "WANDB_SERVICE"]:
        monkeypatch.delenv(name)


def make_stage(folder: Path) -> dict[str, object]:
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "weights.bin").write_bytes(b"weights")
    return {
        "stage": "sft",
        "run": "r",
        "seed": 0,
        "hash": "ab" * 32,
        "parents": {"pretrain": "cd" * 32},
        "data": {"demonstrations:d.jsonl": "ef" * 32},
        "settings": {"sft.lr": 1.0},
        "versions": {},
        "config": {},
        "files": {"model/weights.bin": "01" * 32},
    }


def test_a_stage_is_an_artifact_with_its_lineage(tmp_path: Path, offline: None) -> None:
    publish(tmp_path, make_stage(tmp_path), "rlhf")
    (path,) = run_files(tmp_path / "wandb", (tmp_path / "wandb" / "run-id").read_text().strip())
    found = [
        r.request.log_artifact.artifact if r.WhichOneof("record_type") == "request" else r.artifact
        for r in read_records(path)
        if r.WhichOneof("record_type") == "artifact"
    ]
    (artifact,) = found
    assert (artifact.name, artifact.type, set(artifact.aliases)) == ("r-sft", "model", {"latest", "abababab"})
    metadata = json.loads(artifact.metadata)
    assert metadata["parents"] == {"pretrain": "cd" * 32} and metadata["data"] == {"demonstrations:d.jsonl": "ef" * 32}
    assert [entry.path for entry in artifact.manifest.contents] == ["model/weights.bin"]


def test_data_is_known_by_its_hash_and_not_copied(offline: None) -> None:
    made = data_artifact("demonstrations:d.jsonl", "ef" * 32)
    assert made.type == "dataset" and made.metadata["sha256"] == "ef" * 32
    assert list(made.manifest.entries) == ["sha256.txt"]


def test_a_server_that_fails_stops_nothing(
    tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RLHF_WANDB_INIT_SECONDS", "1")
    monkeypatch.setenv("RLHF_WANDB_UPLOAD_SECONDS", "5")
    with serve("error") as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        publish(tmp_path, make_stage(tmp_path), "rlhf")
    assert any("Weights & Biases" in record.getMessage() for record in caplog.records)
