"""Files of others whose values have the wrong type, size or kind: one line each, before anything large is built or read. Code that
lies in a model's folder is never run, and nobody is asked on standard input whether to run it."""

import ast
import io
import itertools
import json
import os
import resource
import sys
from pathlib import Path

import pytest
import torch

import rlhf
from rlhf.cli import main, module_of
from rlhf.commands.export import model_card
from rlhf.commands.sample import check_free
from rlhf.config import Config
from rlhf.config.commands import ServeConfig
from rlhf.config.compose import compose_config
from rlhf.data.corpus import PackedCorpus
from rlhf.data.reading import load_all
from rlhf.data.storage import verify
from rlhf.data.tokenizer import encode_texts, load_tokenizer, train_tokenizer
from rlhf.errors import UserError
from rlhf.evaluation.shots import columns_of, load_task
from rlhf.model.adopt import adopt
from rlhf.model.classifier import TextRewardModel, load_reward_model
from rlhf.model.gpt import GPTConfig, GPTForCausalLM
from rlhf.model.heads import LabelModel, RewardModel
from rlhf.recipe import STAGES
from rlhf.runs import folders as runs
from rlhf.runs.run_files import read_run
from rlhf.serving.labelling import LabelFile, Labelling
from rlhf.serving.managing import Staff
from rlhf.system import schemas
from rlhf.system.files import hash_files
from rlhf.training.setup import load_policy
from rlhf.training.state import read_state
from tests.model.test_pretrained import save

from .syntax import ROOT, nodes_of
from .tiny_stages import write_record


def edit(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8")


def raises(call, said: str) -> None:
    with pytest.raises(UserError, match=said) as told:
        call()
    assert "\n" not in str(told.value)


def quiet(_: str) -> None:
    pass


CONFIGS = {
    "architectures": 5, "attention_dropout": 5, "return_dict": False, "vocab_size": 2**31, "hidden_size": "32", "eos_token_id": [[1]],
    "num_hidden_layers": 9_999, "tie_word_embeddings": "yes", "pad_token_id": 1e30, "initializer_range": float("nan"),
    "sliding_window": True,
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoints_config_of_wrong_types_and_sizes_is_one_line(tmp_path, name):
    edit(save(tmp_path) / "config.json", **{name: CONFIGS[name]})
    raises(lambda: adopt(tmp_path, say=quiet), "config.json|configuration")


def test_a_config_cannot_name_kernels_of_the_hub(tmp_path):
    """transformers would download and run them."""
    for name in ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"):
        edit(save(tmp_path) / "config.json", **{name: "somebody/kernel"})
        adopt(tmp_path, say=quiet, native=False)
        load_policy(tmp_path)
    policy = GPTForCausalLM(GPTConfig(vocab_size=32, n_layer=1, n_head=2, width=16, context_length=16))
    RewardModel.from_causal_lm(policy).save_pretrained(str(tmp_path / "reward"))
    config = tmp_path / "reward" / "config.json"
    edit(config, trunk=json.loads(config.read_text())["trunk"] | {"attn_implementation": "somebody/kernel"})
    load_reward_model(tmp_path / "reward", torch.device("cpu"))


@pytest.mark.parametrize("ends", [[[1]], "2", {"a": 1}, 1.5])
def test_end_tokens_that_are_no_ids_are_one_line(tmp_path, ends):
    edit(save(tmp_path) / "generation_config.json", eos_token_id=ends)
    raises(lambda: adopt(tmp_path, say=quiet), r"generation_config.json.*eos_token_id.*got")


@pytest.mark.parametrize("length", ["512", float("nan"), 0, -1, [5], None])
def test_a_tokenizers_length_that_is_no_number_of_tokens_is_one_line(tmp_path, length):
    edit(save(tmp_path) / "tokenizer_config.json", model_max_length=length)
    if length is None:  # transformers takes it for no limit, so the model's own context counts
        adopted = adopt(tmp_path, say=quiet)
        assert adopted.tokenizer.model_max_length == adopted.model.config.max_position_embeddings
        return
    for load in (lambda: adopt(tmp_path, say=quiet), lambda: load_tokenizer(tmp_path)):
        raises(load, "model_max_length: got|readable tokenizer")


def test_a_tokenizers_expression_that_panics_is_one_line(tmp_path):
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    edit(save(tmp_path) / "tokenizer.json", pre_tokenizer=split)
    raises(lambda: encode_texts(load_tokenizer(tmp_path), ["x" * 60]), "tokenizer cannot encode a text .*retry-limit")


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "inner/a.safetensors", "weights.dat"])
def test_an_index_names_weights_of_its_own_folder_only(tmp_path, name):
    save(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    for load in (lambda: adopt(tmp_path, say=quiet), lambda: load_policy(tmp_path)):
        raises(load, "model.safetensors.index.json")


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "extra.jinja"]
)
def test_a_model_folders_pipes_and_devices_are_not_opened(tmp_path, name):
    save(tmp_path)
    loaders = (
        lambda: adopt(tmp_path, say=quiet),
        lambda: load_policy(tmp_path),
        lambda: TextRewardModel.from_pretrained(tmp_path),
    )
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (tmp_path / name).unlink(missing_ok=True)
        make(tmp_path / name)
        for load in loaders:
            raises(load, f"{name}: not a regular file|no config.json")


def test_larger_sizes_than_any_file_holds_take_no_memory(tmp_path):
    # 9,999 layers and 2^31 tokens are refused before modules are built: within a gigabyte more than the imports take.
    for name, size in (("num_hidden_layers", 9_999), ("vocab_size", 2**31)):
        edit(save(tmp_path) / "config.json", **{name: size})
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for load in (lambda: adopt(tmp_path, say=quiet), lambda: load_policy(tmp_path)):
            raises(load, f"weights are missing: config.json says {name}={size:,}")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


RECORDS = {
    "run": None, "versions": {"rlhf": [1]}, "steps": -1, "seconds": "1", "memory": [],
    "config": {"rollout": {"max_new_tokens": "9"}},
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_of_wrong_types_is_one_line_in_every_command(tmp_path, refused, name):
    folder = tmp_path / "runs" / "x" / "sft"
    folder.mkdir(parents=True)
    write_record(folder, **{name: RECORDS[name]})
    for command, more in (("export", []), ("chat", ["chat.message=a"])):
        line = refused(command, f"{command}.stage=sft", f"runs_dir={tmp_path}/runs", "run=x", *more)
        assert f"stage.json: damaged ({name}" in line
    raises(lambda: rlhf.load(tmp_path / "runs" / "x"), f"stage.json: damaged .{name}")


DAMAGES = {
    "a list": "[1]", "cut": '{"files": {', "other keys": '{"a": 1}', "deep": '{"a":' * 100_000, "bytes": b"\xff\xfe",
    "other types": json.dumps({key: [1] for key in ("dtype", "form", "notes", "splits", "files", "counts", "sha256", "source")}),
}  # fmt: skip
READERS = {
    "meta.json": lambda folder: PackedCorpus.load(folder),
    "state.json": lambda folder: read_state(folder),
    "sample.json": lambda folder: check_free(folder, overwrite=True),
    "adopted.json": lambda folder: model_card(Config(runs_dir=str(folder.parents[1]), run="x"), "sft", "", []),
    "labelers.json": lambda folder: Staff(folder, ["ann"], "http://x/", folder / "instructions.txt"),
    "label_head.json": lambda folder: LabelModel.with_head(None, folder),
    "dataset.json": lambda folder: verify(folder),
    "model.safetensors.index.json": lambda folder: adopt(folder, say=quiet),
}


@pytest.mark.parametrize("damage", [*DAMAGES, "a pipe"])
@pytest.mark.parametrize("name", READERS)
def test_each_file_has_a_schema(tmp_path, name, damage):
    folder = tmp_path / "x" / "pretrain"
    save(folder)
    (tmp_path / "x" / "sft").mkdir()
    write_record(tmp_path / "x" / "sft")
    if damage == "a pipe":
        os.mkfifo(folder / name)
    else:
        text = DAMAGES[damage]
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    raises(lambda: READERS[name](folder), f"{name}|is no labelling round")


def test_labels_may_nest_and_name_what_they_like_and_a_file_of_gigabytes_is_no_record(tmp_path, monkeypatch):
    row = {"kind": "ranking", "id": "r", "prompt": "a", "labeler": "ann", "ranking": [["a"], ["b"]]}
    row["responses"] = [{"id": "a", "text": "A"}, {"id": "b", "text": "B"}]
    path, keys = tmp_path / "labels.jsonl", ("task", "replaces", "submission", "group", "split", "user")
    for metadata in [{key: value} for key in keys for value in ([1], {"a": 1})]:
        path.write_text(json.dumps(row | {"metadata": metadata}) + "\n")
        assert len(load_all(str(path))[0]) == 1
        file = LabelFile(path)
        assert len(Labelling(file, [], ServeConfig(), 0).file.records) == 1
        file.close()
    path.write_text('{"kind": ' + "[" * 100_000 + "\n")
    raises(lambda: LabelFile(path), "labels.jsonl:1: not a record")
    path.unlink()
    os.mkfifo(path)
    raises(lambda: LabelFile(path), "not a regular file")
    monkeypatch.setattr(schemas, "MAX_BYTES", 100)
    (tmp_path / "stage.json").write_text(" " * 101)
    raises(lambda: schemas.read_checked(tmp_path / "stage.json", schemas.Schema, "restore it"), "more than 0 MiB")


WRONG_CALLS = {
    "a stage": lambda run: rlhf.load(run).policy(["ppo"]), "prompts as one text": lambda run: rlhf.load(run).sample("hello", "sft"),
    "a prompt that is a number": lambda run: rlhf.load(run).sample([5], "sft"),
    "a turn without content": lambda run: rlhf.load(run).sample([[{"role": "user"}]], "sft"),
    "a temperature": lambda run: rlhf.load(run).sample(["a"], "sft", temperature=-1),
    "a length": lambda run: rlhf.load(run).sample(["a"], "sft", max_new_tokens=0),
    "a seed": lambda run: rlhf.load(run).sample(["a"], "sft", seed="x"),
    "responses as one text": lambda run: rlhf.load(run).score(["a"], "b"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_loaded_run_refuses_wrong_types_in_one_line(tmp_path, name):
    (tmp_path / "x" / "sft" / "model").mkdir(parents=True)
    save(tmp_path / "x" / "sft" / "model")
    write_record(tmp_path / "x" / "sft")
    raises(lambda: WRONG_CALLS[name](tmp_path / "x"), "want")


def test_a_test_file_that_was_trained_on_is_said(tmp_path, capsys):
    rows = [f"text {i},{'ab'[i % 2]}\n" for i in range(10)]
    (tmp_path / "train.csv").write_text("".join(["text,label\n", *rows]))
    (tmp_path / "test.csv").write_text("".join(["text,label\n", *rows[:3], "other,a\n"]))
    place, columns = f"{tmp_path}/train.csv", ["classify.text=text", "classify.label=label"]
    for test, said in ((place, "10 of its 10"), (f"{tmp_path}/test.csv", "3 of its 4")):
        config = compose_config([f"classify.data={place}", f"classify.test={test}", *columns])
        load_task(config, columns_of(config), tmp_path)
        assert f"classify.test: {said} examples are in classify.data too" in capsys.readouterr().out


def test_yaml_whose_aliases_grow_is_refused_before_hydra_copies_it(tmp_path, refused):
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    for text in ("\n".join(rows), "a: &a [*a, *a]", "a: " + "[" * 5000):
        (tmp_path / "mine.yaml").write_text(text)
        for words in (["--config-dir", str(tmp_path)], [f"hydra.searchpath=['file://{tmp_path}']"]):
            assert "mine.yaml" in refused("sft", *words, "run=x")


GOOD = {
    "stage": "sft", "status": "complete", "settings": {}, "parents": {}, "data": {}, "files": {}, "hash": "0" * 64,
    "seconds": 1.0, "run": "x", "versions": {},
}  # fmt: skip
DAMAGE: dict[str, bytes | None] = {
    "without files": json.dumps({k: v for k, v in GOOD.items() if k != "files"}).encode(), "a list": b"[]",
    "a list of files": json.dumps(GOOD | {"files": ["a"]}).encode(), "null": b"null",
    "null settings": json.dumps(GOOD | {"settings": None}).encode(), "deep": b'{"a":' * 50_000,
    "no utf-8": b'{"stage": "\xff\xfe"}', "empty": b"",
    "a file outside": json.dumps(GOOD | {"files": {"../../x": "0" * 64}}).encode(), "a folder": None,
}  # fmt: skip


def damage(path: Path, content: bytes | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir() if content is None else path.write_bytes(content)


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_record_is_one_line(tmp_path, name):
    config = Config(run="x", runs_dir=str(tmp_path))
    damage(tmp_path / "x" / "sft" / "stage.json", DAMAGE[name])
    run, stage = tmp_path / "x", tmp_path / "x" / "sft"
    readers = [(runs.read_stage, [stage]), (runs.check_output, [stage]), (read_run, [run])]
    for read, given in (*readers, (runs.collect_parents, [config, "reward"])):
        with pytest.raises(UserError, match=r"sft/stage.json: (damaged|is a folder)[^\n]*overwrite=true$"):
            read(*given)


COMMANDS = (
    "chat", "export", "generate", "sample", "pipeline", "evaluate", "rejection", "dpo", "ppo", "reward", "label", "sft",
    "pretrain", "tokenizer", "report", "watch",
)  # fmt: skip


@pytest.mark.parametrize(("command", "name"), zip(COMMANDS, itertools.cycle(DAMAGE), strict=False))
def test_every_command_that_reads_a_damaged_record_says_so_in_one_line(tmp_path, refused, command, name):
    for stage in STAGES:
        damage(tmp_path / "x" / stage / "stage.json", DAMAGE[name])
    given = f"experiment=gold runs_dir={tmp_path} run=x rounds=1 device=cpu tracking=off --shared-settings"
    assert "/stage.json: " in refused(command, *given.split())


@pytest.mark.parametrize("name", DAMAGE)
def test_the_report_and_watch_pass_over_damaged_measurements(tmp_path, capsys, name):
    for file in ("pipeline.json", "sft/metrics.jsonl", "sft/samples.jsonl", "evaluate/samples.jsonl"):
        damage(tmp_path / "x" / file, DAMAGE[name])
    place = [f"runs_dir={tmp_path}", "run=x"]
    main(["watch", "watch.wait=false", *place])
    if name in ("a list", "null settings", "a folder"):
        main(["report", *place])
    assert capsys.readouterr().err == ""


# --- code in a model's folder ---

CODE = """
from pathlib import Path
Path({ran!r}).touch()
from transformers import PretrainedConfig
class PlantedConfig(PretrainedConfig):
    model_type = "planted"
"""
CLASSES = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoTokenizer")
AUTO_MAP = dict.fromkeys(CLASSES, "planted.PlantedConfig")
TAKES = ("from_pretrained", "from_config")


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A finished SFT stage whose model names code of its own; `y` waits on standard input. The code's mark."""
    model = tmp_path / "runs" / "x" / "sft" / "model"
    train_tokenizer(["some text"] * 4, 290, context_length=16).save_pretrained(model)
    ran = tmp_path / "ran"
    (model / "planted.py").write_text(CODE.format(ran=str(ran)))
    (model / "config.json").write_text(json.dumps({"model_type": "planted", "auto_map": AUTO_MAP, "vocab_size": 290}))
    write_record(model.parent, files=hash_files(model.parent))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    return ran


def test_no_command_and_no_loader_runs_a_models_own_code(planted):
    folder, calls = Path("runs/x/sft/model"), [lambda: load_reward_model(folder, torch.device("cpu"))]
    for command, more in (("chat", "chat.message=hello"), ("export", "overwrite=false")):
        config = compose_config(["run=x", "device=cpu", "tracking=off", f"{command}.stage=sft", more])
        calls.append(lambda command=command, config=config: module_of(command).run(config))
    for call in (*calls, lambda: load_policy(folder), lambda: TextRewardModel.from_pretrained(folder)):
        raises(call, r"needs code of its own .*which is never run")
    load_tokenizer(folder)
    assert not planted.exists() and sys.stdin.tell() == 0, "nothing was read"


def test_every_load_says_that_code_is_not_trusted():
    """By the syntax tree: a call that leaves it out makes transformers ask on standard input."""
    seen = 0
    for path in [*(ROOT / "rlhf").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]:
        for node in nodes_of(path):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TAKES):
                continue
            # ours calls the others; settings of ours and of PEFT are JSON, read into a class that is named here
            own = "TextRewardModel RewardConfig GenerationConfig import_peft().LoraConfig peft.PeftModel"
            if ast.unparse(node.func.value) in own.split():
                continue
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert given.get("trust_remote_code") == "False", f"{path.relative_to(ROOT)}:{node.lineno}"
            seen += 1
    assert seen >= 4


def test_standard_input_is_read_by_the_chat_alone():
    for path in (ROOT / "rlhf").rglob("*.py"):
        if path.name != "chat.py":
            names = [ast.unparse(node) for node in nodes_of(path) if isinstance(node, ast.Name | ast.Attribute)]
            assert not {"input", "sys.stdin"} & set(names), path
