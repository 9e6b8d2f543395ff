"""An encoder of the run's own corpus: masks by step, resume, and its use as reward model and classifier; what refuses it."""

import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlhf.config.checks import check_config
from rlhf.config.compose import compose_config
from rlhf.data.corpus import PackedCorpus
from rlhf.errors import UserError
from rlhf.model import GPTForSequenceClassification
from rlhf.model.classifier import load_reward_model
from rlhf.model.fused_loss import IGNORED, MaskedToken
from rlhf.runs.metric_table import Sums
from rlhf.stages.pretrain import MaskedBatches, make_model, make_objective
from rlhf.system.files import read_json
from rlhf.training.engine import make_engine

from .conftest import ONE_LABELER
from .test_classify import QUICK

CPU = torch.device("cpu")
ENCODER = ["model.attention=bidirectional", "pretrain.isolate_documents=false"]
SHORT = [*ENCODER, "pretrain.pairs=order", "pretrain.tokens=16384", "pretrain.eval_sequences=8"]  # 8 steps


@pytest.fixture(scope="module")
def encoder(gold_run, tmp_path_factory):
    run = gold_run.copy(tmp_path_factory.mktemp("encoder"), "pretrain", "encoder")
    run.stage("pretrain", *SHORT)
    return run


@pytest.fixture(scope="module")
def world(encoder):
    """(tokenizer with the mask token, blocks of 16 tokens)."""
    return encoder.tokenizer("pretrain"), PackedCorpus.load(encoder.folder / "pretrain" / "corpus").blocks("train", 16)


def masked_batches(config, world, rows: int) -> MaskedBatches:
    tokenizer, blocks = world
    return MaskedBatches([blocks[i] for i in range(rows)], rows, lambda count, _: range(count), config, tokenizer)


def test_an_encoder_learns(encoder):
    assert len(encoder.values("pretrain", "pretrain/loss")) == 8
    summary = encoder.record("pretrain")["summary"]
    assert summary.keys() == {"loss", "accuracy"} and summary["loss"] < math.log(769) - 0.3, "better than a guess"
    tokenizer = encoder.tokenizer("pretrain")
    assert tokenizer.mask_token_id == len(tokenizer) - 1 == len(encoder.tokenizer("tokenizer")), (
        "one id more, at the end"
    )


@pytest.mark.parametrize("pairs", ["none", "next", "order"])
def test_masks_are_drawn_anew_at_each_visit_and_depend_on_the_step_alone(encoder, world, pairs):
    """So that a resumed stage goes on with them."""
    config = encoder.config(*SHORT, f"pretrain.pairs={pairs}")
    batches = masked_batches(config, world, 4)
    steps = [batch for batch, _ in zip(batches.after(0), range(3), strict=False)]  # three visits of the same 4 blocks
    again = next(batches.after(2))
    for name, value in steps[2][0].items():
        assert again[0][name].equal(value)
    assert not steps[0][0]["input_ids"].equal(steps[1][0]["input_ids"])
    tokenizer, blocks = world
    special = torch.tensor(tokenizer.all_special_ids)
    for row, block in zip(steps[0], blocks, strict=False):
        chosen = row["labels"] != IGNORED
        assert not torch.isin(row["labels"][chosen], special).any()
        if pairs == "none":
            assert row["labels"][chosen].equal(block["input_ids"][chosen])
            assert row["input_ids"][~chosen].equal(block["input_ids"][~chosen])
        else:
            assert (row["input_ids"][[7, 15]] == tokenizer.eos_token_id).all()
    other = masked_batches(encoder.config(*SHORT, "seed=1"), world, 4)
    assert not next(other.after(0))[0]["labels"].equal(steps[0][0]["labels"])


def test_the_loss_of_a_batch_is_the_same_however_it_is_split(encoder, world):
    tokenizer, blocks = world
    config = encoder.config(*SHORT, "pretrain.pairs=next", "model.context_length=16")
    torch.manual_seed(0)
    module = MaskedToken(make_model(config, tokenizer), pairs=True)
    engine = make_engine(config, module, config.pretrain, CPU)
    objective = make_objective(config, engine, blocks, masked=True)
    batch = next(masked_batches(config, world, 6).after(0))
    count = sum(map(objective.count, batch))
    whole = objective.loss(batch, count, Sums())[0].item()
    parts = sum(objective.loss(batch[i : i + 2], count, Sums())[0].item() for i in (0, 2, 4))
    nats, logits = engine.module(
        torch.stack([row["labels"] for row in batch]), input_ids=torch.stack([row["input_ids"] for row in batch])
    )
    pairs = torch.nn.functional.cross_entropy(logits, torch.stack([row["pair"] for row in batch]))
    assert whole == pytest.approx(parts, abs=1e-5) == pytest.approx((nats / count + pairs).item(), abs=1e-5)


def test_it_becomes_a_reward_model(encoder, copy_until):
    run = copy_until("reward")
    folder = run.stage("reward", f"reward.model={encoder.folder}/pretrain/model", "reward.audit=0", *ONE_LABELER)
    model = load_reward_model(folder / "model", CPU)
    assert isinstance(model.network, GPTForSequenceClassification) and model.network.config.attention == "bidirectional"
    assert model.encoder.form == "template"
    assert run.record("reward")["summary"]["accuracy"] > 0.5
    run.stage("export", "export.stage=reward")
    out = run.folder / "export" / "reward"
    assert "It loads after `import rlhf.model`" in (out / "README.md").read_text()
    theirs, rows = AutoModelForSequenceClassification.from_pretrained(out).eval(), torch.tensor([[7, 8, 9, 5]])
    score = theirs(rows).logits[:, 0] + theirs.config.score_offset
    assert torch.allclose(score, model(input_ids=rows, attention_mask=torch.ones_like(rows)), atol=1e-4)


def test_it_is_fine_tuned_on_a_labelled_task(encoder, tmp_path):
    task = ["classify.data=gold:topic", *QUICK, *ENCODER, f"parents.pretrain='{encoder.folder}'"]
    run = encoder.copy(tmp_path, "sft")
    with pytest.raises(UserError, match=r"classify.lm_coef=0.5: .* is an encoder, without a next-token loss: want 0"):
        run.stage("classify", *task)
    folder = run.stage("classify", *task, "classify.lm_coef=0", "overwrite=true")
    assert 0 <= read_json(folder / "results.json")["accuracy"]["value"] <= 1


def test_what_needs_a_policy_refuses_it(encoder, copy_until, refused):
    for command in ("pipeline", "plan", "sft", "ppo", "evaluate"):
        with pytest.raises(
            UserError, match=f"model.attention=bidirectional: {command} needs a causal model: an encoder"
        ):
            check_config(compose_config(ENCODER), command)
    for command in ("tokenizer", "pretrain", "classify"):
        check_config(compose_config(ENCODER), command)
    for wrong, told in (
        (["pretrain.pairs=next"], "pretrain.pairs=next: is for an encoder"),
        ([*ENCODER, "pretrain.pairs=next", "pretrain.isolate_documents=true"], "want pretrain.isolate_documents=false"),
        ([*ENCODER, "model.pretrained=x"], "model.pretrained=x has its own attention"),
    ):
        with pytest.raises(UserError, match=told):
            check_config(compose_config(wrong), "pretrain")
    run = copy_until("sft")
    told = refused("sft", "--shared-settings", *run.words(f"parents.pretrain='{encoder.folder}'"))
    assert "is an encoder (model.attention=bidirectional), which writes no text" in told
