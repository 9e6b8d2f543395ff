"""Labels that reward models choose against labels at random, in the gold world: accuracy by number of labelled prompts.

    for seed in 0 1 2 3 4; do rlhf sft experiment=gold rounds=1 run=base-$seed seed=$seed threads=1; done   after world, tokenizer, pretrain
    python scripts/studies/active.py --out runs/active --seeds 0 1 2 3 4 --parents runs/base-0 … runs/base-4 \
        --ppo random-500 random-1000 uncertain-500 disagreement-500 experiment=gold rounds=1 threads=1

The parent's SFT model answers 1600 prompts, and simulated labelers rank all answers. A reward model is trained on FIRST prompts at random,
then on twice as many, and so on. `random` draws the prompts; `uncertain` and `disagreement` choose each batch as `rlhf sample` does, with
its defaults: from four times as many prompts, a quarter at random, by the reward model so far, or by three that differ in their seed.
Accuracy is that on the pairs of all held-out test prompts, which nobody chose. --ppo trains a policy against each of these reward models,
and compares its true win rate over SFT with that of the first one.
"""

import math
from contextlib import redirect_stdout
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import harness

from rlhf.config.compose import compose_config
from rlhf.config.precision import inference
from rlhf.data.encoding import join_rankings
from rlhf.data.reading import load_comparisons
from rlhf.data.storage import to_line
from rlhf.evaluation import scoring
from rlhf.recipe import STAGES
from rlhf.training.setup import set_up

FIRST, STEPS = 125, {"random": 3, "uncertain": 2, "disagreement": 2}  # the number of prompts doubles so often
TAKEN = ("world", "tokenizer", "pretrain", "sft")
MEMBERS, POOL, RANDOM, DEMONSTRATIONS = 3, 4, 0.25, 64
SETTINGS = (
    "gold.comparison_prompts=1600", "reward.audit=0", "reward.calibration_samples=64", "round.later_reward_epochs=null",
)  # fmt: skip


class Study:
    """One seed: its labelled prompts, and reward models on parts of them."""

    def __init__(self, asked: Any, seed: int, parent: Path):
        self.out, self.seed = asked.out, seed
        taken = [f"parents.{stage}='{parent / stage}'" for stage in TAKEN]
        self.shared = [*asked.overrides, *SETTINGS, *taken, f"runs_dir='{asked.out}'", "tracking=jsonl"]
        pool = asked.out / f"pool-seed{seed}"
        some = asked.out / f"demonstrations-seed{seed}.jsonl"  # calibration shifts all scores alike: a few will do
        lines = (parent / "world" / "demonstrations.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        some.write_text("".join(lines[:DEMONSTRATIONS]), encoding="utf-8")
        self.shared.append(f"data.demonstrations='{some}'")
        self.run("label", pool.name, seed)
        self.records = load_comparisons(str(pool / "label" / "comparisons.jsonl"))[0]
        by_prompt: dict[str, list[Any]] = {}
        for record in self.records:
            if record.metadata["split"] == "train":
                by_prompt.setdefault(record.id.rpartition("-labeler")[0], []).append(record)
        self.prompts = list(by_prompt.values())  # each one's rankings, in the world's order, which is random

    def run(self, stage: str, name: str, seed: int, *more: str) -> Path:
        """A stage in this process, unless it is complete: most take seconds, of which a process of its own would take as many."""
        home = self.out / name
        if not harness.is_complete(home / stage):
            with (self.out / "active.log").open("a", encoding="utf-8") as log, redirect_stdout(log):
                import_module(STAGES[stage].module).run(self.config(name, seed, *more))
        return home

    def train(self, name: str, chosen: list[int], member: int = 0) -> Path:
        """A reward model on the rankings of these prompts, calibrated as usual; the held-out rankings are the same for all."""
        name, path = f"{name}-seed{self.seed}", self.out / f"{name}-seed{self.seed}.jsonl"
        kept = [record for place in chosen for record in self.prompts[place]]
        kept += [record for record in self.records if record.metadata["split"] != "train"]
        path.write_text("".join(map(to_line, kept)), encoding="utf-8")
        name, seed = f"{name}-member{member}" if member else name, self.seed + 100 * member
        labels = f"parents.label='{self.out}/pool-seed{self.seed}/label'"
        return self.run("reward", name, seed, f"data.comparisons='{path}'", labels)

    def config(self, name: str = "", seed: int | None = None, *more: str) -> Any:
        own = [f"run={name or f'pool-seed{self.seed}'}", f"seed={self.seed if seed is None else seed}"]
        return compose_config([*self.shared, *own, *more])

    def choose(self, how: str, models: list[Path], chosen: list[int], count: int) -> list[int]:
        """`count` more prompts: of POOL times as many that are not labelled yet, in their order."""
        free = [place for place in range(len(self.prompts)) if place not in set(chosen)]
        pool, share = (1, 1.0) if how == "random" else (POOL, RANDOM)
        tasks = [self.prompts[place][0] for place in free[: count * pool]]
        values = [0.0] * len(tasks)
        if how != "random":
            values = scoring.value_tasks(self.config(), tasks, how, [str(model) for model in models])
        return [
            free[i] for i in scoring.choose_prompts_by(values, [task.id for task in tasks], count, share, self.seed)
        ]

    def accuracy(self, home: Path) -> dict[str, float]:
        """On the pairs of test prompts, by the labelers whose rankings train; and loss in nats per pair."""
        config = self.config()
        device = set_up(config)
        strangers = scoring.held_out_labelers(config, self.records)
        test = [r for r in self.records if r.metadata["split"] == "test" and r.labeler not in strangers]
        with inference(config, device):
            _, model, encode = scoring.load_judge(config, str(home), "active", device)
            items, _ = join_rankings(test, encode)
            pairs = scoring.judged_pairs(items, scoring.score_each(model, [item.rows for item in items]))
        gain = harness.read(home / "reward" / "stage.json")["summary"]["gain"]
        loss = sum(math.log1p(math.exp(-pair.margin / gain)) for pair in pairs) / len(pairs)
        return {"accuracy": scoring.accuracy(pairs)["value"], "loss": loss, "pairs": len(pairs)}

    def figures(self) -> dict[str, dict[int, dict[str, float]]]:
        """{arm: {labelled prompts: figures}}."""

        def measured(home: Path, chosen: list[int]) -> dict[str, float]:
            rankings = {"rankings": sum(len(self.prompts[i]) for i in chosen)}
            return harness.cached(home / "test.json", lambda: self.accuracy(home)) | rankings

        order = list(range(FIRST))
        first = [self.train("first", order, member) for member in range(MEMBERS)]
        found: dict[str, dict[int, dict[str, float]]] = {}
        for how, steps in STEPS.items():
            chosen, models = order, first
            found[how] = {FIRST: measured(first[0], chosen)}
            for step in range(steps):
                used = models if how == "disagreement" else models[:1]
                chosen = [*chosen, *self.choose(how, used, chosen, len(chosen))]
                members = MEMBERS if how == "disagreement" and step + 1 < steps else 1
                models = [self.train(f"{how}-{len(chosen)}", chosen, member) for member in range(members)]
                found[how][len(chosen)] = measured(models[0], chosen)
        return found


def labels_needed(curve: dict[int, dict[str, float]], accuracy: float) -> float | None:
    """The prompts at which a curve reaches an accuracy, with log(prompts) interpolated; none if it does not."""
    points = sorted((n, figures["accuracy"]) for n, figures in curve.items())
    for (a, low), (b, high) in pairwise(points):
        if low <= accuracy <= high:
            return math.exp(math.log(a) + (math.log(b) - math.log(a)) * (accuracy - low) / max(high - low, 1e-9))
    return None


def main(asked: Any) -> None:
    """Train what is missing, then print accuracy by labelled prompts, differences from random paired over seeds, and labels needed."""
    by_seed = {}
    for seed, parent in zip(asked.seeds, asked.parents, strict=True):
        by_seed[seed] = Study(asked, seed, parent).figures()
        print(f"seed {seed}: {by_seed[seed]}", flush=True)
    arms = [(how, n) for how, curve in by_seed[asked.seeds[0]].items() for n in curve]
    found = {f"{how} {n}": {seed: by_seed[seed][how][n] for seed in by_seed} for how, n in arms}
    means = harness.print_means("prompts", found, {key: key for key in ("rankings", "accuracy", "loss")})
    lines = []
    for how, n in arms:
        if how != "random" and n > FIRST:
            change = harness.over_seeds(harness.less(found, f"random {n}"))[f"{how} {n}"]
            needed = [labels_needed(one["random"], one[how][n]["accuracy"]) for one in by_seed.values()]
            ratios = [math.log2(one / n) for one in needed if one is not None]
            figures = [harness.show(change[key], sign="+") for key in ("accuracy", "loss")]
            figures.append(harness.show(harness.mean_interval(ratios) if ratios else None, 2))
            lines.append([f"{how} {n}", *figures, f"{len(ratios)} of {len(needed)}"])
    harness.table(
        ["less random, paired over seeds", "accuracy", "loss", "log2(random's prompts / these)", "seeds on random's curve"],
        lines,
    )  # fmt: skip
    series = {how: [(float(n), means[f"{how} {n}"]["accuracy"]) for one, n in arms if one == how] for how in STEPS}
    harness.draw(asked.picture, series, "labelled prompts", "accuracy on test pairs")
    if asked.ppo:
        compare_policies(asked)


def compare_policies(asked: Any) -> None:
    """PPO against the reward models that --ppo names: win rate and KL, and differences from the first, paired over seeds."""

    def choices(seed: int, parent: Path) -> harness.Choices:
        pool = (*SETTINGS, f"parents.label='{asked.out}/pool-seed{seed}/label'")
        return {f"ppo-{arm}": (*pool, f"parents.reward='{asked.out}/{arm}-seed{seed}/reward'") for arm in asked.ppo}

    def figures(cell: harness.Cell) -> dict[str, float]:
        results = cell.results()
        return {
            "gold win rate over SFT": results["gold"]["win_rate_vs_sft"]["value"],
            "KL to SFT, nats": results["kl_to_sft_nats"],
        }

    cells = harness.run(
        harness.make_cells(asked, choices, TAKEN, {"ppo": (), "evaluate": ("evaluate.best_of=0",)}), asked
    )
    found = harness.collect(cells, figures)
    harness.print_means("PPO against", found)
    harness.print_means(f"less {harness.spaced(cells[0].name)}", harness.less(found, cells[0].name))


if __name__ == "__main__":
    main(harness.parse(__doc__, ppo={"nargs": "+", "default": []}))
