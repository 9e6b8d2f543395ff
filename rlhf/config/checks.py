"""Relations between settings, checked before anything runs; all problems are reported at once.

A relation is one row: whether it is broken, the setting (or other words to begin with), and what was wanted.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from rlhf.config import Config, PlanConfig
from rlhf.config.commands import CorpusConfig, ImportConfig, SampleConfig
from rlhf.config.setting import get, listed, settings_in, shown
from rlhf.config.stages import FALLING, LoraConfig, RewardConfig
from rlhf.errors import UserError
from rlhf.recipe import BASELINES, POLICY_STAGES, STAGES, ancestors
from rlhf.system.processes import process_count

Row = tuple[object, str, str]
BY_REWARD = ("uncertain", "disagreement")  # of sample.choose: among the answers to several times as many prompts
# Settings of `reward` that a classifier, which has a head of its own, cannot use.
FOR_OUR_HEAD = ("fit_head", "read_tokens", "layers")
TRAINED = [name for name, item in Config.__dataclass_fields__.items() if hasattr(item.type, "schedule")]
OF_ADAPTERS = {key: settings_in(LoraConfig)[key].default for key in ("alpha", "target_modules", "dropout")}


def check_config(config: Config | ImportConfig | CorpusConfig, command: str) -> None:
    """Raises: UserError that lists every setting that does not fit, with what was wanted."""
    schema: Any = type(config)
    settings = settings_in(schema)
    problems = [problem for key, one in settings.items() if (problem := one.problem(key, get(config, key))) is not None]
    if not problems:  # relations are checked only if every single value is valid
        rows: Iterable[Row] = _relations(config, command) if isinstance(config, Config) else _places(config)
        for key, wanted in ((key, wanted) for broken, key, wanted in rows if broken):
            problems.append(f"{key}={shown(get(config, key))}: {wanted}" if key in settings else f"{key}: {wanted}")
    if problems:
        raise UserError("; ".join(problems))


def _places(config: ImportConfig | CorpusConfig) -> Iterator[Row]:
    yield config.path is None, "path is not set", "want a file, a folder or a hub id"
    yield config.out is None, "out is not set", "want the folder to write"
    if isinstance(config, ImportConfig):
        keys = [key for key in settings_in(ImportConfig) if key.startswith(("columns.", "words."))]
        given = ", ".join(key for key in keys if get(config, key) is not None)
        unused = "only format=table uses columns.* and words.*: add format=table, or leave them out"
        yield config.format != "table" and given, given, unused
        held_out = config.dev + config.test
        yield held_out >= 1, f"dev + test = {held_out}", "want less than 1, the rest trains"


def _relations(config: Config, command: str) -> Iterator[Row]:
    model, data, answer = config.model, config.data, config.rollout.max_new_tokens
    context = model.context_length if model.pretrained is None else None  # the stages check an adopted model's
    gold, is_gold, piped = config.gold, config.gold.enabled, command == "pipeline"
    corpus, weights = listed(data.corpus), data.corpus_weights
    yield from [
        (model.head_dim is None and model.width % model.n_head, "model.width",
         f"want a multiple of model.n_head={model.n_head}, or set model.head_dim"),
        (model.n_kv_head is not None and model.n_head % model.n_kv_head, "model.n_kv_head",
         f"want a divisor of model.n_head={model.n_head}"),
        (data.dev + data.test >= 1, f"data.dev + data.test = {data.dev + data.test}", "want less than 1, the rest trains"),
        (is_gold and data.prompts is not None and command in ("evaluate", "pipeline"), "data.prompts",
         "the gold world's evaluation judges its own prompts only: leave it out, or set gold.enabled=false"),
        (weights is not None and len(corpus) != len(listed(weights)), "data.corpus_weights",
         f"want one weight for each of the {len(corpus)} entries of data.corpus"),
        (config.judge.model is not None and data.half is None and command in ("judge", "pipeline"), "judge.model",
         "the judge learns from comparisons that the reward model does not see: want data.half=1 or 2"),
        (is_gold and context is not None and answer >= context, "rollout.max_new_tokens",
         f"leaves no room for a prompt in model.context_length={context}"),
        (gold.responses_min > gold.responses_max, "gold.responses_min", f"want at most gold.responses_max={gold.responses_max}"),
        (config.rounds > 1 and not is_gold and data.comparisons is None and piped, "rounds",
         "the first round needs data.comparisons: `rlhf sample` writes its tasks, or leave rounds out"),
        (context is not None and config.pretrain.global_batch_tokens % context, "pretrain.global_batch_tokens",
         f"want a multiple of model.context_length={context}"),
    ]  # fmt: skip
    for key, known in (("evaluate.baselines", BASELINES), ("evaluate.models", POLICY_STAGES), ("stages", STAGES)):
        unknown = [name for name in listed(get(config, key)) if name not in known]
        yield unknown, f"{key}: {', '.join(unknown[:1])}", f"want some of {', '.join(known)}"
    if is_gold and command in ("world", "label", "pipeline"):
        least = config.ppo.episodes_per_update * (1 + config.ppo.critic_warmup_updates)
        early = config.round.early_episodes if piped and config.rounds > 1 else None
        yield from [
            (not config.rounds <= gold.comparison_prompts <= gold.train_prompts, "gold.comparison_prompts",
             f"want at least rounds={config.rounds} and at most gold.train_prompts={gold.train_prompts}"),
            (gold.passage_min_tokens > gold.passage_max_tokens, "gold.passage_min_tokens",
             f"want at most gold.passage_max_tokens={gold.passage_max_tokens}"),
            (early is not None and early < least, "round.early_episodes",
             f"want at least {least}, which is one update of the policy, or null"),
        ]  # fmt: skip
    yield from _training_relations(config, command)
    yield from _command_relations(config, command)
    yield from _ppo_relations(config, command)
    yield from _launch_relations(config, command)
    if isinstance(config, PlanConfig):
        no_power = config.energy_price is not None and config.gpu_watts is None
        yield no_power, "energy_price", "no power is known: set gpu_watts too"


def _training_relations(config: Config, command: str) -> Iterator[Row]:
    for name in TRAINED:
        settings = getattr(config, name)
        known = settings_in(settings.__class__)
        for key in ("final_lr_fraction", "decay_fraction"):
            value, default = getattr(settings, key, None), known[key].default if key in known else None
            falls = f"{name}.schedule={' or '.join(FALLING)}"
            why = f"schedule={settings.schedule} does not fall to it: leave it at {default}, or want {falls}"
            yield settings.schedule not in FALLING and value not in (default, 1.0), f"{name}.{key}", why
        unseen = getattr(settings, "patience", None) and not settings.eval_every
        yield unseen, f"{name}.patience", f"counts evaluations: set {name}.eval_every"
    for name, given in (("reward", config.reward), ("judge", config.judge)):
        untrained = not given.epochs and not given.fit_head
        yield untrained, f"{name}.epochs", f"nothing would be trained: want 1 or more, or {name}.fit_head=true"
        for key in FOR_OUR_HEAD if given.model is not None else ():
            fits = settings_in(RewardConfig)[key].default
            own = f"{name}.model={given.model} is a classifier with its own head: want {shown(fits)}"
            yield getattr(given, key) != fits, f"{name}.{key}", own
    needs_policy = command in ("pipeline", "plan", "sft") or "sft" in (ancestors(command) if command in STAGES else ())
    model, pretrain, encoder = config.model, config.pretrain, config.model.attention == "bidirectional"
    yield from [
        (config.dpo.loss == "ipo" and config.dpo.label_smoothing, "dpo.label_smoothing", "dpo.loss=ipo has none: want 0, or sigmoid"),
        (encoder and model.pretrained is not None, "model.attention",
         f"model.pretrained={model.pretrained} has its own attention: leave one of them out"),
        (encoder and needs_policy, "model.attention", f"{command} needs a causal model: an encoder writes no text, "
         "and a value may not see later tokens: pretrain it in a run of its own, and give its folder to reward.model "
         "or judge.model"),
        (pretrain.pairs != "none" and not encoder, "pretrain.pairs",
         "is for an encoder: set model.attention=bidirectional, or leave it out"),
        (pretrain.pairs != "none" and pretrain.isolate_documents, "pretrain.pairs",
         "the halves of a block must see each other: want pretrain.isolate_documents=false"),
    ]  # fmt: skip


def _command_relations(config: Config, command: str) -> list[Row]:
    """Of commands that are not in every pipeline."""
    sample, classify, serve = config.sample, config.classify, config.serve
    stages, one = listed(sample.stages), SampleConfig(stage=sample.stage, responses=sample.responses)
    compares = command == "sample" and bool(stages)
    return [
        (compares and (len(stages) < 2 or one != SampleConfig()), f"sample.stages={','.join(stages)}",
         "want two or more, without sample.stage and sample.responses"),
        (compares and sample.choose in BY_REWARD, "sample.choose",
         "sample.stages compares policies, on prompts that no reward model chose"),
        (command == "sample" and sample.choose == "disagreement" and len(listed(sample.rewards)) < 2, "sample.choose",
         "want two reward models or more: name their runs with sample.rewards=[…]"),
        (command == "generate" and config.generate.greedy and config.generate.samples > 1, "generate.samples",
         "greedy responses are all alike: want 1"),
        (command == "serve" and serve.gold is not None and not (serve.check_every or serve.qualification), "serve.gold",
         "nobody would see it: set serve.check_every=10 or serve.qualification"),
        (command == "serve" and serve.qualification and not listed(serve.labelers), "serve.qualification",
         "is for labelers with a name: give labelers=[…]"),
        (classify.from_scratch and classify.layers is not None, "classify.layers",
         "classify.from_scratch=true takes none: give one of the two"),
        (classify.both_orders and (classify.second is None or listed(classify.choices)), "classify.both_orders",
         "is for two texts: name the second one with classify.second"),
    ]  # fmt: skip


def _ppo_relations(config: Config, command: str) -> list[Row]:
    ppo, kl, rollout = config.ppo, config.kl, config.ppo.episodes_per_update
    updates, warmup, k = ppo.episodes // rollout, ppo.critic_warmup_updates, ppo.responses_per_prompt
    compares = ppo.advantages in ("rloo", "grpo")
    weights = None if ppo.reward_weights is None else listed(ppo.reward_weights)
    return [
        *((command == "pipeline" and config.rounds > 1 and name in ("rejection", "dpo",
          "rate") and getattr(config.parents, name) is None,
           key, f"an earlier round has no {name} of its own: give parents.{name}, or rounds=1")
          for key, name in (("ppo.policy", ppo.policy), ("ppo.reference", ppo.reference))),
        (rollout % ppo.minibatches, "ppo.minibatches", f"want a divisor of ppo.episodes_per_update={rollout}"),
        (not updates, "ppo.episodes", f"want at least one update of {rollout}"),
        (command in ("ppo", "pipeline") and 0 < updates <= warmup, "ppo.critic_warmup_updates",
         f"leaves the policy none of the {updates} updates: lower it, or raise ppo.episodes"),
        (rollout % k, "ppo.responses_per_prompt", f"want a divisor of ppo.episodes_per_update={rollout}"),
        (compares and k < 2, "ppo.advantages", "compares responses to one prompt: want ppo.responses_per_prompt of 2 or more"),
        (ppo.advantages == "grpo" and kl.penalty == "reward", "kl.penalty",
         "ppo.advantages=grpo would normalise the KL with the scores: want kl.penalty=loss or auto"),
        (compares and ppo.score_by_token, "ppo.score_by_token",
         f"ppo.advantages={ppo.advantages} adds up a response's rewards: leave it out"),
        (not ppo.has_critic and (ppo.shared_critic or warmup), "ppo.advantages",
         "has no critic: want ppo.shared_critic=false and ppo.critic_warmup_updates=0"),
        (ppo.clip_range is None and ppo.clip_range_high, "ppo.clip_range_high",
         "ppo.clip_range=null clips nothing: set it too, or leave this out"),
        (ppo.drop_tied_groups and not compares, "ppo.drop_tied_groups",
         f"ppo.advantages={ppo.advantages} compares no responses to one prompt: want rloo or grpo"),
        (weights is not None and len(weights) != (len(listed(ppo.rewards)) or 1), "ppo.reward_weights",
         "want one number for each of ppo.rewards"),
        (kl.target is not None and kl.coef == 0, "kl.coef", "with kl.target it would stay 0: want more than 0, or kl.target=null"),
        (kl.target is not None and rollout >= 5 * kl.horizon, "kl.horizon",
         f"want more than a fifth of ppo.episodes_per_update={rollout}, or one update could take kl.coef to 0"),
    ]  # fmt: skip


def _launch_relations(config: Config, command: str) -> list[Row]:
    """Adapters, ZeRO (the ranks of ZeRO-3 hold slices of each weight) and the number of processes."""
    lora, reward, zero, processes = config.lora, config.reward, config.deepspeed, process_count()
    sharded, slices, turned_on = zero != "none", zero.startswith("zero3"), config.evaluate.turned_on
    whole = bool(lora.rank) and reward.model is not None and command in ("reward", "pipeline")
    shares = lora.share_trunk and not whole
    one_process = not (command in STAGES and STAGES[command].several_processes)
    remedy = "set launcher.processes instead" if command == "pipeline" else "start it without a launcher"
    prompts = config.ppo.episodes_per_update // config.ppo.responses_per_prompt if command == "ppo" else processes
    return [
        (prompts < processes, "ppo.episodes_per_update", f"{prompts} prompts per update for {processes} processes: want at least one each"),
        (slices and prompts % processes, "ppo.episodes_per_update", f"{prompts} prompts per update cannot be divided "
         f"among {processes} processes, as ZeRO-3 requires: choose a multiple, or deepspeed=zero2"),
        (whole, "lora.rank",
         f"reward.model={reward.model} trains all its weights: give `rlhf reward` lora.rank=0, and the other stages theirs"),
        *((not lora.rank and getattr(lora, key) != default, f"lora.{key}", "is for adapters, and lora.rank=0 has "
          f"none: set lora.rank, or leave lora.{key} at {shown(default)}") for key, default in OF_ADAPTERS.items()),
        (isinstance(config, PlanConfig) and lora.target_modules, "lora.target_modules",
         "the plan counts adapters on every linear layer: leave it out"),
        (shares and not lora.rank, "lora.share_trunk", "the models differ only in their adapters: set lora.rank"),
        (shares and config.ppo.critic == "random", "lora.share_trunk",
         "ppo.critic=random has another trunk: want ppo.critic=reward or sft"),
        (shares and {config.ppo.policy, config.ppo.reference} != {"sft"}, "lora.share_trunk",
         "the models share the SFT model's weights: leave out ppo.policy and ppo.reference"),
        (shares and sharded, "lora.share_trunk", f"does not go with deepspeed={zero}: use deepspeed=none"),
        *((slices and get(config, key) is not None, key, f"a text classifier does not go with deepspeed={zero}: use "
          "zero2")
          for key in ("reward.model", "judge.model")),
        (command in ("pretrain", "pipeline") and sharded and config.pretrain.optimizer == "muon", "pretrain.optimizer",
         f"works on whole matrices, which deepspeed={zero} divides: want pretrain.optimizer=adamw"),
        (command == "classify" and sharded, "deepspeed", "`rlhf classify` trains on one process with whole weights: use deepspeed=none"),
        (processes > 1 and command == "evaluate" and turned_on, f"evaluate.{', '.join(turned_on)}",
         "runs on one process: start it without a launcher"),
        (config.sharding.file and not sharded, "sharding.file", "is for DeepSpeed: set deepspeed=zero1 to zero3, or leave it out"),
        (config.sharding.overlap and zero in ("none", "zero1"), "sharding.overlap",
         f"deepspeed={zero} sums gradients after the backward pass: want zero2 or zero3"),
        (config.device == "mps" and (sharded or processes > 1), "device",
         "is for one process without ZeRO: leave out deepspeed and the launcher"),
        (processes > 1 and one_process, command, f"started as {processes} processes, runs as one: {remedy}"),
    ]  # fmt: skip
