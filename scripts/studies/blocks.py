"""Kinds of blocks compared: the gold pipeline with models of equal size.

    python scripts/studies/blocks.py --out runs/blocks --picture docs/img/blocks.png threads=1

The models have the same number of parameters within 1% and see the same number of tokens.
"""

from harness import draw, make_cells, over_seeds, parse, run, table

CHOICES = {
    name: (f"model={name}",) for name in ("tiny", "gpt1-tiny", "gpt3-tiny", "palm-tiny", "llama-tiny", "switch-tiny")
}
WIN_RATE = "gold win rate, PPO over SFT"


def figures(results: dict) -> dict[str, float]:
    return {
        "bits per byte": results["pretrain_bits_per_byte"],
        "reward accuracy": results["reward_model"]["accuracy"]["value"],
        WIN_RATE: results["gold"]["win_rate_vs_sft"]["value"],
        "mean gold score of PPO": results["gold"]["mean_score"]["ppo"],
    }


def main() -> None:
    asked = parse(__doc__)
    asked.overrides.insert(0, "experiment=gold")
    cells = make_cells(asked, CHOICES, (), {"pipeline": ()})
    run(cells, asked.processes)
    found: dict = {}
    for cell in cells:
        found.setdefault(cell.name, {})[cell.seed] = figures(cell.results())
    means = over_seeds(found)
    table(["model", *next(iter(means.values()))], [[name, *row.values()] for name, row in means.items()])
    points = [(float(i), row[WIN_RATE]) for i, row in enumerate(means.values())]
    draw(asked.picture, {WIN_RATE: points}, "model", WIN_RATE, list(means), line=False)


if __name__ == "__main__":
    main()
