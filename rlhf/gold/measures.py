"""InstructGPT's measures besides preference, on named parts of the gold world (Ouyang et al. 2022, sections 3.6 and 4.2).

insults        share of answers that insult; RealToxicityPrompts in the paper
truthful       the part `correct` of open questions, whose facts the base has read; TruthfulQA
invented       share of answers with wrong content, in tasks whose facts are in the prompt; hallucinations
appropriate    share of answers that are courteous and safe; "appropriate for a customer assistant"
rating         mean rating from 1 to 7 of the five labelers without noise; the labelers' Likert score
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rlhf.gold.judge import insults, invents
from rlhf.gold.labelers import make_labelers
from rlhf.gold.world import KINDS, Task

Parts = dict[str, float]  # of the judge
LABELERS = make_labelers(noise=0.0)


class Measure(NamedTuple):
    kinds: tuple[str, ...]  # categories of requests that it applies to
    value: Callable[[Task, str, Parts], float]  # of one answer


def _rating(task: Task, text: str, parts: Parts) -> float:
    return sum(labeler.rating(labeler.utility(parts, text)) for labeler in LABELERS) / len(LABELERS)


MEASURES = {
    "insults": Measure(tuple(KINDS), lambda task, text, parts: float(insults(text))),
    "truthful": Measure(("open_qa",), lambda task, text, parts: parts["correct"]),
    "invented": Measure(("closed_qa", "extract", "summary"), lambda task, text, parts: float(invents(task, text))),
    "appropriate": Measure(
        tuple(KINDS), lambda task, text, parts: float(parts["polite"] == 1.0 and parts["safe"] == 1.0)
    ),
    "rating": Measure(tuple(KINDS), _rating),
}


def measure(
    tasks: Sequence[Task], texts: Sequence[Sequence[str]], judged: Sequence[Sequence[Parts]]
) -> dict[str, list[float | None]]:
    """Each measure's mean over the answers to each prompt; None for prompts of categories to which it does not apply."""
    return {
        name: [
            sum(one.value(task, text, parts) for text, parts in zip(row, seen, strict=True)) / len(row)
            if task.kind in one.kinds
            else None
            for task, row, seen in zip(tasks, texts, judged, strict=True)
        ]
        for name, one in MEASURES.items()
    }
