"""What makes PPO steadier if a quarter of the rankings are wrong? Ensembles, averages, bounds, and the critic.

    python scripts/studies/steadier.py --out runs/steadier --seeds 0 1 2 3 4 --parents runs/seed-0 … runs/seed-4 experiment=gold threads=1

The parents' rankings, a quarter of them reversed, train three reward models per seed. Each arm is PPO against them, evaluated after
every update on 256 dev prompts. The arms are compared with the first model alone at one KL, by linear interpolation along each run.
"""

import copy
import random
from pathlib import Path
from typing import Any

import harness
import numpy as np
from harness import draw, make_cells, mean_interval, parse, rows, run, show, table

MODELS = 3
WRONG = 0.25
LEVELS = (1.0, 1.5)  # nats per sequence
FUNCTIONS = Path(__file__).with_name("steadier_rewards.py")
# Settings of arms that pay the first model's score as `one` does; the others are kinds of `reward` in FUNCTIONS.
CRITICS = {"one": (), "two_lambdas": (f"ppo.advantages='{FUNCTIONS}:two_lambdas'",), "first_critic": ("ppo.critic_warmup_updates=3",),
           "new_critic": ("ppo.critic=sft",)}  # fmt: skip
SETTINGS = CRITICS | {"averaged_reference": (f"plugins='{FUNCTIONS}:average_reference'",)}
ARMS = (*SETTINGS, "mean", "lower", "worst", "averaged", "bounded", "even")
BEFORE = ("world", "tokenizer", "pretrain", "sft", "label")
REWARD = ("reward.audit=0", "reward.fit_head=true")  # one start for all heads, so that weights can be averaged
PPO = ("ppo.eval_prompts=256", "ppo.eval_every=1", "ppo.ema_decay=null", "ppo.samples_every=100",
       "checkpoints.every_seconds=0", "checkpoints.keep_every=4")  # fmt: skip


def spoil(parent: Path, out: Path) -> Path:
    """The parent's rankings with a quarter of those that train reversed, drawn by their names."""
    if not out.exists():
        made = rows(parent / "label" / "comparisons.jsonl")
        for row in made:
            if row["metadata"]["split"] == "train" and random.Random(f"wrong-{row['id']}").random() < WRONG:
                row |= {"ranking": row["ranking"][::-1], "ratings": {}}
        harness.write_rows(out, made)
    return out


def prepare(asked: Any) -> dict[int, dict[str, Any]]:
    """By seed: the reward models' folders and the file of facts about SFT's answers. Trains what is missing."""
    members: list[harness.Cell] = []
    for number in range(MODELS):
        for cell in make_cells(asked, lambda *_, n=number: {f"model{n}": ()}, BEFORE, {"reward": REWARD}):
            labels = spoil(cell.parent, asked.out / f"labels-seed{cell.seed}.jsonl")
            members.append(cell.changed(f"seed={100 * number + cell.seed}", f"data.comparisons='{labels}'"))
    run(members, asked)
    found = {}
    for seed in asked.seeds:
        folders = [str(cell.home / "reward" / "model") for cell in members if cell.seed == seed]
        facts = asked.out / f"facts-seed{seed}.json"
        harness.cached(facts, lambda folders=folders, facts=facts, seed=seed: measure(folders, facts, asked, seed))
        found[seed] = {"models": folders, "facts": str(facts)}
    return found


def measure(folders: list[str], facts: Path, asked: Any, seed: int) -> dict[str, Any]:
    """Facts about the first model's scores of SFT's ranked answers; writes the average of the models' weights, recalibrated."""
    from statsmodels.nonparametric.smoothers_lowess import lowess
    from steadier_rewards import loaded, scores_of

    from rlhf.data.chat_template import encode_responses
    from rlhf.data.tokenizer import load_tokenizer

    tokenizer, prompts, tokens = load_tokenizer(folders[0]), [], []
    for row in rows(asked.out / f"labels-seed{seed}.jsonl")[:400]:
        answers = [answer for answer in row["responses"] if answer["metadata"]["ended"]]
        prompts += [row["prompt"]] * len(answers)
        tokens += [[*ids, tokenizer.eos_token_id] for ids in encode_responses(tokenizer, [a["text"] for a in answers])]
    first = scores_of(folders[:1], prompts, tokens)[0].double().numpy()
    lengths = np.array([len(ids) for ids in tokens], float)
    curve = np.unique(lowess(first - first.mean(), lengths, frac=2 / 3), axis=0)
    average = copy.deepcopy(loaded(folders[0]))
    states = [loaded(folder).state_dict() for folder in folders]
    average.load_state_dict({name: sum(s[name] for s in states) / MODELS for name in states[0]})
    target = facts.with_suffix("") / "model"
    average.calibrate(1.0, 0.0)
    average.save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))
    raw = scores_of([str(target)], prompts, tokens)[0]
    gain = float(first.std() / raw.double().std())
    average.calibrate(gain, float(raw.double().mean()) - float(first.mean()) / gain)
    average.save_pretrained(str(target))
    loaded.cache_clear()
    return {"sft_mean": float(first.mean()), "by_length": curve.T.tolist(), "averaged": str(target)}


def with_arm(cell: harness.Cell, models: list[str], facts: str) -> harness.Cell:
    """The cell with its arm's sources."""
    first = f"'{Path(models[0]).parent}'"
    if cell.name in SETTINGS:
        return cell.changed(*SETTINGS[cell.name], f"ppo.rewards=[{first}]")
    names = ",".join(f"'{folder}'" for folder in models)
    given = f"ppo.reward_parameters={{kind:{cell.name},models:[{names}],facts:'{facts}'}}"
    return cell.changed(given, f"ppo.rewards=[{first},'{FUNCTIONS}:reward']")


def figures(cell: harness.Cell) -> dict[str, float]:
    """The true reward at each level of KL (of the first crossing; none if it is not reached), and at the end; and how many updates it
    takes to 90% of what `one` gains of true reward in all of its updates.
    """
    path = harness.updates_of(cell.home, "eval/dev/kl")
    kl, gold = ([row[f"eval/dev/{name}"] for row in path] for name in ("kl", "gold/total"))
    found = {"gold_end": gold[-1], "kl_end": kl[-1], "learned_end": path[-1]["eval/dev/scores"]}
    for level in LEVELS:
        after = next((i for i, value in enumerate(kl) if value >= level), None)
        if after:
            share = (level - kl[after - 1]) / (kl[after] - kl[after - 1])
            found[f"gold_{level:g}"] = gold[after - 1] + share * (gold[after] - gold[after - 1])
    ones = harness.updates_of(cell.home.with_name(f"one-seed{cell.seed}"), "eval/dev/kl")
    first, *_, end = (row["eval/dev/gold/total"] for row in ones)
    wanted = first + 0.9 * (end - first)
    reached = next((i for i, value in enumerate(gold) if value >= wanted), None)
    if reached:
        found["updates"] = reached - 1 + (wanted - gold[reached - 1]) / (gold[reached] - gold[reached - 1])
    return found | {"explained": path[-1].get("val/explained_var", float("nan"))}


def main() -> None:
    asked = parse(__doc__)
    prepared = prepare(asked)
    cells = make_cells(asked, dict.fromkeys(ARMS, ()), BEFORE, {"ppo": PPO})
    cells = [with_arm(cell, **prepared[cell.seed]) for cell in cells]
    for seed in asked.seeds:  # seed by seed: what is done when time ends is paired
        run([cell for cell in cells if cell.seed == seed], asked)
    found = harness.collect(cells, figures)
    keys = [*(f"gold_{level:g}" for level in LEVELS), "gold_end", "kl_end", "learned_end", "updates", "explained"]
    table(["arm", *keys], [[name, *(mean_of(by_seed, key) for key in keys)] for name, by_seed in found.items()])
    changes = harness.less(found, "one").items()
    lines = [[name, *(show(mean_of(by_seed, key), sign="+") for key in keys)] for name, by_seed in changes]
    table(["less `one`, paired over seeds", *keys], lines)
    series = {n: [(mean_of(f, "kl_end")["mean"], mean_of(f, "gold_end"))] for n, f in found.items()}
    draw(asked.picture, series, "KL, nats per sequence", "gold score", line=False)


def mean_of(by_seed: dict[int, dict[str, float]], key: str) -> Any:
    """Over the seeds that have the figure."""
    values = [row[key] for row in by_seed.values() if key in row]
    return mean_interval(values) if values else None


if __name__ == "__main__":
    main()
