"""How often models follow instructions that a program can check: `evaluate.instructions`, offline."""

from typing import Any

import torch

from rlhf.config import Config
from rlhf.config.setting import listed
from rlhf.data.prompts import load_prompts
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import UserError
from rlhf.evaluation.answers import Drawing, draw_answers, fit_prompts, room_for
from rlhf.evaluation.rules import checks_of, follows
from rlhf.evaluation.statistics import Figures, interval, ratio_interval, show
from rlhf.recipe import POLICY_STAGES
from rlhf.runs.folders import check_output, is_complete, run_folder, stage_folder
from rlhf.training.setup import load_frozen


def models_of(config: Config, base: bool = False) -> list[str]:
    """evaluate.models, or the complete stages of the run that have a policy, with the base only on request.

    Raises: UserError for none or an unknown one.
    """
    names = listed(config.evaluate.models)
    unknown = [name for name in names if name not in POLICY_STAGES]
    if unknown:
        raise UserError(f"evaluate.models: {unknown[0]!r}: want some of {', '.join(POLICY_STAGES)}")
    models = names or [
        name for name in POLICY_STAGES if (base or name != "pretrain") and is_complete(stage_folder(config, name))
    ]
    if not models:
        raise UserError(
            f"{run_folder(config)}: no finished policy to evaluate: run `rlhf sft` first, or set evaluate.models"
        )
    return models


def load_stage(config: Config, name: str, device: torch.device) -> tuple[Any, Any]:
    """The policy and tokenizer of a complete stage of the run. Raises: UserError if it is not complete, or damaged."""
    folder = stage_folder(config, name)
    check_output(folder, name)
    return load_frozen(config, folder / "model", device), load_tokenizer(folder / "model")


def evaluate_instructions(config: Config, device: torch.device) -> Figures:
    """{model: {"prompts", "instructions", "by_rule", "left_out"}}: shares of prompts all of whose instructions are followed, and of
    instructions, in greedy answers."""
    records, _ = load_prompts(config.evaluate.instructions, config.data.format, config.data.allow_partial)
    checks = [checks_of(record) for record in records]
    figures: Figures = {}
    for name in models_of(config):
        policy, tokenizer = load_stage(config, name, device)
        length, room = room_for(tokenizer, config.rollout.max_new_tokens)
        fitted = fit_prompts(tokenizer, [record.prompt for record in records], room)
        asked = [i for i, fit in enumerate(fitted) if fit is not None and not fit[1]]
        if not asked:
            raise UserError(f"evaluate.instructions: no prompt fits the context of {tokenizer.model_max_length} tokens")
        how = Drawing(config.seed, length, greedy=True, batch_size=config.rollout.batch_size)
        prompts = [fit[0] for i in asked if (fit := fitted[i]) is not None]
        answers = draw_answers(policy, tokenizer, prompts, [("instructions", records[i].id) for i in asked], how)
        passed = [
            [follows(answer.text, check) for check in checks[i]] for i, answer in zip(asked, answers, strict=True)
        ]
        figures[name] = shares_followed([checks[i] for i in asked], passed) | {"left_out": len(records) - len(asked)}
    return figures


def shares_followed(checks: list[list[dict[str, Any]]], passed: list[list[bool]]) -> Figures:
    """The shares of prompts and of instructions, with a prompt as the unit, and by rule."""
    rules = sorted({check["rule"] for row in checks for check in row})
    by_rule = {}
    for rule in rules:
        rows = [
            [ok for check, ok in zip(c, p, strict=True) if check["rule"] == rule]
            for c, p in zip(checks, passed, strict=True)
        ]
        with_rule = [row for row in rows if row]
        by_rule[rule] = ratio_interval([float(sum(row)) for row in with_rule], [float(len(row)) for row in with_rule])
    return {
        "prompts": interval([float(all(row)) for row in passed]),
        "instructions": ratio_interval([float(sum(row)) for row in passed], [float(len(row)) for row in passed]),
        "by_rule": by_rule,
    }


def describe_instructions(results: Figures) -> list[str]:
    """One line per model."""
    return [
        f"instructions: {name}: all followed in {show(row['prompts'])} of {row['prompts']['n']} prompts, "
        f"{show(row['instructions'])} of {row['instructions']['n']} instructions"
        + (f"; {row['left_out']} prompts do not fit" if row["left_out"] else "")
        for name, row in results.items()
    ]
