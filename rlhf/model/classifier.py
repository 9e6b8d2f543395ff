"""Any transformers text classifier (`AutoModelForSequenceClassification`) with one label as reward model: with its own
tokenizer it reads text, not the policy's tokens.
"""

import inspect
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf.data.chat_template import encode_scored
from rlhf.data.encoding import Answer, Encode, drop_oldest
from rlhf.data.records import Demonstration, Message, shown_prompt
from rlhf.data.tokenizer import open_tokenizer
from rlhf.errors import UserError, reading
from rlhf.model.batching import right_pad
from rlhf.model.checkpoint import load_whole, read_config
from rlhf.model.heads import RewardConfig, RewardModel, scalar_heads_in_float32, without_dropout
from rlhf.model.interface import Episodes
from rlhf.system.files import write_json
from rlhf.system.schemas import Finite, Schema, read_checked

AGAIN = "run `rlhf reward overwrite=true` again"
LEAST_PROMPT = 4  # a long response leaves the prompt at least one token in this many


class Calibration(Schema):  # text_reward.json
    gain: Finite
    shift: Finite


@dataclass(slots=True)
class TextRow:
    """One input: token ids and, of the same length, token types (0 prompt, 1 response, as the tokenizer says)."""

    ids: list[int]
    types: list[int]

    def __len__(self) -> int:
        return len(self.ids)


class TextEncoder:
    """Makes rows of at most `limit` tokens with any transformers tokenizer.

    always_ends: the dialogue is one text, and has its closing token even if the response was cut off. Encoder-decoders
    read their score there, and want as many end tokens in each row.
    """

    def __init__(self, tokenizer: Any, limit: float = math.inf, always_ends: bool = False):
        self.tokenizer, self.limit, self.always_ends = tokenizer, limit, always_ends
        added = [tokenizer.num_special_tokens_to_add(pair=pair) for pair in (False, True)]
        form = "template" if tokenizer.chat_template else "pair" if added[1] > added[0] else "plain"
        self.form = "plain" if always_ends else form
        self._special_ids = set(tokenizer.all_special_ids)
        self._closing = {tokenizer.sep_token_id, tokenizer.eos_token_id} - {None}

    def encode(
        self,
        prompt: Sequence[Message],
        response: str,
        ended: bool = True,
        most: float = math.inf,
        counts: Counter[str] | None = None,
    ) -> TextRow:
        """One row. If it exceeds the limit or `most`, the oldest turns are dropped, then the beginning of the last one;
        a response that leaves the prompt less than a quarter of the room is cut at its end instead, and then has no
        closing token.
        counts: counts cut_rows. Raises: UserError if the chat template refuses the dialogue.
        """
        messages, limit = list(prompt), min(most, self.limit)
        row = self._row(messages, response, ended)
        if counts is not None:
            counts["cut_rows"] += len(row) > limit
        while len(row) > limit:
            limit = int(limit)
            over, spare = len(row) - limit, self.count(shown_prompt(messages)) - limit // LEAST_PROMPT
            if spare > 0:
                if not drop_oldest(messages):
                    text = messages[0].content
                    text = self._cut(text, max(0, self.count(text) - min(over, spare)), keep_start=False)
                    messages = messages[1:] or [Message(role="user", content=text)]
            elif ended and not self.always_ends:
                ended = False
            elif response:
                response = self._cut(response, max(0, self.count(response) - over), keep_start=True)
            else:
                return TextRow(row.ids[-limit:], row.types[-limit:])
            row = self._row(messages, response, ended)
        return row

    def count(self, text: str) -> int:
        """The number of tokens of a text, without special ones."""
        return len(self._tokens(text, add_special_tokens=False)["input_ids"])

    def _tokens(self, *texts: str, **keywords: Any) -> Any:
        return self.tokenizer(*texts, split_special_tokens=True, **keywords)  # what spells a special token stays text

    def _row(self, messages: list[Message], response: str, ended: bool) -> TextRow:
        dialogue = [*messages, Message(role="assistant", content=response)]
        if self.form == "template":
            ids = encode_scored(self.tokenizer, dialogue, ended)
            return TextRow(ids, [0] * len(ids))
        texts = (shown_prompt(messages), response) if self.form == "pair" else (shown_prompt(dialogue),)
        encoded = self._tokens(*texts, return_token_type_ids=True)
        ids, types = list(encoded["input_ids"]), list(encoded["token_type_ids"])
        ending = itertools.takewhile(lambda i: ids[i] in self._special_ids, reversed(range(len(ids))))
        at = next((i for i in ending if ids[i] in self._closing), None)  # of the token that closes the response
        ended = ended or self.always_ends
        if at is not None and not ended:
            del ids[at], types[at]
        elif at is None and ended and self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
            types.append(types[-1] if types else 0)
        return TextRow(ids, types)

    def _cut(self, text: str, keep: int, keep_start: bool) -> str:
        """The first or the last `keep` tokens of a text."""
        if not keep:
            return ""
        offsets = self._tokens(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return text[: offsets[keep - 1][1]] if keep_start else text[offsets[-keep][0] :]


RECORD = "text_reward.json"  # the file that identifies the folder of a TextRewardModel
SCORED_TOGETHER = 64  # rows per forward of `score`


class TextRewardModel(nn.Module):
    """r = gain (classifier(text) - shift), for prompt and response as text. Weights float32, every dropout 0."""

    reads_text = True  # this and the methods: see `RewardModel`

    def __init__(self, network: Any, tokenizer: Any, gain: float = 1.0, shift: float = 0.0):
        super().__init__()
        self.network, self.tokenizer = network, tokenizer
        scalar_heads_in_float32(network)
        self.gain, self.shift = gain, shift
        # the model's own pad id first: its positions, and the position that it reads, may depend on it
        pad = network.config.pad_token_id
        self.pad: int = pad if pad is not None else tokenizer.pad_token_id or 0
        self.encoder = TextEncoder(tokenizer, position_limit(network, tokenizer), network.config.is_encoder_decoder)
        known = inspect.signature(network.forward).parameters
        has_types = getattr(network.config, "type_vocab_size", 0) > 1
        self._takes_types = has_types and "token_type_ids" in known and "token_type_ids" in tokenizer.model_input_names
        # without a pad token, transformers' decoder classifiers cannot find the end of a padded row
        self.together = 1 if pad is None else SCORED_TOGETHER

    @classmethod
    def from_base(cls, source: str) -> "TextRewardModel":
        """A classifier to train: a folder or hub name, whose scalar head is new unless it has one. A tokenizer without
        its own pad token gets one, so that the end token can be read. Raises: UserError if it cannot be read or model
        and tokenizer do not fit.
        """
        config, tokenizer = _read_config(source)
        bare = tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id
        if bare:
            tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        network = _read_network(source, config, tokenizer, ignore_mismatched_sizes=True, new_head=True)
        if bare:  # only now, because its row of the embedding is new
            network.config.pad_token_id = tokenizer.pad_token_id
        return cls(network, tokenizer)

    def answer_encoder(self, tokenizer: Any, limit: int, room: int, counts: Counter[str] | None = None) -> Encode:
        def encode(prompt: Sequence[Message], answers: Sequence[Answer]) -> tuple[list[Any], list[int]]:
            rows = [self.encoder.encode(prompt, *answer, limit, counts) for answer in answers]
            return rows, [self.encoder.count(text) for text, _ in answers]

        return encode

    def rows(self, episodes: Episodes) -> list[TextRow]:
        answers = zip(episodes.records, episodes.texts, episodes.ended.tolist(), strict=True)
        return [self.encoder.encode(record.prompt, *answer) for record, *answer in answers]

    def demonstration_rows(self, records: Sequence[Demonstration], tokenizer: Any, limit: int) -> list[TextRow]:
        return [self.encoder.encode(record.prompt, record.response, most=limit) for record in records]

    def collate(self, rows: Sequence[TextRow]) -> dict[str, Tensor]:
        """{"input_ids", "attention_mask", …}: (B, T) int64, padded on the right, or before the last place if the head reads that."""
        side = "left" if getattr(self.network.config, "summary_type", None) == "last" else "right"  # XLNet's
        ids, real = [row.ids for row in rows], [[1] * len(row) for row in rows]
        fields = {"input_ids": (ids, self.pad), "attention_mask": (real, 0)}
        if self._takes_types:
            fields["token_type_ids"] = ([row.types for row in rows], 0)
        return {name: right_pad(values, pad, side)[0] for name, (values, pad) in fields.items()}

    def forward(self, calibrated: bool = True, **inputs: Tensor) -> Tensor:
        """Scores (B,) float32 of a batch from `collate`."""
        raw = self.network(**inputs).logits.squeeze(-1).float()
        return self.gain * (raw - self.shift) if calibrated else raw

    def calibrate(self, gain: float, shift: float) -> None:
        self.gain, self.shift = float(gain), float(shift)

    def save_pretrained(self, folder: str | Path) -> None:
        """Weights (safetensors) and config as transformers reads them, the tokenizer, and the calibration."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.network.save_pretrained(str(folder))
        self.tokenizer.save_pretrained(str(folder))
        write_json(folder / RECORD, {"gain": self.gain, "shift": self.shift})

    @classmethod
    def from_pretrained(cls, source: str | Path) -> "TextRewardModel":
        """Load what `save_pretrained` wrote, or another one-label classifier, which is not calibrated.
        Raises: UserError if it cannot be read, or has more than one label.
        """
        config, tokenizer = _read_config(str(source))
        calibration = read_checked(Path(source) / RECORD, Calibration, AGAIN)
        if calibration is None and config.num_labels != 1:
            has = f"a {config.model_type} with {config.num_labels} labels is no reward model"
            raise UserError(f"{source}: {has}: train it with reward.model, or give a classifier with one label")
        return cls(_read_network(str(source), config, tokenizer), tokenizer, **(calibration or {})).eval()


def load_reward_model(folder: str | Path, device: torch.device) -> RewardModel | TextRewardModel:
    """The reward model of a stage's model folder, or another one-label classifier, in eval mode.
    Raises: UserError if it cannot be read.
    """
    config = read_config(str(folder), f"{folder}: not a readable reward model", AGAIN, local_files_only=True)
    if isinstance(config, RewardConfig):
        return load_whole(RewardModel, str(folder), config, local_files_only=True).eval().to(device)
    return TextRewardModel.from_pretrained(folder).to(device)


def _read_config(source: str) -> tuple[Any, Any]:
    """Configuration, with every dropout at 0, and tokenizer."""
    wanted = "want a folder or hub name of a transformers classifier"
    what = f"reward.model={source}: no readable model and tokenizer"
    config = read_config(source, what, wanted)
    tokenizer = open_tokenizer(AutoTokenizer, what, wanted, pretrained_model_name_or_path=source)
    without_dropout(config)
    config.use_cache = False
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id
    return config, tokenizer


def _read_network(source: str, config: Any, tokenizer: Any, **keywords: Any) -> Any:
    """The classifier in float32."""
    wanted = "want a transformers model for which there is a sequence classifier"
    with reading(f"{source}: not a readable text classifier", wanted):
        config.num_labels = 1
        loader = AutoModelForSequenceClassification
        network: Any = load_whole(loader, source, config, dtype=torch.float32, **keywords)
    rows = network.get_input_embeddings().num_embeddings
    if len(tokenizer) == rows + 1:  # the pad token that we gave it
        network.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    elif len(tokenizer) > rows:
        has = f"its tokenizer has {len(tokenizer)} entries, its model embeds {rows}"
        raise UserError(f"{source}: {has}: give a model and a tokenizer that belong together")
    return network


def position_limit(network: nn.Module, tokenizer: Any) -> float:
    """The longest input in tokens; endless if positions are relative and the tokenizer states no limit."""
    config: Any = network.config
    limits = [n for n in (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")) if n]
    if tokenizer.model_max_length < 10**9:
        limits.append(tokenizer.model_max_length)
    for name, module in network.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            limits.append(module.num_embeddings - module.padding_idx - 1)  # RoBERTa's positions start after the pad id
    return min((n for n in limits if n > 0), default=math.inf)
