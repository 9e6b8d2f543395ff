"""How often models follow instructions that a program can check: `evaluate.instructions`, offline."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlhf.config import Config
from rlhf.config.setting import listed
from rlhf.data.prompts import load_prompts
from rlhf.data.records import PromptRecord
from rlhf.data.tokenizer import load_tokenizer
from rlhf.engines.sampling import make_sampler
from rlhf.errors import UserError
from rlhf.evaluation.answers import draw_answers, fit_prompts, room_for
from rlhf.evaluation.statistics import WORD, Figures, interval, per_key, ratio_interval, sentences_of, show
from rlhf.recipe import POLICY_STAGES
from rlhf.runs.folders import check_output, is_complete, run_folder, stage_folder
from rlhf.training.setup import load_frozen


def models_of(config: Config, base: bool = False) -> list[str]:
    """evaluate.models, or the complete stages of the run that have a policy, with the base only on request.

    Raises: UserError for none or an unknown one.
    """
    names = listed(config.evaluate.models)
    if unknown := [name for name in names if name not in POLICY_STAGES]:
        raise UserError(f"evaluate.models: {unknown[0]!r}: want some of {', '.join(POLICY_STAGES)}")
    stages = [name for name in POLICY_STAGES if base or name != "pretrain"]
    models = names or [name for name in stages if is_complete(stage_folder(config, name))]
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
        engine = make_sampler(config, policy, tokenizer, max_new_tokens=length, greedy=True)
        prompts = [fit[0] for i in asked if (fit := fitted[i]) is not None]
        answers = draw_answers(engine, tokenizer, prompts, [("instructions", records[i].id) for i in asked])
        passed = [
            [follows(answer.text, check) for check in checks[i]] for i, answer in zip(asked, answers, strict=True)
        ]
        figures[name] = shares_followed([checks[i] for i in asked], passed) | {"left_out": len(records) - len(asked)}
    return figures


def shares_followed(checks: list[list[dict[str, Any]]], passed: list[list[bool]]) -> Figures:
    """The shares of prompts and of instructions, with a prompt as the unit, and by rule."""
    outcomes = [
        (i, check["rule"], float(ok))
        for i, (c, p) in enumerate(zip(checks, passed, strict=True))
        for check, ok in zip(c, p, strict=True)
    ]

    def share_of(rows: list[tuple[int, str, float]]) -> Figures:
        return ratio_interval(*per_key([i for i, _, _ in rows], [ok for _, _, ok in rows]))

    rules = sorted({rule for _, rule, _ in outcomes})
    return {
        "prompts": interval([float(all(row)) for row in passed]),
        "instructions": share_of(outcomes),
        "by_rule": {rule: share_of([row for row in outcomes if row[1] == rule]) for rule in rules},
    }


def describe_instructions(results: Figures) -> list[str]:
    """One line per model."""
    return [
        f"instructions: {name}: all followed in {show(row['prompts'])} of {row['prompts']['n']} prompts, "
        f"{show(row['instructions'])} of {row['instructions']['n']} instructions"
        + (f"; {row['left_out']} prompts do not fit" if row["left_out"] else "")
        for name, row in results.items()
    ]


Check = Mapping[str, Any]


def count_words(answer: str) -> int:
    return len(WORD.findall(answer))


def lines_of(answer: str) -> list[str]:
    return [line.strip() for line in answer.splitlines() if line.strip()]


def numbers_of(answer: str) -> list[int]:
    """The numbers that lines begin with."""
    return [int(m[1]) for line in lines_of(answer) if (m := re.match(r"(\d{1,6})[.)]\s", line))]


def has_word(answer: str, word: str) -> bool:
    """Whether a word or phrase occurs, in any case."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", answer, re.IGNORECASE) is not None


def is_json(answer: str) -> bool:
    """Whether the answer is one JSON object or list, alone or in a code fence."""
    inner = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n?```\s*", answer, re.DOTALL)
    try:
        return isinstance(json.loads(inner[1] if inner else answer), dict | list)
    except (ValueError, RecursionError):
        return False


def letters_are(answer: str, change: Callable[[str], str]) -> bool:
    return any(map(str.isalpha, answer)) and answer == change(answer)


# Each rule: the other keys of its check with their types, and the test of an answer.
RULES: dict[str, tuple[dict[str, type], Callable[[str, Check], bool]]] = {
    "max_words": ({"n": int}, lambda answer, check: 0 < count_words(answer) <= check["n"]),
    "min_words": ({"n": int}, lambda answer, check: count_words(answer) >= check["n"]),
    "sentences": ({"n": int}, lambda answer, check: len(sentences_of(answer)) == check["n"]),
    "lines": ({"n": int}, lambda answer, check: len(lines_of(answer)) == check["n"]),
    "paragraphs": ({"n": int}, lambda answer, check: len([p for p in re.split(r"\n\s*\n", answer) if p.strip()]) == check["n"]),
    "bullets": ({"n": int}, lambda answer, check: sum(bool(re.match(r"[-*•]\s", line)) for line in lines_of(answer)) == check["n"]),
    "numbered": ({"n": int}, lambda answer, check: numbers_of(answer) == [*range(1, len(numbers_of(answer)) + 1)]
                 and len(numbers_of(answer)) == check["n"]),
    "contains": ({"words": list}, lambda answer, check: all(has_word(answer, word) for word in check["words"])),
    "excludes": ({"words": list}, lambda answer, check: bool(answer.strip()) and not any(has_word(answer, w) for w in check["words"])),
    "starts_with": ({"text": str}, lambda answer, check: answer.strip().startswith(check["text"])),
    "ends_with": ({"text": str}, lambda answer, check: answer.strip().endswith(check["text"])),
    "lowercase": ({}, lambda answer, check: letters_are(answer, str.lower)),
    "uppercase": ({}, lambda answer, check: letters_are(answer, str.upper)),
    "no_commas": ({}, lambda answer, check: bool(answer.strip()) and "," not in answer),
    "no_digits": ({}, lambda answer, check: bool(answer.strip()) and not any(map(str.isdigit, answer))),
    "quoted": ({}, lambda answer, check: len(answer.strip()) > 2 and answer.strip()[0] == answer.strip()[-1] == '"'),
    "question": ({}, lambda answer, check: answer.strip().endswith("?")),
    "json": ({}, lambda answer, check: is_json(answer)),
}  # fmt: skip


def follows(answer: str, check: Check) -> bool:
    """Whether an answer follows one instruction."""
    return RULES[check["rule"]][1](answer, check)


def checks_of(record: PromptRecord) -> list[dict[str, Any]]:
    """A prompt's checks. Raises: UserError if there are none, or one is not a check."""
    checks = record.metadata.get("checks")
    if not isinstance(checks, list) or not checks:
        raise UserError(
            f"evaluate.instructions: prompt {record.id}: metadata.checks is missing: want a list of {{rule, …}}"
        )
    for check in checks:
        name = check.get("rule") if isinstance(check, dict) else None
        if not isinstance(name, str) or name not in RULES:
            raise UserError(f"evaluate.instructions: prompt {record.id}: rule {name!r}: want one of {', '.join(RULES)}")
        for key, kind in RULES[name][0].items():
            value = check.get(key)
            words = [word for word in value if isinstance(word, str)] if isinstance(value, list) else value
            if not isinstance(value, kind) or isinstance(value, bool) or words != value:
                raise UserError(
                    f"evaluate.instructions: prompt {record.id}: rule {name}: {key} is {value!r}, want "
                    f"{'a list of words' if kind is list else 'a number' if kind is int else 'a text'}"
                )
    return checks
