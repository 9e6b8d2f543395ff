import dataclasses
import typing

import pytest

from rlhf.config import Config, PlanConfig
from rlhf.config.checks import check_config
from rlhf.config.commands import ImportConfig
from rlhf.config.compose import compose_config
from rlhf.config.setting import NOTHING, RESULT, ROUNDING, get, settings_in
from rlhf.errors import UserError
from rlhf.recipe import POLICY_STAGES

from .tiny_stages import changed


def with_settings(**settings: object) -> Config:
    """The schema's defaults with other values; `kl__coef` stands for kl.coef."""
    return changed(Config(), **settings)


def isinstance_number(schema: type, key: str) -> bool:
    *groups, last = key.split(".")
    holder = get(schema(), ".".join(groups)) if groups else schema()
    types = {item.name: item.type for item in dataclasses.fields(holder)}
    return bool({int, float} & {types[last], *typing.get_args(types[last])})


def problems(command: str = "ppo", **settings: object) -> list[str]:
    with pytest.raises(UserError) as caught:
        check_config(with_settings(**settings), command)
    return str(caught.value).split("; ")


SCHEMAS = (Config, ImportConfig, PlanConfig)


def refusal(schema: type, key: str, value: object) -> str:
    """What `check_config` says of one wrong value in an otherwise sound configuration."""
    config = schema()
    *groups, last = key.split(".")
    setattr(get(config, ".".join(groups)) if groups else config, last, value)
    if schema is ImportConfig:
        config.path, config.out = config.path or "x", config.out or "y"
    with pytest.raises(UserError) as caught:
        check_config(config, "plan" if schema is PlanConfig else "ppo")
    return str(caught.value)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_number_has_a_range_and_nothing_beyond_it_fits(schema):
    for key, stated in settings_in(schema).items():
        if not isinstance_number(schema, key):
            continue
        bounds = (stated.min, stated.above, stated.max, stated.below)
        assert key == "ppo.missing_eos_score" or any(bound is not None for bound in bounds), f"{key}: state its range"
        beyond = [float("nan"), float("inf"), float("-inf")]
        beyond += [bound - 1 for bound in (stated.min,) if bound is not None]
        beyond += [bound + 1 for bound in (stated.max,) if bound is not None]
        beyond += [bound for bound in (stated.above, stated.below) if bound is not None]
        for value in beyond:
            assert (stated.problem(key, value) or "").startswith(f"{key}={value}: want {stated.wanted()}")
    assert refusal(schema, key, "a\0b")  # and `check_config` reports what `problem` finds


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_setting_accepts_its_default_and_refuses_what_no_setting_of_its_type_holds(schema):
    for key, stated in settings_in(schema).items():
        default = get(schema(), key)
        assert stated.help and stated.changes in (RESULT, ROUNDING, NOTHING) and stated.default == default
        assert stated.problem(key, default) is None
        assert (stated.problem(key, None) is None) == stated.optional
        or_null = ", or null" if stated.optional else ""
        if stated.choices is not None:
            assert stated.problem(key, "other") == f"{key}=other: want {stated.wanted()}{or_null}"
        if stated.kind is not None or isinstance(default, str):
            empty = f"{key}='': is empty (an unset shell variable?): want "
            assert (stated.problem(key, "") or "").startswith(empty)
        for value in ("a\0b", ["a", "a\0b"], {"a\0b": 1}):
            nul = f"{key}: contains a NUL character, which no path can contain: leave it out"
            assert stated.problem(key, value) == nul
        assert "NUL" not in (stated.problem(key, r"a\x00b") or "")  # the four characters


@pytest.mark.parametrize(("settings", "said"), [
    (["pretrain.beta1=2"], "pretrain.beta1=2.0: want 0 or more and less than 1"),
    (["model.n_kv_head=5"], "model.n_kv_head=5: want a divisor of model.n_head=12"),
    (["kl.target=inf"], "kl.target=inf: want more than 0, finite, or null"),
    (["ppo.rewards=5"], "ppo.rewards=5: want a name or a list of names, or null"),
    (["data.encoding=utf-88"], "data.encoding=utf-88: want an encoding that Python knows, such as utf-8"),
    (["reward.labeler_weights={anna: -1}"],
     "reward.labeler_weights={'anna': -1}: want a weight of 0 or more by name, as '{anna: 2, ben: 0.5}', or null"),
])  # fmt: skip
def test_a_value_from_the_command_line_that_does_not_fit(settings, said):
    with pytest.raises(UserError) as caught:
        check_config(compose_config(settings), "ppo")
    assert str(caught.value) == said


def test_every_problem_is_told_at_once():
    found = problems(model__context_length=0, ppo__minibatches=0, ppo__gamma=2.0, device="tpu", kl__coef=-1.0)
    assert found == [
        "device=tpu: want one of auto, cpu, cuda, mps", "model.context_length=0: want 1 or more",
        "ppo.minibatches=0: want 1 or more", "ppo.gamma=2.0: want 0 to 1", "kl.coef=-1.0: want 0 or more",
    ]  # fmt: skip


@pytest.mark.parametrize(("settings", "said"), [
    ({"data__dev": 0.5, "data__test": 0.5}, "data.dev + data.test = 1.0: want less than 1, the rest trains"),
    ({"pretrain__global_batch_tokens": 1500},
     "pretrain.global_batch_tokens=1500: want a multiple of model.context_length=1024"),
    ({"ppo__minibatches": 7}, "ppo.minibatches=7: want a divisor of ppo.episodes_per_update=512"),
    ({"ppo__episodes": 511}, "ppo.episodes=511: want at least one update of 512"),
    ({"gold__enabled": True, "rollout__max_new_tokens": 1024},
     "rollout.max_new_tokens=1024: leaves no room for a prompt in model.context_length=1024"),
    ({"gold__responses_min": 5, "gold__responses_max": 4}, "gold.responses_min=5: want at most gold.responses_max=4"),
    ({"distill__schedule": "constant", "distill__final_lr_fraction": 0.5}, "distill.final_lr_fraction=0.5: schedule=constant does not "
     "fall to it: leave it at 0.1, or want distill.schedule=cosine or linear"),
    ({"evaluate__models": ["mine"]}, f"evaluate.models: mine: want some of {', '.join(POLICY_STAGES)}"),
])  # fmt: skip
def test_relations(settings, said):
    assert problems(**settings) == [said]


@pytest.mark.parametrize(("command", "settings", "said"), [
    ("judge", {"judge__model": "bert", "deepspeed": "zero3", "data__half": 1}, "judge.model=bert: a text classifier does not go with"),
    ("pipeline", {"rounds": 2, "ppo__policy": "dpo"}, "ppo.policy=dpo: an earlier round has no dpo of its own: give parents.dpo"),
    ("sample", {"sample__stages": ["sft"]}, "sample.stages=sft: want two or more, without sample.stage and sample.responses"),
    ("sample", {"sample__stages": ["sft", "ppo"], "sample__responses": 3}, "without sample.stage and sample.responses"),
    ("sample", {"sample__stages": ["sft", "ppo"], "sample__choose": "uncertain"}, "sample.choose=uncertain: sample.stages compares"),
    ("sample", {"sample__choose": "disagreement", "sample__rewards": ["x"]}, "want two reward models or more"),
    ("generate", {"generate__greedy": True, "generate__samples": 2}, "generate.samples=2: greedy responses are all alike: want 1"),
    ("serve", {"serve__gold": "g.jsonl"}, "serve.gold=g.jsonl: nobody would see it"),
    ("serve", {"serve__qualification": 2}, "serve.qualification=2: is for labelers with a name: give labelers=[…]"),
    ("classify", {"classify__from_scratch": True, "classify__layers": 1}, "give one of the two"),
    ("classify", {"classify__both_orders": True}, "name the second one with classify.second"),
])  # fmt: skip
def test_what_would_fail_late_is_refused_first(command, settings, said):
    assert any(said in problem for problem in problems(command, **settings))


def test_the_prompts_of_an_update_must_fit_the_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    settings = {"ppo__responses_per_prompt": 4, "ppo__minibatches": 4}
    [said] = problems(ppo__episodes_per_update=8, **settings)
    assert said == "ppo.episodes_per_update=8: 2 prompts per update for 3 processes: want at least one each"
    [said] = problems(ppo__episodes_per_update=16, deepspeed="zero3", **settings)
    assert "4 prompts per update cannot be divided among 3 processes, as ZeRO-3 requires" in said
    for way, update in (("zero2", 16), ("zero3", 24)):
        check_config(with_settings(ppo__episodes_per_update=update, deepspeed=way, **settings), "ppo")
    check_config(with_settings(ppo__episodes_per_update=8, **settings), "sft")
