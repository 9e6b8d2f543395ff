"""From a study's finished cells to its figures: held-out scores and KL, win rates, bits per byte, best-of-n.

All figures are on prompts of the dev split, since studies serve to choose settings.
"""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import torch

from rlhf.commands.study_cells import EVAL_PROMPTS, Cell, cached, cell_config, mean_interval
from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.data.corpus import PackedCorpus
from rlhf.data.prompts import load_prompts
from rlhf.data.records import PromptRecord
from rlhf.data.tokenizer import load_tokenizer
from rlhf.evaluation.answers import draw, of_chat
from rlhf.evaluation.best_of import best_of_n_kl, draw_candidates, estimate_kl, expected_best
from rlhf.evaluation.policies import judge_rows, kl_rows, response_nats, score_by, totals
from rlhf.evaluation.statistics import win_rate
from rlhf.gold.truth import need_truth
from rlhf.ppo.rewards import adjust_scores
from rlhf.ppo.setup import held_out_prompts, make_reward
from rlhf.runs.folders import read_stage, settings_of
from rlhf.runs.run_files import read_jsonl
from rlhf.stages.pretrain import held_out_loss
from rlhf.training.setup import load_frozen, set_up

BEST_OF = (1, 2, 4, 8, 16, 32, 64)
TITLES = {"details": "What each choice buys", "prompts": "Prompts that the reward model knows and others"}
CURVES = ("kl", "score", "gold", "correct")
DEV_METRICS = {
    "update": "progress/step",
    "kl": "eval/dev/kl",
    "score": "eval/dev/scores",
    "gold": "eval/dev/gold/total",
    "correct": "eval/dev/gold/correct",
}


def dev_prompts(config: Config, world: Path, tokenizer: Any) -> tuple[list[PromptRecord], list[list[int]]]:
    """The study's held-out prompts of a world stage, and their tokens."""
    records, _ = load_prompts(str(world / "prompts.jsonl"))
    settings = dataclasses.replace(config, ppo=dataclasses.replace(config.ppo, eval_prompts=EVAL_PROMPTS))
    held_out = held_out_prompts(settings, records, tokenizer)
    return [record for record, _ in held_out], [ids for _, ids in held_out]


def hashes(stages: dict[str, Path]) -> dict[str, Any]:
    return {stage: (read_stage(folder) or {}).get("hash") for stage, folder in stages.items()}


# --- frontier ------------------------------------------------------------------------------------------------------


def frontier_results(config: Config, cells: list[Cell]) -> dict[str, Any]:
    """Curves of held-out proxy and gold reward during each cell's training, and best-of-n on the same prompts."""
    curves: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        rows = [row for row in read_jsonl(cell.ppo / "metrics.jsonl") if "eval/dev/kl" in row]
        points = [{name: row[metric] for name, metric in DEV_METRICS.items() if metric in row} for row in rows]
        for point in points:
            point["kl"] = max(0.0, point["kl"])
        curves.setdefault(cell.name, []).append({"seed": cell.seed, "path": points})
    by_seed = {cell.seed: cell for cell in cells}
    best_of_n = [
        cached(
            cell.folder,
            f"best-of-n-seed{seed}",
            [EVAL_PROMPTS, BEST_OF, seed, hashes(cell.stages), settings_of(cell_config(cell), "evaluate")],
            lambda c=cell: best_of_curve(c),
        )
        for seed, cell in sorted(by_seed.items())
    ]
    return {
        "study": "frontier",
        "title": "Over-optimisation: learned and true reward against KL",
        "prompts": EVAL_PROMPTS,
        "seeds": sorted(by_seed),
        "parents": len({cell.parent for cell in cells}),
        "curves": {name: {"seeds": found, "mean": mean_path(found)} for name, found in curves.items()},
        "over_optimisation": {name: over_optimisation(found) for name, found in curves.items()},
        "best_of_n": [mean_best(rows) for rows in zip(*best_of_n, strict=True)],
        "points": [
            {"kl": one["path"][-1]["kl"], "score": one["path"][-1]["score"], "gold": one["path"][-1]["gold"]}
            for runs in curves.values()
            for one in runs
        ],
    }


def mean_path(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The mean over seeds at each update that all of them reached, with intervals."""
    return [
        {"update": rows[0]["update"]}
        | {name: mean_interval([row[name] for row in rows]) for name in CURVES if name in rows[0]}
        for rows in zip(*shared_paths(runs), strict=True)
    ]


def shared_paths(runs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Each seed's rows at the updates that all of them reached, in order."""
    by_update = [{row["update"]: row for row in one["path"]} for one in runs]
    shared = sorted(set.intersection(*(set(rows) for rows in by_update)))
    return [[rows[update] for update in shared] for rows in by_update]


def over_optimisation(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Where the true reward peaks, how much of it is lost by the end, and how much learned reward is gained meanwhile.

    The highest point of a noisy curve is above its last one even if the true reward never falls, so each seed is measured
    at an update that the other seeds chose. For seed i

        peak_i         = argmax_t of the mean over the other seeds of gold_t, at the updates that all seeds reached
        gold_lost_i    = gold_i[peak_i] - gold_i[last]           negative if the true reward still rises
        score_gained_i = score_i[last] - score_i[peak_i]

    The seeds' noise being independent, E gold_lost_i is the true fall from peak_i, which is at most that from the true
    peak. The interval treats the seeds' values as independent, although their peaks are found on common curves.

    With a single seed, the loss is the mean of the middle third of its curve minus that of the last third, without an
    interval (None for fewer than 3 points), and the peak is its own. `rule` says which of the two was used.
    """
    paths = shared_paths(runs)
    if len(paths) == 1:
        return one_seed_loss(paths[0])
    of_seeds: dict[str, list[float]] = {"peak_update": [], "peak_kl": [], "gold_lost": [], "score_gained": []}
    for i, path in enumerate(paths):
        others = [sum(row["gold"] for row in rows) for rows in zip(*paths[:i], *paths[i + 1 :], strict=True)]
        peak, last = path[others.index(max(others))], path[-1]
        of_seeds["peak_update"].append(peak["update"])
        of_seeds["peak_kl"].append(peak["kl"])
        of_seeds["gold_lost"].append(peak["gold"] - last["gold"])
        of_seeds["score_gained"].append(last["score"] - peak["score"])
    return {name: mean_interval(values) for name, values in of_seeds.items()} | {"rule": "peak of the other seeds"}


def one_seed_loss(path: list[dict[str, Any]]) -> dict[str, Any]:
    """`over_optimisation` of a single seed: middle third of the curve against the last."""
    third = len(path) // 3
    middle, end = path[third : len(path) - third], path[len(path) - third :]

    def fall(name: str) -> float | None:
        if not third:
            return None
        before, after = (sum(row[name] for row in rows) / len(rows) for rows in (middle, end))
        return before - after

    peak, gained = max(path, key=lambda row: row["gold"]), fall("score")
    figures = {
        "peak_update": peak["update"],
        "peak_kl": peak["kl"],
        "gold_lost": fall("gold"),
        "score_gained": None if gained is None else -gained,
    }
    intervals: dict[str, Any] = {name: {"mean": value, "ci95": None, "n": 1} for name, value in figures.items()}
    return intervals | {"rule": "middle third less last third"}


def mean_best(rows: tuple[dict[str, float], ...]) -> dict[str, Any]:
    bounds: dict[str, Any] = {"n": rows[0]["n"], "kl": rows[0]["kl"]}
    return bounds | {
        name: mean_interval([row[name] for row in rows]) for name in (*CURVES[1:], "kl_estimate") if name in rows[0]
    }


def best_of_curve(cell: Cell) -> list[dict[str, float]]:
    """Proxy and gold reward of the best of n SFT samples by the reward of the cell's PPO, on the same prompts."""
    config = cell_config(cell)
    device = set_up(config)
    tokenizer = load_tokenizer(cell.stages["sft"] / "model")
    policy = load_frozen(config, cell.stages["sft"] / "model", device)
    reward, _ = make_reward(config, tokenizer, device)
    records, prompts = dev_prompts(config, cell.stages["world"], tokenizer)
    with inference(config, device):
        candidates = draw_candidates(config, policy, tokenizer, records, prompts, max(BEST_OF), reward)
    judged = judge_rows(need_truth(config, "study"), records, candidates["texts"], candidates["ended"])
    drawn = list(zip(candidates["ids"], candidates["logprobs"], candidates["scores"], strict=True))
    rows = []
    for size in BEST_OF:
        estimates = [estimate_kl(*draws, size) for draws in drawn]
        row = {"n": float(size), "kl": best_of_n_kl(size), "kl_estimate": sum(estimates) / len(records), "score": 0.0}
        columns = {"gold": "total"} | ({"correct": "correct"} if "correct" in judged[0][0] else {})
        row |= dict.fromkeys(columns, 0.0)
        for scores, parts in zip(candidates["scores"], judged, strict=True):
            row["score"] += expected_best(scores, scores, size) / len(records)
            for name, part in columns.items():
                row[name] += expected_best(scores, [p[part] for p in parts], size) / len(records)
        rows.append(row)
    return rows


# --- details -------------------------------------------------------------------------------------------------------


def details_results(config: Config, cells: list[Cell]) -> dict[str, Any]:
    """One row per choice: its figures, mean and interval over seeds; and its difference from the default, seed by seed."""
    table: dict[str, dict[int, dict[str, float]]] = {}
    for cell in cells:
        basis = [EVAL_PROMPTS, config.evaluate.samples, hashes(cell.stages), hashes({"ppo": cell.ppo})]
        figures = cached(cell.folder, cell.run, basis, lambda c=cell: evaluate_cell(config, c))
        table.setdefault(cell.name, {})[cell.seed] = figures
    rows = {}
    for name, by_seed in table.items():
        keys = sorted(set.intersection(*(set(found) for found in by_seed.values())))
        rows[name] = {key: mean_interval([found[key] for found in by_seed.values()]) for key in keys}
        base = table.get("default")
        if base is not None and name != "default":
            rows[name]["difference"] = {
                key: mean_interval([found[key] - base[seed][key] for seed, found in by_seed.items()])
                for key in keys
                if all(key in base[seed] for seed in by_seed)
            }
    return {
        "study": config.study.kind,
        "title": TITLES[str(config.study.kind)],
        "prompts": EVAL_PROMPTS,
        "seeds": sorted({c.seed for c in cells}),
        "parents": len({cell.parent for cell in cells}),
        "rows": rows,
    }


def evaluate_cell(config: Config, cell: Cell) -> dict[str, float]:
    """The figures of one finished cell; SFT's responses are drawn once for all cells of a parent."""
    of_cell = cell_config(cell)
    of_cell.evaluate = config.evaluate
    device = set_up(of_cell)
    sft, ppo = cell.stages["sft"] / "model", cell.ppo / "model"
    tokenizer = load_tokenizer(sft)
    records, prompts = dev_prompts(of_cell, cell.stages["world"], tokenizer)
    truth = need_truth(of_cell, "study")

    def answers_of(folder: Path, name: str) -> dict[str, Any]:
        with inference(of_cell, device):
            drawn = draw(of_cell, load_frozen(of_cell, folder, device), prompts, of_chat(tokenizer), tokenizer, name)
        return drawn | {
            kind: judge_rows(truth, records, drawn[f"{prefix}texts"], drawn[f"{prefix}ended"])
            for kind, prefix in (("judged", ""), ("judged_greedy", "greedy_"))
        }

    base = cached(
        cell.folder,
        f"sft-{cell.parent.name}-seed{cell.seed}",
        sft_basis(of_cell, cell),
        lambda: {k: v for k, v in answers_of(sft, "sft").items() if k.startswith("judged")},
    )
    ours = answers_of(ppo, "ppo")

    def mean(rows: list[list[float]]) -> float:
        return sum(map(sum, rows)) / sum(map(len, rows))

    def wins(kind: str) -> float:
        return float(win_rate(totals(ours[kind]), totals(base[kind]))["value"])  # type: ignore[arg-type]

    answers = {"prompts": prompts} | {k: v for k, v in ours.items() if not k.startswith("judged")}
    last = [row for row in read_jsonl(cell.ppo / "metrics.jsonl") if "objective/kl" in row][-1]
    with inference(of_cell, device):
        nats = response_nats(of_cell, answers, sft, tokenizer.pad_token_id, device)
        kl = mean(kl_rows(of_cell, answers, ppo, nats, tokenizer.pad_token_id, device))
    figures = {
        "win_rate": wins("judged"),
        "win_rate_greedy": wins("judged_greedy"),
        "gold": mean(totals(ours["judged"])),
        "kl": kl,
        "kl_coef": float(last["objective/kl_coef"]),
        "score": score_of(of_cell, tokenizer, records, answers, device),
        "seconds": float((read_stage(cell.ppo) or {})["seconds"]),
    }
    # The learned gain beyond the true gain, both in standard deviations of SFT's answers.
    begun = [value for row in totals(base["judged"]) for value in row]
    if spread := statistics.pstdev(begun):
        figures["gap"] = figures["score"] - (figures["gold"] - statistics.fmean(begun)) / spread
    if "correct" in truth.parts:
        figures["correct"] = mean(totals(ours["judged"], "correct"))
    if (cell.stages["pretrain"] / "corpus").is_dir():  # an adopted model has no corpus
        corpus = PackedCorpus.load(cell.stages["pretrain"] / "corpus")
        blocks = corpus.blocks("heldout", tokenizer.model_max_length)
        with inference(of_cell, device):
            figures["bpb"] = held_out_loss(of_cell, load_frozen(of_cell, ppo, device), blocks, tokenizer)["bpb"]
    if "val/explained_var" in last:
        figures["explained_var"] = float(last["val/explained_var"])
    return figures


def sft_basis(config: Config, cell: Cell) -> list[Any]:
    """What the true scores of SFT's responses depend on: not on PPO's settings (ppo.…), which differ between cells."""
    settings = settings_of(config, "evaluate")
    drawn = {key: value for key, value in settings.items() if not key.startswith("ppo.")}
    parents = hashes({name: cell.stages[name] for name in ("world", "sft")})
    return [EVAL_PROMPTS, config.evaluate.samples, parents, drawn]


def score_of(config: Config, tokenizer: Any, records: list[PromptRecord], answers: Any, device: Any) -> float:
    """Mean calibrated score of the drawn responses, as PPO's reward."""
    plain = dataclasses.replace(config, ppo=dataclasses.replace(config.ppo, calibrated=True))
    reward, _ = make_reward(plain, tokenizer, device)
    with inference(plain, device):
        scores = torch.tensor(score_by(reward, answers, records)).flatten()
    return adjust_scores(plain, scores, torch.tensor(answers["ended"]).flatten()).mean().item()
