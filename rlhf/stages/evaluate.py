"""Stage 5: the final figures, on prompts and comparisons that no stage used for training or for choosing settings.

If the run has a true score (gold.truth), every response is scored by it. With other data the figures are the reward model's score,
the KL and the held-out accuracy of the reward model.
"""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.config.setting import listed
from rlhf.data.chat_template import decode_response, end_ids, response_text
from rlhf.data.prompts import fitting_prompts, load_prompts
from rlhf.data.records import Demonstration, PromptRecord
from rlhf.data.tasks import shown_prompt
from rlhf.data.tokenizer import encode_texts, load_tokenizer
from rlhf.engines.sampler import Samples, sample_as_configured
from rlhf.errors import UserError
from rlhf.evaluation import external
from rlhf.evaluation.best_of import Asked, pick_best
from rlhf.evaluation.best_of import describe_ratings, evaluate_generate_and_rate
from rlhf.evaluation.reward_report import (
    describe,
    evaluate_reward_model,
    score_distributions,
    unseen_demonstrations,
)
from rlhf.evaluation.scoring import response_batches, score_answers_by
from rlhf.evaluation.statistics import win_rate
from rlhf.evaluation.statistics import text_figures
from rlhf.evaluation.judging import compare_policies, describe_comparisons
from rlhf.evaluation.truth_figures import (
    interval_of,
    judge_answers,
    mean_of,
    summarize_truth,
    truth_win_rates,
)
from rlhf.gold.corpus import talk
from rlhf.gold.truth import Requests, make_truth
from rlhf.gold.world import task_from_metadata
from rlhf.model.classifier import load_reward_model
from rlhf.model.half import hold_frozen
from rlhf.ppo.rewards import Episodes, Reward, adjust_scores
from rlhf.ppo.rollout import response_logprobs
from rlhf.ppo.setup import make_reward
from rlhf.recipe import BASELINES
from rlhf.runs.folders import (
    check_output,
    is_complete,
    needs_parent,
    read_stage,
    rounds_before,
    run_folder,
    stage_folder,
    stages_of,
)
from rlhf.runs.progress import progress
from rlhf.runs.results import log_results
from rlhf.runs.sources import hash_sources, need_source, of_split, reward_sources
from rlhf.runs.stage import Stage, open_stage
from rlhf.system.files import write_json, write_jsonl
from rlhf.system.terminal import say
from rlhf.training.setup import load_frozen, open_tracker, set_up


def run(config: Config) -> None:
    """Run the stage and the evaluations of evaluate.pairs etc.; only the latter if the stage is complete or cannot run yet."""
    if not external.asked(config) or external.stage_is_due(config):
        run_stage(config)
    external.run_external(config)


def run_stage(config: Config) -> None:
    """Write runs/<run>/evaluate: results.json and samples.jsonl."""
    sources = hash_sources(config, "evaluate")
    with open_stage(config, "evaluate", sources) as stage, inference(config, set_up(config)) as device:
        tokenizer = load_tokenizer(stage_folder(config, "ppo") / "model")
        records, prompts = load_test_prompts(config, tokenizer, need_source(config, "prompts"), stage.say)
        baselines = finished_baselines(config, stage.say)  # refuses unfinished ones before anything that takes time
        results: dict[str, Any] = {}

        # 1. Evaluate the reward model, if the run has one
        reward_model, demonstrations = None, (list[Demonstration](), "")
        if needs_parent(config, "evaluate", "reward"):
            reward_model = load_reward_model(stage_folder(config, "reward") / "model", device)
            reward_model = hold_frozen(config, reward_model, device)
            demonstrations = unseen_demonstrations(config)
            results["reward_model"] = evaluate_reward_model(config, reward_model, tokenizer, device)
            for line in describe(results["reward_model"]):
                stage.say(line)

        # 2. Responses of every policy to the test prompts
        truth = make_truth(config)
        folders = {"sft": stage_folder(config, "sft"), "ppo": stage_folder(config, "ppo")} | baselines
        if isinstance(truth, Requests):
            folders = {name: stage_folder(config, "pretrain") for name in ("base", "base_prompted")} | folders
        models = {name: folder / "model" for name, folder in folders.items()}
        answers = answer_all(config, models, records, prompts, tokenizer, device)
        scores, rewards = score_answers(config, answers, records, reward_model, tokenizer, device)
        if reward_model is not None:
            results["reward_model"]["scores"] = score_distributions(
                reward_model, tokenizer, demonstrations, scores["sft"], device
            )

        # 3. Evaluate the policies
        optimised = with_missing_eos(config, answers, rewards)
        results["reward"] = {name: mean_of(rows) for name, rows in optimised.items()}
        results["reward_without_eos_rule"] = {name: mean_of(rows) for name, rows in scores.items()}
        results["ended"] = {name: mean_of(answers[name]["ended"]) for name in scores}
        nats, kl = nats_and_kl(config, {name: answers[name] for name in scores}, models, tokenizer.pad_token_id, device)
        results["kl_to_sft_nats"] = mean_of(kl["ppo"])
        results["kl"] = {name: interval_of(rows) for name, rows in kl.items()}
        lengths = {name: [list(map(len, row)) for row in answers[name]["ids"]] for name in scores}
        results["text"] = {name: text_figures(answers[name]["texts"], lengths[name], nats[name]) for name in scores}
        results["rm_win_rate_vs_sft"] = win_rate(optimised["ppo"], optimised["sft"])
        gold = None if truth is None else judge_answers(truth, records, answers)
        if truth is not None and gold is not None:
            results["gold"] = summarize_truth(truth, gold)
        if baselines:
            results["baselines"] = baseline_figures(baselines, kl, optimised, gold)
        if config.evaluate.best_of:
            results |= evaluate_best_of(config, Asked(records, prompts, tokenizer, truth, gold), models, device)
        if needs_parent(config, "evaluate", "judge"):
            results["judge"] = compare_policies(config, answers, records, tokenizer, device)
        results |= costs(config)
        with open_tracker(stage) as tracker:  # before the samples: opening a tracker truncates the stage's files
            log_results(tracker, results, scores)
        write_samples(stage.folder / "samples.jsonl", records, answers, gold, scores)
        results["seconds"]["evaluate"] = round(stage.elapsed(), 1)
        write_json(stage.folder / "results.json", results)
        say_results(stage, results)
        stage.finish()


def load_test_prompts(
    config: Config, tokenizer: Any, source: Any, say: Callable[[str], None] = say
) -> tuple[list[PromptRecord], list[list[int]]]:
    """The first `evaluate.prompts` prompts of the test split that fit the context, and their tokens."""
    records, _ = load_prompts(source, config.data.format, config.data.allow_partial)
    room = tokenizer.model_max_length - config.rollout.max_new_tokens
    fitting = fitting_prompts(tokenizer, of_split(config, records, "test"), room)
    chosen = list(itertools.islice(fitting, config.evaluate.prompts))
    cut = sum(was_cut for _, _, was_cut in chosen)
    say(f"{len(chosen)} test prompts" + (f", {cut} of them cut from the left to fit" if cut else ""))
    if not chosen:
        raise UserError(
            "evaluate: no prompt of the test split fits the context: raise data.test, or add shorter prompts"
        )
    return [record for record, _, _ in chosen], [ids for _, ids, _ in chosen]


def finished_baselines(config: Config, say: Callable[[str], None]) -> dict[str, Path]:
    """Folders of the policies to compare PPO's with: this run's complete optional stages (rejection sampling, DPO), and the PPO
    of each run in evaluate.compare.

    One that was built on another SFT model than this run's is named and left out. Raises: UserError for a run without PPO.
    """
    baselines = {}
    sft = check_output(stage_folder(config, "sft"), "sft")["hash"]
    folders = {name: run_folder(config) / name for name in BASELINES if is_complete(run_folder(config) / name)}
    for name in listed(config.evaluate.compare):
        folders[name] = Path(config.runs_dir) / name / "ppo"
    for name, folder in folders.items():
        if check_output(folder, folder.name)["parents"].get("sft") == sft:
            baselines[name] = folder
        else:
            say(
                f"{folder}: built on another SFT model: left out, run `rlhf {folder.name} overwrite=true` to compare it"
            )
    return baselines


# One policy's responses: {"prompts"} and what `draw` returns; one list per prompt.
Answers = dict[str, list[Any]]


def answer_all(
    config: Config,
    models: dict[str, Path],
    records: list[PromptRecord],
    prompts: list[list[int]],
    tokenizer: Any,
    device: torch.device,
) -> dict[str, Answers]:
    """Samples at temperature 1 and greedy responses of each policy.

    The base model (built-in world only) is prompted twice: with the chat template, which it has never seen, and with a document
    from its corpus ("GPT" and "GPT prompted" of Ouyang et al. 2022, section 3.5).
    """
    answers, decode = {}, functools.partial(decode_response, tokenizer)
    with progress(len(models) * len(prompts), "evaluate", unit="prompt") as bar:
        for name, folder in models.items():
            policy = load_frozen(config, folder, device)
            policy_prompts, reading = prompts, of_chat(tokenizer)
            if name == "base_prompted":  # the beginning of a text like those it was trained on
                texts = [talk(task_from_metadata(record.metadata["gold"])) for record in records]
                policy_prompts = encode_texts(tokenizer, texts)  # the answer follows a line with the speaker's name
                reading = Reading([tokenizer.bos_token_id], lambda ids: decode(ids).split("\n", 1)[-1].strip())
            drawn = draw(config, policy, policy_prompts, reading, tokenizer, name)
            answers[name] = {"prompts": policy_prompts} | drawn
            bar.update(len(prompts))
    return answers


class Reading(NamedTuple):
    """Where a response ends, and its text."""

    ends: list[int]
    text: Callable[[list[int]], str]  # of the tokens without the end token


def of_chat(tokenizer: Any) -> Reading:
    return Reading(end_ids(tokenizer), functools.partial(response_text, tokenizer))


def draw(
    config: Config, policy: Any, prompts: list[list[int]], reading: Reading, tokenizer: Any, name: str
) -> dict[str, Any]:
    """{"ids", "texts", "ended"}: lists per prompt of `evaluate.samples` responses; and the greedy ones."""
    count = config.evaluate.samples
    repeated = [prompt for prompt in prompts for _ in range(count)]
    keys = [("evaluate", name, i, j) for i in range(len(prompts)) for j in range(count)]
    respond = functools.partial(sample_as_configured, config, policy, tokenizer, eos_token_id=reading.ends)
    drawn = unpack(respond(repeated, keys=keys), reading, count)
    greedy = unpack(respond(prompts, greedy=True), reading, 1)
    return drawn | {f"greedy_{key}": value for key, value in greedy.items()}


def unpack(samples: Samples, reading: Reading, count: int) -> dict[str, list[list[Any]]]:
    ended = samples.ended.tolist()
    texts = [reading.text(ids[:-1] if ids and ids[-1] in reading.ends else ids) for ids in samples.responses]
    groups = range(0, len(texts), count)
    return {
        "ids": [samples.responses[i : i + count] for i in groups],
        "texts": [texts[i : i + count] for i in groups],
        "ended": [ended[i : i + count] for i in groups],
    }


Scores = dict[str, list[list[float]]]  # by policy, a list per prompt


def score_answers(
    config: Config,
    answers: dict[str, Answers],
    records: list[PromptRecord],
    reward_model: Any,
    tokenizer: Any,
    device: torch.device,
) -> tuple[Scores, Scores]:
    """Scores of the samples of SFT, PPO and the baselines: by the run's own calibrated reward model, and by PPO's sources.

    The two are the same if ppo.rewards, ppo.reward_weights and ppo.calibrated are not set, or if there is no reward model.
    """
    names = [name for name in answers if not name.startswith("base")]
    scores, rewards = {}, {}
    if reward_model is not None:
        pad = tokenizer.pad_token_id
        scores = {name: score_answers_by(reward_model, answers[name], records, pad, device) for name in names}
    if reward_model is None or reward_sources(config) != ([None], [1.0]) or not config.ppo.calibrated:
        reward, _ = make_reward(config, tokenizer, device)
        rewards = {name: score_by(reward, answers[name], records) for name in names}
    return scores or rewards, rewards or scores


def score_by(reward: Reward, answers: Answers, records: list[PromptRecord]) -> list[list[float]]:
    """A reward's scores of one policy's samples, a list per prompt."""
    count = len(answers["ids"][0])
    ids, texts, ended = ([x for row in answers[key] for x in row] for key in ("ids", "texts", "ended"))
    repeated = [record for record in records for _ in range(count)]
    prompts = [prompt for prompt in answers["prompts"] for _ in range(count)]
    flat = reward(Episodes(repeated, prompts, ids, texts, torch.tensor(ended))).tolist()
    return [flat[i : i + count] for i in range(0, len(flat), count)]


def with_missing_eos(config: Config, answers: dict[str, Answers], scores: Scores) -> Scores:
    """Scores with PPO's score clipping and its rule for responses without an end token."""

    def adjusted(row: list[float], ended: list[bool]) -> list[float]:
        return adjust_scores(config, torch.tensor(row), torch.tensor(ended)).tolist()

    return {name: list(map(adjusted, rows, answers[name]["ended"])) for name, rows in scores.items()}


def baseline_figures(baselines: dict[str, Path], kl: Scores, optimised: Scores, gold: Any) -> dict[str, Any]:
    """Of each baseline: its stage's hash, its KL, and its win rates over the SFT model."""
    return {
        name: {
            "stage": (read_stage(folder) or {})["hash"],
            "kl_to_sft_nats": mean_of(kl[name]),
            "rm_win_rate_vs_sft": win_rate(optimised[name], optimised["sft"]),
        }
        | ({} if gold is None else truth_win_rates(gold, name))
        for name, folder in baselines.items()
    }


def evaluate_best_of(config: Config, asked: Asked, models: dict[str, Path], device: torch.device) -> dict[str, Any]:
    """Best-of-n by the reward model over n samples of the SFT model, the baseline for PPO; generate-and-rate, if a model rates."""
    reward, _ = make_reward(config, asked.tokenizer, device)
    best, scores = pick_best(config, asked, load_frozen(config, models["sft"], device), reward)
    results = {"best_of_n": best}
    if "rate" in models:
        results["generate_and_rate"] = evaluate_generate_and_rate(config, asked, models, reward, scores, device)
    return results


def nats_and_kl(
    config: Config, answers: dict[str, Answers], models: dict[str, Path], pad: int, device: torch.device
) -> tuple[Scores, Scores]:
    """SFT's log-probs in nats of each policy's samples, and `kl_rows` of the samples of the other policies."""
    nats, kl = {}, {}
    with progress(2 * len(answers) - 1, "evaluate: KL", unit="pass") as bar:
        for name, drawn in answers.items():
            nats[name] = response_nats(config, drawn, models["sft"], pad, device)
            bar.update()
            if name != "sft":
                kl[name] = kl_rows(config, drawn, models[name], nats[name], pad, device)
                bar.update()
    return nats, kl


def response_nats(config: Config, answers: Answers, folder: Path, pad: int, device: torch.device) -> list[list[float]]:
    """The log-prob in nats of each of a policy's samples under the model in `folder`, a list per prompt."""
    model = load_frozen(config, folder, device)
    pairs = [(p, r) for p, responses in zip(answers["prompts"], answers["ids"], strict=True) for r in responses]
    nats = torch.zeros(len(pairs))
    for group, batch in response_batches(pairs, pad, device):
        nats[group] = response_logprobs(model, *batch)[0].sum(1).cpu()
    return [row.tolist() for row in nats.split([len(responses) for responses in answers["ids"]])]


def kl_rows(
    config: Config, answers: Answers, folder: Path, nats: list[list[float]], pad: int, device: torch.device
) -> list[list[float]]:
    """log pi - log pi_sft of each of a policy's samples, whose mean estimates the KL; `nats` are SFT's log-probs."""
    policy_nats = response_nats(config, answers, folder, pad, device)
    return [[a - b for a, b in zip(*rows, strict=True)] for rows in zip(policy_nats, nats, strict=True)]


# --- the record ----------------------------------------------------------------------------------------------------


def costs(config: Config) -> dict[str, Any]:
    """Seed, held-out bits per byte, and the time and memory of each stage."""
    folders = stages_of(run_folder(config))
    for run in rounds_before(run_folder(config)):
        folders |= {f"{run.name}/{stage}": folder for stage, folder in stages_of(run).items()}
    records = {name: read_stage(folder) or {} for name, folder in folders.items() if folder.name != "evaluate"}
    pretrain = read_stage(stage_folder(config, "pretrain")) or {}
    return {
        "pretrain_bits_per_byte": pretrain.get("summary", {}).get("bpb"),
        "seed": config.seed,
        "seconds": {name: record.get("seconds") for name, record in records.items()},
        "peak_rss_mb": {name: record.get("peak_rss_mb") for name, record in records.items()},
    }


def write_samples(
    path: Path,
    records: list[PromptRecord],
    answers: dict[str, Answers],
    gold: Any,
    scores: Scores,
) -> None:
    """One line per test prompt: the first sample of every policy, with its scores."""
    rows = (
        {
            "id": record.id,
            "prompt": shown_prompt(record.prompt),
            "responses": {name: given["texts"][i][0] for name, given in answers.items()},
            "scores": {name: round(s[i][0], 4) for name, s in scores.items()},
        }
        | ({} if gold is None else {"gold": {name: round(g["samples"][i][0]["total"], 4) for name, g in gold.items()}})
        for i, record in enumerate(records)
    )
    write_jsonl(path, rows)


def say_results(stage: Stage, results: dict[str, Any]) -> None:
    stage.say(f"reward {results['reward']}, KL {results['kl_to_sft_nats']:.2f} nats")
    if "gold" in results:
        gold = results["gold"]
        stage.say(
            f"win rate over SFT by the {gold['truth']} {gold['win_rate_vs_sft']['value']:.3f} {gold['win_rate_vs_sft']['ci95']}, "
            f"greedy {gold['win_rate_greedy']['value']:.3f}; mean true score {gold['mean_score']}"
        )
    for name, row in results.get("baselines", {}).items():
        stage.say(
            f"{name}: reward {results['reward'][name]}, KL {row['kl_to_sft_nats']:.2f} nats, win rate over SFT by the reward "
            f"model {row['rm_win_rate_vs_sft']['value']:.3f}"
            + (f", by the truth {row['win_rate_vs_sft']['value']:.3f}" if "win_rate_vs_sft" in row else "")
        )
    for line in describe_comparisons(results["judge"]) if "judge" in results else []:
        stage.say(line)
    if "best_of_n" in results:
        best = results["best_of_n"]
        stage.say(
            f"best of {best['n']} samples of SFT: reward {best['reward']}, KL about {best['kl_estimate_nats']:.2f} nats (at most "
            f"{best['kl_bound_nats']:.2f})"
            + (
                f", true score {best['gold']}; PPO's minus this {best['ppo_above']['value']:.3f} {best['ppo_above']['ci95']}"
                if "gold" in best
                else ""
            )
        )
    for line in describe_ratings(results["generate_and_rate"]) if "generate_and_rate" in results else []:
        stage.say(line)
