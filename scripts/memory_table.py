"""Peak memory and seconds of each stage of a small real model, beside what the stage says it needs, as a Markdown table.

    python scripts/memory_table.py --model SmolLM2-135M-Instruct.Q4_1.gguf --demonstrations si.jsonl --comparisons hh.jsonl \\
        --out memory --budget 4

Each stage is a process of its own, with one thread; its peak is what the system says of the process when it has ended. The rows decide
what a stage needs: put the longest ones in.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from rlhf.system.files import read_json

ADAPTERS = ["experiment=align-laptop", "run=adapters"]
FULL = ["experiment=align", "run=full", "parents.tokenizer=adapters", "parents.pretrain=adapters", "reward.audit=0"]
SHORT = [
    "sft.epochs=1", "reward.calibration_samples=8", "ppo.episodes=16", "ppo.episodes_per_update=16", "ppo.minibatches=2",
    "ppo.eval_every=0", "ppo.critic_warmup_updates=0", "rollout.max_new_tokens=48", "evaluate.prompts=8", "data.dev=0.1", "data.test=0.2",
    "threads=1", "tracking.kind=jsonl",
]  # fmt: skip
ROWS = [
    ("adopting the model", "tokenizer", ADAPTERS),
    ("", "pretrain", ADAPTERS),
    ("SFT, adapters", "sft", ADAPTERS),
    ("reward model, adapters, with its audit", "reward", [*ADAPTERS, "reward.audit=8"]),
    ("PPO, shared trunk", "ppo", ADAPTERS),
    ("DPO, adapters", "dpo", ADAPTERS),
    ("evaluation", "evaluate", ADAPTERS),
    ("PPO, adapters, a critic of its own", "ppo",
     [*ADAPTERS, "run=apart", "lora.share_trunk=false", "ppo.shared_critic=false",
      *(f"parents.{stage}=adapters" for stage in ("tokenizer", "pretrain", "sft", "reward"))]),
    ("SFT, all weights", "sft", FULL),
    ("reward model, all weights", "reward", FULL),
    ("PPO, all weights", "ppo", FULL),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--demonstrations", required=True, type=Path)
    parser.add_argument("--comparisons", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path, help="folder of the runs and of table.md")
    parser.add_argument("--budget", type=float, help="memory.budget_gb; the default is the package's")
    parser.add_argument("settings", nargs="*", help="further settings, as key=value")
    given = parser.parse_args()
    common = [
        f"model.pretrained={given.model.resolve()}", f"data.demonstrations={given.demonstrations.resolve()}",
        f"data.comparisons={given.comparisons.resolve()}", f"runs_dir={given.out}", *SHORT, *given.settings,
    ]  # fmt: skip
    common += [] if given.budget is None else [f"memory.budget_gb={given.budget}"]
    given.out.mkdir(parents=True, exist_ok=True)
    print("| stage | peak, GB | said, GB | processor seconds | seconds |\n|---|---|---|---|---|")
    for name, stage, settings in ROWS:
        run = [text for text in settings if text.startswith("run=")][-1].removeprefix("run=")
        record = given.out / run / stage / "stage.json"
        if read_json(record).get("status") == "complete":
            continue
        command = [sys.executable, "-m", "rlhf", stage, "--shared-settings", *common, *settings]
        started = time.monotonic()
        with (given.out / f"{run}-{stage}.log").open("w", encoding="utf-8") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            _, code, used = os.wait4(process.pid, 0)
        if code:
            sys.exit(f"{name or stage}: ended with {os.waitstatus_to_exitcode(code)}: see {log.name}")
        said = read_json(record).get("memory", {}).get("needs_gb")
        needs = "–" if said is None else f"{said:.1f}"
        processor, seconds = used.ru_utime + used.ru_stime, time.monotonic() - started
        figures = f"{used.ru_maxrss * 1024 / 1e9:.1f} | {needs} | {processor:.0f} | {seconds:.0f}"
        with (given.out / "table.md").open("a", encoding="utf-8") as table:
            table.write(f"| {name or 'its weights'} | {figures} |\n")
        print(f"| {name or 'its weights'} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
