"""The head fitted on the frozen trunk, and K = 2 against TRL's RewardTrainer on a network with the same weights."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from rlhf.config import Config
from rlhf.data.encoding import Item, Judgement
from rlhf.evaluation import scoring
from rlhf.evaluation.scoring import fit_head, read_features
from rlhf.model.heads import LayerMix, RewardModel, ScalarHead
from rlhf.stages import reward
from rlhf.training.engine import make_engine

from ..model.classifiers import make_tokenizer
from .test_reward import Recorder, one_step

CPU = torch.device("cpu")


def ranked_items(true: Tensor, noise: float) -> list[Item]:
    """Items of K answers each, ranked by true scores (N, K) plus Gaussian noise."""
    seen = true + noise * torch.randn(true.shape, generator=torch.Generator().manual_seed(1))
    items = []
    for n, scores in enumerate(seen.tolist()):
        order = sorted(range(len(scores)), key=lambda k: -scores[k])
        ranks = {place: rank for rank, place in enumerate(order)}
        pairs = [(a, b) for a in ranks for b in ranks if ranks[a] < ranks[b]]
        judgements = [Judgement("x", pairs)]
        items.append(Item(str(n), [[0]] * len(scores), [1] * len(scores), judgements=judgements))
    return items


def test_it_finds_the_direction_that_made_the_rankings():
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(300, 4, 6, generator=draw, dtype=torch.float64) * torch.tensor([1, 1, 10, 1, 0.1, 1.0])
    true = features @ torch.tensor([1.0, -1.0, 0.1, 0, 0, 0], dtype=torch.float64)  # three features that count alike
    head = ScalarHead(6)
    found = fit_head(head, features.flatten(0, 1)[None], ranked_items(true, noise=0.5))
    with torch.no_grad():
        scores = head(features.float()).squeeze(-1).double()
    assert torch.corrcoef(torch.stack([scores.flatten(), true.flatten()]))[0, 1] > 0.99
    assert 0.8 < found["accuracy"] < 0.95 and found["loss"] < 0.5
    assert head.bias.item() == 0


def test_it_finds_the_layer_that_made_the_rankings(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    features = LayerMix.normed(torch.randn(3, 60, 4, 6, generator=draw)).double()
    true = features[1] @ torch.tensor([1.0, -1.0, 0, 0, 0, 0], dtype=torch.float64)
    head, mix = ScalarHead(6), LayerMix(3)
    flat, items = features.flatten(1, 2), ranked_items(true, noise=0.5)
    fit_head(head, flat, items, mix)
    assert mix.weight.argmax() == 1 and mix.weight.softmax(0)[1] > 0.6
    monkeypatch.setattr(scoring, "MIX_DECAY", 0.0)  # which pulls towards a third
    found = fit_head(head, flat, items, mix)
    mean = fit_head(ScalarHead(6), flat.mean(0)[None], items)
    assert mix.weight.softmax(0)[1] > 0.9 and found["accuracy"] > mean["accuracy"] + 0.05
    with torch.no_grad():
        scores = head(mix(flat.float())).squeeze(-1).double()
    assert torch.corrcoef(torch.stack([scores, true.flatten()]))[0, 1] > 0.99


def test_labels_that_say_nothing_give_a_strong_decay_and_a_coin():
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(60, 4, 40, generator=draw, dtype=torch.float64)
    noise = torch.randn(60, 4, generator=draw)
    found = fit_head(ScalarHead(40), features.flatten(0, 1)[None], ranked_items(noise, noise=0.0))
    assert found["decay"] >= 0.3 and 0.4 < found["accuracy"] < 0.6
    assert found["loss"] == pytest.approx(0.6931, abs=0.03)  # log 2 of a coin, cross-validated over 60 prompts


@pytest.mark.parametrize("read_tokens", [1, 3])
def test_the_head_of_the_features_is_the_score(gold_run, read_tokens):
    model = RewardModel.from_causal_lm(gold_run.policy())
    model.config.read_tokens = read_tokens
    items = [
        Item("a", [[5, 6, 7, 8], [9, 10]], [2, 1]),
        Item("b", [[11, 12, 13]], [1]),
    ]  # the second row is shorter than 3
    features = read_features(model, items, 0, CPU)
    tokens = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0], [11, 12, 13, 0]])
    with torch.no_grad():
        scores = model(tokens, torch.tensor([4, 2, 3]), calibrated=False)
        from_features = model.head(features[0].float()).squeeze(-1)
    torch.testing.assert_close(from_features, scores, rtol=1e-5, atol=1e-6)


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


def make_trainer(model: GPT2ForSequenceClassification, rows: list[dict[str, list[int]]], folder: Any) -> Any:
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer  # which takes seconds

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
        Item(str(i), [row["chosen_ids"], row["rejected_ids"]], [1, 1], judgements=[Judgement("x", [(0, 1)])])
        for i, row in enumerate(rows)
    ]
    config = Config()
    config.reward.micro_batch_responses, config.reward.max_grad_norm = micro, 1e9
    engine = make_engine(config, ours, config.reward, CPU, groups=[{"params": list(ours.parameters())}])
    engine.optimizer = recorder = Recorder(ours)
    sums = one_step(engine, items, reward.make_objective(config, engine))
    assert abs(sums.reduce()["reward/loss"] - wanted.item()) < 1e-6
    assert recorder.gradients["head.bias"].abs().item() < 1e-6  # it cancels
    assert torch.allclose(recorder.gradients["head.weight"], theirs.score.weight.grad, atol=1e-6)
    for name, parameter in theirs.transformer.named_parameters():
        assert torch.allclose(recorder.gradients[f"trunk.{name}"], parameter.grad, atol=1e-6), name
