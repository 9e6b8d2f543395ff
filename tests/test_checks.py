"""Settings that do not fit are refused before anything runs, all at once, each with what was wanted."""

import dataclasses

import pytest

from rlhf.checks import CHOICES, POSITIVE, SHARES, check_config
from rlhf.cli import COMMANDS, compose_config, schema_keys
from rlhf.config import Config
from rlhf.errors import UserError


def with_settings(**settings: object) -> Config:
    """The schema's defaults with other values; `kl__coef` stands for kl.coef."""
    config = Config()
    for name, value in settings.items():
        *groups, last = name.split("__")
        place = config
        for group in groups:
            place = getattr(place, group)
        setattr(place, last, value)
    return config


def problems(command: str = "ppo", **settings: object) -> list[str]:
    with pytest.raises(UserError) as caught:
        check_config(with_settings(**settings), command)
    return str(caught.value).split("; ")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_defaults_fit(command):
    check_config(Config(), command)


def test_the_lists_name_settings_of_the_schema_and_no_setting_twice():
    keys = schema_keys()
    named = [*CHOICES, *POSITIVE, *SHARES]
    assert set(named) <= set(keys) and len(named) == len(set(named))
    assert all(keys[key] in names for key, names in CHOICES.items())


@pytest.mark.parametrize("key", CHOICES)
def test_a_word_that_is_no_choice(key):
    wanted = ", ".join(CHOICES[key])
    assert problems(**{key.replace(".", "__"): "other"}) == [f"{key}=other: want one of {wanted}"]


@pytest.mark.parametrize("value", [0, -1, float("nan")])
@pytest.mark.parametrize("key", POSITIVE)
def test_what_must_be_positive(key, value):
    # A zero must not divide the relations that are checked afterwards.
    assert f"{key}={value}: want more than 0" in problems(**{key.replace(".", "__"): value})


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
@pytest.mark.parametrize("key", SHARES)
def test_what_must_be_a_share(key, value):
    assert f"{key}={value}: want 0 to 1" in problems(**{key.replace(".", "__"): value})


def test_every_problem_is_told_at_once():
    found = problems(model__context_length=0, ppo__minibatches=0, ppo__gamma=2.0, device="tpu", kl__coef=-1.0)
    assert found == [
        "device=tpu: want one of auto, cpu, cuda",
        "model.context_length=0: want more than 0",
        "ppo.minibatches=0: want more than 0",
        "ppo.gamma=2.0: want 0 to 1",
        "kl.coef=-1.0: want 0 or more, since a negative one rewards leaving the SFT model",
    ]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"seed": -1}, "seed=-1: want 0 to 4294967295"),
        ({"seed": 2**32}, "seed=4294967296: want 0 to 4294967295"),
        ({"threads": -2}, "threads=-2: want 0 (as many as there are cores) or more"),
        (
            {"data__dev": 0.5, "data__test": 0.5},
            "data.dev + data.test = 1.0: want less than 1, the rest trains",
        ),
        (
            {"pretrain__global_batch_tokens": 1500},
            "pretrain.global_batch_tokens=1500: want a multiple of model.context_length=1024",
        ),
        (  # 524288 / 1024 = 512 sequences
            {"pretrain__micro_batch_sequences": 15},
            "pretrain.micro_batch_sequences=15: want a divisor of the 512 sequences of a batch",
        ),
        ({"ppo__minibatches": 7}, "ppo.minibatches=7: want a divisor of ppo.episodes_per_update=512"),
        ({"ppo__episodes": 511}, "ppo.episodes=511: want at least one update of 512"),
        (
            {"kl__target": 0.0},
            "kl.target=0.0: want more than 0 nats a sequence, or null for a fixed coefficient",
        ),
        (
            {"gold__enabled": True, "rollout__max_new_tokens": 1024},
            "rollout.max_new_tokens=1024: leaves no room for a prompt in model.context_length=1024",
        ),
        ({"gold__responses_min": 1}, "gold.responses_min: want 2 up to gold.responses_max"),
        (
            {"gold__responses_min": 5, "gold__responses_max": 4},
            "gold.responses_min: want 2 up to gold.responses_max",
        ),
    ],
)
def test_relations(settings, said):
    assert problems(**settings) == [said]


def test_more_sequences_a_micro_batch_than_a_batch_has_are_fine():
    # 2048 / 1024 = 2 sequences, which one forward holds
    config = with_settings(pretrain__global_batch_tokens=2048, pretrain__micro_batch_sequences=16)
    check_config(config, "pretrain")


def test_the_papers_edge_values_fit():
    config = with_settings(kl__coef=0.0, kl__target=None, ppo__missing_eos_score=None, model__dropout=0.0)
    check_config(config, "ppo")


@pytest.mark.parametrize(("command", "refused"), [("ppo", True), ("pipeline", True), ("evaluate", False)])
def test_a_temperature_other_than_1_is_refused_where_ppo_samples(command, refused):
    config = with_settings(rollout__temperature=0.7)
    if not refused:
        return check_config(config, command)
    with pytest.raises(UserError, match=r"rollout.temperature=0.7: PPO needs 1, anything else biases the KL"):
        check_config(config, command)


def test_checking_changes_nothing():
    config = compose_config(["experiment=gold"])
    before = dataclasses.asdict(config)
    check_config(config, "pipeline")
    assert dataclasses.asdict(config) == before
