"""PPO-ptx: pretraining blocks that are added to PPO's updates (Ouyang et al. 2022, equation 2, last term)."""

import random
from typing import Any

import torch
from torch import Tensor

from rlhf.config import Config
from rlhf.data.corpus import PackedCorpus, make_collator
from rlhf.runs.folders import read_stage, stage_folder


class PretrainingBlocks:
    """Blocks of the corpus that the base was pretrained on, drawn by (seed, update, epoch, minibatch)."""

    def __init__(self, blocks: Any, isolate: bool, seed: int):
        self.blocks, self.seed = blocks, seed
        self.collate = make_collator(blocks.separator, isolate)

    @classmethod
    def load(cls, config: Config, tokenizer: Any) -> "PretrainingBlocks":
        """Raises: UserError if the pretraining stage has no packed corpus any more, or one of another tokenizer."""
        folder = stage_folder(config, "pretrain")
        remedy = "point parents.pretrain at the run that the SFT model comes from"
        corpus = PackedCorpus.load_for("ppo.ptx_coef", folder, tokenizer, remedy)
        settings = (read_stage(folder) or {}).get("settings", {})
        batch = settings.get("pretrain.global_batch_tokens", config.pretrain.global_batch_tokens)
        # an adopted model's context is in its tokenizer
        context = settings.get("model.context_length", min(tokenizer.model_max_length, batch))
        isolate = settings.get("pretrain.isolate_documents", config.pretrain.isolate_documents)
        return cls(corpus.blocks("train", context), isolate, config.seed)

    def draw(self, key: tuple, count: int) -> list[int]:
        """Indices of `count` blocks, which depend only on (seed, key)."""
        chooser = random.Random(f"ptx-{self.seed}-{key}")
        return [chooser.randrange(len(self.blocks)) for _ in range(count)]

    def batch(self, index: list[int], device: torch.device) -> dict[str, Tensor]:
        """input_ids and labels (B, T) of blocks, with positions if documents are isolated."""
        return {name: value.to(device) for name, value in self.collate([self.blocks[i] for i in index]).items()}
