"""In-context learning: a labelled task by likelihood only, with K solved examples before each question (`evaluate.shots`).

    prompt = text_1 answer_1, blank line, …, text_K answer_K, blank line, text
    choice = argmax over answers of 1/T sum_t log P(answer_t | prompt, answer_<t),  T tokens of the answer

The K examples are drawn at random from the training examples for each question; K + 1 examples are the first K and one more. No model
is trained, and no chat template is used.

Source: Brown et al. 2020, sections 2.1 and 2.4. Differs: examples that do not fit the context are left out, and how many were shown is
reported; answers are never normalised by P(answer | "Answer:").
"""

import random
from typing import Any

import torch

from rlhf.config import Config
from rlhf.config.setting import listed
from rlhf.data.labelled import Columns, Example
from rlhf.data.tokenizer import encode_texts, separator_id
from rlhf.evaluation.instructions import load_stage, models_of
from rlhf.evaluation.labelled_task import columns_of, load_task, option_scores, options_of
from rlhf.evaluation.statistics import Figures, wilson
from rlhf.model.trunk import context_of
from rlhf.runs.folders import run_folder
from rlhf.runs.progress import progress

BETWEEN = "\n\n"


def evaluate_shots(config: Config, device: torch.device) -> Figures:
    """{"task", "classes", "majority", "models": {model: [{"shots", "shown", "accuracy"}]}}, on at most evaluate.prompts examples."""
    columns = columns_of(config)
    train, held_out, classes = load_task(config, columns, run_folder(config) / "evaluations")
    held_out = held_out[: config.evaluate.prompts]
    counts = sorted(listed(config.evaluate.shots))
    drawn = draw_examples(train, len(held_out), max(counts), config.seed)
    labels = [example.label for example in held_out]
    models = models_of(config, base=True)
    figures: dict[str, list[Figures]] = {}
    with progress(len(models) * len(counts), "evaluate: shots", unit="measurement") as bar:
        for name in models:
            model, tokenizer = load_stage(config, name, device)
            context = context_of(model, tokenizer)
            figures[name] = []
            for count in counts:
                rows, shown = make_rows(tokenizer, context, columns, classes, held_out, [d[:count] for d in drawn])
                options = len(rows) // len(held_out)
                scores = option_scores(model, rows, tokenizer.pad_token_id, device).view(-1, options)
                said = [classes[i] for i in scores.argmax(-1).tolist()]
                right = sum(one == label for one, label in zip(said, labels, strict=True))
                row = {"shots": count, "shown": round(shown, 2), "accuracy": wilson(right, len(labels))}
                figures[name].append(row)
                bar.update(1)
    majority = max(labels.count(label) for label in set(labels)) / len(labels)
    return {"task": str(config.classify.data), "classes": classes, "majority": majority, "models": figures}


def draw_examples(train: list[Example], questions: int, most: int, seed: int) -> list[list[Example]]:
    """For each question `most` training examples in random order, or all if there are fewer."""
    most = min(most, len(train))
    return [random.Random(f"shots-{seed}-{i}").sample(train, most) for i in range(questions)]


def answered(example: Example, columns: Columns, classes: list[str]) -> str:
    """An example with its answer, as it appears before a question."""
    text, options = options_of(example, columns, classes)
    return f"{text} {options[classes.index(example.label)]}{BETWEEN}"


def make_rows(
    tokenizer: Any,
    context: int,
    columns: Columns,
    classes: list[str],
    questions: list[Example],
    shots: list[list[Example]],
) -> tuple[list[tuple[list[int], list[int]]], float]:
    """(prompt, answer) as tokens of each question's answers in order, and the mean number of examples in a prompt.

    Examples at the end that do not fit with the longest answer are left out; if the question alone does not fit, its beginning is cut.
    """
    asked = [options_of(example, columns, classes) for example in questions]
    texts = iter(encode_texts(tokenizer, [text for text, _ in asked]))
    options = iter(encode_texts(tokenizer, [f" {option}" for _, named in asked for option in named]))
    before = iter(encode_texts(tokenizer, [answered(shot, columns, classes) for row in shots for shot in row]))
    rows, shown = [], 0
    for (_, named), chosen in zip(asked, shots, strict=True):
        question, answers = next(texts), [next(options) for _ in named]
        room = context - 1 - max(map(len, answers))
        prompt: list[int] = []
        for tokens in [next(before) for _ in chosen]:
            if len(prompt) + len(tokens) + len(question) > room:
                break
            prompt, shown = prompt + tokens, shown + 1
        whole = [separator_id(tokenizer), *(prompt + question)[-room:]]
        rows += [(whole, answer) for answer in answers]
    return rows, shown / len(questions)


def describe_shots(results: Figures) -> list[str]:
    """A line per model."""
    lines = [f"shots on {results['task']}: most frequent label {results['majority']:.3f}"]
    for name, rows in results["models"].items():
        accuracies = ", ".join(
            f"{row['shots']} {row['accuracy']['value']:.3f}"
            + (f" ({row['shown']:g} shown)" if row["shown"] < row["shots"] else "")
            for row in rows
        )
        lines.append(f"{name}: accuracy by examples in the prompt: {accuracies}")
    return lines
