"""What is handed to other libraries: W&B's labels, a DeepSpeed JSON of one's own, and the token of the hub."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import wandb
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from rlhf.config.checks import check_config
from rlhf.config.compose import compose_config
from rlhf.errors import UserError
from rlhf.model.checkpoint import read_checkpoint
from rlhf.runs.sources import hub_folder
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


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (GatedRepoError, "gated: accept its terms on https://huggingface.co/owner/name, then set HF_TOKEN to a token of that account"),
        (RepositoryNotFoundError, "if it is private, set HF_TOKEN to a token that may read it"),
    ],
)  # fmt: skip
def test_a_gated_model_and_a_missing_token_are_one_line_that_says_what_to_do(monkeypatch, error, remedy):
    def refuse(*_: Any, **__: Any) -> None:
        raise error("403", response=httpx.Response(403, request=httpx.Request("GET", "http://hub")))

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    for read in (read_checkpoint, lambda name: hub_folder(name, "ppo.rewards")):
        with pytest.raises(UserError, match=f"{remedy}$") as told:
            read("owner/name")
        assert "\n" not in str(told.value)
