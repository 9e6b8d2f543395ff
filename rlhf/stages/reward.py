"""Step 2: the reward model on ranked comparisons.

loss = - mean over prompts of 1/|P| sum over (w, l) in P of log sigmoid(r_w - r_l), with all K answers of a prompt
in one batch element (Ouyang et al. 2022, equation 1). Then calibration: demonstrations average 0, SFT samples have
standard deviation 1. The model is the SFT trunk with a scalar head, or any text classifier (`reward.model`).
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.config.setting import listed
from rlhf.data.chat_template import response_text
from rlhf.data.encoding import Encode, Item, check_labelers, fitting_prompts, join_rankings, row_limit
from rlhf.data.reading import prompts_of
from rlhf.data.records import Demonstration, Ranking
from rlhf.data.splits import record_half
from rlhf.engines.sampling import make_sampler
from rlhf.errors import UserError
from rlhf.evaluation import scoring
from rlhf.evaluation.audit import Audited, audit_reward_model, decide, describe_audit
from rlhf.evaluation.policies import room_for
from rlhf.model.batching import joins_rows
from rlhf.model.classifier import TextRewardModel
from rlhf.model.interface import Episodes, score, unwrapped
from rlhf.ops.fast import return_freed_memory
from rlhf.ops.ranking import ranking_loss
from rlhf.ppo.rewards import load_model_reward
from rlhf.runs import sources
from rlhf.runs.folders import earlier_reward, stage_folder
from rlhf.runs.metric_table import Sums
from rlhf.runs.progress import Progress
from rlhf.runs.stage import Stage
from rlhf.system.files import write_json
from rlhf.training.adapters import add_adapters, save_output
from rlhf.training.batches import Batches, Objective, evaluate_items, put, shuffled_order, trained
from rlhf.training.divided import load_reward, reward_model_on
from rlhf.training.engine import Engine, make_engine
from rlhf.training.loop import newest_checkpoint
from rlhf.training.setup import load_frozen, parent_model, running
from rlhf.training.state import gathered_state, put_weights


def run(config: Config) -> None:
    """Write runs/<run>/reward/model, calibrated."""
    train_reward_model(config, "reward")


def train_reward_model(config: Config, name: str) -> None:
    """Train and measure the reward model of a stage by config.reward."""
    with running(config, name) as (stage, device):
        folder, tokenizer = parent_model(config, "sft")
        others = [sources.reward_folder(config, run, f"{name}.audit_with") for run in listed(config.reward.audit_with)]

        # 1. The rankings to train on, and the demonstrations to calibrate on
        labelled, records, held_out = load_rankings(config, stage)
        demonstrations = training_demonstrations(config)

        # 2. The SFT model without its unembedding, plus a scalar head; or a classifier with its own tokenizer
        start = earlier_reward(config) if name == "reward" else None
        model = make_model(config, device, start)
        counts: Counter[str] = Counter()
        items = load_items(stage, records, scoring.item_encoder(config, model, tokenizer, counts), counts)

        # 3. Train: with reward.fit_head first only the head; then all weights, or with lora.rank adapters and the head; then calibrate
        fit_before_training(stage, model, items["train"], tokenizer.pad_token_id, device)
        add_adapters(model, config, folder)
        settings = config.reward
        later = config.round.later_reward_epochs
        if name == "reward" and start is None and config.rounds > 1 and later:
            stage.say("round.later_reward_epochs: not used with lora.rank or reward.model: trained from the start")
        engine = make_engine(config, model, settings, device)
        epochs = settings.epochs if start is None or later is None else later
        batches = Batches(items["train"], settings.batch_prompts, shuffled_order(f"{name}-{config.seed}"))
        objective = make_objective(config, engine)
        evaluate = partial(evaluate_items, config, engine, objective, items["dev"])
        look = {"evaluate": evaluate if items["dev"] else None, "looks": settings}
        with trained(stage, engine, batches, objective, epochs, settings, averages=False, **look) as loop:
            with inference(config, device):
                gain, shift = calibrate(config, engine, tokenizer, records, demonstrations)
            return_freed_memory()
            write_model(model, tokenizer, stage)

            # 4. Held-out figures
            summary = evaluate()
            by_length, _ = scoring.pairs_by_length(items["dev"])
            bound = {"length_baseline": scoring.accuracy(by_length)["value"]} if summary else {}
            loop.log_held_out(summary | bound)
            loop.tracker.log({"calibration/gain": gain, "calibration/shift": shift}, step=loop.total)
        zero = "demonstrations average 0" if demonstrations else "no demonstrations: SFT samples average 0"
        stage.say(f"calibrated: {zero} (shift {shift:.3f}), SFT samples have deviation 1 (gain {gain:.3f})")

        # 5. Whether it can be trusted
        if config.reward.audit:
            with inference(config, device):
                rewards = [load_model_reward(config, other, tokenizer, device) for other in others]
                models = Audited(engine, load_frozen(config, folder, device), tokenizer, device, rewards)
                audit = audit_reward_model(config, models, labelled, held_out)
            verdict = decide(audit)
            stage.say(*(f"audit: {line}" for line in describe_audit(audit, verdict)))
            if stage.writes:  # the stage's hash does not cover it: it changes no result
                write_json(stage.folder / "audit.json", audit._asdict() | {"verdict": verdict})
        stage.finish(summary | {"gain": gain, "shift": shift})


def write_model(model: Any, tokenizer: Any, stage: Stage) -> None:
    """Write the stage's model folder. All processes must call it."""
    if not model.reads_text:
        return save_output(model, tokenizer, stage)
    state = gathered_state(model)  # in bfloat16 under ZeRO: the optimizer's float32 weights
    if state is not None:
        put_weights(model.float(), state)
    if stage.writes:
        model.save_pretrained(str(stage.model))


def load_rankings(config: Config, stage: Stage) -> tuple[list[Ranking], list[Ranking], set[str]]:
    """All rankings of data.comparisons, those to train on, and the held-out labelers. Raises: UserError for an unknown labeler."""
    records = sources.read_comparisons(config, stage.say)
    held_out = scoring.held_out_labelers(config, records)
    known = [record for record in records if record.labeler not in held_out]
    check_labelers("reward.labeler_weights", list(config.reward.labeler_weights or {}), known)
    return records, known, held_out


def make_model(config: Config, device: torch.device, start: Path | None = None) -> Any:
    """The model to train: that of another reward stage (`start`), or by reward.model."""
    settings = config.reward
    if settings.fit_head:  # which reads the trunk's features before the engine exists: no weight is divided yet
        config = replace(config, deepspeed="none")
    if start is not None:
        model: Any = load_reward(config, start / "model", device)
        model.calibrate(1.0, 0.0)  # the ranking loss takes scores without the calibration
        return model
    if settings.model is not None:
        return TextRewardModel.from_base(settings.model)
    model = reward_model_on(config, stage_folder(config, "sft") / "model", device, settings.layers)
    model.config.read_tokens = settings.read_tokens
    return model


def fit_before_training(stage: Stage, model: Any, items: list[Item], pad: int, device: torch.device) -> None:
    """With reward.fit_head, fit the head on the frozen trunk; a resumed run has its head in the checkpoint."""
    if not stage.config.reward.fit_head or newest_checkpoint(stage):
        return
    nn.Module.to(model, device)
    with inference(stage.config, device):
        features = scoring.read_features(model, items, pad, device)
    fit = scoring.fit_head(model.head, features, items, model.mix)
    validated = f"cross-validated accuracy {fit['accuracy']:.3f}, loss {fit['loss']:.3f}"
    stage.say(f"head fitted on the frozen trunk: {validated}, weight decay {fit['decay']:g}")


def load_items(stage: Stage, records: list[Ranking], encode: Encode, counts: Counter[str]) -> dict[str, list[Item]]:
    """Items of the train and dev splits, of data.half of the training prompts. counts: of what `encode` has cut."""
    config, half = stage.config, stage.config.data.half
    splits = {split: sources.in_split(config, records, split) for split in ("train", "dev")}
    if half is not None:
        half = 3 - half if stage.name == "judge" else half
        shared = sources.beginnings(config, records)
        splits["train"] = [r for r in splits["train"] if record_half(r, config.data.split_seed, shared) == half]
        stage.say(f"train: half {half} of the prompts")
    items = {}
    for split, rankings in splits.items():
        items[split], unpaired = join_rankings(rankings, encode, config.reward.labeler_weights)
        responses = sum(len(item.rows) for item in items[split])
        pairs = sum(len(item.pairs()) for item in items[split])
        none = f"; {unpaired} rankings give no pair" if unpaired else ""
        stage.say(f"{split}: {len(items[split]):,} prompts, {responses:,} responses, {pairs:,} ordered pairs{none}")
    if counts.total():
        cut = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()) if count)
        stage.say(f"cut to data.max_tokens={config.data.max_tokens} and the context: {cut}")
    stage.counts |= counts
    if not items["train"]:
        raise UserError("data.comparisons: no ranking with an ordered pair is left to train on: add comparisons")
    return items


def make_objective(config: Config, engine: Engine) -> Objective[Item]:
    """The mean ranking loss over the prompts of a batch."""

    def loss_of(part: list[Item], count: int, sums: Sums) -> tuple[Tensor, dict[str, Tensor]]:
        inputs = engine.module.collate([row for item in part for row in item.rows])
        loss, scores = item_loss(part, engine(**put(inputs, engine.device), calibrated=False), count, sums, "reward")
        real = torch.cat([scores[i, : len(item.rows)] for i, item in enumerate(part)]).detach()
        sums.add("reward/mean", real.sum().item(), real.numel())
        sums.add("reward/std", real.sum().item(), real.square().sum().item(), real.numel())
        return loss, inputs | {"scores": scores}

    most, joined = config.reward.micro_batch_responses, joins_rows(engine.module)
    return Objective(lambda item: item.rows, loss_of, most, length=scoring.item_length, joined=joined)


def item_loss(
    items: list[Item], scores: Tensor, count: int, sums: Sums, stage: str, **shape: float
) -> tuple[Tensor, Tensor]:
    """`ranking_loss` of the scores (R,) of all answers, over `count` prompts, and the scores by item (N, K)."""
    scores = scoring.by_item(items, scores)
    loss, figures = ranking_loss(scores, scoring.pad_weights(items, scores.device), denominator=count, **shape)
    sums.add(f"{stage}/loss", float(figures["loss_sum"]), float(figures["prompts"]))
    sums.add(f"{stage}/accuracy", float(figures["pairs_correct"]), float(figures["pairs"]))
    sums.add(f"{stage}/margin", float(figures["margin_sum"]), float(figures["pairs"]))
    return loss, scores


def training_demonstrations(config: Config) -> list[Demonstration]:
    """The demonstrations of the training split; none if none are given. Raises: UserError if all are held out."""
    if sources.data_source(config, "demonstrations") is None:
        return []
    demonstrations = sources.in_split(config, sources.read_demonstrations(config), "train")
    if not demonstrations:
        raise UserError("data.demonstrations: none is in the training split, to calibrate the reward model: add some")
    return demonstrations


def calibrate(
    config: Config, model: Any, tokenizer: Any, records: list[Ranking], demonstrations: list[Demonstration]
) -> tuple[float, float]:
    """Set gain and shift of the model; returns both.

    The shift is the mean raw score of the demonstrations (Ouyang et al. 2022, section 3.5), without any that of SFT
    samples; the gain one over the standard deviation of the scores of SFT samples (Ziegler et al. 2019, section 2.1).
    `tokenizer` is the policy's; of `records` only the prompts of the training split that fit the context are used, not
    the judgements.
    """
    bare = unwrapped(model)
    prompts = prompts_of(sources.in_split(config, records, "train"))
    prompts = sources.sample_prompts(config, prompts, config.reward.calibration_samples)
    context = row_limit(config, tokenizer)
    with Progress(len(demonstrations) + 2 * len(prompts), "reward: calibration", unit="row") as bar:
        rows = bare.demonstration_rows(demonstrations, tokenizer, context)
        written = score(model, rows, calibrated=False) if rows else None
        bar.update(len(demonstrations))
        policy = load_frozen(config, stage_folder(config, "sft") / "model", next(bare.parameters()).device)
        length, room = room_for(context, config.rollout.max_new_tokens)
        fitting = list(fitting_prompts(tokenizer, prompts, room))
        prompt_ids = [ids for _, ids, _ in fitting]
        keys = [("calibrate", i) for i in range(len(prompt_ids))]
        samples = make_sampler(config, policy, tokenizer, max_new_tokens=length).sample(prompt_ids, keys)
        bar.update(len(prompts))
        texts = [response_text(tokenizer, ids) for ids in samples.responses]
        episodes = Episodes([record for record, _, _ in fitting], prompt_ids, samples.responses, texts, samples.ended)
        raw = score(model, bare.rows(episodes), calibrated=False)
        bar.update(len(prompts))
    shift = (raw if written is None else written).mean().item()
    deviation = raw.std(correction=0).item()
    if not deviation > 1e-6:
        raise UserError("reward: every SFT sample has the same score: train it longer, or on more comparisons")
    bare.calibrate(gain=1.0 / deviation, shift=shift)
    return 1.0 / deviation, shift
