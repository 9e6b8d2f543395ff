"""Best-of-n: the reward model picks among n samples of the SFT model. The baseline for PPO at equal KL;
`rlhf rejection` fine-tunes on the picks.

KL(best of n || SFT) is at most log n - (n - 1)/n nats per response (Stiennon et al. 2020, appendix G.3), and less if
samples repeat (Beirami et al. 2024). The curve over n comes from one set of N samples per prompt (Nakano et al. 2021,
appendix I).
"""

import math
from collections.abc import Sequence
from operator import mul
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from rlhf.config import Config
from rlhf.data.agreement import ratio_interval
from rlhf.engines.sampling import make_sampler
from rlhf.evaluation import policies
from rlhf.evaluation.policies import Answer, Answers, Asked, Responses
from rlhf.evaluation.scoring import Scores
from rlhf.evaluation.statistics import Figures, flatten, interval, interval_of, split_like, text_figures, win_rate
from rlhf.ppo.experience import Prompt
from rlhf.ppo.rewards import Rater, Reward, make_reward
from rlhf.runs.progress import Progress
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
    config: Config, policy: Any, asked: Asked, n: int, reward: Reward, label: str = "best of n"
) -> tuple[Answers, Scores]:
    """n samples of each prompt at temperature 1, and their scores as PPO would use them. label: of the progress that is shown."""
    if not asked.prompts:
        return [], []
    engine, together = make_sampler(config, policy, asked.tokenizer), max(1, config.rollout.batch_size // n)
    keyed = [(ids, ("best_of", record.id), n) for record, ids in asked.prompts]
    answers = []
    with Progress(len(keyed), label, unit="prompt") as bar:
        for row in policies.draw_in_turn(engine, asked.tokenizer, keyed, together):
            answers.append(row)
            bar.update(1)
    return answers, policies.adjusted(config, answers, policies.score_by(reward, asked.prompts, answers))


def draw_best(
    config: Config, policy: Any, asked: Asked, n: int, reward: Reward, label: str, ended: bool = False
) -> list[tuple[Answer, float]]:
    """The best of n samples of each prompt and its score; the first of several. The prompts are divided among the
    processes, on each of which the models must be whole. ended: prefer those that end, whatever their score.
    """

    def draw(mine: Sequence[Prompt]) -> list[tuple[Answer, float]]:
        rows = zip(*draw_candidates(config, policy, asked._replace(prompts=list(mine)), n, reward, label), strict=True)
        return [max(zip(*row, strict=True), key=lambda one: (one[0].ended or not ended, one[1])) for row in rows]

    return divide(asked.prompts, draw)


def pick_best(config: Config, asked: Asked, policy: Any, reward: Reward) -> tuple[Figures, list[list[float]]]:
    """What the reward picks among n samples of a policy: its figures, and its true score, a list of one per prompt.

    kl_bound_nats bounds the KL to the policy; ppo_above is PPO's true score minus that of the pick, prompt by prompt.
    """
    n, truth = config.evaluate.best_of, asked.truth
    best = draw_best(config, policy, asked, n, reward, f"evaluate: best of {n}")
    picked = [[one] for one, _ in best]
    results: Figures = {
        "n": n,
        "kl_bound_nats": round(best_of_n_kl(n), 4),
        "reward": policies.mean_of([[score] for _, score in best]),
        "text": text_figures(picked, [[sum(one.logprobs)] for one, _ in best]),
    }
    if truth is None:
        return results, []
    judged = policies.judge_rows(truth, asked.prompts, picked)
    scores, ppo = policies.totals(judged), policies.totals(asked.gold[asked.main]["samples"])
    results |= {
        "gold": policies.mean_of(scores),
        "score": interval_of(scores),
        "parts": policies.part_means(truth, judged),
        "win_rate_vs_sft": win_rate(scores, policies.totals(asked.gold["sft"]["samples"])),
        "ppo_above": interval([fmean(theirs) - best for theirs, (best,) in zip(ppo, scores, strict=True)]),
    }
    return results, scores


def evaluate_ratings(config: Config, rater: Rater, answers: dict[str, Responses]) -> Figures:
    """{quality: {policy: the mean value of its samples}}; of a rule, as `breaks_<rule>`, the mean P(broken).

    Of a quality in rate.given only samples with the other one count, by its value c: sum c v / sum c, which of claims
    and of whether sources support them is groundedness; n is the sum of c, of so many samples.
    Source: Thoppilan et al. 2022, section 4.1.
    """
    applies, found = config.rate.given or {}, dict[str, dict[str, Figures]]()

    def rate(rows: Sequence[Sequence[list[int]]]) -> list[list[dict[str, float]]]:
        rated = rater.rate(flatten(rows))
        values = zip(*(of_all.tolist() for of_all in rated.values()), strict=True)
        return split_like((dict(zip(rated, of_one, strict=True)) for of_one in values), rows)

    for policy, given in answers.items():
        pairs = zip(given.prompts, given.samples, strict=True)
        rated = divide([[ids + one.ids for one in row] for (_, ids), row in pairs], rate)
        for name, quality in rater.qualities.items():
            counts = [[one.get(applies.get(name, ""), 1.0) for one in row] for row in rated]
            values = [[1 - one[name] if quality.rule else one[name] for one in row] for row in rated]
            sums = [sum(map(mul, *both)) for both in zip(counts, values, strict=True)]
            figure = ratio_interval(sums, list(map(sum, counts)), share=True) | {"of": len(flatten(rated))}
            found.setdefault(f"breaks_{name}" if quality.rule else name, {})[policy] = figure
    return found


def evaluate_best_of(
    config: Config, asked: Asked, models: dict[str, Path], device: torch.device, rater: Rater | None = None
) -> dict[str, Any]:
    """Best-of-n by the reward model over n samples of the SFT model, the baseline for PPO; generate-and-rate, with a
    rater.

    Generate-and-rate picks by the ratings among the rate model's own samples. `sft_rated` picks by the ratings among
    the samples that best-of-n picks from, which separates the effect of the ratings from that of the samples;
    `ppo_best_of_n` picks by the reward model among PPO's. over: the true win rates of generate-and-rate over best-of-n,
    one sample of PPO, and the best of n of PPO.
    """
    reward, _ = make_reward(config, asked.tokenizer, device)

    def pick(name: str, judge: Reward) -> tuple[Figures, list[list[float]]]:
        return pick_best(config, asked, load_frozen(config, models[name], device), judge)

    best, best_scores = pick("sft", reward)
    if rater is not None:
        rater.least = config.rate.least or {name: one.least for name, one in rater.qualities.items() if one.least}
    if rater is None or not (rater.weights or rater.least):  # nothing to pick by
        return {"best_of_n": best}
    rated, ours = pick_best(config, asked, rater.model, rater)
    dropped = sum(gather(rater.dropped)) / max(1, sum(gather(rater.seen)))
    picked, others = {"generate_and_rate": rated, "sft_rated": pick("sft", rater)[0]}, {"best_of_n": best_scores}
    if "ppo" in models:
        picked["ppo_best_of_n"], others["ppo_best_of_n"] = pick("ppo", reward)
    if asked.gold and "ppo" in models:
        others["ppo"] = policies.totals(asked.gold["ppo"]["samples"])
    over = {name: win_rate(ours, theirs) for name, theirs in others.items()} if asked.gold else {}
    ratings = {"n": config.evaluate.best_of, "dropped": round(dropped, 4), "picked": picked, "over": over}
    return {"best_of_n": best, "generate_and_rate": ratings}
