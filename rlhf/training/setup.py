"""What several stages share: devices and seeds, where data and models lie, and the callback of Trainer stages."""

import contextlib
import importlib
import io
import logging
import os
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import TrainerCallback

from rlhf.config import Config
from rlhf.errors import UserError, reason_of
from rlhf.interrupts import request_stop
from rlhf.model.loading import load_whole
from rlhf.processes import Ranks, connect, on_first_rank, wait_for_all
from rlhf.runs.checkpoints import (
    checkpoint_due,
    checkpoint_step,
    checkpoints,
    latest_checkpoint,
    prune_checkpoints,
    remove_checkpoint,
    seal,
)
from rlhf.runs.folders import Stage
from rlhf.runs.lineage import tracking_config
from rlhf.tokenizer import load_tokenizer, tokenizer_hash
from rlhf.tracking.progress import Progress
from rlhf.tracking.writers import Tracker, make_tracker
from rlhf.training.allocator import keep_freed_memory
from rlhf.training.loop import due_and_stop
from rlhf.training.reshard import note_launch
from rlhf.training.usage import training_flops, usage_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def set_up(config: Config) -> torch.device:
    """Threads, seeds and the device of this process, and its connection to the others of a launch."""
    be_quiet()
    # The setting has a new name from 5.23 on, which older ones lack.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.* is deprecated", category=FutureWarning)
    if config.threads:
        torch.set_num_threads(config.threads)
    transformers.set_seed(config.seed)
    device = choose_device(config)
    if device.type == "cpu":
        keep_freed_memory()
    connect(device)
    return device


def be_quiet() -> None:
    """No progress bars of libraries beside ours, and none of their notes below errors."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("accelerate.accelerator").setLevel(logging.ERROR)
    if not torch.cuda.is_available():  # DeepSpeed, which others import, says at length that it found no GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if os.environ.get("WANDB_MODE") == "offline":
        with contextlib.redirect_stdout(io.StringIO()):  # it prints that W&B is offline when it is imported
            importlib.import_module("transformers.integrations.integration_utils")


def choose_device(config: Config) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: torch sees no GPU here: use device=auto or device=cpu")
    wants_gpu = config.device in ("auto", "cuda") and torch.cuda.is_available()
    return torch.device("cuda" if wants_gpu else "cpu")


def open_tracker(stage: Stage, resume_step: int = 0) -> Tracker:
    config = stage.config
    return make_tracker(
        config.tracking.kind if stage.writes else "silent", folder=stage.folder, run=config.run, stage=stage.name,  # type: ignore[arg-type]
        config=tracking_config(stage.record("running")), resume_step=resume_step, project=config.tracking.project,
    )  # fmt: skip


def load_policy(folder: Path, **overrides: Any) -> Any:
    """A causal LM from a stage's model folder, in float32, in eval mode."""
    import rlhf.model  # noqa: F401 (registers our GPT with the Auto classes)

    be_quiet()
    try:
        loader = transformers.AutoModelForCausalLM
        model = load_whole(loader, str(folder), local_files_only=True, dtype=torch.float32, **overrides)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{folder}: not a readable model ({reason_of(error)}): run the stage that writes it again"
        ) from error
    return model.eval()


def check_tokenizer(parent: Path, tokenizer: "PreTrainedTokenizerFast") -> None:
    """Invariant 9. Raises: UserError where the model in a stage's folder was trained with another tokenizer."""
    if tokenizer_hash(load_tokenizer(parent / "model")) != tokenizer_hash(tokenizer):
        raise UserError(
            f"{parent / 'model'}: its tokenizer or chat template is not that of this run: train {parent.name} anew, "
            f"or point parents.{parent.name} at a run that shares the tokenizer"
        )


class StageCallback(TrainerCallback):
    """Trainer's events as this project's metrics, progress and sealed checkpoints.

    A checkpoint is due when `checkpoints.every_seconds` have passed, and when a signal asks the stage to stop. The
    Trainer writes it; the manifest comes last, and `resume` trusts nothing without one.
    """

    def __init__(self, stage: Stage, tracker: Tracker, bar: Progress, loss_name: str, tokens_per_step: int | None):
        self.stage, self.tracker, self.bar = stage, tracker, bar
        self.loss_name, self.tokens_per_step = loss_name, tokens_per_step
        self.saved_at = self.logged_at = time.monotonic()
        self.logged_step = self.logged_tokens = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.logged_step, self.logged_tokens = state.global_step, self.tokens_seen(state)
        self.saved_at = self.logged_at = time.monotonic()

    def tokens_seen(self, state: Any) -> int:
        """Tokens trained on so far, on all ranks."""
        return state.num_input_tokens_seen if self.tokens_per_step is None else state.global_step * self.tokens_per_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.update(1)
        due = checkpoint_due(self.stage.config.checkpoints, state.global_step, time.monotonic() - self.saved_at)
        due, stop = due_and_stop(Ranks(args.device), due)
        if due:
            control.should_log = control.should_save = True  # the log comes first, so that no step is lost
        if stop:
            request_stop()
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        metrics = {self.loss_name: logs["loss"], "optim/lr": logs.get("learning_rate", 0.0)}
        if "grad_norm" in logs:
            metrics["optim/grad_norm"] = float(logs["grad_norm"])
        tokens, now = self.tokens_seen(state), time.monotonic()
        done, seconds = tokens - self.logged_tokens, max(1e-9, now - self.logged_at)
        sequences = (state.global_step - self.logged_step) * args.train_batch_size * args.gradient_accumulation_steps
        sequences *= args.world_size
        if sequences:
            metrics |= {"time/tokens_per_s": done / seconds, "time/samples_per_s": sequences / seconds}
            flops = training_flops(kwargs["model"], done, done / sequences)
            metrics |= usage_metrics(self.stage.config, args.device, flops, seconds, args.world_size)
        self.logged_step, self.logged_tokens, self.logged_at = state.global_step, tokens, now
        self.tracker.log(metrics, step=state.global_step, tokens=tokens)
        self.bar.update(0, loss=logs["loss"])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir)
        wait_for_all()  # each process has written its part
        if self.stage.writes:
            note_launch(folder / f"checkpoint-{state.global_step}", self.stage)
            seal(folder / f"checkpoint-{state.global_step}")
            prune_checkpoints(folder, state.global_step, self.stage.config.checkpoints)
        wait_for_all()
        self.stage.note_progress()
        self.saved_at = time.monotonic()


def newest_checkpoint(stage: Stage) -> Path | None:
    """The checkpoint to resume from: the newest whole one. Damaged ones are named and, like unfinished ones, removed."""
    newest = on_first_rank(lambda: latest_checkpoint(stage.checkpoints, stage.say))
    for path in checkpoints(stage.checkpoints) if stage.writes else []:
        if newest is None or checkpoint_step(path) > checkpoint_step(newest):
            remove_checkpoint(path)
    if newest is not None:
        stage.say(f"resuming from step {checkpoint_step(newest)}")
    return newest
