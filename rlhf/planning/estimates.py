"""The plan of a configuration: bytes per GPU, stage and part, whether they fit, hours, compute-optimal sizes."""

import contextlib
from bisect import bisect_left
from dataclasses import asdict, replace
from typing import Any

from rlhf.config import DEEPSPEED, PlanConfig
from rlhf.config.checks import check_config
from rlhf.config.setting import listed
from rlhf.config.stages import pretraining_tokens
from rlhf.errors import UserError
from rlhf.planning import formulas, scaling
from rlhf.planning.formulas import Shape, make_shape, read_shape
from rlhf.system.memory import GB, SCORING_BYTES

PHASES = ("pretrain", "sft", "reward", "ppo rollout", "ppo score", "ppo update")
BYTE_PARTS = ("weights", "gradients", "optimizer", "frozen", "gathered", "buffers", "activations", "logits", "kv_cache")
SETUP = ("gpus", "deepspeed", "dtype", "gpu_memory_gb", "memory_margin", "mfu", "bandwidth_gb")
MAX_GPUS = 16384
RESPONSES = 9  # the most that InstructGPT's labelers ranked (K)


def planned_shape(config: PlanConfig) -> Shape:
    """The model's shape; of an adopted one, as its configuration states it."""
    if config.model.pretrained is not None:
        return read_shape(config.model.pretrained)
    return make_shape(config.model, config.tokenizer.vocab_size)


def longest_row(config: PlanConfig) -> int:
    """Most tokens of a row of SFT, reward model and PPO. Raises: UserError for too few for a prompt and an answer."""
    longest, answer = min(planned_shape(config).context_length, config.data.max_tokens), config.rollout.max_new_tokens
    if answer >= longest:
        raise UserError(f"rollout.max_new_tokens={answer}: leaves no room for a prompt in {longest} tokens: lower it")
    return longest


def block_tokens(config: PlanConfig) -> int:
    """Tokens of a block of pretraining: the context, or one batch if that is less."""
    return min(planned_shape(config).context_length, config.pretrain.global_batch_tokens)


def critic_parameters(config: PlanConfig, shape: Shape) -> int:
    """Parameters of PPO's critic: a separate model, a head on the policy's trunk, or none."""
    size = shape.width + 1 if config.ppo.shared_critic else shape.scalar_model
    return size if config.ppo.has_critic else 0


def reward_models(config: PlanConfig) -> int:
    """The number of frozen models that score each response; a function among `ppo.rewards` counts as one too."""
    return max(1, len(listed(config.ppo.rewards)))


def planned_rows(config: PlanConfig) -> dict[str, int]:
    """Rows of one forward on one GPU: the stage's setting, or this GPU's share of the batch if that is smaller."""

    def share(rows: int) -> int:
        return max(1, -(-rows // config.gpus))

    ppo, pretrain = config.ppo, config.pretrain
    episodes = share(ppo.episodes_per_update)
    return {
        "pretrain": min(pretrain.micro_batch_sequences, share(pretrain.global_batch_tokens // block_tokens(config))),
        "sft": min(config.sft.micro_batch_size, share(config.sft.batch_size)),
        "reward": min(config.reward.micro_batch_responses, share(config.reward.batch_prompts * RESPONSES)),
        "ppo rollout": min(config.rollout.batch_size, episodes),
        "ppo score": min(2 * ppo.micro_batch_episodes, episodes),
        "ppo update": min(ppo.micro_batch_episodes, share(ppo.episodes_per_update // ppo.minibatches)),
    }


def trained_and_frozen(config: PlanConfig, stage: str) -> tuple[int, list[tuple[int, int]]]:
    """The parameters that a stage trains; (parameters, those in linear layers) of each frozen model that it holds."""
    shape, rank = planned_shape(config), config.lora.rank
    head, adapters = shape.width + 1, rank * shape.adapted
    language = shape.language_model, shape.linear_layers + (0 if shape.tie_word_embeddings else shape.embedding)
    scalar = shape.scalar_model, shape.linear_layers
    if stage == "pretrain" or (stage == "sft" and not rank):
        return shape.language_model, []
    if stage == "sft":
        return adapters, [language]
    if stage == "reward":
        return (adapters + head, [scalar]) if rank else (shape.scalar_model, [])
    critic = critic_parameters(config, shape)
    if not rank:
        return shape.language_model + critic, [language] + [scalar] * reward_models(config)
    own = critic > head
    trained = adapters * (1 + own) + (head if critic else 0)
    if config.lora.share_trunk:  # one copy of the weights; each reward model has its adapters
        return trained, [language] + [(adapters + head, adapters)] * reward_models(config)
    # the reference is the policy without its adapters, but under ZeRO-3 a model of its own
    return trained, [language] * (1 + config.deepspeed.startswith("zero3")) + [scalar] * (own + reward_models(config))


def row_bytes(config: PlanConfig, stage: str) -> int:
    """Bytes that a row of the stage's longest takes in one forward: its activations, in a rollout its cache."""
    shape, longest, dtype = planned_shape(config), longest_row(config), config.dtype
    if stage == "ppo rollout":
        return formulas.kv_cache_bytes(shape, 1, longest - 1, dtype)
    if stage == "ppo score":  # no gradients: one block's activations
        return longest * formulas.working_bytes(shape, dtype)
    tokens = block_tokens(config) if stage == "pretrain" else longest
    dropout = {"pretrain": shape.dropout, "sft": config.sft.dropout}.get(stage, 0.0)
    kept = formulas.activation_bytes(shape, tokens, dtype, config.gradient_checkpointing, dropout)
    # Of one trunk, also in PPO, which computes critic and policy together only under ZeRO.
    both = stage == "ppo update" and config.deepspeed != "none" and critic_parameters(config, shape) > shape.width + 1
    return kept * (1 + both)


def stage_bytes(config: PlanConfig, stage: str) -> dict[str, int]:
    """Bytes per GPU by part at the peak of a stage (PPO: of a phase), and `host`, bytes per GPU in the host's memory.

    Rows of a forward are at most the stage's setting, and fewer if they would not fit, but at least one.
    """
    shape, dtype, gpus, rows = planned_shape(config), config.dtype, config.gpus, planned_rows(config)[stage]
    zero, offload = DEEPSPEED[config.deepspeed]
    longest, row = longest_row(config), row_bytes(config, stage)
    answer = min(longest, config.rollout.max_new_tokens)
    trained, frozen = trained_and_frozen(config, stage)
    parts = {**dict.fromkeys(BYTE_PARTS, 0), **formulas.model_state_bytes(trained, gpus, zero, dtype, offload=offload)}
    parts["frozen"] = sum(formulas.frozen_bytes(*counts, gpus, zero, dtype) for counts in frozen)
    if zero == 3:  # a rollout gathers the policy whole once
        whole = formulas.ELEMENT[dtype] * shape.language_model
        parts["gathered"] = whole if stage == "ppo rollout" else formulas.gathered_bytes(shape, dtype)
    if stage in ("ppo rollout", "ppo score"):
        parts["gradients"] = 0  # freed by the step before
    if stage == "ppo rollout" and config.rollout.engine == "vllm":  # weights, cache and work
        parts["kv_cache"] = int(config.rollout.vllm_memory * config.gpu_memory_gb * GB)
    elif stage == "ppo rollout":
        parts["kv_cache"] = within((room(config) - peak_bytes(parts)) / 8, row, rows)
        rows = -(-parts["kv_cache"] // row)
        parts["logits"] = formulas.sampling_logit_bytes(rows, shape.vocab_size, dtype)
        parts["activations"] = within(SCORING_BYTES, (longest - answer) * formulas.working_bytes(shape, dtype), rows)
    elif stage == "ppo score":
        parts["activations"] = within(SCORING_BYTES, row, rows)
        parts["logits"] = formulas.logit_bytes(rows * answer, shape.vocab_size)
    else:
        tokens = block_tokens(config) if stage == "pretrain" else longest
        scored = {"reward": 0, "ppo update": rows * answer}.get(stage, rows * tokens)
        parts["logits"] = formulas.logit_bytes(scored, shape.vocab_size)
        parts["buffers"] = formulas.buffer_bytes(trained, gpus, zero, dtype, config.sharding.bucket_elements)
        parts["activations"] = within(room(config) - peak_bytes(parts), row, rows)
    return parts


def within(left: float, row: int, rows: int) -> int:
    """Bytes of `rows` rows, or of those that fit what is left, but at least of one."""
    return int(min(rows * row, max(row, left)))


def planned_stages(config: PlanConfig) -> tuple[str, ...]:
    """The planned stages: an adopted model is pretrained only if tokens are set for that."""
    return PHASES if pretraining_tokens(config) else PHASES[1:]


def peak_bytes(parts: dict[str, int]) -> int:
    """Bytes on the GPU."""
    return sum(parts[name] for name in BYTE_PARTS)


def largest(config: PlanConfig) -> tuple[str, int]:
    """The stage that needs most, and its bytes per GPU."""
    needs = ((stage, peak_bytes(stage_bytes(config, stage))) for stage in planned_stages(config))
    return max(needs, key=lambda pair: pair[1])


def room(config: PlanConfig) -> float:
    """Bytes of a GPU that may be used."""
    return config.gpu_memory_gb * GB * (1.0 - config.memory_margin)


def fewest_gpus(config: PlanConfig) -> int | None:
    """The least number of GPUs on which every stage fits; None if MAX_GPUS are too few.

    Two GPUs can need more memory per GPU than one (communication buffers); from two on, more GPUs never need more per
    GPU.
    """

    def fits(gpus: int) -> bool:
        return largest(replace(config, gpus=gpus))[1] <= room(config)

    fewest = 1 if fits(1) else 2 + bisect_left(range(2, MAX_GPUS + 1), True, key=fits)
    return fewest if fewest <= MAX_GPUS else None


def suggest(config: PlanConfig) -> list[str]:
    """Overrides that fit and that the checks accept: on the same GPUs those that cost least speed, in full and with
    adapters; else the fewest GPUs.
    """
    recomputing = (True,) if config.gradient_checkpointing else (False, True)
    loras = [replace(config.lora, rank=config.lora.rank or 16, share_trunk=share) for share in (False, True)]
    as_given = [(n, c, config.lora) for c in recomputing for n in DEEPSPEED]
    ladders, found = list[list[PlanConfig]](), list[PlanConfig]()
    for ways in (as_given, [(n, c, x) for n in DEEPSPEED for x in loras for c in recomputing]):
        ways.sort(key=lambda way: DEEPSPEED[way[0]][1])  # offloading costs more time than recomputing
        ladders.append([])
        for n, c, x in ways:
            with contextlib.suppress(UserError):  # settings that do not go together
                one = replace(config, deepspeed=n, gradient_checkpointing=c, lora=x)
                check_config(one, "plan")
                ladders[-1].append(one)
        found += [one for one in ladders[-1] if largest(one)[1] <= room(one)][:1]
    if found:
        return list(dict.fromkeys(as_overrides(one, config) for one in found))
    counts = [(count, one) for one in ladders[0] if (count := fewest_gpus(one)) is not None]
    if not counts:
        return []
    count, one = min(counts, key=lambda pair: pair[0])
    return [as_overrides(replace(one, gpus=count), config)]


def as_overrides(config: PlanConfig, given: PlanConfig) -> str:
    """GPUs and deepspeed, and what else differs from the given configuration."""
    text = f"gpus={config.gpus} deepspeed={config.deepspeed}"
    text += " gradient_checkpointing=true" if config.gradient_checkpointing else ""
    text += f" lora.rank={config.lora.rank}" if config.lora.rank != given.lora.rank else ""
    return text + (" lora.share_trunk=true" if config.lora.share_trunk > given.lora.share_trunk else "")


def peak_tflops(config: PlanConfig) -> float:
    """10^12 dense operations per second of one GPU; of an A100 unless given."""
    return config.peak_tflops or formulas.PEAK_TFLOPS["A100"][config.dtype != "bf16"]


def make_times(config: PlanConfig) -> dict[str, dict[str, float]]:
    """FLOPs and hours of pretraining and of PPO by phase, at the stated MFU; decoding by the roofline."""
    shape, context, longest = planned_shape(config), block_tokens(config), longest_row(config)
    flops = config.mfu * 1e12 * peak_tflops(config)  # of one GPU
    pretrain = formulas.TRAINING_PASSES * formulas.shape_flops(shape, pretraining_tokens(config), context)

    answer = min(longest - 1, config.rollout.max_new_tokens)
    updates = config.ppo.episodes // config.ppo.episodes_per_update
    episodes = updates * config.ppo.episodes_per_update
    tokens, answers = float(episodes * longest), float(episodes * answer)
    critics = 0 if not config.ppo.has_critic or config.ppo.shared_critic else 1
    language = formulas.shape_flops(shape, tokens, longest, logits=answers)
    scalar = formulas.shape_flops(shape, tokens, longest, scalar=True)
    score = language + (critics + reward_models(config)) * scalar
    update = formulas.TRAINING_PASSES * config.ppo.epochs * (language + critics * scalar)
    if config.ppo.ptx_coef:
        blocks = episodes * config.ppo.epochs * config.ppo.ptx_blocks_per_episode
        update += formulas.TRAINING_PASSES * formulas.shape_flops(shape, blocks * context, context)

    # With a cache every token is computed once and attends to those before it.
    rollout = episodes * formulas.shape_flops(shape, longest, (longest + 1) / 2, logits=answer)
    share, rows = -(-config.ppo.episodes_per_update // config.gpus), planned_rows(config)["ppo rollout"]
    if config.rollout.engine != "vllm":  # as many as the cache has room for
        rows = max(1, min(rows, stage_bytes(config, "ppo rollout")["kv_cache"] // row_bytes(config, "ppo rollout")))
    bandwidth, prompt = config.bandwidth_gb * GB, longest - answer
    decode = formulas.decode_seconds(shape, rows, prompt, answer, config.dtype, flops=flops, bandwidth=bandwidth)
    computed = {"pretrain": pretrain, "ppo rollout": rollout, "ppo score": score, "ppo update": update}
    times = {name: {"flops": n, "hours": n / (config.gpus * flops) / 3600} for name, n in computed.items()}
    times["ppo rollout"]["hours"] = updates * -(-share // rows) * decode / 3600
    return times


def make_optimal(config: PlanConfig) -> dict[str, Any]:
    """By approach: the optimal tokens and FLOPs for this model, and the optimal model and tokens for this budget (6 N D)."""
    parameters, tokens = planned_shape(config).language_model, pretraining_tokens(config)
    if tokens == 0:
        return {}  # an adopted model is not pretrained
    budget = 6.0 * parameters * tokens
    optimal: dict[str, Any] = {"budget_flops": budget, "loss": scaling.PUBLISHED.loss(parameters, tokens)}
    for number, frontier in scaling.FRONTIERS.items():
        flops, size = frontier.flops(parameters), frontier.parameters(budget)
        row = {"model_flops": flops, "model_tokens": frontier.tokens(flops)}
        row |= {"budget_parameters": size, "budget_tokens": frontier.tokens(budget)}
        optimal[f"approach {number}"] = row
    return optimal


def make_served(config: PlanConfig) -> dict[str, Any]:
    """With served_tokens: this model, the compute-optimal and the cheapest one of its loss, each with what training and
    use take.

    {name: {"parameters", "tokens", "train_flops", "served_flops", "gpu_hours"}}, and "kwh" and "cost" if the settings
    are given. Training is 6 N D, use 2 N per token, both at `mfu`. Raises: UserError for a model that is not
    pretrained.
    """
    if (served := config.served_tokens) is None:
        return {}
    parameters, tokens = float(planned_shape(config).language_model), float(pretraining_tokens(config))
    if tokens == 0:
        unknown = "an adopted model's loss is not known by the law"
        raise UserError(f"served_tokens: {unknown}: set pretrain.tokens, or leave it out")
    loss = scaling.PUBLISHED.loss(parameters, tokens)
    best, cheapest = (scaling.cheapest(scaling.PUBLISHED, loss, use) for use in (0.0, served))
    rows = {"this model": (parameters, tokens), "compute-optimal": best, "cheapest": cheapest}
    found: dict[str, Any] = {"served_tokens": served, "loss": loss}
    for name, (size, text) in rows.items():
        train, use = 6 * size * text, 2 * size * served
        hours = (train + use) / (config.mfu * 1e12 * peak_tflops(config)) / 3600
        row = {"parameters": size, "tokens": text, "train_flops": train, "served_flops": use, "gpu_hours": hours}
        kwh = hours * (config.gpu_watts or 0.0) / 1000
        row |= {"kwh": kwh} if config.gpu_watts is not None else {}
        if config.gpu_price is not None or config.energy_price is not None:
            row["cost"] = hours * (config.gpu_price or 0.0) + kwh * (config.energy_price or 0.0)
        found[name] = row
    return found


def make_plan(config: PlanConfig) -> dict[str, Any]:
    """The whole plan as JSON values: bytes, FLOPs, hours, and the verdict."""
    shape = planned_shape(config)
    stage, most = largest(config)
    held = {name: stage_bytes(config, name) for name in planned_stages(config)}
    kept = dict.fromkeys(PHASES, "activations") | {"ppo rollout": "kv_cache"}  # of each row
    counts = {"policy": shape.language_model, "reference": shape.language_model, "reward": shape.scalar_model}
    lora = f"lora.rank={config.lora.rank}" if config.lora.rank else "all weights"
    setup = {"checkpointing": config.gradient_checkpointing, "engine": config.rollout.engine, "lora": lora}
    return {
        "shape": asdict(shape),
        "parameters": counts | {"critic": critic_parameters(config, shape)},
        "setup": {name: getattr(config, name) for name in SETUP} | setup | {"peak_tflops": peak_tflops(config)},
        "micro_batches": {name: parts[kept[name]] // row_bytes(config, name) for name, parts in held.items()},
        "bytes": held,
        "largest": {"stage": stage, "bytes": most},
        "room_bytes": room(config),
        "fits": most <= room(config),
        "fewest_gpus": fewest_gpus(config),
        "suggestions": [] if most <= room(config) else suggest(config),
        "time": make_times(config),
        "compute_optimal": make_optimal(config),
        "served": make_served(config),
    }
