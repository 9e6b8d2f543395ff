"""`study.kind=sizes`: InstructGPT's evidence by model size (Ouyang et al. 2022, figure 1 and section 4).

The sizes are a quarter, a half and the whole of the parent's width. Each size has its own base, SFT model, PPO and PPO-ptx; the parent's
reward model scores all of them, as the 6-billion-parameter one does in the paper. Every policy, and the base with a few-shot prompt,
answers the same test prompts. Preference is over the SFT model of the largest size.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.commands.study_cells import Cell, cached, cell_config
from rlhf.commands.study_results import hashes
from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.data.chat_template import decode_response
from rlhf.data.demonstrations import load_demonstrations
from rlhf.data.records import PromptRecord
from rlhf.data.tokenizer import encode_texts, load_tokenizer
from rlhf.evaluation.answers import Reading, draw, of_chat
from rlhf.evaluation.policies import judge_rows, totals
from rlhf.evaluation.statistics import interval, win_points
from rlhf.gold.corpus import few_shot
from rlhf.gold.measures import MEASURES, measure
from rlhf.gold.truth import need_truth
from rlhf.gold.world import task_from_metadata
from rlhf.runs.folders import stage_folder
from rlhf.stages import evaluate
from rlhf.system.files import read_json
from rlhf.training.setup import load_frozen, set_up

POLICIES = ("base", "few_shot", "sft", "ppo", "ppo_ptx")
PTX = "_ptx"  # suffix of a cell with PPO-ptx, which uses the stages of the cell without it
MIXED = ("ppo.ptx_coef=1.0", "ppo.ptx_blocks_per_episode=0.25")
SHARES = (4, 2, 1)  # fractions of the parent's width and heads
SHOTS = 8  # the maximum; as many as fit before the prompt are used

# One policy's true scores of each prompt's answers, and each measure's mean per prompt (or None).
Values = dict[str, list[Any]]


def size_choices(parent: Path) -> dict[str, tuple[str, ...]]:
    """{name: the overrides}: each size, the whole one last, and then each with PPO-ptx."""
    shape = read_json(parent / "pretrain" / "model" / "config.json")
    sizes = {
        f"width_{shape['width'] // share}": (
            f"model.width={shape['width'] // share}",
            f"model.n_head={max(1, shape['n_head'] // share)}",
        )
        for share in SHARES
    }
    return sizes | {f"{name}{PTX}": (*changed, *MIXED) for name, changed in sizes.items()}


def size_stages(name: str, seed: int, folder: Path, taken: dict[str, Path]) -> dict[str, Path]:
    """The stages that a cell does not run itself: the parent's world and tokenizer; for the whole width also its base and SFT model,
    for PPO-ptx those of the cell of the same size.
    """
    shared, size = {stage: taken[stage] for stage in ("world", "tokenizer")}, name.removesuffix(PTX)
    if size == list(size_choices(taken["pretrain"].parent))[len(SHARES) - 1]:
        return shared | {stage: taken[stage] for stage in ("pretrain", "sft")}
    run = folder / f"{size}-seed{seed}"
    return shared | ({} if name == size else {stage: run / stage for stage in ("pretrain", "sft")})


def size_results(config: Config, cells: list[Cell]) -> dict[str, Any]:
    """A row per size and policy: preference, true score and the measures, over the prompts of all seeds; and the sizes' parameters."""
    values: dict[tuple[str, str], dict[int, Values]] = {}  # by size and policy, then by seed
    parameters: dict[str, int] = {}
    for cell in cells:
        size = cell.name.removesuffix(PTX)
        answers = cached(cell.folder, cell.run, basis(config, cell), lambda c=cell: answer_all(config, c))
        parameters[size] = answers.pop("parameters")
        for policy, of_policy in answers.items():
            values.setdefault((size, policy), {})[cell.seed] = of_policy
    smallest, largest = (choose(parameters, key=lambda size: parameters[size]) for choose in (min, max))
    reference, ours = values.get((largest, "sft")), values.get((smallest, "ppo"))
    rows = {
        f"{size} {policy}": {"parameters": parameters[size]} | figures(values[size, policy], reference)
        for size in parameters
        for policy in POLICIES
        if (size, policy) in values
    }
    return {
        "study": "sizes",
        "title": "InstructGPT's evidence by size",
        "reference": f"{largest} sft",
        "prompts": config.evaluate.prompts,
        "seeds": sorted({cell.seed for cell in cells}),
        "parents": len({cell.parent for cell in cells}),
        "sizes": parameters,
        "rows": rows,
        "small_ppo_over": {
            f"{largest} {policy}": preferred(ours, values[largest, policy])
            for policy in POLICIES
            if ours and (largest, policy) in values
        },
    }


def figures(by_seed: dict[int, Values], reference: dict[int, Values] | None) -> dict[str, Any]:
    """Means and intervals with the prompt as the unit, over all seeds together."""

    def mean(name: str) -> list[float]:
        return [value for values in by_seed.values() for value in values[name] if value is not None]

    scores = [sum(row) / len(row) for values in by_seed.values() for row in values["totals"]]
    preference = {} if reference is None else {"win_rate": preferred(by_seed, reference)}
    return preference | {"gold": interval(scores)} | {name: interval(mean(name)) for name in MEASURES}


def preferred(ours: dict[int, Values], theirs: dict[int, Values]) -> dict[str, Any]:
    """Share of comparisons with another policy's answers to the same prompt won by the true score; ties count half."""
    seeds = sorted(ours.keys() & theirs.keys())
    return interval([point for seed in seeds for point in win_points(ours[seed]["totals"], theirs[seed]["totals"])])


def basis(config: Config, cell: Cell) -> list[Any]:
    """What a cell's answers depend on."""
    of_cell, settings = cell_config(cell), config.evaluate
    folders = {stage: stage_folder(of_cell, stage) for stage in ("world", "pretrain", "sft", "ppo")}
    return [settings.prompts, settings.samples, SHOTS, of_cell.rollout.max_new_tokens, hashes(folders)]


def answer_all(config: Config, cell: Cell) -> dict[str, Any]:
    """{policy: its values}, and the number of parameters; for a cell with PPO-ptx only its policy."""
    of_cell = cell_config(cell)
    of_cell.evaluate = config.evaluate
    device, truth = set_up(of_cell), need_truth(of_cell, "study")
    folders = {stage: stage_folder(of_cell, stage) / "model" for stage in ("pretrain", "sft", "ppo")}
    tokenizer = load_tokenizer(folders["ppo"])
    records, prompts = evaluate.load_test_prompts(of_cell, tokenizer, str(cell.stages["world"] / "prompts.jsonl"))
    tasks = [task_from_metadata(record.metadata["gold"]) for record in records]
    models = {"base": "pretrain", "few_shot": "pretrain", "sft": "sft", "ppo": "ppo"}
    if cell.name.endswith(PTX):
        models = {"ppo_ptx": "ppo"}
    values: dict[str, Any] = {}
    for name, stage in models.items():
        policy = load_frozen(of_cell, folders[stage], device)
        values["parameters"] = sum(p.numel() for p in policy.parameters())
        asked, reading = prompts, of_chat(tokenizer)
        if name == "few_shot":
            asked = few_shot_prompts(of_cell, cell.stages["world"], records, tokenizer)
            reading = Reading([tokenizer.bos_token_id], lambda ids: first_answer(decode_response(tokenizer, ids)))
        with inference(of_cell, device):
            drawn = draw(of_cell, policy, asked, reading, tokenizer, name)
        judged = judge_rows(truth, records, drawn["texts"], drawn["ended"])
        values[name] = {"totals": totals(judged)} | measure(tasks, drawn["texts"], judged)
    return values


def first_answer(text: str) -> str:
    """The base's text up to the next question, without a first line that names a speaker as the corpus does."""
    return text.partition("\nQuestion:")[0].split("\n", 1)[-1].strip()


def few_shot_prompts(config: Config, world: Path, records: Sequence[PromptRecord], tokenizer: Any) -> list[list[int]]:
    """Each prompt after demonstrations of the training split, drawn by (seed, prompt): up to SHOTS, as many as fit the context."""
    shown = [d for d in load_demonstrations(str(world / "demonstrations.jsonl"))[0] if d.split == "train"]
    room = tokenizer.model_max_length - config.rollout.max_new_tokens
    prompts = []
    for record in records:
        drawn = random.Random(f"few-shot-{config.seed}-{record.id}").sample(shown, SHOTS)
        shots = [(shot.prompt[-1].content, shot.response) for shot in drawn]
        texts = [few_shot(record.prompt[-1].content, shots[:count]) for count in range(SHOTS + 1)]
        prompts.append([ids for ids in encode_texts(tokenizer, texts) if len(ids) <= room][-1])
    return prompts
