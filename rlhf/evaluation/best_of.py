"""Best-of-n: the reward model picks among n samples of the SFT model. The baseline for PPO at equal KL.

KL(best of n || SFT) is at most log n - (n - 1)/n nats per response (Stiennon et al. 2020, appendix G.3), and less if samples repeat
(Beirami et al. 2024). The curve over n comes from one set of N samples per prompt (Nakano et al. 2021, appendix I). `rlhf rejection`
fine-tunes on the best ones.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf.config import Config
from rlhf.data.tokenizer import encode_texts
from rlhf.engines.sampling import make_sampler
from rlhf.evaluation.policies import (
    Answer,
    Asked,
    adjusted,
    draw_in_turn,
    interval_of,
    judge_rows,
    mean_of,
    part_means,
    score_by,
    totals,
)
from rlhf.evaluation.scoring import RESPONSES_TOGETHER, pair_nats
from rlhf.evaluation.statistics import Figures, batched, flatten, interval, text_figures, win_rate
from rlhf.model.interface import Episodes
from rlhf.ppo.rewards import Reward, make_reward
from rlhf.runs.progress import Progress, progress
from rlhf.system.processes import divide, gather
from rlhf.training.setup import load_frozen


def best_of_n_kl(n: int) -> float:
    """Upper bound in nats of the KL between best-of-n and the policy that it samples from: log n - (n - 1)/n."""
    return math.log(n) - (n - 1) / n


def expected_best(proxy: Sequence[float], values: Sequence[float], n: int) -> float:
    """Unbiased estimate of the expected value of the best of n, from N >= n samples of one prompt.

    sum_i C(i - 1, n - 1) / C(N, n) values_(i)        samples in ascending order of proxy score, i from 1
    """
    total = len(proxy)
    order = np.argsort(np.asarray(proxy), kind="stable")
    ways = np.array([math.comb(i, n - 1) / math.comb(total, n) for i in range(total)])
    return float(ways @ np.asarray(values, dtype=np.float64)[order])


def draw_candidates(
    config: Config, policy: Any, asked: Asked, n: int, reward: Reward, bar: Progress | None = None
) -> list[tuple[list[Answer], list[float]]]:
    """n samples of each prompt at temperature 1, and their scores as PPO would use them."""
    if not asked.prompts:
        return []
    engine, together = make_sampler(config, policy, asked.tokenizer), max(1, config.rollout.batch_size // n)
    keyed = [(ids, ("best_of", record.id)) for record, ids in zip(asked.records, asked.prompts, strict=True)]
    answers = []
    for row in draw_in_turn(engine, asked.tokenizer, keyed, n, together):
        answers.append(row)
        if bar is not None:
            bar.update(1)
    scores = adjusted(config, answers, score_by(reward, asked.records, asked.prompts, answers))
    return list(zip(answers, scores, strict=True))


def draw_best(
    config: Config, policy: Any, asked: Asked, n: int, reward: Reward, bar: Progress, ended: bool = False
) -> list[tuple[Answer, float]]:
    """The best of n samples of each prompt and its score; the first of several. The prompts are divided among the processes, on each
    of which the models must be whole. ended: prefer those that end, whatever their score.
    """

    def best(row: list[Answer], scores: list[float]) -> tuple[Answer, float]:
        return max(zip(row, scores, strict=True), key=lambda one: (one[0].ended or not ended, one[1]))

    def draw(mine: Sequence[int]) -> list[tuple[Answer, float]]:
        return [best(*drawn) for drawn in draw_candidates(config, policy, asked.part(mine), n, reward, bar)]

    return divide(len(asked.records), draw)


def pick_best(config: Config, asked: Asked, policy: Any, reward: Reward) -> tuple[Figures, list[list[float]]]:
    """What the reward picks among n samples of a policy: its figures, and its true score, a list of one per prompt.

    kl_bound_nats bounds the KL to the policy; ppo_above is PPO's true score minus that of the pick, prompt by prompt.
    """
    n, truth = config.evaluate.best_of, asked.truth
    with progress(len(asked.records), f"evaluate: best of {n}", unit="prompt") as bar:
        best = draw_best(config, policy, asked, n, reward, bar)
    picked = [[one] for one, _ in best]
    results: Figures = {
        "n": n,
        "kl_bound_nats": round(best_of_n_kl(n), 4),
        "reward": mean_of([[score] for _, score in best]),
        "text": text_figures(picked, [[sum(one.logprobs)] for one, _ in best]),
    }
    if truth is None:
        return results, []
    judged = judge_rows(truth, asked.records, picked)
    scores, ppo = totals(judged), totals(asked.gold[asked.main]["samples"])
    results |= {
        "gold": mean_of(scores),
        "score": interval_of(scores),
        "parts": part_means(truth, judged),
        "win_rate_vs_sft": win_rate(scores, totals(asked.gold["sft"]["samples"])),
        "ppo_above": interval([fmean(theirs) - best for theirs, (best,) in zip(ppo, scores, strict=True)]),
    }
    return results, scores


# --- generate and rate ---------------------------------------------------------------------------------------------

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
        self.model, self.safety, self.device = model.eval(), safety, device
        self.pad = tokenizer.pad_token_id
        self.names, (_, self.yes) = encode_ratings(tokenizer)
        self.seen = self.dropped = 0  # candidates, and those that the filter dropped

    def rate(self, rows: Sequence[list[int]]) -> dict[str, Tensor]:
        """P("1") (B,) of each quality after rows of tokens, each a prompt with its response.

        The qualities of one row, and the rows of one prompt, go through the model together, so that their common beginning is read
        once (`LanguageModel.hidden`).
        """
        pairs = [(row + name, [self.yes]) for row in rows for name in self.names.values()]
        parts = batched(pairs, RESPONSES_TOGETHER)
        nats = torch.tensor(flatten(pair_nats(self.model, part, self.pad, self.device) for part in parts))
        return dict(zip(self.names, nats.exp().view(-1, len(self.names)).T, strict=True))

    def __call__(self, episodes: Episodes) -> Tensor:
        """Scores (B,): the weighted qualities, above 0. A candidate that the filter drops has P(safe) - 1, below 0, so that the
        safest one is picked if all of a prompt's are dropped."""
        rated = self.rate([p + r for p, r in zip(episodes.prompts, episodes.responses, strict=True)])
        quality = torch.stack([weight * rated[name] for name, weight in WEIGHTS.items()]).sum(0)
        safe = rated[SAFE] >= self.safety
        self.seen, self.dropped = self.seen + len(safe), self.dropped + int((~safe).sum())
        return torch.where(safe, quality, rated[SAFE] - 1.0).to(self.device)


def evaluate_best_of(config: Config, asked: Asked, models: dict[str, Path], device: torch.device) -> dict[str, Any]:
    """Best-of-n by the reward model over n samples of the SFT model, the baseline for PPO; generate-and-rate, if a model rates.

    Generate-and-rate picks by the ratings among the rate model's own samples. `sft_rated` picks by the ratings among the samples that
    best-of-n picks from, which separates the effect of the ratings from that of the samples; `ppo_best_of_n` picks by the reward model
    among PPO's. over: the win rates of generate-and-rate over best-of-n, one sample of PPO, and the best of n of PPO.
    """
    reward, _ = make_reward(config, asked.tokenizer, device)

    def pick(name: str, judge: Reward) -> tuple[Figures, list[list[float]]]:
        return pick_best(config, asked, load_frozen(config, models[name], device), judge)

    best, best_scores = pick("sft", reward)
    if not {"rate", "ppo"} <= models.keys():
        return {"best_of_n": best}
    rater = Rater(load_frozen(config, models["rate"], device), asked.tokenizer, config.rate.safety, device)
    rated, ours = pick_best(config, asked, rater.model, rater)
    dropped = round(sum(gather(rater.dropped)) / sum(gather(rater.seen)), 4)
    sft_rated, _ = pick("sft", rater)
    ppo_best, ppo_scores = pick("ppo", reward)
    others = {"best_of_n": best_scores, "ppo": totals(asked.gold["ppo"]["samples"]), "ppo_best_of_n": ppo_scores}
    picked = {"generate_and_rate": rated, "sft_rated": sft_rated, "ppo_best_of_n": ppo_best}
    over = {name: win_rate(ours, theirs) for name, theirs in others.items()}
    ratings = {"n": config.evaluate.best_of, "dropped": dropped, "picked": picked, "over": over}
    return {"best_of_n": best, "generate_and_rate": ratings}
