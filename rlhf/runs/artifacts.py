"""A stage's output as a W&B artifact with its lineage: only with tracking.artifacts, since models are large.

An artifact's metadata contain the hashes of parents and data. Online they are inputs of the run too, so that W&B
draws the graph; offline it allows no inputs. stage.json stays the record (`rlhf.runs.folders`).
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.runs.background import Background, Sink
from rlhf.runs.lineage import tracking_config
from rlhf.runs.wandb_run import INIT_TIMEOUT, Environment, finish_run, open_run_id, seconds_allowed, start_run

TYPES = {"world": "dataset", "label": "dataset", "tokenizer": "tokenizer", "evaluate": "results"}
# Seconds for the upload of a model, in addition to W&B's start.
UPLOAD_TIMEOUT = 600.0


def publish(folder: Path, record: Mapping[str, Any], project: str) -> None:
    """Log the files of a complete stage; `record` is its stage.json. If W&B fails, a warning is printed and the stage continues."""
    limit = seconds_allowed("RLHF_WANDB_INIT_SECONDS", INIT_TIMEOUT)
    limit += seconds_allowed("RLHF_WANDB_UPLOAD_SECONDS", UPLOAD_TIMEOUT)
    Background("Weights & Biases", lambda: _Publisher(folder, record, project), limit).finish(False)


class _Publisher(Sink):
    """A run that is opened again for its artifacts; the sink of one `finish`."""

    def __init__(self, folder: Path, record: Mapping[str, Any], project: str) -> None:
        import wandb

        (folder / "wandb").mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._environment = Environment(folder / "wandb")
        run_id = open_run_id(folder)
        run, stage = str(record["run"]), str(record["stage"])
        self._run = start_run(folder, run_id, run, stage, tracking_config(record), project)
        if not self._run.offline:
            for parent, digest in record["parents"].items():
                self._run.use_artifact(f"{run}-{parent}:{digest[:8]}")
            for name, digest in record["data"].items():
                self._run.use_artifact(data_artifact(wandb, name, digest))
        lineage = {key: record[key] for key in ("stage", "hash", "parents", "data", "seed", "settings")}
        made = wandb.Artifact(f"{run}-{stage}", type=TYPES.get(stage, "model"), metadata=lineage)
        for name in record["files"]:
            made.add_file(str(folder / name), name=name)
        self._run.log_artifact(made, aliases=["latest", record["hash"][:8]])

    def finish(self, failed: bool) -> None:
        finish_run(self._run, self._folder, failed, self._environment)


def data_artifact(wandb: Any, name: str, digest: str) -> Any:
    """A data file of the user as an artifact with its hash, not its content: data may be private or large."""
    short = hashlib.sha256(name.encode()).hexdigest()[:8]
    made = wandb.Artifact(f"data-{short}", type="dataset", metadata={"file": name, "sha256": digest})
    with made.new_file("sha256.txt", encoding="utf-8") as file:
        file.write(f"{digest}  {name}\n")
    return made
