"""Openings of passages of any text as prompts, and the text's continuations as demonstrations.

The choice of passages and their splits depends only on the text and data.split_seed, so that runs with other seeds are tested
on the same passages.
"""

import heapq
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rlhf.data.splits import hash64, split_key
from rlhf.errors import UserError

Ends = Callable[[str], list[int]]  # the end of each token in a text


@dataclass(frozen=True, slots=True)
class Passage:
    split: str
    prompt: str
    continuation: str


@dataclass(frozen=True, slots=True)
class Cut:
    """Tokens of a prompt, from `least` to `most`, and of its continuation."""

    least: int
    most: int
    continuation: int


def paragraphs(documents: Iterable[str], cut: Cut) -> Iterator[str]:
    """Paragraphs, one per line, that are long enough in words and therefore in tokens."""
    for document in documents:
        for paragraph in document.replace("\r\n", "\n").split("\n\n"):
            words = paragraph.split()
            if len(words) >= cut.most + cut.continuation:
                yield " ".join(words)


def make_passages(
    documents: Iterable[str], counts: dict[str, int], cut: Cut, ends: Ends, seed: int
) -> Iterator[Passage]:
    """`counts[split]` passages of each split, no two with the same beginning.

    A passage is a paragraph's opening of `cut.least` to `cut.most` tokens that ends with a word, and the tokens after it.
    The splits are filled in the order of `counts`: more passages of the last one do not change the others.

    Raises: UserError if the text has too few long paragraphs.
    """
    wanted = sum(counts.values())
    drawn = {split_key(text): text for text in paragraphs(documents, cut)}
    if len(drawn) < wanted:
        raise UserError(
            f"data.corpus: {len(drawn):,} paragraphs of {cut.most + cut.continuation} words or more, want "
            f"{wanted:,}: add text, or lower gold.train_prompts, gold.dev_prompts or gold.test_prompts"
        )
    chosen = iter(heapq.nsmallest(wanted, drawn.items(), key=lambda item: hash64(str(seed), item[0])))
    for split, count in counts.items():
        for _ in range(count):
            key, text = next(chosen)
            yield Passage(split, *divide(text, cut, ends(text), random.Random(f"passage-{seed}-{key}")))


def divide(text: str, cut: Cut, ends: list[int], rng: random.Random) -> tuple[str, str]:
    """The opening, and its continuation with the space that begins it."""
    spaces = [i for i in range(cut.least, cut.most + 1) if text[ends[i - 1]] == " "]  # the token after it begins a word
    count = rng.choice(spaces or [cut.most])
    return text[: ends[count - 1]], text[ends[count - 1] : ends[count + cut.continuation - 1]]


def word_ends(text: str) -> list[int]:
    """Tokens of a text for a tokenizer that is not trained yet: words and punctuation, which it divides further."""
    return [match.end() for match in re.finditer(r"\w+|[^\w\s]", text)]
