"""Stage 1: the GPT from random weights, by next-token prediction on packed blocks.

L1(U) = sum_i log P(u_i | u_{i-k} … u_{i-1}; theta) (Radford et al. 2018, equation 1). The loop is transformers' Trainer.
"""

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from rlhf.config import Config
from rlhf.data.corpus import PackedCorpus, iterate_documents, make_collator, pack_corpus
from rlhf.errors import UserError
from rlhf.files import sha256_file
from rlhf.model.gpt import GPTConfig, GPTForCausalLM
from rlhf.ops.logprobs import token_logprobs
from rlhf.processes import Ranks, on_first_rank
from rlhf.runs.folders import Stage, open_stage, stage_folder
from rlhf.runs.sources import hash_sources, need_source
from rlhf.tokenizer import load_tokenizer, token_byte_lengths, tokenizer_hash
from rlhf.tracking.progress import progress
from rlhf.training.loop import open_loop
from rlhf.training.optim import MuonAdamW, cosine_schedule, decay_groups, make_adamw
from rlhf.training.setup import set_up
from rlhf.training.trainer import StageTrainer, one_device, save_output, shared_arguments, train
from rlhf.training.zero import offloads

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def run(config: Config) -> None:
    """Write runs/<run>/pretrain: the packed corpus, the model, its held-out loss."""
    with open_stage(config, "pretrain", hash_sources(config, "pretrain")) as stage:
        device = set_up(config)
        tokenizer = load_tokenizer(stage_folder(config, "tokenizer") / "model")

        # 1. Pack the documents into full blocks
        corpus = load_or_pack(stage, tokenizer)
        blocks = corpus.blocks("train", config.model.context_length)
        steps = max(1, config.pretrain.tokens // config.pretrain.global_batch_tokens)
        passes = steps * config.pretrain.global_batch_tokens / corpus.token_count("train")
        stage.say(f"{corpus.token_count('train'):,} tokens of text, {steps:,} steps, {passes:.2f} passes over it")

        corpus.blocks("heldout", config.model.context_length)  # raises if there is less than one block, before training

        # 2. A GPT with random weights
        model = make_model(config, tokenizer)
        stage.say(f"{sum(p.numel() for p in model.parameters()):,} parameters")

        # 3. Train
        with open_loop(stage, Ranks(device), steps) as loop:
            train(
                make_trainer(stage, model, blocks, steps, device),
                loop,
                "pretrain/loss",
                config.pretrain.global_batch_tokens,
            )
            save_output(model, tokenizer, stage)

            # 4. Held-out loss
            summary = held_out_loss(config, model, corpus, tokenizer)
            loop.tracker.log({f"eval/heldout/{name}": value for name, value in summary.items()}, step=steps)
            stage.say(f"held-out loss {summary['loss']:.3f} nats per token, {summary['bpb']:.3f} bits per byte")
        stage.finish(summary)


def load_or_pack(stage: Stage, tokenizer: "PreTrainedTokenizerFast") -> PackedCorpus:
    """The packed corpus of this stage; packs it unless an earlier attempt finished packing."""
    config, folder = stage.config, stage.folder / "corpus"

    def ensure() -> None:
        with contextlib.suppress(UserError):
            corpus = PackedCorpus.load(folder)
            if all(sha256_file(folder / name) == digest for name, digest in corpus.sha256.items()):
                if corpus.tokenizer_hash == tokenizer_hash(tokenizer):
                    return
            else:
                stage.say(
                    f"{folder}: changed since it was packed (its sha256 differs from meta.json's): packing it again"
                )
        documents = iterate_documents(need_source(config, "corpus"), config.data.encoding)
        with progress(None, "pretrain: packing", unit="token") as bar:
            pack_corpus(
                documents, tokenizer, folder, held_out_fraction=config.data.held_out, seed=config.seed,
                progress=lambda _, tokens: bar.update(tokens - bar.done),
            )  # fmt: skip

    on_first_rank(ensure)
    return PackedCorpus.load(folder)


def make_model(config: Config, tokenizer: "PreTrainedTokenizerFast") -> GPTForCausalLM:
    """The GPT of the configuration with random weights, sized for the tokenizer."""
    from dataclasses import asdict

    settings = asdict(config.model)
    try:
        shape = GPTConfig(
            vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id, **settings,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(f"model: {error}") from None
    return GPTForCausalLM(shape)


def make_optimizer(config: Config, model: torch.nn.Module) -> torch.optim.Optimizer:
    settings = config.pretrain
    betas = (settings.beta1, settings.beta2)
    if settings.optimizer == "adamw":
        groups = decay_groups(model, settings.weight_decay)
        return make_adamw(groups, lr=settings.lr, betas=betas, on_host=offloads(config))
    return MuonAdamW(model, muon_lr=settings.muon_lr, lr=settings.lr, betas=betas, weight_decay=settings.weight_decay)


def make_trainer(stage: Stage, model: GPTForCausalLM, blocks: Any, steps: int, device: torch.device) -> Any:
    """transformers' Trainer over the blocks, with our optimizer and schedule."""
    from transformers import Trainer, TrainingArguments

    config, settings = stage.config, stage.config.pretrain
    warmup = settings.warmup_tokens // settings.global_batch_tokens
    arguments = TrainingArguments(
        train_sampling_strategy="random" if settings.shuffle else "sequential", remove_unused_columns=False,
        **shared_arguments(
            stage, device, rows=settings.global_batch_tokens // config.model.context_length,
            micro=settings.micro_batch_sequences, setting=f"pretrain.global_batch_tokens={settings.global_batch_tokens}",
            steps=steps, max_grad_norm=settings.max_grad_norm,
        ),
    )  # fmt: skip

    class PretrainTrainer(StageTrainer, Trainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model, inputs | {"skip_logits": True}, *args, **kwargs)

    return PretrainTrainer(
        stage=stage, optimizer=lambda: make_optimizer(config, model),
        factor=lambda step: cosine_schedule(step, steps, warmup, settings.final_lr_fraction),
        model=model, args=one_device(arguments), train_dataset=blocks,
        data_collator=make_collator(blocks.separator, settings.isolate_documents),
    )  # fmt: skip


@torch.no_grad()
def held_out_loss(
    config: Config, model: GPTForCausalLM, corpus: PackedCorpus, tokenizer: "PreTrainedTokenizerFast"
) -> dict[str, float]:
    """Held-out {"loss": nats per text token, "bpb": bits per byte of text}; separators are not counted."""
    blocks = corpus.blocks("heldout", config.model.context_length)
    collate = make_collator(blocks.separator, config.pretrain.isolate_documents)
    bytes_of = torch.tensor(token_byte_lengths(tokenizer))
    device = next(model.parameters()).device
    model.eval()
    nats = bytes_seen = tokens_seen = 0.0
    count = min(len(blocks), config.pretrain.eval_sequences)
    for start in range(0, count, 16):
        batch = collate([blocks[i] for i in range(start, min(count, start + 16))])
        labels = batch.pop("labels")[:, 1:].to(device)
        logits = model(**{k: v.to(device) for k, v in batch.items()}, use_cache=False).logits[:, :-1]
        text = labels != blocks.separator
        nats -= (token_logprobs(logits, labels) * text).sum().item()
        tokens_seen += text.sum().item()
        bytes_seen += bytes_of[labels.cpu()].sum().item()
    return {"loss": nats / tokens_seen, "bpb": nats / (bytes_seen * 0.6931471805599453)}
