"""A user's rule in the gold world ("Never say dog."): how often SFT and PPO keep it, and PPO with a model of the rule as a reward.

    python scripts/studies/rules.py --out runs/rules --seeds 0 --parents runs/talk-0 --weights 1 4 experiment=gold-dialogue threads=1

A parent is a run of experiment=gold-dialogue with a finished PPO stage. `rlhf rate` learns P(broken) from the parent's comparisons, in
which truth marks the answers that say a forbidden word (no other quality is used). PPO then gets the reward model's score minus each of
--weights times P(broken). All policies answer the same --prompts new conversations with a rule once; differences are by prompt. The last
two columns are the rule model's mean P(kept) of these answers, and how often it gives an answer that keeps its rule more than one
that breaks it.
"""

import json
import random
from pathlib import Path
from typing import Any

import torch
from harness import call_once, make_cells, parse, rows, run, show, spaced, table, write_rows

from rlhf.config.compose import compose_config
from rlhf.data.chat_template import encode_prompts, encode_responses
from rlhf.data.records import Message
from rlhf.data.tokenizer import load_tokenizer
from rlhf.evaluation.statistics import interval
from rlhf.gold.truth import judge
from rlhf.gold.world import Task, make_conversation
from rlhf.ppo.rewards import load_rater

RULES = {"forbidden": "It does not say what the user forbids."}
TAKEN = ("world", "tokenizer", "pretrain", "sft", "label", "reward")


def write_prompts(folder: Path, count: int, seed: int) -> Path:
    """Conversations of the test split with a rule, each different."""
    rng, made = random.Random(f"rules-{seed}"), dict[str, Any]()
    while len(made) < count:
        task = make_conversation(rng, kind="rule", split="test", seed=seed)
        gold = {"gold": task.to_metadata()}
        row = {"kind": "prompt", "id": f"rule-{len(made)}", "prompt": task.asked, "metadata": gold}
        made.setdefault(json.dumps(task.asked), row)
    return write_rows(folder / f"prompts-{seed}.jsonl", made.values())


def write_marks(folder: Path, parent: Path, seed: int) -> Path:
    """The parent's comparisons, with the flag on responses to a conversation with a rule that say a forbidden word."""
    made = rows(parent / "label" / "comparisons.jsonl")
    for row in made:
        task = Task(**row["metadata"]["gold"])
        broken = [one["id"] for one in row["responses"] if task.ruled_out and not judge(task, one["text"])["safe"]]
        row["flags"] = {name: ["breaks_forbidden"] for name in broken}
        for one in row["responses"]:
            one["metadata"].pop("qualities", None)
    return write_rows(folder / f"marks-{seed}.jsonl", made)


def answers(home: Path, stage: str, prompts: Path, out: Path, overrides: list[str]) -> dict[str, dict[str, float]]:
    """The parts of the truth of one answer per prompt, by id of the prompt."""
    words = [f"generate.stage={stage}", f"data.prompts={prompts}", f"generate.out={out}", "gold.enabled=false"]
    own = [f"runs_dir={home.parent}", f"run={home.name}"]
    call_once(out.exists(), ["generate", *own, *words, *overrides], out.with_suffix(".log"))
    tasks = {row["id"]: Task(**row["metadata"]["gold"]) for row in rows(prompts)}
    return {row["id"]: judge(tasks[row["id"]], row["responses"][0]) for row in rows(out)}


def told_apart(rater: Path, prompts: Path, out: Path, kept: list[float], overrides: list[str]) -> list[float]:
    """The rater's mean P(kept) of the answers in `out`, and its share of pairs of a kept and a broken rule in the right order."""
    tokenizer = load_tokenizer(rater / "model")
    model = load_rater(compose_config(overrides), rater, tokenizer, torch.device("cpu"))
    asked = encode_prompts(tokenizer, [[Message(**turn) for turn in row["prompt"]] for row in rows(prompts)])
    given = encode_responses(tokenizer, [row["responses"][0] for row in rows(out)])
    values = model.rate([[*a, *b, tokenizer.eos_token_id] for a, b in zip(asked, given, strict=True)])["forbidden"]
    is_kept = torch.tensor(kept, dtype=torch.bool)
    gaps = values[is_kept][:, None] - values[~is_kept]
    return [float(values.mean()), float((gaps.sign() + 1).mean() / 2)]


def main() -> None:
    more = {"prompts": {"type": int, "default": 300}, "weights": {"type": float, "nargs": "+", "default": [1.0]}}
    asked = parse(__doc__, **more)
    rules = asked.out / "rules.json"
    rules.write_text(json.dumps(RULES), encoding="utf-8")

    def learns(seed: int, parent: Path) -> dict[str, tuple[str, ...]]:
        return {"rater": (f"data.comparisons={write_marks(asked.out, parent, seed)}",)}

    def pays(seed: int, parent: Path) -> dict[str, tuple[str, ...]]:
        rewards = f"ppo.rewards=[null,'{asked.out}/rater-seed{seed}/rate']"
        return {f"weight_{weight:g}": (rewards, f"ppo.reward_weights=[1,{weight}]") for weight in asked.weights}

    run(make_cells(asked, learns, TAKEN, {"rate": (f"rate.rules={rules}",)}), asked)
    cells = run(make_cells(asked, pays, TAKEN, {"ppo": (f"rate.rules={rules}",)}), asked)
    lines = []
    for seed, parent in zip(asked.seeds, asked.parents, strict=True):
        policies = {"SFT": (parent, "sft"), "PPO": (parent, "ppo")}
        policies |= {cell.name: (cell.home, "ppo") for cell in cells if cell.seed == seed}
        prompts, found = write_prompts(asked.out, asked.prompts, seed), dict[str, Any]()
        for name, (home, stage) in policies.items():
            out = asked.out / f"{name}-{seed}.jsonl"
            parts = found[name] = answers(home, stage, prompts, out, asked.overrides)
            kept, correct = ([one[part] for one in parts.values()] for part in ("safe", "correct"))
            less = [
                show(interval([parts[key]["safe"] - found[other][key]["safe"] for key in parts]), sign="+")
                if other in found and other != name
                else "–"
                for other in ("SFT", "PPO")
            ]
            rated = told_apart(asked.out / f"rater-seed{seed}" / "rate", prompts, out, kept, asked.overrides)
            lines.append([str(seed), spaced(name), interval(kept), *less, interval(correct), *rated])
    table(["seed", "policy", "keeps the rule", "less SFT", "less PPO", "correct", "P(kept)", "told apart"], lines)


if __name__ == "__main__":
    main()
