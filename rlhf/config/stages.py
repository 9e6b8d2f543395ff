"""Settings of the stages: what the recipe computes. The defaults are the papers' values."""

import math
from dataclasses import dataclass
from typing import Any

from rlhf.config.setting import MAX_SEED, NOTHING, RESULT, ROUNDING, other_default, setting

PAPER_TOKENS = 300_000_000_000  # Brown et al. 2020, table 2.1
FALLING = ("cosine", "linear")  # schedules that end at final_lr_fraction
SCHEDULES = (*FALLING, "constant")
PAIRS = ("none", "next", "order")
CORRECTIONS = ("auto", "none", "truncate", "mask")
ESTIMATORS = ("gae", "reinforce", "rloo", "grpo")


@dataclass(slots=True)
class DataConfig:
    """Where the four kinds of data come from: a file, a folder or a hub id, or a list of these."""

    corpus: Any = setting(None, "pretraining text", kind="paths")
    corpus_weights: Any = setting(None, "shares of tokens by entry of data.corpus; none: all once", kind="shares")
    demonstrations: Any = setting(None, "prompts with responses, for SFT", kind="paths")
    comparisons: Any = setting(None, "ranked responses, for the reward model", kind="paths")
    prompts: Any = setting(None, "prompts for rollouts; none: those of demonstrations and comparisons", kind="paths")
    form: str = setting("chat", "the chat template's turns, or text of fixed lengths", choices=("chat", "completion"))
    format: str = setting("auto", "a format's name (`rlhf import --help` lists them), or auto")
    allow_partial: bool = setting(False, "accept an import that had too many rejects")
    held_out_labelers: Any = setting(None, "names: not trained on; accuracy on them is reported", kind="labelers")
    max_tokens: int = setting(2048, "most tokens of a row, prompt and response; the context bounds them too", min=16)
    encoding: str = setting("utf-8", "encoding of plain-text corpora", kind="encoding")
    held_out: float = setting(0.01, "fraction of the corpus kept for the held-out loss", above=0, below=1)
    dev: float = setting(0.05, "fraction of prompts kept for choosing settings", min=0, max=1)
    test: float = setting(0.10, "fraction of prompts kept for the final figures", min=0, max=1)
    half: int | None = setting(None, "1 or 2: half of the compared prompts, the judge's is the other", min=1, max=2)
    limit: int | None = setting(None, "a quick trial with so many prompts of each kind of data; none: all", min=1)
    split_seed: int = setting(0, "seed of the splits, independent of `seed`", min=0, max=MAX_SEED)


def pretraining_tokens(config: Any) -> int:
    """Tokens to pretrain on: if none are set, the paper's number for a model of ours and none for an adopted one."""
    if config.pretrain.tokens is not None:
        return config.pretrain.tokens
    return PAPER_TOKENS if config.model.pretrained is None else 0


@dataclass(slots=True)
class OptimizerConfig:
    """AdamW and the fall of its learning rate, which every stage that trains has."""

    schedule: str = setting("cosine", "how the learning rate falls after the warm-up", choices=SCHEDULES)
    final_lr_fraction: float = setting(0.1, "where cosine and linear end, as a fraction of lr", min=0, max=1)
    weight_decay: float = setting(0.0, "weight decay, on matrices only", min=0, max=10)
    beta1: float = setting(0.9, "beta1 of AdamW", min=0, below=1)
    beta2: float = setting(0.95, "beta2 of AdamW", min=0, below=1)
    max_grad_norm: float = setting(1.0, "maximum norm of the gradient; larger ones are scaled down", above=0)


@dataclass(slots=True)
class WarmupConfig(OptimizerConfig):
    warmup_fraction: float = setting(0.0, "fraction of the steps of linear warm-up", min=0, below=1)


@dataclass(slots=True)
class PretrainConfig(OptimizerConfig):
    """Language modelling on packed blocks (Brown et al. 2020, section 2.3 and appendix B)."""

    tokens: int | None = setting(None, "training tokens; none: 300 billion, or 0 for an adopted model", min=1)
    global_batch_tokens: int = setting(524_288, "tokens per optimizer step", min=1)
    micro_batch_sequences: int = setting(16, "sequences per forward on one device", min=1, changes=ROUNDING)
    optimizer: str = setting("adamw", "muon: Muon on matrices, AdamW on the rest", choices=("adamw", "muon"))
    lr: float = setting(6e-4, "learning rate of AdamW", above=0, max=10)
    muon_lr: float = setting(0.02, "learning rate of Muon", above=0, max=10)
    weight_decay: float = other_default(OptimizerConfig, "weight_decay", 0.1)
    warmup_tokens: int = setting(375_000_000, "tokens of linear warm-up", min=0)
    schedule: str = setting("cosine", "inverse_sqrt: lr sqrt(warm-up / steps)", choices=(*SCHEDULES, "inverse_sqrt"))
    decay_fraction: float = setting(1.0, "part of the training after which cosine and linear end", above=0, max=1)
    shuffle: bool = setting(True, "blocks in random order; false: in file order")
    isolate_documents: bool = setting(False, "no attention between documents in one block")
    eval_sequences: int = setting(256, "blocks used for the held-out loss", min=1)
    pairs: str = setting("none", "encoder: learn whether block halves follow each other, or their order", choices=PAIRS)


@dataclass(slots=True)
class EvaluatedConfig(WarmupConfig):
    eval_every: int = setting(0, "steps between held-out losses; 0: after training only", min=0)
    patience: int | None = setting(None, "evaluations without a better loss that end training; the best is kept", min=1)


@dataclass(slots=True)
class SftConfig(EvaluatedConfig):
    """Supervised fine-tuning on demonstrations (Ouyang et al. 2022, appendix C.1)."""

    epochs: int = setting(16, "passes over the demonstrations; 0: the base model as it is", min=0)
    turns: str = setting("all", "the assistant's turns of a dialogue that are learned", choices=("all", "last"))
    batch_size: int = setting(32, "demonstrations per optimizer step", min=1)
    lr: float = setting(9.65e-6, "learning rate of AdamW", above=0, max=10)
    dropout: float = setting(0.2, "residual dropout", min=0, below=1)
    pretrain_fraction: float = setting(0.0, "share of rows of pretraining text; 0.1 before PPO", min=0, below=1)
    lm_coef: float = setting(0.0, "weight lambda of the prompt tokens in the loss; GPT-1 uses 0.5", min=0)
    micro_batch_size: int = setting(32, "demonstrations per forward on one device", min=1, changes=ROUNDING)
    pack: bool = setting(False, "several demonstrations per row, without attention between them")


@dataclass(slots=True)
class RewardConfig(EvaluatedConfig):
    """The reward model (Ouyang et al. 2022, section 3.5 and appendix C.2)."""

    epochs: int = setting(1, "passes over the comparisons; 0: none, with fit_head", min=0)
    fit_head: bool = setting(False, "first fit only the head to all comparisons, on the frozen trunk")
    batch_prompts: int = setting(64, "prompts, each with all its responses, per optimizer step", min=1)
    micro_batch_responses: int = setting(64, "responses per forward", min=1, changes=ROUNDING)
    lr: float = setting(9e-6, "learning rate of AdamW", above=0, max=10)
    read_tokens: int = setting(1, "the score is the mean over this many last tokens, without end tokens", min=1)
    layers: Any = setting(None, "first blocks of the trunk; mix: a learned mix of all layers; none: all", kind="layers")
    calibration_samples: int = setting(512, "SFT samples used to set the gain, to prompts drawn by a hash", min=2)
    labeler_weights: Any = setting(None, "{name: weight of this labeler's judgements}; others: 1", kind="weights")
    model: str | None = setting(None, "a text model with its own tokenizer: folder or hub id; none: SFT's trunk")
    audit: int = setting(96, "held-out pairs that the audit attacks; 0: no audit", min=0, max=100_000, changes=NOTHING)
    audit_with: Any = setting(None, "runs with reward models that the audit asks too", kind="names", changes=NOTHING)


@dataclass(slots=True)
class JudgeConfig(RewardConfig):
    """The reward model that judges the final policies and that none of them was trained with: settings as in `reward`."""

    model: str | None = setting(None, "the judge's base, with its own tokenizer: folder or hub id; none: no judge")
    audit: int = setting(0, "held-out pairs that the audit attacks; 0: no audit", min=0, max=100_000, changes=NOTHING)


@dataclass(slots=True)
class PpoConfig(WarmupConfig):
    """PPO with a clipped objective (Ouyang et al. 2022, appendix C.4)."""

    policy: str = setting("sft", "policy to start from: sft, dpo, rejection, rate; ppo: the round before's; or a run")
    reference: str = setting("sft", "the model that the KL penalty pulls towards: as ppo.policy")
    episodes: int = setting(256_000, "total episodes", min=1)
    episodes_per_update: int = setting(512, "episodes per rollout, over all devices", min=1)
    minibatches: int = setting(8, "optimizer steps per epoch", min=1)
    epochs: int = setting(1, "passes over one rollout", min=1)
    micro_batch_episodes: int = setting(64, "episodes per forward", min=1, changes=ROUNDING)
    prompts: str = setting("all", "prompts by whether comparisons rank them", choices=("all", "ranked", "unranked"))
    clip_range: float | None = setting(0.2, "eps: ratios are clipped to 1 ± eps; none: not clipped", above=0)
    clip_range_high: float | None = setting(None, "ratios are clipped to 1 + this above; none: to 1 + eps", above=0)
    value_clip_range: float | None = setting(0.2, "eps_v: clip values to the old value ± eps_v; none: no clip", above=0)
    gamma: float = setting(1.0, "discount per token", min=0, max=1)
    lam: float = setting(0.95, "lambda of GAE", min=0, max=1)
    lr: float = setting(1e-5, "learning rate of the policy", above=0, max=10)
    critic_lr: float = setting(9e-6, "learning rate of the critic", above=0, max=10)
    warmup_fraction: float = setting(0.02, "fraction of updates in which the rate rises from a tenth", min=0, below=1)
    schedule: str = other_default(OptimizerConfig, "schedule", "linear")
    final_lr_fraction: float = other_default(OptimizerConfig, "final_lr_fraction", 1.0)
    critic_warmup_updates: int = setting(0, "first updates, in which only the critic is trained", min=0)
    value_coef: float | None = setting(None, "weight of the value loss; none: 1, or 0.1 with a shared trunk", above=0)
    entropy_coef: float = setting(0.0, "weight of the entropy bonus", min=0)
    max_grad_norm: float = setting(1.0, "maximum norm of each model's gradient; larger ones are scaled down", above=0)
    advantages: str = setting("gae", "estimator; only gae has a critic", choices=ESTIMATORS, kind="function")
    responses_per_prompt: int = setting(1, "responses per prompt, k; rloo and grpo need 2 or more", min=1)
    drop_tied_groups: bool = setting(False, "prompts whose responses all have one score train nothing (rloo and grpo)")
    whiten_advantages: bool = setting(True, "mean 0 and variance 1 over the rollout (not rloo and grpo)")
    critic: str = setting("reward", "initial weights of the critic", choices=("reward", "sft", "random"))
    shared_critic: bool = setting(False, "a value head on the policy's own trunk")
    missing_eos_rule: str = setting("min", "how missing_eos_score is used", choices=("min", "replace", "none"))
    missing_eos_score: float = setting(-1.0, "without end token the score is at most this (min), or this (replace)")
    calibrated: bool = setting(True, "apply the reward model's gain and shift; false: raw scores")
    score_clip: float | None = setting(None, "scores are clipped to ± this", above=0)
    score_by_token: bool = setting(False, "each token earns its term of a mean score; false: the last earns all")
    rewards: Any = setting(None, "runs, folders, classifiers, functions, servers; none: reward stage", kind="rewards")
    reward_key: str | None = setting(None, "environment variable with the token of a server in ppo.rewards")
    reward_weights: Any = setting(None, "one weight per source; none: 1 each", kind="numbers")
    reward_parameters: Any = setting(None, "{name: value} for the functions' further arguments", kind="parameters")
    sampler_correction: str = setting("auto", "weights of vllm's tokens; auto: by mismatch", choices=CORRECTIONS)
    ptx_coef: float = setting(0.0, "weight of the pretraining loss (PPO-ptx)", min=0)
    ptx_blocks_per_episode: float = setting(8.0, "pretraining blocks per episode", above=0)
    ema_decay: float | None = setting(None, "decay per step of averaged weights; none: the last", above=0, below=1)
    metrics: Any = setting(None, "functions of further metrics, logged as custom/…", kind="functions", changes=NOTHING)
    samples_every: int = setting(1, "updates between rows of the samples table", min=1, changes=NOTHING)
    eval_every: int = setting(1, "updates between held-out evaluations; 0: never", min=0, changes=NOTHING)
    eval_prompts: int = setting(64, "prompts of the dev split, the same ones every time", min=0, changes=NOTHING)

    @property
    def warmup_updates(self) -> int:
        return math.ceil(self.warmup_fraction * (self.episodes // self.episodes_per_update))

    @property
    def has_critic(self) -> bool:
        """Whether the estimator of advantages gets values; a function of the user's does."""
        return self.advantages not in ("reinforce", "rloo", "grpo")


@dataclass(slots=True)
class KlConfig:
    """The penalty for leaving the SFT model, in nats."""

    coef: float = setting(0.02, "KL coefficient: score per nat; the initial value if target is set", min=0)
    target: float | None = setting(None, "target KL in nats per sequence; none: a fixed coefficient", above=0)
    horizon: int = setting(10_000, "horizon of the adaptive coefficient, in episodes", min=1)
    penalty: str = setting("auto", "place of the KL; auto: the loss with grpo", choices=("auto", "reward", "loss"))
    ceiling: float | None = setting(None, "KL in nats per sequence at which training stops; none: never", above=0)


@dataclass(slots=True)
class LoraConfig:
    """Low-rank adapters (PEFT) in SFT, reward model and PPO; the rest of the weights is frozen."""

    rank: int = setting(0, "rank of the adapters; 0: train all weights", min=0)
    alpha: int = setting(16, "the adapters' output is scaled by alpha / rank", min=1)
    target_modules: Any = setting(None, "linear layers with adapters, by name or its end; none: all", kind="names")
    dropout: float = setting(0.0, "dropout on the adapters' input in SFT, reward model and DPO", min=0, below=1)
    share_trunk: bool = setting(False, "PPO's models share the SFT model's weights; the reward model needs lora.rank")


@dataclass(slots=True)
class RolloutConfig:
    """How responses are sampled: at temperature 1 in training, since any other would bias the KL."""

    max_new_tokens: int = setting(256, "maximum tokens per response", min=1)
    batch_size: int = setting(256, "most sequences that are decoded together", min=1, changes=ROUNDING)
    engine: str = setting("native", "engine that samples responses; vllm: see docs/vllm.md", choices=("native", "vllm"))
    vllm_memory: float = setting(0.4, "share of a GPU's memory for vLLM", above=0, below=1, changes=ROUNDING)
    tensor_parallel: int = setting(1, "GPUs per vLLM engine", min=1, changes=ROUNDING)


@dataclass(slots=True)
class EvaluateConfig:
    prompts: int = setting(512, "held-out prompts, drawn by a hash", min=1, changes=RESULT)
    split: str = setting("test", "split of prompts; dev: to choose settings", choices=("test", "dev"), changes=RESULT)
    samples: int = setting(3, "responses per prompt at temperature 1", min=1, changes=RESULT)
    baselines: Any = setting(None, "compared with PPO: rejection, dpo, rate, distill", kind="names", changes=RESULT)
    compare: Any = setting(None, "runs whose PPO model, of this SFT model, is compared", kind="names", changes=RESULT)
    best_of: int = setting(16, "n of best-of-n by the reward model, PPO's baseline; 0: none", min=0, changes=RESULT)
    pairs: Any = setting(None, "preference files on which a reward model is measured", kind="paths")
    pairs_model: str | None = setting(None, "their model: a run, folder or classifier; none: the run's")
    labels: Any = setting(None, "people's rankings of several policies' responses: wins, ratings, flags", kind="paths")
    labels_model: str | None = setting(None, "a run, folder or classifier that judges all tasks of evaluate.labels too")
    shots: Any = setting(None, "numbers of solved examples of classify.data in a prompt, as [0,1,2]", kind="counts")
    models: Any = setting(None, "stages that shots measure; none: all complete ones", kind="names")
    judge: str | None = setting(None, "URL of an OpenAI-style endpoint that compares the answers")
    judge_model: str = setting("default", "name of the judge's model")
    judge_key: str | None = setting(None, "environment variable with the judge's key")
    judge_pair: Any = setting(None, "models that are compared; none: ppo, sft", kind="pair")
    judge_prompts: int = setting(200, "prompts that are judged, in both orders", min=1)
    judge_parallel: int = setting(4, "requests at the same time", min=1, max=256)

    @property
    def turned_on(self) -> list[str]:
        """The evaluations besides the stage's own that are asked for; they run on one process."""
        names = ("pairs", "labels", "shots", "judge")
        return [name for name in names if getattr(self, name)]


@dataclass(slots=True)
class RejectionConfig:
    """Rejection sampling: fine-tune the SFT model on the best of n of its own samples."""

    prompts: int = setting(2000, "prompts of the training split, drawn by a hash", min=1)
    samples: int = setting(16, "samples per prompt, n", min=1)
    epochs: int = setting(1, "passes over the best samples", min=1)


@dataclass(slots=True)
class RateConfig:
    """Generate-and-rate: one model answers and rates answers (Thoppilan et al. 2022, section 6.1)."""

    ratings: int = setting(16_000, "ratings to train on, of a response's one quality each", min=1)
    epochs: int = setting(1, "passes over ratings and demonstrations", min=1)
    qualities: Any = setting(None, "attributes, flags, rating to learn; none: all attributes", kind="names")
    rules: str | None = setting(None, "JSON file of rules to learn and to rate by, as serve.rules; none: no rules")
    given: Any = setting(None, "{quality: the one that a response must have for it to count}", kind="parameters")
    weights: Any = setting(None, "{quality: weight} of candidates' scores; none: 1, LaMDA's, 0 of flags", kind="signed")
    least: Any = setting(None, "{quality: least value of a candidate, in [0, 1]}; none: safe 0.8", kind="weights")


@dataclass(slots=True)
class DpoConfig(WarmupConfig):
    """Direct preference optimisation (Rafailov et al. 2023, appendix B)."""

    beta: float = setting(0.1, "strength of the pull towards the SFT model", above=0)
    loss: str = setting("sigmoid", "ipo: log-ratios per token are drawn 1 / (2 beta) apart", choices=("sigmoid", "ipo"))
    label_smoothing: float = setting(0.0, "share of the judgements that are taken as wrong", min=0, below=0.5)
    epochs: int = setting(1, "passes over the comparisons", min=1)
    batch_prompts: int = setting(64, "prompts, each with all its responses, per optimizer step", min=1)
    micro_batch_prompts: int = setting(16, "prompts per forward on one device", min=1, changes=ROUNDING)
    lr: float = setting(1e-6, "learning rate of AdamW", above=0, max=10)
    warmup_fraction: float = other_default(WarmupConfig, "warmup_fraction", 0.1)
    final_lr_fraction: float = other_default(OptimizerConfig, "final_lr_fraction", 1.0)


@dataclass(slots=True)
class DistillConfig(WarmupConfig):
    """A smaller student of a finished policy (Sanh et al. 2019); the weights of the losses are those of the released code."""

    teacher: str = setting("ppo", "the teacher's stage", choices=("sft", "rejection", "dpo", "rate", "ppo"))
    every: int = setting(2, "the student takes the teacher's blocks 0, every, 2 every, …", min=1)
    prompts: int = setting(2000, "prompts of the training split that the teacher answers, drawn by a hash", min=1)
    samples: int = setting(1, "the teacher's samples per prompt", min=1)
    epochs: int = setting(3, "passes over the answers", min=1)
    batch_size: int = setting(32, "answers per optimizer step", min=1)
    micro_batch_size: int = setting(32, "answers per forward on one device", min=1, changes=ROUNDING)
    lr: float = setting(5e-4, "learning rate of AdamW", above=0, max=10)
    warmup_fraction: float = other_default(WarmupConfig, "warmup_fraction", 0.05)
    temperature: float = setting(2.0, "of both distributions in the distillation loss", above=0)
    ce_coef: float = setting(5.0, "weight of the cross-entropy of the student under the teacher", min=0)
    lm_coef: float = setting(2.0, "weight of the loss on the teacher's sampled tokens", min=0)
    cos_coef: float = setting(1.0, "weight of 1 - cosine of the last hidden states", min=0)


@dataclass(slots=True)
class ClassifyConfig(WarmupConfig):
    """Fine-tuning on a labelled task (Radford et al. 2018, sections 3.2, 3.3 and 4.1)."""

    data: Any = setting(None, "labelled examples; or gold:topic, :entailment, :similarity, :choice", kind="paths")
    test: Any = setting(None, "held-out examples; none: a fraction of classify.data", kind="paths")
    text: str | None = setting(None, "column with the text, the premise or the context")
    second: str | None = setting(None, "column with a second text: a hypothesis, a question, a text to compare")
    choices: Any = setting(None, "columns with the choices, or one with lists", kind="columns")
    label: str | None = setting(None, "column with the label; for choices the right one's text, column or number")
    both_orders: bool = setting(False, "similarity: read the two texts in both orders")
    held_out: float = setting(0.2, "fraction of the examples kept for the figures", above=0, below=1)
    examples: int | None = setting(None, "training examples, drawn at random; none: all", min=1)
    layers: int | None = setting(None, "blocks taken from the base; the rest is random; none: all", min=0)
    from_scratch: bool = setting(False, "transfer nothing from the base: its shape with random weights")
    epochs: int = setting(3, "passes over the examples", min=1)
    batch_size: int = setting(32, "examples per optimizer step", min=1)
    micro_batch_size: int = setting(32, "examples per forward", min=1, changes=ROUNDING)
    lr: float = setting(6.25e-5, "learning rate of AdamW", above=0, max=10)
    warmup_fraction: float = other_default(WarmupConfig, "warmup_fraction", 0.002)
    schedule: str = other_default(OptimizerConfig, "schedule", "linear")
    final_lr_fraction: float = other_default(OptimizerConfig, "final_lr_fraction", 0.0)
    lm_coef: float = setting(0.5, "weight lambda of the language model's loss on the same text", min=0)
    dropout: float = setting(0.1, "dropout on the classifier's hidden state", min=0, below=1)
    weight_decay: float = other_default(OptimizerConfig, "weight_decay", 0.01)


@dataclass(slots=True)
class RoundConfig:
    """Labelling rounds, if `rounds` is above 1."""

    early_episodes: int | None = setting(None, "episodes in earlier rounds; none: ppo.episodes", min=1, changes=NOTHING)
    later_reward_epochs: int | None = setting(None, "epochs if later rounds continue the model; none: anew", min=1)
    keep_rankings: bool = setting(True, "train the reward model on the rankings of all rounds, not the latest only")


@dataclass(slots=True)
class GoldConfig:
    """A world with a known true score: the built-in one, with its right answers, or sentiment by a lexicon."""

    enabled: bool = setting(False, "use the world's files for data.… settings that are not set")
    truth: str = setting("judge", "judge: right answers; vader: sentiment of continuations", choices=("judge", "vader"))
    documents: int = setting(96_000, "documents of pretraining text", min=1)
    conversations: float = setting(0.0, "share of requests of two to four turns (truth=judge)", min=0, max=1)
    demonstrations: int = setting(3000, "demonstrations", min=1)
    train_prompts: int = setting(4000, "prompts of the training split", min=1)
    dev_prompts: int = setting(256, "prompts for choosing settings", min=1)
    test_prompts: int = setting(512, "prompts for the final figures", min=1)
    passage_min_tokens: int = setting(32, "least tokens of a passage's opening (truth=vader)", min=1)
    passage_max_tokens: int = setting(64, "most tokens of a passage's opening (truth=vader)", min=1)
    continuation_tokens: int = setting(24, "tokens of the text's own continuation of a passage (truth=vader)", min=1)
    comparison_prompts: int = setting(3000, "prompts whose responses are ranked, over all rounds", min=1)
    comparison_dev_prompts: int = setting(100, "ranked dev prompts, for held-out figures of training", min=0)
    comparison_test_prompts: int = setting(300, "ranked test prompts, for held-out accuracy", min=0)
    responses_min: int = setting(4, "fewest responses per prompt, K", min=2, max=100)
    responses_max: int = setting(9, "most responses per prompt", min=2, max=100)
    second_labeler: float = setting(0.25, "fraction of prompts that a second labeler also ranks", min=0, max=1)
    held_out_labelers: int = setting(2, "additional labelers who rank only dev and test prompts: 0 to 2", min=0, max=2)
    labeler_noise: float = setting(1.4, "standard deviation of a judgement; the gold score's range is 10", min=0)
    labeler_agreement: float | None = setting(None, "set the noise by this share of equal verdicts", above=0.5, below=1)
    spare_responses: int = setting(3, "samples per prompt beyond K, to replace duplicates", min=0)
