"""K = 2 against TRL's RewardTrainer: its own loss of its own batch, on a network with the same weights."""

import random
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel
from trl import RewardConfig, RewardTrainer

from rlhf.config import Config
from rlhf.data.encoding import Item, Judgement
from rlhf.model.heads import RewardModel
from rlhf.stages import reward
from rlhf.training.engine import make_engine

from ..model.classifiers import make_tokenizer
from .test_reward import Recorder, one_step

CPU = torch.device("cpu")
PAD, END = 0, 1


def make_pairs(count: int) -> list[dict[str, list[int]]]:
    """Prompts with two answers of unequal lengths, as TRL takes them already in tokens."""
    rng = random.Random(0)
    rows = []
    for _ in range(count):
        prompt = [rng.randrange(2, 40) for _ in range(rng.randint(1, 8))]
        answers = [[*(rng.randrange(2, 40) for _ in range(rng.randint(0, 9))), END] for _ in range(2)]
        rows.append({"chosen_ids": prompt + answers[0], "rejected_ids": prompt + answers[1]})
    return rows


@pytest.fixture
def twins() -> tuple[RewardModel, GPT2ForSequenceClassification]:
    """Ours on a random GPT-2, and transformers' classifier with the same trunk and head."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 40, "n_positions": 32, "n_layer": 2, "n_head": 2, "n_embd": 32}
    config = GPT2Config(**sizes, pad_token_id=PAD, bos_token_id=END, eos_token_id=END, num_labels=1)
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        setattr(config, name, 0.0)
    ours = RewardModel.from_causal_lm(GPT2LMHeadModel(config))
    theirs = GPT2ForSequenceClassification(config)
    theirs.transformer.load_state_dict(ours.trunk.state_dict())
    theirs.score.weight.data.copy_(ours.head.weight)  # it has no bias, and ours is 0 before training
    return ours, theirs


def make_trainer(model: GPT2ForSequenceClassification, rows: list[dict[str, list[int]]], folder: Any) -> RewardTrainer:
    plain = {"report_to": "none", "use_cpu": True, "bf16": False, "max_length": None, "gradient_checkpointing": False}
    settings = RewardConfig(output_dir=str(folder), per_device_train_batch_size=len(rows), **plain)
    return RewardTrainer(model, settings, train_dataset=Dataset.from_list(rows), processing_class=make_tokenizer("cls"))


@pytest.mark.parametrize("micro", [1000, 6])
def test_pairs_have_the_loss_and_gradient_of_trls_reward_trainer(twins, tmp_path, micro):
    ours, theirs = twins
    rows = make_pairs(12)
    trainer = make_trainer(theirs, rows, tmp_path)
    batch = trainer.data_collator(rows)
    assert batch["input_ids"].shape[0] == 24 and bool((batch["attention_mask"] == 0).any())
    batch["input_ids"] = torch.where(batch["attention_mask"] == 1, batch["input_ids"], PAD)
    theirs.train()
    wanted = trainer.compute_loss(theirs, batch)
    wanted.backward()

    items = [
        Item(str(i), [row["chosen_ids"], row["rejected_ids"]], [1, 1], judgements=[Judgement("x", [(0, 1)], [1])])
        for i, row in enumerate(rows)
    ]
    config = Config()
    config.reward.micro_batch_responses, config.reward.max_grad_norm = micro, 1e9
    engine = make_engine(config, ours, [{"params": list(ours.parameters())}], CPU)
    engine.optimizer = recorder = Recorder(ours)
    sums = one_step(engine, items, reward.make_objective(config, engine))
    assert abs(sums.reduce()["reward/loss"] - wanted.item()) < 1e-6
    assert recorder.gradients["head.bias"].abs().item() < 1e-6  # it cancels
    assert torch.allclose(recorder.gradients["head.weight"], theirs.score.weight.grad, atol=1e-6)
    for name, parameter in theirs.transformer.named_parameters():
        assert torch.allclose(recorder.gradients[f"trunk.{name}"], parameter.grad, atol=1e-6), name
