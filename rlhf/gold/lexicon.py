"""Sentiment as the true score: a published lexicon scores continuations, and labelers rank them by it with noise.

Source: Hutto and Gilbert 2014 (VADER); as a stand-in for people in Ziegler et al. 2019, section 3.1.
Differs: Ziegler et al. use a classifier trained on reviews for the simulated part of their experiment.
"""

from functools import lru_cache
from typing import Any

from rlhf.data.records import PromptRecord, Ranking
from rlhf.errors import UserError
from rlhf.gold.labelers import Labeler

LABELERS = 5


@lru_cache(maxsize=1)
def _analyzer() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError:
        raise UserError(
            "gold.truth=vader: the package vaderSentiment is not installed: pip install 'rlhf-recipe[sentiment]'"
        ) from None
    return SentimentIntensityAnalyzer()


class Sentiment:
    """VADER's compound score of the response alone, from -1 to 1; the prompt does not count."""

    name = "sentiment lexicon"
    parts: tuple[str, ...] = ()

    def knows(self, record: PromptRecord | Ranking) -> bool:
        return True

    def judge(self, record: PromptRecord | Ranking, response: str, ended: bool) -> dict[str, float]:
        return {"total": float(_analyzer().polarity_scores(response)["compound"])}

    def labelers(self, noise: float) -> list[Labeler]:
        """Labelers with the same utility and independent noise."""
        return [self._labeler(f"labeler-{i}", noise) for i in range(1, LABELERS + 1)]

    def held_out_labelers(self, count: int, noise: float) -> list[Labeler]:
        return [self._labeler(f"labeler-{i}", noise) for i in range(LABELERS + 1, LABELERS + 1 + count)]

    def base_text(self, record: PromptRecord) -> None:
        return None

    def _labeler(self, name: str, noise: float) -> Labeler:
        return Labeler(name, {"total": 1.0}, per_word=0.0, courtesy=0.0, noise=noise, worst=-1.0, best=1.0)
