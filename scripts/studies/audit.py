"""Does the audit of a reward model say what PPO will gain?

    python scripts/studies/audit.py --out runs/audit --seeds 0 1 2 3 --parents runs/small-0 runs/small-1 runs/large-0 runs/large-1 \
        --picture docs/img/audit-gain.png experiment=gold threads=1

Each cell labels 100, 300 or 1000 prompts with noise 1.0 or 2.8 (--count 300: that number, with six noises; the picture is by parent),
trains and audits a reward model on the parent's SFT model, runs PPO against it, whatever the verdict, and is evaluated. The outcome is
the mean true reward of PPO's answers to test prompts minus that of SFT's; the audit uses neither. Prints for each figure of the audit its
rank correlation with the outcome, the partial one given the number of labelled prompts, which alone orders the cells, and the one after
each parent's mean is subtracted; then the cells.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import Cell, Figure, draw, make_cells, parse, read, run, spaced, table

PROMPTS, NOISES = (100, 300, 1000), (1.0, 2.8)
# Few labels, and a KL coefficient at which a poor reward model does harm.
FIXED = ("rounds=1", "kl.coef=0.03", "kl.target=null")
MORE_NOISES = (0.5, 1.0, 1.4, 2.0, 2.8, 4.0)
TAKEN = ("world", "tokenizer", "pretrain", "sft")
DEFAULTS = (
    "gold.comparison_test_prompts=50", "ppo.eval_every=0", "ppo.episodes=3072", "evaluate.prompts=256", "evaluate.samples=1",
    "evaluate.best_of=0",
)  # fmt: skip


def worst(audit: Any, figure: str) -> float:
    """The largest value of a figure among the attacks."""
    return max((row[figure]["value"] for row in audit["attacks"] if row[figure] is not None), default=math.nan)


FIGURES: dict[str, Callable[[Any], float]] = {
    "accuracy": lambda audit: audit["comparisons"]["accuracy"]["value"],
    "above_length": lambda audit: audit["comparisons"]["above_length"]["value"],
    "calibration_error": lambda audit: audit["comparisons"]["calibration_error"],
    "worst_flips": lambda audit: worst(audit, "flips"),
    "mean_flips": lambda audit: float(np.mean([row["flips"]["value"] for row in audit["attacks"] if row["flips"]])),
    "worst_gain": lambda audit: worst(audit, "gain_worse"),
    "best_of_64": lambda audit: audit["best_of"][-1]["score"]["value"] - audit["best_of"][0]["score"]["value"],
    "verdict": lambda audit: ["collect more labels", "go with a KL ceiling", "go"].index(audit["verdict"]["decision"]),
}


def figures(cell: Cell) -> dict[str, Any]:
    """The audit's figures of a finished cell, its verdict, and what PPO then did."""
    audit, results = read(cell.home / "reward" / "audit.json"), cell.results()
    means = results["gold"]["mean_score"]
    return {
        "parent": cell.parent.name,
        "cell": cell.name,
        "labelled_prompts": int(cell.name.split("_")[1]),
        "figures": {name: float(of(audit)) for name, of in FIGURES.items()},
        "verdict": audit["verdict"]["decision"],
        "kl": results["kl_to_sft_nats"],
        "gained": means["ppo"] - means["sft"],
    }


def spearman(a: np.ndarray, b: np.ndarray, given: np.ndarray | None = None) -> Figure | None:
    """Spearman's rank correlation, or the partial one given a third variable, with a 95% interval; None if either never varies.

        r_ab.c = (r_ab - r_ac r_bc) / sqrt((1 - r_ac^2) (1 - r_bc^2))

    Source: Bonett and Wright 2000: Fisher's z with variance (1 + r^2/2) / (n - 3), n one less for a partial correlation.
    """
    from scipy.stats import rankdata

    n, parts = len(a), [a, b] if given is None else [a, b, given]
    if any(np.ptp(part) < 1e-12 for part in parts):
        return None
    ranks = np.corrcoef([rankdata(part) for part in parts])
    r = float(ranks[0, 1])
    if given is not None:
        r_ac, r_bc = ranks[0, 2], ranks[1, 2]
        if max(abs(r_ac), abs(r_bc)) > 1 - 1e-9:
            return None
        r, n = float((r - r_ac * r_bc) / math.sqrt((1 - r_ac**2) * (1 - r_bc**2))), n - 1
    if n < 5:
        return {"mean": r, "ci95": None, "n": n}
    z, half = math.atanh(max(-0.9999, min(0.9999, r))), 1.96 * math.sqrt((1 + r * r / 2) / (n - 3))
    return {"mean": r, "ci95": [math.tanh(z - half), math.tanh(z + half)], "n": n}


def less_parents(values: np.ndarray, parents: list[str]) -> np.ndarray:
    """The values less their parent's mean."""
    means = {name: values[[other == name for other in parents]].mean() for name in parents}
    return values - np.array([means[name] for name in parents])


def main() -> None:
    asked = parse(__doc__, count={"type": int})
    choices = {
        f"labels_{prompts}_noise_{noise}": (*FIXED, f"gold.comparison_prompts={prompts}", f"gold.labeler_noise={noise}")
        for prompts in ([asked.count] if asked.count else PROMPTS)
        for noise in (MORE_NOISES if asked.count else NOISES)
    }
    found = [figures(cell) for cell in run(make_cells(asked, choices, TAKEN, {"pipeline": DEFAULTS}), asked)]
    gained, labelled = (np.array([row[name] for row in found], float) for name in ("gained", "labelled_prompts"))
    names = [row["parent"] for row in found]
    own = less_parents(gained, names)
    lines: list[list[Any]] = [["labelled prompts", spearman(labelled, gained), None, None]]
    if asked.count:
        noise = np.array([float(row["cell"].split("_")[-1]) for row in found])
        lines = [["labelers' noise", spearman(noise, gained), None, spearman(noise, own)]]
    for name in FIGURES:
        x = np.array([row["figures"][name] for row in found])
        x = np.where(np.isnan(x), np.nanmean(x) if not np.isnan(x).all() else 0.0, x)
        within = spearman(less_parents(x, names), own)
        lines.append([spaced(name), spearman(x, gained), spearman(x, gained, labelled), within])
    table(["figure", "rank correlation with the gain", "given the number of labelled prompts", "within parents"], lines)
    table(
        ["parent", "cell", "accuracy", "pairs flipped", "verdict", "KL", "true reward gained"],
        [[row["parent"], spaced(row["cell"]), row["figures"]["accuracy"], row["figures"]["mean_flips"], row["verdict"], row["kl"],
          f"{row['gained']:+.3f}"] for row in found],
    )  # fmt: skip
    series: dict[str, list[tuple[float, float]]] = {}
    for row in found:
        name = row["parent"] if asked.count else f"{row['labelled_prompts']} prompts"
        series.setdefault(name, []).append((row["figures"]["mean_flips"], row["gained"]))
    draw(asked.picture, series, "pairs flipped, mean of the attacks", "true reward gained", line=False)


if __name__ == "__main__":
    main()
