"""LaMDA's fine-tuning: the SFT model learns to rate responses and goes on learning to answer (Thoppilan et al. 2022, section 6.1).

The rated responses are those of the labelling stage. Their labelers also say whether each one is sensible, specific, interesting and
safe: a noisy yes or no about the corresponding part of the truth (`PARTS`). `rlhf evaluate` then compares generate-and-rate with
best-of-n by the reward model and with PPO.
Differs: one labeler rates a response, not three or five; every quality is a part of the built-in world's truth.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.data.chat_template import encode_prompts, encode_response
from rlhf.data.encoding import TokenRow, encode_demonstrations, row_limit
from rlhf.data.records import Ranking
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import UserError
from rlhf.evaluation.best_of import QUALITIES, Rater, encode_ratings
from rlhf.gold.truth import Labeler, Truth, need_truth, says_yes
from rlhf.runs.folders import stage_folder
from rlhf.runs.sources import hash_sources, in_split, read_comparisons, read_demonstrations
from rlhf.runs.stage import open_stage
from rlhf.stages.sft import fine_tuned, load_with_dropout
from rlhf.training.adapters import save_output
from rlhf.training.setup import set_up

PARTS = {"SENSIBLE": "correct", "SPECIFIC": "complete", "INTERESTING": "polite", "SAFE": "safe"}  # of the truth


class Rated(NamedTuple):
    """One response to one prompt, as tokens, and what a labeler says of it."""

    tokens: list[int]
    says: dict[str, bool]
    truth: dict[str, bool]


def run(config: Config) -> None:
    """Write runs/<run>/rate/model, which answers prompts and rates answers."""
    truth = need_truth(config, "rate")
    if not set(PARTS.values()) <= set(truth.parts):
        raise UserError(f"rate: the {truth.name} has no parts {', '.join(PARTS.values())}: want gold.truth=judge")
    with open_stage(config, "rate", hash_sources(config, "rate")) as stage:
        device = set_up(config)
        folder = stage_folder(config, "sft") / "model"
        tokenizer, model = load_tokenizer(folder), load_with_dropout(config, folder, device)
        context = row_limit(config, tokenizer)

        # 1. Ratings, and the demonstrations, so that the model does not forget how to answer
        rankings = read_comparisons(config)
        rated = {
            split: list(rate_all(config, truth, tokenizer, in_split(config, rankings, split)))
            for split in ("train", "test")
        }
        rating_rows = draw_rating_rows(config, tokenizer, rated["train"], context)
        demonstrations = in_split(config, read_demonstrations(config), "train")
        answer_rows = encode_demonstrations(demonstrations, tokenizer, context, turns=config.sft.turns)
        ratings = f"{len(rating_rows):,} ratings of {len(rated['train']):,} responses"
        stage.say(f"{ratings}, and {len(answer_rows):,} demonstrations")

        # 2. Train on both
        with fine_tuned(stage, model, tokenizer, rating_rows + answer_rows, config.rate.epochs, device):
            save_output(model, tokenizer, stage)

        # 3. How well it orders responses of held-out prompts by each quality
        with inference(config, device):
            scores = Rater(model, tokenizer, config.rate.safety, device).rate([one.tokens for one in rated["test"]])
        shares = {name: ordered_share(scores[name], [one.truth[name] for one in rated["test"]]) for name in QUALITIES}
        summary = {name.lower(): value for name, value in shares.items() if value is not None}
        for name, value in summary.items():
            stage.say(f"held out, {name}: {value:.3f}")
        stage.finish(summary)


def rate_all(config: Config, truth: Truth, tokenizer: Any, rankings: Sequence[Ranking]) -> Iterator[Rated]:
    """Each response of these rankings, rated by the labeler who ranked it; those of held-out labelers are left out."""
    labelers: dict[str, Labeler] = {one.name: one for one in truth.labelers(config.gold.labeler_noise)}
    kept = [ranking for ranking in rankings if ranking.labeler in labelers]
    prompts = encode_prompts(tokenizer, [ranking.prompt for ranking in kept])
    for ranking, prompt in zip(kept, prompts, strict=True):
        rng = random.Random(f"rate-{config.seed}-{ranking.id}")
        for response in ranking.responses:
            ended = bool(response.metadata["ended"])
            parts = truth.judge(ranking, response.text, ended)
            labeler = labelers[str(ranking.labeler)]
            yield Rated(
                prompt + encode_response(tokenizer, response.text, ended),
                {name: says_yes(labeler, parts[part], rng) for name, part in PARTS.items()},
                {name: parts[part] > 0.5 for name, part in PARTS.items()},
            )


def draw_rating_rows(config: Config, tokenizer: Any, rated: Sequence[Rated], context: int) -> list[TokenRow]:
    """Rows of `rate.ratings` different (response, quality) pairs, in which only the rating token is learned."""
    names, ratings = encode_ratings(tokenizer)
    candidates = [(one, name) for one in rated for name in QUALITIES if len(one.tokens) + len(names[name]) < context]
    drawn = random.Random(f"ratings-{config.seed}").sample(candidates, min(config.rate.ratings, len(candidates)))
    return [{"prompt": one.tokens + names[name], "response": [ratings[one.says[name]]]} for one, name in drawn]


def ordered_share(scores: torch.Tensor, labels: Sequence[bool]) -> float | None:
    """The share of pairs of one response that has a quality and one that does not in which the first is rated higher, ties half: the
    area under the ROC curve. None if one side is empty.
    """
    from scipy.stats import mannwhitneyu

    positive = torch.tensor(labels, dtype=torch.bool)
    if positive.all() or not positive.any():
        return None
    wins = mannwhitneyu(scores[positive].numpy(), scores[~positive].numpy()).statistic
    return float(wins / (positive.sum() * (~positive).sum()))
