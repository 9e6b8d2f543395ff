"""Print the tables on conversations of docs/studies/conversations.md: means over the runs with 95% intervals by Student's t.

    python scripts/studies/conversations.py runs/talk-0 runs/talk-1 runs/talk-2 --picture docs/img/conversations.png

The runs are of experiment=gold-dialogue with evaluate.baselines=[rate]. The last table and the picture pool the test prompts of all runs.
"""

import functools
import operator
from collections import defaultdict
from pathlib import Path
from typing import Any

from harness import draw, make_parser, mean_interval, read, rows, table, within

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


def over_runs(runs: list[Results], *keys: str) -> Any:
    """The mean over the runs of the figure that the keys lead to."""
    return mean_interval([functools.reduce(operator.getitem, keys, run) for run in runs])


def print_policies(runs: list[Results]) -> None:
    """Win rate over SFT, gold score and its parts of one sample of each policy, and of the best of n."""
    lines = []
    for name, label in SINGLE.items():
        by_gold = [run["gold"] if name == "ppo" else run["baselines"].get(name) for run in runs]
        rate = "" if name == "sft" else over_runs(by_gold, "win_rate_vs_sft", "value")
        parts = [over_runs(runs, "gold", "parts", name, part) for part in PARTS]
        lines.append([label, "1", rate, over_runs(runs, "gold", "score", name, "value"), *parts])
    for name, label in PICKED.items():
        picked = [run["best_of_n"] if name == "best_of_n" else run["generate_and_rate"]["picked"][name] for run in runs]
        parts = [over_runs(picked, "parts", part) for part in PARTS]
        figures = [over_runs(picked, key, "value") for key in ("win_rate_vs_sft", "score")]
        lines.append([label, str(picked[0]["n"]), *figures, *parts])
    table(["policy", "samples", "win rate over SFT", "gold score", *(f"`{part}`" for part in PARTS)], lines)


def print_figures(runs: list[Results]) -> None:
    figures = {
        "KL of PPO to SFT, nats": ("kl_to_sft_nats",),
        "PPO over SFT, greedy": ("gold", "win_rate_greedy", "value"),
        "reward model's accuracy": ("reward_model", "accuracy", "value"),
        "length alone": ("reward_model", "length_baseline"),
    }
    for name in runs[0]["generate_and_rate"]["over"]:
        figures[f"generate-and-rate over {name}"] = ("generate_and_rate", "over", name, "value")
    table(["", "mean over the runs"], [[label, over_runs(runs, *keys)] for label, keys in figures.items()])


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


def share(scores: Scores, kind: str, policy: str, part: str) -> Any:
    """The mean of a part with its interval, clipped to [0, 1]."""
    return within(interval([parts[part] for parts in scores[kind][policy]]))


def print_conversations(scores: Scores) -> None:
    """`correct` and `safe` by kind of conversation."""
    columns = [(part, name) for part in ("correct", "safe") for name in ("sft", "ppo")]
    lines = [
        [kind, str(len(scores[kind]["sft"])), *(share(scores, kind, name, part) for part, name in columns)]
        for kind in sorted(scores)
    ]
    table(["conversation", "prompts", *(f"`{part}`, {SINGLE[name]}" for part, name in columns)], lines)


def draw_kinds(scores: Scores, path: Path) -> None:
    """`correct` of SFT and PPO by kind of conversation."""
    kinds = sorted(scores, key=lambda kind: -share(scores, kind, "ppo", "correct")["value"])
    series = {
        SINGLE[policy]: [(i + 0.16 * place, share(scores, kind, policy, "correct")) for i, kind in enumerate(kinds)]
        for place, policy in enumerate(("sft", "ppo"))
    }
    draw(path, series, "", "share of correct last answers", kinds, line=False)


def main() -> None:
    given = make_parser(__doc__, {"runs": {"type": Path, "nargs": "+"}, "--picture": {"type": Path}}).parse_args()
    runs = [read(folder / "evaluate" / "results.json") for folder in given.runs]
    print_policies(runs)
    print_figures(runs)
    scores = read_scores(given.runs)
    print_conversations(scores)
    if given.picture:
        draw_kinds(scores, given.picture)


if __name__ == "__main__":
    main()
