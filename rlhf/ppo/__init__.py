"""PPO: rollouts, rewards, the update, and the checks of its first update.

The steps of an update, for a loop of your own (docs/extending.md): `from rlhf.ppo import sample_responses, optimize, …`.
"""

import importlib
from typing import Any

# Where each name is; its module is imported at the first use.
_FROM = {
    "experience": ("Experience", "Rollout", "load_estimator", "sample_responses", "score_responses"),
    "rewards": ("adjust_scores",),
    "update": ("State", "optimize", "train_minibatch"),
}


def __getattr__(name: str) -> Any:
    for module, names in _FROM.items():
        if name in names:
            return getattr(importlib.import_module(f"rlhf.ppo.{module}"), name)
    raise AttributeError(f"module 'rlhf.ppo' has no attribute {name!r}")
