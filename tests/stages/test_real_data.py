"""The recipe on files that people bring: plain text, Alpaca's demonstrations, HH's comparisons; prompts come from these."""

import json
from pathlib import Path

import pytest

from rlhf.commands import pipeline
from rlhf.data.reading import load_prompts
from rlhf.data.records import shown_prompt
from rlhf.data.splits import record_split
from rlhf.errors import UserError
from rlhf.runs.run_files import read_jsonl
from rlhf.runs.sources import fractions, need_source

from .conftest import SMALL_MODEL, Run

STAGES = ("tokenizer", "pretrain", "sft", "reward", "ppo", "evaluate")
NAMES = ["Anna", "Tom", "Mary", "Łukasz", "Zoë", "O'Neil", "山田", "Max"]
THINGS = ["kite", "cup", "ball", "hat", "book", "lamp", "drum", "coat", "bell", "ring"]
SETTINGS = [
    "experiment=real", *SMALL_MODEL, "model.context_length=96", "tokenizer.vocab_size=512", "pretrain.tokens=49152",
    "pretrain.global_batch_tokens=1536", "pretrain.warmup_tokens=6144", "pretrain.eval_sequences=8", "sft.epochs=3",
    "reward.lr=5e-4", "reward.calibration_samples=40", "data.test=0.25", "data.dev=0.1", "ppo.episodes=32",
    "ppo.episodes_per_update=32", "ppo.critic_warmup_updates=0", "ppo.lr=3e-4", "rollout.max_new_tokens=16",
    "evaluate.prompts=20", "evaluate.samples=1", "evaluate.best_of=2", "tracking.log_every=1",
]  # fmt: skip


def write_data(folder: Path) -> list[str]:
    """Small files with the oddities of real ones; returns the overrides that name them."""
    folder.mkdir()
    (folder / "text").mkdir()
    stories = [
        f"{a} has a {t}. The {t} is {'old' if i % 2 else 'new'}, and {a} likes it “very” much…"
        for i, a in enumerate(NAMES)
        for t in THINGS
    ]
    (folder / "text" / "one.txt").write_bytes("\r\n\r\n<|endoftext|>\r\n".join(stories * 4).encode())
    (folder / "text" / "two.txt").write_text("\n\n".join(reversed(stories)) * 3 + "\n")

    demonstrations = [
        {"instruction": f"What does {name} have?", "input": f"{name} has a {thing}.", "output": f"A {thing}."}
        for name in NAMES[:5]
        for thing in THINGS
    ]
    odd = {"Repeat the end.": "The mark <|end|> is text, <|assistant|> too."}
    odd |= {"Read this. " + "It is long. " * 120: "Done.", "Say much.": "Much. " * 200}
    demonstrations += [{"instruction": asked, "input": "", "output": answer} for asked, answer in odd.items()]
    (folder / "alpaca.json").write_text(json.dumps(demonstrations, ensure_ascii=False))

    def dialogue(name: str, thing: str, answer: str) -> str:
        return f"\n\nHuman: Who is {name}?\n\nAssistant: A friend.\n\nHuman: What is {name}'s {thing}?\n\nAssistant: {answer}"

    comparisons = [
        {"chosen": dialogue(n, t, f"A {t} is a thing."), "rejected": dialogue(n, t, "Go away." if i % 3 else "")}
        for i, (n, t) in enumerate((n, t) for n in NAMES for t in THINGS)
    ]
    long = {kind: dialogue("Max", "cup " * 300, text) for kind, text in (("chosen", "Yes."), ("rejected", "No."))}
    comparisons.append(long)
    (folder / "hh.jsonl").write_text("".join(json.dumps(row) + "\n" for row in comparisons))
    files = {"corpus": "text", "demonstrations": "alpaca.json", "comparisons": "hh.jsonl"}
    return [f"data.{kind}={folder / name}" for kind, name in files.items()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    home = tmp_path_factory.mktemp("real")
    run = Run(home / "runs", "real", [*SETTINGS, *write_data(home / "data")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "run_stage", lambda config, stage, overrides: run.stage(stage, *overrides))
        pipeline.run(run.config())
    return run


@pytest.fixture(scope="module")
def results(run: Run) -> dict:
    return run.results()


def test_results_have_no_gold_parts_and_the_reward_model_learned_what_people_preferred(results):
    assert "gold" not in results
    assert set(results["reward"]) == {"sft", "ppo"}
    assert not {"noise_ceiling", "gold_order_accuracy"} & results["reward_model"].keys()
    assert results["reward_model"]["labeler_agreement"] is None, "no answers were ranked twice"
    assert 0 < results["rm_win_rate_vs_sft"]["value"] < 1 and results["kl_to_sft_nats"] == results["kl_to_sft_nats"]
    assert 0 < results["pretrain_bits_per_byte"] < 8
    assert set(results["seconds"]) == set(STAGES)
    accuracy = results["reward_model"]["accuracy"]
    assert accuracy["value"] > 0.8 and accuracy["n"] >= 10, "an untrained one has 0.5"


def test_prompts_come_from_demonstrations_and_comparisons(run):
    """And those of the test split, which are evaluated, were never rolled out, imitated or ranked."""
    config = run.config()
    prompts, _ = load_prompts(need_source(config, "prompts"))
    assert len(prompts) == 53 + 81
    assert {record_split(r, 0, fractions(config)) for r in prompts} == {"train", "dev", "test"}
    tested = {row["prompt"] for row in read_jsonl(run.folder / "evaluate" / "samples.jsonl")}
    held_out = {shown_prompt(r.prompt) for r in prompts if record_split(r, 0, fractions(config)) == "test"}
    assert tested and tested <= held_out
    trained = {row["prompt"] for row in read_jsonl(run.folder / "ppo" / "samples.jsonl")}
    assert trained and not trained & held_out


def test_only_the_stages_of_real_data_are_there(run):
    assert sorted(p.parent.name for p in run.folder.glob("*/stage.json")) == sorted(STAGES)
    data = run.record("reward")["data"]
    assert set(data) == {"comparisons:hh.jsonl", "demonstrations:alpaca.json"}
    assert set(run.record("pretrain")["data"]) == {"corpus:one.txt", "corpus:two.txt"}
    page = (run.folder / "report.html").read_text()
    assert "</html>" in page and "by the gold judge it wins" not in page


def test_changed_data_is_noticed(run, monkeypatch):
    path = Path(run.config().data.comparisons)
    content = path.read_bytes()
    monkeypatch.setattr(pipeline, "run_stage", lambda config, stage, overrides: pytest.fail(f"{stage} was run"))
    pipeline.run(run.config())
    try:
        path.write_bytes(content + content.splitlines(keepends=True)[0])
        with pytest.raises(UserError, match="reward was run on other data than the present"):
            pipeline.run(run.config())
    finally:
        path.write_bytes(content)
