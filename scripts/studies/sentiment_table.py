"""Print finished runs of experiment=sentiment as the table of docs/studies/sentiment.md.

    python scripts/studies/sentiment_table.py runs/seed-0 runs/seed-1 runs/seed-2

Below the table, per run: the true score of the held-out passages at each evaluation during PPO, update 0 being the base model.
"""

import sys
from pathlib import Path
from typing import Any

from harness import read, show, table
from harness import rows as read_rows

HELD_OUT = "eval/dev/gold/total"
HEADS = (
    "run",
    "policy",
    "KL to the base, nats",
    "true score",
    "win rate over the base",
    "perplexity under the base",
    "different 2-grams",
    "repetition",
)


def row(policy: str, kl: Any, score: Any, win_rate: Any, text: dict[str, Any]) -> list[str]:
    return [
        policy,
        show(kl, 2),
        show(score),
        show(win_rate),
        show(text["perplexity"], 1),
        show(text["distinct_2"]),
        show(text["repetition"]),
    ]


def rows(results: dict[str, Any]) -> list[list[str]]:
    """One row per policy of a run."""
    gold, best, text = results["gold"], results["best_of_n"], results["text"]
    made = [row("base", 0.0, gold["score"]["sft"], None, text["sft"])]
    name = f"best of {best['n']} by the reward model"
    made.append(row(name, best["kl_estimate_nats"], best["score"], best["win_rate_vs_sft"], best["text"]))
    for policy, figures in results.get("baselines", {}).items():
        figure = figures["win_rate_vs_sft"]
        made.append(row(policy, results["kl"][policy], gold["score"][policy], figure, text[policy]))
    made.append(row("PPO", results["kl"]["ppo"], gold["score"]["ppo"], gold["win_rate_vs_sft"], text["ppo"]))
    return made


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    folders = [Path(name) for name in sys.argv[1:]]
    results = {folder: read(folder / "evaluate" / "results.json") for folder in folders}
    table(HEADS, [[folder.name, *cells] for folder in folders for cells in rows(results[folder])])
    for folder in folders:
        scores = [r[HELD_OUT] for r in read_rows(folder / "ppo" / "metrics.jsonl") if HELD_OUT in r]
        accuracy, best = results[folder]["reward_model"], results[folder]["best_of_n"]
        print(
            f"{folder.name}: true score during PPO {', '.join(f'{score:.3f}' for score in scores)}; reward model: "
            f"{show(accuracy['accuracy'])} of held-out pairs as the labelers, {accuracy['gold_order_accuracy']:.3f} as the lexicon; "
            f"PPO minus best-of-n {show(best.get('ppo_above'))}"
        )


if __name__ == "__main__":
    main()
