"""The study of what an audit predicts: cells, rank correlations, and predictions of a cell from the others."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from rlhf.commands import study_audit
from rlhf.commands.study import LABELLED, cells_to_run, make_cells
from rlhf.commands.study_cells import Cell
from rlhf.runs.folders import stage_folder


@pytest.fixture
def cells(gold_run):
    config = gold_run.config("study.kind=audit", "study.seeds=[0,1]", "study.updates=2", "run=study")
    config.study.parents = ["gold", "gold"]
    return config, make_cells(config, list(gold_run.overrides))


def test_cells_differ_in_labels_and_noise_and_share_their_sft(gold_run, cells):
    from rlhf.config.compose import compose_config

    config, found = cells
    assert len(found) == 12 and cells_to_run(config, found) == found
    composed = [compose_config(list(cell.overrides)) for cell in found]
    assert {(c.gold.comparison_prompts, c.gold.labeler_noise, c.seed) for c in composed} == {
        (prompts, noise, seed) for prompts in (100, 300, 1000) for noise in (1.0, 2.8) for seed in (0, 1)
    }
    assert all(stage_folder(composed[0], stage) == gold_run.folder / stage for stage in LABELLED)
    assert stage_folder(composed[0], "reward") == found[0].folder / found[0].run / "reward"
    assert composed[0].ppo.episodes == 2 * composed[0].ppo.episodes_per_update


def test_the_figures_of_a_finished_cell(gold_run, tmp_path):
    folder = tmp_path / "a-seed0"
    for stage in ("reward", "evaluate"):
        shutil.copytree(gold_run.folder / stage, folder / stage)
    found = study_audit.run_of(Cell("a", 0, gold_run.folder, tmp_path, (), {}))
    assert set(found["figures"]) == set(study_audit.FIGURES)
    assert 0 < found["figures"]["accuracy"] < 1 and -1 < found["gold_gain"] < 1


def test_rank_correlation_is_scipys_with_the_interval_of_bonett_and_wright():
    rng = random.Random(0)
    a = np.array([rng.random() for _ in range(24)])
    b = a + np.array([rng.gauss(0, 0.2) for _ in range(24)])
    found = study_audit.spearman(a, b)
    assert found["value"] == pytest.approx(spearmanr(a, b).statistic, abs=1e-4)
    half = np.array([1, 0, 3, 2])  # r = 0.6 with n = 4: too few for an interval
    assert study_audit.spearman(np.arange(4), half) == {"value": 0.6, "ci95": None, "n": 4}
    z = np.arctanh(found["ci95"])
    assert z[1] - z[0] == pytest.approx(2 * 1.96 * np.sqrt((1 + found["value"] ** 2 / 2) / 21), abs=2e-3)
    assert study_audit.spearman(a, np.zeros(24)) is None


def test_a_cell_is_predicted_from_the_others_only():
    x = np.array([[0.0], [1.0], [2.0], [3.0], [100.0]])
    y = np.array([0.0, 1.0, 2.0, 3.0, -5.0])
    predicted, means = study_audit.predict_each(x, y)
    assert means[4] == 1.5  # of 0, 1, 2, 3
    # the other four: z = (x - 1.5) / sd, slope sum(z (y - 1.5)) / (sum(z²) + 1) = 4 sd / 5 per sd, so 0.8 per unit of x
    assert predicted[4] == pytest.approx(1.5 + 0.8 * 98.5)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_figure_that_tells_the_outcome_is_seen(noise):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, 3))
    y = x[:, 0] + noise * rng.normal(size=24)
    single, useless = study_audit.judged(x[:, :1], y), study_audit.judged(x[:, 1:2], y)
    assert single["leave_one_out"]["ci95"][0] > 0.8 and single["error"] < 0.3 * single["error_of_mean"]
    assert useless["rank_correlation"]["ci95"][0] < 0 < useless["rank_correlation"]["ci95"][1]
    assert "rank_correlation" not in study_audit.judged(x, y)


def test_a_figure_that_is_missing_in_a_cell_is_its_mean():
    x = np.array([[1.0], [np.nan], [3.0], [2.0], [1.0]])
    assert np.isfinite(study_audit.judged(x, np.arange(5.0))["error"])


def test_the_table_of_a_study_prints(tmp_path: Path, capsys):
    import importlib.util

    spec = importlib.util.spec_from_file_location(
        "study_table", Path(__file__).parents[2] / "scripts" / "study_table.py"
    )
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    x = np.arange(6.0)[:, None]
    runs = [
        {
            "parent": "p",
            "cell": "labels_100",
            "figures": {"accuracy": 0.6, "worst_flips": 0.1},
            "verdict": "go",
            "kl": 1.0,
            "gold_gain": 0.1,
        }
    ]
    script.audit({"rows": {"accuracy": study_audit.judged(x, np.arange(6.0))}, "runs": runs})
    assert "| accuracy | +1.00" in capsys.readouterr().out
