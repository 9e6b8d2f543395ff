import json
import math
from typing import Any, NamedTuple

import pytest
import torch

from rlhf.config import Config
from rlhf.data.encoding import Item, join_rankings, token_encoder
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import UserError
from rlhf.ppo.models import Reference
from rlhf.report.page import make_page
from rlhf.runs.folders import hash_of
from rlhf.runs.metric_table import Sums
from rlhf.runs.run_files import read_run
from rlhf.stages import dpo
from rlhf.stages.evaluate import tuned_policies
from rlhf.training.engine import Engine, make_engine
from rlhf.training.setup import load_policy
from tests.oracles import row_logprobs

from .conftest import ONE_LABELER
from .test_resume import EVERY_STEP, assert_same_weights, interrupt
from .test_reward import make_ranking

BETA = 0.3
CPU = torch.device("cpu")


# a > b = c > d: five ordered pairs, and a prompt of one pair
RANKINGS = [
    make_ranking("one", "What colour?", ["Blue.", "It is green, I think.", "Red", "A dog ran."], [[0], [1, 2], [3]]),
    make_ranking("two", "Hi", ["Hello to you!", "No"], [[1], [0]]),
]


class Trained(NamedTuple):
    """A policy that has left its reference, and items to train it on."""

    policy: Any
    reference: Any
    tokenizer: Any
    items: list[Item]
    engine: Engine
    config: Config

    def loss(self, items: list[Item], count: int, sums: Sums | None = None) -> float:
        pad = self.tokenizer.pad_token_id
        objective = dpo.make_objective(self.config, self.engine, Reference(self.reference), pad)
        with torch.no_grad():
            return objective.loss(items, count, Sums() if sums is None else sums)[0].item()


@pytest.fixture
def trained(gold_run) -> Trained:
    config, folder = gold_run.config(f"dpo.beta={BETA}"), gold_run.folder / "sft" / "model"
    tokenizer, model = load_tokenizer(folder), load_policy(folder)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    items, _ = join_rankings(RANKINGS, token_encoder(tokenizer, 64, 24))
    engine = make_engine(config, Reference(model), config.dpo, CPU, groups=[{"params": list(model.parameters())}])
    return Trained(model, load_policy(folder), tokenizer, items, engine, config)


def log_ratio(trained: Trained, item: Item, number: int) -> float:
    """log pi(y|x) - log pi_sft(y|x) of one answer by itself."""
    answer, first = item.rows[number], len(item.rows[number]) - item.lengths[number]
    return sum(row_logprobs(trained.policy, answer, first)) - sum(row_logprobs(trained.reference, answer, first))


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def test_the_loss_is_that_of_every_ordered_pair_each_prompt_weighing_one(trained):
    items = trained.items
    r = [[BETA * log_ratio(trained, item, i) for i in range(len(item.rows))] for item in items]
    pairs = [[(0, 1), (0, 2), (0, 3), (1, 3), (2, 3)], [(1, 0)]]
    each = [sum(softplus(s[j] - s[i]) for i, j in found) / len(found) for s, found in zip(r, pairs, strict=True)]
    assert abs(r[0][0]) > 0.01, "the policy has left its reference"
    sums = Sums()
    assert trained.loss(items, 2, sums) == pytest.approx(sum(each) / 2, abs=1e-5)
    parts = [trained.loss([item], 2) for item in items]
    assert sum(parts) == pytest.approx(sum(each) / 2, abs=1e-5), "however the batch is split"
    margins = [s[i] - s[j] for s, found in zip(r, pairs, strict=True) for i, j in found]
    assert sums.reduce()["dpo/accuracy"] == pytest.approx(sum(m > 0 for m in margins) / 6)
    assert sums.reduce()["dpo/margin"] == pytest.approx(sum(margins) / 6, abs=1e-5)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "smoothed"])
def test_on_single_pairs_the_loss_is_trls_own(trained, tmp_path, kind):
    """Of a prompt with two answers; TRL's trainer computes its reference from the model that it is given. A smoothed loss is
    TRL's of the pair and of its reverse.
    """
    import datasets
    from trl import DPOConfig, DPOTrainer

    item = trained.items[1]
    first = [len(row) - length for row, length in zip(item.rows, item.lengths, strict=True)]
    worse, better = ({"ids": row[start:], "prompt": row[:start]} for row, start in zip(item.rows, first, strict=True))
    row = {"prompt_ids": better["prompt"], "chosen_ids": better["ids"], "rejected_ids": worse["ids"]}
    reverse = row | {"chosen_ids": worse["ids"], "rejected_ids": better["ids"]}
    loss, eps = "ipo" if kind == "ipo" else "sigmoid", 0.2 if kind == "smoothed" else 0.0
    trained.config.dpo.loss, trained.config.dpo.label_smoothing = loss, eps
    plain = {"report_to": "none", "use_cpu": True, "bf16": False, "max_length": None}
    arguments = DPOConfig(output_dir=str(tmp_path), beta=BETA, loss_type=[loss], **plain)
    some = datasets.Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    more = {"train_dataset": some, "processing_class": trained.tokenizer}
    trainer = DPOTrainer(trained.policy, trained.reference, arguments, **more)
    with torch.no_grad():
        theirs, other = (
            trainer.compute_loss(trained.policy, trainer.data_collator([one])).item() for one in (row, reverse)
        )
    assert abs(theirs - other) > 1e-3
    wanted = (1 - eps) * theirs + eps * other
    assert trained.loss([item], 1) == pytest.approx(wanted, abs=1e-5), "TRL unembeds the prompt too"


def test_it_learns_the_training_pairs(copy_until, tmp_path):
    """Of 20 prompts, from a half at random to more than nine tenths; the SFT model stays what it was."""
    run = copy_until("reward")
    rows = [json.loads(row) for row in (run.folder / "label" / "comparisons.jsonl").read_text().splitlines()]
    train = [row for row in rows if row["metadata"]["split"] == "train"][:20]
    kept = [*train, *(row for row in rows if row["metadata"]["split"] == "dev")]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    before = (run.folder / "sft" / "model" / "model.safetensors").read_bytes()
    settings = ["dpo.lr=1e-3", "dpo.batch_prompts=5", "dpo.epochs=16", "checkpoints.every_seconds=1000"]
    run.stage("dpo", *settings, f"data.comparisons={tmp_path}/few.jsonl")
    accuracy, loss = ([value for _, value in run.values("dpo", f"dpo/{name}")] for name in ("accuracy", "loss"))
    assert accuracy[0] == 0.5 and loss[0] == pytest.approx(math.log(2), abs=1e-6), "it is its reference"
    assert sum(accuracy[-4:]) / 4 > 0.9 and sum(loss[-4:]) / 4 < 0.4
    assert (run.folder / "sft" / "model" / "model.safetensors").read_bytes() == before
    assert run.record("dpo")["summary"]["accuracy"] == run.values("dpo", "eval/dev/accuracy")[-1][1]
    assert run.policy("dpo").config.dropout == 0.0


def test_the_same_resumed_and_however_a_batch_is_split(copy_until):
    """25 prompts in batches of 10, the last of 5, in parts of 10 and of 3; and resumed after the second step."""
    whole, parts, broken = (copy_until("reward", name) for name in ("whole", "parts", "broken"))
    settings = ["dpo.batch_prompts=10", "dpo.lr=1e-4", "dpo.epochs=1", *ONE_LABELER]
    whole.stage("dpo", *settings, "dpo.micro_batch_prompts=10")
    parts.stage("dpo", *settings, "dpo.micro_batch_prompts=3")
    for name in ("dpo/loss", "optim/grad_norm"):
        one, two = ([value for _, value in run.values("dpo", name)] for run in (whole, parts))
        assert len(one) == 3 and one == pytest.approx(two, abs=1e-5)

    interrupt(broken, "dpo", 2, *settings, "dpo.micro_batch_prompts=10")
    assert not list((broken.folder / "dpo" / "checkpoints").rglob("*.pt")), "no pickles"
    broken.stage("dpo", EVERY_STEP, *settings, "dpo.micro_batch_prompts=10")
    assert_same_weights(whole.folder / "dpo", broken.folder / "dpo", "model/model.safetensors")
    one, two = (run.values("dpo", "dpo/loss") for run in (whole, broken))
    assert [step for step, _ in two] == [1, 2, 3] and one == two
    assert whole.record("dpo")["summary"] == broken.record("dpo")["summary"]


@pytest.mark.long  # test_sentiment.py and test_gold_dialogue.py evaluate baselines
def test_evaluation_and_report_put_it_beside_ppo(gold_run, tmp_path):
    """The rows that were there before stay what they were; one built on another SFT model is left out."""
    run = gold_run.copy(tmp_path, "evaluate")
    run.stage("dpo", "dpo.batch_prompts=20", "dpo.lr=1e-3")
    run.stage("rejection", "rejection.prompts=30", "rejection.samples=4")
    run.stage("evaluate")
    results, before, record = run.results(), gold_run.results(), run.record("rejection")
    for part in ("reward", "reward_without_eos_rule", "ended"):
        assert before[part].items() <= results[part].items()
        assert set(results[part]) == {"sft", "ppo", "rejection", "dpo"}
    for part in ("win_rate_vs_sft", "win_rate_greedy"):
        assert results["gold"][part] == before["gold"][part]
    assert before["gold"]["mean_score"].items() <= results["gold"]["mean_score"].items()
    for part in ("kl_to_sft_nats", "rm_win_rate_vs_sft", "best_of_n"):
        assert results[part] == before[part]
    assert set(results["baselines"]) == {"rejection", "dpo"}
    assert results["baselines"]["rejection"]["stage"] == record["hash"]
    row = results["baselines"]["dpo"]
    assert row["kl_to_sft_nats"] > 0
    assert all(0 <= row[name]["value"] <= 1 for name in ("rm_win_rate_vs_sft", "win_rate_vs_sft"))

    page = make_page(read_run(run.folder))
    assert "PPO and its baselines" in page and f"{row['kl_to_sft_nats']:.3f}" in page and "<td>DPO</td>" in page
    assert "PPO and its baselines" not in make_page(read_run(gold_run.folder))

    other = run.record("dpo") | {"parents": {"sft": "0" * 64}}
    (run.folder / "dpo" / "stage.json").write_text(json.dumps(other | {"hash": hash_of(other)}))
    said: list[str] = []
    assert list(tuned_policies(run.config(), said.append)) == ["rejection", "ppo"]
    assert "another SFT model" in said[0]
    (run.runs_dir / "other" / "ppo").mkdir(parents=True)
    with pytest.raises(UserError, match=r"evaluate.compare=other: want .* another run"):
        run.stage("evaluate", "evaluate.compare=other", "overwrite=true")
