"""One choice of PPO changed at a time: critic, whitening, epochs, clipping, ptx, KL control, calibration, averaging, baselines.

    python scripts/studies/details.py --out runs/details --seeds 1 2 3 --parents runs/seed-1 runs/seed-2 runs/seed-3 threads=1

Each cell is PPO on the parent's world, SFT model and reward model, evaluated on 256 dev prompts. Prints means over seeds with 95%
intervals by Student's t, and differences from the default, paired by seed; the picture shows the win rates.
"""

import statistics
from typing import Any

import harness
from harness import collect, draw, less, make_cells, over_seeds, parse, run

WITHOUT_CRITIC = ("ppo.responses_per_prompt=4", "ppo.critic_warmup_updates=0", "ppo.shared_critic=false")
CHOICES: harness.Choices = {
    "default": (),
    "critic_sft": ("ppo.critic=sft",),
    "critic_random": ("ppo.critic=random",),
    "no_whitening": ("ppo.whiten_advantages=false",),
    "epochs_1": ("ppo.epochs=1",),
    "epochs_4": ("ppo.epochs=4",),
    "no_clip": ("ppo.clip_range=null",),
    "no_clip_epochs_4": ("ppo.clip_range=null", "ppo.epochs=4"),
    "ptx": ("ppo.ptx_coef=1.0", "ppo.ptx_blocks_per_episode=0.25"),
    "adaptive_kl": ("kl.target=1.5", "kl.horizon=512"),
    "no_calibration": ("ppo.calibrated=false",),
    "no_average": ("ppo.ema_decay=null",),
    "reinforce": ("ppo.advantages=reinforce", "ppo.epochs=1", "ppo.clip_range=null", *WITHOUT_CRITIC[1:]),
    "rloo": ("ppo.advantages=rloo", *WITHOUT_CRITIC),
    "grpo": ("ppo.advantages=grpo", *WITHOUT_CRITIC, "kl.penalty=loss"),
}
TAKEN = ("world", "tokenizer", "pretrain", "sft", "label", "reward")
EVALUATION = ("evaluate.split=dev", "evaluate.prompts=256", "evaluate.best_of=0")
NAMES = {
    "win_rate": "win rate", "win_rate_greedy": "greedy", "gold": "gold", "correct": "`correct`", "kl": "KL",
    "score": "learned reward", "bpb": "bits per byte", "explained_var": "explained variance",
}  # fmt: skip
DIFFERENCES = {"win_rate": "win rate", "gold": "gold", "kl": "KL", "score": "learned reward",
               "gap": "learned less true gain", "bpb": "bits per byte"}  # fmt: skip


def figures(cell: harness.Cell) -> dict[str, float]:
    """The figures of a finished cell."""
    results, gold = cell.results(), cell.results()["gold"]
    last = harness.updates_of(cell.home)[-1]
    learned = results["reward_without_eos_rule"]
    found = {
        "win_rate": gold["win_rate_vs_sft"]["value"],
        "win_rate_greedy": gold["win_rate_greedy"]["value"],
        "gold": gold["mean_score"]["ppo"],
        "correct": gold["correct"]["ppo"]["value"],
        "kl": results["kl_to_sft_nats"],
        "score": learned["ppo"],
        "bpb": harness.cached(cell.home / "bits_per_byte.json", lambda: bits_per_byte(cell)),
    }
    # The learned gain beyond the true gain, both in standard deviations of SFT's answers.
    spread = statistics.pstdev(row["gold"]["sft"] for row in harness.rows(cell.home / "evaluate" / "samples.jsonl"))
    found["gap"] = learned["ppo"] - learned["sft"] - (found["gold"] - gold["mean_score"]["sft"]) / spread
    return found | ({"explained_var": last["val/explained_var"]} if "val/explained_var" in last else {})


def bits_per_byte(cell: harness.Cell) -> float:
    """Of the pretraining text that was held out, under the PPO model."""
    import rlhf
    from rlhf.config.compose import compose_config
    from rlhf.data.corpus import PackedCorpus
    from rlhf.stages.pretrain import held_out_loss

    loaded, corpus = rlhf.load(cell.home), PackedCorpus.load(cell.parent / "pretrain" / "corpus")
    blocks = corpus.blocks("heldout", loaded.tokenizer.model_max_length)
    config: Any = compose_config(list(cell.steps[0][1:]))
    return held_out_loss(config, loaded.policy("ppo"), blocks, loaded.tokenizer)["bpb"]


def compare(choices: harness.Choices, asked: Any) -> None:
    """Run the cells, then print the tables and draw the picture."""
    cells = run(make_cells(asked, choices, TAKEN, {"ppo": (), "evaluate": EVALUATION}), asked)
    found = collect(cells, figures)
    means, base = over_seeds(found), cells[0].name
    shown = {name: {key: row[key]["mean"] for key in row} for name, row in means.items()}
    harness.table(
        ["choice", *NAMES.values()], [[name, *(row.get(key) for key in NAMES)] for name, row in shown.items()]
    )
    changes = over_seeds(less(found, base)).items()
    lines = [[name, *(harness.show(row[key], sign="+") for key in DIFFERENCES)] for name, row in changes]
    harness.table([f"minus {base}", *DIFFERENCES.values()], lines)
    points = [(float(i), row["win_rate"]) for i, row in enumerate(means.values())]
    level = means[base]["win_rate"]["mean"]
    draw(asked.picture, {"win rate": points}, "choice", "win rate over SFT", list(means), line=False, level=level)


if __name__ == "__main__":
    compare(CHOICES, parse(__doc__))
