"""The whole recipe on a small gold world: what it writes, what it learned, and what can be done with it."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rlhf.config import Config
from rlhf.data.reading import load_demonstrations
from rlhf.data.records import Demonstration
from rlhf.data.splits import record_split
from rlhf.data.tokenizer import load_tokenizer
from rlhf.evaluation.policies import costs
from rlhf.gold.truth import WEIGHTS
from rlhf.runs.folders import is_complete, read_stage
from rlhf.runs.run_files import read_jsonl
from rlhf.runs.sources import fractions
from rlhf.training.setup import load_policy

from .conftest import GOLD_STAGES, Run

POLICIES = {"base", "base_prompted", "sft", "ppo"}


@pytest.fixture(scope="module")
def results(gold_run: Run) -> dict:
    return json.loads((gold_run.folder / "evaluate" / "results.json").read_text())


def rate_is_sound(rate: dict) -> bool:
    low, high = rate["ci95"]
    return 0 <= rate["value"] <= 1 and low <= rate["value"] <= high and rate["n"] > 0


def training_demonstrations(run: Run) -> list[Demonstration]:
    records = load_demonstrations(str(run.folder / "world" / "demonstrations.jsonl"))[0]
    shares = fractions(run.config())
    return [record for record in records if record_split(record, 0, shares) == "train"]


# --- what is written -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", GOLD_STAGES)
def test_every_stage_leaves_a_complete_record(gold_run, stage):
    folder = gold_run.folder / stage
    record = read_stage(folder)
    assert is_complete(folder) and record["stage"] == stage and record["seed"] == 0
    assert record["seconds"] > 0 and record["peak_rss_mb"] > 1
    assert len(record["hash"]) == 64 and record["versions"]["torch"]
    for parent, digest in record["parents"].items():
        assert read_stage(gold_run.folder / parent)["hash"] == digest
    assert not (folder / "checkpoints").exists(), "a complete stage keeps no checkpoints"
    assert (folder / "config.yaml").is_file()


@pytest.mark.parametrize(
    "until", ["label", pytest.param("world", marks=pytest.mark.long)]
)  # long: trains every stage once more
def test_equal_runs_have_equal_hashes(gold_run, copy_until, until):
    """Of another name, in another folder, at another time; evaluate's results contain the seconds that stages took."""
    run, stages = copy_until(until, "another-name"), GOLD_STAGES[GOLD_STAGES.index(until) : -1]
    for stage in stages[:2] if until == "label" else stages:
        run.stage(stage)
        ours, theirs = read_stage(run.folder / stage), read_stage(gold_run.folder / stage)
        assert ours["files"] == theirs["files"], stage
        assert ours["hash"] == theirs["hash"], stage


def test_results_of_the_gold_world(results):
    gold = results["gold"]
    for name in ("win_rate_vs_sft", "win_rate_greedy"):
        assert rate_is_sound(gold[name]) and gold[name]["n"] == 40
    assert set(gold["mean_score"]) == set(gold["parts"]) == POLICIES
    for policy, parts in gold["parts"].items():
        assert set(parts) == set(WEIGHTS)
        assert all(0 <= value <= 1 for value in parts.values())
        total = sum(WEIGHTS[part] * value for part, value in parts.items())
        assert gold["mean_score"][policy] == pytest.approx(total, abs=1e-3)


def test_a_replacement_under_way_is_no_stage_of_the_run(tmp_path):
    for name in ("sft", "evaluate", ".evaluate.new"):
        folder = tmp_path / "x" / name
        folder.mkdir(parents=True)
        record = {"stage": name, "status": "running", "settings": {}, "parents": {}, "data": {}, "seconds": 1.0}
        (folder / "stage.json").write_text(json.dumps(record), encoding="utf-8")
    assert costs(Config(run="x", runs_dir=str(tmp_path)))["seconds"] == {"sft": 1.0}


def test_other_results(results, gold_run):
    assert math.isfinite(results["kl_to_sft_nats"]) and set(results["reward"]) >= {"sft", "ppo"}
    summary = read_stage(gold_run.folder / "pretrain")["summary"]
    assert results["pretrain_bits_per_byte"] == summary["bpb"] and results["seed"] == 0
    assert set(results["seconds"]) == set(GOLD_STAGES)
    assert all(seconds >= 0 for seconds in results["seconds"].values())
    assert set(results["peak_rss_mb"]) >= set(GOLD_STAGES) - {"evaluate"}


@pytest.mark.parametrize(
    ("stage", "steps", "names"),
    [
        ("pretrain", 73, {"pretrain/loss", "optim/lr", "optim/grad_norm", "time/tokens_per_s"}),
        ("sft", None, {"sft/loss", "optim/lr", "optim/grad_norm"}),
        ("reward", 5, {"reward/loss", "reward/accuracy", "reward/margin", "reward/mean", "reward/std"}),
        ("ppo", 3, {
            "objective/kl", "objective/kl_k3", "objective/scores", "objective/non_score_reward", "objective/rlhf_reward",
            "objective/entropy", "objective/kl_coef", "policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg",
            "policy/ratio_max", "loss/policy_avg", "loss/value_avg", "val/clipfrac_avg", "val/explained_var",
            "rollout/eos_fraction", "rollout/response_len", "rollout/tokens_per_s", "time/rollout_s", "time/score_s",
            "time/update_s", "time/tokens_per_s", "progress/episodes",
        }),
    ],
)  # fmt: skip
def test_metrics_of_each_stage(gold_run, stage, steps, names):
    rows = [row for row in read_jsonl(gold_run.folder / stage / "metrics.jsonl") if names <= row.keys()]
    if stage == "ppo":  # the first update trains the critic alone
        rows = list(read_jsonl(gold_run.folder / stage / "metrics.jsonl"))
        assert names <= rows[-1].keys()
    if steps is None:  # two epochs of the demonstrations that are not held out
        steps = 2 * -(-len(training_demonstrations(gold_run)) // 32)
    assert [row["progress/step"] for row in rows if row["progress/step"]] == list(range(1, steps + 1))
    assert all(value is None or math.isfinite(value) for row in rows for value in row.values())


def test_first_update_of_ppo_starts_at_the_sft_model(gold_run):
    first, *_, last = (r for r in read_jsonl(gold_run.folder / "ppo" / "metrics.jsonl") if "objective/kl" in r)
    assert abs(first["objective/kl"]) < 1e-3
    assert first["objective/rlhf_reward"] == pytest.approx(
        first["objective/scores"] + first["objective/non_score_reward"], abs=1e-6
    )
    assert 0 <= last["policy/entropy_avg"] <= math.log(768)
    assert last["progress/episodes"] == 192


# --- what was learned ----------------------------------------------------------------------------------------------


def test_pretraining_beats_the_unigram_model(gold_run):
    """Bits per byte of a model that knows the frequencies of the held-out tokens themselves, and nothing else."""
    from rlhf.data.corpus import PackedCorpus
    from rlhf.data.tokenizer import token_byte_lengths

    corpus = PackedCorpus.load(gold_run.folder / "pretrain" / "corpus")
    tokenizer = load_tokenizer(gold_run.folder / "pretrain" / "model")
    counts = Counter(t for t in corpus.tokens("heldout").tolist() if t != corpus.separator)
    total, sizes = sum(counts.values()), token_byte_lengths(tokenizer)
    bits = -sum(n * math.log2(n / total) for n in counts.values())
    unigram = bits / sum(n * sizes[token] for token, n in counts.items())
    uniform = math.log2(len(tokenizer)) * total / sum(n * sizes[token] for token, n in counts.items())
    found = read_stage(gold_run.folder / "pretrain")["summary"]["bpb"]
    assert unigram < uniform
    assert found < 0.6 * unigram, f"{found} bits per byte, a unigram model has {unigram}"


def test_sft_lowers_the_loss_of_responses_to_prompts_it_has_not_seen(gold_run):
    from rlhf.data.encoding import encode_demonstrations
    from rlhf.gold.corpus import demonstration_rows
    from rlhf.stages.sft import response_loss

    tokenizer = load_tokenizer(gold_run.folder / "sft" / "model")
    path = gold_run.runs_dir / "unseen.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in demonstration_rows(99, 0, 60)))
    rows = encode_demonstrations(load_demonstrations(str(path))[0], tokenizer, 128)
    base, sft = (response_loss(load_policy(gold_run.folder / s / "model"), rows, 0) for s in ("pretrain", "sft"))
    assert sft < base - 0.5, f"{sft} nats per token, the base has {base}"


# --- the reward model's calibration --------------------------------------------------------------------------------


# --- what can be done with it --------------------------------------------------------------------------------------


def test_chat_answers_one_message(gold_run, capsys):
    from rlhf.commands.chat import run

    run(gold_run.config("chat.message='What is the capital of France?'", "chat.greedy=true"))
    first = capsys.readouterr().out
    assert first.strip() and "<|" not in first
    run(gold_run.config("chat.message='What is the capital of France?'", "chat.greedy=true"))
    assert capsys.readouterr().out == first


def test_chat_keeps_to_the_context_however_long_the_dialogue(gold_run, monkeypatch):
    import io

    from rlhf.commands import chat

    answers, answer = [], chat.answer
    monkeypatch.setattr(chat, "answer", lambda *given: answers.append(answer(*given)) or answers[-1])
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(["Tell me about the dog. " * 20] * 3) + "\n"))
    chat.run(gold_run.config())
    assert len(answers) == 3 and all(isinstance(text, str) for text in answers)


@pytest.mark.parametrize(
    ("shell", "said"),
    [
        ("<&-", "chat: standard input is closed"),
        ("< bytes", "chat: the message is not UTF-8"),
        ("< bytes LC_ALL=C", "chat: the message is not UTF-8"),
    ],
)
def test_chat_with_an_input_that_cannot_be_read_is_one_line(gold_run, tmp_path, shell, said):
    (tmp_path / "bytes").write_bytes(b"caf\xe9\n")
    redirect = shell.removesuffix(" LC_ALL=C")
    locale = {"LC_ALL": "C"} if "LC_ALL" in shell else {}
    done = subprocess.run(
        [
            "sh",
            "-c",
            f'"$0" -m rlhf chat run=gold runs_dir="$1" device=cpu {redirect}',
            sys.executable,
            gold_run.runs_dir,
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path.cwd())} | locale,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert said in done.stderr


def test_results_of_the_reward_model(results):
    rm = results["reward_model"]
    assert rate_is_sound(rm["accuracy"])
    assert all(0 <= rm[name] <= 1 for name in ("noise_ceiling", "gold_order_accuracy", "labeler_agreement"))
    assert 0.5 <= rm["length_baseline"] <= 1
    assert rm["noise_ceiling"] > 0.6, "labelers follow the truth more often than not"
    assert rm["calibration"]
    for row in rm["calibration"]:
        assert row["gap"] >= 0 and 0.5 <= row["predicted"] <= 1 and 0 <= row["observed"] <= 1 and row["n"] > 0
    assert [row["gap"] for row in rm["calibration"]] == sorted(row["gap"] for row in rm["calibration"])
    assert sum(row["n"] for row in rm["calibration"]) == rm["accuracy"]["n"]


def test_evaluation_uses_test_prompts_only(gold_run):
    rows = list(read_jsonl(gold_run.folder / "evaluate" / "samples.jsonl"))
    assert len(rows) == 40 and all(row["id"].startswith("p-test-") for row in rows)
    trained_on = {row["prompt"] for row in read_jsonl(gold_run.folder / "ppo" / "samples.jsonl")}
    assert not trained_on & {row["prompt"] for row in rows}


def test_calibration_is_carried_by_the_checkpoint(gold_run):
    """What it is: tests/stages/test_reward.py."""
    from rlhf.model.heads import RewardModel

    model = RewardModel.from_pretrained(str(gold_run.folder / "reward" / "model")).eval()
    summary = read_stage(gold_run.folder / "reward")["summary"]
    assert model.config.gain == pytest.approx(summary["gain"]) and model.config.shift == pytest.approx(summary["shift"])
    assert model.config.gain != 1.0 and model.config.shift != 0.0
