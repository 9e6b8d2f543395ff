"""Labelled tasks (the settings classify.*) with examples in the prompt (`evaluate.shots`)."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlhf.config import Config
from rlhf.config.setting import listed
from rlhf.config.stages import ClassifyConfig
from rlhf.data.encoding import row_limit
from rlhf.data.inputs import RECORD_SUFFIXES, resolve_sources
from rlhf.data.labelled import Example, classes_of, divide, load_examples
from rlhf.data.tokenizer import encode_texts, load_tokenizer, separator_id
from rlhf.errors import UserError
from rlhf.evaluation.scoring import pair_nats
from rlhf.evaluation.statistics import Figures, flatten, split_like, wilson
from rlhf.gold.labelled import CHOICES, TASKS, write_task
from rlhf.recipe import POLICY_STAGES
from rlhf.runs.folders import check_output, is_complete, run_folder, stage_folder
from rlhf.runs.progress import Progress
from rlhf.system.files import sha256_file
from rlhf.system.terminal import say
from rlhf.training.setup import load_frozen

GOLD = "gold:"
GOLD_EXAMPLES = 2000
BETWEEN = "\n\n"  # solved examples in a prompt


def columns_of(config: Config) -> ClassifyConfig:
    """The settings with the columns of the task, `choices` as a tuple. Raises: UserError for settings that are missing or contradictory."""
    given, name = config.classify, gold_task(config)
    if given.data is None or name not in (None, *TASKS):
        raise UserError(f"classify.data={given.data}: want a file, a hub id, or one of {GOLD}{f', {GOLD}'.join(TASKS)}")
    if name is not None:
        second = "second" if name in ("entailment", "similarity") else None
        given = replace(given, text="text", label="label", second=second)
        return replace(given, choices=CHOICES if name == "choice" else (), both_orders=name == "similarity")
    if given.text is None or given.label is None:
        key = "text" if given.text is None else "label"
        raise UserError(f"classify.{key} is not set: want the column with the {key}")
    return replace(given, choices=tuple(map(str, listed(given.choices))))


def gold_task(config: Config) -> str | None:
    data = config.classify.data
    return data.removeprefix(GOLD) if isinstance(data, str) and data.startswith(GOLD) else None


def hash_task(config: Config) -> dict[str, str]:
    """{kind:file: sha256} of the task's files; a task of the gold world is made by the stage."""
    kinds = {"data": None if gold_task(config) else config.classify.data, "test": config.classify.test}
    return {
        f"classify.{kind}:{source.name}": sha256_file(source.path)
        for kind, given in kinds.items()
        if given is not None
        for source in resolve_sources(given, RECORD_SUFFIXES)
        if source.path is not None
    }


def load_task(config: Config, columns: ClassifyConfig, folder: Path) -> tuple[list[Example], list[Example], list[str]]:
    """(examples to train on, held-out ones, classes of all); a task of the gold world is written to the folder first.

    Raises: UserError if either is empty, and as `classes_of`.
    """
    settings, data = config.classify, config.classify.data
    if (name := gold_task(config)) is not None:
        data = str(folder / f"{name}.csv")
        folder.mkdir(parents=True, exist_ok=True)
        write_task(name, folder / f"{name}.csv", config.data.split_seed, GOLD_EXAMPLES)
    examples = load_examples("classify.data", data, columns, config.data.encoding)
    if settings.test is None:
        train, held_out = divide(examples, settings.held_out, config.data.split_seed)
    else:
        train, held_out = examples, load_examples("classify.test", settings.test, columns, config.data.encoding)
        known = {repr(one.rows) for one in train}
        if seen := sum(repr(one.rows) in known for one in held_out):
            known_too = f"{seen:,} of its {len(held_out):,} examples are in classify.data too"
            say(f"classify.test: {known_too}: the accuracy is too high")
    classes = classes_of(train + held_out, columns)
    if settings.examples is not None and settings.examples < len(train):
        train = random.Random(f"examples-{config.seed}").sample(train, settings.examples)
    if not train or not held_out:
        counts = f"{len(train)} examples to train on and {len(held_out)} held out"
        raise UserError(f"classify.data: {counts}: add examples, or name held-out ones with classify.test")
    return train, held_out, classes


def options_of(example: Example, columns: ClassifyConfig, classes: list[str]) -> tuple[str, list[str]]:
    """The text of an example and its possible answers: its own choices, or the names of the classes."""
    if columns.choices:
        return " ".join(example.rows[0][:-1]), [row[-1] for row in example.rows]
    return " ".join(example.rows[0]), classes


def option_scores(lm: Any, pairs: list[tuple[list[int], list[int]]], pad: int, device: torch.device) -> torch.Tensor:
    """Mean log P per token (R,) of each option after its context."""
    return torch.tensor(pair_nats(lm, pairs, pad, device)) / torch.tensor([len(option) for _, option in pairs])


def evaluate_shots(config: Config, device: torch.device) -> Figures:
    """{"task", "classes", "majority", "models": {model: [{"shots", "shown", "accuracy"}]}}, on at most evaluate.prompts examples."""
    columns = columns_of(config)
    train, held_out, classes = load_task(config, columns, run_folder(config) / "evaluations")
    most = min(config.evaluate.prompts, len(held_out))
    held_out = random.Random(f"questions-{config.seed}").sample(held_out, most)  # a file may be sorted by class
    counts, labels = sorted(listed(config.evaluate.shots)), [example.label for example in held_out]
    shown = min(max(counts), len(train))
    drawn = [random.Random(f"shots-{config.seed}-{i}").sample(train, shown) for i in range(len(held_out))]
    complete = [name for name in POLICY_STAGES if is_complete(stage_folder(config, name))]
    figures: dict[str, list[Figures]] = {name: [] for name in listed(config.evaluate.models) or complete}
    if not figures:
        raise UserError(f"{run_folder(config)}: no finished policy: run `rlhf sft` first, or set evaluate.models")
    with Progress(len(figures) * len(counts), "evaluate: shots", unit="measurement") as bar:
        for name, rows_of_model in figures.items():
            check_output(stage_folder(config, name), name)
            files = stage_folder(config, name) / "model"
            model, tokenizer = load_frozen(config, files, device), load_tokenizer(files)
            context = row_limit(config, tokenizer)
            for count in counts:
                rows, shown = make_rows(tokenizer, context, columns, classes, held_out, [d[:count] for d in drawn])
                scores = option_scores(model, rows, tokenizer.pad_token_id, device).view(len(held_out), -1)
                right = sum(classes[i] == label for i, label in zip(scores.argmax(-1).tolist(), labels, strict=True))
                rows_of_model.append({"shots": count, "shown": round(shown, 2), "accuracy": wilson(right, len(labels))})
                bar.update(1)
    majority = Counter(labels).most_common(1)[0][1] / len(labels)
    return {"task": str(config.classify.data), "classes": classes, "majority": majority, "models": figures}


def make_rows(
    tokenizer: Any,
    context: int,
    columns: ClassifyConfig,
    classes: list[str],
    questions: list[Example],
    shots: list[list[Example]],
) -> tuple[list[tuple[list[int], list[int]]], float]:
    """(prompt, answer) as tokens of each question's answers in order, and the mean number of examples in a prompt.

    Examples at the end that do not fit with the longest answer are left out; if the question alone does not fit, its
    beginning is cut.
    """
    asked, named = zip(*(options_of(example, columns, classes) for example in questions), strict=True)
    texts = encode_texts(tokenizer, list(asked))
    options = split_like(encode_texts(tokenizer, [f" {option}" for option in flatten(named)]), named)
    known = [(options_of(example, columns, classes), classes.index(example.label)) for example in flatten(shots)]
    solved = [f"{text} {said[right]}{BETWEEN}" for (text, said), right in known]
    before = split_like(encode_texts(tokenizer, solved), shots)
    rows, shown = [], 0
    for question, answers, examples in zip(texts, options, before, strict=True):
        room = context - 1 - max(map(len, answers))
        prompt: list[int] = []
        for tokens in examples:
            if len(prompt) + len(tokens) + len(question) > room:
                break
            prompt, shown = prompt + tokens, shown + 1
        whole = [separator_id(tokenizer), *(prompt + question)[-room:]]
        rows += [(whole, answer) for answer in answers]
    return rows, shown / len(questions)
