"""Kinds of blocks compared: the gold pipeline with models of equal size.

    python scripts/studies/blocks.py --out runs/blocks --picture docs/img/blocks.png threads=1

The models have the same number of parameters within 1% and see the same number of tokens.
"""

from harness import Cell, collect, draw, make_cells, parse, print_means, run

CHOICES = {
    name: (f"model={name}",) for name in ("tiny", "gpt1-tiny", "gpt3-tiny", "palm-tiny", "llama-tiny", "switch-tiny")
}
WIN_RATE = "gold win rate, PPO over SFT"


def figures(cell: Cell) -> dict[str, float]:
    results = cell.results()
    return {
        "bits per byte": results["pretrain_bits_per_byte"],
        "reward accuracy": results["reward_model"]["accuracy"]["value"],
        WIN_RATE: results["gold"]["win_rate_vs_sft"]["value"],
        "mean gold score of PPO": results["gold"]["mean_score"]["ppo"],
    }


if __name__ == "__main__":
    asked = parse(__doc__)
    asked.overrides.insert(0, "experiment=gold")
    means = print_means("model", collect(run(make_cells(asked, CHOICES, (), {"pipeline": ()}), asked), figures))
    points = [(float(i), row[WIN_RATE]) for i, row in enumerate(means.values())]
    draw(asked.picture, {WIN_RATE: points}, "model", WIN_RATE, list(means), line=False)
