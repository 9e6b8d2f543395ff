import itertools
import json
import math
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf.config import Config
from rlhf.config.stages import RewardConfig
from rlhf.data.chat_template import encode_prompt, encode_response
from rlhf.data.encoding import Item, Judgement
from rlhf.data.reading import prompts_of
from rlhf.data.records import Ranking
from rlhf.engines.sampling import sample
from rlhf.evaluation import scoring
from rlhf.model.heads import RewardModel
from rlhf.runs.folders import read_stage
from rlhf.runs.sources import sample_prompts
from rlhf.runs.stage import open_stage
from rlhf.stages import reward
from rlhf.training.batches import Batches, Objective, shuffled_order, train
from rlhf.training.engine import make_engine
from rlhf.training.loop import open_loop

from ..data.ranked import make_items
from .conftest import ONE_LABELER
from .recorder import Recorder, one_step

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer(gold_run):
    return gold_run.tokenizer()


@pytest.fixture
def model(gold_run) -> RewardModel:
    torch.manual_seed(0)
    return RewardModel.from_causal_lm(gold_run.policy())


def make_ranking(
    name: str, prompt: str, texts: list[str], order: list[list[int]], labeler: str = "x", **more
) -> Ranking:
    ids = [chr(ord("a") + i) for i in range(len(texts))]
    responses = [{"id": i, "text": t} | more for i, t in zip(ids, texts, strict=True)]
    ranking = [[ids[i] for i in group] for group in order]
    told = {"kind": "ranking", "id": name, "prompt": prompt, "labeler": labeler}
    return Ranking.model_validate(told | {"responses": responses, "ranking": ranking})


def blank_items(counts: list[int]) -> list[Item]:
    return [Item(str(i), [[1] * (3 + i)] * k, [1] * k) for i, k in enumerate(counts)]


def test_each_epoch_has_every_prompt_once_in_an_order_of_its_own():
    items = blank_items([2] * 10)
    drawn = Batches(items, 4, shuffled_order("reward-0"))
    found = list(itertools.islice(drawn.after(0), 6))
    assert drawn.per_epoch == 3 and list(itertools.islice(drawn.after(4), 2)) == found[4:], "a resumed run goes on"
    assert [len(batch) for batch in found] == [4, 4, 2] * 2
    assert [drawn.seen(step) for step in range(1, 8)] == [4, 8, 10, 14, 18, 20, 24]
    first, second = ([item.key for batch in part for item in batch] for part in (found[:3], found[3:]))
    assert sorted(first) == sorted(second) == sorted(item.key for item in items) and first != second
    other = Batches(items, 4, shuffled_order("reward-1"))
    assert list(itertools.islice(drawn.after(0), 6)) == found != list(itertools.islice(other.after(0), 6))


@pytest.mark.parametrize("tokens", [None, 30])
@pytest.mark.parametrize(("most", "ranks"), [(10, 1), (10, 2), (1, 4), (100, 4), (3, 9)])
def test_each_item_is_in_one_micro_batch_of_one_rank_and_all_ranks_have_as_many(most, ranks, tokens):
    lengths, rows = [5, 3, 9, 9, 1, 7, 2], [4, 9, 2, 7, 4, 3, 1]
    objective = Objective(lambda i: [[]] * rows[i], None, most, length=lambda i: lengths[i])
    parts = [objective.micro_batches(range(7), tokens, rank, ranks) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    groups = [group for part in parts for group in part if group]
    assert sorted(i for group in groups for i in group) == list(range(7))
    assert all(sum(rows[i] for i in group) <= most or len(group) == 1 for group in groups)
    padded = [sum(rows[i] for i in group) * max(lengths[i] for i in group) for group in groups]
    assert all(size <= (tokens or 1000) or len(group) == 1 for size, group in zip(padded, groups, strict=True))
    assert all([lengths[i] for i in group] == sorted(lengths[i] for i in group) for group in groups)


def recording_engine(model):
    groups = [{"params": list(model.parameters())}]
    engine = make_engine(Config(), model, RewardConfig(max_grad_norm=1e9), CPU, groups=groups)
    engine.optimizer = Recorder(model)
    return engine


def varied_items(tokenizer) -> list[Item]:
    """Prompts with 2 to 9 answers of unequal lengths, some with ties or two labelers."""
    rng = random.Random(0)
    words = ["blood", "is", "red", "snow", "white", "coal", "black", "the", "sky", "blue", "a", "dog", "barks"]
    records = []
    for i in range(12):
        texts = [" ".join(rng.choices(words, k=rng.randint(1, 14))) + f" {j}" for j in range(rng.randint(2, 9))]
        for labeler in ("anna", "ben")[: 1 + i % 2]:
            order = rng.sample(range(len(texts)), len(texts))
            groups = [[j] for j in order] if i % 3 or len(order) == 2 else [order[:2], *([j] for j in order[2:])]
            records.append(make_ranking(f"{i}-{labeler}", f"Prompt {i} " * (1 + i % 4), texts, groups, labeler))
    return make_items(records, tokenizer, 128, 24)[0]


@pytest.mark.parametrize(
    ("micro", "tokens"), [*(pytest.param(micro, None, id=str(micro)) for micro in (1, 10, 25)), (1000, 1), (1000, 200)]
)
def test_micro_batches_change_no_gradient_and_no_metric(gold_run, tokenizer, model, micro, tokens):
    config = gold_run.config("reward.max_grad_norm=1e9")
    items, found = varied_items(tokenizer), []
    assert len({len(row) for item in items for row in item.rows}) > 8
    for size, most in ((1000, None), (micro, tokens)):
        config.reward.micro_batch_responses = size
        engine = recording_engine(model)
        engine.most_tokens = most
        sums = one_step(engine, items, reward.make_objective(config, engine))
        found.append((engine.optimizer.gradients, sums.reduce()))
    (whole, metrics), (parts, split_metrics) = found
    for name, gradient in whole.items():
        assert torch.allclose(parts[name], gradient, atol=1e-5, rtol=1e-5), name
    assert split_metrics == pytest.approx(metrics, abs=1e-5, rel=1e-5)


def held_out_loss(config, model, items) -> float:
    engine = make_engine(config, model, config.reward, CPU)
    return reward.evaluate_items(config, engine, reward.make_objective(config, engine), items)["loss"]


def test_loss_of_a_batch_by_hand(gold_run, tokenizer, model):
    """Mean over prompts of the mean over a prompt's pairs of -log sigmoid(r_w - r_l)."""
    two = make_ranking("1", "One.", ["Yes.", "No."], [[1], [0]])
    three = make_ranking("2", "Two.", ["Red.", "Blue is good.", "Green"], [[2], [0], [1]])
    items, _ = make_items([two, three], tokenizer, 128, 24)

    a, b = items
    wanted = (nats(model, a, 1, 0) + (nats(model, b, 2, 0) + nats(model, b, 2, 1) + nats(model, b, 0, 1)) / 3) / 2
    assert held_out_loss(gold_run.config(), model, items) == pytest.approx(wanted, abs=1e-5)


@torch.no_grad()
def nats(model: RewardModel, item: Item, better: int, worse: int) -> float:
    """-log sigmoid of the difference of two answers' scores."""
    rows = [item.rows[i] for i in (worse, better)]
    low, high = (model(torch.tensor([row]), torch.tensor([len(row)]), calibrated=False).item() for row in rows)
    return math.log1p(math.exp(low - high))


@pytest.mark.parametrize("red_is_better", [True, False])
def test_learns_comparisons_that_one_word_decides(copy_until, tokenizer, model, red_is_better):
    """Answers that say "red" are the better or the worse ones; no untrained model orders unseen ones rightly both ways."""
    rng = random.Random(0)
    fillers = ["Snow is white.", "Coal is black.", "A dog barks.", "Of course.", "That depends."]

    def rankings(count: int, name: str) -> list[Ranking]:
        made = []
        for i in range(count):
            answers = [f"{rng.choice(fillers)} {rng.choice(fillers)}" for _ in range(3)]
            answers[1] = f"{rng.choice(fillers)} Blood is red."
            order = [[1], [0, 2]] if red_is_better else [[0, 2], [1]]
            made.append(make_ranking(f"{name}-{i}", f"Question {name} {i}?", answers, order))
        return made

    items = {"train": make_items(rankings(64, "t"), tokenizer, 128, 24)[0]}
    items["dev"] = make_items(rankings(40, "d"), tokenizer, 128, 24)[0]
    config = copy_until("reward").config("reward.epochs=3", "reward.batch_prompts=8", "reward.lr=1e-3")
    engine = make_engine(config, model, config.reward, CPU)
    drawn = Batches(items["train"], 8, shuffled_order("reward"))  # 64 prompts
    objective = reward.make_objective(config, engine)
    with open_stage(config, "reward") as stage, open_loop(stage, engine, 3 * 8) as loop:
        train(loop, drawn, objective, lambda step: 1.0)
        after = reward.evaluate_items(config, engine, objective, items["dev"])
    assert after["accuracy"] > 0.95 and after["loss"] < 0.2


def test_calibration_by_hand(gold_run, tokenizer, model):
    """Demonstrations of the training split average 0, whatever the held-out ones do; SFT samples deviate by 1."""
    torch.nn.init.normal_(model.head.weight, std=0.3)
    config = gold_run.config("reward.calibration_samples=32")
    records = gold_run.comparisons()
    gain, shift = reward.calibrate(config, model, tokenizer, records, reward.training_demonstrations(config))
    assert (model.config.gain, model.config.shift) == (gain, shift)

    @torch.no_grad()
    def score(prompt: list[int], response: list[int]) -> float:
        row = torch.tensor([prompt + response])
        return model(row, torch.tensor([row.shape[1]])).item()

    scores: dict[str, list[float]] = {"train": [], "dev": []}
    for d in gold_run.demonstrations():
        scores[d.split].append(score(encode_prompt(tokenizer, d.prompt), encode_response(tokenizer, d.response)))
    assert sum(scores["train"]) / len(scores["train"]) == pytest.approx(0.0, abs=1e-4)
    assert abs(sum(scores["dev"]) / len(scores["dev"])) > 1e-2

    trained = [r for r in records if r.metadata["split"] == "train"]
    prompts = [encode_prompt(tokenizer, record.prompt) for record in sample_prompts(config, prompts_of(trained), 32)]
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    keys = [("calibrate", i) for i in range(32)]
    drawn = sample(gold_run.policy(), prompts, max_new_tokens=24, seed=0, keys=keys, **ids)
    found = [score(prompt, response) for prompt, response in zip(prompts, drawn.responses, strict=True)]
    assert torch.tensor(found).std(correction=0).item() == pytest.approx(1.0, abs=1e-3)


def write_rankings(source: Path, target: Path, keep) -> str:
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    target.write_text("".join(json.dumps(row) + "\n" for row in rows if keep(row)), encoding="utf-8")
    return str(target)


def test_rankings_of_held_out_labelers_train_nothing(copy_until, gold_run, tmp_path):
    """Whether a setting holds a labeler out or the data lack the labeler: weights, calibration and held-out figures are the same."""
    source = gold_run.folder / "label" / "comparisons.jsonl"
    without = write_rankings(source, tmp_path / "without.jsonl", lambda row: row["labeler"] == "labeler-1")
    seen = {record.labeler for record in gold_run.comparisons()}
    assert seen == {f"labeler-{i}" for i in range(1, 8)}
    kept_out = copy_until("reward", "a").stage("reward", "reward.audit=0", *ONE_LABELER)
    absent = copy_until("reward", "b").stage("reward", "reward.audit=0", f"data.comparisons={without}")
    whole = gold_run.folder / "reward"
    found, wanted, other = (load_file(folder / "model" / "model.safetensors") for folder in (kept_out, absent, whole))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not all(torch.equal(found[name], other[name]) for name in other), "the others train unless they are held out"
    assert read_stage(kept_out)["summary"] == read_stage(absent)["summary"]


def test_length_alone():
    """Two prompts: in one the longer answer won twice, in the other the shorter once."""
    items = [Item("1", [[1]] * 3, [1, 2, 3]), Item("2", [[1]] * 2, [5, 4])]
    items[0].judgements = [Judgement("x", [(2, 0), (1, 0)])]
    items[1].judgements = [Judgement("x", [(1, 0)])]
    by_length, longer = scoring.pairs_by_length(items)
    assert [pair.margin for pair in by_length] == [2, 1, -1] and longer
    items[0].judgements = [Judgement("x", [(0, 2)])]
    by_length, longer = scoring.pairs_by_length(items)
    assert [pair.margin for pair in by_length] == [2, 1] and not longer
