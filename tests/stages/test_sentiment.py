"""experiment=sentiment: from a checkpoint and a text to the report, in completion form, with a lexicon as the truth."""

import json
from pathlib import Path

import pytest
import torch

from rlhf.data.chat_template import end_ids
from rlhf.data.reading import load_comparisons
from rlhf.data.tokenizer import load_tokenizer
from rlhf.model.classifier import load_reward_model
from rlhf.report.page import write_report
from tests.stages.conftest import Run
from tests.stages.test_adopted import save
from tests.stages.test_ppo import open_trainer

ROOT = Path(__file__).parents[2]
STAGES = ("world", "tokenizer", "pretrain", "sft", "label", "reward", "ppo", "rejection", "dpo", "evaluate")
SMALL = [
    "experiment=sentiment", "tracking=jsonl", "device=cpu", "threads=1", "gold.train_prompts=12", "gold.dev_prompts=3",
    "gold.test_prompts=4", "gold.comparison_prompts=8", "gold.comparison_dev_prompts=2", "gold.comparison_test_prompts=3",
    "gold.passage_min_tokens=6", "gold.passage_max_tokens=10", "gold.continuation_tokens=6", "rollout.max_new_tokens=6",
    "reward.calibration_samples=4", "reward.read_tokens=6", "reward.layers=1",
    "reward.batch_prompts=4", "ppo.episodes=8", "ppo.episodes_per_update=4", "ppo.eval_prompts=2", "ppo.micro_batch_episodes=4",
    "rejection.prompts=3", "rejection.samples=2", "dpo.batch_prompts=4", "evaluate.prompts=4", "evaluate.samples=2",
    "evaluate.best_of=2", "lora.rank=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def sentiment_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Every stage, the optional ones too, of a random model of a few thousand parameters."""
    pytest.importorskip("vaderSentiment")
    folder = tmp_path_factory.mktemp("sentiment")
    save(folder / "hf", "llama")
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.md")))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    run = Run(folder, "run", [*SMALL, f"model.pretrained='{folder}/hf'", f"data.corpus='{folder}/text.txt'"])
    for stage in STAGES:
        run.stage(stage)
    return run


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_prompts_are_openings_of_passages_and_their_tokens_are_the_text_alone(sentiment_run):
    tokenizer = load_tokenizer(sentiment_run.folder / "tokenizer" / "model")
    prompts = rows(sentiment_run.folder / "world" / "prompts.jsonl")
    assert [row["metadata"]["split"] for row in prompts] == ["train"] * 12 + ["dev"] * 3 + ["test"] * 4
    lengths = [len(tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]) for row in prompts]
    assert min(lengths) >= 6 and max(lengths) <= 10 and end_ids(tokenizer) == []
    text = " ".join((sentiment_run.runs_dir / "text.txt").read_text(encoding="utf-8").split())
    for row in rows(sentiment_run.folder / "world" / "demonstrations.jsonl"):
        assert row["prompt"] + row["response"] in text


def test_every_response_has_the_fixed_length_and_counts_as_whole(sentiment_run):
    metrics = rows(sentiment_run.folder / "ppo" / "metrics.jsonl")
    assert {row["rollout/response_len"] for row in metrics if "rollout/response_len" in row} == {6.0}
    results = json.loads((sentiment_run.folder / "evaluate" / "results.json").read_text())
    assert set(results["ended"].values()) == {1.0}
    assert results["reward"] == results["reward_without_eos_rule"]
    assert results["text"]["ppo"]["tokens"] == {"value": 6.0, "ci95": None, "n": 4}, "too few for an interval"


@torch.no_grad()
def test_a_value_is_the_share_of_the_score_that_is_to_come(sentiment_run, tmp_path):
    """Before training the critic is the reward model, so after t tokens of 6 the value is its score there times (6 - t) / 6."""
    run = sentiment_run.copy(tmp_path, "ppo")
    with open_trainer(run, "ppo.score_by_token=true", "ppo.shared_critic=false") as trainer:
        found = trainer.respond(2)
    model = load_reward_model(run.folder / "reward" / "model", torch.device("cpu"))
    model.config.read_tokens = 1
    for tokens, length, values in zip(found.tokens, found.prompt_lengths, found.values, strict=True):
        lengths = [length + t for t in range(6)]
        scores = [model(tokens[None, :n], n[None]).item() for n in lengths]
        assert values.tolist() == pytest.approx([(6 - t) / 6 * scores[t] for t in range(6)], abs=1e-4)


def test_labelers_rank_by_the_lexicon(sentiment_run):
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    score = SentimentIntensityAnalyzer().polarity_scores
    rankings, _ = load_comparisons(str(sentiment_run.folder / "label" / "comparisons.jsonl"))
    assert {len(r.responses) for r in rankings} <= {2, 3, 4} and len({r.labeler for r in rankings}) > 2
    pairs = [(r.responses[i].text, r.responses[j].text) for r in rankings for i, j in r.pair_list()]
    assert sum(score(better)["compound"] - score(worse)["compound"] for better, worse in pairs) >= 0


def test_the_table_compares_every_policy_by_the_truth(sentiment_run):
    results = json.loads((sentiment_run.folder / "evaluate" / "results.json").read_text())
    assert set(results["gold"]["score"]) == {"sft", "ppo", "rejection", "dpo"} == set(results["text"])
    assert results["gold"]["win_rate_vs_sft"]["n"] == 4 and set(results["kl"]) == {"ppo", "rejection", "dpo"}
    best = results["best_of_n"]
    assert {"score", "win_rate_vs_sft", "text", "kl_bound_nats"} <= set(best)
    assert best["ppo_above"]["value"] == pytest.approx(results["gold"]["mean_score"]["ppo"] - best["gold"], abs=2e-4)
    assert best["ppo_above"]["n"] == 4, "a passage is the unit"
    write_report(sentiment_run.folder)
    page = (sentiment_run.folder / "report.html").read_text(encoding="utf-8")
    assert "gold judge" not in page and "sentiment lexicon" in page


def test_generate_and_chat_continue_the_text(sentiment_run, capsys):
    file = sentiment_run.runs_dir / "generated.jsonl"
    sentiment_run.stage("generate", f"generate.out='{file}'", "generate.logprobs=true")
    found = rows(file)
    tokenizer = load_tokenizer(sentiment_run.folder / "ppo" / "model")
    assert len(found) == 19 and all(row["ended"] == [True] and len(row["token_ids"][0]) == 6 for row in found)
    assert all(tokenizer.decode(row["token_ids"][0], skip_special_tokens=True) == row["responses"][0] for row in found)
    capsys.readouterr()
    sentiment_run.stage("chat", "chat.message='The page says'")
    assert capsys.readouterr().out.strip()
