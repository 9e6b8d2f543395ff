"""Direct preference optimisation: the SFT model fine-tuned on ranked comparisons, without reward model and sampling.

    loss = - mean over prompts of 1/|P| sum over (w, l) in P of log sigmoid(r_w - r_l)
    r(y) = beta (log pi(y|x) - log pi_sft(y|x))        sums over the response's tokens, its end token included

which is the reward model's loss with the policy's own log-ratio as the score. The loop and the frozen reference are those
of TRL's DPOTrainer, the log-probs PPO's: a prompt is read once for its answers, and only their tokens are unembedded. A baseline for PPO.
Source: Rafailov et al. 2023, equation 7 and appendix B.
Differs: all K answers of a prompt are one batch element with one forward per answer, and each prompt's pairs weigh 1 together,
as in the reward model; the paper's data are single pairs. AdamW, not RMSprop.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.data.items import Item, token_encoder
from rlhf.data.prompts import encode_prompt_within
from rlhf.data.tokenizer import load_tokenizer
from rlhf.model.batching import right_pad
from rlhf.ops.ranking import ranking_loss
from rlhf.ppo.experience import response_logprobs
from rlhf.runs.folders import stage_folder
from rlhf.runs.metrics import Sums
from rlhf.runs.sources import hash_sources
from rlhf.runs.stage import Stage, open_stage
from rlhf.stages.reward import add_ranking_figures, load_items, load_rankings
from rlhf.system.processes import Ranks
from rlhf.training.adapters import add_adapters, save_output, share_weights
from rlhf.training.loop import open_loop
from rlhf.training.optim import cosine_schedule, decay_groups, make_adamw
from rlhf.training.setup import load_frozen, load_policy, set_up
from rlhf.training.trainer import StageTrainer, one_device, shared_arguments, train
from rlhf.training.zero import offloads, zero_stage


def run(config: Config) -> None:
    """Write runs/<run>/dpo/model."""
    with open_stage(config, "dpo", hash_sources(config, "dpo")) as stage:
        device = set_up(config)
        folder = stage_folder(config, "sft") / "model"
        tokenizer = load_tokenizer(folder)

        # 1. The training rankings of the reward model, as pairs of answers
        rankings, held_out = load_rankings(config, stage)
        records = [ranking for ranking in rankings if ranking.labeler not in held_out]
        context = tokenizer.model_max_length
        room = min(config.rollout.max_new_tokens, context // 2)
        items = load_items(config, stage, records, token_encoder(tokenizer, context, room))
        rows = {split: [make_row(item, tokenizer, context - room) for item in items[split]] for split in items}

        # 2. The SFT model, and a second one as the frozen reference
        model = load_policy(folder)
        reference = load_reference(config, model, folder, device)
        add_adapters(model, config, folder, device)
        trainer = make_trainer(stage, model, reference, tokenizer, rows["train"], device)

        # 3. Train
        with open_loop(stage, Ranks(device), trainer.args.max_steps) as loop:
            train(trainer, loop, "dpo/loss")
            save_output(model, tokenizer, stage)

            # 4. Held-out figures
            with inference(config, device):
                summary = held_out_figures(trainer, rows["dev"])
            if summary:
                loop.tracker.log({f"eval/dev/{name}": value for name, value in summary.items()}, step=loop.total)
                stage.say(f"held out: accuracy {summary['accuracy']:.3f}, loss {summary['loss']:.3f}")
        stage.finish(summary)


def load_reference(config: Config, model: Any, folder: Path, device: torch.device) -> Any:
    """The frozen SFT model: on the policy's own weights if only adapters train. Under ZeRO DeepSpeed casts it, in the trainer."""
    if config.lora.rank:
        return share_weights(model).requires_grad_(False)
    return load_policy(folder) if zero_stage(config) else load_frozen(config, folder, device)


def make_row(item: Item, tokenizer: Any, most: int) -> dict[str, Any]:
    """One prompt of the data set. most: maximum tokens of a prompt; the rest is cut from its left."""
    assert item.record is not None
    fitted = encode_prompt_within(tokenizer, item.record.prompt, most)
    assert fitted is not None  # else it would not be an item
    return {"prompt_length": len(fitted[0]), "answers": item.rows, "weights": item.weights().tolist()}


def make_collator(pad: int) -> Callable[[Sequence[dict[str, Any]]], dict[str, Tensor]]:
    """Batches of N prompts with R answers in all and at most K per prompt.

    input_ids and attention_mask (R, T), right-padded; prompt_lengths (R,) and response_mask (R, A) as `response_logprobs`
    wants them; places (R,) of the answers in an (N, K) matrix; weights (N, K, K) of 'i beats j'.
    """

    def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        most = max(len(row["answers"]) for row in rows)
        weights = torch.zeros(len(rows), most, most)
        for i, row in enumerate(rows):
            K = len(row["answers"])
            weights[i, :K, :K] = torch.tensor(row["weights"])
        tokens, lengths = right_pad([answer for row in rows for answer in row["answers"]], pad)
        starts = torch.tensor([row["prompt_length"] for row in rows for _ in row["answers"]])
        return {
            "input_ids": tokens,
            "attention_mask": (torch.arange(tokens.shape[1]) < lengths[:, None]).long(),
            "prompt_lengths": starts,
            "response_mask": torch.arange(int((lengths - starts).max())) < (lengths - starts)[:, None],
            "places": torch.tensor([i * most + j for i, row in enumerate(rows) for j in range(len(row["answers"]))]),
            "weights": weights,
        }

    return collate


def answer_with_logprobs(model: Any) -> Any:
    """The same model; a call with responses=(tokens, prompt_lengths, mask) now returns `response_logprobs`.

    The trainer wraps the model (autocast, DDP, ZeRO), and a wrapped model can only be called.
    """
    forward = model.forward

    @functools.wraps(forward)
    def answer(*arguments: Any, responses: tuple[Tensor, Tensor, Tensor] | None = None, **keywords: Any) -> Any:
        return forward(*arguments, **keywords) if responses is None else response_logprobs(model, *responses)[0]

    model.forward = answer
    return model


class PreferenceLoss:
    """Mixed into TRL's DPOTrainer, before it: every ordered pair of K answers, weighted as in the reward model."""

    def __init__(self, **keywords: Any):
        self.sums = Sums()  # since the last line of metrics, of this process
        super().__init__(**keywords)
        self.model_accepts_loss_kwargs = True

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        """The rows are tokens already."""
        return dataset

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Tensor]], device: torch.device) -> int:
        """Prompts of an optimizer step, over all processes."""
        of_process = sum(int(batch["weights"].flatten(1).any(1).sum()) for batch in batch_samples)
        return int(Ranks(device).sum(of_process))

    def score(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        """r (N, K) = beta (log pi - log pi_sft) of each answer, 0 if a prompt has fewer."""
        responses = inputs["input_ids"], inputs["prompt_lengths"], inputs["response_mask"]
        logp = model(responses=responses).sum(1)  # (R,)
        with torch.no_grad(), self.accelerator.autocast():  # type: ignore[attr-defined]
            logp_ref = self.ref_model(responses=responses).sum(1)  # type: ignore[attr-defined]
        ratios = self.beta * (logp - logp_ref)  # type: ignore[attr-defined]
        shape = inputs["weights"].shape[:2]
        return ratios.new_zeros(shape.numel()).index_put((inputs["places"],), ratios).view(shape)

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        loss, figures = ranking_loss(self.score(model, inputs), inputs["weights"], denominator=num_items_in_batch)
        add_ranking_figures(self.sums, "dpo", figures)
        return loss * Ranks(loss.device).count  # gradients are averaged over processes

    def log(self, logs: dict[str, float], *arguments: Any) -> None:
        if "loss" in logs:
            logs |= Ranks(self.args.device).merge(self.sums).reduce()  # type: ignore[attr-defined]
            self.sums = Sums()
        super().log(logs, *arguments)  # type: ignore[misc]


def make_trainer(
    stage: Stage, model: Any, reference: Any, tokenizer: Any, rows: list[dict[str, Any]], device: torch.device
) -> Any:
    """TRL's DPOTrainer over prompts with all their answers."""
    import datasets
    from trl import DPOConfig, DPOTrainer

    settings = stage.config.dpo
    steps = settings.epochs * -(-len(rows) // settings.batch_prompts)
    arguments = DPOConfig(
        beta=settings.beta,
        include_num_input_tokens_seen="non_padding",
        remove_unused_columns=False,
        **shared_arguments(
            stage,
            device,
            rows=settings.batch_prompts,
            micro=settings.micro_batch_prompts,
            setting=f"dpo.batch_prompts={settings.batch_prompts}",
            steps=steps,
            max_grad_norm=settings.max_grad_norm,
        ),
    )

    class DpoTrainer(StageTrainer, PreferenceLoss, DPOTrainer):
        loss_is_scaled_for_ga = True  # divided by the prompts of the whole batch, so that its parts add up

    on_host = offloads(stage.config)
    return DpoTrainer(
        stage=stage,
        optimizer=lambda: make_adamw(decay_groups(model, settings.weight_decay), lr=settings.lr, on_host=on_host),
        factor=lambda step: cosine_schedule(step, steps, settings.warmup_steps, settings.final_lr_fraction),
        model=answer_with_logprobs(model),
        ref_model=answer_with_logprobs(reference),
        args=one_device(arguments),
        train_dataset=datasets.Dataset.from_list(rows),
        data_collator=make_collator(tokenizer.pad_token_id),
        processing_class=tokenizer,
    )


def held_out_figures(trainer: Any, rows: list[dict[str, Any]]) -> dict[str, float]:
    """{"loss", "accuracy", "margin"} on held-out rows; empty without such rows."""
    trainer.model.eval()
    sums, size = Sums(), trainer.args.per_device_train_batch_size
    for start in range(0, len(rows), size):
        collated = trainer.data_collator(rows[start : start + size])
        batch = {name: tensor.to(trainer.args.device) for name, tensor in collated.items()}
        _, figures = ranking_loss(trainer.score(trainer.model, batch), batch["weights"], denominator=1)
        add_ranking_figures(sums, "dpo", figures)
    return {name.removeprefix("dpo/"): value for name, value in sums.reduce().items()}
