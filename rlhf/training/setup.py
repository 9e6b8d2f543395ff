"""Set-up that all stages share: device and seeds, whether the device computes right, a model from a folder."""

import contextlib
import copy
import importlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import recursively_apply, send_to_device
from torch import Tensor, nn

from rlhf.config import Config
from rlhf.data.tokenizer import load_tokenizer, tokenizer_hash
from rlhf.errors import UserError
from rlhf.model.checkpoint import is_encoder, load_whole, read_config
from rlhf.model.linear import hold_frozen
from rlhf.ops.fast import keep_freed_memory
from rlhf.runs.folders import stage_folder
from rlhf.runs.stage import Stage, open_stage
from rlhf.system.processes import connect

MOST_GAP = 1e-2  # of a gradient from the CPU's, as a share of its norm


@contextlib.contextmanager
def running(config: Config, name: str, data: dict[str, str] | None = None) -> Iterator[tuple[Stage, torch.device]]:
    """A stage, opened by `open_stage`, and the device on which it runs models."""
    with open_stage(config, name, data) as stage:
        yield stage, set_up(config)


def parent_model(config: Config, stage: str) -> tuple[Path, Any]:
    """The model folder of a stage that others build on, and its tokenizer."""
    folder = stage_folder(config, stage) / "model"
    return folder, load_tokenizer(folder)


def set_up(config: Config) -> torch.device:
    """Threads, seeds and the device of this process, and its connection to the others of a launch."""
    be_quiet()
    # transformers 5.23 renamed the setting; older versions do not know the new name.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.* is deprecated", category=FutureWarning)
    if config.threads:
        torch.set_num_threads(config.threads)
    transformers.set_seed(config.seed)
    device = choose_device(config)
    if device.type == "cpu":
        keep_freed_memory()
    connect(device)
    return device


def be_quiet() -> None:
    """Turn off the libraries' progress bars, and their messages below errors."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("accelerate.accelerator").setLevel(logging.ERROR)
    if not torch.cuda.is_available():  # otherwise DeepSpeed, which other libraries import, prints that it found no GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if os.environ.get("WANDB_MODE") == "offline":
        with contextlib.redirect_stdout(io.StringIO()):  # it prints that W&B is offline when it is imported
            importlib.import_module("transformers.integrations.integration_utils")


def choose_device(config: Config) -> torch.device:
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    device = ("cuda" if there["cuda"] else "cpu") if config.device == "auto" else config.device
    if not there[device]:
        raise UserError(f"device={device}: torch sees no such GPU here: use device=auto or device=cpu")
    # cuDNN's attention plans anew for each shape, and gave NaN gradients with masks (pytorch#196678)
    if device == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device(device)


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors in a module's output: a tensor, or tuples, lists and dicts of them."""
    found: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        found.append(x)
        return x

    recursively_apply(keep, output)
    return found


def check_gradients(module: nn.Module, arguments: Any, keywords: Any) -> None:
    """Raises: UserError if a gradient of a forward's summed outputs, without dropout, differs from the CPU's by more
    than MOST_GAP. MPS gave wrong gradients without an error (pytorch#177116, pytorch#153957).
    """
    training = module.training
    twin = copy.deepcopy(module.eval()).cpu()
    given, found = (arguments, keywords), []
    for one, (args, kwargs) in ((module, given), (twin, send_to_device(given, "cpu"))):
        outputs = [x for x in tensors_of(one(*args, **kwargs)) if x.requires_grad]
        trained = {name: p for name, p in one.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad([x.sum() for x in outputs], [*trained.values()], allow_unused=True)
        found.append({n: g.float().cpu() for n, g in zip(trained, gradients, strict=True) if g is not None})
    module.train(training)
    here, wanted = found
    least = 1e-5 * nn.utils.get_total_norm(wanted.values())  # of gradients that are 0 but for rounding
    for name, x in wanted.items():
        if name not in here or not (here[name] - x).norm() <= MOST_GAP * x.norm() + least:
            remedy = "torch computes it wrongly here: use device=cpu, or another version of torch"
            raise UserError(f"device=mps: the gradient of {name} is not the CPU's: {remedy}")


def transformers_in(module: nn.Module) -> list[Any]:
    """The outermost models of transformers' classes in a module."""
    if isinstance(module, transformers.PreTrainedModel):
        return [module]
    return [found for child in module.children() for found in transformers_in(child)]


def load_policy(folder: Path, dropout: float | None = None, encoder: bool = False) -> Any:
    """A causal LM from a stage's model folder, in float32, in eval mode. Raises: UserError if it cannot be read, or is
    an encoder.
    dropout: replaces the model's own, if its configuration has this setting, as ours and OPT's have. encoder: whether
    it may be one.
    """
    config, loader = read_policy_config(folder, dropout, encoder), transformers.AutoModelForCausalLM
    return load_whole(loader, str(folder), config, local_files_only=True, dtype=torch.float32).eval()


def read_policy_config(folder: Path, dropout: float | None = None, encoder: bool = False) -> Any:
    """The configuration of `load_policy`'s model."""
    import rlhf.model  # noqa: F401 (registers our GPT with the Auto classes)

    be_quiet()
    what, remedy = f"{folder}: not a readable model", "run the stage that writes it again"
    config = read_config(str(folder), what, remedy, local_files_only=True)
    if not encoder and is_encoder(config):
        problem = "is an encoder (model.attention=bidirectional), which writes no text"
        use = f"use this one as reward.model={folder}, judge.model={folder} or in `rlhf classify`"
        raise UserError(f"{folder}: {problem}: want a causal model, or {use}")
    if dropout is not None and hasattr(config, "dropout"):
        config.dropout = dropout
    return config


def load_frozen(config: Config, folder: Path, device: torch.device) -> Any:
    """`load_policy` for a model that is not trained, on its device, prepared for `inference`."""
    return hold_frozen(config, load_policy(folder), device)


def check_tokenizer(parent: Path, tokenizer: Any) -> None:
    """Raises: UserError if the model in a stage's folder was trained with another tokenizer."""
    if tokenizer_hash(load_tokenizer(parent / "model")) != tokenizer_hash(tokenizer):
        remedy = f"train {parent.name} again, or point parents.{parent.name} at a run that shares the tokenizer"
        raise UserError(f"{parent / 'model'}: its tokenizer or chat template is not that of this run: {remedy}")
