"""RLHF by the InstructGPT recipe: pretraining, supervised fine-tuning, reward model, PPO.

`rlhf.Run` runs the stages, `rlhf.load` reads a run (docs/api.md); everything else is a command: `rlhf --help`.
Importing this package imports neither torch nor transformers.
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


def __dir__() -> list[str]:  # for help()
    return sorted({*globals(), *__all__})
