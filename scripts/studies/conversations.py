"""Print the tables on conversations of docs/studies/conversations.md: means over the runs with 95% intervals by Student's t.

    python scripts/studies/conversations.py runs/talk-0 runs/talk-1 runs/talk-2 --picture docs/img/conversations.png

The runs are of experiment=gold-dialogue with evaluate.baselines=[rate]. The last table and the picture pool the test prompts of all runs.
"""

import argparse
import functools
import operator
from collections import defaultdict
from pathlib import Path
from typing import Any

from harness import draw, mean_interval, read, rows, show

from rlhf.evaluation.statistics import interval
from rlhf.gold.truth import judge
from rlhf.gold.world import Task

Results = dict[str, Any]
PICKED = {
    "best_of_n": "SFT, best by the reward model",
    "sft_rated": "SFT, best by the ratings",
    "generate_and_rate": "generate-and-rate: the rate model, best by the ratings",
    "ppo_best_of_n": "PPO, best by the reward model",
}
SINGLE = {"sft": "SFT", "ppo": "PPO", "rate": "rate model, one sample"}
PARTS = ("correct", "complete", "polite", "safe")


def over_runs(runs: list[Results], *keys: str) -> str:
    """The mean over the runs of the figure that the keys lead to."""
    figures: list[Any] = [functools.reduce(operator.getitem, keys, run) for run in runs]
    return show(mean_interval(figures))


def print_policies(runs: list[Results]) -> None:
    """Win rate over SFT, gold score and its parts of one sample of each policy, and of the best of n."""
    print("| policy | samples | win rate over SFT | gold score |", *(f"`{part}` |" for part in PARTS))
    print("|---|---|---|---|" + "---|" * len(PARTS))
    for name, label in SINGLE.items():
        parts = [over_runs(runs, "gold", "parts", name, part) for part in PARTS]
        gold = over_runs(runs, "gold", "score", name, "value")
        print("|", " | ".join([label, "1", win_rate(runs, name), gold, *parts]), "|")
    for name, label in PICKED.items():
        picked = [run["best_of_n"] if name == "best_of_n" else run["generate_and_rate"]["picked"][name] for run in runs]
        parts = [over_runs(picked, "parts", part) for part in PARTS]
        figures = [over_runs(picked, key, "value") for key in ("win_rate_vs_sft", "score")]
        print("|", " | ".join([label, str(picked[0]["n"]), *figures, *parts]), "|")
    print()


def win_rate(runs: list[Results], name: str) -> str:
    if name == "sft":
        return ""
    gold = [run["gold"] if name == "ppo" else run["baselines"][name] for run in runs]
    return over_runs(gold, "win_rate_vs_sft", "value")


def print_figures(runs: list[Results]) -> None:
    print("| | mean over the runs |\n|---|---|")
    print("| KL of PPO to SFT, nats |", over_runs(runs, "kl_to_sft_nats"), "|")
    print("| PPO over SFT, greedy |", over_runs(runs, "gold", "win_rate_greedy", "value"), "|")
    print("| reward model's accuracy |", over_runs(runs, "reward_model", "accuracy", "value"), "|")
    print("| length alone |", over_runs(runs, "reward_model", "length_baseline"), "|")
    for name in runs[0]["generate_and_rate"]["over"]:
        figure = over_runs(runs, "generate_and_rate", "over", name, "value")
        print(f"| generate-and-rate over {name} |", figure, "|")
    print()


Scores = dict[str, dict[str, list[dict[str, float]]]]


def read_scores(folders: list[Path]) -> Scores:
    """The parts of the gold score of one sample per test prompt, by kind of conversation and policy."""
    scores: Scores = defaultdict(lambda: defaultdict(list))
    for run in folders:
        prompts = rows(run / "world" / "prompts.jsonl")
        tasks = {row["id"]: Task(**row["metadata"]["gold"]) for row in prompts}
        for row in rows(run / "evaluate" / "samples.jsonl"):
            task = tasks[row["id"]]
            for policy, text in row["responses"].items():
                scores[task.conversation or "single request"][policy].append(judge(task, text))
    return scores


def print_conversations(scores: Scores) -> None:
    """`correct` and `safe` by kind of conversation."""
    columns = [(part, name) for part in ("correct", "safe") for name in ("sft", "ppo")]
    print("| conversation | prompts |", *(f"`{part}`, {SINGLE[name]} |" for part, name in columns))
    print("|---|---|" + "---|" * len(columns))
    for kind, by_policy in sorted(scores.items()):
        cells = [share([parts[part] for parts in by_policy[name]]) for part, name in columns]
        print("|", kind, "|", len(by_policy["sft"]), "|", " | ".join(cells), "|")


def share(values: list[float]) -> str:
    """The mean with its interval, clipped to [0, 1]."""
    mean, low, high = ends(values)
    return show({"value": mean, "ci95": [low, high]})


def ends(values: list[float]) -> tuple[float, float, float]:
    """The mean and its interval, clipped to [0, 1]."""
    figure: dict[str, Any] = interval(values)
    low, high = figure["ci95"]
    return figure["value"], max(0.0, low), min(1.0, high)


def draw_kinds(scores: Scores, path: Path) -> None:
    """`correct` of SFT and PPO by kind of conversation."""

    def figure(kind: str, policy: str) -> dict[str, Any]:
        mean, low, high = ends([parts["correct"] for parts in scores[kind][policy]])
        return {"mean": mean, "ci95": [low, high]}

    kinds = sorted(scores, key=lambda kind: -figure(kind, "ppo")["mean"])
    series = {
        SINGLE[policy]: [(i + 0.16 * place, figure(kind, policy)) for i, kind in enumerate(kinds)]
        for place, policy in enumerate(("sft", "ppo"))
    }
    draw(path, series, "", "share of correct last answers", kinds, line=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--picture", type=Path, help="an SVG or PNG file to write")
    given = parser.parse_args()
    runs = [read(folder / "evaluate" / "results.json") for folder in given.runs]
    print_policies(runs)
    print_figures(runs)
    scores = read_scores(given.runs)
    print_conversations(scores)
    if given.picture:
        draw_kinds(scores, given.picture)


if __name__ == "__main__":
    main()
