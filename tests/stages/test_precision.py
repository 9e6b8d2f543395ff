"""precision=bfloat16 holds outside training too: whatever answers or scores multiplies in bfloat16, its heads in float32."""

from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from rlhf.commands import chat, generate, sample
from rlhf.data.reading import load_prompts
from rlhf.model.gpt import ResidualLinear
from rlhf.model.heads import ScalarHead
from rlhf.stages import label

HALF = ["precision=bfloat16", "device=cpu", "rollout.max_new_tokens=6", "rollout.batch_size=64"]
CPU = torch.device("cpu")
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


def assert_half(seen: Seen, scored: bool) -> None:
    assert seen[ResidualLinear] == {torch.bfloat16}
    assert seen[ScalarHead] == ({torch.float32} if scored else set())


def test_evaluate(copy_until, seen):
    run = copy_until("evaluate")
    run.stage("evaluate", *HALF, "evaluate.prompts=4", "evaluate.samples=1", "evaluate.best_of=2")
    assert_half(seen, scored=True)


def test_label(copy_until, seen, monkeypatch):
    monkeypatch.setattr(label, "choose_prompts", lambda config, choose=label.choose_prompts: choose(config)[:4])
    copy_until("label").stage("label", *HALF)
    assert_half(seen, scored=False)


def test_commands_that_answer(gold_run, seen, tmp_path):
    out = f"generate.out='{tmp_path}/out.jsonl'"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt": "hello"}\n')
    generate.run(gold_run.config(*HALF, out, f"data.prompts={prompts}"))
    assert_half(seen, scored=False)
    seen.clear()
    chat.run(gold_run.config(*HALF, "chat.message=hello"))
    assert_half(seen, scored=False)
    seen.clear()
    asked = load_prompts(str(prompts))[0]
    sample.draw_tasks(gold_run.config(*HALF, "sample.responses=2"), [("sft", gold_run.folder / "sft")], asked)
    assert_half(seen, scored=False)
