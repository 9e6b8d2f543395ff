"""Which settings a stage's result depends on, what is said of the others, and what of them is stored."""

import json

import pytest
import yaml

from rlhf.config.compose import compose_config
from rlhf.config.precision import precision_of
from rlhf.config.setting import NOTHING, RESULT, ROUNDING, settings_in
from rlhf.recipe import STAGES
from rlhf.runs.folders import identity_of
from rlhf.runs.stage import misfit, open_stage


@pytest.fixture
def compose(tmp_path):
    return lambda *overrides: compose_config([f"runs_dir='{tmp_path}'", "run=demo", "device=cpu", *overrides])


WITH_MODELS = tuple(stage for stage in STAGES if stage not in ("world", "tokenizer"))


def test_precision_is_part_of_what_models_compute(compose):
    half, full = compose("precision=bfloat16"), compose("precision=float32")
    for stage in STAGES:
        assert (identity_of(half, stage) != identity_of(full, stage)) == (stage in WITH_MODELS)
    reason = misfit(half, "sft", {"settings": identity_of(full, "sft")}, {}, {})
    assert "precision 'float32' -> 'bfloat16'" in str(reason)


def test_auto_is_recorded_as_what_it_comes_to(compose):
    assert precision_of(compose("precision=auto")) == "float32"  # on a CPU
    assert identity_of(compose("precision=auto"), "sft") == identity_of(compose("precision=float32"), "sft")


def test_what_only_rounds_is_no_part_of_a_stages_identity(compose):
    stated = {key: found.changes for key, found in settings_in(type(compose())).items()}
    assert {key for key, changes in stated.items() if changes == ROUNDING} == {
        "device", "threads", "gradient_checkpointing", "deepspeed", "launcher.processes", "sharding.bucket_elements", "rollout.batch_size",
        "sharding.file", "rollout.vllm_memory", "rollout.tensor_parallel",
        "memory.budget_gb", "sharding.overlap", "distill.micro_batch_size",
        "sharding.persistence_threshold", "pretrain.micro_batch_sequences", "sft.micro_batch_size", "reward.micro_batch_responses",
        "ppo.micro_batch_episodes", "dpo.micro_batch_prompts", "classify.micro_batch_size", "judge.micro_batch_responses",
    }  # fmt: skip
    assert {stated[key] for key in ("tracking.kind", "checkpoints.keep", "run", "ppo.eval_every")} == {NOTHING}
    for stage, row in STAGES.items():
        assert {stated[key] for key in identity_of(compose(), stage)} <= {RESULT}, row


def test_a_resumed_stage_says_which_settings_change_its_rounding(compose, capsys):
    with open_stage(compose("ppo.micro_batch_episodes=8"), "tokenizer"):
        pass
    capsys.readouterr()
    with open_stage(compose("threads=2", "deepspeed=zero1", "ppo.micro_batch_episodes=16"), "tokenizer"):
        pass
    said = capsys.readouterr().out
    expected = (
        "tokenizer: resumes with threads=2, was 0; deepspeed=zero1, was none: same computation, different rounding\n"
    )
    assert expected in said  # and nothing of PPO's settings, which this stage does not read
    with open_stage(compose("threads=2", "deepspeed=zero1"), "tokenizer"):
        pass
    assert "different rounding" not in capsys.readouterr().out


def test_what_comes_from_the_environment_is_stored_by_its_name(compose, monkeypatch):
    monkeypatch.setenv("SECRET_PLACE", "s3cret-9271")
    config = compose(
        "tracking.entity=${oc.env:SECRET_PLACE}",
        "data.demonstrations=['${oc.env:SECRET_PLACE}',b.jsonl]",
        "reward.model=prefix/${tracking.entity}",
        "reward.labeler_weights={anna: 2}",
    )
    assert config.tracking.entity == "s3cret-9271" and config.reward.model == "prefix/s3cret-9271"
    assert config.data.demonstrations == ["s3cret-9271", "b.jsonl"]
    with open_stage(config, "tokenizer") as stage:
        stage.finish()
    folder = stage.folder
    for path in folder.rglob("*"):
        assert not path.is_file() or b"s3cret-9271" not in path.read_bytes(), path
    record = json.loads((folder / "stage.json").read_text())
    assert record["config"]["tracking"]["entity"] == "${oc.env:SECRET_PLACE}"
    assert record["config"] == yaml.safe_load((folder / "config.yaml").read_text())
    for name in STAGES:
        assert "s3cret" not in json.dumps(identity_of(config, name))
