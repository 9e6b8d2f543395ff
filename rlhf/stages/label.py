"""A labelling round: people's labels of the tasks of `rlhf sample`, or in the gold world responses ranked by simulated
labelers.

In the first round the SFT model answers. In each later round (`rounds` above 1) the PPO model of the previous round
answers, as InstructGPT collects comparisons on its current best policy (Ouyang et al. 2022, sections 3.1 and 3.2). Its
responses show the errors of the previous reward model.
"""

import random

from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.data.agreement import pairwise_agreement
from rlhf.data.chat_template import encode_prompts
from rlhf.data.encoding import Answer
from rlhf.data.reading import load_comparisons
from rlhf.data.records import PromptRecord, Ranking
from rlhf.data.tokenizer import load_tokenizer
from rlhf.engines.sampling import make_sampler
from rlhf.errors import UserError
from rlhf.evaluation.policies import draw_in_turn
from rlhf.evaluation.statistics import flatten
from rlhf.gold.truth import Truth, make_truth, rank_responses, tune_noise
from rlhf.runs.folders import earlier_run, read_record, read_stage, run_folder, stage_folder
from rlhf.runs.progress import Progress
from rlhf.runs.run_files import read_jsonl
from rlhf.runs.sources import in_split, read_comparisons, read_prompts
from rlhf.runs.stage import Stage, open_stage
from rlhf.system.files import write_jsonl
from rlhf.training.setup import load_frozen, set_up

PROMPTS_TOGETHER = 128  # prompts whose responses are sampled in one call


def run(config: Config) -> None:
    """Write runs/<run>/label/comparisons.jsonl: the rankings of all rounds so far. Raises: UserError without labelers."""
    truth, earlier = make_truth(config), earlier_run(config)
    if truth is None and earlier is None:
        known = "only the gold world and rounds above 1 have labels to take in"
        raise UserError(f"label: {known}: use experiment=gold, or give data.comparisons")
    with open_stage(config, "label") as stage:
        before = [] if earlier is None else kept(config, read_comparisons(earlier))
        if truth is not None:
            rankings, summary = simulate_labels(stage, truth, before)
        else:
            rankings, summary = before + read_labels(config, stage), {}
        rows = (ranking.model_dump(mode="json", exclude_none=True) for ranking in rankings)
        write_jsonl(stage.folder / "comparisons.jsonl", rows)
        stage.say(f"{len(rankings) - len(before):,} rankings after {len(before):,} of the rounds before")
        stage.finish({"rankings": float(len(rankings))} | summary)


def kept(config: Config, rankings: list[Ranking]) -> list[Ranking]:
    """Those of earlier rounds that this round's reward model learns from or is measured on: all, or the held-out ones alone."""
    return rankings if config.round.keep_rankings else in_split(config, rankings, "dev", "test")


def read_labels(config: Config, stage: Stage) -> list[Ranking]:
    """People's labels of the run's tasks (`rlhf sample`). Raises: UserError if there are none, or prompts without any."""
    folder = run_folder(config)
    imported, served = folder / "sample-imported", folder / "serve" / "labels.jsonl"
    tasks = (read_record(folder / "sample" / "sample.json", "round") or {"counts": {}})["counts"].get("items", 0)
    place = imported if imported.exists() else served
    new = load_comparisons(str(place))[0] if place.exists() else []
    names = {row.get("id") for row in read_jsonl(folder / "sample" / "tasks.jsonl")}
    left = tasks - len(names & {ranking.metadata.get("task") for ranking in new})
    if not new or (place == served and left > 0):
        raise UserError(
            f"label: {folder / 'sample'}: {left} of {tasks} tasks wait for labels: rank them with `rlhf serve run={config.run}`, "
            f"or import them as its README.md says, to {imported}; then run the same command again"
        )
    stage.say(f"labels come from {place}")
    return new


def simulate_labels(stage: Stage, truth: Truth, before: list[Ranking]) -> tuple[list[Ranking], dict[str, float]]:
    """The rankings `before`, and those of simulated labelers of K = 4 to 9 samples per prompt; and how far all of them agree."""
    config, earlier = stage.config, earlier_run(stage.config)
    source = stage_folder(config, "sft") if earlier is None else run_folder(earlier) / "ppo"
    prompts, responses, spare = choose_prompts(config), list[list[Answer]](), config.gold.spare_responses
    with inference(config, set_up(config)) as device, Progress(len(prompts), "label", unit="prompt") as bar:
        policy, tokenizer = load_frozen(config, source / "model", device), load_tokenizer(source / "model")
        engine = make_sampler(config, policy, tokenizer)
        prompt_ids = encode_prompts(tokenizer, [record.prompt for record in prompts])
        asked = [  # more than will be ranked, since several can be the same
            (ids, ("label", record.id), responses_wanted(config, record) + spare)
            for record, ids in zip(prompts, prompt_ids, strict=True)
        ]
        for drawn in draw_in_turn(engine, tokenizer, asked, PROMPTS_TOGETHER):
            responses.append([(one.text, one.ended) for one in drawn])
            bar.update()
    policy_id = f"{source.name}@{(read_stage(source) or {}).get('hash', '')[:8]}"
    rankings, alike, noise = rank_all(config, truth, prompts, responses, policy_id)
    rankings = before + rankings
    held_out = {labeler.name for labeler in truth.held_out_labelers(config.gold.held_out_labelers, noise)}
    trained = [ranking for ranking in rankings if ranking.labeler not in held_out]
    agreement = pairwise_agreement(trained)["value"]
    stage.say(f"{source} answers {len(prompts) - alike:,} prompts, {alike} left out: all samples alike")
    stage.say(f"{len(rankings) - len(trained):,} rankings by held-out labelers")
    if agreement is None:
        return rankings, {"labeler_noise": noise}
    stage.say(f"the other labelers agree on {agreement:.1%} of pairs")
    return rankings, {"labeler_agreement": agreement, "labeler_noise": noise}


def choose_prompts(config: Config) -> list[PromptRecord]:
    """The prompts to label: this round's part of the training split; in the first round also dev and test prompts.
    Only the SFT model answers held-out prompts, so that the accuracies of several rounds are comparable.
    """
    records, gold = read_prompts(config), config.gold
    before = gold.comparison_prompts // config.rounds * (config.rounds - 1)
    wanted = {"train": slice(before, gold.comparison_prompts)}
    if before == 0:
        wanted |= {"dev": slice(gold.comparison_dev_prompts), "test": slice(gold.comparison_test_prompts)}
    by_split = {split: [r for r in records if r.metadata.get("split") == split][part] for split, part in wanted.items()}
    if not by_split["train"]:
        few = f"too few training prompts for a part in each of rounds={config.rounds}"
        raise UserError(f"gold.comparison_prompts={gold.comparison_prompts}: {few}: lower it")
    return flatten(by_split.values())


def responses_wanted(config: Config, record: PromptRecord) -> int:
    """K of a prompt."""
    rng = random.Random(f"responses-{config.seed}-{record.id}")
    return rng.randint(config.gold.responses_min, config.gold.responses_max)


def rank_all(
    config: Config, truth: Truth, prompts: list[PromptRecord], responses: list[list[Answer]], policy_id: str
) -> tuple[list[Ranking], int, float]:
    """Rankings by one or two labelers per prompt, the number of prompts whose samples were all the same, and the
    labelers' noise. The held-out labelers also rank the prompts of the dev and test splits. They use a separate random
    stream, so the other rankings are the same with and without them.
    """
    gold, drafts = config.gold, []
    for record, drawn in zip(prompts, responses, strict=True):
        distinct = list(dict.fromkeys(drawn))[: responses_wanted(config, record)]
        if len(distinct) > 1:
            drafts.append((record, distinct, [truth.judge(record, text, ended) for text, ended in distinct]))
    noise = gold.labeler_noise
    if gold.labeler_agreement is not None:
        rated = [[(parts, text) for parts, (text, _) in zip(j, d, strict=True)] for _, d, j in drafts]
        noise = tune_noise(truth.labelers, rated, gold.labeler_agreement)
    people = {"label": truth.labelers(noise)}
    strangers = {"label-held-out": truth.held_out_labelers(gold.held_out_labelers, noise)}
    rankings: list[Ranking] = []
    for record, distinct, judged in drafts:
        for stream, labelers in (people if record.metadata.get("split") == "train" else people | strangers).items():
            rng = random.Random(f"{stream}-{config.seed}-{record.id}")
            wanted = 2 if rng.random() < gold.second_labeler else 1
            for labeler in rng.sample(labelers, min(wanted, len(labelers))):
                rankings.append(rank_responses(record, judged, distinct, labeler, rng, policy_id))
    return rankings, len(prompts) - len(drafts), noise
