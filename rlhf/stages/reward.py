"""Stage 3: the reward model on ranked comparisons.

loss = - mean over prompts of 1/|P| sum over (w, l) in P of log sigmoid(r_w - r_l), with all K answers of a prompt in one
batch element (Ouyang et al. 2022, equation 1). Then calibration: demonstrations average 0, SFT samples have standard
deviation 1.
"""

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlhf.config import Config
from rlhf.data.batching import by_length, right_pad
from rlhf.data.comparisons import load_comparisons
from rlhf.data.demonstrations import encode_demonstrations, load_demonstrations
from rlhf.data.items import Item, make_items
from rlhf.data.prompts import encode_prompt_within, prompts_of
from rlhf.data.records import Ranking
from rlhf.data.splits import record_split
from rlhf.errors import UserError
from rlhf.model.generate import sample
from rlhf.model.heads import RewardModel
from rlhf.ops.ranking import ranking_loss
from rlhf.runs import Stage, checkpoint_step, latest_checkpoint, open_stage, save_checkpoint, stage_folder
from rlhf.stages.common import cosine_schedule, decay_groups, load_policy, open_tracker, set_up
from rlhf.stages.loop import gradient_norm, load_training, make_accelerator, refuse_nonfinite, save_training
from rlhf.stages.sources import fractions, hash_sources, need_source
from rlhf.tokenizer import load_tokenizer
from rlhf.tracking.metrics import Sums
from rlhf.tracking.progress import progress


def run(config: Config) -> None:
    """Write runs/<run>/reward/model, calibrated."""
    with open_stage(config, "reward", hash_sources(config, "reward")) as stage:
        device = set_up(config)
        folder = stage_folder(config, "sft") / "model"
        tokenizer = load_tokenizer(folder)

        # 1. One item a prompt
        records, info = load_comparisons(need_source(config, "comparisons"), config.data.format)
        for line in info.describe():
            stage.say(line)
        items = load_items(config, stage, records, tokenizer)

        # 2. The SFT model without its unembedding, plus a scalar head
        model = RewardModel.from_causal_lm(str(folder), dropout=0.0)

        # 3. Train
        summary = train(config, stage, model, items, tokenizer.pad_token_id, device)

        # 4. Calibrate
        gain, shift = calibrate(config, model, tokenizer, records, device)
        stage.say(
            f"calibrated: demonstrations average 0 (shift {shift:.3f}), SFT samples have deviation 1 (gain {gain:.3f})"
        )
        model.save_pretrained(str(stage.model))
        tokenizer.save_pretrained(str(stage.model))
        stage.finish(summary | {"gain": gain, "shift": shift})


def load_items(config: Config, stage: Stage, records: list[Ranking], tokenizer: Any) -> dict[str, list[Item]]:
    """Items of the train and dev splits. Raises: UserError where none is left to train on."""
    groups: dict[str, list[Ranking]] = {"train": [], "dev": [], "test": []}
    for record in records:
        groups[record_split(record, config.seed, fractions(config))].append(record)
    context = tokenizer.model_max_length
    room = min(config.rollout.max_new_tokens, context // 2)
    items = {}
    for split in ("train", "dev"):
        items[split], unpaired = make_items(groups[split], tokenizer, context, room)
        stage.say(f"{split}: {len(items[split]):,} prompts, {sum(len(i.rows) for i in items[split]):,} responses, "
                  f"{sum(len(i.pairs()) for i in items[split]):,} ordered pairs"
                  + (f"; {unpaired} rankings give no pair" if unpaired else ""))  # fmt: skip
    if not items["train"]:
        raise UserError("data.comparisons: no ranking with an ordered pair is left to train on: add comparisons")
    return items


def batches(items: list[Item], size: int, epochs: int, seed: int) -> Iterator[list[Item]]:
    """Prompts in batches, in an order that depends on (seed, epoch) only, so that a resumed run sees the same."""
    for epoch in range(epochs):
        order = list(range(len(items)))
        random.Random(f"reward-{seed}-{epoch}").shuffle(order)
        for start in range(0, len(order), size):
            yield [items[i] for i in order[start : start + size]]


def micro_batches(batch: list[Item], size: int) -> Iterator[list[Item]]:
    """Whole prompts, of similar length, with at most `size` responses together (but at least one prompt)."""
    part: list[Item] = []
    for item in sorted(batch, key=lambda item: max(map(len, item.rows))):
        if part and sum(len(i.rows) for i in part) + len(item.rows) > size:
            yield part
            part = []
        part.append(item)
    yield part


def score_items(model: Any, items: list[Item], pad: int, device: torch.device, calibrated: bool = False) -> Tensor:
    """Scores (N, K) of items with up to K answers, 0 where an item has fewer: one forward a response."""
    tokens, lengths = right_pad([row for item in items for row in item.rows], pad)
    flat = model(tokens.to(device), lengths.to(device), calibrated=calibrated)
    most = max(len(item.rows) for item in items)
    where = torch.tensor([i * most + j for i, item in enumerate(items) for j in range(len(item.rows))], device=device)
    return flat.new_zeros(len(items) * most).index_put((where,), flat).view(len(items), most)


def pad_weights(items: list[Item], device: torch.device) -> Tensor:
    """(N, K, K) pair weights of items, 0 where there is no answer."""
    most = max(len(item.rows) for item in items)
    weights = torch.zeros(len(items), most, most)
    for i, item in enumerate(items):
        k = len(item.rows)
        weights[i, :k, :k] = torch.tensor(item.weights())
    return weights.to(device)


def train(
    config: Config, stage: Stage, model: RewardModel, items: dict[str, list[Item]], pad: int, device: torch.device
) -> dict[str, float]:
    """The ranking loss over all prompts, `epochs` times; returns the held-out figures."""
    settings = config.reward
    steps = settings.epochs * -(-len(items["train"]) // settings.batch_prompts)
    accelerator = make_accelerator(device)
    optimizer = torch.optim.AdamW(decay_groups(model, settings.weight_decay), lr=settings.lr, betas=(0.9, 0.95))
    model, optimizer = accelerator.prepare(model, optimizer)
    first = 0
    if found := latest_checkpoint(stage.checkpoints, stage.say):
        load_training(found, {"model": accelerator.unwrap_model(model)}, optimizer)
        first = checkpoint_step(found)
        stage.say(f"resuming from step {first}")
    saved_at = stage.elapsed()
    with open_tracker(stage, first) as tracker, progress(steps, "reward", initial=first) as bar:
        for step, batch in enumerate(batches(items["train"], settings.batch_prompts, settings.epochs, config.seed), 1):
            if step <= first:
                continue
            lr = settings.lr * cosine_schedule(step - 1, steps, 0, settings.final_lr_fraction)
            sums = train_step(config, stage, accelerator, model, optimizer, batch, lr, pad, device)
            metrics = sums.reduce()
            if step % config.tracking.log_every == 0 or step == steps:
                tracker.log(metrics, step=step)
            bar.update(1, loss=metrics["reward/loss"], accuracy=metrics["reward/accuracy"])
            if stage.elapsed() - saved_at > config.checkpoints.every_seconds:
                save_checkpoint(
                    stage.checkpoints, step,
                    lambda path: save_training(path, {"model": accelerator.unwrap_model(model)}, optimizer, {}),
                    config.checkpoints.keep,
                )  # fmt: skip
                stage.note_progress()
                saved_at = stage.elapsed()
        held_out = {}
        if items["dev"]:
            held_out = evaluate_items(accelerator.unwrap_model(model), items["dev"], pad, device)
            tracker.log({f"eval/dev/{name}": value for name, value in held_out.items()}, step=steps)
            stage.say(f"held out: accuracy {held_out['accuracy']:.3f}, loss {held_out['loss']:.3f}")
    return held_out


def train_step(
    config: Config, stage: Stage, accelerator: Any, model: Any, optimizer: Any, batch: list[Item], lr: float, pad: int,
    device: torch.device,
) -> Sums:  # fmt: skip
    """One optimizer step on one batch of prompts; the mean is over the whole batch, however it is split."""
    model.train()
    sums = Sums()
    for part in micro_batches(batch, config.reward.micro_batch_responses):
        scores = score_items(model, part, pad, device)
        loss, figures = ranking_loss(scores, pad_weights(part, device), denominator=len(batch))
        refuse_nonfinite(stage, {"reward/loss": loss, "scores": scores}, {
            "tokens": right_pad([row for item in part for row in item.rows], pad)[0], "scores": scores})  # fmt: skip
        accelerator.backward(loss)
        sums.add("reward/loss", float(figures["loss_sum"]), float(figures["prompts"]))
        sums.add("reward/accuracy", float(figures["pairs_correct"]), float(figures["pairs"]))
        sums.add("reward/margin", float(figures["margin_sum"]), float(figures["pairs"]))
        real = torch.cat([scores[i, : len(item.rows)] for i, item in enumerate(part)]).detach()
        sums.add("reward/mean", real.sum().item(), real.numel())
        sums.add("reward/std", real.sum().item(), real.square().sum().item(), real.numel())
    norm = gradient_norm(model.parameters())
    refuse_nonfinite(stage, {"optim/grad_norm": norm}, {"tokens": right_pad(batch[0].rows, pad)[0]})
    accelerator.clip_grad_norm_(model.parameters(), config.reward.max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    sums.add("optim/grad_norm", norm.item())
    sums.add("optim/lr", lr)
    return sums


@torch.no_grad()
def evaluate_items(model: Any, items: list[Item], pad: int, device: torch.device) -> dict[str, float]:
    """Held-out {"loss", "accuracy", "margin"} of raw scores."""
    model.eval()
    sums = Sums()
    for part in micro_batches(items, 128):
        _, figures = ranking_loss(score_items(model, part, pad, device), pad_weights(part, device), denominator=1)
        sums.add("reward/loss", float(figures["loss_sum"]), float(figures["prompts"]))
        sums.add("reward/accuracy", float(figures["pairs_correct"]), float(figures["pairs"]))
        sums.add("reward/margin", float(figures["margin_sum"]), float(figures["pairs"]))
    return {name.removeprefix("reward/"): value for name, value in sums.reduce().items()}


@torch.no_grad()
def score_rows(model: Any, rows: list[list[int]], pad: int, device: torch.device, calibrated: bool = True) -> Tensor:
    """Scores (B,) of token lists, computed in groups of similar length."""
    model.eval()
    scores = torch.zeros(len(rows))
    for group in by_length([len(row) for row in rows], 128):
        tokens, lengths = right_pad([rows[i] for i in group], pad)
        scores[group] = model(tokens.to(device), lengths.to(device), calibrated=calibrated).float().cpu()
    return scores


def calibrate(
    config: Config, model: RewardModel, tokenizer: Any, records: list[Ranking], device: torch.device
) -> tuple[float, float]:
    """Set gain and shift of the model; returns (gain, shift).

    The shift is the mean raw score of the training demonstrations (Ouyang et al. 2022, section 3.5), the gain one over
    the standard deviation of the scores of SFT samples (Ziegler et al. 2019, section 2.1).
    """
    pad, context = tokenizer.pad_token_id, tokenizer.model_max_length
    demonstrations, _ = load_demonstrations(need_source(config, "demonstrations"), config.data.format)
    shares = fractions(config)
    written = [d for d in demonstrations if record_split(d, config.seed, shares) == "train"][:2000]
    encoded = encode_demonstrations(written, tokenizer, context)
    shift = score_rows(model, [e["prompt"] + e["response"] for e in encoded], pad, device, calibrated=False).mean()

    policy = load_policy(stage_folder(config, "sft") / "model").to(device)
    train = [r for r in records if record_split(r, config.seed, shares) == "train"]
    prompts = prompts_of(train)[: config.reward.calibration_samples]
    length = min(config.rollout.max_new_tokens, context // 2)
    fitted = [encode_prompt_within(tokenizer, prompt.prompt, context - length) for prompt in prompts]
    rows = [found[0] for found in fitted if found is not None]
    samples = sample(
        policy, rows, max_new_tokens=length, eos_token_id=tokenizer.eos_token_id, pad_token_id=pad, seed=config.seed,
        keys=[("calibrate", i) for i in range(len(rows))],
    )  # fmt: skip
    raw = score_rows(
        model, [p + r for p, r in zip(rows, samples.responses, strict=True)], pad, device, calibrated=False
    )
    deviation = raw.std(correction=0).item()
    if not deviation > 1e-6:
        raise UserError("reward: the model gives every SFT sample the same score, so there is nothing to optimise: "
                        "train it longer (reward.epochs, reward.lr) or on more comparisons")  # fmt: skip
    model.calibrate(gain=1.0 / deviation, shift=shift.item())
    return 1.0 / deviation, shift.item()
