"""The share of words that repeat, a metric of PPO (ppo.metrics) for monitor.py."""

from collections import Counter

from rlhf.ppo.experience import Experience


def repeated(text: str) -> float:
    """The share of a text's words that occurred before in it."""
    words = text.lower().split()
    return sum(count - 1 for count in Counter(words).values()) / max(1, len(words))


def repetition(experience: Experience) -> dict[str, float]:
    return {"repetition": sum(map(repeated, experience.texts)) / len(experience.texts)}
