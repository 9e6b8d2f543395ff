"""An encoder of our own as reward model beside a causal one, on the gold world, at equal parameters and pretraining tokens.

    python scripts/studies/encoders.py --out runs/encoders --parents runs/gold-0 runs/gold-1 runs/gold-2 experiment=gold rounds=1 threads=1

A parent is a run with finished labels. Its own pretrained model is the causal one; the encoders are pretrained on its corpus with its
tokenizer, for as many tokens. Then a reward model is fine-tuned from each as a text classifier (reward.model), beside the recipe's own
on the SFT model's trunk, and PPO runs against it.
"""

from pathlib import Path

from harness import Cell, collect, less, make_cells, parse, print_means, read, run
from safetensors import safe_open

ENCODER = ("model.attention=bidirectional",)
KINDS = {
    "masked": ENCODER,
    "masked_next": (*ENCODER, "pretrain.pairs=next", "pretrain.isolate_documents=false"),
    "masked_order": (*ENCODER, "pretrain.pairs=order", "pretrain.isolate_documents=false"),
}
TAKEN = ("world", "tokenizer", "pretrain", "sft", "label")
STEPS = {"reward": (), "ppo": (), "evaluate": ("evaluate.best_of=0",)}


def figures(cell: Cell) -> dict[str, float]:
    """What the reward model and the policy trained against it are worth."""
    results, attacks = cell.results(), read(cell.home / "reward" / "audit.json")["attacks"]
    flips = [row["flips"]["value"] for row in attacks if row["flips"] is not None]
    with safe_open(cell.home / "reward" / "model" / "model.safetensors", "pt") as file:
        parameters = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 (it is no dict)
    return {
        "thousand parameters": parameters / 1000,
        "pair accuracy": results["reward_model"]["accuracy"]["value"],
        "pairs that an attack flips, mean": sum(flips) / len(flips),
        "worst attack": max(flips),
        "gold win rate, PPO over SFT": results["gold"]["win_rate_vs_sft"]["value"],
        "gold score of PPO": results["gold"]["mean_score"]["ppo"],
    }


def main() -> None:
    asked = parse(__doc__)
    bases = run(make_cells(asked, KINDS, TAKEN[:2], {"pretrain": ()}), asked)

    def choices(seed: int, parent: Path) -> dict[str, tuple[str, ...]]:
        folders = {"causal": parent, **{base.name: base.home for base in bases if base.seed == seed}}
        models = {name: (f"reward.model='{home / 'pretrain' / 'model'}'",) for name, home in folders.items()}
        return {f"reward_{name}": more for name, more in {**models, "sft_trunk": ()}.items()}

    by_cell = collect(run(make_cells(asked, choices, TAKEN, STEPS), asked), figures)
    found = {name.removeprefix("reward_"): by_seed for name, by_seed in by_cell.items()}
    print_means("reward model from", found)
    print_means("less causal", less(found, "causal"))


if __name__ == "__main__":
    main()
