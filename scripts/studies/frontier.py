"""Over-optimisation: learned and true reward against KL for several kl.coef, next to best-of-n (Gao et al. 2022).

    python scripts/studies/frontier.py --out runs/frontier --seeds 1 2 3 --parents runs/seed-1 runs/seed-2 runs/seed-3 \
        --picture docs/img/frontier-true-reward.png experiment=gold

Each cell is PPO of --updates updates, evaluated on 256 dev prompts every second update. Best-of-n is drawn from 64 samples of the SFT
model for the same prompts. The picture shows the true reward against the root of the KL; --measure score the learned one.
"""

from statistics import fmean
from typing import Any

from harness import Cell, Figure, cached, draw, make_cells, mean_interval, parse, run, show, table, updates_of, within

from rlhf.config.compose import compose_config

COEFFICIENTS = (0.0, 0.03, 0.1, 0.3)
BEST_OF = (1, 2, 4, 8, 16, 32, 64)
TAKEN = ("world", "tokenizer", "pretrain", "sft", "label", "reward")
DEFAULTS = ("ppo.eval_prompts=256", "ppo.eval_every=2")
MEASURED = {"kl": "eval/dev/kl", "score": "eval/dev/scores", "gold": "eval/dev/gold/total"}
LEARNED = {"score": "learned reward", "gold": "true reward"}

Rows = list[dict[str, float]]  # of one seed, by update


def read_path(cell: Cell) -> Rows:
    """Update, KL, learned and true reward on the dev prompts during a cell's training."""
    evaluated = updates_of(cell.home, "eval/dev/kl")
    return [{"update": r["progress/step"]} | {name: r[key] for name, key in MEASURED.items()} for r in evaluated]


def shared(paths: list[Rows]) -> list[Rows]:
    """Each seed's rows at the updates that all of them reached, in order."""
    updates = set.intersection(*({row["update"] for row in path} for path in paths))
    return [[row for row in path if row["update"] in updates] for path in paths]


def over_optimisation(paths: list[Rows]) -> tuple[Figure | None, Figure | None]:
    """How much true reward is lost after its peak, and how much learned reward is gained meanwhile; None for one seed.

    The highest point of a noisy curve is above its last one even if the true reward never falls, so each seed is measured at an
    update that the other seeds chose. For seed i

        peak_i         = argmax_t of the mean over the other seeds of gold_t, at the updates that all seeds reached
        gold_lost_i    = gold_i[peak_i] - gold_i[last]           negative if the true reward still rises
        score_gained_i = score_i[last] - score_i[peak_i]

    The interval treats the seeds' values as independent, although their peaks are found on common curves.
    """
    paths = shared(paths)
    if len(paths) < 2:
        return None, None
    lost, gained = [], []
    for i, path in enumerate(paths):
        others = [sum(row["gold"] for row in at) for at in zip(*paths[:i], *paths[i + 1 :], strict=True)]
        peak, last = path[others.index(max(others))], path[-1]
        lost.append(peak["gold"] - last["gold"])
        gained.append(last["score"] - peak["score"])
    return mean_interval(lost), mean_interval(gained)


def draw_candidates_of(config: Any, n: int) -> tuple[list[list[float]], list[list[dict[str, float]]]]:
    """Scores of n samples of the SFT model for each prompt of evaluate.split, as PPO would use them; and the parts of their true scores."""
    from rlhf.config.precision import inference
    from rlhf.data.tokenizer import load_tokenizer
    from rlhf.errors import UserError
    from rlhf.evaluation.best_of import draw_candidates
    from rlhf.evaluation.policies import Asked, judge_rows
    from rlhf.gold.truth import make_truth
    from rlhf.ppo.rewards import make_reward
    from rlhf.runs.folders import stage_folder
    from rlhf.stages.evaluate import load_test_prompts
    from rlhf.training.setup import load_frozen, set_up

    truth = make_truth(config)
    if truth is None:
        raise UserError("gold.enabled=false: want a run with a true score, such as one of experiment=gold")
    with inference(config, set_up(config)) as device:
        folder = stage_folder(config, "sft") / "model"
        tokenizer = load_tokenizer(folder)
        prompts = load_test_prompts(config, tokenizer)
        reward, _ = make_reward(config, tokenizer, device)
        policy = load_frozen(config, folder, device)
        answers, scores = draw_candidates(config, policy, Asked(prompts, tokenizer), n, reward)
    return scores, judge_rows(truth, prompts, answers)


def best_of_curve(cell: Cell) -> list[dict[str, float]]:
    """KL, learned and true reward of the best of each n, by the reward of the cell's PPO."""
    from rlhf.evaluation.best_of import best_of_n_kl, expected_best

    settings = [*cell.steps[0][1:], "evaluate.split=dev", "evaluate.prompts=256"]
    scores, judged = draw_candidates_of(compose_config(settings), max(BEST_OF))

    def mean(part: str, n: int) -> float:
        values = scores if part == "score" else [[row[part] for row in j] for j in judged]
        return fmean(expected_best(s, v, n) for s, v in zip(scores, values, strict=True))

    parts = {"score": "score", "gold": "total"} | ({"correct": "correct"} if "correct" in judged[0][0] else {})
    return [{"n": n, "kl": best_of_n_kl(n)} | {name: mean(part, n) for name, part in parts.items()} for n in BEST_OF]


def over_paths(paths: list[Rows]) -> list[dict[str, Any]]:
    """The mean over seeds at each shared row, with intervals."""
    return [{k: mean_interval([row[k] for row in at]) for k in at[0]} for at in zip(*paths, strict=True)]


def main() -> None:
    updates = {"type": int, "default": 30}
    asked = parse(__doc__, updates=updates, measure={"choices": list(LEARNED), "default": "gold"})
    length = f"ppo.episodes={asked.updates * compose_config(asked.overrides).ppo.episodes_per_update}"
    choices = {
        f"kl_coef_{coef}": (f"kl.coef={coef}", "kl.target=null", "ppo.ema_decay=null", length) for coef in COEFFICIENTS
    }
    cells = run(make_cells(asked, choices, TAKEN, {"ppo": DEFAULTS}), asked)

    def curve(mean: list[dict[str, Any]]) -> list[tuple[float, Any]]:
        return [(max(0.0, row["kl"]["mean"]) ** 0.5, row[asked.measure]) for row in mean]

    lines, pictured = [], {}
    for name in dict.fromkeys(cell.name for cell in cells):
        paths = [read_path(cell) for cell in cells if cell.name == name]
        mean, lost = over_paths(shared(paths)), over_optimisation(paths)
        high, last = max(mean, key=lambda row: row["gold"]["mean"]), mean[-1]
        digits = {"kl": 2, "score": 2, "gold": 3}
        at = [" · ".join(show(row[key]["mean"], d) for key, d in digits.items()) for row in (high, last)]
        losses = [show(figure, sign="+") for figure in lost]
        lines.append([name.removeprefix("kl_coef_"), f"{high['update']['mean']:.0f}", *at, *losses])
        pictured[name] = curve(mean)
    table(
        ["`kl.coef`", "highest at update", "KL · learned · true reward there", "at the end",
         "true reward lost since the other seeds' peak", "learned reward gained"], lines,
    )  # fmt: skip

    of_seed = {cell.seed: cell for cell in cells}
    curves = [cached(asked.out / f"best-of-n-seed{s}.json", lambda c=c: best_of_curve(c)) for s, c in of_seed.items()]
    best = over_paths(curves)
    lines = []
    for row in best:
        correct = within(row["correct"]) if "correct" in row else None
        nats = f"{max(0.0, row['kl']['mean']):.2f}"
        lines.append([f"{row['n']['mean']:.0f}", nats, row["score"], row["gold"], correct])
    table(["best of n", "KL", "learned reward", "true reward", "`correct`"], lines)
    pictured["best of n"] = curve(best)
    draw(asked.picture, pictured, "√KL", LEARNED[asked.measure])


if __name__ == "__main__":
    main()
