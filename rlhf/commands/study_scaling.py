"""`study.kind=scaling`: how the best number of parameters and tokens grows with compute (Hoffmann et al. 2022, Kaplan et al. 2020).

Every width is pretrained on every budget C = 6 N D, N with the embeddings, for D = C / (6 N) tokens. Text, tokenizer and depth are
those of the parent and of the configuration; blocks come in random order, the warm-up is a twentieth of D, the cosine ends with D, and the
standard deviation of the initial weights goes with 1 / sqrt(width).
"""

import random
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlhf.commands.study_cells import Cell, cell_config, mean_interval
from rlhf.config import Config
from rlhf.config.checks import check_config
from rlhf.config.setting import listed
from rlhf.config.stages import pretraining_tokens
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import UserError
from rlhf.planning.fitting import fit_loss_law, fit_parabola, fit_power
from rlhf.planning.scaling import LossLaw
from rlhf.planning.shapes import make_shape
from rlhf.runs.folders import is_complete, read_stage
from rlhf.stages import pretrain
from rlhf.system.files import read_json
from rlhf.system.terminal import say

BUDGETS, WIDTHS = (1e11, 3e11, 9e11, 2.7e12), (32, 64, 96, 128)
RESAMPLES = 500
HELD_OUT_BLOCKS = 512
# (a, b) of N_opt ~ C^a and D_opt ~ C^b. Sources: Hoffmann et al. 2022, table 2; Kaplan et al. 2020, equations 1.7 and 1.8.
PUBLISHED = {"Hoffmann et al. 2022": (0.50, 0.50), "Kaplan et al. 2020": (0.73, 0.27)}


class Point(NamedTuple):
    """The runs of one budget and width."""

    budget: float
    parameters: int
    tokens: int
    losses: list[float]

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)


class Run(NamedTuple):
    """One training of the study."""

    budget: float
    width: int
    seed: int
    parameters: int  # all of them
    without_embeddings: int
    tokens: int
    epochs: float  # tokens divided by the training text's
    loss: float  # nats per held-out token
    seconds: float


def scaling_choices(config: Config, parent: Path) -> dict[str, tuple[str, ...]]:
    """{name: the overrides} of the trainings. Raises: UserError for a budget of less than ten steps, or an odd width."""
    vocabulary = len(load_tokenizer(parent / "tokenizer" / "model"))
    batch = config.pretrain.global_batch_tokens
    choices: dict[str, tuple[str, ...]] = {}
    for budget in listed(config.study.budgets) or BUDGETS:
        for width in listed(config.study.widths) or WIDTHS:
            n = parameters_of(config, width, vocabulary)[0]
            steps = round(budget / (6 * n) / batch)
            if steps < 10:
                raise UserError(
                    f"study.budgets: {budget:g} FLOPs are {steps} steps of {batch} tokens at width {width}: want 10 or more: raise "
                    "it, or lower pretrain.global_batch_tokens"
                )
            tokens = steps * batch
            choices[cell_name(budget, width)] = (
                f"model.width={width}",
                f"model.initializer_range={config.model.initializer_range * (config.model.width / width) ** 0.5:.4g}",
                f"pretrain.tokens={tokens}",
                f"pretrain.warmup_tokens={tokens // 20}",
                "pretrain.shuffle=true",
                f"pretrain.eval_sequences={HELD_OUT_BLOCKS}",
            )
    return choices


def cell_name(budget: float, width: int) -> str:
    return f"c{budget:.4g}_w{width}".replace("+", "")


def parameters_of(config: Config, width: int, vocabulary: int) -> tuple[int, int]:
    """All parameters of the GPT at this width, and those without the embeddings."""
    shape = make_shape(replace(config.model, width=width), vocabulary)
    embeddings = shape.embedding * (1 if shape.tied else 2) + shape.learned_positions * shape.context_length * width
    return shape.language_model, shape.language_model - embeddings


def pretrain_cells(cells: list[Cell], missing: list[Cell]) -> None:
    """Train the missing cells one after another, seed by seed; cells of one seed share the text that the first one packed.

    With data.corpus_weights each cell packs its own: how much of each source it holds depends on the cell's tokens.
    """
    configs = {cell.run: cell_config(cell) for cell in missing}
    for config in configs.values():
        check_config(config, "pretrain")
    for number, cell in enumerate(sorted(missing, key=lambda cell: cell.seed)):
        config = configs[cell.run]
        done = [c.home / "pretrain" for c in cells if c.seed == cell.seed and is_complete(c.home / "pretrain")]
        packed = done[0] / "corpus" if done and config.data.corpus_weights is None else None
        say(f"study: {cell.run} ({number + 1} of {len(missing)})")
        pretrain.pretrain(config, pretrain.make_model, packed)


def read_runs(config: Config, cells: list[Cell]) -> list[Run]:
    names = {
        cell_name(c, w): c
        for c in listed(config.study.budgets) or BUDGETS
        for w in listed(config.study.widths) or WIDTHS
    }
    runs = []
    for cell in cells:
        record, of_cell = read_stage(cell.home / "pretrain") or {}, cell_config(cell)
        text = read_json(cell.home / "pretrain" / "corpus" / "meta.json")["splits"]["train"]["tokens"]
        sizes = parameters_of(of_cell, of_cell.model.width, len(load_tokenizer(cell.home / "pretrain" / "model")))
        tokens, loss = pretraining_tokens(of_cell), record["summary"]["loss"]
        runs.append(
            Run(
                names[cell.name], of_cell.model.width, cell.seed, *sizes, tokens, tokens / text, loss, record["seconds"]
            )
        )
    return runs


def scaling_results(config: Config, cells: list[Cell]) -> dict[str, Any]:
    """The runs, the IsoFLOP curves, the exponents by two methods and two parameter counts with intervals, and the laws."""
    runs = read_runs(config, cells)
    seeds = sorted({run.seed for run in runs})
    rows: dict[str, dict[str, Any]] = {}
    laws, curves = {}, {}
    for which, without in (("all parameters", False), ("without embeddings", True)):
        law = fit_law(runs, without)
        again = [] if len(seeds) < 2 else [estimate(drawn, without, law) for drawn in resamples(runs)]
        figures = {name: with_interval(value, name, again) for name, value in estimate(runs, without, law).items()}
        for method in ("IsoFLOP minima", "fitted law"):
            exponents = {name: figures[f"{method} {name}"] for name in "ab" if f"{method} {name}" in figures}
            if exponents:
                rows[f"{method}, {which}"] = exponents
        laws[which] = {name: value for name, value in figures.items() if name in asdict(law or LossLaw(0, 0, 0, 0, 0))}
        curves[which] = [isoflop_curve(budget, list(points)) for budget, points in by_budget(runs, without)]
    return {
        "study": "scaling",
        "title": "Scaling: the best size at equal compute",
        "seeds": seeds,
        "parents": len({cell.parent for cell in cells}),
        "rows": rows | {name: {"a": a, "b": b} for name, (a, b) in PUBLISHED.items()},
        "laws": laws,
        "isoflop": curves,
        "runs": [run._asdict() for run in runs],
    }


def by_budget(runs: Iterable[Run], without: bool) -> Iterable[tuple[float, Iterable[Point]]]:
    """(C, its points) of each budget; a point's loss is the mean over its runs."""
    ordered = sorted(runs, key=lambda run: (run.budget, run.width))
    points = []
    for (budget, _), same in groupby(ordered, key=lambda run: (run.budget, run.width)):
        group = list(same)
        n = group[0].without_embeddings if without else group[0].parameters
        points.append(Point(budget, n, group[0].tokens, [run.loss for run in group]))
    return groupby(points, key=lambda point: point.budget)


def isoflop_curve(budget: float, points: list[Point]) -> dict[str, Any]:
    """A budget's points, its parabola in ln N, and the best N and D; `inside`: whether these are between widths that were trained."""
    curve: dict[str, Any] = {
        "budget": budget,
        "points": [{"parameters": p.parameters, "tokens": p.tokens, "loss": mean_interval(p.losses)} for p in points],
    }
    if len(points) < 3:
        return curve
    sizes, tokens, losses = [p.parameters for p in points], [p.tokens for p in points], [p.loss for p in points]
    of_size, of_tokens = fit_parabola(sizes, losses), fit_parabola(tokens, losses)
    best = of_size.minimum
    return curve | {
        "parabola": list(of_size),
        "best_parameters": best,
        "best_tokens": of_tokens.minimum,
        "inside": best is not None and min(sizes) <= best <= max(sizes),
    }


def estimate(runs: list[Run], without: bool, near: LossLaw | None) -> dict[str, float]:
    """a and b by the IsoFLOP minima inside the trained sizes (two budgets or more), and by the law with its constants."""
    curves = [isoflop_curve(budget, list(points)) for budget, points in by_budget(runs, without)]
    inside = [curve for curve in curves if curve.get("inside")]
    figures = {}
    if len(inside) > 1:
        budgets = [curve["budget"] for curve in inside]
        for name, key in (("a", "best_parameters"), ("b", "best_tokens")):
            figures[f"IsoFLOP minima {name}"] = fit_power(budgets, [curve[key] for curve in inside])[1]
    law = fit_law(runs, without, near)
    if law is not None:
        figures |= {"fitted law a": law.a, "fitted law b": law.b} | asdict(law)
    return figures


def fit_law(runs: list[Run], without: bool, near: LossLaw | None = None) -> LossLaw | None:
    if len({(run.budget, run.width) for run in runs}) < 6:  # five constants
        return None
    sizes = [run.without_embeddings if without else run.parameters for run in runs]
    return fit_loss_law(sizes, [run.tokens for run in runs], [run.loss for run in runs], near)


def resamples(runs: list[Run]) -> Iterable[list[Run]]:
    """Bootstrap: for each budget and width, as many runs as seeds, drawn with replacement."""
    rng = random.Random("scaling")
    groups: dict[tuple[float, int], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.budget, run.width), []).append(run)
    for _ in range(RESAMPLES):
        yield [rng.choice(group) for group in groups.values() for _ in group]


def with_interval(value: float, name: str, again: list[dict[str, float]]) -> dict[str, Any]:
    """A figure with the 2.5% and 97.5% quantiles of its resamples, and their number, since some have no minimum."""
    drawn = [one[name] for one in again if name in one]
    ends = [float(end) for end in np.quantile(drawn, (0.025, 0.975))] if drawn else None
    return {"mean": value, "ci95": ends, "n": len(drawn)}
