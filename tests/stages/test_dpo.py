"""DPO: its loss against sums by hand and against TRL's own, and what it learns, keeps and resumes."""

import json
import math
from pathlib import Path

import pytest
import torch

from rlhf.data.items import join_rankings, token_encoder
from rlhf.data.records import Message, RankedResponse, Ranking
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import UserError
from rlhf.planning.formulas import frozen_bytes
from rlhf.planning.shapes import make_shape
from rlhf.report.page import make_page
from rlhf.runs.folders import hash_of, read_stage
from rlhf.runs.run_files import read_jsonl, read_run
from rlhf.runs.stage import open_stage
from rlhf.stages import dpo, evaluate
from rlhf.stages.evaluate import finished_baselines
from rlhf.training.setup import load_policy

from .test_resume import EVERY_STEP, assert_same_weights, interrupt, values_by_step

BETA = 0.3
QUICK = ["dpo.lr=1e-3", "dpo.batch_prompts=20", "checkpoints.every_seconds=1000"]


def ranking(key: str, prompt: str, texts: list[str], order: list[list[str]]) -> Ranking:
    """order: names (a, b, …) best first; names of one list are tied."""
    return Ranking(
        id=key,
        prompt=[Message(role="user", content=prompt)],
        ranking=order,
        responses=[RankedResponse(id="abcdef"[i], text=text) for i, text in enumerate(texts)],
    )


# a > b = c > d: five ordered pairs, and a prompt of one pair
RANKINGS = [
    ranking(
        "one",
        "What colour is the sky?",
        ["Blue.", "It is green, I think.", "Red", "A dog ran."],
        [["a"], ["b", "c"], ["d"]],
    ),
    ranking("two", "Hi", ["Hello to you!", "No"], [["b"], ["a"]]),
]


@pytest.fixture
def trainer(copy_until, tmp_path):
    """Over RANKINGS, with a policy that has left its reference."""
    run = copy_until("reward")
    folder = run.folder / "sft" / "model"
    tokenizer, model = load_tokenizer(folder), load_policy(folder)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    items, _ = join_rankings(RANKINGS, token_encoder(tokenizer, 64, 24))
    rows = [dpo.make_row(item, tokenizer, 40) for item in items]
    with open_stage(run.config(f"dpo.beta={BETA}"), "dpo") as stage:
        yield dpo.make_trainer(stage, model, load_policy(folder), tokenizer, rows, torch.device("cpu"))


def log_ratio(trainer, row: dict, answer: list[int]) -> float:
    """log pi(y|x) - log pi_sft(y|x) of one answer by itself, in float64."""
    total = 0.0
    for model, sign in ((trainer.model, 1), (trainer.ref_model, -1)):
        double = type(model)(model.config).double().eval()
        double.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
        with torch.no_grad():
            logp = double(torch.tensor([answer])).logits[0].log_softmax(-1)
        assert logp.dtype == torch.float64
        total += sign * sum(logp[t - 1, answer[t]].item() for t in range(row["prompt_length"], len(answer)))
    return total


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def test_the_loss_is_that_of_every_ordered_pair_each_prompt_weighing_one(trainer):
    rows = list(trainer.train_dataset)
    r = [[BETA * log_ratio(trainer, row, answer) for answer in row["answers"]] for row in rows]
    pairs = [[(0, 1), (0, 2), (0, 3), (1, 3), (2, 3)], [(1, 0)]]
    each = [sum(softplus(s[j] - s[i]) for i, j in found) / len(found) for s, found in zip(r, pairs, strict=True)]
    assert abs(r[0][0]) > 0.01, "the policy has left its reference"

    inputs = trainer.data_collator(rows)
    with torch.no_grad():
        assert trainer.compute_loss(trainer.model, inputs).item() == pytest.approx(sum(each) / 2, abs=1e-5)
        parts = [
            trainer.compute_loss(trainer.model, trainer.data_collator([row]), num_items_in_batch=2) for row in rows
        ]
    assert sum(part.item() for part in parts) == pytest.approx(sum(each) / 2, abs=1e-5), "however the batch is split"
    margins = [s[i] - s[j] for s, found in zip(r, pairs, strict=True) for i, j in found]
    figures = trainer.sums.reduce()
    assert figures["dpo/accuracy"] == pytest.approx(sum(m > 0 for m in margins) / 6)
    assert figures["dpo/margin"] == pytest.approx(sum(margins) / 6, abs=1e-5)


def test_on_single_pairs_the_loss_is_trls_own(trainer):
    """Of a prompt with two answers; TRL puts the chosen one first."""
    from trl import DPOTrainer

    row = trainer.train_dataset[1]
    inputs = trainer.data_collator([row])
    position = torch.arange(inputs["input_ids"].shape[1])
    completion = inputs["attention_mask"] * (position >= inputs["prompt_lengths"][:, None])
    named = {
        "input_ids": inputs["input_ids"],
        "attention_mask": inputs["attention_mask"],
        "completion_mask": completion,
    }
    swapped = {name: tensor.flip(0) for name, tensor in named.items()}
    with torch.no_grad():
        theirs = DPOTrainer._compute_loss(trainer, trainer.model, swapped, False)
        ours = trainer.compute_loss(trainer.model, inputs)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5), "TRL unembeds the prompt too: other rounding"


def test_the_reference_in_bfloat16_holds_what_is_planned_and_computes_what_float32_weights_do(copy_until):
    run = copy_until("reward")
    config, cpu = run.config("precision=bfloat16"), torch.device("cpu")
    folder = run.folder / "sft" / "model"
    tokenizer, model = load_tokenizer(folder), load_policy(folder)
    reference = dpo.load_reference(config, model, folder, cpu)
    shape = make_shape(config.model, model.config.vocab_size)
    held = sum(p.untyped_storage().nbytes() for p in reference.parameters())
    assert held == frozen_bytes(shape.language_model, shape.linear_layers, 1, 0, "bf16")
    items, _ = join_rankings(RANKINGS, token_encoder(tokenizer, 64, 24))
    rows = [dpo.make_row(item, tokenizer, 40) for item in items]
    scores = []
    for each in (reference, load_policy(folder)):
        with open_stage(config, "dpo") as stage, torch.no_grad():
            trainer = dpo.make_trainer(stage, model, each, tokenizer, rows, cpu)
            with trainer.accelerator.autocast():
                scores.append(trainer.score(model, trainer.data_collator(rows)))
    assert torch.equal(*scores)


def test_labelers_weights_and_ties_reach_the_batch(trainer):
    other = ranking(
        "one",
        "What colour is the sky?",
        ["Blue.", "It is green, I think.", "Red", "A dog ran."],
        [["b"], ["a"], ["c", "d"]],
    ).model_copy(update={"labeler": "anna"})
    items, _ = join_rankings(
        [*RANKINGS, other], token_encoder(trainer.processing_class, 64, 24), labeler_weights={"anna": 0.5}
    )
    batch = trainer.data_collator([dpo.make_row(item, trainer.processing_class, 40) for item in items])
    # 1 for each pair of a > b = c > d, and half for each of b > a > c = d
    assert batch["weights"][0].tolist() == [[0, 1, 1.5, 1.5], [0.5, 0, 0.5, 1.5], [0, 0, 0, 1], [0, 0, 0, 0]]
    assert batch["weights"][1, :2, :2].tolist() == [[0, 0], [1, 0]] and not batch["weights"][1, 2:].any()


def test_prompt_and_padding_are_no_part_of_an_answer(trainer):
    row = trainer.train_dataset[0]
    batch = trainer.data_collator([row])
    fields = (batch[name] for name in ("response_mask", "prompt_lengths", "input_ids"))
    for mask, start, tokens, answer in zip(*fields, row["answers"], strict=True):
        counted = tokens[start:][: len(mask)][mask[: len(tokens) - start]].tolist()
        assert counted == answer[row["prompt_length"] :]
        assert counted[-1] == trainer.processing_class.eos_token_id, "the end token counts"


def test_it_learns_the_training_pairs(copy_until):
    """From a half at random to more than nine tenths, and the SFT model stays what it was."""
    run = copy_until("reward")
    before = (run.folder / "sft" / "model" / "model.safetensors").read_bytes()
    folder = run.stage("dpo", *QUICK, "dpo.epochs=16")
    accuracy = [value for _, value in values_by_step(folder, "dpo/accuracy")]
    loss = [value for _, value in values_by_step(folder, "dpo/loss")]
    assert accuracy[0] == 0.5 and loss[0] == pytest.approx(math.log(2), abs=1e-6), (
        "the policy is its reference at first"
    )
    assert sum(accuracy[-4:]) / 4 > 0.9 and sum(loss[-4:]) / 4 < 0.4
    assert (run.folder / "sft" / "model" / "model.safetensors").read_bytes() == before
    held_out = [row for row in read_jsonl(folder / "metrics.jsonl") if "eval/dev/accuracy" in row]
    assert read_stage(folder)["summary"]["accuracy"] == held_out[-1]["eval/dev/accuracy"]
    assert load_policy(folder / "model").config.dropout == 0.0


def test_the_same_however_a_batch_is_split(copy_until):
    """80 prompts in batches of 32, the last of 16: in parts of 32 and of 4, losses, norms and weights are the same."""
    runs = [copy_until("reward", name) for name in ("whole", "parts")]
    settings = ["dpo.batch_prompts=32", "dpo.lr=1e-4"]
    one, two = (
        run.stage("dpo", *settings, f"dpo.micro_batch_prompts={n}") for run, n in zip(runs, (32, 4), strict=True)
    )
    for name in ("dpo/loss", "optim/grad_norm"):
        values = [[value for _, value in values_by_step(folder, name)] for folder in (one, two)]
        assert len(values[0]) == 3 and values[0] == pytest.approx(values[1], abs=1e-5)


def test_resumed_equals_undisturbed(copy_until):
    whole, broken = copy_until("reward", "whole"), copy_until("reward", "broken")
    settings = ["dpo.batch_prompts=20", "dpo.epochs=2"]  # 8 steps
    whole.stage("dpo", *settings)
    interrupt(broken, "dpo", 5, *settings)
    assert not list(Path(broken.folder / "dpo" / "checkpoints").rglob("*.pt")), "no pickles"
    broken.stage("dpo", EVERY_STEP, *settings)
    assert_same_weights(whole.folder / "dpo", broken.folder / "dpo", "model/model.safetensors")
    one, two = (values_by_step(run.folder / "dpo", "dpo/loss") for run in (whole, broken))
    assert [step for step, _ in two] == list(range(1, 9)) and one == two
    assert read_stage(whole.folder / "dpo")["summary"] == read_stage(broken.folder / "dpo")["summary"]


def test_evaluation_and_report_put_it_beside_ppo(gold_run, tmp_path):
    """The rows that were there before stay what they were; one built on another SFT model is left out."""
    run = gold_run.copy(tmp_path, "evaluate")
    run.stage("dpo", "dpo.batch_prompts=20", "dpo.lr=1e-3")
    run.stage("rejection", "rejection.prompts=30", "rejection.samples=4")
    record = json.loads((run.folder / "rejection" / "stage.json").read_text())
    results = json.loads((run.stage("evaluate") / "results.json").read_text())
    before = json.loads((gold_run.folder / "evaluate" / "results.json").read_text())
    for part in ("reward", "reward_without_eos_rule", "ended"):
        assert before[part].items() <= results[part].items() and set(results[part]) == {
            "sft",
            "ppo",
            "rejection",
            "dpo",
        }
    for part in ("win_rate_vs_sft", "win_rate_greedy"):
        assert results["gold"][part] == before["gold"][part]
    assert before["gold"]["mean_score"].items() <= results["gold"]["mean_score"].items()
    for part in ("kl_to_sft_nats", "rm_win_rate_vs_sft", "best_of_n"):
        assert results[part] == before[part]
    assert set(results["baselines"]) == {"rejection", "dpo"}
    assert results["baselines"]["rejection"]["stage"] == record["hash"]
    row = results["baselines"]["dpo"]
    assert row["kl_to_sft_nats"] > 0 and all(
        0 <= row[name]["value"] <= 1 for name in ("rm_win_rate_vs_sft", "win_rate_vs_sft")
    )

    page = make_page([read_run(run.folder)])
    assert "PPO and its baselines" in page and f"{row['kl_to_sft_nats']:.3f}" in page and "<td>DPO</td>" in page
    assert "PPO and its baselines" not in make_page([read_run(gold_run.folder)])

    (other := run.folder / "dpo" / "stage.json").write_text(
        json.dumps(restamped(json.loads(other.read_text()) | {"parents": {"sft": "0" * 64}}))
    )
    said: list[str] = []
    assert set(finished_baselines(run.config(), said.append)) == {"rejection"}
    assert "another SFT model" in said[0]


def restamped(record: dict) -> dict:
    """The record with the hash of what it holds."""
    return record | {"hash": hash_of(record)}


def test_an_unfinished_policy_to_compare_is_refused_before_anything_is_computed(copy_until, monkeypatch):
    run = copy_until("evaluate")
    (run.runs_dir / "other" / "ppo").mkdir(parents=True)
    monkeypatch.setattr(evaluate, "evaluate_reward_model", None)
    with pytest.raises(UserError, match="no finished ppo there"):
        run.stage("evaluate", "evaluate.compare=other")
