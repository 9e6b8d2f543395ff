"""A learned mix of all layers as the reward head's input, beside a fixed layer, on a pretrained model and its true score.

    python scripts/studies/layers.py --out runs/layers --parents runs/sent-0 runs/sent-1 runs/sent-2 experiment=sentiment …

A parent is a run of `experiment=sentiment` with finished labels. A cell is its reward model with one choice of `reward.layers`, with the
head alone trained on the frozen trunk and with one epoch of adapters after it. Measured on the rankings that no reward model is trained
on: the share of a passage's pairs of continuations that have the labeler's order, and that of the true score.
"""

from itertools import combinations, product
from typing import Any

from harness import Cell, Found, cached, collect, less, make_cells, parse, print_means, rows, run

LAYERS = {"12": "12", "all": "null", "mix": "mix"}
STEPS = {"head": "reward.epochs=0", "adapters": "reward.epochs=1"}
CHOICES = {
    f"{layers}_{step}": (f"reward.layers={value}", epochs, "reward.fit_head=true")
    for step, epochs in STEPS.items()
    for layers, value in LAYERS.items()
}
TAKEN = ("world", "tokenizer", "pretrain", "sft", "label")


def measured(cell: Cell) -> dict[str, Any]:
    """Both shares, and the weights of the mix if there is one."""
    import rlhf
    from rlhf.gold.truth import Sentiment

    held = [row for row in rows(cell.parent / "label" / "comparisons.jsonl") if row["metadata"]["split"] != "train"]
    loaded = rlhf.load(cell.home)
    asked = [(row["prompt"], answer["text"]) for row in held for answer in row["responses"]]
    scores = iter(loaded.score([prompt for prompt, _ in asked], [text for _, text in asked]))
    lexicon, labels, truth = Sentiment(), list[bool](), list[bool]()
    for row in held:
        rank = {name: place for place, tied in enumerate(row["ranking"]) for name in tied}
        found = [(next(scores), -rank[a["id"]], lexicon.judge(row, a["text"], True)["total"]) for a in row["responses"]]
        for a, b in combinations(found, 2):
            labels += [(a[0] > b[0]) == (a[1] > b[1])] if a[1] != b[1] else []
            truth += [(a[0] > b[0]) == (a[2] > b[2])] if a[2] != b[2] else []
    mix = loaded.reward_model().mix
    weights = [] if mix is None else mix.weight.softmax(0).tolist()
    return {"labels": sum(labels) / len(labels), "truth": sum(truth) / len(truth), "pairs": len(labels), "mix": weights}


def figures(cell: Cell) -> dict[str, float]:
    found = cached(cell.beside("-held-out.json"), lambda: measured(cell))
    if found["mix"]:
        heaviest = sorted(enumerate(found["mix"]), key=lambda layer: -layer[1])[:3]
        print(cell.home.name, "heaviest layers", {i: round(weight, 3) for i, weight in heaviest})
    return {"labels": found["labels"], "truth": found["truth"]}


def main() -> None:
    asked = parse(__doc__)
    found = collect(run(make_cells(asked, CHOICES, TAKEN, {"reward": ("reward.audit=0",)}), asked), figures)
    titles = {"labels": "held-out pairs in the labelers' order", "truth": "in the true order"}
    print_means("reward.layers, what is trained", found, titles)
    changes: Found = {}
    for step, fixed in product(STEPS, ("12", "all")):
        changes |= {f"mix less {fixed}, {step}": by_seed for name, by_seed in less(found, f"{fixed}_{step}").items()
                    if name == f"mix_{step}"}  # fmt: skip
    print_means("paired over seeds", changes, titles)


if __name__ == "__main__":
    main()
