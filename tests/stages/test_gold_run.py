import io
import json
import math
from collections import Counter

import pytest

from rlhf.commands import chat
from rlhf.data.corpus import PackedCorpus
from rlhf.data.encoding import encode_demonstrations
from rlhf.data.reading import load_demonstrations
from rlhf.data.splits import record_split
from rlhf.data.tokenizer import token_byte_lengths
from rlhf.gold.corpus import demonstration_rows
from rlhf.gold.truth import WEIGHTS
from rlhf.runs.folders import is_complete, read_stage
from rlhf.runs.run_files import read_jsonl
from rlhf.runs.sources import fractions
from rlhf.stages.sft import response_loss

from .conftest import GOLD_STAGES, Run

POLICIES = {"base", "base_prompted", "sft", "ppo"}


@pytest.fixture(scope="module")
def results(gold_run: Run) -> dict:
    return gold_run.results()


def rate_is_sound(rate: dict) -> bool:
    low, high = rate["ci95"]
    return 0 <= rate["value"] <= 1 and low <= rate["value"] <= high and rate["n"] > 0


def test_every_stage_leaves_a_complete_record(gold_run):
    for stage in GOLD_STAGES:
        folder = gold_run.folder / stage
        record = read_stage(folder)
        assert is_complete(folder) and record["stage"] == stage and record["seed"] == 0
        assert record["seconds"] > 0 and record["peak_rss_mb"] > 1
        assert len(record["hash"]) == 64 and record["versions"]["torch"]
        for parent, digest in record["parents"].items():
            assert gold_run.record(parent)["hash"] == digest
        assert not (folder / "checkpoints").exists(), "a complete stage keeps no checkpoints"
        assert (folder / "config.yaml").is_file()


@pytest.mark.long  # trains every stage once more; the reward model alone: test_pipeline.py
def test_equal_runs_have_equal_hashes(gold_run, copy_until):
    """Of another name, in another folder, at another time; evaluate's results contain the seconds that stages took."""
    run = copy_until("world", "another-name")
    for stage in GOLD_STAGES[:-1]:
        run.stage(stage)
        ours, theirs = run.record(stage), gold_run.record(stage)
        assert (ours["files"], ours["hash"]) == (theirs["files"], theirs["hash"]), stage


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


def test_every_step_of_each_stage_is_logged_and_ppo_starts_at_the_sft_model(gold_run):
    first, *_, last = (r for r in read_jsonl(gold_run.folder / "ppo" / "metrics.jsonl") if "objective/kl" in r)
    assert abs(first["objective/kl"]) < 1e-3
    wanted = first["objective/scores"] + first["objective/non_score_reward"]
    assert first["objective/rlhf_reward"] == pytest.approx(wanted, abs=1e-6)
    assert 0 <= last["policy/entropy_avg"] <= math.log(768)
    assert last["progress/episodes"] == 192
    # What PPO logs: test_ppo_metrics.py. SFT takes two epochs of the demonstrations that are not held out.
    shares = fractions(gold_run.config())
    train = [record for record in gold_run.demonstrations() if record_split(record, 0, shares) == "train"]
    steps = {"pretrain": 73, "sft": 2 * -(-len(train) // 32), "reward": 5, "ppo": 3}
    for stage, count in steps.items():
        named = {f"{stage}/loss", "optim/lr", "optim/grad_norm"}
        named = {"objective/kl", "progress/episodes"} if stage == "ppo" else named
        rows = list(read_jsonl(gold_run.folder / stage / "metrics.jsonl"))
        assert [row["progress/step"] for row in rows if named <= row.keys()] == list(range(1, count + 1)), stage
        assert all(value is None or math.isfinite(value) for row in rows for value in row.values())


def test_pretraining_beats_the_unigram_model(gold_run):
    corpus = PackedCorpus.load(gold_run.folder / "pretrain" / "corpus")
    tokenizer = gold_run.tokenizer("pretrain")
    counts = Counter(t for t in corpus.tokens("heldout").tolist() if t != corpus.separator)
    total, sizes = sum(counts.values()), token_byte_lengths(tokenizer)
    bits = -sum(n * math.log2(n / total) for n in counts.values())
    unigram = bits / sum(n * sizes[token] for token, n in counts.items())
    uniform = math.log2(len(tokenizer)) * total / sum(n * sizes[token] for token, n in counts.items())
    found = read_stage(gold_run.folder / "pretrain")["summary"]["bpb"]
    assert unigram < uniform
    assert found < 0.6 * unigram, f"{found} bits per byte, a unigram model has {unigram}"


def test_sft_lowers_the_loss_of_responses_to_prompts_it_has_not_seen(gold_run):
    tokenizer = gold_run.tokenizer()
    path = gold_run.runs_dir / "unseen.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in demonstration_rows(99, 0, 60)))
    rows = encode_demonstrations(load_demonstrations(str(path))[0], tokenizer, 128)
    base, sft = (response_loss(gold_run.policy(stage), rows, 0) for stage in ("pretrain", "sft"))
    assert sft < base - 0.5, f"{sft} nats per token, the base has {base}"


def test_chat_keeps_to_the_context_however_long_the_dialogue(gold_run, monkeypatch):
    answers, answer = [], chat.answer
    monkeypatch.setattr(chat, "answer", lambda *given: answers.append(answer(*given)) or answers[-1])
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(["Tell me about the dog. " * 20] * 3) + "\n"))
    chat.run(gold_run.config())
    assert len(answers) == 3 and all(isinstance(text, str) for text in answers)


def test_results_of_any_world_are_of_test_prompts_only(gold_run, results):
    rows = list(read_jsonl(gold_run.folder / "evaluate" / "samples.jsonl"))
    assert len(rows) == 40 and all(row["id"].startswith("p-test-") for row in rows)
    trained_on = {row["prompt"] for row in read_jsonl(gold_run.folder / "ppo" / "samples.jsonl")}
    assert not trained_on & {row["prompt"] for row in rows}
    assert math.isfinite(results["kl_to_sft_nats"]) and set(results["reward"]) >= {"sft", "ppo"}
    assert results["pretrain_bits_per_byte"] == gold_run.record("pretrain")["summary"]["bpb"] and results["seed"] == 0
    assert set(results["seconds"]) == set(GOLD_STAGES) and all(seconds >= 0 for seconds in results["seconds"].values())
    assert set(results["peak_rss_mb"]) >= set(GOLD_STAGES) - {"evaluate"}
    rm = results["reward_model"]
    assert rate_is_sound(rm["accuracy"])
    assert all(0 <= rm[name] <= 1 for name in ("noise_ceiling", "gold_order_accuracy", "labeler_agreement"))
    assert 0.5 <= rm["length_baseline"] <= 1
    assert rm["noise_ceiling"] > 0.6, "labelers follow the truth more often than not"
    assert rm["calibration"] == sorted(rm["calibration"], key=lambda row: row["gap"])
    for row in rm["calibration"]:
        assert row["gap"] >= 0 and 0.5 <= row["predicted"] <= 1 and 0 <= row["observed"] <= 1 and row["n"] > 0
    assert sum(row["n"] for row in rm["calibration"]) == rm["accuracy"]["n"]
