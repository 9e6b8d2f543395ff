"""Print finished runs of experiment=sentiment as the table of docs/RESULTS.md.

    python scripts/studies/sentiment_table.py runs/seed-0 runs/seed-1 runs/seed-2

Below the table, per run: the true score of the held-out passages at each evaluation during PPO, update 0 being the base model.
"""

import json
import sys
from pathlib import Path
from typing import Any

from rlhf.runs.run_files import read_jsonl

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


def show(value: Any, digits: int = 3) -> str:
    """A figure with its interval, if it has one."""
    if value is None:
        return ""
    if not isinstance(value, dict):
        return f"{value:.{digits}f}"
    low, high = value["ci95"]
    return f"{value['value']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


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
    print("|".join(["", *(f" {head} " for head in HEADS), ""]))
    print("|" + "---|" * len(HEADS))
    for folder in map(Path, sys.argv[1:]):
        results = json.loads((folder / "evaluate" / "results.json").read_text(encoding="utf-8"))
        for cells in rows(results):
            print("|".join(["", *(f" {cell} " for cell in (folder.name, *cells)), ""]))
    print()
    for folder in map(Path, sys.argv[1:]):
        scores = [r[HELD_OUT] for r in read_jsonl(folder / "ppo" / "metrics.jsonl") if HELD_OUT in r]
        results = json.loads((folder / "evaluate" / "results.json").read_text(encoding="utf-8"))
        accuracy = results["reward_model"]
        print(
            f"{folder.name}: true score during PPO {', '.join(f'{score:.3f}' for score in scores)}; reward model: "
            f"{show(accuracy['accuracy'])} of held-out pairs as the labelers, {accuracy['gold_order_accuracy']:.3f} as the lexicon; "
            f"PPO minus best-of-n {show(results['best_of_n'].get('ppo_above'))}"
        )


if __name__ == "__main__":
    main()
