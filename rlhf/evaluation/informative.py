"""Which prompts to label next: those whose responses a reward model scores alike, or on which several reward models disagree.

Source: Ji, He and Gu 2024, "Reinforcement Learning from Human Feedback with Active Queries", arXiv:2402.09401 (pairs of similar score);
Gleave and Irving 2022, "Uncertainty Estimation for Language Reward Models", arXiv:2203.07472 (the variance of an ensemble).
Differs: whole prompts are chosen, by the mean over their pairs, since labelers rank K responses.
"""

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean, pvariance

from rlhf.config import Config
from rlhf.data.records import Ranking
from rlhf.data.splits import uniform
from rlhf.evaluation.scoring import load_judge
from rlhf.evaluation.statistics import split_like
from rlhf.model.interface import score
from rlhf.runs.progress import progress
from rlhf.training.setup import set_up

Value = float | None  # of a prompt; none: its responses do not fit the reward model


def value_of(how: str, scores: Sequence[Sequence[float]]) -> float:
    """What labels of one prompt may teach. scores: a list over the K responses per reward model, without calibration.

    With p(i over j) = sigmoid(r_i - r_j) (Ouyang et al. 2022, equation 1), the mean over pairs of responses of p (1 - p), averaged
    over the models ("uncertain"), or of the variance of p over the models ("disagreement").
    """
    pairs = [
        [1 / (1 + math.exp(min(700.0, r[j] - r[i]))) for r in scores] for i, j in combinations(range(len(scores[0])), 2)
    ]
    return fmean(pvariance(p) if how == "disagreement" else fmean(one * (1 - one) for one in p) for p in pairs)


def choose_prompts_by(
    values: Sequence[Value], keys: Sequence[str], count: int, random_part: float, seed: int
) -> dict[int, bool]:
    """The positions of `count` prompts, and whether each was drawn at random: `random_part` of them are, by (seed, key), and the
    others have the largest values.
    """
    drawn = sorted(range(len(values)), key=lambda i: uniform(f"choose {keys[i]}", seed))
    chosen = dict.fromkeys(drawn[: round(random_part * min(count, len(values)))], True)
    rest = [i for i in drawn if i not in chosen and values[i] is not None]
    rest.sort(key=lambda i: -(values[i] or 0.0))
    return chosen | dict.fromkeys(rest[: count - len(chosen)], False)


def value_tasks(
    config: Config, tasks: Sequence[Ranking], how: str, rewards: Sequence[str | None], setting: str
) -> list[Value]:
    """The value of each task by reward models (None: the run's own). Raises: UserError if a model is missing."""
    device = set_up(config)
    by_model = []
    with progress(len(tasks) * len(rewards), setting, unit="prompt") as bar:
        for name in rewards:
            _, model, encode = load_judge(config, name, setting, device)
            answers = [[(one.text, bool(one.metadata.get("ended", True))) for one in task.responses] for task in tasks]
            encoded = [encode(task.prompt, given) for task, given in zip(tasks, answers, strict=True)]
            rows = [found[0] if found else [] for found in encoded]
            by_model.append(
                split_like(score(model, [row for of_task in rows for row in of_task], calibrated=False).tolist(), rows)
            )
            bar.update(len(tasks))
    return [value_of(how, each) if all(each) else None for each in zip(*by_model, strict=True)]
