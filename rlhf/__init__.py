"""RLHF by the InstructGPT recipe: pretraining, supervised fine-tuning, reward model, PPO.

From a notebook or a script (docs/api.md):

    run = rlhf.load("runs/demo")
    run.sample(["What colour is snow?"])                # the PPO model's answers
    run.score(["What colour is snow?"], ["White."])     # the reward model's scores
    run.policy("sft"), run.reward_model(), run.tokenizer
    rlhf.ops                                            # the mathematics: gae, policy_loss, ranking_loss …

    run = rlhf.Run("tuned", model="…", demonstrations=rows, comparisons=rows)
    run.sft(epochs=2).reward().ppo(rewards=[my_function], kl_coef=0.05)

Everything else is a command: `rlhf --help`. Importing this package imports neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf import ops as ops
    from rlhf.api import LoadedRun as LoadedRun
    from rlhf.api import load as load
    from rlhf.commands.run import Run as Run

__version__ = "0.2.0"
__all__ = ["LoadedRun", "Run", "__version__", "load", "ops"]

# Where each name is; its module is imported at the first use.
_FROM = {"load": "rlhf.api", "LoadedRun": "rlhf.api", "Run": "rlhf.commands.run", "ops": "rlhf.ops"}


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module 'rlhf' has no attribute {name!r}")
    module = importlib.import_module(_FROM[name])
    return module if name == "ops" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
