"""experiment=dialogue: labels divided by prompt, and a judge that PPO never saw, with another backbone."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from rlhf.data.reading import load_comparisons
from rlhf.data.splits import record_half, record_split
from rlhf.evaluation.judging import compare_scored
from rlhf.evaluation.statistics import describe
from rlhf.runs.sources import fractions, reward_folder
from rlhf.stages import reward
from tests.model.classifiers import save_classifier
from tests.stages.conftest import Run
from tests.stages.test_adopted import save

TINY = [
    "experiment=dialogue", "tracking=jsonl", "device=cpu", "threads=1", "lora.rank=4", "sft.batch_size=4", "reward.batch_prompts=4",
    "reward.calibration_samples=4", "reward.audit=0", "judge.epochs=2", "judge.lr=5e-3", "judge.batch_prompts=4",
    "judge.calibration_samples=4", "rollout.max_new_tokens=8", "ppo.episodes=8", "ppo.episodes_per_update=4", "ppo.minibatches=2",
    "ppo.epochs=1", "evaluate.prompts=8", "evaluate.samples=2", "evaluate.best_of=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All stages of the preset on tiny models: the policy a Llama, the judge a BERT. Every test here reads this one run."""
    folder, rng = tmp_path_factory.mktemp("dialogue"), random.Random(0)
    rows: dict[str, list[dict[str, Any]]] = {"demonstrations": [], "comparisons": []}
    for i in range(40):
        asked = {"role": "user", "content": f"What colour is number {i}?"}
        better, worse = (f"It is {word}." + " Of course." * rng.randrange(3) for word in ("red", "black"))
        dialogue = [asked, {"role": "assistant", "content": better}]
        rows["demonstrations"].append({"messages": dialogue})
        for chosen in ((better, worse), (better + " Yes.", worse)):  # two comparisons per prompt: they stay together
            said = [[{"role": "assistant", "content": text}] for text in chosen]
            rows["comparisons"].append({"prompt": [asked], "chosen": said[0], "rejected": said[1]})
    for kind, records in rows.items():
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    words = "What colour is number ? It is red black . Of course Yes user : system"
    models = [f"model.pretrained='{save(folder / 'hf', 'llama')}'"]
    models.append(f"judge.model='{save_classifier(folder / 'bert', 'bert', text=[words])}'")
    made = Run(folder, "d0", [*TINY, *(f"data.{kind}='{folder}/{kind}.jsonl'" for kind in rows), *models])
    for stage in ("tokenizer", "pretrain", "sft", "reward", "ppo", "judge", "evaluate"):
        made.stage(stage)
    return made


def prompts_trained_on(run: Run, stage: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    taken: dict[str, Any] = {}

    def stop(stage: Any, engine: Any, batches: Any, *_: Any, **__: Any) -> None:
        taken["items"] = batches.items
        raise InterruptedError

    monkeypatch.setattr(reward, "trained", stop)
    with pytest.raises(InterruptedError):
        run.stage(stage, "overwrite=true")
    return {item.record.prompt[-1].content for item in taken["items"]}


def test_no_prompt_is_in_both_halves(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = run.config()
    records, _ = load_comparisons(config.data.comparisons, "auto", False)
    train = [r for r in records if record_split(r, 0, fractions(config)) == "train"]
    halves = [{r.prompt[-1].content for r in train if record_half(r, 0) == half} for half in (1, 2)]
    assert not halves[0] & halves[1] and min(map(len, halves)) >= 4
    apart = run.copy(tmp_path, None)
    for stage in ("tokenizer", "pretrain", "sft"):
        assert (apart.folder / stage).is_dir()
    assert prompts_trained_on(apart, "reward", monkeypatch) == halves[0]
    assert prompts_trained_on(apart, "judge", monkeypatch) == halves[1]


def test_the_judge_has_its_own_backbone_and_belongs_to_the_lineage(run: Run):
    record = run.record("judge")
    assert record["settings"]["judge.lr"] == 5e-3 and record["settings"]["data.half"] == 1
    assert json.loads((run.folder / "judge" / "model" / "config.json").read_text())["model_type"] == "bert"
    assert not (run.folder / "judge" / "adapters").exists() and (run.folder / "reward" / "adapters").is_dir()
    assert run.record("evaluate")["parents"]["judge"] == record["hash"]
    assert reward_folder(run.config(), str(run.folder / "judge")) == run.folder / "judge"  # for evaluate.pairs_model
    assert "judge" not in run.record("ppo")["parents"]


def test_evaluate_has_the_judge_compare_the_policies(run: Run):
    judged = run.results()["judge"]
    [row] = judged["pairs"]
    assert row["pair"] == ["ppo", "sft"] and 0 <= row["win_rate"]["value"] <= 1 and row["win_rate"]["n"] == 8
    assert set(judged["scores"]) == {"sft", "ppo"} and judged["held_out"]["accuracy"]["n"] > 0
    assert any(line.startswith("judge: pairs: ppo over sft, win rate ") for line in describe(judged, "judge"))


def test_a_comparison_by_hand():
    # prompt 1: 2 x 1 answers: 3 > 1 and 0 < 1, so 1/2; words 2 - 1 and 3 - 1: mean 1.5. prompt 2: 5 > 2 and 2 = 2: 3/4; words 0 and 0.
    ours = ([[3.0, 0.0], [5.0, 2.0]], [["a b", "a b c"], ["a", "a"]])
    theirs = ([[1.0], [2.0]], [["a"], ["a"]])
    found = compare_scored(ours, theirs)
    assert found["win_rate"]["value"] == (1 / 2 + 3 / 4) / 2 and found["words"]["value"] == 0.75
