"""Distillation on the gold world: the student beside its teacher, and each of the three losses left out.

    python scripts/studies/distill.py --out runs/distill --parents runs/gold-0 runs/gold-1 runs/gold-2 experiment=gold threads=1

A parent is a run with a finished PPO stage. A cell is one `rlhf distill` of its policy and an evaluation on the same prompts.
"""

import time
from typing import Any

from harness import Cell, cached, collect, less, make_cells, parse, print_means, read, run

ALL = "all"
CHOICES = {
    ALL: (),
    "without_distillation": ("distill.ce_coef=0",),
    "without_lm": ("distill.lm_coef=0",),
    "without_cosine": ("distill.cos_coef=0",),
}
TAKEN = ("world", "tokenizer", "pretrain", "sft", "label", "reward", "ppo")


def speed(folder: Any) -> float:
    """Tokens per second of answers of the policy, decoded together on one thread: the best of 3 runs of 256 answers of 40 tokens, of
    32 answers of 24 tokens if the model is large.
    """
    import torch

    from rlhf.training.setup import load_policy

    torch.set_num_threads(1)
    model, found = load_policy(folder / "model"), []
    answers, length = (256, 40) if model.num_parameters() < 10**7 else (32, 24)
    tokens = torch.randint(10, 200, (answers, 24), generator=torch.Generator().manual_seed(0))
    how = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": True, "pad_token_id": 0}
    for _ in range(3):
        started = time.process_time()
        with torch.no_grad():
            model.generate(tokens, **how)
        found.append(answers * length / (time.process_time() - started))
    return max(found)


def figures(cell: Cell) -> dict[str, float]:
    results, summary = cell.results(), read(cell.home / "distill" / "stage.json")["summary"]
    gold, base = results["gold"]["mean_score"], results["baselines"]["distill"]
    student, teacher = base["win_rate_vs_sft"]["value"], results["gold"]["win_rate_vs_sft"]["value"]
    folders = {"student": cell.home / "distill", "teacher": cell.parent / "ppo"}
    speeds = cached(cell.beside("-speed.json"), lambda: {name: speed(folder) for name, folder in folders.items()})
    return {
        "parameters, share": summary["parameters"] / summary["teacher_parameters"],
        "tokens/s, factor": speeds["student"] / speeds["teacher"],
        "KL to teacher, nats per token": summary["kl"],
        "win rate over SFT, student": student,
        "win rate over SFT, PPO": teacher,
        "gold score, student": gold["distill"],
        "gold score, PPO": gold["ppo"],
        "gold score kept": gold["distill"] / gold["ppo"],
        "perplexity under SFT, student": results["text"]["distill"]["perplexity"]["value"],
        "perplexity under SFT, PPO": results["text"]["ppo"]["perplexity"]["value"],
    }


def main() -> None:
    asked = parse(__doc__)
    evaluation = ("evaluate.best_of=0", "evaluate.prompts=256", "evaluate.samples=2")
    cells = run(make_cells(asked, CHOICES, TAKEN, {"distill": (), "evaluate": evaluation}), asked)
    found = collect(cells, figures)
    means = print_means("losses", found)
    shown = {key: key for key in next(iter(means.values())) if "student" in key or "KL" in key}
    print_means("less all three", less(found, ALL), shown)


if __name__ == "__main__":
    main()
