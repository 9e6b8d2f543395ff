"""Every stage of a very small gold run in bfloat16 on a pretended GPU, and attention to packed rows."""

import pytest
import torch
from transformers import Trainer  # noqa: F401  imported before a GPU is there

from rlhf.cli import module_of
from rlhf.config.compose import compose_config
from rlhf.model.fused_loss import NextToken
from rlhf.ppo import update
from rlhf.stages import ppo  # noqa: F401  imported before a function that it imports is replaced
from tests.gpu.pretended import Pretended
from tests.gpu.test_decoding import make
from tests.stages.conftest import GOLD

SMALL = [
    *GOLD, "device=auto", "run=g", "tokenizer.vocab_size=512", "pretrain.tokens=4096", "pretrain.global_batch_tokens=2048",
    "pretrain.warmup_tokens=1024", "pretrain.eval_sequences=4", "gold.documents=400", "gold.demonstrations=40", "gold.train_prompts=40",
    "gold.dev_prompts=8", "gold.test_prompts=12", "gold.comparison_prompts=16", "gold.comparison_test_prompts=8", "sft.epochs=1",
    "reward.calibration_samples=8", "reward.audit=2", "ppo.episodes=16", "ppo.episodes_per_update=8", "ppo.minibatches=1",
    "ppo.epochs=2", "ppo.micro_batch_episodes=4", "evaluate.prompts=4", "evaluate.best_of=2", "rollout.max_new_tokens=12",
]  # fmt: skip
STAGES = ("world", "tokenizer", "pretrain", "sft", "label", "reward", "dpo", "ppo", "evaluate")


def test_every_stage_runs_in_bfloat16_and_ppo_waits_little(tmp_path, monkeypatch):
    logs, waits, train = {}, [], update.train_minibatch

    def count(*arguments, check, **more):
        before = Pretended.current.log.snapshot()
        train(*arguments, check=check, **more)
        if not check:  # the first minibatch of the policy is compared with the rollout token by token
            waits.append(Pretended.current.log.since(before)["syncs"])

    monkeypatch.setattr(update, "train_minibatch", count)
    torch.backends.cuda.enable_cudnn_sdp(True)
    for stage in STAGES:
        with Pretended() as gpu:
            module_of(stage).run(compose_config([*SMALL, f"runs_dir={tmp_path}"]))
        logs[stage] = gpu.log
    assert logs["ppo"].replays > 20
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert logs["ppo"].captures <= 3 and logs["evaluate"].captures <= 14
    # a micro-batch: two indices, a pair of widths, the places of response tokens for policy and critic; two micro-batches, and
    # four waits for the number of tokens and the lengths of rows
    assert len(waits) >= 3 and max(waits) <= 2 * 5 + 4, (waits, logs["ppo"].sync_places)


@pytest.mark.parametrize("kind", ["gpt3", "grouped", "window"])
def test_packed_rows_have_the_loss_of_separate_documents(kind):
    model = make(kind).train()
    tokens = torch.randint(1, 64, (3, 40), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(15), torch.arange(25)])[None].expand(3, -1)
    given, loss = {"labels": tokens, "position_ids": positions, "input_ids": tokens}, NextToken(model)
    wanted = loss(**given, denominator=tokens[:, 1:].numel())
    with Pretended(), torch.autocast("cuda", torch.bfloat16):
        on_gpu = {name: x.to("cuda") for name, x in given.items()}
        found = loss.to("cuda")(**on_gpu, denominator=tokens[:, 1:].numel())
        found.backward()
        assert abs(float(found) - float(wanted)) < 0.02
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
