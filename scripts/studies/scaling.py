"""How the best number of parameters and tokens grows with compute (Hoffmann et al. 2022, Kaplan et al. 2020).

    python scripts/studies/scaling.py --out runs/scaling --seeds 0 1 2 --parents runs/s0 --budgets 1.2e11 2.4e11 4.8e11 9.6e11 \
        --widths 16 24 32 48 64 --picture docs/img/isoflop.png experiment=gold threads=1 gold.documents=300000 \
        pretrain.global_batch_tokens=1024

Every width is pretrained on every budget C = 6 N D, N with the embeddings, for D = C / (6 N) tokens. Text and tokenizer are the parent's,
depth is the configuration's; blocks come in random order, the warm-up is a twentieth of D, the cosine ends with D, and the standard
deviation of the initial weights goes with 1 / sqrt(width). Prints the exponents of N ~ C^a and D ~ C^b by the IsoFLOP minima and by the
fitted law, with intervals by a bootstrap over the seeds of each budget and width, and the losses.
"""

import itertools
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np
from harness import Cell, Figure, draw, make_cells, mean_interval, parse, read, run, show, table

from rlhf.config.compose import compose_config
from rlhf.data.tokenizer import load_tokenizer
from rlhf.planning.formulas import make_shape
from rlhf.planning.scaling import LossLaw

BUDGETS, WIDTHS = (1e11, 3e11, 9e11, 2.7e12), (32, 64, 96, 128)
RESAMPLES = 500
HELD_OUT_BLOCKS = 512
# (a, b). Sources: Hoffmann et al. 2022, table 2; Kaplan et al. 2020, equations 1.7 and 1.8.
PUBLISHED = {"Hoffmann et al. 2022": (0.50, 0.50), "Kaplan et al. 2020": (0.73, 0.27)}
DELTA = 1e-3  # of the Huber loss
# Hoffmann et al. 2022, section D.3: alpha, beta, e, a, b of L = exp(e) + exp(a) / N^alpha + exp(b) / D^beta.
EXPONENTS, ERRORS, FACTORS = np.arange(0, 2.5, 0.5), np.arange(-1, 1.5, 0.5), np.arange(0, 30, 5)
STARTS = (EXPONENTS, EXPONENTS, ERRORS, FACTORS, FACTORS)
TRIED = 12


class Run(NamedTuple):
    """One training."""

    budget: float
    width: int
    seed: int
    parameters: int  # all of them
    without_embeddings: int
    tokens: int
    loss: float  # nats per held-out token


class Parabola(NamedTuple):
    """log-quadratic loss of one budget: L(x) = c2 (ln x)^2 + c1 ln x + c0."""

    c2: float
    c1: float
    c0: float

    @property
    def minimum(self) -> float | None:
        """x of the least loss; None if the curve does not open upwards."""
        return float(np.exp(-self.c1 / (2 * self.c2))) if self.c2 > 0 else None


def fit_parabola(x: Sequence[float], losses: Sequence[float]) -> Parabola:
    """The IsoFLOP curve of one budget over N (or D): least squares of loss on ln x. Needs three different x.

    Source: Hoffmann et al. 2022, section 3.2.
    """
    return Parabola(*(float(c) for c in np.polyfit(np.log(x), losses, 2)))


def fit_power(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """(k, a) of y = k x^a, by least squares of ln y on ln x."""
    a, log_k = np.polyfit(np.log(x), np.log(y), 1)
    return float(np.exp(log_k)), float(a)


def fit_loss_law(
    parameters: Sequence[float], tokens: Sequence[float], losses: Sequence[float], near: LossLaw | None = None
) -> LossLaw:
    """The law that minimises sum Huber_delta(log L(N, D) - log L) with delta = 1e-3, by L-BFGS. Needs at least five runs.

    near: start from this law alone, for the resamples of a bootstrap.

    Source: Hoffmann et al. 2022, equation 3 and section D.3.
    Differs: of the paper's 4,500 starts only the `TRIED` with the least objective are followed; ln N and ln D are centred, which moves
    no minimum, and the sum is minimised to 1e-12 (Besiroglu et al. 2024: the paper's own optimiser stopped too early).
    """
    from scipy.optimize import minimize

    n, d, target = (np.log(np.asarray(values, float)) for values in (parameters, tokens, losses))
    n0, d0 = n.mean(), d.mean()
    n, d = n - n0, d - d0

    def objective(point: np.ndarray) -> tuple[float, np.ndarray]:
        alpha, beta, e, a, b = point
        terms = np.stack([np.full_like(n, e), a - alpha * n, b - beta * d])
        top = terms.max(0)
        exps = np.exp(terms - top)
        share = exps / exps.sum(0)
        off = top + np.log(exps.sum(0)) - target
        slope = np.clip(off, -DELTA, DELTA)
        value = np.where(np.abs(off) <= DELTA, off**2 / 2, DELTA * (np.abs(off) - DELTA / 2)).sum()
        by_exponents = [-slope @ (share[1] * n), -slope @ (share[2] * d)]
        gradient = np.array([*by_exponents, *(slope @ part for part in share)])
        return value / DELTA**2, gradient / DELTA**2  # a scale that suits the optimiser's tolerances

    if near is not None:
        starts = [(near.alpha, near.beta, near.log_e, near.log_a - near.alpha * n0, near.log_b - near.beta * d0)]
    else:
        grid = [(al, be, e, a - al * n0, b - be * d0) for al, be, e, a, b in itertools.product(*STARTS)]
        starts = sorted(grid, key=lambda point: objective(np.array(point))[0])[:TRIED]
    exactly = {"maxiter": 5000, "maxfun": 20000, "ftol": 1e-12, "gtol": 1e-8}
    minima = [minimize(objective, np.array(start), jac=True, method="L-BFGS-B", options=exactly) for start in starts]
    alpha, beta, e, a, b = min(minima, key=lambda minimum: minimum.fun).x
    return LossLaw(float(e), float(a + alpha * n0), float(b + beta * d0), float(alpha), float(beta))


def parameters_of(config: Any, width: int, vocabulary: int) -> tuple[int, int]:
    """All parameters of the GPT at this width, and those without the embeddings."""
    shape = make_shape(replace(config.model, width=width), vocabulary)
    embeddings = (
        shape.embedding * (1 if shape.tie_word_embeddings else 2)
        + (shape.positions == "learned") * shape.context_length * width
    )
    return shape.language_model, shape.language_model - embeddings


def make_choices(
    config: Any, vocabulary: int, budgets: Sequence[float], widths: Sequence[int]
) -> dict[str, tuple[str, ...]]:
    """{name: the overrides} of the trainings; ends the program for a budget of less than ten steps."""
    batch, choices = config.pretrain.global_batch_tokens, {}
    for budget in budgets:
        for width in widths:
            steps = round(budget / (6 * parameters_of(config, width, vocabulary)[0]) / batch)
            if steps < 10:
                sys.exit(
                    f"--budgets {budget:g}: {steps} steps of {batch} tokens at width {width}: want 10 or more: raise it, or lower "
                    "pretrain.global_batch_tokens"
                )
            spread, tokens = config.model.initializer_range * (config.model.width / width) ** 0.5, steps * batch
            choices[cell_name(budget, width)] = (
                f"model.width={width}", f"model.initializer_range={spread:.4g}", f"pretrain.tokens={tokens}",
                f"pretrain.warmup_tokens={tokens // 20}", "pretrain.shuffle=true",
            )  # fmt: skip
    return choices


def cell_name(budget: float, width: int) -> str:
    return f"c{budget:.4g}_w{width}".replace("+", "")


def read_run(cell: Cell, budgets: Sequence[float], vocabulary: int) -> Run:
    config: Any = compose_config(list(cell.steps[0][1:]))
    width, loss = config.model.width, read(cell.home / "pretrain" / "stage.json")["summary"]["loss"]
    (budget,) = [c for c in budgets if cell_name(c, width) == cell.name]
    return Run(budget, width, cell.seed, *parameters_of(config, width, vocabulary), config.pretrain.tokens, loss)


def isoflop_curves(runs: Iterable[Run], without: bool) -> list[dict[str, Any]]:
    """Of each budget: sizes, tokens, losses (of each seed), a parabola in ln N, and the best N and D if they lie between the sizes."""
    curves = []
    for budget, of_budget in itertools.groupby(sorted(runs), key=lambda run: run.budget):
        groups = [list(same) for _, same in itertools.groupby(of_budget, key=lambda run: run.width)]
        n = [group[0].without_embeddings if without else group[0].parameters for group in groups]
        d, losses = [group[0].tokens for group in groups], [[run.loss for run in group] for group in groups]
        means = [sum(row) / len(row) for row in losses]
        curve = {"budget": budget, "parameters": n, "tokens": d, "losses": losses, "parabola": None, "best": None}
        if len(groups) > 2:
            curve["parabola"], of_tokens = fit_parabola(n, means), fit_parabola(d, means)
            best = curve["parabola"].minimum
            if best is not None and min(n) <= best <= max(n):
                curve["best"] = (best, of_tokens.minimum)
        curves.append(curve)
    return curves


def estimate(runs: list[Run], without: bool, near: LossLaw | None) -> dict[str, float]:
    """a and b by the IsoFLOP minima inside the trained sizes (two budgets or more), and by the law with its constants."""
    inside = [curve for curve in isoflop_curves(runs, without) if curve["best"] is not None]
    figures = {}
    if len(inside) > 1:
        for name, best in zip("ab", zip(*(curve["best"] for curve in inside), strict=True), strict=True):
            figures[f"IsoFLOP minima {name}"] = fit_power([curve["budget"] for curve in inside], best)[1]
    law = fit_law(runs, without, near)
    return figures if law is None else figures | {"fitted law a": law.a, "fitted law b": 1 - law.a} | asdict(law)


def fit_law(runs: list[Run], without: bool, near: LossLaw | None = None) -> LossLaw | None:
    if len({(run.budget, run.width) for run in runs}) < 6:  # five constants
        return None
    sizes = [run.without_embeddings if without else run.parameters for run in runs]
    return fit_loss_law(sizes, [run.tokens for run in runs], [run.loss for run in runs], near)


def resamples(runs: list[Run], number: int = RESAMPLES) -> Iterable[list[Run]]:
    """Bootstrap: for each budget and width, as many runs as seeds, drawn with replacement."""
    rng = random.Random("scaling")
    groups: dict[tuple[float, int], list[Run]] = {}
    for run_ in runs:
        groups.setdefault((run_.budget, run_.width), []).append(run_)
    for _ in range(number):
        yield [rng.choice(group) for group in groups.values() for _ in group]


def with_interval(value: float, name: str, again: list[dict[str, float]]) -> Figure:
    """A figure with the 2.5% and 97.5% quantiles of its resamples, and their number, since some have no minimum."""
    drawn = [one[name] for one in again if name in one]
    ends = [float(end) for end in np.quantile(drawn, (0.025, 0.975))] if drawn else None
    return {"mean": value, "ci95": ends, "n": len(drawn)}


def tables(runs: list[Run]) -> None:
    """Print the exponents, the law's constants, and the losses."""
    lines, laws = [], []
    several = len({run.seed for run in runs}) > 1
    for which, without in (("all parameters", False), ("without embeddings", True)):
        law = fit_law(runs, without)
        again = [estimate(drawn, without, law) for drawn in resamples(runs)] if several else []
        figures = {name: with_interval(value, name, again) for name, value in estimate(runs, without, law).items()}
        for method in ("IsoFLOP minima", "fitted law"):
            if f"{method} a" in figures:
                lines.append([f"{method}, {which}", figures[f"{method} a"], figures[f"{method} b"]])
        if law is not None:
            laws.append([which, *(figures[name] for name in asdict(law))])
    lines += [[name, f"{a:.2f}", f"{b:.2f}"] for name, (a, b) in PUBLISHED.items()]
    table(["N ~ C^a, D ~ C^b", "a", "b"], lines)
    if laws:
        table(["law, N", *asdict(LossLaw(0, 0, 0, 0, 0))], laws)
    curves = isoflop_curves(runs, False)
    losses = [[f"{c['budget']:.2g}", *(show(mean_interval(row)["mean"]) for row in c["losses"])] for c in curves]
    table(["FLOPs", *(f"{n:,}" for n in curves[0]["parameters"])], losses)


def main() -> None:
    several = {"nargs": "+"}
    budgets, widths = several | {"type": float, "default": BUDGETS}, several | {"type": int, "default": WIDTHS}
    asked = parse(__doc__, budgets=budgets, widths=widths)
    vocabulary = len(load_tokenizer(asked.parents[0] / "tokenizer" / "model"))
    choices = make_choices(compose_config(asked.overrides), vocabulary, asked.budgets, asked.widths)
    taken = [stage for stage in ("world", "tokenizer") if (asked.parents[0] / stage).exists()]  # own text has no world
    held_out = (f"pretrain.eval_sequences={HELD_OUT_BLOCKS}",)
    cells = run(make_cells(asked, choices, taken, {"pretrain": held_out}), asked)
    runs = [read_run(cell, asked.budgets, vocabulary) for cell in cells]
    tables(runs)
    series = {}
    for curve in isoflop_curves(runs, False):
        means = map(mean_interval, curve["losses"])
        series[f"{curve['budget']:.3g} FLOPs"] = list(zip(map(np.log10, curve["parameters"]), means, strict=True))
    draw(asked.picture, series, "log10 of parameters", "nats per held-out token")


if __name__ == "__main__":
    main()
