"""What rejection sampling is worth beside SFT and PPO: the gold score of finished runs' test prompts.

    rlhf rejection experiment=gold run=seed-1 seed=1 threads=1      # on a finished run
    python scripts/rejection_scores.py runs/seed-1 [runs/seed-2 …]

Prints a row a run: gold win rate over SFT's answers, greedy too, the mean gold score, and KL to SFT in nats.
"""

import sys
from pathlib import Path
from typing import Any

from rlhf.composing import compose_config
from rlhf.evaluation.truth_figures import judge_answers, summarize_truth
from rlhf.gold.truth import need_truth
from rlhf.runs.sources import need_source
from rlhf.stages.evaluate import Answers, draw, kl_between, load_test_prompts
from rlhf.tokenizer import load_tokenizer
from rlhf.training.setup import load_policy, set_up


def scores(folder: Path) -> dict[str, Any]:
    """Of the rejection model's answers against SFT's, as `rlhf evaluate` scores PPO's."""
    seed = folder.name.rpartition("-")[2]
    config = compose_config(
        ["experiment=gold", f"runs_dir={folder.parent}", f"run={folder.name}", f"seed={seed}", "threads=1"]
    )
    device = set_up(config)
    models = {"sft": folder / "sft" / "model", "ppo": folder / "rejection" / "model"}
    tokenizer = load_tokenizer(models["sft"])
    records, prompts = load_test_prompts(config, tokenizer, need_source(config, "prompts"), say=lambda _: None)
    answers = {}
    for name, model in models.items():
        drawn = draw(config, load_policy(model).to(device), prompts, tokenizer.eos_token_id, tokenizer, name)
        answers[name] = Answers(prompts=prompts, **drawn)
    truth = need_truth(config, "rejection_scores")
    kl = kl_between(config, answers["ppo"], models["ppo"], models["sft"], tokenizer.pad_token_id, device)
    return summarize_truth(truth, judge_answers(truth, records, answers)) | {"kl": kl}


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python scripts/rejection_scores.py RUN_FOLDER …")
    print("| run | win rate | greedy | gold, SFT | gold | KL |\n|---|---|---|---|---|---|")
    for folder in map(Path, sys.argv[1:]):
        found = scores(folder)
        rates = [found[name]["value"] for name in ("win_rate_vs_sft", "win_rate_greedy")]
        numbers = [*rates, found["mean_score"]["sft"], found["mean_score"]["ppo"], found["kl"]]
        print(f"| {folder.name} | " + " | ".join(f"{n:.3f}" for n in numbers) + " |", flush=True)


if __name__ == "__main__":
    main()
