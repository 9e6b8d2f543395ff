"""Step 0: the GPT from random weights, by next-token prediction on packed blocks; an encoder, by masked tokens; or a
pretrained model, adopted.

L1(U) = sum_i log P(u_i | u_{i-k} … u_{i-1}; theta) (Radford et al. 2018, equation 1).
"""

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.config import Config
from rlhf.config.model import shape_of
from rlhf.config.precision import inference
from rlhf.config.setting import listed
from rlhf.config.stages import pretraining_tokens
from rlhf.data.corpus import PackedCorpus, iterate_documents, make_collator, mix_corpora, pack_corpus
from rlhf.data.tokenizer import MASK, token_byte_lengths, tokenizer_hash
from rlhf.errors import UserError
from rlhf.model.adopt import Adopted, adopt
from rlhf.model.architectures import special_ids
from rlhf.model.batching import by_length, scoring_tokens
from rlhf.model.blocks import limited_experts
from rlhf.model.checkpoint import is_encoder
from rlhf.model.fused_loss import IGNORED, MaskedToken, NextToken, mask_tokens, pair_halves
from rlhf.model.gpt import GPTConfig, GPTForCausalLM
from rlhf.model.interface import lm
from rlhf.runs.metric_table import Sums
from rlhf.runs.progress import Progress
from rlhf.runs.sources import kinds_read, need_source
from rlhf.runs.stage import Stage
from rlhf.system.files import sha256_file, write_json
from rlhf.system.processes import on_first_rank
from rlhf.training.adapters import save_output
from rlhf.training.batches import Batches, Objective, accelerate_order, evaluate_items, put, train
from rlhf.training.engine import Engine, make_engine
from rlhf.training.loop import open_loop
from rlhf.training.optim import MuonAdamW, make_schedule
from rlhf.training.setup import parent_model, running


def run(config: Config) -> None:
    """Write runs/<run>/pretrain: the packed corpus, the model, its held-out loss."""
    with running(config, "pretrain") as (stage, device):
        _, tokenizer = parent_model(config, "tokenizer")
        if config.model.attention == "bidirectional" and tokenizer.mask_token is None:
            tokenizer.add_special_tokens({"mask_token": MASK})

        # 1. A GPT with random weights, or the model to adopt
        adopted = None if config.model.pretrained is None else adopt_model(stage, config.model.pretrained, tokenizer)
        if "corpus" not in kinds_read(config, "pretrain"):
            assert adopted is not None
            if config.pretrain.tokens is not None:
                stage.say(f"pretrain.tokens={config.pretrain.tokens} without data.corpus: no step is taken")
            save_output(adopted.model, adopted.tokenizer, stage)
            return stage.finish({"parameters": sum(p.numel() for p in adopted.model.parameters())})
        model = make_model(config, tokenizer) if adopted is None else adopted.model
        batch = config.pretrain.global_batch_tokens
        length = min(lm(model).context or tokenizer.model_max_length, batch)  # of a block
        if batch % length:
            wanted = f"want a multiple of the model's context of {length} tokens, or less than it"
            raise UserError(f"pretrain.global_batch_tokens={batch}: {wanted}")
        if config.pretrain.isolate_documents and not lm(model).native:
            raise UserError("pretrain.isolate_documents: transformers' class cannot: want false, or model.native=true")

        # 2. Pack the documents into full blocks
        corpus = load_or_pack(stage, tokenizer, length)
        blocks = corpus.blocks("train", length)
        steps = training_steps(config)
        tokens = corpus.token_count("train")
        stage.say(f"{tokens:,} tokens of text, {steps:,} steps, {steps * batch / tokens:.2f} passes over it")
        told = "{name}: {share:.1%} of them, {epochs:.2f} epochs of its {tokens:,} tokens".format
        stage.say(*(told(**source) for source in corpus.meta.get("sources", [])))
        held_out = corpus.blocks("heldout", length)  # refuses less than one block before training starts
        stage.say(f"{sum(p.numel() for p in model.parameters()):,} parameters")

        # 3. Train
        settings, is_causal = config.pretrain, not is_encoder(model.config)
        model.to(device)  # type: ignore[arg-type]
        trained = NextToken(model) if is_causal else MaskedToken(model, settings.pairs != "none")
        muon = MuonAdamW(trained, settings) if settings.optimizer == "muon" else None
        engine = make_engine(config, trained, settings, device, groups=muon)
        with open_loop(stage, engine, steps) as loop:
            with limited_experts(model):
                rows = batch // length
                order = accelerate_order(config.seed) if config.pretrain.shuffle else lambda count, epoch: range(count)
                objective = make_objective(config, engine, blocks, masked=not is_causal)
                make: Any = Batches if is_causal else partial(MaskedBatches, config=config, tokenizer=tokenizer)
                batches = make(blocks, rows, order)
                largest = next(batches.after(0))[0]
                train(loop, batches, objective, pretrain_schedule(config, steps), largest=largest)
            save_output(model, tokenizer, stage)

            # 4. Held-out loss
            with inference(config, device):
                if is_causal:
                    summary = held_out_loss(config, model, held_out, tokenizer)
                else:
                    shown = [held_out[i] for i in range(min(len(held_out), settings.eval_sequences))]
                    items = make(held_out, rows, order).mask(shown, "heldout")
                    summary = evaluate_items(config, engine, objective, items)
            loop.log_held_out(summary, "heldout")
        stage.finish(summary)


def adopt_model(stage: Stage, source: str, tokenizer: Any) -> Adopted:
    """The pretrained model; writes its record, adopted.json. Raises: UserError if its tokenizer is not that of the tokenizer stage."""
    adopted = adopt(source, native=stage.config.model.native, say=stage.say, form=stage.config.data.form)
    if tokenizer_hash(adopted.tokenizer) != tokenizer_hash(tokenizer):
        given = f"model.pretrained={source}"
        raise UserError(f"{given}: another model's tokenizer was adopted: run `rlhf tokenizer {given} overwrite=true`")
    if stage.writes:
        write_json(stage.folder / "adopted.json", adopted.record)
    return adopted


def training_steps(config: Config) -> int:
    return max(1, pretraining_tokens(config) // config.pretrain.global_batch_tokens)


def load_or_pack(stage: Stage, tokenizer: Any, length: int) -> PackedCorpus:
    """The packed corpus of this stage: all of data.corpus, or with data.corpus_weights the training tokens' share of
    each of its entries. Packs it unless an earlier attempt did. length: of a block, by which sources are mixed.
    """
    config, folder = stage.config, stage.folder / "corpus"
    source, weights = need_source(config, "corpus"), config.data.corpus_weights

    def pack(source: Any, out: Path, bar: Progress) -> PackedCorpus:
        before, documents = bar.done, iterate_documents(source, config.data.encoding)
        how: Any = {"held_out_fraction": config.data.held_out, "seed": config.seed}
        return pack_corpus(documents, tokenizer, out, progress=lambda n: bar.update(before + n - bar.done), **how)

    def ensure() -> None:
        with contextlib.suppress(UserError):  # not packed yet, or not whole
            corpus = PackedCorpus.load(folder)
            if corpus.sha256 != {name: sha256_file(folder / name) for name in corpus.sha256}:
                stage.say(f"{folder}: changed since it was packed: packing it again")
            elif corpus.meta["tokenizer"] == tokenizer_hash(tokenizer):
                return
        with Progress(None, "pretrain: packing", unit="token") as bar:
            if weights is None:
                pack(source, folder, bar)
                return
            parts = [
                (Path(str(name)).name, weight, pack(name, folder / f"source-{i}", bar))
                for i, (name, weight) in enumerate(zip(listed(source), weights, strict=True))
            ]
        mix_corpora(parts, length, training_steps(config) * config.pretrain.global_batch_tokens, folder)

    on_first_rank(ensure)
    return PackedCorpus.load(folder)


def make_model(config: Config, tokenizer: Any) -> GPTForCausalLM:
    """The GPT of the configuration with random weights, sized for the tokenizer."""
    try:
        shape = GPTConfig(vocab_size=len(tokenizer), **special_ids(tokenizer), **shape_of(config.model))
    except ValueError as error:
        raise UserError(f"model: {error}") from None
    return GPTForCausalLM(shape)


def pretrain_schedule(config: Config, steps: int) -> Callable[[int], float]:
    """`make_schedule`'s, or inverse_sqrt: linear warm-up, then sqrt(warm-up / steps). Source: Vaswani et al. 2017, equation 3."""
    settings = config.pretrain
    warmup = settings.warmup_tokens // settings.global_batch_tokens
    if settings.schedule == "inverse_sqrt":
        first = max(1, warmup)
        return lambda step: min((step + 1) / first, math.sqrt(first / (step + 1)))
    return make_schedule(settings, round(settings.decay_fraction * steps), warmup)


def make_objective(config: Config, engine: Engine, blocks: Any, masked: bool = False) -> Objective[dict[str, Tensor]]:
    """The mean loss per token of blocks; masked: per chosen token, plus the mean cross-entropy per pair."""
    collate = make_collator(blocks.separator, config.pretrain.isolate_documents)

    def predicted(block: dict[str, Tensor]) -> int:
        return int((block["labels"] != IGNORED).sum()) if masked else blocks.context_length - 1

    def loss_of(part: list[dict[str, Tensor]], count: int, sums: Sums) -> tuple[Tensor, dict[str, Tensor]]:
        batch = put(collate(part), engine.device)
        tokens = sum(map(predicted, part))
        if not masked:
            loss = engine(denominator=count, **batch)
            sums.add("pretrain/loss", loss.item() * count, tokens)
            return loss, batch
        pair, weight = batch.pop("pair", None), batch.pop("weight", None)
        nats, logits = engine(**batch)
        sums.add("pretrain/loss", nats.item(), tokens)
        loss = nats / count
        if pair is not None:
            each = F.cross_entropy(logits, pair, reduction="none")
            sums.add("pretrain/accuracy", (logits.argmax(-1) == pair).sum().item(), len(part))
            loss = loss + (each * weight).sum()
        return loss, batch

    most = config.pretrain.micro_batch_sequences
    return Objective(lambda block: [block["input_ids"]], loss_of, most, count=predicted)


@dataclass(frozen=True)
class MaskedBatches(Batches[dict[str, Tensor]]):
    """Batches whose blocks are masked anew at every step, by seed and step alone, so that a resumed run masks the same."""

    config: Config
    tokenizer: Any

    def after(self, step: int) -> Iterator[list[dict[str, Tensor]]]:
        for number, batch in enumerate(super().after(step), step):
            yield self.mask(batch, number)

    def mask(self, batch: Sequence[dict[str, Tensor]], name: object) -> list[dict[str, Tensor]]:
        """The blocks as {"input_ids", "labels"} and, with pretrain.pairs, {"pair", "weight"}, of which the latter is
        one over the batch.
        name: of the batch; the seed and it determine the masks. Second halves are drawn from all items.
        """
        tokenizer, pairs = self.tokenizer, self.config.pretrain.pairs
        generator = torch.Generator().manual_seed(random.Random(f"mask-{self.config.seed}-{name}").getrandbits(63))
        tokens = torch.stack([block["input_ids"] for block in batch])
        fields = dict[str, Tensor]()
        if pairs != "none":
            drawn = torch.randint(len(self.items), (len(batch),), generator=generator).tolist()
            others = torch.stack([self.items[i]["input_ids"] for i in drawn]) if pairs == "next" else None
            tokens, fields["pair"] = pair_halves(tokens, others, tokenizer.eos_token_id, generator)
            fields["weight"] = torch.full((len(batch),), 1 / len(batch))
        ordinary = torch.ones(len(tokenizer), dtype=torch.bool)
        ordinary[tokenizer.all_special_ids] = False
        fields["input_ids"], fields["labels"] = mask_tokens(tokens, ordinary, tokenizer.mask_token_id, generator)
        return [dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)]


def held_out_loss(config: Config, model: Any, blocks: Any, tokenizer: Any) -> dict[str, float]:
    """Held-out {"loss": nats per text token, "bpb": bits per byte of text}; no "bpb" without byte-level tokens."""
    collate = make_collator(blocks.separator, config.pretrain.isolate_documents)
    lengths = token_byte_lengths(tokenizer)
    bytes_of = None if lengths is None else torch.tensor(lengths)
    device = next(model.parameters()).device
    loss = NextToken(model).eval()
    nats = bytes_seen = tokens_seen = 0.0
    count = min(len(blocks), config.pretrain.eval_sequences)
    for group in by_length([blocks.context_length] * count, 16, scoring_tokens(model)):
        batch = collate([blocks[i] for i in group])
        labels = batch["labels"]
        text = labels[:, 1:] != blocks.separator
        tokens_seen += text.sum().item()
        bytes_seen += 0 if bytes_of is None else bytes_of[labels[:, 1:]].sum().item()
        labels[:, 1:][~text] = IGNORED
        nats += loss(**put(batch, device)).item()
    summary = {"loss": nats / tokens_seen}
    return summary if bytes_of is None else summary | {"bpb": nats / (bytes_seen * math.log(2))}
