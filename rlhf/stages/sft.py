"""Stage 2: supervised fine-tuning on demonstrations. The loop is TRL's SFTTrainer.

The loss counts the assistant's tokens, each turn's end token included, never the user's text (Ouyang et al. 2022, section
3.5). With sft.turns=last only a dialogue's last answer counts.
Optionally a share of the rows is pretraining text (appendix C.3), and the prompt counts too, with a weight: L3 = L2 + lm_coef L1
(Radford et al. 2018, equation 5).
Differs: the last epoch is kept; the paper chooses the epoch by reward-model score on held-out prompts, and that model is
trained on this one. Blocks of pretraining text are one document to the model, even if pretraining isolated their documents.
Residual dropout acts in our GPT only.
"""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.data.corpus import PackedCorpus
from rlhf.data.demonstrations import Row, encode_demonstrations, labels_of
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import UserError
from rlhf.model.batching import by_length, right_pad
from rlhf.model.blocks import Block
from rlhf.model.fused_loss import IGNORED
from rlhf.model.interface import context_of
from rlhf.model.ragged import RaggedLoss
from rlhf.ops.logprobs import token_logprobs
from rlhf.runs.folders import stage_folder
from rlhf.runs.sources import hash_sources, of_split, read_demonstrations
from rlhf.runs.stage import Stage, open_stage
from rlhf.system.processes import Ranks
from rlhf.training.adapters import add_adapters, save_output
from rlhf.training.loop import open_loop
from rlhf.training.optim import cosine_schedule, decay_groups, make_adamw
from rlhf.training.setup import check_tokenizer, load_policy, set_up
from rlhf.training.trainer import StageTrainer, one_device, shared_arguments, train
from rlhf.training.zero import offloads


def run(config: Config) -> None:
    """Write runs/<run>/sft/model."""
    with open_stage(config, "sft", hash_sources(config, "sft")) as stage:
        device = set_up(config)
        base = stage_folder(config, "pretrain") / "model"
        tokenizer = load_tokenizer(base)
        if config.parents.pretrain is None:
            check_tokenizer(
                stage_folder(config, "pretrain"), load_tokenizer(stage_folder(config, "tokenizer") / "model")
            )

        if not config.sft.epochs:
            stage.say("sft.epochs=0: no step is taken, the base model is kept as it is")
            save_output(load_policy(base), tokenizer, stage)
            stage.finish({})
            return

        # 1. Demonstrations as tokens; prompts masked
        demonstrations = read_demonstrations(config, stage.say)
        counts: Counter[str] = Counter()
        model = load_with_dropout(base, config.sft.dropout)
        context = context_of(model, tokenizer)
        rows = {
            split: encode_demonstrations(
                of_split(config, demonstrations, split), tokenizer, context, turns=config.sft.turns, counts=counts
            )
            for split in ("train", "dev")
        }
        stage.say(
            f"{len(rows['train']):,} demonstrations to train on, {len(rows['dev'])} held out; "
            + ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))
        )
        if not rows["train"]:
            raise UserError("data.demonstrations: none is left to train on: lower data.dev and data.test, or add some")

        # 2. Train: all weights, or with lora.rank low-rank adapters on them
        add_adapters(model, config, base, device)
        trainer = make_trainer(stage, model, tokenizer, rows["train"], config.sft.epochs, device)
        with open_loop(stage, Ranks(device), trainer.args.max_steps) as loop:
            train(trainer, loop, "sft/loss")
            save_output(model, tokenizer, stage)

            # 3. Held-out loss
            summary = {}
            if rows["dev"]:
                with inference(config, device):
                    summary["loss"] = response_loss(model, rows["dev"], tokenizer.pad_token_id)
                loop.tracker.log({"eval/dev/loss": summary["loss"]}, step=loop.total)
                stage.say(f"held-out loss {summary['loss']:.3f} nats per response token")
        stage.finish(summary)


def load_with_dropout(folder: Path, share: float) -> Any:
    """The model to fine-tune, with this dropout on each block's output to the residual stream."""
    model = load_policy(folder, dropout=0.0)  # none on attention and embeddings
    for module in model.modules():
        if isinstance(module, Block):
            module.dropout.p = share
    return model


def draw_pretraining_rows(config: Config, tokenizer: Any, count: int, context: int) -> list[Row]:
    """Different blocks of the base's own corpus, as `sft.pretrain_fraction` of all rows with `count` demonstrations; every token
    is learned.

    Raises: UserError if the pretraining stage has no packed corpus, too small a one, or one of another tokenizer.
    """
    share = config.sft.pretrain_fraction
    if not share:
        return []
    folder = stage_folder(config, "pretrain")
    corpus = PackedCorpus.load_for("sft.pretrain_fraction", folder, tokenizer, "train it anew")
    blocks = corpus.blocks("train", context)
    wanted = round(share / (1 - share) * count)
    if wanted > len(blocks):
        raise UserError(
            f"sft.pretrain_fraction={share}: wants {wanted:,} blocks of pretraining text, {folder} has {len(blocks):,}: "
            "lower it"
        )
    drawn = random.Random(f"sft-pretraining-{config.seed}").sample(range(len(blocks)), wanted)
    return [{"prompt": [], "response": blocks[i]["input_ids"].tolist()} for i in drawn]


class PromptLoss:
    """Mixed into SFTTrainer, before it: L2 + lm_coef L1, both as sums over tokens, divided by the response tokens.

    L1 counts the tokens of the prompts, except the first token of a row, which has no prediction.
    """

    lm_coef = 0.0

    def compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any, **keywords: Any) -> Any:
        loss = super().compute_loss(model, inputs, *arguments, **keywords)  # type: ignore[misc]
        if not self.lm_coef:
            return loss
        labels, tokens = inputs["labels"], inputs["input_ids"]
        real = inputs["attention_mask"].bool() if "attention_mask" in inputs else inputs["position_ids"] != 0
        prompt = tokens.masked_fill((labels != IGNORED) | ~real, IGNORED)
        return loss + self.lm_coef * super().compute_loss(model, inputs | {"labels": prompt}, *arguments, **keywords)  # type: ignore[misc]


def make_trainer(stage: Stage, model: Any, tokenizer: Any, rows: list[Row], epochs: int, device: torch.device) -> Any:
    """SFTTrainer over tokenised demonstrations and pretraining text, with AdamW and a cosine without warm-up.

    `args.max_steps` is `epochs` passes over the rows. With sft.pack a row contains several demonstrations.
    """
    import datasets
    from trl import SFTConfig, SFTTrainer

    datasets.disable_progress_bars()
    settings = stage.config.sft
    rows = rows + draw_pretraining_rows(stage.config, tokenizer, len(rows), context_of(model, tokenizer))
    data = datasets.Dataset.from_dict(
        {
            "input_ids": [row["prompt"] + row["response"] for row in rows],
            "labels": [labels_of(row, IGNORED) for row in rows],
        }
    )
    arguments = SFTConfig(
        include_num_input_tokens_seen="non_padding",
        packing=settings.pack,
        eos_token=tokenizer.eos_token,
        max_length=context_of(model, tokenizer),
        router_aux_loss_coef=0.0,  # the loss is only the demonstrations'
        **shared_arguments(
            stage,
            device,
            rows=settings.batch_size,
            micro=settings.micro_batch_size,
            setting=f"sft.batch_size={settings.batch_size}",
            steps=1,
            max_grad_norm=settings.max_grad_norm,
        ),
    )

    class SftTrainer(StageTrainer, PromptLoss, RaggedLoss, SFTTrainer):
        lm_coef = settings.lm_coef

    on_host = offloads(stage.config)
    trainer = SftTrainer(
        stage=stage,
        factor=lambda step: cosine_schedule(step, trainer.args.max_steps, 0, settings.final_lr_fraction),
        optimizer=lambda: make_adamw(decay_groups(model, settings.weight_decay), lr=settings.lr, on_host=on_host),
        model=model,
        args=one_device(arguments),
        train_dataset=data,
        processing_class=tokenizer,
    )
    packed: Any = trainer.train_dataset
    trainer.args.max_steps = epochs * -(-len(packed) // settings.batch_size)
    return trainer


def response_loss(model: Any, rows: list[Row], pad: int) -> float:
    """Mean loss in nats over all learned tokens of the rows."""
    model.eval()
    device = next(model.parameters()).device
    nats = tokens = 0.0
    for group in by_length([len(row["prompt"]) + len(row["response"]) for row in rows], 32):
        padded, _ = right_pad([rows[i]["prompt"] + rows[i]["response"] for i in group], pad)
        labels, _ = right_pad([labels_of(rows[i], IGNORED) for i in group], IGNORED)
        mask = labels[:, 1:] != IGNORED  # (B, T - 1)
        logits = model(padded.to(device), use_cache=False).logits[:, :-1]
        logp = token_logprobs(logits, padded[:, 1:].to(device)).cpu()
        nats -= (logp * mask).sum().item()
        tokens += mask.sum().item()
    return nats / tokens
