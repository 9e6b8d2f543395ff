"""Adopt a pretrained checkpoint: its weights in float32, its tokenizer and chat template, and a record of its origin."""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rlhf.config.setting import listed
from rlhf.data.chat_template import ENDS, find_end_of_turn, use_completion
from rlhf.data.tokenizer import CHAT_TEMPLATE, END, ROLES, open_tokenizer
from rlhf.errors import UserError, optional, reading
from rlhf.model.architectures import ARCHITECTURES, special_ids, why_not_native
from rlhf.model.checkpoint import (
    ADAPTED,
    RESTORE,
    UNSTATED_CONTEXT,
    WEIGHTS,
    Checkpoint,
    Ids,
    check_finite,
    load_whole,
    read_checkpoint,
    read_config,
    stored_tensors,
    weight_files,
)
from rlhf.model.convert import from_transformers
from rlhf.model.interface import lm
from rlhf.ops.fast import by_torch_alone
from rlhf.system.files import download, sha256_file
from rlhf.system.schemas import read_checked
from rlhf.system.terminal import say

Native = Literal["auto"] | bool
TOLERANCE = 5e-5  # largest difference between transformers' logits and ours in float32, as a share of the largest logit
PROBED = 64  # tokens of the longest probe row


@dataclass(slots=True)
class Adopted:
    """model: our GPT or transformers' class, in float32 and evaluation mode; record: JSON of what was adopted."""

    model: Any
    tokenizer: Any
    record: dict[str, Any]


def adopt(source: str | Path, native: Native = "auto", say: Callable[[str], None] = say, form: str = "chat") -> Adopted:
    """Load a checkpoint's weights and tokenizer; `source` as of `read_checkpoint`.

    native: "auto" converts to our GPT if the architecture is covered and a probe batch has the same logits within
    TOLERANCE, else says why not; True refuses instead; False keeps transformers' class. Raises: UserError.
    """
    checkpoint = read_checkpoint(source)
    say(checkpoint.describe())
    tokenizer, notes = adopt_tokenizer(checkpoint, form, native)
    model = load_weights(checkpoint)
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        model.resize_token_embeddings(len(tokenizer))
        notes.append(f"embeddings grew from {rows} to {len(tokenizer)} rows for new tokens")
    model, reason = choose_way(checkpoint, model, native)
    if reason:
        notes.append(f"runs as transformers' {type(model).__name__}: {reason}")
    ends, files = tokenizer.init_kwargs[ENDS], checkpoint.weight_files()
    if checkpoint.adapters is not None:
        notes.append(f"with the adapters of {checkpoint.adapters}")
        files.append(checkpoint.adapters / ADAPTED)
    model.generation_config = GenerationConfig(**{**special_ids(tokenizer), "eos_token_id": ends or None})
    for note in notes:
        say(note)
    record = {name: getattr(checkpoint, name) for name in ("source", "revision", "parameters", "dtype", "licence")}
    hashes = {path.name: sha256_file(path) for path in files}
    record |= {"sha256": hashes, "native": not reason, "context": lm(model).context, "notes": notes}
    return Adopted(model, tokenizer, record)


def adopt_tokenizer(checkpoint: Checkpoint, form: str = "chat", native: Native = "auto") -> tuple[Any, list[str]]:
    """A checkpoint's tokenizer with a pad token (which may be an end token), a chat template and its end tokens
    recorded; and what was added, as text. form: "completion" replaces the template by one that writes only the text.
    """
    what = f"model.pretrained={checkpoint.source}: no readable tokenizer"
    folder, gguf = checkpoint.folder, checkpoint.gguf
    if checkpoint.adapters is not None and (checkpoint.adapters / "tokenizer.json").is_file():
        folder, gguf = checkpoint.adapters, {}
    wanted = "give a checkpoint with its tokenizer"
    tokenizer = open_tokenizer(AutoTokenizer, what, wanted, pretrained_model_name_or_path=str(folder), **gguf)
    notes = []
    if form == "completion":
        use_completion(tokenizer)
    else:
        notes = add_chat_form(checkpoint, tokenizer)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    context = checkpoint.context or UNSTATED_CONTEXT
    # Our GPT has no window: its context is as long as the window masks nothing.
    row = ARCHITECTURES.get(checkpoint.config.model_type)
    if native is not False and row is not None and not why_not_native(checkpoint.config):
        context = row.our_fields(checkpoint.config)["context_length"]
    tokenizer.model_max_length = min(tokenizer.model_max_length, context)
    tokenizer.padding_side = "right"
    return tokenizer, notes


def add_chat_form(checkpoint: Checkpoint, tokenizer: Any) -> list[str]:
    """Add what the tokenizer lacks for chats, and record its end tokens; returns what was added, as text."""
    notes = []
    if not tokenizer.chat_template:
        tokenizer.add_special_tokens({"extra_special_tokens": [*ROLES.values(), END]})
        tokenizer.chat_template = CHAT_TEMPLATE
        notes.append(f"no chat template: given ours, with the new tokens {' '.join([*ROLES.values(), END])}")
    stated = None if checkpoint.gguf else read_checked(checkpoint.folder / "generation_config.json", Ids, RESTORE)
    known = [*listed((stated or {}).get("eos_token_id")), *listed(checkpoint.config.eos_token_id)]
    turn = find_end_of_turn(tokenizer)
    if tokenizer.chat_template == CHAT_TEMPLATE or tokenizer.eos_token_id is None:
        if turn is None and not known:
            raise UserError(f"model.pretrained={checkpoint.source}: no end token: set eos_token in its tokenizer")
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(known[0] if turn is None else turn)
    tokenizer.init_kwargs[ENDS] = [i for i in dict.fromkeys([turn, tokenizer.eos_token_id, *known]) if i is not None]
    return notes


def load_weights(checkpoint: Checkpoint) -> Any:
    """transformers' causal language model in float32, in evaluation mode. Raises: UserError as `load_whole`."""
    for pattern in WEIGHTS if checkpoint.revision is not None else ():
        if not weight_files(checkpoint.folder):
            download("model.pretrained=", checkpoint.source.partition("@")[0], checkpoint.revision, (pattern,))
    safe = checkpoint.weight_files()[0].suffix == ".safetensors"
    how: Any = {**(checkpoint.gguf or {"use_safetensors": safe}), "weights_only": True, "dtype": torch.float32}
    source = str(checkpoint.folder)
    config = read_config(source, f"{source}: no readable configuration", RESTORE, **checkpoint.gguf)
    model: Any = load_whole(AutoModelForCausalLM, source, config, **how)
    if checkpoint.gguf:  # a model that is marked as quantised cannot be saved
        config = copy.deepcopy(model.config)
        del config.quantization_config
        fresh: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        fresh.load_state_dict(model.state_dict(), assign=True)
        fresh.tie_weights()
        model = fresh
    if checkpoint.adapters is not None:
        model = merge_adapters(model, checkpoint)
    return model.eval()


def merge_adapters(model: Any, checkpoint: Checkpoint) -> Any:
    """The model with the weights that PEFT's adapters give it."""
    what = f"model.pretrained={checkpoint.adapters}"
    peft = optional("peft", what)
    with reading(f"{what}: not readable adapters", f"give those of {checkpoint.source}"):
        stored, embedding = stored_tensors([Path(str(checkpoint.adapters), ADAPTED)]), model.get_input_embeddings()
        found = (name for name in stored if re.search(r"(embed_tokens|embed_in|wte)\.weight$", name))
        rows = stored[name][1] // embedding.embedding_dim if (name := next(found, None)) else 0
        if rows > embedding.num_embeddings:  # the adapters have tokens of their own
            model.resize_token_embeddings(rows)
        model = peft.PeftModel.from_pretrained(model, str(checkpoint.adapters)).merge_and_unload()
    check_finite(dict(model.named_parameters()), str(checkpoint.adapters))
    return model


def choose_way(checkpoint: Checkpoint, model: Any, native: Native) -> tuple[Any, str]:
    """(our GPT, ""), or (transformers' class, the reason in one line). Raises: UserError if logits are not finite."""
    with torch.no_grad():
        if not torch.isfinite(model(torch.tensor([[0, 1, 2]]), use_cache=False).logits).all():
            raise UserError(f"model.pretrained={checkpoint.source}: its logits are not finite: restore its files")
    if lm(model).native:  # a model that was saved here
        return model, ""
    if native is False:
        return model, "model.native=false"
    reason = "; ".join(why_not_native(checkpoint.config))
    if not reason:
        try:
            ours = from_transformers(model)
        except KeyError as error:  # a row of the user's own
            row = f"the architecture's row of {checkpoint.config.model_type} names a tensor that the checkpoint lacks"
            raise UserError(f"model.pretrained={checkpoint.source}: {row}, {error}: correct the row") from None
        difference = compare_logits(model, ours)
        if difference <= TOLERANCE:
            return ours, ""
        reason = f"logits of a probe batch differ by {difference:.1e} of the largest, more than {TOLERANCE}"
    if native is True:
        raise UserError(f"model.native=true: {checkpoint.source}: {reason}: use model.native=auto")
    return model, reason


@torch.no_grad()
@by_torch_alone()
def compare_logits(theirs: Any, ours: Any) -> float:
    """The largest difference of logits of real tokens, as a share of the largest logit: rows of unequal lengths, padded
    on either side, up to PROBED tokens or our whole context.
    """
    width = min(PROBED, ours.config.context_length)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, ours.config.vocab_size, (4, width), generator=generator)
    lengths = torch.tensor([width, width // 2, width, max(1, width // 3)])[:, None]
    place = torch.arange(width)
    mask = torch.where(torch.tensor([[True], [True], [False], [False]]), place < lengths, place >= width - lengths)
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    one, other = (
        model(tokens, attention_mask=mask.long(), position_ids=positions, use_cache=False).logits[mask]
        for model in (theirs, ours)
    )
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-30))
