"""The schema and the YAML over it: every file composes, every key is documented, every help text runs."""

from dataclasses import asdict, fields, is_dataclass
from typing import Any

import pytest
import yaml

from rlhf import cli
from rlhf.config import Config, compose
from rlhf.config.checks import check_config
from rlhf.config.setting import settings_in

FILES = sorted(path for group in cli.CONFIG_GROUPS for path in (compose.conf_dir() / group).glob("*.yaml"))
CHOICES = [(path.parent.name, path.stem) for path in FILES]


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"kl.coef": 0.1, …} of nested dictionaries."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def read_yaml(group: str, name: str) -> dict[str, Any]:
    text = (compose.conf_dir() / group / f"{name}.yaml").read_text(encoding="utf-8")
    tree = yaml.safe_load(text)
    tree.pop("defaults", None)
    return leaves(tree, "" if text.startswith("# @package _global_") else f"{group}.")


def test_without_overrides_the_schema_rules():
    assert compose.compose_config([]) == Config()


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_yaml_composes_and_its_values_arrive(group, name):
    config = compose.compose_config([f"{group}={name}"])
    written, composed = read_yaml(group, name), leaves(asdict(config))
    assert written and written == {key: composed[key] for key in written}
    for command in cli.COMMANDS:
        check_config(config, command)


@pytest.mark.parametrize("name", [name for group, name in CHOICES if group == "experiment"])
def test_an_override_wins_over_an_experiment_and_an_experiment_over_its_model(name):
    config = compose.compose_config([f"experiment={name}", "kl.coef=0.77", "model.n_layer=3"])
    assert (config.kl.coef, config.model.n_layer) == (0.77, 3)
    assert (config.model.positions == "rotary") == (name in ("gold", "gold-dialogue", "real"))  # of model: tiny
    assert compose.compose_config([f"experiment={name}", "model=gpt2"]).model.n_layer == 12


def test_every_command_has_help_groups_that_exist():
    assert set(cli.HELP_GROUPS) == set(cli.COMMANDS)
    shown: dict[type, set[str]] = {}
    for command, groups in cli.HELP_GROUPS.items():
        shown.setdefault(compose.schema_of(command), set()).update(groups)
    for schema, groups in shown.items():
        root = schema()
        every = {item.name for item in fields(root) if is_dataclass(getattr(root, item.name))}
        elsewhere = (
            {item.name for item in fields(Config)} if issubclass(schema, Config) and schema is not Config else set()
        )
        assert every - elsewhere <= groups <= every  # what a schema inherits is shown by the other commands


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_commands_help_runs(command, capsys):
    cli.main([command, "--help"])
    out, err = capsys.readouterr()
    assert err == "" and out.startswith(f"rlhf {command} [key=value …]\n\n{cli.COMMANDS[command][1]}\n")
    for group in ("", *(f"{name}." for name in cli.HELP_GROUPS[command])):
        for key in settings_in(compose.schema_of(command)):
            if key.rpartition(".")[0] == group.rstrip("."):
                assert f"\n  {key}=" in out
    assert command in compose.SCHEMAS or (
        "model=chinchilla | gopher" in out
        and "experiment=align | align-laptop | dialogue | gold | gold-dialogue | real" in out
    )


def test_every_setting_is_documented(capsys):
    for command in cli.COMMANDS:
        cli.main([command, "--help"])
    shown: dict[str, str] = {}
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("  ") and "=" in line:
            key, _, rest = line.strip().partition("=")
            shown[key] = rest.partition(" ")[2].strip()
    assert [key for key in settings_in(Config) if not shown.get(key)] == []
    for name in (item.name for item in fields(Config())):
        group = getattr(Config(), name)
        assert not is_dataclass(group) or type(group).__doc__
