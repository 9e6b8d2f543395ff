"""The study of scaling: its cells, the whole at a tiny size, and exponents and intervals of made-up runs."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlhf.commands import study_scaling
from rlhf.commands.study_scaling import Run, estimate, parameters_of, resamples, scaling_choices, with_interval
from rlhf.data.corpus import PackedCorpus
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import UserError
from rlhf.planning.scaling import LossLaw
from rlhf.report.evaluation import make_evaluation, make_pictures
from rlhf.runs.run_files import read_run
from rlhf.stages.pretrain import make_model
from rlhf.system.files import read_json

SCRIPTS = Path(__file__).parents[2] / "scripts"
TINY = ["study.kind=scaling", "study.seeds=[0]", "study.budgets=[4e9]", "study.widths=[8,16,24]"]


def test_cells_spend_their_budget(gold_run):
    config = gold_run.config("study.kind=scaling", "study.budgets=[1e11,3e11]", "study.widths=[32,64]")
    found = scaling_choices(config, gold_run.folder)
    assert list(found) == ["c1e11_w32", "c1e11_w64", "c3e11_w32", "c3e11_w64"]
    for name, changed in found.items():
        own = gold_run.config(*changed)
        model = make_model(own, load_tokenizer(gold_run.folder / "tokenizer" / "model"))
        n, without = parameters_of(own, own.model.width, model.config.vocab_size)
        assert n == sum(p.numel() for p in model.parameters())
        assert without == n - model.get_input_embeddings().weight.numel()
        budget = float(name[1:].partition("_")[0])
        assert 6 * n * own.pretrain.tokens == pytest.approx(budget, rel=0.5 * 2048 / own.pretrain.tokens)
        assert own.pretrain.warmup_tokens == own.pretrain.tokens // 20 and own.pretrain.shuffle
    config.study.budgets = [1e9]
    with pytest.raises(
        UserError, match=r"study\.budgets: 1e\+09 FLOPs are \d steps of 2048 tokens at width 32: want 10"
    ):
        scaling_choices(config, gold_run.folder)


def test_the_whole_study_at_a_tiny_size(gold_run, tmp_path, monkeypatch, capfd):
    run = gold_run.copy(tmp_path, "pretrain", "gold")
    monkeypatch.setattr("rlhf.commands.study.forwarded_overrides", lambda: [*run.overrides, *TINY])
    run.stage("study", *TINY)
    assert "3 trainings, 0 done" in capfd.readouterr().out
    found = read_json(run.folder / "study" / "scaling.json")
    (curve,) = found["isoflop"]["all parameters"]
    assert [point["loss"]["n"] for point in curve["points"]] == [1, 1, 1] and len(curve["parabola"]) == 3
    assert found["rows"]["Hoffmann et al. 2022"] == {"a": 0.5, "b": 0.5}
    files = [run.folder / "study" / "scaling" / f"c4e09_w{w}-seed0" / "pretrain/corpus/train.bin" for w in (8, 16)]
    assert files[0].samefile(files[1]), "the text was packed once"
    assert "Loss at equal compute" in [picture.title for picture in make_pictures([read_run(run.folder)])]
    tables = make_evaluation(read_run(run.folder))["studies"]
    assert [name for name, _ in tables[0]["rows"]][-2:] == ["Hoffmann et al. 2022", "Kaplan et al. 2020"]
    script, figures = SCRIPTS / "study_table.py", run.folder / "study" / "scaling.json"
    printed = subprocess.run([sys.executable, script, figures], capture_output=True, text=True, check=True).stdout
    assert (
        "| Kaplan et al. 2020 | 0.73 | 0.27 |" in printed
        and f"| 4e+09 | {curve['points'][0]['loss']['mean']:.3f} |" in printed
    )
    losses = [row["loss"] for row in found["runs"]]
    run.stage("study", *TINY)
    assert "3 trainings, 3 done" in capfd.readouterr().out
    assert [row["loss"] for row in read_json(run.folder / "study" / "scaling.json")["runs"]] == losses


def test_text_mixed_by_weight_is_mixed_for_each_cells_own_tokens(gold_run, tmp_path, monkeypatch):
    run, corpus = gold_run.copy(tmp_path, "pretrain", "gold"), gold_run.folder / "world" / "corpus.jsonl"
    given = [*TINY[:3], "study.widths=[8,24]", f"data.corpus=['{corpus}','{corpus}']", "data.corpus_weights=[3,1]"]
    monkeypatch.setattr("rlhf.commands.study.forwarded_overrides", lambda: [*run.overrides, *given])
    run.stage("study", *given)
    tokens = {row["width"]: row["tokens"] for row in read_json(run.folder / "study" / "scaling.json")["runs"]}
    for width, wanted in tokens.items():
        folder = run.folder / "study" / "scaling" / f"c4e09_w{width}-seed0" / "pretrain"
        assert PackedCorpus.load(folder / "corpus").token_count("train") == pytest.approx(wanted, abs=128)
    assert tokens[8] > 2 * tokens[24]


def made_up(alpha: float, beta: float, noise: float = 0.0) -> list[Run]:
    """Three seeds of 4 budgets x 4 sizes around the best, of L = 1 + e^6 / N^alpha + e^7 / D^beta."""
    rng, runs = np.random.default_rng(0), []
    best = LossLaw(0.0, 6.0, 7.0, alpha, beta).frontier
    for budget in (1e15, 1e16, 1e17, 1e18):
        for width, factor in enumerate((0.4, 0.75, 1.4, 2.5)):
            n = best.parameters(budget) * factor
            d = budget / (6 * n)
            loss = 1 + np.exp(6.0) / n**alpha + np.exp(7.0) / d**beta
            for seed in range(3):
                runs.append(Run(budget, width, seed, n, n, d, 1.0, loss * np.exp(rng.normal(0, noise)), 1.0))
    return runs


@pytest.mark.parametrize(("alpha", "beta"), [(0.35, 0.35), (0.3, 0.6)])
def test_both_methods_find_the_exponents_of_made_up_runs(alpha, beta):
    found = estimate(made_up(alpha, beta), False, None)
    a = beta / (alpha + beta)
    assert (found["fitted law a"], found["alpha"], found["beta"]) == pytest.approx((a, alpha, beta), abs=1e-3)
    assert found["IsoFLOP minima a"] == pytest.approx(a, abs=0.01)  # a parabola is not quite the law's shape
    assert found["IsoFLOP minima a"] + found["IsoFLOP minima b"] == pytest.approx(1, abs=1e-6)


def test_the_bootstrap_covers_the_truth_and_not_another_exponent(monkeypatch):
    monkeypatch.setattr(study_scaling, "RESAMPLES", 60)
    runs = made_up(0.3, 0.6, noise=2e-3)
    again = [
        estimate(drawn, False, None if i < 0 else LossLaw(0, 6, 7, 0.3, 0.6)) for i, drawn in enumerate(resamples(runs))
    ]
    for name in ("IsoFLOP minima a", "fitted law a"):
        low, high = with_interval(0.0, name, again)["ci95"]
        assert low - 0.02 < 2 / 3 < high + 0.02 and high - low < 0.2
        assert not low <= 0.5 <= high, "Hoffmann's exponent is told from this one"
