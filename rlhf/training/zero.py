"""DeepSpeed's configuration, built from this project's settings, so that a batch size is stated once.

ZeRO-1 shards the optimizer's state over the ranks, ZeRO-2 the gradients too, ZeRO-3 the weights too (Rajbhandari et
al. 2020); offload keeps the sharded optimizer (and with ZeRO-3 the weights) in the host's memory.
"""

from typing import Any

import torch

from rlhf.config import DEEPSPEED, Config
from rlhf.errors import UserError


def zero_stage(config: Config) -> int:
    """The ZeRO stage of deepspeed=…; 0 without DeepSpeed."""
    return DEEPSPEED[config.deepspeed][0]


def offloads(config: Config) -> bool:
    return DEEPSPEED[config.deepspeed][1]


def need_deepspeed(config: Config) -> None:
    """Raises: UserError if deepspeed=… asks for a package that is not installed."""
    import importlib.util

    if zero_stage(config) and importlib.util.find_spec("deepspeed") is None:
        raise UserError(
            f"deepspeed={config.deepspeed}: DeepSpeed is not installed: pip install 'rlhf-recipe[deepspeed]', or set deepspeed=none"
        )


def deepspeed_settings(
    config: Config, *, bfloat16: bool, micro_batch: int = 1, accumulation: int = 1, max_grad_norm: float = 0.0
) -> dict[str, Any]:
    """The dictionary that DeepSpeed takes as its configuration.

    micro_batch: rows per forward on one rank; accumulation: forwards per optimizer step; max_grad_norm: of one engine's
    whole gradient, 0 clips nothing.
    """
    stage = zero_stage(config)
    bucket = config.sharding.bucket_elements
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "overlap_comm": False,
    }
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": bucket,
            "stage3_max_live_parameters": bucket,
            "stage3_max_reuse_distance": bucket,
            "stage3_param_persistence_threshold": config.sharding.persistence_threshold,
        }
    if offloads(config):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": max_grad_norm,
        "zero_optimization": zero,
        "bf16": {"enabled": bfloat16},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
