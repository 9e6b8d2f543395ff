"""Checkpoints: what is in one before anything is loaded, and loading with every weight accounted for."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from safetensors import safe_open
from torch import Tensor
from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from rlhf.errors import UserError, optional, reading
from rlhf.model.architectures import special_ids, why_not_native
from rlhf.model.gpt_config import MOST_LAYERS
from rlhf.system.files import check_regular, download, read_json
from rlhf.system.schemas import INTEGERS, Finite, Schema, Size, check_value, read_checked

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")
UNSTATED_CONTEXT = 2048  # tokens, of a model that does not state it
# A configuration could name kernels of the hub here, which are code; every load and every construction passes these.
CHOSEN_HERE = {"attn_implementation": None, "experts_implementation": None}
LAYER = re.compile(r"\.\d+\.")  # in the name of a weight that belongs to a numbered layer
ADAPTERS, ADAPTED = "adapter_config.json", "adapter_model.safetensors"  # PEFT's files
# The files of a hub repository that are read before its weights.
DESCRIPTION = ("*.json", "*.jinja", "*.model", "*.txt", "README.md")
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")  # the first that exist count

Id = Annotated[int, Field(ge=-1, lt=INTEGERS)]
RESTORE = "restore the file"


class Ids(Schema):  # in config.json and in generation_config.json
    bos_token_id: Id | None = None
    eos_token_id: Id | list[Id] | None = None
    pad_token_id: Id | None = None


class Described(Ids):
    """A configuration under transformers' names, as far as transformers and this package do not check it elsewhere."""

    architectures: list[str] | None = None
    num_hidden_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)] | None = None
    hidden_size: Size | None = None
    vocab_size: Size | None = None
    num_attention_heads: Size | list[Size] | None = None
    num_labels: Size | None = None
    return_dict: Literal[True] | None = None
    tie_word_embeddings: bool | None = None
    max_position_embeddings: Size | Literal[-1] | None = None
    is_encoder_decoder: bool | None = None
    initializer_range: Finite | None = None
    gain: Finite | None = None
    shift: Finite | None = None
    read_tokens: Size | None = None
    dropouts: dict[str, bool | Annotated[float, Field(ge=0, le=1)]]


class Index(Schema):  # of weights in several files
    weight_map: dict[str, Annotated[str, Field(pattern=r"^([^/\\]+\.safetensors|pytorch_model[^/\\]*\.bin)$")]]


@dataclass(slots=True)
class Checkpoint:
    """What is known before anything is loaded."""

    source: str
    folder: Path  # the folder of its files; for a hub id, the local copy
    gguf: dict[str, str]  # the argument of transformers' from_pretrained for a GGUF file
    revision: str | None
    config: Any  # transformers' configuration, without quantization_config
    parameters: int  # tied matrices counted once
    dtype: str  # of the stored weights
    licence: str | None
    adapters: Path | None = None  # the folder of PEFT's adapters that are merged into it

    @property
    def context(self) -> int | None:
        stated = getattr(self.config, "max_position_embeddings", None)
        return None if stated == -1 else stated

    def weight_files(self) -> list[Path]:
        """The weight files. Raises: UserError if there are none in a format that is safe to read."""
        files = [self.folder / name for name in self.gguf.values()] or weight_files(self.folder)
        if not files:
            wanted = "want *.safetensors, pytorch_model*.bin or a .gguf file in it"
            raise UserError(f"model.pretrained={self.source}: no weights: {wanted}")
        return files

    def describe(self) -> str:
        """One line: architecture, size, precision, memory, licence, and whether it runs natively."""
        reasons = why_not_native(self.config)
        way = "runs natively" if not reasons else f"runs as transformers' class ({'; '.join(reasons)})"
        return (
            f"{self.source}: {self.config.model_type}, {self.parameters:,} parameters in {self.dtype}, "
            f"{4 * self.parameters / 2**30:.2f} GiB in float32, licence {self.licence or 'not stated'}; {way}"
        )


def weight_files(folder: Path) -> list[Path]:
    return next((files for pattern in WEIGHTS if (files := sorted(folder.glob(pattern)))), [])


def read_checkpoint(source: str | Path) -> Checkpoint:
    """A hub id (optionally `name@revision`), a local folder, or a .gguf file. Raises: UserError if it cannot be read."""
    source = str(source)
    path = Path(source).expanduser()
    gguf = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    revision = None
    if path.is_dir() or (gguf and path.is_file()):
        folder = path.parent if gguf else path
    elif path.is_file():
        raise UserError(f"model.pretrained={source}: is one file of a model: give its folder, {path.parent}")
    elif gguf or path.is_absolute() or source.startswith(".") or not HUB_ID.fullmatch(source):
        raise UserError(f"model.pretrained={source}: no such file or folder: give a hub id, a folder or a .gguf file")
    else:
        name, _, named_revision = source.partition("@")
        folder = download("model.pretrained=", name, named_revision or None, DESCRIPTION)
        revision = folder.name  # the commit
    if not gguf and not (folder / "config.json").is_file():
        if (folder / ADAPTERS).is_file():
            return _read_adapters(source, folder, revision)
        inside = folder / "model"
        instead = f"give {inside}" if (inside / "config.json").is_file() else "want a folder that save_pretrained wrote"
        raise UserError(f"model.pretrained={source}: no config.json in it: {instead}")
    config = _read_config(source, folder, gguf)
    if not gguf:
        check_weights(f"model.pretrained={source}", config, folder.glob("*.safetensors"))
    what = f"model.pretrained={source}: no causal language model can be made of this {config.model_type}"
    with reading(what, "give one that generates text"), torch.device("meta"):  # nothing is allocated
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **CHOSEN_HERE)
    dtype = "GGUF" if gguf else str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    parameters = sum(p.numel() for p in model.parameters())
    return Checkpoint(source, folder, gguf, revision, config, parameters, dtype, _read_licence(folder, gguf))


def _read_adapters(source: str, folder: Path, revision: str | None) -> Checkpoint:
    """The model that adapters belong to, with them."""
    base = read_json(folder / ADAPTERS).get("base_model_name_or_path")
    if revision is not None:
        download("model.pretrained=", source.partition("@")[0], revision, (ADAPTED,))
    if not isinstance(base, str) or not (folder / ADAPTED).is_file():
        lacks = f"adapters without {ADAPTED} or their model's name"
        raise UserError(f"model.pretrained={source}: {lacks}: save them with PEFT")
    return replace(read_checkpoint(base), adapters=folder)


def _read_config(source: str, folder: Path, gguf: dict[str, str]) -> Any:
    if gguf:
        optional("gguf", f"model.pretrained={source}")
    wanted = "give a checkpoint of an architecture that transformers knows"
    config = read_config(str(folder), f"model.pretrained={source}: no readable configuration", wanted, **gguf)
    classifier = next((kind for kind in config.architectures or [] if kind.endswith("Classification")), None)
    masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not config.is_decoder
    instead = f"give a causal language model, or use this one as reward model: reward.model={source}"
    problems = {
        f"writes no text: {instead}": classifier or masked or is_encoder(config),
        "has an encoder: give a decoder-only model": config.is_encoder_decoder,
        # transformers refuses the question of an encoder and a decoder that are both of text
        "reads more than text: give a model of text alone": not config.is_encoder_decoder
        and config.get_text_config() is not config,
        "is quantised: give the checkpoint in full precision": not gguf
        and getattr(config, "quantization_config", None),
    }
    if problem := next((problem for problem, found in problems.items() if found), None):
        raise UserError(f"model.pretrained={source}: a {classifier or config.model_type} {problem}")
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def is_encoder(config: Any) -> bool:
    """Whether it is of our GPT with attention=bidirectional."""
    return getattr(config, "attention", None) == "bidirectional"


def _read_licence(folder: Path, gguf: dict[str, str]) -> str | None:
    """The licence in the model card's header or the GGUF file."""
    if gguf:
        from gguf import GGUFReader

        field = GGUFReader(str(folder / gguf["gguf_file"])).get_field("general.license")
        return str(field.contents()) if field is not None else None
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    stated = re.match(r"---\n(?:(?!---).*\n)*?license:[ \t]*(\S+)", text)
    return stated[1].strip("'\"") if stated else None


# ------------------------------------------------------------------------------------------------- loading


def load_whole(loader: Any, source: str, config: Any, new_head: bool = False, **keywords: Any) -> Any:
    """`loader.from_pretrained(source, …)`; the file must contain every weight of the model and no other.

    config: as `read_config` gives it. new_head: weights outside the trunk's layers may be missing, since they will be
    trained, and others are ignored.
    Raises: UserError if weights are missing, left over, of another shape, or not finite, or if a file cannot be read.
    """
    if "gguf_file" not in keywords:
        check_weights(source, config, weight_files(Path(source)))
    with reading(f"{source}: not readable weights", RESTORE):
        model, info = loader.from_pretrained(
            source, config=config, output_loading_info=True, trust_remote_code=False, **CHOSEN_HERE, **keywords
        )
    ids = special_ids(getattr(model, "generation_config", None))
    check_value(ids, Ids, f"{source}: generation_config.json", RESTORE)
    missing, left = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if new_head:
        missing = [name for name in missing if LAYER.search(name) and name.startswith(model.base_model_prefix)]
        left = [name for name in left if LAYER.search(name)]
    for names, what in ((missing, "missing from the file"), (left, "not in the model of config.json")):
        if names:
            raise UserError(f"{source}: {len(names)} weights are {what} ({', '.join(names[:2])}): restore both")
    check_finite(dict(model.named_parameters()), source)
    return model


def check_finite(weights: Mapping[str, Tensor], source: str) -> None:
    """Raises: UserError for weights that are not finite, since answers and scores would not be finite either."""
    for name, weight in weights.items():
        if weight.numel() and not all(map(torch.isfinite, torch.aminmax(weight.detach()))):
            raise UserError(f"{source}: {name} has values that are not finite: use an earlier or another model")


def stored_tensors(files: Iterable[Path]) -> dict[str, tuple[str, int, str]]:
    """{name: (dtype, numbers, file)} by the files' headers; nothing is allocated."""
    tensors: dict[str, tuple[str, int, str]] = {}
    for path in files:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            tensors |= {n: (x.get_dtype(), math.prod(x.get_shape()), path.name) for n, x in slices.items()}
        else:
            loaded = torch.load(path, map_location="meta", weights_only=True)
            tensors |= {n: (str(x.dtype), x.numel(), path.name) for n, x in loaded.items()}
    return tensors


def read_config(source: str, what: str, remedy: str, **more: Any) -> Any:
    """transformers' configuration of a folder or hub id. Raises: UserError "<what> (…): <remedy>"."""
    if (folder := Path(source)).is_dir():
        check_regular(folder)
        for path in folder.glob("*.index.json"):
            read_checked(path, Index, RESTORE)
    with reading(what, remedy):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **more)
    for one in (config, getattr(config, "trunk", None) or config):
        values = {name: getattr(one, name, None) for name in Described.model_fields}
        values["dropouts"] = {n: x for n, x in vars(one).items() if "drop" in n and isinstance(x, int | float)}
        check_value(values, Described, f"{source}: config.json", RESTORE)
    return config


def check_weights(what: str, config: Any, files: Iterable[Path]) -> None:
    """By the weights' headers, before anything is allocated.
    Raises: UserError for complex or integer weights, which a cast to float32 would change silently, and for files too
    small for the sizes in the configuration.
    """
    with reading(f"{what}: not readable weights", "restore them"):
        tensors = stored_tensors(files)
    for name, (kind, _, file) in tensors.items():
        short = kind.removeprefix("torch.").upper()
        # buffers of masks and positions may be integers
        if short[0] == "C" or (short[0] in "IUB" and short[:2] != "BF" and name.endswith("weight")):
            wanted = "want floating point numbers: give the checkpoint in full precision"
            raise UserError(f"{what}: {name} in {file} is {kind}: {wanted}")
    numbers, trunk = sum(count for _, count, _ in tensors.values()), getattr(config, "trunk", None) or config
    limits = {"hidden_size": numbers, "vocab_size": numbers, "num_hidden_layers": len(tensors)}
    for name, most in limits.items() if tensors else ():
        if (size := getattr(trunk, name, None) or 0) > most:
            came = f"config.json says {name}={size:,}, the files have {len(tensors):,} tensors of {numbers:,} numbers"
            raise UserError(f"{what}: weights are missing: {came}: restore both")
