"""The reward model, which is also the critic, and the label model: a trunk with a head, and the transfer of pretrained blocks."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rlhf.data.encoding import encode_demonstrations, token_encoder
from rlhf.data.records import Demonstration
from rlhf.errors import UserError
from rlhf.model.batching import right_pad
from rlhf.model.checkpoint import CHOSEN_HERE, LAYER
from rlhf.model.fused_loss import chosen_logprobs
from rlhf.model.interface import Episodes, lm
from rlhf.model.linear import Float32Linear
from rlhf.ops.masked import upcast
from rlhf.system.files import write_json
from rlhf.system.schemas import Schema, read_checked


def width_of(config: Any) -> int:
    """The width of the last hidden states, which small OPTs project."""
    return getattr(config, "word_embed_proj_dim", None) or config.hidden_size


class ScalarHead(Float32Linear):
    """w . h + b with one output, in float32."""

    def __init__(self, width: int, bias: bool = True):
        super().__init__(width, 1, bias)

    @torch.no_grad()
    def initialise(self) -> "ScalarHead":
        """Weight N(0, 1/sqrt(D + 1)), bias 0."""
        nn.init.normal_(self.weight, 0.0, (self.in_features + 1) ** -0.5)
        nn.init.zeros_(self.bias)
        return self


@torch.no_grad()
def fold(head: nn.Linear, gain: float, shift: float) -> float:
    """Fold gain (w . h + b - shift) into the weights; returns the constant that cannot be folded without a bias."""
    head.weight.mul_(gain)
    if head.bias is None:
        return -gain * shift
    head.bias.sub_(shift).mul_(gain)
    return 0.0


class LayerMix(nn.Module):
    """gamma sum_l softmax(s)_l h_l / rms(h_l) of hidden states h (L, N, D), in float32: which layers the head reads is
    learned.

    s starts at 0 and gamma at 1, so that it begins as the mean of the layers. Source: Peters et al. 2018 (ELMo),
    equation 1; a norm before the mix, which helped "in some cases" there, is needed where norms precede the blocks:
    states grow from layer to layer.
    """

    def __init__(self, layers: int):
        super().__init__()
        self.weight, self.gamma = nn.Parameter(torch.zeros(layers)), nn.Parameter(torch.ones(1))

    def forward(self, hidden: Tensor) -> Tensor:
        return upcast(self.gamma) * torch.einsum("l,l...->...", upcast(self.weight).softmax(0), self.normed(hidden))

    @staticmethod
    def normed(hidden: Tensor) -> Tensor:
        return nn.functional.rms_norm(upcast(hidden), hidden.shape[-1:], eps=1e-12)  # embeddings can be small


def scalar_heads_in_float32(model: nn.Module) -> None:
    """Every plain linear layer of `model` with one output becomes a ScalarHead; weights and names stay."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and layer.out_features == 1:
                head = ScalarHead(layer.in_features, layer.bias is not None)
                head.weight, head.bias = layer.weight, layer.bias
                setattr(parent, name, head)


def without_dropout(config: Any) -> None:
    """Set every dropout of a configuration to 0."""
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, name, 0.0)


def first_blocks(trunk: Any, count: int) -> Any:
    """The configuration of a trunk of its first `count` blocks. Raises: UserError if the model cannot be cut so."""
    ours = lm(trunk).native
    if not ours or count > trunk.config.n_layer:
        has = f"{trunk.config.num_hidden_layers} blocks" + ("" if ours else " and does not run natively")
        wanted = "want null, mix, or fewer blocks of a native model"
        raise UserError(f"reward.layers={count}: the model has {has}: {wanted}")
    config = copy.deepcopy(trunk.config)
    config.n_layer = count
    return config


class RewardConfig(PreTrainedConfig):
    """The trunk's configuration with every dropout set to 0, the positions that the score uses, and its calibration."""

    model_type = "rlhf_reward"

    trunk: Any = None  # a configuration, or a dict of one
    mix: bool = False  # whether the head reads a `LayerMix`
    read_tokens: int = 1  # the score is the head's mean over this many last tokens
    gain: float = 1.0
    shift: float = 0.0
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        trunk = self.trunk or {"model_type": "rlhf_gpt"}
        self.trunk = AutoConfig.for_model(**trunk) if isinstance(trunk, dict) else copy.deepcopy(trunk)
        without_dropout(self.trunk)
        self.trunk.name_or_path = ""  # the path it was loaded from is not saved, so that equal models are equal files
        super().__post_init__(**kwargs)


class RewardModel(PreTrainedModel):
    """r = gain (w . h + b - shift), with h the trunk's hidden state at a token: of a reward model the last one of
    prompt + response, of a critic (V) every one. A critic starts from the reward model with `fold_calibration`, on the
    scale of the scores.
    Differs: with read_tokens above 1 the score is the mean over the last tokens. If no token ends a response, the last
    token is in the middle of a sentence, and its state represents the next word rather than the response.
    Source: Ouyang et al. 2022, section 3.5 and appendix C.2; Ziegler et al. 2019, section 2.1 (head, gain and bias).

    A row is what a reward model reads of one prompt and response: token ids of the policy's tokenizer, or of its own.
    """

    config_class = RewardConfig
    base_model_prefix = "trunk"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    reads_text, together = False, 128  # whether it has a tokenizer of its own; most rows of a batch in `score`

    def __init__(self, config: RewardConfig):
        super().__init__(config)
        self.trunk = AutoModel.from_config(config.trunk, trust_remote_code=False, **CHOSEN_HERE)
        self.head = ScalarHead(width_of(config.trunk))
        self.mix = LayerMix(config.trunk.num_hidden_layers + 1) if config.mix else None
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if module is self.head:  # the trunk initialises itself
            self.head.initialise()

    @classmethod
    def from_causal_lm(cls, source: PreTrainedModel, layers: int | str | None = None) -> "RewardModel":
        """A reward model on a copy of a causal LM's trunk, with a fresh head.

        layers: how many of the trunk's first blocks are kept, or "mix", whose head reads a learned mix of all layers;
        None: all.
        """
        trunk: Any = source.base_model
        config = first_blocks(trunk, layers) if isinstance(layers, int) else trunk.config
        model = cls(RewardConfig(trunk=config, mix=layers == "mix"))
        nn.Module.to(model, device=trunk.device, dtype=trunk.dtype)
        state = trunk.state_dict()
        model.trunk.load_state_dict({name: state[name] for name in model.trunk.state_dict()})
        return model.eval()

    @classmethod
    def on_trunk(cls, config: RewardConfig, trunk: Any) -> "RewardModel":
        """A reward model on the trunk itself, not a copy, with a fresh head; on its first blocks if `config` has fewer."""
        with torch.device("meta"):
            model = cls(config)
        if (count := config.trunk.num_hidden_layers) < trunk.config.num_hidden_layers:
            trunk.config, trunk.layers = first_blocks(trunk, count), trunk.layers[:count]
        model.trunk, model.head = trunk, ScalarHead(width_of(config.trunk)).initialise()
        model.mix = LayerMix(count + 1) if config.mix else None
        return model.eval()

    def forward(self, tokens: Tensor, lengths: Tensor, calibrated: bool = True, by_token: bool = False) -> Tensor:
        """Scores (B,) float32 of right-padded tokens (B, T), read at token lengths - 1 (B,) and, with read_tokens, at
        those before it.

        by_token: the terms of the mean instead, (B, N): term j is that of token lengths - 1 - j, and they add up to the
        score.
        """
        real, kept = self._read_places(tokens, lengths)
        values = self.values_at(tokens, kept, calibrated)
        terms = torch.where(real, values.view_as(real), 0.0) / real.sum(1, keepdim=True)
        return terms if by_token else terms.sum(1)

    def features(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """The head's input per response, (1, B, D) float32: the raw score is w . features + b. Arguments as of
        `forward`.

        With a mix the normed states of the layers that it mixes, (L, B, D).
        """
        real, kept = self._read_places(tokens, lengths)
        trunk, mix = lm(self.trunk), self.mix
        hidden = trunk.hidden(tokens, kept)[None] if mix is None else mix.normed(trunk.layers_at(tokens, kept))
        hidden = hidden.float().view(len(hidden), *real.shape, -1)
        return torch.where(real[..., None], hidden, 0.0).sum(2) / real.sum(1, keepdim=True)

    def _read_places(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the read_tokens positions before each length exist, (B, N), and their row * T + position, (B * N,)."""
        rows = torch.arange(len(tokens), device=tokens.device)[:, None] * tokens.shape[1]
        read = lengths[:, None] - 1 - torch.arange(self.config.read_tokens, device=tokens.device)
        return read >= 0, (rows + read.clamp(min=0)).flatten()

    def values_at(self, tokens: Tensor, kept: Tensor, calibrated: bool = True) -> Tensor:
        """Values (N,) float32 after the tokens in `kept` (N,), row * T + position, of right-padded tokens (B, T).

        The value at position t depends on tokens 0…t; it is the value before token t + 1 is chosen.
        """
        trunk = lm(self.trunk)
        hidden = trunk.hidden(tokens, kept) if self.mix is None else self.mix(trunk.layers_at(tokens, kept))
        raw = self.head(hidden).squeeze(-1).float()
        return self.gain * (raw - self.shift) if calibrated else raw

    answer_encoder = staticmethod(token_encoder)  # makes rows of texts; its tokenizer is the policy's

    def rows(self, episodes: Episodes) -> list[list[int]]:
        return [prompt + response for prompt, response in zip(episodes.prompts, episodes.responses, strict=True)]

    def demonstration_rows(self, records: Sequence[Demonstration], tokenizer: Any, limit: int) -> list[list[int]]:
        """A row of at most `limit` tokens per demonstration that fits, as SFT reads them; `tokenizer` is the policy's."""
        return [row["prompt"] + row["response"] for row in encode_demonstrations(records, tokenizer, limit)]

    def collate(self, rows: Sequence[list[int]]) -> dict[str, Tensor]:
        """The batch of these rows, arguments of `forward`; what the padding contains changes no score."""
        return dict(zip(("tokens", "lengths"), right_pad(rows, 0), strict=True))

    @property
    def gain(self) -> float:
        return self.config.gain

    @property
    def shift(self) -> float:
        return self.config.shift

    def calibrate(self, gain: float, shift: float) -> None:
        """Set the calibration, which the checkpoint carries."""
        self.config.gain, self.config.shift = float(gain), float(shift)

    def fold_calibration(self) -> "RewardModel":
        """Move gain and shift into the head, so that they train with it; the scores stay."""
        fold(self.head, self.gain, self.shift)
        self.calibrate(1.0, 0.0)
        return self


class HeadRecord(Schema):
    classes: list[str]
    choices: bool


HEAD, RECORD = "label_head.safetensors", "label_head.json"  # next to the language model in its folder


class LabelModel(nn.Module):
    """P(y | x) = softmax(h W_y), with h the last hidden state of the extract token.

    With several rows per example (similarity) h is their sum; with `choices` each row has one score, and the softmax is
    over an example's rows. Source: Radford et al. 2018, equations 3 to 5 and section 3.3.
    """

    def __init__(self, lm: Any, classes: list[str], choices: bool, dropout: float = 0.0):
        super().__init__()
        self.lm, self.classes, self.choices = lm, classes, choices
        self.dropout = nn.Dropout(dropout)
        self.head = Float32Linear(width_of(lm.config), 1 if choices else len(classes), bias=False)
        nn.init.normal_(self.head.weight, 0.0, getattr(lm.config, "initializer_range", None) or 0.02)

    def forward(self, tokens: Tensor, lengths: Tensor, examples: int, with_lm: bool = False) -> tuple[Tensor, Tensor]:
        """Logits (N, C) float32 of N = `examples` with R / N rows each, and L1 (N,), which is 0 without `with_lm`.

        tokens (R, T) right-padded, lengths (R,) of 2 or more. L1 is the mean over an example's rows of the mean over a
        row's tokens after the first of -log P(u_i | u_<i), in nats. Differs: equations 1 and 5 sum over tokens; the
        paper's code takes the mean, so that a long text does not outweigh its label.
        """
        last = torch.arange(len(tokens), device=tokens.device) * tokens.shape[1] + lengths - 1
        if with_lm:
            hidden = self.lm.base_model(input_ids=tokens, use_cache=False).last_hidden_state
            real = torch.arange(1, tokens.shape[1], device=tokens.device) < lengths[:, None]  # (R, T - 1)
            logp, _ = chosen_logprobs(self.lm, hidden[:, :-1][real], tokens[:, 1:][real])
            nats = -logp.new_zeros(real.shape).masked_scatter(real, logp).sum(1) / (lengths - 1)
            nats = nats.view(examples, -1).mean(1)
            hidden = hidden.flatten(0, 1)[last]
        else:
            hidden, nats = lm(self.lm).hidden(tokens, last), torch.zeros(examples, device=tokens.device)
        rows = hidden.view(examples, -1, hidden.shape[-1])  # (N, rows, D)
        scores = self.head(self.dropout(rows)).squeeze(-1) if self.choices else self.head(self.dropout(rows.sum(1)))
        return scores, nats

    def save_head(self, folder: Path) -> None:
        save_file({"weight": self.head.weight.detach().float().cpu().contiguous()}, str(folder / HEAD))
        write_json(folder / RECORD, {"classes": self.classes, "choices": self.choices})

    @classmethod
    def with_head(cls, lm: Any, folder: Path) -> "LabelModel":
        """A language model with the head that `save_head` wrote."""
        record = read_checked(folder / RECORD, HeadRecord, "run `rlhf classify overwrite=true` again")
        if record is None:
            raise UserError(f"{folder}: no {RECORD}: want the model of `rlhf classify`")
        model = cls(lm, record["classes"], record["choices"])
        model.head.weight.data.copy_(load_file(str(folder / HEAD))["weight"])
        return model.eval()


@torch.no_grad()
def transfer(model: Any, layers: int | None) -> Any:
    """The model with only its embeddings and first `layers` blocks, None: with nothing; the rest is freshly
    initialised.
    Raises: UserError for more layers than there are.
    """
    there = model.config.num_hidden_layers
    if layers is not None and layers > there:
        raise UserError(f"classify.layers={layers}: the base has {there}: want at most {there}")
    if layers == there:
        return model
    fresh = AutoModelForCausalLM.from_config(model.config, trust_remote_code=False).float()
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)] + [model.get_output_embeddings()]
    known = {id(p) for module in embeddings for p in module.parameters()}
    for (name, old), new in zip(model.named_parameters(), fresh.parameters(), strict=True):
        numbered = LAYER.search(name)
        if layers is not None and (int(numbered[0].strip(".")) < layers if numbered else id(old) in known):
            new.copy_(old)
    return fresh.eval()


def keep_every(model: Any, every: int) -> Any:
    """Leave a causal language model of ours only its blocks 0, every, 2 every, …
    Raises: UserError if it is none of ours, or if its blocks are of several kinds.
    """
    config, native = model.config, lm(model).native
    if not native or config.window is not None or config.experts:
        which = "has banded layers or experts" if native else "does not run natively"
        raise UserError(f"distill.teacher: the {config.model_type} {which}: want a model of equal blocks")
    model.model.layers = layers = model.model.layers[::every]
    config.n_layer = len(layers)
    for number, layer in enumerate(layers):
        layer.attention.layer = number
    return model
