"""Does a judge that is not the lexicon prefer PPO's continuations? A classifier trained on other people's labels reads them.

    python scripts/studies/sentiment_judge.py --out runs/judge --labels rt-polarity.pos rt-polarity.neg --parents runs/seed-0 runs/seed-1 \
        --seeds 0 1 classify.lr=3e-5 …

The labels are one text per line: in the first file positive ones, in the second negative ones, as in Pang and Lee's sentence polarity
data (2005: 10,662 sentences of film reviews, labelled by the reviewers' verdicts). `rlhf classify` fine-tunes the first run's base on nine
tenths of them. Read are the first continuations of each test passage that `rlhf evaluate` kept. The table has the share of passages on
which P(positive) is higher for a policy than for the base, ties half, with an interval by passage, and how often classifier and lexicon
agree on the better one.
"""

import csv
import random
import sys
from pathlib import Path

from harness import RLHF, call, is_complete, mean_interval, parse, rows, show, table

from rlhf.evaluation.statistics import mean_by


def write(path: Path, examples: list[tuple[str, str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label"), *examples])
    return path


def main() -> None:
    asked = parse(__doc__, labels={"type": Path, "nargs": 2, "required": True})
    asked.out.mkdir(parents=True, exist_ok=True)
    known = [(line.strip(), name) for path, name in zip(asked.labels, ("positive", "negative"), strict=True)
             for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]  # fmt: skip
    random.Random(0).shuffle(known)
    held_out = known[: len(known) // 10]
    samples = {parent: rows(parent / "evaluate" / "samples.jsonl") for parent in asked.parents}
    answers = [(parent, row["id"], policy, text, row["gold"][policy]) for parent, found in samples.items() for row in found
               for policy, text in row["responses"].items()]  # fmt: skip
    # the answers have no label: any class serves, and the accuracy below is that of the held-out sentences alone
    test = write(asked.out / "test.csv", [*held_out, *((text.strip() or ".", "positive") for *_, text, _ in answers)])
    train = write(asked.out / "train.csv", known[len(held_out) :])
    home = asked.out / "classifier"
    if not is_complete(home / "classify"):
        parents = [f"parents.{stage}='{asked.parents[0] / stage}'" for stage in ("tokenizer", "pretrain")]
        data = [
            f"classify.data='{train}'",
            f"classify.test='{test}'",
            "classify.text=text",
            "classify.label=label",
            "classify.lm_coef=0",
        ]
        own = [f"runs_dir='{asked.out}'", "run=classifier", "tracking=jsonl"]
        with (asked.out / "classifier.log").open("a", encoding="utf-8") as log:
            if call(["classify", "--shared-settings", *data, *parents, *own, *asked.overrides], log, RLHF):
                sys.exit(f"{log.name}: failed")
    found = rows(home / "classify" / "predictions.jsonl")
    judged, chances = found[: len(held_out)], [row["probabilities"]["positive"] for row in found[len(held_out) :]]
    right = [float(row["label"] == row["predicted"]) for row in judged]
    print(
        f"accuracy on {len(right):,} held-out sentences: {show(mean_by(list(map(str, range(len(right)))), right, share=True))}"
    )
    by_text = {
        (parent, name, policy): (p, lexicon)
        for (parent, name, policy, _, lexicon), p in zip(answers, chances, strict=True)
    }
    lines, rates = [], {}
    for parent, found in samples.items():
        for policy in [name for name in found[0]["responses"] if name != "sft"]:
            pairs = [(by_text[parent, row["id"], policy], by_text[parent, row["id"], "sft"]) for row in found]
            wins = [0.5 + 0.5 * ((a[0] > b[0]) - (a[0] < b[0])) for a, b in pairs]
            agree = [float((a[0] > b[0]) == (a[1] > b[1])) for a, b in pairs if a[1] != b[1]]
            rate = mean_by([row["id"] for row in found], wins, share=True)
            rates.setdefault(policy, []).append(rate["value"])
            lines.append([f"{parent.name}, {policy}", rate, sum(agree) / len(agree)])
    lines += [
        [f"over runs, {policy}", mean_interval(values), None] for policy, values in rates.items() if len(values) > 1
    ]
    table(
        ["run, policy", "preferred to the base by the classifier", "pairs on which classifier and lexicon agree"], lines
    )


if __name__ == "__main__":
    main()
