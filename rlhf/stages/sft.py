"""Step 1: supervised fine-tuning on demonstrations.

The loss counts the assistant's tokens, each turn's end token included, never the user's text (Ouyang et al. 2022,
section 3.5). With sft.turns=last only a dialogue's last answer counts.
Optionally a share of the rows is pretraining text (appendix C.3), and the prompt counts too, with a weight:
L3 = L2 + lm_coef L1 (Radford et al. 2018, equation 5).
Differs: the last epoch is kept; the paper chooses the epoch by reward-model score on held-out prompts, and that model
is trained on this one. Blocks of pretraining text are one document to the model, even if pretraining isolated their
documents. Residual dropout acts in our GPT only.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.data.corpus import PackedCorpus
from rlhf.data.encoding import TokenRow, encode_demonstrations, labels_of, row_limit
from rlhf.errors import UserError
from rlhf.model.batching import by_length, right_pad, scoring_tokens
from rlhf.model.blocks import Block
from rlhf.model.fused_loss import IGNORED, NextToken
from rlhf.runs.folders import stage_folder
from rlhf.runs.metric_table import Sums
from rlhf.runs.sources import in_split, read_demonstrations
from rlhf.runs.stage import Stage
from rlhf.training.adapters import add_adapters, save_output
from rlhf.training.batches import Batches, Objective, accelerate_order, put, trained
from rlhf.training.divided import load_lm
from rlhf.training.engine import Engine, make_engine
from rlhf.training.loop import TrainingLoop
from rlhf.training.setup import check_tokenizer, load_policy, parent_model, running

Row = dict[str, list[int]]  # "input_ids", "labels", "seq_lengths"
LEAK = 1e-5  # a larger relative change of a loss is not rounding, since both rows have one shape
CPU_ROWS = 8  # rows per forward on a CPU: fewer leave it idle, more add padding


def run(config: Config) -> None:
    """Write runs/<run>/sft/model."""
    with running(config, "sft") as (stage, device):
        base, tokenizer = parent_model(config, "pretrain")
        if config.parents.pretrain is None:
            check_tokenizer(base.parent, parent_model(config, "tokenizer")[1])

        if not config.sft.epochs:
            stage.say("sft.epochs=0: no step is taken, the base model is kept as it is")
            save_output(load_policy(base), tokenizer, stage)
            return stage.finish()

        # 1. Demonstrations as tokens; prompts masked
        demonstrations = read_demonstrations(config, stage.say)
        counts: Counter[str] = Counter()
        model = load_with_dropout(config, base, device)
        context = row_limit(config, tokenizer)
        records = {split: in_split(config, demonstrations, split) for split in ("train", "dev")}
        how: Any = {"turns": config.sft.turns, "counts": counts}
        rows = {split: encode_demonstrations(some, tokenizer, context, **how) for split, some in records.items()}
        cut = "".join(f", {name} {count:,}" for name, count in sorted(counts.items()))
        read = f"{len(rows['train']):,} demonstrations, {len(rows['dev'])} held out"
        stage.say(f"{read}, at most {context:,} tokens{cut}")
        stage.counts |= counts
        if not rows["train"]:
            raise UserError("data.demonstrations: none is left to train on: lower data.dev and data.test, or add some")

        # 2. Train: all weights, or with lora.rank low-rank adapters on them
        add_adapters(model, config, base)

        def evaluate() -> dict[str, float]:
            with inference(config, device):
                return {"loss": response_loss(model, rows["dev"], tokenizer.pad_token_id)}

        how = {"evaluate": evaluate if rows["dev"] else None, "looks": config.sft}
        with fine_tuned(stage, model, tokenizer, rows["train"], config.sft.epochs, device, **how) as loop:
            save_output(model, tokenizer, stage)

            # 3. Held-out loss
            summary = evaluate() if rows["dev"] else {}
            loop.log_held_out(summary)
        stage.finish(summary)


def load_with_dropout(config: Config, folder: Path, device: torch.device) -> Any:
    """The model to fine-tune, of ours with sft.dropout on each block's output to the residual stream."""
    model = load_lm(config, folder, device, dropout=0.0)  # none on attention and embeddings
    for block in model.modules():
        if isinstance(block, Block):
            block.dropout.p = config.sft.dropout
    return model


def draw_pretraining_rows(config: Config, tokenizer: Any, count: int, context: int) -> list[TokenRow]:
    """Blocks of the base's own corpus, sft.pretrain_fraction of all rows; `count` are demonstrations."""
    share = config.sft.pretrain_fraction
    if not share:
        return []
    folder = stage_folder(config, "pretrain")
    corpus = PackedCorpus.load_for("sft.pretrain_fraction", folder, tokenizer, "train it again")
    blocks = corpus.blocks("train", context)
    wanted = round(share / (1 - share) * count)
    if wanted > len(blocks):
        raise UserError(f"sft.pretrain_fraction={share}: {wanted:,} blocks, {folder} has {len(blocks):,}: lower it")
    drawn = random.Random(f"sft-pretraining-{config.seed}").sample(range(len(blocks)), wanted)
    return [{"prompt": [], "response": blocks[i]["input_ids"].tolist()} for i in drawn]


def make_rows(rows: Sequence[TokenRow], context: int, pack: bool) -> list[Row]:
    """{"input_ids", "labels", "seq_lengths"} of demonstrations; with `pack` a row contains several, by TRL's best fit."""
    made = [{"input_ids": row["prompt"] + row["response"], "labels": labels_of(row, IGNORED)} for row in rows]
    if pack:
        import datasets
        from trl import pack_dataset

        datasets.disable_progress_bars()
        made = pack_dataset(datasets.Dataset.from_list(made), context, "bfd").to_list()
    for row in made:
        row.setdefault("seq_lengths", [len(row["input_ids"])])
        for start in itertools.accumulate(row["seq_lengths"][:-1], initial=0):
            row["labels"][start] = IGNORED  # nothing comes before the first token
    return made


def make_collator(pad: int, pack: bool, with_prompts: bool) -> Callable[[Sequence[Row]], dict[str, Any]]:
    """Rows as arguments of `NextToken`. with_prompts: also `prompts`, labels of the tokens which `labels` ignore."""
    if pack:
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

        join = DataCollatorForLanguageModeling(pad, padding_free=True)

    def collate(rows: Sequence[Row]) -> dict[str, Any]:
        if pack:
            batch = join(list(rows))
            real = batch["position_ids"] > 0
        else:
            tokens, lengths = right_pad([row["input_ids"] for row in rows], pad)
            batch = {"input_ids": tokens, "labels": right_pad([row["labels"] for row in rows], IGNORED)[0]}
            real = torch.arange(tokens.shape[1]) < lengths[:, None]
        if with_prompts:
            batch["prompts"] = batch["input_ids"].masked_fill((batch["labels"] != IGNORED) | ~real, IGNORED)
        return batch

    return collate


@torch.no_grad()
def check_packing(model: Any, rows: Sequence[TokenRow], pad: int) -> None:
    """Raises: UserError if a packed demonstration's loss depends on the one before: the model ignores packed positions."""
    loss, collate, (first, second) = NextToken(model).eval(), make_collator(pad, True, False), [*rows, *rows][:2]
    before, ids = (first["prompt"] + first["response"])[:16], (second["prompt"] + second["response"])[:16]
    found = []
    for start in (before, before[::-1]):
        labels = [IGNORED] * (len(start) + 1) + ids[1:]
        row = {"input_ids": start + ids, "labels": labels, "seq_lengths": [len(start), len(ids)]}
        found.append(loss(**put(collate([row]), next(model.parameters()).device)).item())
    if abs(found[0] - found[1]) > LEAK * max(1.0, *found):
        kind = model.config.model_type
        raise UserError(f"sft.pack=true: in a packed row a {kind} model reads earlier ones: use sft.pack=false")


def fine_tuned(
    stage: Stage, model: Any, tokenizer: Any, rows: list[TokenRow], epochs: int, device: torch.device, **how: Any
) -> AbstractContextManager[TrainingLoop]:
    """`trained` on demonstrations and pretraining text, by the settings of SFT."""
    config, settings, pad = stage.config, stage.config.sft, tokenizer.pad_token_id
    context = row_limit(config, tokenizer)
    rows = rows + draw_pretraining_rows(config, tokenizer, len(rows), context)
    batches = Batches(make_rows(rows, context, settings.pack), settings.batch_size, accelerate_order(config.seed))
    engine = make_engine(config, NextToken(model), settings, device)
    if settings.pack:
        with engine.autocast():
            check_packing(model, rows, pad)
    return trained(stage, engine, batches, make_objective(config, engine, pad), epochs, settings, **how)


def make_objective(config: Config, engine: Engine, pad: int) -> Objective[Row]:
    """L2 + lm_coef L1 over the batch's response tokens; L1 counts the prompts, without their first tokens."""
    settings = config.sft
    collate = make_collator(pad, settings.pack, bool(settings.lm_coef))

    def loss_of(part: list[Row], count: int, sums: Sums) -> tuple[Tensor, dict[str, Any]]:
        batch = put(collate(part), engine.device)
        prompts = batch.pop("prompts", None)
        loss = engine(denominator=count, **batch)
        if prompts is not None:
            loss = loss + settings.lm_coef * engine(denominator=count, **(batch | {"labels": prompts}))
        sums.add("sft/loss", loss.item() * count, sum(map(labels_in, part)))
        return loss, batch

    most = settings.micro_batch_size if engine.device.type == "cuda" else min(settings.micro_batch_size, CPU_ROWS)
    return Objective(lambda row: [row["input_ids"]], loss_of, most, count=labels_in)


def labels_in(row: Row) -> int:
    """The learned tokens of a row."""
    return sum(label != IGNORED for label in row["labels"])


def response_loss(model: Any, rows: list[TokenRow], pad: int) -> float:
    """Mean loss in nats over all learned tokens of the rows."""
    loss, collate, made = NextToken(model).eval(), make_collator(pad, False, False), make_rows(rows, 0, False)
    device = next(model.parameters()).device
    groups = by_length([len(row["input_ids"]) for row in made], 32, scoring_tokens(model))
    nats = sum(loss(**put(collate([made[i] for i in group]), device)).item() for group in groups)
    return nats / sum(map(labels_in, made))
