"""The recipe as a table: one row per stage, from which whatever depends on the stages is derived. Imports nothing of
the project.

To add a stage, add a row here and one file under rlhf/stages/ (docs/new_stage.md has a worked example).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

SPLITS = ("data.format", "data.limit", "data.dev", "data.test", "data.split_seed", "data.max_tokens")
PROMPTS = ("data.prompts", "data.demonstrations", "data.comparisons", *SPLITS)
RANKINGS = ("data.comparisons", *SPLITS, "data.half", "data.held_out_labelers")
RATED_BY = ("rate.rules", "rate.weights")
REWARD_SOURCES = ("ppo.rewards", "ppo.reward_weights", "ppo.reward_parameters", "ppo.calibrated", *RATED_BY)
SCORES = ("ppo.score_clip", "ppo.missing_eos_rule", "ppo.missing_eos_score")
OF_MODELS = ("seed", "precision")
ADAPTERS = ("lora.rank", "lora.alpha", "lora.target_modules", "lora.dropout")
# Another engine draws other samples from the same policy: of the stages that sample only PPO, which trains on them, counts it as a change.
SAMPLER = ("rollout.batch_size", "rollout.engine", "rollout.vllm_memory", "rollout.tensor_parallel")


@dataclass(frozen=True, slots=True)
class StageRow:
    name: str  # of the command and of the folder under runs/<run>/
    help: str  # one line for `rlhf --help`
    parents: tuple[str, ...] = ()  # the stages whose output it reads
    if_there: tuple[str, ...] = ()  # further ones, whose output it reads if the run has it
    starts_from: tuple[str, ...] = ()  # the stages whose policy <stage>.policy, .reference and .teacher can name
    data: tuple[str, ...] = ()  # the kinds of data it reads: data.<kind>
    settings: tuple[str, ...] = ()  # settings that change its result: single ones or whole groups
    reads: tuple[str, ...] = ()  # further settings that it reads, on which its result does not depend
    gold_data: Mapping[str, str] = field(default_factory=dict)  # of the gold world's own stages: the file of each kind
    kept_work: tuple[str, ...] = ()  # files, besides checkpoints, from which an interrupted stage continues
    several_processes: bool = False  # whether several processes can run it together
    optional: bool = False  # whether the pipeline runs it only if a setting asks for it
    every_round: bool = False  # whether each labelling round runs it again
    writes_policy: bool = False  # whether its model answers prompts (chat, export, sample)

    @property
    def module(self) -> str:
        """The module whose `run(config)` runs the stage."""
        return f"rlhf.stages.{self.name}"

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of the settings that change its result."""
        return tuple(dict.fromkeys(key.partition(".")[0] for key in self.settings if key not in (*OF_MODELS, "rounds")))


ROWS = (
    StageRow(
        "world",
        "write the gold world's corpus, demonstrations and prompts",
        data=("corpus",),
        settings=("seed", "gold.truth", "gold.documents", "gold.conversations", "gold.demonstrations", "gold.train_prompts",
                  "gold.dev_prompts", "gold.test_prompts", "gold.passage_min_tokens", "gold.passage_max_tokens", "gold.continuation_tokens",
                  "data.corpus", "data.encoding", "data.split_seed", "model.pretrained"),
        gold_data={"corpus": "corpus.jsonl", "demonstrations": "demonstrations.jsonl", "prompts": "prompts.jsonl"},
    ),
    StageRow(
        "tokenizer",
        "train the byte-level BPE on the pretraining text, or adopt a model's tokenizer",
        parents=("world",),
        data=("corpus",),
        settings=("tokenizer", "data.corpus", "data.encoding", "data.form", "model.context_length", "model.pretrained"),
    ),
    StageRow(
        "pretrain",
        "pretrain the GPT from random weights, or adopt a pretrained model",
        parents=("world", "tokenizer"),
        data=("corpus",),
        settings=(*OF_MODELS, "model", "pretrain", "data.corpus", "data.corpus_weights", "data.encoding", "data.form",
                  "data.held_out"),
        several_processes=True,
        writes_policy=True,
    ),
    StageRow(
        "sft",
        "fine-tune on demonstrations",
        parents=("world", "pretrain"),
        data=("demonstrations",),
        settings=(*OF_MODELS, "sft", *ADAPTERS, "data.demonstrations", *SPLITS),
        several_processes=True,
        writes_policy=True,
    ),
    StageRow(
        "label",
        "take in the labels of a round: of people, or of the gold world's simulated labelers",
        parents=("world", "sft"),
        data=("prompts",),
        settings=(*OF_MODELS, "gold", "rounds", "rollout.max_new_tokens", "round.keep_rankings", "data.format", "data.limit"),
        reads=("data.prompts", *SAMPLER, "sample"),
        gold_data={"comparisons": "comparisons.jsonl"},
        every_round=True,
    ),
    StageRow(
        "reward",
        "train the reward model on ranked comparisons",
        parents=("world", "sft", "label"),
        data=("comparisons", "demonstrations"),
        settings=(*OF_MODELS, "reward", *ADAPTERS, "data.demonstrations", *RANKINGS,
                  "rollout.max_new_tokens", "round.later_reward_epochs"),
        reads=("gold.held_out_labelers", *SAMPLER, *SCORES),
        several_processes=True,
        every_round=True,
    ),
    StageRow(
        "rejection",
        "fine-tune on the best of n samples by the reward model",
        parents=("world", "sft", "reward"),
        data=("prompts", "demonstrations", "comparisons"),
        several_processes=True,
        settings=(*OF_MODELS, "rejection", "sft", "rollout.max_new_tokens", "ppo.score_clip", "ppo.prompts", *REWARD_SOURCES,
                  *PROMPTS),
        reads=("ppo.eval_prompts", "ppo.micro_batch_episodes", "ppo.missing_eos_rule", "ppo.missing_eos_score", "ppo.ptx_coef",
               "ppo.reward_key", *SAMPLER),
        kept_work=("demonstrations.jsonl",),
        optional=True,
        writes_policy=True,
    ),
    StageRow(
        "dpo",
        "fine-tune on ranked comparisons directly (DPO)",
        parents=("world", "sft", "label"),
        data=("comparisons",),
        several_processes=True,
        settings=(*OF_MODELS, "dpo", *ADAPTERS, "reward.labeler_weights", *RANKINGS,
                  "rollout.max_new_tokens"),
        reads=("gold.held_out_labelers",),
        optional=True,
        writes_policy=True,
    ),
    StageRow(
        "rate",
        "fine-tune one model to answer and to rate answers (LaMDA's generate-and-rate)",
        parents=("world", "sft", "label"),
        data=("comparisons", "demonstrations"),
        several_processes=True,
        settings=(*OF_MODELS, "rate.ratings", "rate.epochs", "rate.qualities", "rate.rules", "rate.given", "sft",
                  "data.demonstrations", "data.comparisons", *SPLITS, "data.held_out_labelers"),
        reads=("rate", "gold.held_out_labelers"),
        optional=True,
        writes_policy=True,
    ),
    StageRow(
        "ppo",
        "optimise the policy against the reward model",
        parents=("world", "sft", "reward"),
        starts_from=("sft", "rejection", "dpo", "rate"),
        data=("prompts", "demonstrations", "comparisons"),
        settings=(*OF_MODELS, "ppo", "kl", "lora", "rollout", *RATED_BY, *PROMPTS),
        several_processes=True,
        every_round=True,
        writes_policy=True,
    ),
    StageRow(
        "distill",
        "train a student of fewer blocks on the answers of a finished policy (DistilBERT's recipe)",
        parents=("world", "sft"),
        starts_from=("sft", "rejection", "dpo", "rate", "ppo"),
        data=("prompts", "demonstrations", "comparisons"),
        settings=(*OF_MODELS, "distill", "rollout.max_new_tokens", "ppo.prompts", *PROMPTS),
        reads=("ppo.eval_prompts", *SAMPLER),
        kept_work=("answers.jsonl",),
        several_processes=True,
        optional=True,
        writes_policy=True,
    ),
    StageRow(
        "classify",
        "fine-tune a base on a labelled task, and measure it (GPT-1's transfer)",
        parents=("pretrain",),
        settings=(*OF_MODELS, "classify", "data.split_seed", "data.encoding", "data.max_tokens"),
        optional=True,
    ),
    StageRow(
        "judge",
        "train the reward model that judges the policies, on the other half of the comparisons",
        parents=("world", "sft", "label"),
        data=("comparisons", "demonstrations"),
        settings=(*OF_MODELS, "judge", "data.demonstrations", *RANKINGS, "rollout.max_new_tokens"),
        reads=("gold.held_out_labelers", *SAMPLER, *SCORES),
        several_processes=True,
        optional=True,
    ),
    StageRow(
        "evaluate",
        "measure the models on held-out prompts and comparisons",
        parents=("world", "pretrain", "sft", "label", "judge"),
        if_there=("reward", "ppo"),
        data=("prompts", "demonstrations", "comparisons"),
        several_processes=True,
        settings=(*OF_MODELS, "evaluate", "rate.given", "rate.least", "rollout.max_new_tokens", *SCORES, *REWARD_SOURCES, *PROMPTS,
                  "data.held_out_labelers", "gold.labeler_noise"),
        reads=("ppo.reward_key", "ppo.micro_batch_episodes", "gold.held_out_labelers", *SAMPLER, "judge.model", "data.encoding",
               *(f"classify.{key}" for key in ("data", "test", "text", "second", "choices", "label", "both_orders", "held_out",
                                               "examples"))),
    ),
)  # fmt: skip
STAGES: dict[str, StageRow] = {row.name: row for row in ROWS}  # in the order of the pipeline


def names(rows: Iterable[StageRow]) -> tuple[str, ...]:
    return tuple(row.name for row in rows)


PIPELINE = names(row for row in ROWS if not row.optional)
GOLD_STAGES = names(row for row in ROWS if row.gold_data)
ROUND_STAGES = names(row for row in ROWS if row.every_round)
POLICY_STAGES = names(row for row in ROWS if row.writes_policy)
BASELINES = names(row for row in ROWS if row.writes_policy and row.optional)  # policies to compare with PPO's
# Stages that others build on: `parents.<stage>` takes one from another run.
PARENTS = names(
    row for row in ROWS if any(row.name in (*child.parents, *child.if_there, *child.starts_from) for child in ROWS)
)
# The last stages of the pipeline: no other one needs them.
ENDS = names(row for row in ROWS if not row.optional and not any(row.name in child.parents for child in ROWS))


def ancestors(stage: str) -> tuple[str, ...]:
    """Every stage that `stage` builds on, directly or not, in the order of the pipeline."""
    parents = (*STAGES[stage].parents, *STAGES[stage].if_there)
    reached = set(parents)
    for parent in parents:
        reached |= set(ancestors(parent))
    return names(row for row in ROWS if row.name in reached)
