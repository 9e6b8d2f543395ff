"""Configurations: presets, what a run remembers, and what is handed to W&B, DeepSpeed and the hub."""

import json
import shutil
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from hydra.core.config_store import ConfigStore

import rlhf
from rlhf import cli
from rlhf.config import Config, compose
from rlhf.config.checks import check_config
from rlhf.config.compose import compose_config
from rlhf.config.setting import settings_in
from rlhf.errors import UserError
from rlhf.model.checkpoint import read_checkpoint
from rlhf.runs.remembered import by_key, recall
from rlhf.runs.sources import hub_folder
from rlhf.runs.stage import Stage
from rlhf.runs.trackers import Tracker
from rlhf.training.engine import deepspeed_settings

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
    encodes = config.model.attention == "bidirectional"  # what needs a policy refuses it
    for command in ("tokenizer", "pretrain", "classify") if encodes else cli.COMMANDS:
        check_config(config, command)


def test_a_yaml_file_that_changes_is_read_again(tmp_path, monkeypatch):
    shutil.copytree(compose.conf_dir(), tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(compose, "conf_dir", lambda: tmp_path)
    for seed in (5, 6):
        (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\nseed: {seed}\n")
        assert compose_config(["experiment=mine"]).seed == seed


@pytest.mark.parametrize("name", [name for group, name in CHOICES if group == "experiment"])
def test_an_override_wins_over_an_experiment_and_an_experiment_over_its_model(name):
    config = compose.compose_config([f"experiment={name}", "kl.coef=0.77", "model.n_layer=3"])
    assert (config.kl.coef, config.model.n_layer) == (0.77, 3)
    assert (config.model.positions == "rotary") == (name in ("gold", "gold-dialogue", "real"))  # of model: tiny
    assert compose.compose_config([f"experiment={name}", "model=gpt2"]).model.n_layer == 12


def test_every_command_has_help_groups_that_exist():
    shown: dict[type, set[str]] = {}
    for command, (_, _, groups) in cli.COMMANDS.items():
        shown.setdefault(compose.schema_of(command), set()).update(groups)
    for schema, groups in shown.items():
        root = schema()
        every = {item.name for item in fields(root) if is_dataclass(getattr(root, item.name))}
        inherits = issubclass(schema, Config) and schema is not Config
        elsewhere = {item.name for item in fields(Config)} if inherits else set()
        assert every - elsewhere <= groups <= every  # what a schema inherits is shown by the other commands


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_commands_help_runs(command, capsys):
    cli.main([command, "--help"])
    out, err = capsys.readouterr()
    assert err == "" and out.startswith(f"rlhf {command} [key=value …]\n\n{cli.COMMANDS[command][1]}\n")
    for group in ("", *(f"{name}." for name in cli.COMMANDS[command][2])):
        for key in settings_in(compose.schema_of(command)):
            if key.rpartition(".")[0] == group.rstrip("."):
                assert f"\n  {key}=" in out
    experiments = "experiment=align | align-laptop | dialogue | gold | gold-dialogue | real"
    assert command in compose.SCHEMAS or ("model=bert | bert-large" in out and experiments in out)


# --- A run remembers its settings ---


def test_hydra_is_as_before_after_settings_are_composed():
    """A Hydra application that composes ours still needs its launcher, sweeper and logging."""
    compose_config(["seed=1"])
    assert ConfigStore.instance().load("hydra/config.yaml").node.defaults


@pytest.fixture
def call(call):
    """In a folder that has a corpus: the exit code and what was printed."""
    rows = [json.dumps({"text": f"The {x} is in the garden, said the {x}. " * 9}) for x in ("cat", "dog", "owl")]
    Path("books.jsonl").write_text("\n".join(rows), encoding="utf-8")

    def run(*arguments: str) -> tuple[int, str]:
        code, out, err = call(*arguments)
        return code, out + err

    return run


FIRST = ("tokenizer", "model=tiny", "run=x", "data.corpus=books.jsonl", "tokenizer.vocab_size=300", "tracking=off")


def composed(call, *words: str) -> dict:
    code, out = call(*words, "--cfg", "job")
    assert code == 0, out
    return yaml.safe_load(out)


def test_the_second_command_needs_only_what_changes_in_python_too(call):
    assert call(*FIRST)[0] == 0
    kept = recall(Path("runs/x"))
    assert kept == by_key(FIRST[1:2] + FIRST[3:])
    again = composed(call, "sft", "run=x", "sft.epochs=3")
    assert again["data"]["corpus"] == "books.jsonl" and again["tokenizer"]["vocab_size"] == 300
    assert again["sft"]["epochs"] == 3
    assert again["model"]["width"] == composed(call, "sft", "model=tiny")["model"]["width"]
    assert composed(call, "sft", "run=y")["data"]["corpus"] is None  # another run
    changed = composed(call, "sft", "run=x", "model=gpt2", "tokenizer.vocab_size=400")
    assert changed["model"]["n_layer"] == 12 and changed["tokenizer"]["vocab_size"] == 400
    code, out = call("pretrain", "run=x", "pretrain.tokens=1", "pretrain.global_batch_tokens=7")
    assert code == 2 and "as run=x was given: model=tiny data.corpus=books.jsonl" in out and "want a multiple" in out
    assert recall(Path("runs/x")) == kept  # what was refused is not remembered
    assert rlhf.Run("x").config().tokenizer.vocab_size == 300
    for tracking in ("tracking.kind=jsonl", "tracking=off"):
        assert call("tokenizer", "run=x", tracking, "overwrite=true")[0] == 0
    assert "tracking.kind" not in recall(Path("runs/x"))
    other = rlhf.Run("z", corpus="books.jsonl", tokenizer_vocab_size=290, tracking_kind="off", model_context_length=64)
    other.tokenizer()
    assert composed(call, "pretrain", "run=z")["tokenizer"]["vocab_size"] == 290


EVIL = "from pathlib import Path\n\ndef f():\n    Path('ran').touch()\n"


@pytest.mark.parametrize("settings", [
    {"plugins": "runs/x/evil.py:f"}, {"hydra.searchpath": "[runs/x]", "experiment": "evil"},
    {"experiment": "../../runs/x/experiment/evil"}, {"data.encoding": "'${oc.env:HOME}'"},
])  # fmt: skip
def test_a_foreign_runs_settings_run_no_code_and_read_no_secret(call, monkeypatch, settings):
    """Until the user gives them."""
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    Path("runs/x/experiment").mkdir(parents=True)
    Path("runs/x/settings.json").write_text(json.dumps(settings), encoding="utf-8")
    Path("runs/x/evil.py").write_text(EVIL, encoding="utf-8")
    Path("runs/x/experiment/evil.yaml").write_text("# @package _global_\nplugins: runs/x/evil.py:f\n", encoding="utf-8")
    key = next(iter(settings))
    for words in (FIRST, ("pipeline", "run=x")):
        code, out = call(*words)
        assert code == 2 and f"rlhf: error: runs/x/settings.json: {key}=" in out.splitlines()[-1], out
    with pytest.raises(UserError, match="add it to the command"):
        rlhf.Run("x")
    assert not Path("ran").exists() and not Path("cache").exists()
    if key == "plugins":
        assert call(*FIRST, "plugins=runs/x/evil.py:f")[0] == 0 and Path("ran").exists()
        assert call(*FIRST, "overwrite=true")[0] == 0


def test_what_a_foreign_run_names_and_a_command_does_not_use_is_left_out_and_a_damaged_file_stays(call, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/settings.json").write_text(
        json.dumps({"ppo.rewards": "runs/x/evil.py:f", "sft.epochs": "2"}), encoding="utf-8"
    )
    assert call(*FIRST)[0] == 0
    assert not Path("cache/rlhf/given").exists() and recall(Path("runs/x"))["ppo.rewards"] == "runs/x/evil.py:f"
    assert call("ppo", "run=x")[0] == 2
    Path("runs/x/settings.json").write_text('{"sft.lr": "1e-4",}', encoding="utf-8")
    code, out = call(*FIRST)
    assert code == 2 and out.startswith("rlhf: error: runs/x/settings.json: damaged (") and out.count("\n") == 1
    assert "sft.lr" in Path("runs/x/settings.json").read_text(encoding="utf-8")


# --- What is handed to other libraries ---

LABELS = ["tracking.entity=team", "tracking.name=trial", "tracking.group=sweep", "tracking.tags=[one,two]"]


def test_wandb_gets_entity_name_group_and_tags(tmp_path, monkeypatch):
    given: list[dict[str, Any]] = []

    def init(**options: Any) -> None:
        given.append(options)
        raise ConnectionError("no more is needed")

    monkeypatch.setattr("wandb.init", init)
    for words in ([], LABELS):
        config = compose_config(["run=x", "tracking=wandb", *words])
        Tracker(Stage(config, "sft", tmp_path, {}, {})).finish()
    keys = ("entity", "name", "group", "tags", "job_type")
    kept = [[options.get(key) for key in keys] for options in (given[0], given[-1])]
    assert kept == [[None, "x/sft", "x", None, "sft"], ["team", "trial/sft", "sweep", ["one", "two"], "sft"]]


def deepspeed_file(folder: Path, settings: dict[str, Any]) -> list[str]:
    (folder / "ds.json").write_text(json.dumps(settings))
    return ["deepspeed=zero3", f"sharding.file={folder}/ds.json"]


def test_a_deepspeed_file_is_added_to_ours(tmp_path):
    zero = {"stage": 3, "sub_group_size": 1e9, "reduce_bucket_size": "auto"}
    more = {"zero_optimization": zero, "wall_clock_breakdown": True, "amp": None, "bf16": {"enabled": True}}
    plain = deepspeed_settings(compose_config(["deepspeed=zero3"]), bfloat16=True)
    found = deepspeed_settings(compose_config(deepspeed_file(tmp_path, more)), bfloat16=True)
    wanted = plain | {"wall_clock_breakdown": True}
    wanted["zero_optimization"] = plain["zero_optimization"] | {"sub_group_size": 1e9}
    assert found == wanted


def test_conflicts_of_a_deepspeed_file_are_named_in_one_line(tmp_path):
    sharding = {"stage": 2, "offload_param": {"device": "nvme"}}
    other = {"zero_optimization": sharding, "bf16": {"enabled": True}, "optimizer": {}}
    config = compose_config(deepspeed_file(tmp_path, other))
    with pytest.raises(UserError) as caught:
        deepspeed_settings(config, bfloat16=False)
    assert str(caught.value) == (
        f"sharding.file={tmp_path}/ds.json: zero_optimization.stage, zero_optimization.offload_param, bf16.enabled, optimizer: "
        "settings of ours decide this: leave it out"
    )
    with pytest.raises(UserError, match="contains no settings: want a JSON object"):
        deepspeed_settings(compose_config(["deepspeed=zero2", f"sharding.file={tmp_path}/none.json"]), bfloat16=False)
    with pytest.raises(UserError, match="is for DeepSpeed: set deepspeed=zero1 to zero3"):
        check_config(compose_config(["sharding.file=ds.json"]), "sft")


@pytest.mark.parametrize(("error", "remedy"), [
    (GatedRepoError, "gated: accept its terms on https://huggingface.co/owner/name, then set HF_TOKEN to a token of that account"),
    (RepositoryNotFoundError, "if it is private, set HF_TOKEN to a token that may read it"),
])  # fmt: skip
def test_a_gated_model_and_a_missing_token_are_one_line_that_says_what_to_do(monkeypatch, error, remedy):
    def refuse(*_: Any, **__: Any) -> None:
        raise error("403", response=httpx.Response(403, request=httpx.Request("GET", "http://hub")))

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    for read in (read_checkpoint, lambda name: hub_folder(name, "ppo.rewards")):
        with pytest.raises(UserError, match=f"{remedy}$") as told:
            read("owner/name")
        assert "\n" not in str(told.value)
