"""Low-rank adapters on a model: y = W x + alpha / rank B A x, with W frozen and A, B trained. The layers are PEFT's.

They are put inside the model, whose class does not change, so all code that runs the model also runs its adapters.
Stages write the merged model, so that later stages and exports need no PEFT, and next to it the adapters as PEFT saves
them.
Source: Hu et al. 2021 (LoRA).
"""

import copy
import itertools
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhf.config import Config
from rlhf.config.setting import listed
from rlhf.errors import UserError, optional
from rlhf.model.checkpoint import ADAPTED
from rlhf.model.linear import adapted_layers, merged
from rlhf.runs.stage import Stage
from rlhf.training.engine import zero_stage
from rlhf.training.state import gathered_state, save_model

import_peft = partial(optional, "peft", "lora.rank", ", or set lora.rank=0")
TRAINED = "default"  # the name of the trained adapters
PREFIX = "base_model.model."  # prefix of each name in PEFT's file


def add_adapters(model: Any, config: Config, base: Path) -> None:
    """Put adapters on every linear layer of a model's trunk, or on lora.target_modules, and freeze the rest except
    heads.

    The unembedding counts as trunk: it is frozen and has no adapter. Adapters that the model already has are kept and
    frozen. With lora.rank=0 nothing happens. base: the model folder that the weights come from, which PEFT's file
    names.
    Raises: UserError if PEFT is not installed.
    """
    if not config.lora.rank:
        return
    settings = import_peft().LoraConfig(
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,
        lora_dropout=config.lora.dropout,
        target_modules=chosen_layers(model, config),
        # GPT-2's layer, whose weight is (in, out)
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        base_model_name_or_path=str(base),
    )
    inject(model, settings, TRAINED)
    heads = {id(p) for p in heads_of(model).values()}
    for name, p in model.named_parameters():
        p.requires_grad_(f".{TRAINED}." in name if ".lora_" in name else id(p) in heads)


def are_shared(config: Config) -> bool:
    """Whether a policy's frozen weights also serve the reference: not under ZeRO-3, where only the policy's engine gathers them."""
    return config.lora.rank > 0 and zero_stage(config) < 3


def inject(model: Any, settings: Any, name: str) -> None:
    """Put PEFT's layers into the model under an adapter name; adapters of other names stay active."""
    before = [adapter for _, layer in adapted_layers(model) for adapter in layer.lora_A]
    with warnings.catch_warnings():
        # of a critic that starts from a reward model
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        import_peft().inject_adapter_in_model(settings, model, adapter_name=name)
    active = [*dict.fromkeys(before), name]
    for _, layer in adapted_layers(model):
        layer.set_adapter(active)
        layer.cast_input_dtype_enabled = False  # to the adapters' float32, from which autocast would cast back


def chosen_layers(model: Any, config: Config) -> list[str]:
    """The names of the trunk's linear layers that lora.target_modules chooses. Raises: UserError for a name that fits none."""
    trunk = {id(module) for module in model.base_model.modules()} - {id(model.get_output_embeddings())}
    layers, chosen = [], []
    for name, module in model.named_modules():
        of_adapter = ".base_layer" in name or ".lora_" in name
        is_linear = isinstance(module, nn.Linear | Conv1D) or hasattr(module, "lora_A")
        if id(module) in trunk and is_linear and not of_adapter:
            layers.append(name)
    for wanted in listed(config.lora.target_modules):
        fitting = [name for name in layers if f".{name}".endswith(f".{wanted}")]
        chosen += fitting
        if not fitting:
            ends = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in layers))
            raise UserError(f"lora.target_modules: {wanted}: no linear layer has this name: want some of {ends}")
    return chosen or layers


def heads_of(model: Any) -> dict[str, nn.Parameter]:
    """The modules outside the trunk, except the unembedding."""
    output = model.get_output_embeddings()
    known = {id(p) for part in (model.base_model, output) if part is not None for p in part.parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) not in known}


def save_output(
    model: Any, tokenizer: Any, stage: Stage, name: str = "model", average: Mapping[str, Tensor] | None = None
) -> None:
    """Write a model folder with merged adapters. average: in place of its own weights. All ranks must call it."""
    state = gathered_state(model)
    if state is None:
        return
    state |= average or {}
    if any(adapted_layers(model)):
        save_adapters(model, state, stage.folder / ("adapters" if name == "model" else f"{name}_adapters"))
    save_model(model, stage.folder / name, dict(merged(model, state)))
    tokenizer.save_pretrained(str(stage.folder / name))


def save_adapters(model: Any, state: Mapping[str, Tensor], folder: Path) -> None:
    """The trained adapters and heads, in PEFT's form: `PeftModel.from_pretrained` reads them."""
    heads = heads_of(model)
    settings = copy.deepcopy(model.peft_config[TRAINED])
    settings.target_modules = sorted(settings.target_modules)  # a set, whose order would change from run to run
    settings.inference_mode = True
    settings.modules_to_save = sorted({name.rpartition(".")[0] for name in heads}) or None
    settings.task_type = None if heads else "CAUSAL_LM"
    folder.mkdir(parents=True, exist_ok=True)
    settings.save_pretrained(str(folder))
    kept = {name: t for name, t in state.items() if f".{TRAINED}." in name or name in heads}
    tensors = {PREFIX + name.replace(f".{TRAINED}.", "."): t.contiguous() for name, t in kept.items()}
    save_file(tensors, str(folder / ADAPTED), metadata={"format": "pt"})


@torch.no_grad()
def load_adapters(model: Any, folder: Path, name: str) -> None:
    """Put the adapters and heads of a folder that `save_adapters` wrote on a model, frozen, under an adapter name."""
    settings = import_peft().LoraConfig.from_pretrained(str(folder))
    settings.modules_to_save = None  # heads are read below, into the model's own
    settings.lora_dropout = 0.0
    with torch.random.fork_rng():  # the random state afterwards is as if the whole model had been read
        inject(model, settings, name)
    weights = {key.removeprefix(PREFIX): t for key, t in load_file(str(folder / ADAPTED)).items()}
    for key, p in model.named_parameters():
        stored = key.replace(f".{name}.", ".")
        if stored in weights:
            p.copy_(weights.pop(stored))
    if weights:
        raise UserError(f"{folder}: adapters of another model: run the stage that writes them again")
    model.requires_grad_(False)


def share_weights(model: nn.Module, shared: nn.Module | None = None) -> Any:
    """A second tree of modules over the same weights: tensors of `shared` (by default the whole model) are not copied."""
    part = model if shared is None else shared
    return copy.deepcopy(model, {id(t): t for t in itertools.chain(part.parameters(), part.buffers())})
