"""The maths of the recipe as pure functions of tensors. Imports torch and nothing else.

If several ranks share one number, the caller passes a denominator or an `all_reduce`. Conventions: masks are bool,
True counts, and nothing outside a mask reaches a result or a gradient, not even NaN; log-probs and losses are nats in
float32 (half precision is raised to it, float64 stays); a loss returns (loss, statistics), statistics are detached
scalars. Wrong shapes, types, names and ranges raise ValueError; so does a mean over nothing unless a denominator is
given.
"""

from rlhf.ops import gae, kl, logprobs, masked, ppo, ranking

__all__ = ["gae", "kl", "logprobs", "masked", "ppo", "ranking"]
