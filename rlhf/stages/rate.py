"""LaMDA's fine-tuning: the SFT model learns to rate responses and goes on learning to answer (Thoppilan et al. 2022,
section 6.1).

What a response is rated for is found in data.comparisons: attributes, flags, the overall rating, and rules. The
built-in world's labelers rate four attributes. `rlhf evaluate` then rates every policy's answers, and compares
generate-and-rate with best-of-n by the reward model and with PPO; `ppo.rewards=[rate]` trains a policy on the ratings.
Differs: one labeler rates a response, not three or five.
"""

import itertools
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.config.setting import listed
from rlhf.data.chat_template import encode_prompts, encode_response
from rlhf.data.encoding import TokenRow, encode_demonstrations
from rlhf.data.reading import load_rules
from rlhf.data.records import Ranking
from rlhf.errors import UserError
from rlhf.evaluation.scoring import held_out_labelers
from rlhf.ppo.rewards import LEVELS, RATED, Quality, Rater, check_qualities
from rlhf.runs.sources import in_split, read_comparisons, read_demonstrations
from rlhf.stages.sft import fine_tuned, load_with_dropout
from rlhf.system.files import write_json
from rlhf.training.adapters import save_output
from rlhf.training.setup import parent_model, running

LAMDA: dict[str, dict[str, float]] = {"sensible": {"weight": 3.0}, "safe": {"weight": 0.0, "least": 0.8}}
BREAKS = "breaks_"  # of the flag that marks a broken rule


class Rated(NamedTuple):
    """One response to one prompt, as tokens, and the levels that a labeler gives it by quality."""

    tokens: list[int]
    levels: dict[str, int]


def run(config: Config) -> None:
    """Write runs/<run>/rate/model, which answers prompts and rates answers."""
    with running(config, "rate") as (stage, device):
        folder, tokenizer = parent_model(config, "sft")
        model = load_with_dropout(config, folder, device)

        # 1. Ratings, and the demonstrations, so that the model does not forget how to answer
        rankings, rules = read_comparisons(config, stage.say), load_rules("rate.rules", config.rate.rules)
        held_out = held_out_labelers(config, rankings)
        rankings = [one for one in rankings if one.labeler not in held_out and not one.metadata.get("cannot_judge")]
        by_split = {split: in_split(config, rankings, split) for split in ("train", "test")}
        rated = {split: list(rate_all(tokenizer, some, rules)) for split, some in by_split.items()}
        qualities = choose_qualities(config, rated["train"], rankings, rules)
        for name, one in qualities.items():
            known = sum(name in response.levels for response in rated["train"])
            stage.say(f"{name}, {one.low} to {one.high}: {known:,} of {len(rated['train']):,} responses")
        rater = Rater(config, model, tokenizer, qualities, device)
        rating_rows = draw_rating_rows(config, rater, rated["train"])
        demonstrations = in_split(config, read_demonstrations(config), "train")
        answer_rows = encode_demonstrations(demonstrations, tokenizer, rater.limit, turns=config.sft.turns)
        ratings = f"{len(rating_rows):,} ratings of {len(rated['train']):,} responses"
        stage.say(f"{ratings}, and {len(answer_rows):,} demonstrations")

        # 2. Train on both
        with fine_tuned(stage, model, tokenizer, rating_rows + answer_rows, config.rate.epochs, device):
            save_output(model, tokenizer, stage)
            if stage.writes:
                write_json(stage.folder / "model" / RATED, {name: one._asdict() for name, one in qualities.items()})

        # 3. How well it orders responses of held-out prompts by each quality
        with inference(config, device):
            scores = rater.rate([one.tokens for one in rated["test"]])
        summary = {}
        for name in qualities:
            share = ordered_share(scores[name], [one.levels.get(name) for one in rated["test"]])
            if share is not None:
                summary[name] = share
                stage.say(f"held out, {name}: {share:.3f}")
        stage.finish(summary)


def rate_all(tokenizer: Any, rankings: Sequence[Ranking], rules: Collection[str]) -> Iterator[Rated]:
    """Each response of these rankings, with what the labeler says of it: the response's `qualities`; flags, 1 or 0 in
    the files that have them; rules, 1 (kept) or 0 in the files that mark a broken one. Raises: UserError for a level
    that is no digit.
    """
    flags: dict[str, set[str]] = {}  # by file
    for ranking in rankings:
        flags.setdefault(ranking.file, set()).update(itertools.chain(*ranking.flags.values()))
    prompts = encode_prompts(tokenizer, [ranking.prompt for ranking in rankings])
    for ranking, prompt in zip(rankings, prompts, strict=True):
        offered = flags[ranking.file] - {f"{BREAKS}{rule}" for rule in rules}
        asked = rules if any(flag.startswith(BREAKS) for flag in flags[ranking.file]) else ()
        for response in ranking.responses:
            given, levels = ranking.flags.get(response.id, ()), dict(response.metadata.get("qualities") or {})
            levels |= {"rating": ranking.ratings[response.id]} if response.id in ranking.ratings else {}
            for name, level in levels.items():
                if not isinstance(level, int | float) or not 0 <= level <= LEVELS - 1:
                    where = f"{ranking.file}: ranking {ranking.id}, response {response.id}"
                    raise UserError(f"{where}: {name} is {level!r}: want a number from 0 to {LEVELS - 1}")
                levels[name] = int(level + 0.5)
            levels |= {flag: int(flag in given) for flag in offered}
            levels |= {rule: int(f"{BREAKS}{rule}" not in given) for rule in asked}
            yield Rated(prompt + encode_response(tokenizer, *response.answer), levels)


def choose_qualities(
    config: Config, rated: Sequence[Rated], rankings: Sequence[Ranking], rules: Mapping[str, str]
) -> dict[str, Quality]:
    """Those of rate.qualities, or all attributes, and the rules: yes or no, or levels from 0 or 1 to the highest. Raises: UserError."""
    levels: dict[str, set[int]] = {}
    for name, level in itertools.chain(*(one.levels.items() for one in rated)):
        levels.setdefault(name, set()).add(level)
    marks = {"rating", *itertools.chain(*(flags for one in rankings for flags in one.flags.values()))}
    chosen = [*dict.fromkeys([*(listed(config.rate.qualities) or sorted(levels.keys() - marks)), *rules])]
    if not chosen:
        wanted = f"qualities of responses, or rate.qualities of {sorted(levels)}"
        raise UserError(f"rate: data.comparisons rates no attribute: want {wanted}")
    check_qualities("rate.qualities, or rate.rules", chosen, levels)
    found = {}
    for name in chosen:
        low, high = int(min(levels[name]) > 0 and max(levels[name]) > 1), max(1, *levels[name])
        more = {"weight": 0.0} if name in marks else LAMDA.get(name, {})
        found[name] = Quality(rules.get(name, name.upper()), low, high, rule=name in rules, **more)
    return found


def draw_rating_rows(config: Config, rater: Rater, rated: Sequence[Rated]) -> list[TokenRow]:
    """Rows of `rate.ratings` different (response, quality) pairs, in which only the rating token is learned."""
    applies = config.rate.given or {}
    candidates = [
        (one, name)
        for one in rated
        for name in rater.qualities
        if name in one.levels and (name not in applies or one.levels.get(applies[name]))
    ]
    drawn = random.Random(f"ratings-{config.seed}").sample(candidates, min(config.rate.ratings, len(candidates)))
    rows = ((rater.prompt(one.tokens, name), rater.digits[one.levels[name]]) for one, name in drawn)
    return [{"prompt": prompt, "response": [digit]} for prompt, digit in rows]


def ordered_share(scores: torch.Tensor, levels: Sequence[int | None]) -> float | None:
    """The share of pairs of unequal levels in which the higher one is rated higher, ties half; None without pairs."""
    from scipy.stats import mannwhitneyu

    known = sorted((level, i) for i, level in enumerate(levels) if level is not None)
    groups = [scores[[i for _, i in group]].numpy() for _, group in itertools.groupby(known, lambda one: one[0])]
    pairs = list(itertools.combinations(groups, 2))
    count = sum(len(low) * len(high) for low, high in pairs)
    return float(sum(mannwhitneyu(high, low).statistic for low, high in pairs) / count) if count else None
