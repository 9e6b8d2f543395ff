"""After step 3: the final figures, on prompts and comparisons that no stage used for training or for choosing settings.

If the run has a true score (gold.truth), every response is scored by it. With other data the figures are the reward
model's score, the KL and the held-out accuracy of the reward model.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.data.records import shown_prompt
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import UserError
from rlhf.evaluation import policies, reward_report
from rlhf.evaluation.best_of import evaluate_best_of, evaluate_ratings
from rlhf.evaluation.judging import compare_by_endpoint, compare_policies, evaluate_people
from rlhf.evaluation.policies import ByPolicy, Responses, mean_of
from rlhf.evaluation.shots import evaluate_shots
from rlhf.evaluation.statistics import Figures, describe, interval_of, show, text_figures, win_rate
from rlhf.gold.truth import make_truth
from rlhf.model.classifier import load_reward_model
from rlhf.model.linear import hold_frozen
from rlhf.ppo.experience import Prompt, fit_prompts
from rlhf.ppo.rewards import load_rater
from rlhf.runs import folders
from rlhf.runs.folders import check_output, is_complete, needs_parent, run_folder, stage_folder
from rlhf.runs.run_files import figures_of
from rlhf.runs.sources import compared_folders, in_split, read_prompts
from rlhf.runs.stage import Stage
from rlhf.runs.trackers import Tracker
from rlhf.system.files import write_json, write_jsonl
from rlhf.system.terminal import say
from rlhf.training.setup import running, set_up

# What the setting evaluate.<name> turns on.
EVALUATIONS: dict[str, Callable[..., Figures]] = {
    "pairs": reward_report.evaluate_pairs,
    "labels": evaluate_people,
    "shots": evaluate_shots,
    "judge": compare_by_endpoint,
}


def run(config: Config) -> None:
    """Run the stage, and the evaluations that are turned on; only the latter if the stage is complete or cannot run yet."""
    if not config.evaluate.turned_on or stage_is_due(config):
        run_stage(config)
    for name in config.evaluate.turned_on:
        with inference(config, set_up(config)) as device:
            results = EVALUATIONS[name](config, device)
        path = run_folder(config) / "evaluations" / f"{name}.json"
        write_json(path, results)
        for line in [*describe(results, name), path]:
            say(f"evaluate: {line}")


def stage_is_due(config: Config) -> bool:
    """Whether the evaluation stage has everything that it needs and is not complete."""
    needed = folders.parents_of(config, "evaluate")
    complete = [is_complete(stage_folder(config, parent)) for parent in needed]
    tuned = "ppo" in needed or compared_folders(config)
    return bool(tuned) and all(complete) and not is_complete(stage_folder(config, "evaluate"))


def run_stage(config: Config) -> None:
    """Write runs/<run>/evaluate: results.json and samples.jsonl."""
    with running(config, "evaluate") as (stage, device), inference(config, device):
        tuned = tuned_policies(config, stage.say)  # refuses unfinished ones before anything that takes time
        main = next(reversed(tuned))  # PPO's, if there is one
        tokenizer = load_tokenizer(tuned[main] / "model")
        prompts = load_test_prompts(config, tokenizer, stage.say)
        truth = make_truth(config)
        asked = policies.Asked(prompts, tokenizer, truth, main=main)
        results: dict[str, Any] = {"policy": main}

        # 1. Evaluate the reward model, if the run has one
        reward_model = None
        if needs_parent(config, "evaluate", "reward"):
            reward_model = hold_frozen(
                config, load_reward_model(stage_folder(config, "reward") / "model", device), device
            )
            results["reward_model"] = reward_report.evaluate_reward_model(config, reward_model, tokenizer)
            stage.say(*reward_report.describe_reward_model(results["reward_model"]))

        # 2. Responses of every policy to the test prompts
        baselines = {name: folder for name, folder in tuned.items() if name != main}
        places = {"sft": stage_folder(config, "sft"), main: tuned[main]} | baselines
        if truth is not None and truth.base_text(prompts[0][0]) is not None:
            places = {name: stage_folder(config, "pretrain") for name in ("base", "base_prompted")} | places
        models = {name: folder / "model" for name, folder in places.items()}
        answers = policies.answer_all(config, models, asked, device)
        compared = {name: given for name, given in answers.items() if not name.startswith("base")}
        scored = reward_model is not None or not folders.scores_by_own(config)  # else nothing gives a score
        by = (config, compared, asked, reward_model, device)
        scores, rewards = policies.score_answers(*by) if scored else (ByPolicy(), ByPolicy())

        # 3. Evaluate the policies
        optimised = {name: policies.adjusted(config, answers[name].samples, rows) for name, rows in rewards.items()}
        results["reward"] = {name: mean_of(rows) for name, rows in optimised.items()}
        results["reward_without_eos_rule"] = {name: mean_of(rows) for name, rows in scores.items()}
        ended = {name: [[one.ended for one in row] for row in given.samples] for name, given in compared.items()}
        results["ended"] = {name: mean_of(rows) for name, rows in ended.items()}
        nats, kl = policies.nats_and_kl(config, compared, models, tokenizer.pad_token_id, device)
        results["kl_to_sft_nats"] = mean_of(kl[main])
        results["kl"] = {name: interval_of(rows) for name, rows in kl.items()}
        results["text"] = {name: text_figures(given.samples, nats[name]) for name, given in compared.items()}
        if scored:
            results["rm_win_rate_vs_sft"] = win_rate(optimised[main], optimised["sft"])
        gold = None
        if truth is not None:
            gold = {name: policies.judge_by_truth(truth, given) for name, given in answers.items()}
            results["gold"] = policies.summarize_truth(truth, gold, main)
        if baselines:
            results["baselines"] = policies.baseline_figures(baselines, kl, optimised, gold)
        rater = None
        if "rate" in tuned:
            rater = load_rater(config, tuned["rate"], tokenizer, device)
            results["ratings"] = evaluate_ratings(config, rater, compared)
        if config.evaluate.best_of and scored:
            results |= evaluate_best_of(config, asked._replace(gold=gold), models, device, rater)
        if needs_parent(config, "evaluate", "judge"):
            results["judge"] = compare_policies(config, compared, asked, device)
        results |= policies.costs(config)
        with Tracker(stage) as tracker:  # before the samples: opening a tracker truncates the stage's files
            tracker.log(figures_of(results), step=0)
        results["seconds"]["evaluate"] = round(stage.elapsed(), 1)
        if stage.writes:
            write_samples(stage.folder / "samples.jsonl", prompts, answers, gold, scores)
            write_json(stage.folder / "results.json", results)
        say_results(stage, results)
        stage.finish()


def load_test_prompts(config: Config, tokenizer: Any, say: Callable[[str], None] = say) -> list[Prompt]:
    """A sample of `evaluate.prompts` prompts of the split that fit the context."""
    split, count, limit = config.evaluate.split, config.evaluate.prompts, config.data.limit
    chosen = fit_prompts(config, tokenizer, in_split(config, read_prompts(config), split), count, split, say)
    if not chosen:
        remedy = f"raise data.{split}, or add shorter prompts" + (f", or raise data.limit={limit}" if limit else "")
        raise UserError(f"evaluate: no {split} prompt fits the context: {remedy}")
    return chosen


def tuned_policies(config: Config, say: Callable[[str], None]) -> dict[str, Path]:
    """Folders of the policies that are compared with SFT, PPO's last, but for those of another SFT model. Raises: UserError."""
    sft, tuned, compared = check_output(stage_folder(config, "sft"), "sft")["hash"], {}, compared_folders(config)
    if not compared or needs_parent(config, "evaluate", "ppo"):
        compared["ppo"] = stage_folder(config, "ppo")
    for name, folder in compared.items():
        if check_output(folder, folder.name)["parents"].get("sft") == sft:
            tuned[name] = folder
        else:
            say(f"{folder}: built on another SFT model: left out, `rlhf {folder.name} overwrite=true` makes it anew")
    record, now = folders.read_stage(tuned["ppo"]) if "ppo" in tuned else None, folders.identity_of(config, "ppo")
    recorded = (record or {}).get("settings", {})
    keys = ("ppo.rewards", "ppo.reward_weights", "ppo.reward_parameters", "ppo.calibrated")
    if changed := [key for key in keys if key in recorded and recorded[key] != now[key]]:
        say(f"warning: {tuned['ppo']} was trained with another {', '.join(changed)} than the figures are by")
    if not tuned:
        raise UserError(f"{run_folder(config)}: no policy built on this run's SFT model: run `rlhf ppo` or `rlhf dpo`")
    return tuned


# --- the record ----------------------------------------------------------------------------------------------------


def write_samples(
    path: Path, prompts: list[Prompt], answers: dict[str, Responses], gold: Any, scores: ByPolicy
) -> None:
    """One line per test prompt: the first sample of every policy, with its scores."""
    rows = []
    for i, (record, _) in enumerate(prompts):
        row: dict[str, Any] = {"id": record.id, "prompt": shown_prompt(record.prompt)}
        row["responses"] = {name: given.samples[i][0].text for name, given in answers.items()}
        row["scores"] = {name: round(s[i][0], 4) for name, s in scores.items()}
        if gold is not None:
            row["gold"] = {name: round(given["samples"][i][0]["total"], 4) for name, given in gold.items()}
        rows.append(row)
    write_jsonl(path, rows)


def say_results(stage: Stage, results: dict[str, Any]) -> None:
    for line in (*describe(results["reward"] or {}, "reward"), f"KL {results['kl_to_sft_nats']:.2f} nats"):
        stage.say(line)
    if "gold" in results:
        gold = results["gold"]
        rate, greedy = (show(gold[name]) for name in ("win_rate_vs_sft", "win_rate_greedy"))
        stage.say(f"win rate of {results['policy']} over SFT by the {gold['truth']} {rate}, greedy {greedy}")
        for line in describe(gold["mean_score"], "mean true score"):
            stage.say(line)
    for name in ("baselines", "judge", "ratings", "best_of_n", "generate_and_rate"):
        stage.say(*describe(results.get(name, {}), name.replace("_", " ")))
