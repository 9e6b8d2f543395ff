"""docs/extending.md: its code blocks are written to files and run by its commands, on the small gold run."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

import rlhf
from rlhf.cli import main
from rlhf.config.checks import check_config
from rlhf.data.reading import load_comparisons, load_prompts
from rlhf.errors import UserError
from rlhf.model.architectures import ARCHITECTURES
from rlhf.model.interface import Episodes
from rlhf.ppo.experience import load_estimator
from rlhf.ppo.rewards import CombinedReward, FunctionReward
from rlhf.runs.run_files import read_jsonl
from rlhf.runs.sources import hash_sources
from tests.model.chats import make_tokenizer
from tests.model.checkpoints import GROUPED
from tests.stages.conftest import copy_until, gold_run  # noqa: F401 (fixtures)

PAGE = (Path(__file__).parent.parent / "docs" / "extending.md").read_text(encoding="utf-8")
SMALL = ["ppo.episodes_per_update=16", "ppo.episodes=16", "ppo.minibatches=1", "ppo.epochs=1", "ppo.eval_prompts=4"]
TWO = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
MASK = torch.tensor([[True, True], [True, False]])


@pytest.fixture
def files(tmp_path, monkeypatch) -> dict[str, str]:
    """The page's files, in the working directory; {name: code}."""
    found = {code.split()[1]: code for code in re.findall(r"```python\n(# \w+\.py\n.*?)```", PAGE, flags=re.DOTALL)}
    for name, code in found.items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    return found


def settings_of_commands() -> list[str]:
    return [word for line in re.findall(r"^rlhf ppo run=x (.*)$", PAGE, flags=re.MULTILINE) for word in line.split()]


def test_a_verifiable_reward_compares_with_the_reference_and_an_estimator_by_hand(files):
    rows = [{"question": f"What is {n} and {n}?", "answer": f"Twice {n}.\n#### {2 * n:,}"} for n in (2, 600)]
    Path("gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    records = load_prompts("gsm8k.jsonl")[0]
    assert [record.metadata["reference"] for record in records] == ["Twice 2.\n#### 4", "Twice 600.\n#### 1,200"]
    texts, ended = ["It is 4.", "It is 600 and"], torch.tensor([True, False])
    episodes = Episodes(records, [[1]] * 2, [[2, 3], [4]], texts, ended)
    reward = FunctionReward("last_number.py:check", torch.device("cpu"), {"weight": 2})
    assert reward(episodes).tolist() == [2.0, -0.25]
    parts = {name: part.tolist() for name, part in reward.parts.items()}
    assert parts == {"right": [2.0, 0.0], "cut": [0.0, -0.25]}
    both = CombinedReward({"function_0": reward}, [0.5])
    assert both(episodes).tolist() == [1.0, -0.125] and {"function_0", "function_0/cut"} <= both.parts.keys()
    runpy.run_path("test_baseline.py")["test_batch_mean"]()


def test_reward_estimator_and_metric_train_together(copy_until, files):  # noqa: F811
    run = copy_until("ppo")
    settings = settings_of_commands()
    assert [setting.partition("=")[0] for setting in settings] == ["ppo.rewards", "ppo.advantages", "ppo.metrics"]
    config = run.config(*SMALL, "ppo.critic_warmup_updates=0", *settings)
    check_config(config, "ppo")
    folder = run.stage("ppo", *SMALL, "ppo.critic_warmup_updates=0", *settings)
    (row,) = [row for row in read_jsonl(folder / "metrics.jsonl") if "objective/scores" in row]
    assert 0 <= row["custom/asking"] <= 1 and abs(row["custom/advantage"]) < 1e-5, "whitened: the mean is 0"
    assert row["loss/value_avg"] > 0, "it has a critic"
    hashed = {name for name in hash_sources(config, "ppo") if ".py" in name}
    assert hashed == {"reward:variety.py:pay", "advantages:baseline.py:batch_mean"}


def test_a_loop_of_ones_own_trains_as_the_stage_does(copy_until, files):  # noqa: F811
    more = [*SMALL, "ppo.critic_warmup_updates=1", "ppo.episodes=32", "ppo.eval_every=0", "kl.target=null"]
    run = copy_until("ppo")
    wanted = load_file(run.stage("ppo", *more) / "model" / "model.safetensors")
    given = dict(word.split("=", 1) for word in (*run.overrides, *more) if word != "tracking=jsonl")
    values = {key: yaml.safe_load(text) for key, text in given.items() if key != "experiment"}
    mine = rlhf.Run(run.name, runs_dir=run.runs_dir, experiment="gold", **values, **{"tracking.kind": "jsonl"})
    loop = runpy.run_path("loop.py")
    (run.folder / "ppo").rename(run.folder / "stage")
    loop["train"](mine)
    found = load_file(run.folder / "ppo" / "model" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert len(mine.sample(["What colour is snow?"], max_new_tokens=4)) == 1, "a stage like any other"


def test_a_format_reads_rankings_and_a_bad_row_is_a_reject(files):
    rows = [
        {"ask": "Colour?", "answers": ["Red.", "No."], "stars": [5, 1], "who": "kim"},
        {"ask": "Size?", "answers": ["Big.", "Small."], "stars": [3, 3], "who": "kim"},
        {"ask": "Shape?", "answers": ["Round."], "stars": [3], "who": "kim"},
    ]
    path = Path("stars.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]), encoding="utf-8")
    records, info = load_comparisons("stars.jsonl", "stars.py:ranking")
    assert [record.ranks() for record in records] == [[0, 1], [0, 0]] and sum(file.rows for file in info) == 2
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(UserError, match=r"stars\.jsonl:3: .*list index out of range"):
        load_comparisons("stars.jsonl", "stars.py:ranking")


WRONG = """
import torch
def alone(rewards, values, mask, *, gamma, lam, group_size):
    if group_size < 2:
        raise ValueError("needs groups")
def whole(rewards, values, mask, *, gamma, lam, group_size):
    return rewards.sum(1), rewards
def infinite(rewards, values, mask, *, gamma, lam, group_size):
    return rewards / 0.0, rewards
def few(rewards, mask):
    return rewards, rewards
def exits(rewards, values, mask, *, gamma, lam, group_size):
    raise SystemExit(0)
"""


@pytest.mark.parametrize(("name", "message"), [
    ("alone", r"raised ValueError: needs groups \(wrong.py:5\): correct"),
    ("whole", r"returned torch.float32 \(2,\): want two float tensors of shape \(2, 2\)"),
    ("infinite", "returned values that are not finite"),
    ("few", r"takes \(rewards, mask\) .* is called as f\(rewards, values, mask, gamma=, lam=, group_size=\)"),
    ("exits", r"raised SystemExit: 0 \(wrong.py:\d+\): correct"), ("missing", "cannot be imported"),
])  # fmt: skip
def test_a_wrong_estimator_is_one_line(tmp_path, name, message):
    (tmp_path / "wrong.py").write_text(WRONG)
    with pytest.raises(UserError, match=f"^advantage estimator .*wrong.py:{name}: {message}") as caught:
        load_estimator(f"{tmp_path}/wrong.py:{name}")(TWO, TWO, MASK, gamma=1.0, lam=1.0, group_size=1)
    assert "\n" not in str(caught.value)


@torch.no_grad()
def test_an_architecture_from_a_file_runs_natively_and_is_exported(tmp_path, monkeypatch, refused):
    [code] = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "seed_oss" in block]
    (tmp_path / "seed_oss.py").write_text(code)
    monkeypatch.setitem(ARCHITECTURES, "seed_oss", None)  # removed again at the test's end
    del ARCHITECTURES["seed_oss"]
    torch.manual_seed(1)
    tokenizer = make_tokenizer("chatml")
    ids = {"bos_token_id": 0, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = transformers.SeedOssConfig(**{**GROUPED, **ids, "vocab_size": 410, "head_dim": 16})
    theirs = transformers.SeedOssForCausalLM(config).eval()
    for parameter in theirs.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "hf")
    tokenizer.save_pretrained(tmp_path / "hf")

    run = [f"runs_dir={tmp_path}", "run=x", f"plugins={tmp_path}/seed_oss.py:register"]
    adopting = [*run, f"model.pretrained={tmp_path}/hf", "tracking=jsonl", "device=cpu", "threads=1"]
    main(["tokenizer", *adopting])
    main(["pretrain", *adopting, "model.native=true"])
    assert json.loads((tmp_path / "x" / "pretrain" / "model" / "config.json").read_text())["model_type"] == "rlhf_gpt"
    main(["export", *run, "export.stage=pretrain", f"export.out={tmp_path}/out"])
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again) is transformers.SeedOssForCausalLM
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in theirs.state_dict().items())
    del ARCHITECTURES["seed_oss"]
    (tmp_path / "wrong.py").write_text(code.replace("qkv_bias=True", "qkv_bias=True, qk_norm=True"))
    words = [f"plugins={tmp_path}/wrong.py:register", f"model.pretrained={tmp_path}/hf", "tracking=jsonl", "device=cpu"]
    told = refused("pretrain", f"runs_dir={tmp_path}", "run=y", "parents.tokenizer=x", *words)
    assert "seed_oss names a tensor that the checkpoint lacks" in told and "q_norm" in told
