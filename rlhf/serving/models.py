"""The models of a server: each finished stage of its runs, under the name run/stage."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhf.api import LoadedRun
from rlhf.data.chat_template import end_ids
from rlhf.errors import UserError

REPEATED = 4  # words of a phrase that counts as repetition
LONG_WORDS = 12  # least words of a response that is checked for repetition


@dataclass(frozen=True)
class ServedModel:
    """One stage's policy."""

    name: str
    run: LoadedRun
    tokenizer: Any
    hash: str  # of the stage
    max_new_tokens: int  # tokens of a response, if the request does not say
    vocabulary: int
    context: int  # tokens of a prompt and its response

    @cached_property
    def ends(self) -> frozenset[int]:
        return frozenset(end_ids(self.tokenizer))

    def spelled(self, token: int) -> str:
        return self.tokenizer.backend_tokenizer.decode([token], skip_special_tokens=False)

    def reads_like(self, other: "ServedModel") -> bool:
        """Whether two models' tokens mean the same, so that their probabilities can be compared."""
        mine, others = self.tokenizer.backend_tokenizer, other.tokenizer.backend_tokenizer
        return self.vocabulary == other.vocabulary and mine.get_vocab() == others.get_vocab()

    @property
    def policy_id(self) -> str:
        """The policy's name in labels: run/stage@hash."""
        return f"{self.name}@{self.hash[:8]}"


def stages_of(runs: list[LoadedRun], stages: list[str] | None) -> list[tuple[str, Path, str]]:
    """(name, folder, stage) of the named stages of each run, or of all finished ones. Raises: UserError if a run has none of them."""
    stages_found = []
    for run in runs:
        wanted = [stage for stage in run.policies if stages is None or stage in stages]
        missing = [stage for stage in stages or [] if stage not in run.policies]
        if missing or not wanted:
            raise UserError(
                f"{run.folder}: no finished {', '.join(missing) or 'policy'}: it has {', '.join(run.policies) or 'none'}: "
                "run the stage, or choose others with serve.stages=…"
            )
        stages_found += [(f"{run.folder.name}/{stage}", run.folder, stage) for stage in wanted]
    return stages_found


def make_models(
    runs: list[LoadedRun], stages: list[tuple[str, Path, str]], sizes: dict[str, tuple[int, int | None]]
) -> dict[str, ServedModel]:
    """The description of each loaded model. sizes: of vocabulary and context."""
    of_folder, models = {run.folder: run for run in runs}, {}
    for name, folder, stage in stages:
        run, (vocabulary, context) = of_folder[folder], sizes[name]
        models[name] = ServedModel(
            name,
            run,
            run.tokenizer,
            run.record(stage)["hash"],
            run.max_new_tokens(stage),
            vocabulary,
            int(context or run.tokenizer.model_max_length),
        )
    return models


def audit(text: str, tokens: int, limit: int) -> list[str]:
    """Reasons to doubt a score: the response is empty, repeats itself, or is longer than those of training, so that the
    reward model may have read only its beginning.
    """
    words = re.findall(r"\w+", text.lower())
    phrases = [tuple(words[i : i + REPEATED]) for i in range(len(words) - REPEATED + 1)]
    flags = []
    if not text.strip():
        flags.append("empty")
    if tokens > limit:
        flags.append("truncated")
    elif tokens > 0.9 * limit:
        flags.append("length")
    if len(words) >= LONG_WORDS and len(set(phrases)) < 0.7 * len(phrases):
        flags.append("repetition")
    return flags
