"""The true score of a response, and the labelers who rank by it: one interface with an implementation per value of gold.truth.

The stages and the evaluation use only this interface. True scores are not used in training: the reward model gets the
labelers' rankings.
"""

from collections.abc import Sequence
from typing import Protocol

from rlhf.config import Config
from rlhf.data.records import PromptRecord, Ranking
from rlhf.errors import UserError
from rlhf.gold.corpus import talk
from rlhf.gold.judge import WEIGHTS, judge
from rlhf.gold.labelers import Labeler, make_held_out_labelers, make_labelers, mean_utility
from rlhf.gold.lexicon import Sentiment
from rlhf.gold.world import task_from_metadata


class Truth(Protocol):
    """A judge of responses, and labelers who rank by it with noise."""

    name: str  # its name in the report
    parts: tuple[str, ...]  # names of the score's parts, if any

    def knows(self, record: PromptRecord | Ranking) -> bool:
        """Whether it can judge responses to this prompt."""

    def judge(self, record: PromptRecord | Ranking, response: str, ended: bool) -> dict[str, float]:
        """The parts, and `total`, the score."""

    def labelers(self, noise: float) -> list[Labeler]: ...

    def held_out_labelers(self, count: int, noise: float) -> list[Labeler]:
        """Further labelers, whose rankings are not used in training."""

    def base_text(self, record: PromptRecord) -> str | None:
        """The beginning of a text like those that the base was pretrained on, which asks for an answer; None if there is none."""


class Requests:
    """The built-in world's requests, whose right answers their records contain."""

    name, parts = "gold judge", tuple(WEIGHTS)

    def knows(self, record: PromptRecord | Ranking) -> bool:
        return "gold" in record.metadata

    def judge(self, record: PromptRecord | Ranking, response: str, ended: bool) -> dict[str, float]:
        return judge(task_from_metadata(record.metadata["gold"]), response, ended=ended)

    def labelers(self, noise: float) -> list[Labeler]:
        return make_labelers(noise)

    def held_out_labelers(self, count: int, noise: float) -> list[Labeler]:
        return make_held_out_labelers(count, noise)

    def base_text(self, record: PromptRecord) -> str | None:
        return talk(task_from_metadata(record.metadata["gold"]))


def utilities(
    truth: Truth, noise: float, record: PromptRecord | Ranking, answers: Sequence[tuple[str, bool]]
) -> list[float]:
    """The training labelers' noiseless mean utility of answers (text, whether it ended) to one prompt."""
    labelers = truth.labelers(noise)
    return [mean_utility(labelers, truth.judge(record, text, ended), text) for text, ended in answers]


def make_truth(config: Config) -> Truth | None:
    """The run's true score; None if it has none."""
    if not config.gold.enabled:
        return None
    return Sentiment() if config.gold.truth == "vader" else Requests()


def need_truth(config: Config, command: str) -> Truth:
    """As `make_truth`. Raises: UserError if there is none."""
    truth = make_truth(config)
    if truth is None:
        raise UserError(
            f"{command}: needs a world with a known true score: add experiment=gold or experiment=sentiment"
        )
    return truth
