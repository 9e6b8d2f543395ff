"""transformers' Trainer and TRL's as pretraining and SFT use them: one process or several, plain or under ZeRO.

The global batch is the same on any number of processes, and so are the losses: sums over ranks, divided by the global
number of labels. Not here: our own loops (`engine.py`), resuming on other processes (`reshard.py`).
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler
from transformers import TrainerCallback

from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.interrupts import finish_step, stop_requested
from rlhf.processes import Ranks, forget_alone, gather, process_count, rank, share
from rlhf.runs.checkpoints import checkpoint_step
from rlhf.runs.folders import Stage
from rlhf.training.gather import gathered_state, save_model_checked
from rlhf.training.loop import gradient_norm, refuse_nonfinite
from rlhf.training.reshard import fitting_checkpoint
from rlhf.training.setup import StageCallback
from rlhf.training.zero import deepspeed_settings, need_deepspeed, wants_bfloat16, zero_stage

if TYPE_CHECKING:  # what the class below is mixed into; importing it takes a second
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

IGNORED = -100  # the label of a token that the loss leaves out


def split_batch(setting: str, rows: int, micro: int, processes: int) -> tuple[int, int]:
    """(rows a forward on one process, forwards an optimizer step), whose product with `processes` is `rows`.

    micro: the most rows a forward; it is lowered to a divisor. setting: what gives the rows, for the message.
    Raises: UserError where the rows do not divide among the processes.
    """
    if rows % processes:
        raise UserError(
            f"{setting}: {rows} rows a batch do not divide among {processes} processes: want a multiple of {processes}"
        )
    own = rows // processes
    micro = max(size for size in range(1, min(micro, own) + 1) if own % size == 0)
    return micro, own // micro


def shared_arguments(
    config: Config, stage: Stage, device: torch.device, *, rows: int, micro: int, setting: str, steps: int,
    max_grad_norm: float,
) -> dict[str, Any]:  # fmt: skip
    """What TrainingArguments and SFTConfig have in common. rows, micro, setting: as in `split_batch`."""
    need_deepspeed(config)
    micro, accumulation = split_batch(setting, rows, micro, process_count())
    bfloat16 = wants_bfloat16(config, device)
    sharding = None
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # of an earlier stage or a launcher: our settings decide
    if zero_stage(config):
        from rlhf.training.engine import import_deepspeed

        import_deepspeed(device)
        sharding = deepspeed_settings(
            config, bfloat16=bfloat16, micro_batch=micro, accumulation=accumulation, max_grad_norm=max_grad_norm
        )
    return {
        "output_dir": str(stage.checkpoints), "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": accumulation, "max_steps": steps, "max_grad_norm": max_grad_norm,
        "logging_steps": config.tracking.log_every, "save_strategy": "no", "seed": config.seed, "data_seed": config.seed,
        "disable_tqdm": True, "report_to": "none", "log_level": "error", "log_level_replica": "error",
        "use_cpu": device.type == "cpu", "bf16": bfloat16, "gradient_checkpointing": config.gradient_checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if config.gradient_checkpointing else None,
        "dataloader_pin_memory": device.type == "cuda", "deepspeed": sharding, "ddp_find_unused_parameters": False,
    }  # fmt: skip


class WithSpares(Dataset):
    """A data set, followed by rows that count in no loss, so that every process has as many micro-batches."""

    def __init__(self, rows: Sequence[dict[str, Any]] | Dataset, spares: int):
        self.rows, self.spares = rows, spares

    def __len__(self) -> int:
        return len(self.rows) + self.spares  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index < len(self.rows):  # type: ignore[arg-type]
            return self.rows[index]
        row = self.rows[0]
        labels = row["labels"]
        ignored = torch.full_like(labels, IGNORED) if isinstance(labels, Tensor) else [IGNORED] * len(labels)
        return {**row, "labels": ignored}


class ThenSpares(Sampler[int]):
    """The order of another sampler, and the spare rows at the end of each epoch."""

    def __init__(self, sampler: Any, rows: int, spares: int):
        self.sampler, self.rows, self.spares = sampler, rows, spares

    def __len__(self) -> int:
        return self.rows + self.spares

    def __iter__(self) -> Iterator[int]:
        yield from self.sampler
        yield from range(self.rows, self.rows + self.spares)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


class StageTrainer(_Trainer):
    """Mixed into a Trainer: our optimizer and schedule, steps only on what is finite, equal work for all processes.

    optimizer: makes it, once the Trainer wants it (DeepSpeed decides when). factor: on the learning rate, by step.
    """

    def __init__(
        self, *, stage: Stage, optimizer: Callable[[], torch.optim.Optimizer], factor: Callable[[int], float],
        callback: StageCallback, **keywords: Any,
    ):  # fmt: skip
        from transformers import PrinterCallback

        self.stage, self._make_optimizer, self._factor = stage, optimizer, factor
        super().__init__(callbacks=[callback], **keywords)
        self.remove_callback(PrinterCallback)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = self._own_optimizer = self._make_optimizer()
            groups = self._own_optimizer.param_groups
            self._own_settings = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in groups]
        return self.optimizer

    def mend_optimizer(self) -> None:
        """Undo what loading a universal checkpoint under ZeRO-3 does to AdamW.

        It gives all groups the first one's settings, weight decay among them, and one tensor to count their steps, which
        each group then raises.
        """
        for group, settings in zip(self._own_optimizer.param_groups, self._own_settings, strict=True):
            group.update(settings)
        for state in self._own_optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].clone()

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """On our optimizer itself: ZeRO's wrapper reads the learning rates from it."""
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self._own_optimizer, self._factor)
        return self.lr_scheduler

    def get_train_dataloader(self) -> DataLoader:
        """As the Trainer's, but for spare rows in the place of accelerate's repeated ones, which would count twice."""
        together = self.args.per_device_train_batch_size * process_count()
        data: Any = self.train_dataset
        rows = len(data)
        spares = -rows % together
        if process_count() == 1 or not spares:
            return super().get_train_dataloader()
        from accelerate.data_loader import SeedableRandomSampler

        order: Sampler[int] = SequentialSampler(range(rows))
        if self.args.train_sampling_strategy == "random":
            order = SeedableRandomSampler(range(rows), data_seed=self.args.data_seed)
        loader = DataLoader(
            WithSpares(data, spares), sampler=ThenSpares(order, rows, spares),
            batch_size=self.args.per_device_train_batch_size, collate_fn=self.data_collator,
            pin_memory=self.args.dataloader_pin_memory,
        )  # fmt: skip
        return self.accelerator.prepare(loader)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Raises: UserError where the loss of any process is not finite, before its backward, and saves the batch."""
        found = super().compute_loss(model, inputs, *args, **kwargs)
        self._stop_unless_finite({"loss": found[0] if isinstance(found, tuple) else found}, inputs)
        return found

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Raises: UserError where the gradient is not finite: before the step, or under ZeRO, which steps itself, after
        it and before anything is saved."""
        loss = super().training_step(model, inputs, *args, **kwargs)
        if self.accelerator.sync_gradients:
            norm: Any = gradient_norm(model.parameters())
            if self.is_deepspeed_enabled:
                norm = self.model_wrapped.get_global_grad_norm()  # type: ignore[union-attr,operator]
                norm = float("nan") if norm is None else norm
            self._stop_unless_finite({"gradient": norm}, inputs)
        return loss

    def _stop_unless_finite(self, values: dict[str, Any], inputs: dict[str, Any]) -> None:
        """Every process stops where one must, with the same message; the first such one saves its batch."""
        mine = not all(torch.isfinite(torch.as_tensor(v)).all() for v in values.values())
        if not Ranks(self.args.device).max(mine):
            return
        bad = gather(mine)
        message = ""
        if rank() == bad.index(True):
            batch = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
            try:
                refuse_nonfinite(self.stage, values, batch)
            except UserError as error:
                message = str(error)
        raise UserError(share(message, source=bad.index(True)))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Whole weights, read back after they are written. All processes must call it."""
        model: Any = self.model
        save_model_checked(model, Path(output_dir or self.stage.checkpoints), gathered_state(model))


class _MendAfterLoading(TrainerCallback):
    """Trainer loads a checkpoint right before it begins."""

    def __init__(self, trainer: StageTrainer):
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.mend_optimizer()


def train(trainer: Any, resume: Path | None, steps: int) -> None:
    """Trainer's loop, from a checkpoint if there is one.

    From a checkpoint of the last step Trainer would take one step more, so that only the weights are read then.

    Raises: KeyboardInterrupt after a signal, once the step under way has its checkpoint; UserError for a full disk, and for
    a checkpoint that this launch cannot go on from.
    """
    try:
        if resume is not None and checkpoint_step(resume) >= steps:
            load_model(trainer.model, str(resume / "model.safetensors"))
            return
        trainer.stage.plan(steps)
        with fitting_checkpoint(trainer.stage, resume, trainer.args) as fitting, finish_step(trainer.stage.name):
            if process_count() > 1:  # so that dropout differs among the processes; a checkpoint brings its own state
                torch.manual_seed(trainer.args.seed + rank())
            if fitting != resume:
                trainer.add_callback(_MendAfterLoading(trainer))
            trainer.train(resume_from_checkpoint=str(fitting) if fitting else None)
            if stop_requested():
                raise KeyboardInterrupt
    finally:
        forget_deepspeed()


def forget_deepspeed() -> None:
    """The Trainer's settings of DeepSpeed no longer hold: under ZeRO-3 transformers would divide each model that it loads."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    forget_alone()


def save_output(model: Any, tokenizer: Any, stage: Stage) -> None:
    """The stage's model folder: whole weights, read back, and the tokenizer. All processes must call it."""
    state = gathered_state(model)
    save_model_checked(model, stage.model, state)
    if stage.writes:
        tokenizer.save_pretrained(str(stage.model))
