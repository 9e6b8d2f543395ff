import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlhf.api import load
from rlhf.commands import chat, generate, sample
from rlhf.data.chat_template import decode_response, end_ids
from rlhf.data.encoding import encode_prompt_within
from rlhf.data.reading import load_prompts
from rlhf.data.records import Message
from rlhf.data.tokenizer import separator_id
from rlhf.errors import UserError
from rlhf.model.gpt import ResidualLinear
from rlhf.model.heads import ScalarHead
from rlhf.ops.logprobs import token_logprobs
from rlhf.stages import label


@pytest.fixture(scope="module")
def prompts(gold_run, tmp_path_factory) -> Path:
    """A user's own file: forty prompts of the world as lines with nothing but an id and a prompt."""
    path = tmp_path_factory.mktemp("prompts") / "mine.jsonl"
    lines = (gold_run.folder / "world" / "prompts.jsonl").read_text().splitlines()[:40]
    rows = [{"id": f"p{i}", "prompt": json.loads(line)["prompt"]} for i, line in enumerate(lines)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def generated(gold_run: Any, prompts: Path, out: Path, *more: str) -> list[dict[str, Any]]:
    generate.run(gold_run.config(f"data.prompts='{prompts}'", f"generate.out='{out}'", *more))
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def rows(gold_run, prompts, tmp_path_factory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("generate") / "out.jsonl"
    return generated(gold_run, prompts, out, "generate.samples=3", "generate.logprobs=true", "rollout.batch_size=16")


def test_a_line_a_prompt_says_what_made_it(gold_run, rows):
    record, tokenizer = gold_run.record("ppo"), gold_run.tokenizer("ppo")
    assert [row["id"] for row in rows] == [f"p{i}" for i in range(40)]
    for row in rows:
        assert row["model"] == f"gold/ppo@{record['hash'][:8]}" and row["model_hash"] == record["hash"]
        assert (row["seed"], row["temperature"], row["greedy"], row["max_new_tokens"]) == (0, 1.0, False, 24)
        assert row["prompt"][-1]["role"] == "user" and row["cut"] is False
        assert len(row["responses"]) == len(row["ended"]) == len(row["token_ids"]) == len(row["logprobs"]) == 3
        each = zip(row["responses"], row["ended"], row["token_ids"], row["logprobs"], strict=True)
        for text, ended, ids, logp in each:
            assert decode_response(tokenizer, ids).strip() == text and len(logp) == len(ids) <= 24
            assert ended == (ids[-1] in end_ids(tokenizer))
    assert any(len(set(row["responses"])) > 1 for row in rows)


def test_a_text_of_the_base_model_ends_where_a_document_does(gold_run, prompts, tmp_path):
    more = ["generate.stage=pretrain", "generate.logprobs=true", "rollout.max_new_tokens=64"]
    rows = generated(gold_run, prompts, tmp_path / "base.jsonl", *more)
    separator = separator_id(gold_run.tokenizer())
    last = [row["token_ids"][0][-1] == separator for row in rows]
    assert any(last) and all(row["ended"][0] for row, found in zip(rows, last, strict=True) if found)
    assert not any(separator in row["token_ids"][0][:-1] for row in rows)


def test_log_probs_are_the_models_own(gold_run, rows):
    policy, tokenizer = gold_run.policy("ppo"), gold_run.tokenizer("ppo")
    for row in rows[:5]:
        prompt, _ = encode_prompt_within(tokenizer, [Message(**m) for m in row["prompt"]], 10_000)
        for ids, logp in zip(row["token_ids"], row["logprobs"], strict=True):
            with torch.no_grad():
                logits = policy(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            assert torch.allclose(token_logprobs(logits, torch.tensor(ids)), torch.tensor(logp), atol=1e-4)


def test_what_is_refused_and_nothing_is_lost(gold_run, prompts, tmp_path, monkeypatch):
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out.jsonl"
    before = prompts.read_bytes()
    for more, message in (
        ([f"generate.out='{prompts}'"], "exists: choose another generate.out=…, or add overwrite=true"),
        ([f"generate.out='{prompts}'", "overwrite=true"], "is no file of `rlhf generate`, so it is not replaced"),
        ([f"generate.out='{gold_run.folder / 'ppo' / 'x.jsonl'}'"], "is inside the folder of a stage"),
        (["generate.stage=rejection"], "no finished rejection there"),
    ):
        with pytest.raises(UserError, match=message):
            generated(gold_run, prompts, out, *more)
    assert prompts.read_bytes() == before and not out.exists()
    generated(gold_run, prompts, out, "generate.greedy=true")
    first = out.read_bytes()
    with pytest.raises(UserError, match="exists"):
        generated(gold_run, prompts, out)
    generated(gold_run, prompts, out, "overwrite=true")
    assert (second := out.read_bytes()) != first and [path.name for path in tmp_path.iterdir()] == [out.name]
    monkeypatch.setattr(generate.Progress, "update", interrupt)  # after the first row
    with pytest.raises(KeyboardInterrupt):
        generated(gold_run, prompts, out, "overwrite=true")
    assert out.read_bytes() == second and (tmp_path / "out.jsonl.part").read_bytes() == second.splitlines(True)[0]


def test_a_system_prompt_is_heard_in_chat_generate_and_the_api(gold_run, tmp_path, capsys):
    turns = [{"role": "system", "content": "The cat is red. " * 3}, {"role": "user", "content": "Tell me about Paris."}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in (turns, turns[1:])))
    heard, unheard = (row["responses"][0] for row in generated(gold_run, path, tmp_path / "o", "generate.greedy=true"))
    assert heard != unheard
    assert load(gold_run.folder).sample([turns, turns[1:]], greedy=True) == [heard, unheard]
    capsys.readouterr()
    for system, wanted in ((f"'{turns[0]['content']}'", heard), ("null", unheard)):
        chat.run(gold_run.config(f"chat.system={system}", "chat.message='Tell me about Paris.'", "chat.greedy=true"))
        assert capsys.readouterr().out.strip() == wanted


HALF = ["precision=bfloat16", "device=cpu", "rollout.max_new_tokens=6", "rollout.batch_size=64"]
Seen = dict[type, set[torch.dtype]]


@pytest.fixture
def seen() -> Iterator[Seen]:
    """The types of what products in blocks and scalar heads gave, by the layer's class."""
    found: Seen = defaultdict(set)

    def look(module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        if isinstance(module, ResidualLinear | ScalarHead):
            found[type(module)].add(output.dtype)

    handle = nn.modules.module.register_module_forward_hook(look)
    yield found
    handle.remove()


def assert_half(seen: Seen, scored: bool = False) -> None:
    assert seen[ResidualLinear] == {torch.bfloat16}
    assert seen[ScalarHead] == ({torch.float32} if scored else set())
    seen.clear()


def test_evaluate_and_label_in_bfloat16(copy_until, seen, monkeypatch):
    run = copy_until("evaluate")
    run.stage("evaluate", *HALF, "evaluate.prompts=4", "evaluate.samples=1", "evaluate.best_of=2")
    assert_half(seen, scored=True)
    monkeypatch.setattr(label, "choose_prompts", lambda config, choose=label.choose_prompts: choose(config)[:4])
    copy_until("label", "labelled").stage("label", *HALF)
    assert_half(seen)


def test_commands_that_answer_in_bfloat16(gold_run, prompts, seen, tmp_path):
    generated(gold_run, prompts, tmp_path / "out.jsonl", *HALF)
    assert_half(seen)
    chat.run(gold_run.config(*HALF, "chat.message=hello"))
    assert_half(seen)
    asked = load_prompts(str(prompts))[0][:1]
    sample.draw_tasks(gold_run.config(*HALF, "sample.responses=2"), [("sft", gold_run.folder / "sft")], asked)
    assert_half(seen)
