"""The ways through the recipe, each as one command on a tiny pretrained model: what the data allow, and from which policy."""

import csv
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import rlhf
from rlhf import cli
from rlhf.commands import pipeline, sample, serve
from rlhf.config.commands import SHARED_FLAG
from rlhf.runs.folders import read_stage
from rlhf.system.files import read_json
from rlhf.training.setup import load_policy

from .conftest import run_ranks
from .test_adopted import SMALL, save

SHORT = ["evaluate.samples=1", "evaluate.best_of=2", "reward.audit=0", "ppo.warmup_fraction=0", "ppo.critic_warmup_updates=0",
         "dpo.lr=1e-4", "dpo.warmup_fraction=0", "ppo.lr=1e-4", "rejection.samples=16", "ppo.missing_eos_rule=none"]  # fmt: skip
REWARD = "def longer(prompts, responses, metadata):\n    return [len(text) / 10 for text in responses]\n"


class Ways:
    """A folder with a model, data of each kind, and the command line, whose stages run in this process."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch):
        self.folder, self.ran = folder, []
        patch.setattr(pipeline, "run_stage", self.run_stage)
        patch.setattr(pipeline, "write_report", lambda folder: None)  # its pictures take as long as the stages

    def run_stage(self, config, stage: str, overrides: list[str]) -> None:
        self.ran.append(f"{config.run}/{stage}")
        cli.main([stage, SHARED_FLAG, *overrides])

    def __call__(self, command: str, run: str, *words: str, fresh: bool = True) -> list[str]:
        self.ran.clear()
        given = [*SMALL, *SHORT, f"model.pretrained={self.folder / 'hf'}"] if fresh else []
        cli.main([command, f"run={run}", f"runs_dir={self.folder / 'runs'}", *given, *words])
        return [name.rpartition("/")[2] for name in self.ran]

    def record(self, run: str, stage: str) -> dict:
        return read_stage(self.folder / "runs" / run / stage) or {}

    def results(self, run: str) -> dict:
        return read_json(self.folder / "runs" / run / "evaluate" / "results.json")

    def weights(self, run: str, stage: str) -> torch.Tensor:
        model = load_policy(self.folder / "runs" / run / stage / "model")
        return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ways")
    save(folder / "hf", "llama")
    with (folder / "labels.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["prompt", "chosen", "rejected"])
        table.writerows([f"Where is the {i} cat?", f"On the mat {i}.", "No " * (1 + i % 3)] for i in range(20))
    prompts = [{"prompt": f"Say {i} words."} for i in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    demos = [{"instruction": row["prompt"], "output": f"word {i}"} for i, row in enumerate(prompts)]
    (folder / "demos.json").write_text(json.dumps(demos))
    (folder / "longer.py").write_text(REWARD)
    return folder


@pytest.fixture
def ways(home: Path, monkeypatch: pytest.MonkeyPatch) -> Ways:
    monkeypatch.chdir(home)
    monkeypatch.setattr("sys.argv", ["rlhf"])
    return Ways(home, monkeypatch)


@pytest.fixture
def first(ways: Ways) -> Ways:
    if not ways.record("first", "evaluate"):
        ways("pipeline", "first", "data.comparisons=labels.csv")
    return ways


def test_preferences_only(ways, capsys):
    assert ways("pipeline", "first", "data.comparisons=labels.csv") == [
        "tokenizer", "pretrain", "sft", "reward", "ppo", "evaluate"
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert "no data.demonstrations: the pretrained model is taken as the SFT model" in said
    assert "no demonstrations: SFT samples average 0" in said
    assert torch.equal(ways.weights("first", "sft"), ways.weights("first", "pretrain"))
    assert ways.results("first")["policy"] == "ppo" and ways.results("first")["kl_to_sft_nats"] != 0
    assert ways("pipeline", "first", fresh=False) == []  # the run remembers its settings, and they fit
    cli.main(["export", "run=first", "runs_dir=runs", "export.out=exported"])
    loaded = AutoModelForCausalLM.from_pretrained("exported")
    assert sum(p.numel() for p in loaded.parameters()) > 0


def test_a_reward_function_and_prompts_only(ways):
    ran = ways("pipeline", "function", "ppo.rewards=longer.py:longer", "data.prompts=prompts.jsonl", "ppo.critic=sft")
    assert ran == ["tokenizer", "pretrain", "sft", "ppo", "evaluate"]
    assert "reward_model" not in ways.results("function") and "rm_win_rate_vs_sft" in ways.results("function")


def test_dpo_only_and_its_evaluation(ways):
    assert ways("pipeline", "dpo", "data.comparisons=labels.csv", "stages=dpo") == [
        "tokenizer", "pretrain", "sft", "dpo",
    ]  # fmt: skip
    assert ways("pipeline", "dpo", "stages=[dpo,evaluate]", fresh=False) == ["evaluate"]
    results = ways.results("dpo")
    assert results["policy"] == "dpo" and set(results["kl"]) == {"dpo"} and "best_of_n" not in results


def test_adapters_of_trls_sft_are_merged_into_their_model(ways):
    import datasets
    import peft
    import trl

    rows = datasets.Dataset.from_list([{"prompt": f"Say {i} words.", "completion": f" word {i}"} for i in range(8)])
    plain = {"report_to": "none", "use_cpu": True, "bf16": False, "max_steps": 2, "learning_rate": 0.05}
    arguments = trl.SFTConfig(str(ways.folder / "trl"), per_device_train_batch_size=4, save_strategy="no", **plain)
    adapters = peft.LoraConfig(r=2, target_modules=["v_proj", "down_proj"], task_type="CAUSAL_LM")
    trainer = trl.SFTTrainer(str(ways.folder / "hf"), arguments, train_dataset=rows, peft_config=adapters)
    trainer.train()
    trainer.save_model()
    words = ["data.comparisons=labels.csv", f"model.pretrained={ways.folder / 'trl'}", "stages=dpo"]
    assert ways("pipeline", "from-trl", *words) == ["tokenizer", "pretrain", "sft", "dpo"]
    models = [trainer.model.merge_and_unload(), load_policy(ways.folder / "runs" / "from-trl" / "sft" / "model")]
    models.append(AutoModelForCausalLM.from_pretrained(ways.folder / "hf"))
    with torch.no_grad():
        theirs, ours, before = (model(torch.arange(5, 25)[None]).logits for model in models)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert (before - theirs).abs().max() > 0.01
    record = read_json(ways.folder / "runs" / "from-trl" / "pretrain" / "adopted.json")
    assert "adapter_model.safetensors" in record["sha256"]


def test_demonstrations_only_end_with_sft(ways, capsys):
    assert ways("pipeline", "demos", "data.demonstrations=demos.json") == ["tokenizer", "pretrain", "sft"]
    told = "no data.comparisons, and no ppo.rewards: reward model, PPO and evaluation are left out"
    assert told in capsys.readouterr().out
    # what comes later is not left out
    assert ways("pipeline", "demos", "data.comparisons=labels.csv", fresh=False) == ["reward", "ppo", "evaluate"]


def test_a_finished_reward_model(first):
    ran = first("pipeline", "taken", "data.demonstrations=demos.json", "ppo.rewards=first")
    assert ran == ["tokenizer", "pretrain", "sft", "ppo", "evaluate"]
    assert first.record("taken", "ppo")["data"]["reward:first"] == first.record("first", "reward")["hash"]


def test_ppo_starts_from_another_policy(first):
    words = ["data.comparisons=labels.csv", "ppo.policy=dpo"]
    words += [f"parents.{stage}=first" for stage in ("tokenizer", "pretrain", "sft", "reward")]
    assert first("pipeline", "on-dpo", *words) == ["dpo", "ppo", "evaluate"]
    record = first.record("on-dpo", "ppo")
    assert record["parents"]["dpo"] == first.record("on-dpo", "dpo")["hash"]
    lines = (first.folder / "runs" / "on-dpo" / "ppo" / "metrics.jsonl").read_text().splitlines()
    kl = next(row["objective/kl"] for row in map(json.loads, lines) if "objective/kl" in row)
    assert abs(kl) > 1e-4  # of the first rollout to SFT, from which it did not start
    assert first.results("on-dpo")["baselines"].keys() == {"dpo"}


def test_a_finished_stage_is_continued_as_a_new_one(first):
    """Iterated PPO: one command, with the settings of the run that it goes on from."""
    assert first("pipeline", "second", "ppo.policy=first", "ppo.lr=1e-12", fresh=False) == ["ppo", "evaluate"]
    record = first.record("second", "ppo")
    assert record["parents"]["first/ppo"] == first.record("first", "ppo")["hash"]
    assert record["parents"]["sft"] == first.record("first", "sft")["hash"]
    assert record["config"]["parents"]["sft"] == "first", "which is found from every folder"
    torch.testing.assert_close(first.weights("second", "ppo"), first.weights("first", "ppo"), atol=1e-6, rtol=0)
    assert first("pipeline", "second", fresh=False) == []
    first("ppo", "third", "ppo.policy=second", "ppo.reference=first", fresh=False)
    assert {"first/ppo", "second/ppo"} <= first.record("third", "ppo")["parents"].keys()


def label(run: Path, tasks: int | None = None) -> None:
    """What `rlhf serve` writes of a labeler who takes the responses as they come."""
    rows = [json.loads(line) for line in (run / "sample" / "tasks.jsonl").read_text().splitlines()][:tasks]
    (run / "serve").mkdir(exist_ok=True)
    for row in rows:
        row |= {"ranking": [[one["id"]] for one in row["responses"]], "labeler": "anna"}
        row["metadata"]["task"] = row["id"]
    (run / "serve" / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rounds_of_peoples_labels(first, capsys):
    """Sample, wait for labels, reward model, PPO, three times; each call goes on from where the last one had to stop."""
    name, runs = "rounds", first.folder / "runs"
    words = ["data.comparisons=labels.csv", "data.prompts=prompts.jsonl", "rounds=3", "sample.prompts=5"]
    words += ["ppo.policy=ppo", "round.later_reward_epochs=1"]
    # the run has no stage until its round
    words += [f"parents.{stage}=first" for stage in ("tokenizer", "pretrain", "sft")]

    def stops(*more: str) -> str:
        with pytest.raises(SystemExit) as stop:
            first("pipeline", name, *more, fresh=bool(more))
        assert stop.value.code == 2
        return capsys.readouterr().err

    def ran() -> list[str]:
        return [one.removeprefix(name).strip("-/") for one in first.ran]

    assert "tasks wait for labels: rank them with `rlhf serve run=" in stops(*words)
    of_round = [f"round-1/{stage}" for stage in ("reward", "ppo")]
    assert ran() == [*of_round, "round-2/sample", "round-2/label"]
    served = serve.answered_by(runs / f"{name}-round-2")  # it has only tasks
    assert served == runs / f"{name}-round-1" and rlhf.load(served).policies[-1] == "ppo"
    label(runs / f"{name}-round-2", 3)
    assert "2 of 5 tasks wait" in stops()
    assert ran() == ["round-2/label"]
    label(runs / f"{name}-round-2")
    assert "tasks wait for labels" in stops()
    assert ran() == [*(f"round-2/{stage}" for stage in ("label", "reward", "ppo")), "sample", "label"]
    label(runs / name)
    first("pipeline", name, fresh=False)
    assert ran() == ["label", "reward", "ppo", "evaluate"]
    first("pipeline", name, fresh=False)
    assert ran() == []
    for stage in ("ppo", "reward"):
        assert f"{name}-round-2/{stage}" in first.record(name, stage)["parents"]
    lines = (runs / name / "label" / "comparisons.jsonl").read_text().splitlines()
    before = (runs / f"{name}-round-2" / "label" / "comparisons.jsonl").read_text().splitlines()
    assert lines[: len(before)] == before and len(before) > 20 and len(lines) > len(before)


def test_rounds_killed_between_and_within_stages_with_imported_labels(first, monkeypatch):
    """Each call does one stage and is killed at the beginning of the next; the first sampling is killed as it writes. Nothing is
    done twice, and what is half written is not taken for the tasks.
    """
    name, runs, ran = "killed", first.folder / "runs", []
    write_tasks = sample.write_tasks

    def killed_once(*given):
        monkeypatch.setattr(sample, "write_tasks", write_tasks)
        raise KeyboardInterrupt

    def one_stage(config, stage: str, overrides: list[str]) -> None:
        if first.ran:
            raise KeyboardInterrupt
        first.run_stage(config, stage, overrides)
        ran.append(first.ran[-1].removeprefix(name).strip("-/"))

    def killed(*more: str) -> int:
        with pytest.raises((SystemExit, KeyboardInterrupt)) as stop:
            first("pipeline", name, *more, fresh=bool(more))
        return stop.value.code if isinstance(stop.value, SystemExit) else 130

    monkeypatch.setattr(sample, "write_tasks", killed_once)
    monkeypatch.setattr(pipeline, "run_stage", one_stage)
    codes = [killed("data.comparisons=labels.csv", "data.prompts=prompts.jsonl", "rounds=2", "sample.prompts=5")]
    while codes[-1] == 130 and len(codes) < 20:
        codes.append(killed())
    assert codes[-1] == 2, "only labels are missing"
    assert ran == ["tokenizer", "pretrain", "sft", "round-1/reward", "round-1/ppo", "sample"]
    label(runs / name)
    cli.main(["import", f"path={runs / name / 'serve' / 'labels.jsonl'}", f"out={runs / name / 'sample-imported'}"])
    (runs / name / "serve" / "labels.jsonl").unlink()
    while first.record(name, "evaluate").get("status") != "complete" and len(codes) < 40:
        first.ran.clear()
        try:
            first("pipeline", name, fresh=False)
        except (SystemExit, KeyboardInterrupt):
            codes.append(130)
    assert ran[6:] == ["label", "reward", "ppo", "evaluate"]
    assert f"{name}-round-1/ppo" in first.record(name, "label")["parents"]
    for stage in ("reward", "ppo"):  # both begin anew
        assert f"{name}-round-1/{stage}" not in first.record(name, stage)["parents"]


def test_two_processes_do_what_one_does(first, tmp_path):
    words = [f"parents.{stage}=first" for stage in ("tokenizer", "pretrain", "sft", "reward", "ppo")]
    words += ["data.comparisons=labels.csv", "rejection.prompts=9", "sft.dropout=0", "stages=[dpo,rejection,evaluate]"]
    assert first("pipeline", "one", *words) == ["rejection", "dpo", "evaluate"]
    place = [f"model.pretrained={first.folder}/hf", "run=two", f"runs_dir={first.folder}/runs"]
    given = " ".join([*SMALL, *SHORT, *words[:-1], *place])
    jobs = [
        *(f"{stage}:0:{given}" for stage in ("rejection", "dpo", "evaluate")),
        f"ppo:0:{given.replace('parents.ppo=first', '')}",
    ]
    run_ranks("sharding_ranks", 2, f"{tmp_path}/held.json", *jobs)
    for stage in ("rejection", "dpo"):
        torch.testing.assert_close(first.weights("two", stage), first.weights("one", stage), atol=1e-5, rtol=0)
    one, two = first.results("one"), first.results("two")
    for part in ("reward", "kl", "ended", "best_of_n"):
        assert json.dumps(two[part]) == json.dumps(one[part]), part
    assert set(two["baselines"]) == {"rejection", "dpo"} and two["policy"] == "ppo"
    torch.testing.assert_close(first.weights("two", "ppo"), first.weights("first", "ppo"), atol=1e-5, rtol=0)


def test_two_processes_rate_as_one_does(copy_until):
    one, two = copy_until("reward", "one"), copy_until("reward", "two")
    words = ["rate.ratings=40", "rate.epochs=1", "sft.batch_size=110", "sft.dropout=0"]
    one.stage("rate", *words)
    cli.main(["rate", SHARED_FLAG, *two.words(*words), "launcher.processes=2"])
    a, b = (torch.cat([p.detach().flatten() for p in run.policy("rate").parameters()]) for run in (one, two))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
