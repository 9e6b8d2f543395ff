"""Ranked comparisons, from which the reward model learns."""

from typing import Any

from rlhf.data.importers import SourceInfo, load_kind
from rlhf.data.records import Ranking


def load_comparisons(
    sources: Any, format: str = "auto", allow_partial: bool = False
) -> tuple[list[Ranking], SourceInfo]:
    """The rankings of the sources in order, those without an ordered pair (one response, all ties) included.

    Raises: UserError if a source cannot be read, a row is bad or there is no ranking.
    """
    return load_kind(sources, format, Ranking, allow_partial)
