"""Standard evaluations besides the stage's own: preference files, checked instructions, in-context learning, overlap with the
pretraining text, a judge, benchmarks.

Each is turned on by a setting, needs only what it measures, and writes runs/<run>/evaluations/<name>.json.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rlhf.config import Config
from rlhf.config.setting import get
from rlhf.config.stages import EvaluateConfig
from rlhf.evaluation.benchmarks import describe_benchmarks, evaluate_benchmarks
from rlhf.evaluation.instructions import describe_instructions, evaluate_instructions
from rlhf.evaluation.judging import describe_judging, judge_answers
from rlhf.evaluation.overlap import describe_overlap, evaluate_overlap
from rlhf.evaluation.pairs import describe_pairs, evaluate_pairs
from rlhf.evaluation.shots import describe_shots, evaluate_shots
from rlhf.files import write_json
from rlhf.precision import inference
from rlhf.recipe import STAGES
from rlhf.runs.folders import is_complete, needs_parent, run_folder, stage_folder
from rlhf.terminal import say
from rlhf.training.setup import set_up


class External(NamedTuple):
    measure: Callable[[Config, torch.device], dict[str, Any]]
    describe: Callable[[dict[str, Any]], list[str]]


EVALUATIONS = {  # by the setting evaluate.<name> that turns it on
    "pairs": External(evaluate_pairs, describe_pairs),
    "instructions": External(evaluate_instructions, describe_instructions),
    "benchmarks": External(evaluate_benchmarks, describe_benchmarks),
    "shots": External(evaluate_shots, describe_shots),
    "overlap": External(evaluate_overlap, describe_overlap),
    "judge": External(judge_answers, describe_judging),
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
        with inference(config, set_up(config)) as device:
            results = EVALUATIONS[name].measure(config, device)
        path = run_folder(config) / "evaluations" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, results)
        for line in EVALUATIONS[name].describe(results):
            say(f"evaluate: {line}")
        say(f"evaluate: {path}")
