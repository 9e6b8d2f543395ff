"""Standard evaluations besides the stage's own: preference files, checked instructions, in-context learning, overlap with the
pretraining text, a judge, benchmarks.

Each is turned on by a setting, needs only what it measures, and writes runs/<run>/evaluations/<name>.json.
"""

from collections.abc import Callable

import torch

from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.config.setting import get
from rlhf.config.stages import EvaluateConfig
from rlhf.evaluation.benchmarks import describe_benchmarks, evaluate_benchmarks
from rlhf.evaluation.instructions import describe_instructions, evaluate_instructions
from rlhf.evaluation.judging import describe_judging, judge_answers
from rlhf.evaluation.overlap import describe_overlap, evaluate_overlap
from rlhf.evaluation.pairs import describe_pairs, evaluate_pairs
from rlhf.evaluation.labelled_task import describe_shots, evaluate_shots
from rlhf.evaluation.statistics import Figures
from rlhf.recipe import STAGES
from rlhf.runs.folders import is_complete, needs_parent, run_folder, stage_folder
from rlhf.system.files import write_json
from rlhf.system.terminal import say
from rlhf.training.setup import set_up

# The evaluation and its results as text, by the setting evaluate.<name> that turns it on.
EVALUATIONS: dict[str, tuple[Callable[[Config, torch.device], Figures], Callable[[Figures], list[str]]]] = {
    "pairs": (evaluate_pairs, describe_pairs),
    "instructions": (evaluate_instructions, describe_instructions),
    "benchmarks": (evaluate_benchmarks, describe_benchmarks),
    "shots": (evaluate_shots, describe_shots),
    "overlap": (evaluate_overlap, describe_overlap),
    "judge": (judge_answers, describe_judging),
}


def asked(config: Config) -> list[str]:
    return [name for name in EVALUATIONS if get(config, f"evaluate.{name}") is not getattr(EvaluateConfig(), name)]


def stage_is_due(config: Config) -> bool:
    """Whether the evaluation stage has everything that it needs and is not complete."""
    needed = [parent for parent in STAGES["evaluate"].parents if needs_parent(config, "evaluate", parent)]
    return not is_complete(stage_folder(config, "evaluate")) and all(
        is_complete(stage_folder(config, parent)) for parent in needed
    )


def run_external(config: Config) -> None:
    """Run the evaluations that are turned on; write and print the results."""
    for name in asked(config):
        measure, describe = EVALUATIONS[name]
        with inference(config, set_up(config)) as device:
            results = measure(config, device)
        path = run_folder(config) / "evaluations" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, results)
        for line in describe(results):
            say(f"evaluate: {line}")
        say(f"evaluate: {path}")
