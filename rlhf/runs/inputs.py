"""The labelled data that a stage reads: the records of data.comparisons, data.demonstrations or data.prompts."""

from collections.abc import Callable
from typing import Any

from rlhf.config import Config
from rlhf.data.comparisons import load_comparisons
from rlhf.data.demonstrations import load_demonstrations
from rlhf.data.prompts import load_prompts
from rlhf.data.records import Demonstration, PromptRecord, Ranking
from rlhf.runs.sources import need_source

Say = Callable[[str], None]


def read_comparisons(config: Config, say: Say | None = None) -> list[Ranking]:
    """The rankings of data.comparisons. say: prints what was read."""
    return _read(config, "comparisons", load_comparisons, say)


def read_demonstrations(config: Config, say: Say | None = None) -> list[Demonstration]:
    return _read(config, "demonstrations", load_demonstrations, say)


def read_prompts(config: Config, say: Say | None = None) -> list[PromptRecord]:
    return _read(config, "prompts", load_prompts, say)


def _read(config: Config, kind: str, load: Callable[..., Any], say: Say | None) -> Any:
    records, info = load(need_source(config, kind), config.data.format, config.data.allow_partial)
    if say is not None:
        for line in info.describe():
            say(line)
    return records
