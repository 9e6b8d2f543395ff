"""Relations between settings, checked before anything runs; all problems are reported at once."""

import json
from collections.abc import Iterator

from rlhf.config import Config, PlanConfig
from rlhf.config.commands import ImportConfig
from rlhf.config.setting import get, listed, settings_in, wrong_values
from rlhf.errors import UserError
from rlhf.recipe import BASELINES, STAGES
from rlhf.system.processes import process_count


def check_config(config: Config | ImportConfig, command: str) -> None:
    """Raises: UserError that lists every setting that does not fit, with what was wanted."""
    problems = wrong_values(config)
    if not problems:  # relations are checked only if every single value is valid
        problems = list(_import_relations(config) if isinstance(config, ImportConfig) else _relations(config, command))
    if problems:
        raise UserError("; ".join(problems))


def _import_relations(config: ImportConfig) -> Iterator[str]:
    wanted = {"path": "a file, a folder or a hub id", "out": "the folder to write"}
    for key, text in wanted.items():
        if getattr(config, key) is None:
            yield f"{key} is not set: want {text}"
    if config.format != "table":
        keys = [key for key in settings_in(ImportConfig) if key.startswith(("columns.", "words."))]
        given = [key for key in keys if get(config, key) is not None]
        if given:
            yield (
                f"{', '.join(given)}: only format=table uses columns.* and words.*: add format=table, or leave them out"
            )
    if config.dev + config.test >= 1:
        yield f"dev + test = {config.dev + config.test}: want less than 1, the rest trains"


def _plan_relations(config: PlanConfig) -> Iterator[str]:
    context, answer = own_context(config), config.rollout.max_new_tokens
    if context is None:
        return  # the plan reads the model's own configuration
    if config.sequence is not None and config.sequence > context:
        yield f"sequence={config.sequence}: want at most model.context_length={context}"
    if answer >= (config.sequence or context):
        yield f"rollout.max_new_tokens={answer}: leaves no room for a prompt in {config.sequence or context} tokens"


def own_context(config: Config) -> int | None:
    """The context of our GPT in tokens; None for an adopted model, whose context the stages check."""
    return config.model.context_length if config.model.pretrained is None else None


def _relations(config: Config, command: str) -> Iterator[str]:
    yield from _model_relations(config)
    if config.data.dev + config.data.test >= 1:
        yield f"data.dev + data.test = {config.data.dev + config.data.test}: want less than 1, the rest trains"
    if config.gold.enabled and command in ("world", "label", "pipeline"):
        yield from _gold_relations(config, command)
    if config.gold.enabled and config.data.prompts is not None and command in ("evaluate", "pipeline"):
        yield (
            f"data.prompts={config.data.prompts}: the gold world's evaluation judges its own prompts only: "
            "leave it out, or set gold.enabled=false"
        )
    yield from _mixture_relations(config)
    if (context := own_context(config)) is not None:
        yield from batch_problems(config, context, f"model.context_length={context}")
    unknown = [name for name in listed(config.evaluate.baselines) if name not in BASELINES]
    if unknown:
        yield f"evaluate.baselines: {unknown[0]}: want {' or '.join(BASELINES)}"
    yield from _ppo_relations(config, command)
    yield from _kl_relations(config)
    yield from _lora_relations(config, command)
    if config.judge.model is not None and config.data.half is None and command in ("judge", "pipeline"):
        yield (
            f"judge.model={config.judge.model}: the judge learns from comparisons that the reward model does not see: "
            "want data.half=1 or 2"
        )
    if config.gold.enabled and context is not None and config.rollout.max_new_tokens >= context:
        yield (
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}: leaves no room for a prompt in "
            f"model.context_length={context}"
        )
    if config.gold.responses_min > config.gold.responses_max:
        yield (
            f"gold.responses_min={config.gold.responses_min}: want at most gold.responses_max="
            f"{config.gold.responses_max}"
        )
    yield from _sharding_problems(config)
    yield from _launch_problems(config, command)
    yield from _reward_relations(config)
    if isinstance(config, PlanConfig):
        yield from _plan_relations(config)


def _model_relations(config: Config) -> Iterator[str]:
    model = config.model
    if model.head_dim is None and model.width % model.n_head:
        yield f"model.width={model.width}: want a multiple of model.n_head={model.n_head}, or set model.head_dim"
    if model.n_kv_head is not None and model.n_head % model.n_kv_head:
        yield f"model.n_kv_head={model.n_kv_head}: want a divisor of model.n_head={model.n_head}"


def _reward_relations(config: Config) -> Iterator[str]:
    """Of `reward` and `judge`. A base that the user names has no language model, and its classifier reads one place."""
    for name, given in (("reward", config.reward), ("judge", config.judge)):
        if not given.epochs and not given.fit_head:
            yield f"{name}.epochs=0: nothing would be trained: want 1 or more, or {name}.fit_head=true"
        if given.model is None:
            continue
        for key, default in (("fit_head", False), ("read_tokens", 1), ("layers", None), ("lm_coef", 0.0)):
            value = getattr(given, key)
            if value != default:
                yield (
                    f"{name}.{key}={json.dumps(value)}: {name}.model={given.model} is a classifier with its own head: "
                    f"want {json.dumps(default)}"
                )


def _mixture_relations(config: Config) -> Iterator[str]:
    entries, weights = listed(config.data.corpus), config.data.corpus_weights
    if weights is not None and len(entries) != len(weights):
        yield f"data.corpus_weights={weights}: want one weight for each of the {len(entries)} entries of data.corpus"


def batch_problems(config: Config, length: int, wanted: str) -> Iterator[str]:
    """Why a batch of pretraining cannot be divided into blocks of `length` tokens, or these into micro-batches. wanted: the
    length as the message names it.
    """
    batch, micro_batch = config.pretrain.global_batch_tokens, config.pretrain.micro_batch_sequences
    sequences, rest = divmod(batch, length)
    if rest:
        yield f"pretrain.global_batch_tokens={batch}: want a multiple of {wanted}"
    elif sequences % min(micro_batch, sequences):
        yield f"pretrain.micro_batch_sequences={micro_batch}: want a divisor of the {sequences} sequences of a batch"


def _kl_relations(config: Config) -> Iterator[str]:
    kl, episodes = config.kl, config.ppo.episodes_per_update
    if kl.target is None:
        return
    if kl.coef == 0:
        yield "kl.coef=0: with kl.target it would stay 0: want more than 0, or kl.target=null"
    if episodes >= 5 * kl.horizon:
        yield (
            f"kl.horizon={kl.horizon}: want more than a fifth of ppo.episodes_per_update="
            f"{episodes}, or one update could take kl.coef to 0"
        )


def _lora_relations(config: Config, command: str) -> Iterator[str]:
    if config.lora.rank and config.reward.model is not None and command in ("reward", "pipeline"):
        yield (
            f"lora.rank={config.lora.rank}: reward.model={config.reward.model} trains all its weights: run `rlhf reward` without "
            "lora.rank, and the other stages with it"
        )
        return
    if not config.lora.share_trunk:
        return
    if not config.lora.rank:
        yield "lora.share_trunk=true: the models differ only in their adapters: set lora.rank"
    if config.ppo.critic == "random":
        yield "lora.share_trunk=true: ppo.critic=random has another trunk: want ppo.critic=reward or sft"
    if config.deepspeed != "none":
        yield f"lora.share_trunk=true: does not go with deepspeed={config.deepspeed}: use deepspeed=none"


def _launch_problems(config: Config, command: str) -> Iterator[str]:
    if command in ("pretrain", "pipeline") and config.deepspeed != "none" and config.pretrain.optimizer == "muon":
        yield (
            f"pretrain.optimizer=muon: works on whole matrices, which deepspeed={config.deepspeed} divides: want "
            "pretrain.optimizer=adamw"
        )
    if command == "classify" and config.deepspeed != "none":
        yield (
            f"deepspeed={config.deepspeed}: `rlhf classify` trains on one process with whole weights: use deepspeed=none"
        )
    processes = process_count()
    if processes > 1 and not (command in STAGES and STAGES[command].several_processes):
        remedy = "set launcher.processes instead" if command == "pipeline" else "start it without a launcher"
        yield f"{command}: started as {processes} processes, runs as one: {remedy}"


def _sharding_problems(config: Config) -> Iterator[str]:
    """Settings that ZeRO-3 does not support, because its ranks hold slices of each weight."""
    if not config.deepspeed.startswith("zero3"):
        return
    if config.reward.lm_coef:
        yield f"reward.lm_coef={config.reward.lm_coef}: does not go with deepspeed={config.deepspeed}: use zero2"
    if config.lora.rank:
        yield f"lora.rank={config.lora.rank}: adapters do not go with deepspeed={config.deepspeed}: use zero2"
    if config.reward.model is not None:
        yield (
            f"reward.model={config.reward.model}: a text classifier does not go with "
            f"deepspeed={config.deepspeed}: use zero2"
        )


def _gold_relations(config: Config, command: str) -> Iterator[str]:
    gold, ppo = config.gold, config.ppo
    if not gold.rounds <= gold.comparison_prompts <= gold.train_prompts:
        yield (
            f"gold.comparison_prompts={gold.comparison_prompts}: want at least gold.rounds={gold.rounds} and at "
            f"most gold.train_prompts={gold.train_prompts}"
        )
    if gold.passage_min_tokens > gold.passage_max_tokens:
        yield (
            f"gold.passage_min_tokens={gold.passage_min_tokens}: want at most gold.passage_max_tokens="
            f"{gold.passage_max_tokens}"
        )
    if command == "pipeline" and gold.rounds > 1 and gold.early_episodes is not None:
        least = ppo.episodes_per_update * (1 + ppo.critic_warmup_updates)
        if gold.early_episodes < least:
            yield (
                f"gold.early_episodes={gold.early_episodes}: want at least {least}, which is one update of the "
                "policy, or null"
            )


def _ppo_relations(config: Config, command: str) -> Iterator[str]:
    ppo = config.ppo
    if ppo.episodes_per_update % ppo.minibatches:
        yield f"ppo.minibatches={ppo.minibatches}: want a divisor of ppo.episodes_per_update={ppo.episodes_per_update}"
    if ppo.episodes < ppo.episodes_per_update:
        yield f"ppo.episodes={ppo.episodes}: want at least one update of {ppo.episodes_per_update}"
    updates = ppo.episodes // ppo.episodes_per_update
    if command in ("ppo", "pipeline") and 0 < updates <= ppo.critic_warmup_updates:
        yield (
            f"ppo.critic_warmup_updates={ppo.critic_warmup_updates}: leaves the policy none of the {updates} updates: "
            "lower it, or raise ppo.episodes"
        )
    if ppo.episodes_per_update % ppo.responses_per_prompt:
        yield (
            f"ppo.responses_per_prompt={ppo.responses_per_prompt}: want a divisor of "
            f"ppo.episodes_per_update={ppo.episodes_per_update}"
        )
    if ppo.advantages in ("rloo", "grpo") and ppo.responses_per_prompt < 2:
        yield (
            f"ppo.advantages={ppo.advantages}: compares responses to one prompt: "
            "want ppo.responses_per_prompt of 2 or more"
        )
    if ppo.score_by_token and ppo.advantages in ("rloo", "grpo"):
        yield f"ppo.score_by_token=true: ppo.advantages={ppo.advantages} adds up a response's rewards: leave it out"
    needs_critic = ppo.shared_critic or ppo.critic_warmup_updates
    if not ppo.has_critic and needs_critic:
        yield (
            f"ppo.advantages={ppo.advantages}: has no critic: want ppo.shared_critic=false "
            "and ppo.critic_warmup_updates=0"
        )
    names = [ppo.rewards] if ppo.rewards is None or isinstance(ppo.rewards, str) else list(ppo.rewards)
    weights = ppo.reward_weights
    if weights is not None and len(weights if isinstance(weights, list) else [weights]) != len(names):
        yield f"ppo.reward_weights={weights}: want one number for each of ppo.rewards"
