"""Code that lies in a model's folder is never run, and nobody is asked on standard input whether to run it."""

import ast
import io
import json
from importlib import import_module
from pathlib import Path

import pytest

from rlhf import cli
from rlhf.config import compose
from rlhf.data.tokenizer import load_tokenizer, train_tokenizer
from rlhf.errors import UserError
from rlhf.model.classifier import TextRewardModel, load_reward_model
from rlhf.system.files import hash_files
from rlhf.training.setup import load_policy

from .syntax import nodes_of
from .tiny_stages import write_record

ROOT = Path(__file__).parents[1]
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
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    return ran


@pytest.mark.parametrize(
    ("command", "more"), [("chat", ["chat.stage=sft", "chat.message=hello"]), ("export", ["export.stage=sft"])]
)
def test_a_command_does_not_run_a_models_own_code(planted, command, more):
    config = compose.compose_config(["run=x", "device=cpu", "data.prompts=prompts.jsonl", "tracking=off", *more])
    with pytest.raises(UserError, match=r"needs code of its own .*which is never run"):
        import_module(cli.COMMANDS[command][0]).run(config)
    assert not planted.exists()
    assert import_module("sys").stdin.tell() == 0, "nothing was read"


def test_no_loader_runs_a_models_own_code(planted):
    folder = Path("runs/x/sft/model")
    for load in (load_policy, load_reward_model, TextRewardModel.from_pretrained):
        with pytest.raises(UserError, match=r"needs code of its own .*which is never run"):
            load(folder, *(["cpu"] if load is load_reward_model else []))
    load_tokenizer(folder)
    assert not planted.exists()
    assert import_module("sys").stdin.tell() == 0, "nothing was read"


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
