"""What evaluation and studies say: over-optimisation without selection bias, caches, parents, what PPO was paid."""

import json
import random
import shutil
from pathlib import Path

import pytest

from rlhf.commands import study_results
from rlhf.commands.study import PARENTS, make_cells
from rlhf.commands.study_cells import Cell, mean_interval
from rlhf.config.compose import compose_config
from rlhf.errors import UserError
from rlhf.runs.folders import stage_folder
from rlhf.runs.sources import reward_folder
from rlhf.system.files import read_json, write_json

NOISE = 0.0125  # sd of gold on a study's held-out prompts


def noisy_runs(truth: list[float], seeds: int, rng: random.Random) -> list[dict]:
    """One curve a seed: the truth with noise of its own, and a score that rises by 0.1 an update."""
    return [
        {
            "seed": seed,
            "path": [
                {"update": t, "kl": float(t), "score": 0.1 * t, "gold": gold + rng.gauss(0, NOISE), "correct": 0.0}
                for t, gold in enumerate(truth)
            ],
        }
        for seed in range(seeds)
    ]


def losses(truth: list[float], seeds: int = 3, studies: int = 200) -> list[float]:
    """gold_lost of many studies of the same truth."""
    rng = random.Random(1)
    found = [study_results.over_optimisation(noisy_runs(truth, seeds, rng)) for _ in range(studies)]
    return [row["gold_lost"]["mean"] for row in found]


RISING = [0.5 + 0.004 * t for t in range(16)]
FLAT = [0.5] * 16
FALLING = [0.5 + 0.02 * t for t in range(8)] + [0.64 - 0.02 * t for t in range(8)]  # from 0.64 to 0.5


def test_no_loss_is_seen_where_gold_does_not_fall():
    flat = mean_interval(losses(FLAT))
    assert flat["ci95"][0] < 0 < flat["ci95"][1], "a curve's own peak would lose 0.02 here"
    assert abs(flat["mean"]) < 0.003
    rising = mean_interval(losses(RISING))
    assert rising["mean"] < 0
    rng = random.Random(2)
    inside = 0
    for _ in range(100):
        low, _ = study_results.over_optimisation(noisy_runs(FLAT, 3, rng))["gold_lost"]["ci95"]
        inside += low <= 0
    assert inside >= 90, "a loss is claimed in one study of 40"


def test_a_true_loss_is_found_within_noise():
    found = mean_interval(losses(FALLING))
    assert found["mean"] == pytest.approx(0.14, abs=0.01)
    one = study_results.over_optimisation(noisy_runs(FALLING, 3, random.Random(0)))
    assert one["peak_update"]["mean"] == pytest.approx(7.5, abs=1.5)
    # the score rises by 0.1 an update, to 1.5
    assert one["score_gained"]["mean"] == pytest.approx(1.5 - 0.1 * one["peak_update"]["mean"])
    assert one["peak_kl"]["mean"] == one["peak_update"]["mean"] and one["rule"] == "peak of the other seeds"


def test_the_peak_is_that_of_the_other_seeds_at_shared_updates():
    golds = [[0.1, 0.9, 0.2, 0.3], [0.1, 0.2, 0.8, 0.3], [0.1, 0.7, 0.2]]  # the last one was cut off
    runs = [
        {"seed": i, "path": [{"update": t, "kl": 1.0 * t, "score": 1.0 * t, "gold": g} for t, g in enumerate(row)]}
        for i, row in enumerate(golds)
    ]
    found = study_results.over_optimisation(runs)
    # others of 0: .1 .45 .5 -> 2, lost 0; of 1: .1 .8 .2 -> 1, lost .2 - .8; of 2: .1 .55 .5 -> 1, lost .7 - .2
    assert found["peak_update"]["mean"] == pytest.approx(4 / 3)
    assert found["gold_lost"]["mean"] == pytest.approx((0.0 - 0.6 + 0.5) / 3)
    assert found["score_gained"]["mean"] == pytest.approx((0 + 1 + 1) / 3)


def test_one_seed_compares_thirds_and_has_no_interval():
    runs = noisy_runs([0.1, 0.2, 0.5, 0.7, 0.4, 0.2], 1, random.Random(0))
    for row, gold in zip(runs[0]["path"], [0.1, 0.2, 0.5, 0.7, 0.4, 0.2], strict=True):
        row["gold"] = gold
    found = study_results.over_optimisation(runs)
    assert found["gold_lost"] == {"mean": pytest.approx(0.6 - 0.3), "ci95": None, "n": 1}
    assert found["score_gained"]["mean"] == pytest.approx(0.2)
    assert found["peak_update"]["mean"] == 3 and found["rule"] == "middle third less last third"
    short = study_results.over_optimisation([{"seed": 0, "path": runs[0]["path"][:2]}])
    assert short["gold_lost"] == {"mean": None, "ci95": None, "n": 1}


# --- caches --------------------------------------------------------------------------------------------------------


def make_cell(folder: Path, *overrides: str) -> Cell:
    stages = {stage: folder / "parent" / stage for stage in PARENTS}
    cell = Cell("kl_coef_0.1", 0, folder / "parent", folder / "study", ("experiment=gold", *overrides), stages)
    cell.ppo.mkdir(parents=True, exist_ok=True)
    row = {
        "progress/step": 0,
        "eval/dev/kl": 0.0,
        "eval/dev/scores": 0.0,
        "eval/dev/gold/total": 0.0,
        "eval/dev/gold/correct": 0.0,
    }
    (cell.ppo / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return cell


def test_the_best_of_n_curve_is_made_anew_where_what_pays_changed(tmp_path, monkeypatch):
    made = []

    def curve(cell: Cell) -> list[dict[str, float]]:
        made.append(cell.overrides)
        return [{"n": 1.0, "kl": 0.0, "score": 0.0, "gold": 0.0, "correct": 0.0, "kl_estimate": 0.0}]

    monkeypatch.setattr(study_results, "best_of_curve", curve)
    config = compose_config(["experiment=gold", "study.kind=frontier"])
    for times, overrides in [
        (1, []), (1, []), (1, ["kl.coef=0.3"]), (2, ["ppo.missing_eos_score=-5"]), (2, ["ppo.missing_eos_score=-5"]),
        (3, ["ppo.score_clip=1"]), (4, ["ppo.calibrated=false"]), (5, ["rollout.max_new_tokens=20"]),
    ]:  # fmt: skip
        study_results.frontier_results(config, [make_cell(tmp_path, *overrides)])
        assert len(made) == times, overrides


def test_what_sft_answers_does_not_depend_on_what_pays(tmp_path):
    def basis(*overrides: str) -> list:
        cell = make_cell(tmp_path, *overrides)
        return study_results.sft_basis(study_results.cell_config(cell), cell)

    assert basis() == basis("ppo.calibrated=false") == basis("ppo.missing_eos_score=-5")
    assert basis() != basis("rollout.max_new_tokens=20") and basis() != basis("seed=1")


# --- parents -------------------------------------------------------------------------------------------------------


def fake_stage(folder: Path, parents: dict[str, str] | None = None) -> None:
    folder.mkdir(parents=True)
    record = {
        "stage": folder.name,
        "status": "complete",
        "config": {"parents": parents or {}},
        "settings": {},
        "parents": {},
        "data": {},
        "files": {},
        "hash": "0" * 64,
    }
    write_json(folder / "stage.json", record)


def test_a_study_builds_on_what_its_parent_built_on(tmp_path):
    runs, elsewhere = tmp_path / "runs", tmp_path / "kept" / "pretrain"
    for stage in ("world", "sft"):
        fake_stage(runs / "first" / stage)
    fake_stage(elsewhere)
    fake_stage(runs / "second" / "label")
    fake_stage(runs / "second" / "sft")
    # its own SFT is there, so that counts; of the tokenizer nothing is known
    recorded = {"world": "first", "sft": "first", "pretrain": str(elsewhere), "tokenizer": None}
    fake_stage(runs / "second" / "reward", recorded)
    config = compose_config(["experiment=gold", "study.kind=frontier", f"runs_dir='{runs}'", "run=second"])
    cell = make_cells(config, [])[0]
    wanted = {
        "world": runs / "first" / "world",
        "sft": runs / "second" / "sft",
        "pretrain": elsewhere,
        "label": runs / "second" / "label",
        "reward": runs / "second" / "reward",
        "tokenizer": runs / "second" / "tokenizer",
    }
    assert cell.stages == wanted
    own = study_results.cell_config(cell)
    for stage in ("world", "sft", "pretrain", "label", "reward"):
        assert stage_folder(own, stage) == wanted[stage], "the cell's PPO finds it too"


def test_cells_are_paid_by_the_runs_that_the_command_named(gold_run, copy_until):
    run = copy_until("ppo")
    other = run.folder.with_name("other ones")
    shutil.copytree(run.folder, other)
    name = f"{__name__}:pays_two"
    given = ["study.kind=frontier", "study.seeds=[0]", f"ppo.rewards=['{other.name}',null,'{name}']"]
    cell = make_cells(run.config(*given), [*run.overrides, *given])[0]
    own = study_results.cell_config(cell)
    assert own.ppo.rewards == [str((other / "reward").absolute()), None, name]
    assert Path(own.runs_dir) != run.folder.parent
    assert reward_folder(own, own.ppo.rewards[0]) == other / "reward"
    alone = [*given[:2], f"ppo.rewards={other.name!r}"]
    cell_alone = make_cells(run.config(*alone), [*run.overrides, *alone])[0]
    assert study_results.cell_config(cell_alone).ppo.rewards == str((other / "reward").absolute())
    assert make_cells(run.config(*given[:2]), [*run.overrides, *given[:2]])[0].overrides != cell.overrides


# --- what PPO was paid ---------------------------------------------------------------------------------------------


def pays_two(prompts, responses, metadata):
    return [2.0] * len(responses)


def test_the_reward_is_that_of_the_sources_ppo_was_paid_by(gold_run, copy_until, capsys):
    settings = ["evaluate.prompts=12", "evaluate.samples=2", "ppo.missing_eos_rule=none"]
    run = copy_until("evaluate")
    own = read_json(run.stage("evaluate", *settings, "evaluate.best_of=4") / "results.json")
    assert own["reward"] == own["reward_without_eos_rule"], "by default the run's own calibrated model pays"
    assert "best of 4 samples of SFT: reward" in capsys.readouterr().out
    paid = [f"ppo.rewards='{__name__}:pays_two'", "evaluate.best_of=0", "overwrite=true"]
    results = read_json(run.stage("evaluate", *settings, *paid) / "results.json")
    assert results["reward"] == {"sft": 2.0, "ppo": 2.0}
    assert results["rm_win_rate_vs_sft"]["value"] == 0.5
    assert results["reward_without_eos_rule"] == own["reward_without_eos_rule"], "the run's own model, as before"
    raw = read_json(run.stage("evaluate", *settings, "ppo.calibrated=false", *paid[1:]) / "results.json")
    model = read_json(run.folder / "reward" / "model" / "config.json")
    gain, shift = model["gain"], model["shift"]
    for name, value in own["reward"].items():
        assert gain * (raw["reward"][name] - shift) == pytest.approx(value, abs=2e-4 * (1 + abs(gain)))


def test_one_seed_one_parent_and_one_cell_need_no_list(gold_run):
    given = [*gold_run.overrides, "study.kind=details"]
    (cell,) = make_cells(gold_run.config(*given, "study.seeds=3", "study.parents=gold", "study.cells=rloo"), given)
    assert cell.run == "rloo-seed3" and cell.parent == gold_run.folder
    with pytest.raises(UserError, match=r"study\.cells: study\.kind=frontier has no choices"):
        make_cells(gold_run.config("study.kind=frontier", "study.cells=rloo"), given)
