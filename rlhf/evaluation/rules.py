"""Instructions that a program can check: length, format, keywords. `evaluate.instructions` measures how often a model follows them.

A prompt's `metadata.checks` lists them, each as {"rule": name, …}; data/instructions.jsonl is an example.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from rlhf.data.records import PromptRecord
from rlhf.errors import UserError
from rlhf.evaluation.attacks import WORD, sentences_of

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
