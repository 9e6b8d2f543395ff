"""PPO with rlhf: a policy, a reward classifier and a file of prompts. before.py is the same script with TRL 1.12.0.

python after.py POLICY REWARD PROMPTS.jsonl OUT
"""

import sys

import rlhf

POLICY, REWARD, PROMPTS, OUT = sys.argv[1:]
LENGTH = 24  # tokens of a response

run = rlhf.Run(OUT, model=POLICY, prompts=PROMPTS, sft_epochs=0, seed=0)
run.ppo(
    rewards=REWARD,
    critic="sft",
    lr=1e-4,
    critic_lr=1e-4,
    final_lr_fraction=0.0,
    warmup_fraction=0,
    episodes=2560,
    episodes_per_update=64,
    minibatches=1,
    epochs=4,
    rollout_max_new_tokens=LENGTH,
    kl_coef=0.05,
    value_coef=0.1,
    clip_range=0.2,
    gamma=1.0,
    lam=0.95,
    eval_every=0,
)
print(run.metrics("ppo").iloc[-1].to_dict())
