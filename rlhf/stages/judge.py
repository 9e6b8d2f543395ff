"""Stage: the reward model that judges the final policies.

It learns from the half of the comparisons' prompts that the reward model and DPO do not use (data.half), on its own
base (judge.model), so that no policy was optimised for it. `rlhf evaluate` uses it to compare the policies' answers.
"""

from dataclasses import replace

from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.stages.reward import train_reward_model


def run(config: Config) -> None:
    """Write runs/<run>/judge/model. Raises: UserError without judge.model or data.half."""
    if config.judge.model is None:
        raise UserError("judge.model is not set: give the folder or hub name of a text model as the judge's base")
    # All its weights are trained: adapters belong to the policy's model.
    lora = replace(config.lora, rank=0, share_trunk=False)
    train_reward_model(replace(config, reward=config.judge, lora=lora), "judge")
