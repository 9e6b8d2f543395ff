"""transformers' and TRL's Trainer for pretraining and SFT: on one process or several, with or without ZeRO.

The global batch and the losses are the same on any number of processes: a loss is a sum over ranks, divided by the
global number of labels. Checkpoints have the format of the other loops (`state.py`).
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Sampler, SequentialSampler
from transformers import TrainerCallback

from rlhf.config.precision import wants_bfloat16
from rlhf.errors import UserError
from rlhf.model.fused_loss import IGNORED
from rlhf.runs.metrics import find
from rlhf.runs.stage import Stage
from rlhf.system.interrupts import finish_step, request_stop, stop_requested
from rlhf.system.processes import Ranks, forget_alone, gather, process_count, rank, share
from rlhf.training.loop import StageLoop, gradient_norm, refuse_nonfinite
from rlhf.training.state import PlainState, put_random_state, put_weights, read_state, write_checkpoint
from rlhf.training.usage import training_flops, usage_metrics
from rlhf.training.zero import deepspeed_settings, need_deepspeed, zero_stage
from rlhf.training.zero_state import ZeroState, group_numbers

if TYPE_CHECKING:  # the base of the class below; importing it takes a second
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

TRAINER_STATE = "trainer_state.json"  # of a checkpoint: Trainer's own state


def split_batch(setting: str, rows: int, micro: int, processes: int) -> tuple[int, int]:
    """(rows per forward on one process, forwards per optimizer step), whose product with `processes` is `rows`.

    micro: the most rows per forward; it is lowered to a divisor. setting: what gives the rows, for the message.
    Raises: UserError if the rows do not divide among the processes.
    """
    if rows % processes:
        raise UserError(
            f"{setting}: {rows} rows per batch cannot be divided among {processes} processes: want a multiple of {processes}"
        )
    of_process = rows // processes
    micro = max(size for size in range(1, min(micro, of_process) + 1) if of_process % size == 0)
    return micro, of_process // micro


def shared_arguments(
    stage: Stage, device: torch.device, *, rows: int, micro: int, setting: str, steps: int, max_grad_norm: float
) -> dict[str, Any]:
    """The arguments that TrainingArguments and SFTConfig share. rows, micro, setting: as in `split_batch`."""
    config = stage.config
    need_deepspeed(config)
    micro, accumulation = split_batch(setting, rows, micro, process_count())
    bfloat16 = wants_bfloat16(config, device)
    sharding = None
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # of an earlier stage or a launcher: we pass our own settings
    if zero_stage(config):
        from rlhf.training.engine import import_deepspeed

        import_deepspeed(device)
        sharding = deepspeed_settings(
            config, bfloat16=bfloat16, micro_batch=micro, accumulation=accumulation, max_grad_norm=max_grad_norm
        )
    return {
        "output_dir": str(stage.checkpoints),
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": accumulation,
        "max_steps": steps,
        "max_grad_norm": max_grad_norm,
        "logging_steps": config.tracking.log_every,
        "save_strategy": "no",
        "seed": config.seed,
        "data_seed": config.seed,
        "disable_tqdm": True,
        "report_to": "none",
        "log_level": "error",
        "log_level_replica": "error",
        "use_cpu": device.type == "cpu",
        "bf16": bfloat16,
        "gradient_checkpointing": config.gradient_checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if config.gradient_checkpointing else None,
        "dataloader_pin_memory": device.type == "cuda",
        "deepspeed": sharding,
        "ddp_find_unused_parameters": False,
    }


def one_device(arguments: Any) -> Any:
    """The same TrainingArguments, for one device: a process that sees several GPUs and has no launcher would otherwise spread
    each batch over all of them (nn.DataParallel) and multiply the global batch."""
    arguments.device  # noqa: B018 (what counts the GPUs)
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


def with_spares(rows: Any, spares: int) -> Dataset:
    """A data set followed by rows that do not count in the loss, so that every process has the same number of micro-batches."""
    labels = rows[0]["labels"]
    ignored = torch.full_like(labels, IGNORED) if isinstance(labels, Tensor) else [IGNORED] * len(labels)
    return ConcatDataset([rows, [{**rows[0], "labels": ignored}] * spares])  # type: ignore[list-item]


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


class StageCallback(TrainerCallback):
    """Trainer's events as this project's metrics, progress and checkpoints.

    tokens_per_step: if it is fixed; otherwise the Trainer counts tokens.
    """

    def __init__(self, loop: StageLoop, loss_name: str, tokens_per_step: int | None = None):
        self.loop, self.loss_name, self.tokens_per_step = loop, loss_name, tokens_per_step
        self.logged_at = time.monotonic()
        self.logged_step = self.logged_tokens = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.logged_step, self.logged_tokens = state.global_step, self.tokens_seen(state)
        self.loop.saved_at = self.logged_at = time.monotonic()

    def tokens_seen(self, state: Any) -> int:
        """Tokens trained on so far, on all ranks."""
        return state.num_input_tokens_seen if self.tokens_per_step is None else state.global_step * self.tokens_per_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.loop.bar.update(1)
        due, stop = self.loop.after(state.global_step)
        if due:
            control.should_log = control.should_save = True  # logging comes before saving, so no step is lost
        if stop:
            request_stop()
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        metrics = {self.loss_name: logs["loss"], "optim/lr": logs.get("learning_rate", 0.0)}
        metrics |= {name: value for name, value in logs.items() if "/" in name and find(name)}  # a stage's own
        if "grad_norm" in logs:
            metrics["optim/grad_norm"] = float(logs["grad_norm"])
        tokens, now = self.tokens_seen(state), time.monotonic()
        done, seconds = tokens - self.logged_tokens, max(1e-9, now - self.logged_at)
        sequences = (state.global_step - self.logged_step) * args.train_batch_size * args.gradient_accumulation_steps
        sequences *= args.world_size
        if sequences:
            metrics |= {"time/tokens_per_s": done / seconds, "time/samples_per_s": sequences / seconds}
            flops = training_flops(kwargs["model"], done, done / sequences)
            metrics |= usage_metrics(self.loop.stage.config, args.device, flops, seconds, args.world_size)
        self.logged_step, self.logged_tokens, self.logged_at = state.global_step, tokens, now
        self.loop.tracker.log(metrics, step=state.global_step, tokens=tokens)
        self.loop.bar.update(0, loss=logs["loss"])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.loop.saved()


class StageTrainer(_Trainer):
    """Mixin for a Trainer: our optimizer and schedule, checks that values are finite, the same work on all processes.

    optimizer: makes the optimizer when the Trainer needs it. factor: on the learning rate, by step.
    """

    def __init__(
        self,
        *,
        stage: Stage,
        optimizer: Callable[[], torch.optim.Optimizer],
        factor: Callable[[int], float],
        **keywords: Any,
    ):
        from transformers import PrinterCallback

        self.stage, self._make_optimizer, self._factor = stage, optimizer, factor
        self._nats: Tensor | float = 0.0  # summed over all labels since the last log
        self._labels: list[int] = []  # labels of each step since then, over all ranks
        super().__init__(**keywords)
        self.remove_callback(PrinterCallback)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = self._own_optimizer = self._make_optimizer()
            self._groups = group_numbers(self.model, self.optimizer.param_groups)  # type: ignore[arg-type]
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Schedules our optimizer itself: ZeRO's wrapper reads the learning rates from it."""
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self._own_optimizer, self._factor)
        return self.lr_scheduler

    # --- checkpoints: ours instead of Trainer's, which are pickles under ZeRO ---------------------------------

    @property
    def _whole_state(self) -> PlainState | ZeroState:
        if not self.is_deepspeed_enabled:
            return PlainState(self.model, self._own_optimizer)  # type: ignore[arg-type]
        engine: Any = self.model_wrapped
        return ZeroState(
            self.model,  # type: ignore[arg-type]
            engine.optimizer,
            zero_stage(self.stage.config),
            self._groups,
            Ranks(self.args.device),
        )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Every rank calls it."""
        write_checkpoint(
            self.stage,
            self.state.global_step,
            self._whole_state.read(),
            {},
            more=lambda folder: self.state.save_to_json(str(folder / TRAINER_STATE)),
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Does nothing: the weights are loaded with the optimizer's state."""

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        if resume_from_checkpoint is not None:
            state, _ = read_state(Path(resume_from_checkpoint))
            self._whole_state.write(state)
            continue_schedule(self.lr_scheduler, self.state.global_step)  # type: ignore[arg-type]
        return prepared

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            put_random_state(Path(checkpoint))

    def get_train_dataloader(self) -> DataLoader:
        """As the Trainer's, but with spare rows instead of accelerate's repeated rows, which would count twice."""
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
            with_spares(data, spares),
            sampler=ThenSpares(order, rows, spares),
            batch_size=self.args.per_device_train_batch_size,
            collate_fn=self.data_collator,
            pin_memory=self.args.dataloader_pin_memory,
        )
        return self.accelerator.prepare(loader)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Raises: UserError if the loss of any process is not finite, before its backward, and saves the batch."""
        result = super().compute_loss(model, inputs, *args, **kwargs)
        self._stop_unless_finite({"loss": result[0] if isinstance(result, tuple) else result}, inputs)
        return result

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Raises: UserError if the gradient is not finite: before the step, or under ZeRO, which steps itself, after
        it and before anything is saved."""
        loss = super().training_step(model, inputs, *args, **kwargs)
        labels = int(kwargs.get("num_items_in_batch", args[0] if args else None) or 0)
        self._nats = self._nats + loss.double() * labels
        if self.accelerator.sync_gradients:
            self._labels.append(labels)
            norm: Any = gradient_norm(model.parameters())
            if self.is_deepspeed_enabled:
                norm = self.model_wrapped.get_global_grad_norm()  # type: ignore[union-attr,operator]
                norm = float("nan") if norm is None else norm
            self._stop_unless_finite({"gradient": norm}, inputs)
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The loss since the last log as a mean over labels; Trainer's is a mean of the steps' means."""
        if "loss" in logs:
            if len(set(self._labels)) > 1:
                ranks = Ranks(self.args.device)
                logs["loss"] = ranks.sum(self._nats) / ranks.count / sum(self._labels)
            self._nats, self._labels = 0.0, []
        super().log(logs, *args, **kwargs)

    def _stop_unless_finite(self, values: dict[str, Any], inputs: dict[str, Any]) -> None:
        """If a value is not finite on one process, all stop with the same message; the first such process saves its batch."""
        not_finite = not all(torch.isfinite(torch.as_tensor(v)).all() for v in values.values())
        if not Ranks(self.args.device).max(not_finite):
            return
        bad = gather(not_finite)
        message = ""
        if rank() == bad.index(True):
            batch = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
            try:
                refuse_nonfinite(self.stage, values, batch)
            except UserError as error:
                message = str(error)
        raise UserError(share(message, source=bad.index(True)))


def continue_schedule(schedule: torch.optim.lr_scheduler.LambdaLR, step: int) -> None:
    """Set the learning rates to those after `step` steps."""
    schedule.last_epoch = step
    rates = [base * factor(step) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates


def train(trainer: Any, loop: StageLoop, loss_name: str, tokens_per_step: int | None = None) -> None:
    """Trainer's loop, from a checkpoint if there is one.

    From a checkpoint of the last step Trainer would take one more step, so then only the weights are read.

    Raises: KeyboardInterrupt after a signal, once the current step has its checkpoint; UserError for a full disk.
    """
    trainer.add_callback(StageCallback(loop, loss_name, tokens_per_step))
    try:
        if loop.resume is not None and loop.first >= loop.total:
            put_weights(trainer.model, read_state(loop.resume)[0]["weights"])
            return
        with finish_step(loop.stage.name):
            if process_count() > 1:  # dropout differs among the processes; a checkpoint contains its own random state
                torch.manual_seed(trainer.args.seed + rank())
            trainer.train(resume_from_checkpoint=str(loop.resume) if loop.resume else None)
            if stop_requested():
                raise KeyboardInterrupt
    finally:
        forget_deepspeed()


def forget_deepspeed() -> None:
    """Unset the Trainer's DeepSpeed settings: with them transformers would divide each model that it loads under ZeRO-3."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    forget_alone()
