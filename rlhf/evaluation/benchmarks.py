"""What programs measure: lm-eval's benchmarks on the models of a run (`evaluate.benchmarks`), and prompts that occur in the pretraining
text (`evaluate.overlap`).

Tasks come with lm-eval, or from a folder of YAML files. A task of a folder may name Python functions, which are run: give
only a folder that you trust.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf.config import Config
from rlhf.config.setting import listed
from rlhf.data.corpus import iterate_documents
from rlhf.data.reading import load_prompts
from rlhf.data.splits import conversation
from rlhf.errors import UserError, reason_of
from rlhf.evaluation.labelled_task import columns_of, load_task
from rlhf.evaluation.policies import load_stage, models_of
from rlhf.evaluation.statistics import Figures, figure, flatten, ngrams, wilson
from rlhf.runs.folders import run_folder
from rlhf.runs.run_files import is_figure
from rlhf.runs.sources import data_source, in_split, need_source

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
        raise UserError(f"evaluate.benchmarks: needs the package lm-eval ({error}): pip install lm-eval") from None
    settings = config.evaluate
    names = listed(settings.benchmarks)
    if settings.benchmark_tasks is not None and not Path(settings.benchmark_tasks).is_dir():
        raise UserError(f"evaluate.benchmark_tasks={settings.benchmark_tasks}: want a folder with YAML files")
    manager = TaskManager(include_path=settings.benchmark_tasks)
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown:
        missing = f"neither lm-eval {lm_eval.__version__} nor evaluate.benchmark_tasks has such a task"
        raise UserError(f"evaluate.benchmarks: {unknown[0]!r}: {missing}: `lm-eval ls tasks` lists them")
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
            what = f"lm-eval stopped on {', '.join(names)} ({reason_of(error)})"
            raise UserError(f"evaluate.benchmarks: {what}: check the tasks and the connection to their data") from error
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
            if filtered and is_figure(value) and not metric.endswith("_stderr"):
                error = row.get(f"{metric}_stderr,{filtered}")
                name = f"{task} {metric}" + ("" if filtered == "none" else f" ({filtered})")
                figures[name] = figure(float(value), 1.96 * error if is_figure(error) else None, count)
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


# --- overlap with the pretraining text -----------------------------------------------------------------------------

LEAST, MOST, NEAR = 8, 13, 0.7
SHOWN = 5  # number of listed n-grams, those in most prompts


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def find_overlap(prompts: dict[str, str], documents: Iterable[str]) -> Figures:
    """Overlap of the prompts, {name: text}, with the documents: of word n-grams, without case and punctuation.

    contaminated: the share of prompts of which an n-gram occurs in the text; near_duplicates: of which at least 70% do. n is
    the 5th percentile of the prompts' lengths, at least 8 and at most 13 words; prompts of fewer words are counted, not checked.

    Source: Brown et al. 2020, appendix C (n-grams and their n); Chowdhery et al. 2022, section 8 (70%).
    """
    words = {name: words_of(text) for name, text in prompts.items()}
    shortest = np.percentile(list(map(len, words.values())), 5, method="lower")
    n = int(np.clip(shortest, LEAST, MOST))
    checked = {name: set(grams) for name, of_prompt in words.items() if (grams := ngrams(of_prompt, n))}
    wanted = set(flatten(checked.values()))
    begins = {gram[:2] for gram in wanted}  # looked up first: few positions of a text begin an n-gram
    shared: set[tuple[str, ...]] = set()
    for text in map(words_of, documents):
        places = (i for i in range(len(text) - n + 1) if (text[i], text[i + 1]) in begins)
        shared |= wanted & {tuple(text[i : i + n]) for i in places}
    shares = {name: len(grams & shared) / len(grams) for name, grams in checked.items()}
    hits = Counter(flatten(grams & shared for grams in checked.values()))
    near = sorted(name for name, share in shares.items() if share >= NEAR)
    return {
        "n": n,
        "prompts": len(prompts),
        "too_short": len(prompts) - len(checked),
        "contaminated": wilson(sum(share > 0 for share in shares.values()), len(checked)) if checked else None,
        "near_duplicates": wilson(len(near), len(checked)) if checked else None,
        "near_duplicate_prompts": near,
        "ngrams": [{"text": " ".join(gram), "prompts": count} for gram, count in hits.most_common(SHOWN)],
    }


def evaluate_overlap(config: Config, device: torch.device) -> Figures:
    """{"test prompts" and, with classify.data, the task: `find_overlap` with data.corpus}."""
    sets: dict[str, dict[str, str]] = {}
    if (source := data_source(config, "prompts")) is not None:
        records, _ = load_prompts(source, config.data.format, config.data.allow_partial)
        test = in_split(config, records, "test")
        sets["test prompts"] = {record.id: conversation(record.prompt) for record in test}
    if config.classify.data is not None:
        held_out = load_task(config, columns_of(config), run_folder(config) / "evaluations")[1]
        sets[str(config.classify.data)] = {example.where: "\n".join(example.rows[0]) for example in held_out}
    sets = {name: prompts for name, prompts in sets.items() if prompts}
    if not sets:
        remedy = "give the run's data.prompts or experiment=…, raise data.test, or name a task with classify.data"
        raise UserError(f"evaluate.overlap: no test prompts and no classify.data: {remedy}")
    corpus = need_source(config, "corpus")
    return {
        name: find_overlap(prompts, iterate_documents(corpus, config.data.encoding)) for name, prompts in sets.items()
    }
