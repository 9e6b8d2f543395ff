"""PPO's checkpoints, and the model folders that it writes at its end."""

from pathlib import Path

from rlhf.config import Config
from rlhf.model.heads import RewardModel
from rlhf.ppo.setup import PpoRun
from rlhf.training.adapters import save_model, save_output
from rlhf.training.state import put_random_state, read_state, write_checkpoint


def save(run: PpoRun, update: int) -> None:
    """A checkpoint; every rank has to call it, and rank 0 writes."""
    state = run.engine.state()
    notes = {"tokens": run.tokens, "kl": run.kl.state_dict()}
    if run.ema is not None:
        average = run.ema.state_dict()
        notes["averaged_steps"] = run.ema.steps
        if state is not None:
            state["ema"] = average
    write_checkpoint(run.stage, update, state, notes, figure=figure_of(run.config, run.metrics))


def figure_of(config: Config, metrics: dict[str, float]) -> float | None:
    """The figure for checkpoints.keep_best: the held-out score less kl.coef times the held-out KL.

    kl.coef is the setting. With the current value of an adaptive coefficient, checkpoints would not be comparable.
    """
    if "eval/dev/scores" not in metrics:
        return None
    return metrics["eval/dev/scores"] - config.kl.coef * metrics["eval/dev/kl"]


def restore(run: PpoRun, folder: Path) -> None:
    """Read a checkpoint."""
    state, notes = read_state(folder)
    run.engine.restore(state)
    put_random_state(folder)
    if run.ema is not None:
        run.ema.load_state_dict(state["ema"], notes["averaged_steps"])
    run.kl.load_state_dict(notes["kl"])
    run.tokens = notes["tokens"]


def write_models(run: PpoRun) -> None:
    """The stage's output: `model` (the average if there is one, with adapters merged), and the critic. Every rank has to call it."""
    stage, tokenizer, model = run.stage, run.tokenizer, run.actor_critic
    if run.ema is None:
        save_output(model.policy, tokenizer, stage)
    else:
        save_output(model.policy, tokenizer, stage, "last")
        average = run.ema.state_dict()
        with run.ema.applied():
            save_output(model.policy, tokenizer, stage, average=average)
    if isinstance(model.critic, RewardModel):
        save_model(model.critic, stage.folder / "critic", stage.folder / "critic_adapters")
