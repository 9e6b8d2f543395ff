"""Does a judge that is not the lexicon prefer PPO's continuations? A classifier trained on other people's labels reads them.

    python scripts/studies/sentiment_judge.py --out runs/judge --labels rt-polarity.pos rt-polarity.neg --parents runs/seed-0 runs/seed-1 \
        --seeds 0 1 classify.lr=3e-5 …

The labels are one text per line: in the first file positive ones, in the second negative ones, as in Pang and Lee's sentence polarity
data (2005: 10,662 sentences of film reviews, labelled by the reviewers' verdicts). `rlhf classify` fine-tunes the first run's base on
four fifths of them. It reads the first continuation of each test passage that `rlhf evaluate` kept. The table has the share of passages on
which P(positive) is higher for a policy than for the base, ties half, with an interval by passage, and how often classifier and lexicon
agree on the better one.
"""

import csv
from pathlib import Path

import torch
from harness import call_once, is_complete, mean_interval, parse, read, rows, show, table

from rlhf.data.labelled import Example, encode_examples, find_marks
from rlhf.data.tokenizer import load_tokenizer
from rlhf.evaluation.statistics import mean_by, win
from rlhf.model.heads import LabelModel
from rlhf.stages.classify import Coded, predict
from rlhf.training.setup import load_policy

MOST_TOKENS = 256


def main() -> None:
    asked = parse(__doc__, labels={"type": Path, "nargs": 2, "required": True})
    known = [(line.strip(), name) for path, name in zip(asked.labels, ("positive", "negative"), strict=True)
             for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]  # fmt: skip
    train, home = asked.out / "labels.csv", asked.out / "classifier" / "classify"
    with train.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label"), *known])
    parents = [f"parents.{stage}='{asked.parents[0] / stage}'" for stage in ("tokenizer", "pretrain")]
    data = [f"classify.data='{train}'", "classify.text=text", "classify.label=label", "classify.lm_coef=0"]
    own = [f"runs_dir='{asked.out}'", "run=classifier", "tracking=jsonl"]
    words = ["classify", "--shared-settings", *data, *parents, *own, *asked.overrides]
    call_once(is_complete(home), words, asked.out / "classifier.log")
    print(f"accuracy on held-out sentences: {show(read(home / 'results.json')['accuracy'])}")
    lines, rates = [], dict[str, list[float]]()
    for parent in asked.parents:
        found = rows(parent / "evaluate" / "samples.jsonl")
        chances = {p: positive(home / "model", [row["responses"][p] for row in found]) for p in found[0]["responses"]}
        for policy in [p for p in chances if p != "sft"]:
            wins = list(map(win, chances[policy], chances["sft"]))
            truth = [row["gold"][policy] - row["gold"]["sft"] for row in found]
            agree = [float((one > 0.5) == (gap > 0)) for one, gap in zip(wins, truth, strict=True) if gap]
            rate = mean_by([row["id"] for row in found], wins, share=True)
            rates.setdefault(policy, []).append(rate["value"])
            lines.append([f"{parent.name}, {policy}", rate, sum(agree) / len(agree)])
    lines += [[f"over runs, {name}", mean_interval(each), None] for name, each in rates.items() if len(each) > 1]
    head = ["run, policy", "preferred to the base by the classifier", "pairs on which classifier and lexicon agree"]
    table(head, lines)


def positive(folder: Path, texts: list[str]) -> list[float]:
    """P(positive) of each text."""
    tokenizer = load_tokenizer(folder)
    model = LabelModel.with_head(load_policy(folder), folder)
    examples = [Example(str(i), [[text.strip() or "."]], "positive") for i, text in enumerate(texts)]
    encoded, _ = encode_examples(examples, tokenizer, find_marks(tokenizer)[0], MOST_TOKENS)
    coded = [Coded(row, 0) for row in encoded]
    chances = predict(model, coded, tokenizer.pad_token_id, torch.device("cpu"))
    return chances[:, model.classes.index("positive")].tolist()


if __name__ == "__main__":
    main()
