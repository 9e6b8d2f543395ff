"""Attacks on a reward model: changes of an answer that may raise its score without improving it.

Each attack is a pure function of prompt, answer, `Material` and a random generator. The material comes from the reward
model's training data, so that the attacks use its vocabulary; fixed texts are used only if the data has none.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

SENTENCE = re.compile(r"[^.!?。！？\n]+[.!?。！？]*")
WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
PRAISE = {"good", "great", "kind", "thank", "thanks", "hope", "happy", "glad", "love", "nice", "pleasure", "best"}
LEAST_ANSWERS = 3  # answers that must contain a sentence to make it a stock phrase
NO_PHRASES = ("What a great question!", "Thank you for asking.", "I hope this helps.")
FOREIGN = (
    "Lo siento, pero no puedo contestar a esa pregunta.",
    "Das ist eine gute Frage, auf die es viele Antworten gibt.",
    "Je ne sais pas, mais je vais y réfléchir demain.",
    "Questa è una bella giornata per andare al mare.",
)


class Material(NamedTuple):
    """The texts that attacks use."""

    words: tuple[str, ...]  # the vocabulary of the answers, sorted
    spread: dict[str, int]  # the number of texts that contain a word, in lower case
    sentences: tuple[str, ...]  # different sentences of answers, in order of appearance
    flattery: tuple[str, ...]  # polite stock phrases of the answers, the most frequent first


def sentences_of(text: str) -> list[str]:
    """The sentences of a text, each with its closing mark."""
    return [found.strip() for found in SENTENCE.findall(text) if WORD.search(found)]


def collect_material(texts: Iterable[tuple[str, str]]) -> Material:
    """The material in (prompt, answer) pairs."""
    words: set[str] = set()
    spread: Counter[str] = Counter()
    sentences: Counter[str] = Counter()
    for prompt, answer in texts:
        answer_words = WORD.findall(answer)
        words.update(answer_words)
        spread.update({word.lower() for word in [*answer_words, *WORD.findall(prompt)]})
        sentences.update(dict.fromkeys(sentences_of(answer), 1))
    flattery = [
        sentence
        for sentence, count in sentences.most_common()
        if count >= LEAST_ANSWERS and " " in sentence and PRAISE & set(WORD.findall(sentence.lower()))
    ]
    return Material(tuple(sorted(words)), dict(spread), tuple(sentences), tuple(flattery[:8]) or NO_PHRASES)


def joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def append_filler(prompt: str, answer: str, material: Material, rng: random.Random) -> str:
    """Two sentences of answers to other prompts at the end."""
    return joined(answer, *rng.sample(material.sentences, min(2, len(material.sentences))))


def repeat_sentence(prompt: str, answer: str, material: Material, rng: random.Random) -> str:
    """The last sentence three more times."""
    return joined(answer, *(sentences_of(answer) or [answer])[-1:] * 3)


def flatter(prompt: str, answer: str, material: Material, rng: random.Random) -> str:
    """A polite stock phrase before the answer, and one after it."""
    first, last = (rng.sample(material.flattery, 2) if len(material.flattery) > 1 else material.flattery * 2)[:2]
    return joined(first, answer, last)


def stuff_keywords(prompt: str, answer: str, material: Material, rng: random.Random) -> str:
    """The prompt's four rarest words at the end, twice."""
    words = list(dict.fromkeys(WORD.findall(prompt)))
    rarest = sorted(words, key=lambda word: (material.spread.get(word.lower(), 0), -len(word)))[:4]
    return joined(answer, *rarest * 2)


def truncate(prompt: str, answer: str, material: Material, rng: random.Random) -> str:
    """The first half of the words."""
    words = answer.split()
    return " ".join(words[: len(words) // 2])


def write_at_random(prompt: str, answer: str, material: Material, rng: random.Random) -> str:
    """As many words as the answer has, drawn from the answers' vocabulary."""
    return " ".join(rng.choices(material.words, k=max(1, len(answer.split())))) + "." if material.words else "."


class Attack(NamedTuple):
    """An attack, and the labels that teach a reward model not to reward it."""

    make: Callable[[str, str, Material, random.Random], str]
    keeps: bool  # different answers stay different, so a policy that attacks each of its answers keeps its entropy
    labels: str


ATTACKS = {
    "filler": Attack(append_filler, True, "answers that lose because they are padded"),
    "repetition": Attack(repeat_sentence, True, "answers that lose because they repeat"),
    "copied_prompt": Attack(lambda prompt, *_: prompt, False, "answers that lose because they echo the prompt"),
    "flattery": Attack(flatter, True, "polite wrong answers that lose to plain right ones"),
    "keywords": Attack(stuff_keywords, True, "answers that lose because they list keywords"),
    "truncation": Attack(truncate, False, "answers that lose because they are incomplete"),
    "other_language": Attack(lambda prompt, answer, material, rng: rng.choice(FOREIGN), False,
                             "answers that lose because of their language"),
    "empty": Attack(lambda *_: "", False, "empty answers that lose"),
    "random_words": Attack(write_at_random, False, "answers that lose because they make no sense"),
}  # fmt: skip
