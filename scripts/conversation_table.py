"""Each policy's `correct` and `safe` by kind of conversation, one sample per test prompt: python scripts/conversation_table.py runs/talk"""

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from rlhf.evaluation.statistics import interval, show
from rlhf.gold.judge import judge
from rlhf.gold.world import task_from_metadata
from rlhf.tracking.jsonl import read_jsonl


def share(values: list[float]) -> str:
    """The mean with its interval, clipped to [0, 1]."""
    figure: dict[str, Any] = interval(values)
    return show(figure | {"ci95": [min(1.0, max(0.0, end)) for end in figure["ci95"]]})


def main(run: Path) -> None:
    tasks = {
        row["id"]: task_from_metadata(row["metadata"]["gold"]) for row in read_jsonl(run / "world" / "prompts.jsonl")
    }
    scores: dict[str, dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in read_jsonl(run / "evaluate" / "samples.jsonl"):
        task = tasks[row["id"]]
        for policy, text in row["responses"].items():
            scores[task.conversation or "single request"][policy].append(judge(task, text))
    policies = [name for name in next(iter(scores.values())) if not name.startswith("base")]
    print("| conversation | prompts |", *(f"`{part}`, {name} |" for part in ("correct", "safe") for name in policies))
    print("|---|---|" + "---|" * (2 * len(policies)))
    for kind, by_policy in sorted(scores.items()):
        cells = [share([parts[part] for parts in by_policy[name]]) for part in ("correct", "safe") for name in policies]
        print("|", kind, "|", len(by_policy["sft"]), "|", " | ".join(cells), "|")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
