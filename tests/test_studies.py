"""scripts/studies: cells run and resumed by two of the scripts, and their statistics by hand."""

import importlib
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from rlhf.planning.scaling import PUBLISHED, LossLaw
from tests.stages.conftest import gold_run  # noqa: F401

STUDIES = Path(__file__).parents[1] / "scripts" / "studies"
NAMES = sorted(path.stem for path in STUDIES.glob("*.py"))


def load_scripts() -> dict[str, ModuleType]:
    """The scripts as modules; scripts/bench has a harness too, so that sys.modules is left as it was."""
    kept = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    sys.path.insert(0, str(STUDIES))
    try:
        return {name: importlib.import_module(name) for name in NAMES}
    finally:
        sys.path.remove(str(STUDIES))
        for name in NAMES:
            sys.modules.pop(name, None)
        sys.modules.update(kept)


S = load_scripts()


@pytest.fixture
def here(monkeypatch):
    """Commands run in this process instead of one of their own; gives the command lines."""
    started: list[list[str]] = []

    def in_this_process(arguments: list[str], log: object) -> int:
        from rlhf.cli import main

        started.append(arguments)
        main(arguments)
        return 0

    monkeypatch.setattr(S["harness"], "call", in_this_process)
    return started


def options(run, out: Path) -> list[str]:
    return ["--out", str(out), "--seeds", "0", "--parents", str(run.folder), *run.overrides]


@pytest.mark.long
def test_details_runs_what_is_missing_and_compares_with_the_default(gold_run, tmp_path, here, capsys):  # noqa: F811
    details = S["details"]
    more = ["ppo.critic_warmup_updates=0", "ppo.episodes=64", "evaluate.samples=1", "evaluate.prompts=4"]
    asked = [*options(gold_run, tmp_path / "out"), "--cells", "default", "epochs_1", *more]
    picture = ["--picture", str(tmp_path / "a.svg")]
    details.compare(details.CHOICES, S["harness"].parse("", [*asked, *picture]))
    printed = capsys.readouterr().out
    assert [line[0] for line in here] == ["ppo", "evaluate"] * 2 and (tmp_path / "a.svg").stat().st_size > 3000
    results = S["harness"].read(tmp_path / "out" / "epochs_1-seed0" / "evaluate" / "results.json")
    assert f"| epochs_1 | {results['gold']['win_rate_vs_sft']['value']:.3f} |" in printed and "| epochs_1 | " in printed
    assert "dev: 4 prompts" in printed, "choices are not made on test prompts"
    details.compare(details.CHOICES, S["harness"].parse("", asked))
    assert len(here) == 4 and "2 cells, 2 done" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="run with other settings: delete it"):
        details.compare(details.CHOICES, S["harness"].parse("", [*asked, "ppo.lr=1e-3"]))


def test_every_choice_composes():
    from rlhf.config.checks import check_config
    from rlhf.config.compose import compose_config

    for changed in S["details"].CHOICES.values():
        check_config(compose_config(["experiment=gold", *changed]), "ppo")


def test_the_lstm_has_the_size_of_the_transformer_and_sees_no_later_token(tmp_path):
    S["lstm"].register()
    for parameters, vocabulary in ((60_000, 300), (117_000_000, 40_000)):
        with torch.device("meta"):
            made = S["lstm"].LSTMForCausalLM(S["lstm"].LSTMConfig.sized(parameters, vocab_size=vocabulary))
        assert sum(p.numel() for p in made.parameters()) == pytest.approx(parameters, rel=0.02)
    model = S["lstm"].LSTMForCausalLM(S["lstm"].LSTMConfig.sized(60_000, vocab_size=300, context_length=32)).eval()
    tokens = torch.randint(0, 300, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 300
    a, b = model(tokens).logits, model(changed).logits
    assert torch.equal(a[:, :7], b[:, :7]) and not torch.allclose(a[:, 7:], b[:, 7:])


def test_intervals_over_seeds_by_hand():
    # mean 2, standard deviation 1, error 1/sqrt 3, t(.975, 2) = 4.302653
    found = S["harness"].mean_interval([1.0, 2.0, 3.0])
    assert found["mean"] == 2.0 and found["n"] == 3
    assert found["ci95"] == pytest.approx([2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)], abs=1e-5)
    assert S["harness"].mean_interval([1.0])["ci95"] is None
    assert S["harness"].show(S["harness"].within({"mean": 0.9, "ci95": [0.7, 1.1]}), 2) == "0.90 [0.70, 1.00]"


def made_up(law: LossLaw, noise: float = 0.0) -> list:
    """Three seeds of 4 budgets x 4 sizes around the best, with the losses of a law."""
    rng, runs = np.random.default_rng(0), []
    for budget in (1e15, 1e16, 1e17, 1e18):
        for width, factor in enumerate((0.4, 0.75, 1.4, 2.5)):
            n = law.frontier.parameters(budget) * factor
            d = budget / (6 * n)
            losses = law.loss(n, d) * np.exp(rng.normal(0, noise, 3))
            runs += [S["scaling"].Run(budget, width, seed, n, n, d, loss) for seed, loss in enumerate(losses)]
    return runs


@pytest.mark.parametrize("law", [PUBLISHED, LossLaw(0.0, 6.0, 7.0, 0.3, 0.6)])
def test_both_methods_find_the_exponents_of_made_up_losses(law):
    found = S["scaling"].estimate(made_up(law), False, None)
    fit = [found[name] for name in ("fitted law a", "alpha", "beta")]
    assert fit == pytest.approx([law.a, law.alpha, law.beta], abs=1e-3)
    assert found["IsoFLOP minima a"] == pytest.approx(law.a, abs=0.01)  # a parabola is not quite the law's shape
    assert found["IsoFLOP minima a"] + found["IsoFLOP minima b"] == pytest.approx(1, abs=1e-6)


def test_an_outlier_does_not_move_the_fit_and_the_bootstrap_covers_the_truth():
    law = LossLaw(0.0, 6.0, 7.0, 0.3, 0.6)
    runs = made_up(law, noise=2e-3)
    again = [S["scaling"].estimate(drawn, False, law) for drawn in S["scaling"].resamples(runs, 60)]
    for name in ("IsoFLOP minima a", "fitted law a"):
        low, high = S["scaling"].with_interval(0.0, name, again)["ci95"]
        assert low - 0.02 < 2 / 3 < high + 0.02 and high - low < 0.2 and not low <= 0.5 <= high
    runs = made_up(law, noise=2e-4)
    spoilt = [runs[0]._replace(loss=runs[0].loss * 1.2), *runs[1:]]
    assert S["scaling"].fit_law(spoilt, False, law).a == pytest.approx(law.a, abs=0.03)
    curve = S["scaling"].fit_parabola([1e3, 1e4, 1e5], [2.0, 1.0, 2.0])
    assert curve.minimum == pytest.approx(1e4) and np.polyval(curve, np.log(1e4)) == pytest.approx(1.0)
    assert S["scaling"].fit_parabola([1e3, 1e4, 1e5], [1.0, 2.0, 1.0]).minimum is None


def test_candidates_of_a_run_have_learned_and_true_scores(gold_run):  # noqa: F811
    scores, judged = S["frontier"].draw_candidates_of(gold_run.config("evaluate.prompts=3"), 2)
    assert [len(row) for row in scores] == [len(row) for row in judged] == [2, 2, 2]


def test_best_of_two_the_optimum_onset_and_alarm_by_hand():
    """The higher of two samples wins unless both draws are the lower one: 3/4, and the KL is 1/4 ln(1/2) + 3/4 ln(3/2)."""
    optimum, nats = S["sentiment_optimum"], 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    weights = optimum.best_of_weights(np.array([[5.0, 7.0], [3.0, -1.0]]), 2)
    assert weights.tolist() == [[0.25, 0.75], [0.75, 0.25]] and optimum.kl_of(weights) == pytest.approx(nats)
    # of two samples one apart, weights 1/4 and 3/4 are exp(r / beta) with beta = 1 / ln 3
    assert optimum.optimum(np.array([[0.0, 1.0]]), nats)[0].tolist() == pytest.approx([0.25, 0.75])
    monitor = S["monitor"]
    gold = np.array([0.70, 0.80, 0.85, 0.84, 0.70, 0.60])  # two standard errors are 0.018; the dip of 0.01 is noise
    assert monitor.onset(gold) == 4 and monitor.onset(gold[:4]) is None
    assert monitor.onset(np.array([0.8, 0.5, 0.8])) is None, "it has to stay below"
    values = np.array([1.0, 1.2, 1.0, 1.2, 1.1, 2.0, 3.0])  # 1.1 +- 0.1
    path = monitor.moved("length", values)
    assert path[-2:].tolist() == pytest.approx([9.0, 19.0])
    assert monitor.moved("trusted model falls", -values)[-1] == pytest.approx(20.0), "from the highest, -1"
    assert monitor.alarm(path, 3.0) == 6 and monitor.alarm(path, 10.0) is None, "two updates in a row"
    cases = [{"onset": 6, "moved": {"x": path}}, {"onset": None, "moved": {"x": path[:5]}}]
    assert monitor.rates(cases, "x", 3.0) == (0.0, 1.0) and monitor.rates(cases, "x", 10.0) == (0.0, 0.0)
    rollouts = [{"gold/total": x} for x in (0.6, 0.9, 0.6)]
    dev = [{"eval/dev/gold/total": x} for x in (0.6, 0.6, 0.6, 0.0)]
    assert monitor.true_reward(rollouts + dev).tolist() == pytest.approx([2 / 3, 2 / 3, 2 / 3])
    assert monitor.area([(0.0, 0.5), (0.5, 1.0)]) == pytest.approx(0.875)


def test_a_quarter_of_the_training_rankings_is_reversed(gold_run, tmp_path):  # noqa: F811
    harness, wrong = S["harness"], S["steadier"].spoil(gold_run.folder, tmp_path / "labels.jsonl")
    before, after = (harness.rows(path) for path in (gold_run.folder / "label" / "comparisons.jsonl", wrong))
    train = [(a, b) for a, b in zip(before, after, strict=True) if a["metadata"]["split"] == "train"]
    flipped = [b["ranking"] == a["ranking"][::-1] != a["ranking"] for a, b in train]
    assert 0.1 < sum(flipped) / len(train) < 0.4
    assert all(b == a for (a, b), was in zip(train, flipped, strict=True) if not was)
    assert all(a == b for a, b in zip(before, after, strict=True) if a["metadata"]["split"] != "train")
