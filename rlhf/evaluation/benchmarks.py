"""Benchmarks by lm-eval on the model of any stage: `evaluate.benchmarks`. Tasks come with lm-eval, or from a folder of YAML files.

A task of a folder may name Python functions, which are run: give only a folder that you trust.
"""

import math
from pathlib import Path
from typing import Any

import torch

from rlhf.config import Config
from rlhf.config.setting import listed
from rlhf.errors import UserError, reason_of
from rlhf.evaluation.instructions import load_stage, models_of
from rlhf.evaluation.statistics import Figures, figure, show
from rlhf.runs.run_files import is_number

BOOTSTRAPS = 1000  # bootstrap samples of metrics without a formula for their error


def evaluate_benchmarks(config: Config, device: torch.device) -> Figures:
    """{"models": {model: {"task metric": figure}}, "differences": {"ppo - sft": …}, "lm_eval": its version}.

    Raises: UserError without lm-eval, for an unknown task, and for a task that fails.
    """
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError(
            f"evaluate.benchmarks: needs the package lm-eval ({error}): pip install 'rlhf-recipe[benchmarks]'"
        ) from None
    settings = config.evaluate
    names = listed(settings.benchmarks)
    if settings.benchmark_tasks is not None and not Path(settings.benchmark_tasks).is_dir():
        raise UserError(
            f"evaluate.benchmark_tasks={settings.benchmark_tasks}: no such folder: want one with YAML files"
        )
    manager = TaskManager(include_path=settings.benchmark_tasks)
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown:
        raise UserError(
            f"evaluate.benchmarks: {unknown[0]!r}: lm-eval {lm_eval.__version__} has no such task, nor has "
            "evaluate.benchmark_tasks: `lm-eval ls tasks` lists them"
        )
    figures: dict[str, Figures] = {}
    for name in models_of(config):
        policy, tokenizer = load_stage(config, name, device)
        model = HFLM(pretrained=policy, tokenizer=tokenizer, batch_size=settings.benchmark_batch, device=str(device))
        try:
            results = lm_eval.simple_evaluate(
                model=model,
                tasks=names,
                task_manager=manager,
                limit=settings.benchmark_limit,
                log_samples=False,
                bootstrap_iters=BOOTSTRAPS,
                random_seed=config.seed,
                numpy_random_seed=config.seed,
                torch_random_seed=config.seed,
                fewshot_random_seed=config.seed,
            )
        except Exception as error:  # tasks and their data can raise anything
            raise UserError(
                f"evaluate.benchmarks: lm-eval stopped on {', '.join(names)} ({reason_of(error)}): check the tasks and the "
                "connection to their data"
            ) from error
        assert results is not None
        figures[name] = task_figures(results)
    return {"models": figures, "differences": differences(figures), "lm_eval": lm_eval.__version__}


def task_figures(results: dict[str, Any]) -> Figures:
    """{"task metric": {"value", "ci95", "n"}} of lm-eval's results; ci95 is None if it gives no standard error."""
    figures: Figures = {}
    for task, row in results["results"].items():
        count = (results.get("n-samples") or {}).get(task, {}).get("effective")
        for key, value in row.items():
            metric, _, filtered = key.partition(",")
            if metric.endswith("_stderr") or not is_number(value) or not filtered:
                continue
            error = row.get(f"{metric}_stderr,{filtered}")
            name = f"{task} {metric}" + ("" if filtered == "none" else f" ({filtered})")
            figures[name] = figure(float(value), 1.96 * error if is_number(error) else None, count)
    return figures


def differences(models: dict[str, Figures]) -> Figures:
    """Each model minus the first, by task; a negative difference is the alignment tax. The interval treats the errors as independent,
    so it is too wide for models that answer the same questions."""
    first, *others = models
    by_pair: Figures = {}
    for name in others:
        rows = {}
        for task, ours in models[name].items():
            if (base := models[first].get(task)) is not None:
                halves = [row["ci95"][1] - row["value"] for row in (ours, base) if row["ci95"]]
                half = math.hypot(*halves) if len(halves) == 2 else None
                rows[task] = figure(ours["value"] - base["value"], half, ours["n"])
        by_pair[f"{name} - {first}"] = rows
    return by_pair


def describe_benchmarks(results: Figures) -> list[str]:
    """One line per model and difference."""
    return [
        f"benchmarks: {name}: " + ", ".join(f"{task} {show(figure)}" for task, figure in rows.items())
        for name, rows in {**results["models"], **results["differences"]}.items()
    ]
