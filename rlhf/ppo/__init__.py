"""PPO: rollouts, rewards, the update, and the checks of its first update.

The steps of an update, for a loop of your own (docs/extending.md):
`from rlhf.ppo import sample_responses, optimize, …`.
"""

from rlhf.ppo.experience import Experience, Rollout, load_estimator, sample_responses, score_responses
from rlhf.ppo.rewards import adjust_scores
from rlhf.ppo.update import State, optimize, train_minibatch

__all__ = [
    "Experience", "Rollout", "State", "adjust_scores", "load_estimator", "optimize", "sample_responses", "score_responses",
    "train_minibatch",
]  # fmt: skip
