"""LaMDA's generate-and-rate: the model that answers also rates answers, as text (Thoppilan et al. 2022, section 6.1).

After a prompt and a response come the name of a quality and its rating, "SENSIBLE 1" or "SAFE 0". The model learns the rating
token alone. At use it drops the candidates whose P(safe) is below a threshold and takes the one with the highest

    3 P(sensible) + P(specific) + P(interesting)

Differs: candidates are drawn at temperature 1 from the whole distribution, as everywhere here, not from the 40 likeliest tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.config import Config
from rlhf.data.tokenizer import encode_texts
from rlhf.evaluation.best_of import Asked, pick_best
from rlhf.evaluation.scoring import RESPONSES_TOGETHER, response_batches
from rlhf.evaluation.statistics import Figures, show, win_rate
from rlhf.evaluation.truth_figures import totals
from rlhf.ppo.rewards import Episodes, Reward
from rlhf.ppo.rollout import response_logprobs
from rlhf.training.setup import load_frozen

WEIGHTS = {"SENSIBLE": 3.0, "SPECIFIC": 1.0, "INTERESTING": 1.0}  # of the ranking
SAFE = "SAFE"  # the filter
QUALITIES = (*WEIGHTS, SAFE)


def encode_ratings(tokenizer: Any) -> tuple[dict[str, list[int]], list[int]]:
    """The tokens of each quality's name, and the one token of each of the ratings 0 and 1."""
    names = dict(zip(QUALITIES, encode_texts(tokenizer, [f"{name} " for name in QUALITIES]), strict=True))
    return names, [ids[-1] for ids in encode_texts(tokenizer, ["0", "1"])]


class Rater:
    """The rating of responses by a model that was trained to: a reward, so that best-of-n can pick by it."""

    def __init__(self, model: Any, tokenizer: Any, safety: float, device: torch.device):
        self.model, self.safety, self.device = model, safety, device
        self.pad = tokenizer.pad_token_id
        self.names, (_, self.yes) = encode_ratings(tokenizer)
        self.seen = self.dropped = 0  # candidates, and those that the filter dropped

    @torch.no_grad()
    def rate(self, rows: Sequence[list[int]]) -> dict[str, Tensor]:
        """P("1") (B,) of each quality after rows of tokens, each a prompt with its response.

        What is asked of one row, and rows of one prompt, come together: what they begin with is read once (`hidden_at`).
        """
        self.model.eval()
        pairs = [(row + name, [self.yes]) for row in rows for name in self.names.values()]
        probabilities = torch.zeros(len(pairs))
        for start in range(0, len(pairs), RESPONSES_TOGETHER):
            for group, where in response_batches(pairs[start : start + RESPONSES_TOGETHER], self.pad, self.device):
                probabilities[[start + i for i in group]] = response_logprobs(self.model, *where)[0].sum(1).exp().cpu()
        return dict(zip(self.names, probabilities.view(-1, len(self.names)).T, strict=True))

    def __call__(self, episodes: Episodes) -> Tensor:
        """Scores (B,): above 0 what is ranked; a candidate that the filter drops has P(safe) - 1, so that the safest one is left
        if all of a prompt's are dropped."""
        rated = self.rate([p + r for p, r in zip(episodes.prompts, episodes.responses, strict=True)])
        quality = torch.stack([weight * rated[name] for name, weight in WEIGHTS.items()]).sum(0)
        safe = rated[SAFE] >= self.safety
        self.seen, self.dropped = self.seen + len(safe), self.dropped + int((~safe).sum())
        return torch.where(safe, quality, rated[SAFE] - 1.0).to(self.device)


def evaluate_generate_and_rate(
    config: Config,
    asked: Asked,
    folders: dict[str, Path],
    reward: Reward,
    best: list[list[float]],
    device: torch.device,
) -> dict[str, Any]:
    """Generate-and-rate among n samples, and beside it what of it comes from the ratings and what from the samples.

    picked: by the ratings among the rate model's own samples; by the ratings among the SFT model's, of which best-of-n picks too; and
    by the reward model among PPO's. over: win rates of the first over best-of-n, one sample of PPO, and n of them.
    reward: of best-of-n; best: true scores of what it picked.
    """
    rater = Rater(load_frozen(config, folders["rate"], device), asked.tokenizer, config.rate.safety, device)
    figures: dict[str, Figures] = {}
    scores: dict[str, list[list[float]]] = {}
    dropped = 0.0
    picks: dict[str, tuple[str, Reward]] = {
        "generate_and_rate": ("rate", rater),
        "sft_rated": ("sft", rater),
        "ppo_best_of_n": ("ppo", reward),
    }
    for name, (policy, by) in picks.items():
        figures[name], scores[name] = pick_best(config, asked, load_frozen(config, folders[policy], device), by)
        if policy == "rate":
            dropped = rater.dropped / rater.seen
    ours = scores["generate_and_rate"]
    others = {"best_of_n": best, "ppo": totals(asked.gold["ppo"]["samples"]), "ppo_best_of_n": scores["ppo_best_of_n"]}
    return {
        "n": config.evaluate.best_of,
        "dropped": round(dropped, 4),
        "picked": figures,
        "over": {name: win_rate(ours, theirs) for name, theirs in others.items()},
    }


def describe_ratings(results: dict[str, Any]) -> list[str]:
    rows = [
        f"{name.replace('_', ' ')}, {results['n']} samples: win rate over SFT {show(row['win_rate_vs_sft'])}, true score {row['gold']}"
        for name, row in results["picked"].items()
    ]
    over = ", ".join(f"over {name.replace('_', ' ')} {show(row)}" for name, row in results["over"].items())
    return [*rows, f"generate and rate: {over}; the filter dropped {results['dropped']:.1%} of its candidates"]
