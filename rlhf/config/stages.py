"""Settings of the stages: what the recipe computes. The defaults are the papers' values."""

from dataclasses import dataclass
from typing import Any

from rlhf.config.setting import MAX_PROCESSES, MAX_SEED, NOTHING, ROUNDING, setting


@dataclass(slots=True)
class ModelConfig:
    """The GPT to pretrain."""

    n_layer: int = setting(12, "blocks", min=1)
    n_head: int = setting(12, "attention heads", min=1)
    n_kv_head: int | None = setting(None, "fewer than n_head: grouped-query attention", min=1)
    width: int = setting(768, "of the residual stream, a multiple of n_head", min=1)
    mlp_width: int | None = setting(
        None, "hidden units of the MLP; none: 4 x width (GELU) or 8/3 x width (SwiGLU)", min=1
    )
    context_length: int = setting(1024, "tokens", min=1)
    positions: str = setting("learned", "how positions enter", choices=("learned", "rotary"))
    norm: str = setting("layernorm", "of each block", choices=("layernorm", "rmsnorm"))
    mlp: str = setting("gelu", "activation", choices=("gelu", "swiglu"))
    bias: bool = setting(True, "biases in linear layers and LayerNorm")
    tie_word_embeddings: bool = setting(True, "one matrix embeds and unembeds")
    dropout: float = setting(0.0, "share dropped", min=0, below=1)
    initializer_range: float = setting(0.02, "standard deviation of the random weights", above=0, max=10)


@dataclass(slots=True)
class TokenizerSettings:
    """Byte-level BPE trained on the pretraining text."""

    vocab_size: int = setting(50257, "entries, special tokens included", min=1)
    max_characters: int = setting(200_000_000, "of text that training the BPE reads", min=1)


@dataclass(slots=True)
class DataConfig:
    """Where the four kinds of data come from: a file, a folder or a hub id, or a list of these."""

    corpus: Any = setting(None, "pretraining text", kind="paths")
    demonstrations: Any = setting(None, "what SFT imitates", kind="paths")
    comparisons: Any = setting(None, "ranked responses", kind="paths")
    prompts: Any = setting(None, "for rollouts; none: those of the demonstrations and comparisons", kind="paths")
    format: str = setting("auto", "a format's name (`rlhf import --help` lists them), or auto")
    allow_partial: bool = setting(False, "train on an import that had too many rejects")
    held_out_labelers: Any = setting(
        None, "a labeler or a list: their rankings train nothing, and accuracy on them is reported", kind="labelers"
    )
    encoding: str = setting("utf-8", "of plain-text corpora", kind="encoding")
    held_out: float = setting(0.01, "share of the corpus kept for the held-out loss", above=0, below=1)
    dev: float = setting(0.05, "share of prompts kept for choosing settings", min=0, max=1)
    test: float = setting(0.10, "share of prompts kept for the final figures", min=0, max=1)
    split_seed: int = setting(
        0,
        "of the splits, apart from `seed`, so that runs with other seeds keep the same test prompts",
        min=0,
        max=MAX_SEED,
    )


@dataclass(slots=True)
class PretrainConfig:
    """Language modelling on packed blocks (Brown et al. 2020, section 2.3 and appendix B)."""

    tokens: int = setting(300_000_000_000, "trained on in all", min=1)
    global_batch_tokens: int = setting(524_288, "tokens per optimizer step", min=1)
    micro_batch_sequences: int = setting(16, "sequences per forward on one device", min=1, changes=ROUNDING)
    optimizer: str = setting("adamw", "muon: Muon on matrices, AdamW on the rest", choices=("adamw", "muon"))
    lr: float = setting(6e-4, "AdamW", above=0, max=10)
    muon_lr: float = setting(0.02, "learning rate of Muon's matrices", above=0, max=10)
    weight_decay: float = setting(0.1, "on matrices only", min=0, max=10)
    beta1: float = setting(0.9, "of AdamW", min=0, below=1)
    beta2: float = setting(0.95, "of AdamW", min=0, below=1)
    warmup_tokens: int = setting(375_000_000, "tokens of linear warm-up", min=0)
    final_lr_fraction: float = setting(0.1, "where the cosine ends, as a share of lr", min=0, max=1)
    max_grad_norm: float = setting(1.0, "the gradient is scaled down to this norm", above=0)
    shuffle: bool = setting(True, "blocks in random order; false: in file order")
    isolate_documents: bool = setting(False, "documents in one block do not see each other")
    eval_sequences: int = setting(256, "held-out blocks of the held-out loss", min=1)


@dataclass(slots=True)
class SftConfig:
    """Supervised fine-tuning on demonstrations (Ouyang et al. 2022, appendix C.1)."""

    epochs: int = setting(16, "passes over the demonstrations", min=1)
    batch_size: int = setting(32, "demonstrations per optimizer step", min=1)
    lr: float = setting(9.65e-6, "AdamW, cosine without warm-up", above=0, max=10)
    final_lr_fraction: float = setting(0.1, "where the cosine ends, as a share of lr", min=0, max=1)
    weight_decay: float = setting(0.0, "on matrices only", min=0, max=10)
    dropout: float = setting(0.2, "residual", min=0, below=1)
    micro_batch_size: int = setting(32, "demonstrations per forward on one device", min=1, changes=ROUNDING)
    max_grad_norm: float = setting(1.0, "the gradient is scaled down to this norm", above=0)
    pack: bool = setting(False, "several demonstrations a row, none seeing another")


@dataclass(slots=True)
class RewardConfig:
    """The reward model (Ouyang et al. 2022, section 3.5 and appendix C.2)."""

    epochs: int = setting(1, "passes over the comparisons", min=1)
    batch_prompts: int = setting(64, "prompts, each with all its responses, per optimizer step", min=1)
    micro_batch_responses: int = setting(64, "responses per forward", min=1, changes=ROUNDING)
    lr: float = setting(9e-6, "AdamW, cosine without warm-up", above=0, max=10)
    final_lr_fraction: float = setting(0.1, "where the cosine ends, as a share of lr", min=0, max=1)
    weight_decay: float = setting(0.0, "on matrices only", min=0, max=10)
    max_grad_norm: float = setting(1.0, "the gradient is scaled down to this norm", above=0)
    calibration_samples: int = setting(512, "SFT samples that set the gain", min=2)
    labeler_weights: Any = setting(
        None, "{name: weight of this labeler's judgements}; 1 for who is not named", kind="weights"
    )
    model: str | None = setting(None, "a text classifier with its own tokenizer: folder or hub name; none: SFT's trunk")


@dataclass(slots=True)
class PpoConfig:
    """PPO with a clipped objective (Ouyang et al. 2022, appendix C.4)."""

    episodes: int = setting(256_000, "in all", min=1)
    episodes_per_update: int = setting(512, "prompts of one rollout, over all devices", min=1)
    minibatches: int = setting(8, "optimizer steps per epoch", min=1)
    epochs: int = setting(1, "passes over one rollout", min=1)
    micro_batch_episodes: int = setting(64, "episodes per forward", min=1, changes=ROUNDING)
    clip_range: float = setting(0.2, "eps: how far a ratio may leave 1", above=0)
    value_clip_range: float = setting(0.2, "eps_v: how far a value may leave the old one", above=0)
    gamma: float = setting(1.0, "discount per token", min=0, max=1)
    lam: float = setting(0.95, "lambda of GAE", min=0, max=1)
    lr: float = setting(1e-5, "of the policy", above=0, max=10)
    critic_lr: float = setting(9e-6, "of the value model", above=0, max=10)
    warmup_updates: int = setting(10, "from a tenth of the learning rate", min=0)
    critic_warmup_updates: int = setting(0, "updates at the start that train the critic alone", min=0)
    value_coef: float | None = setting(
        None, "weight of the value loss; none: 1, or 0.1 where the trunk is shared", above=0
    )
    entropy_coef: float = setting(0.0, "weight of the bonus on the policy's entropy", min=0)
    max_grad_norm: float = setting(1.0, "each model's gradient is scaled down to this norm", above=0)
    advantages: str = setting("gae", "estimator; rloo and grpo have no critic", choices=("gae", "rloo", "grpo"))
    responses_per_prompt: int = setting(1, "k; rloo and grpo need 2 or more", min=1)
    whiten_advantages: bool = setting(True, "mean 0 and variance 1 over the rollout (gae only)")
    critic: str = setting("reward", "what the critic starts from", choices=("reward", "sft", "random"))
    shared_critic: bool = setting(False, "a value head on the policy's own trunk")
    missing_eos_rule: str = setting(
        "min",
        "score of a response without end token; min: at most missing_eos_score",
        choices=("min", "replace", "none"),
    )
    missing_eos_score: float = setting(-1.0, "what that rule refers to", any_finite=True)
    truncation: str = setting(
        "terminal", "a response without end token is the end, or goes on", choices=("terminal", "bootstrap")
    )
    calibrated: bool = setting(True, "scores with the reward model's gain and shift; false: as its head gives them")
    score_clip: float | None = setting(None, "scores are cut to +- this", above=0)
    rewards: Any = setting(
        None, "reward models (runs or folders) and functions (module:name); none: the run's own", kind="rewards"
    )
    reward_weights: Any = setting(None, "one number per source; none: 1 each", kind="numbers")
    ptx_coef: float = setting(0.0, "weight of the pretraining loss (PPO-ptx)", min=0)
    ptx_blocks_per_episode: float = setting(8.0, "pretraining blocks per episode", above=0)
    ema_decay: float | None = setting(
        None, "the model is an average of the policy's weights, each step back this times less", above=0, below=1
    )
    samples_every: int = setting(1, "updates between rows of the samples table", min=1, changes=NOTHING)
    eval_every: int = setting(
        1, "updates between looks at the policy on held-out prompts; 0: never", min=0, changes=NOTHING
    )
    eval_prompts: int = setting(64, "of the dev split, the same ones every time", min=0, changes=NOTHING)


@dataclass(slots=True)
class KlConfig:
    """The penalty for leaving the SFT model, in nats."""

    coef: float = setting(0.02, "score per nat of KL; the first value if it adapts", min=0)
    target: float | None = setting(None, "nats per sequence; none: a fixed coefficient", above=0)
    horizon: int = setting(10_000, "episodes (adaptive only)", min=1)
    penalty: str = setting(
        "reward", "where it acts: on the tokens' rewards, or (as in GRPO) k3 in the loss", choices=("reward", "loss")
    )
    ceiling: float | None = setting(
        None, "nats per sequence (objective/kl) at which the run ends; none: never", above=0
    )


@dataclass(slots=True)
class LoraConfig:
    """Low-rank adapters on the policy and the critic (PEFT); the reference is the policy without them."""

    rank: int = setting(0, "0: train all weights", min=0)
    alpha: int = setting(16, "the adapters' output is scaled by alpha / rank", min=1)


@dataclass(slots=True)
class RolloutConfig:
    """How responses are drawn. PPO refuses anything but temperature 1, since it would bias the KL."""

    temperature: float = setting(1.0, "of sampling", above=0)
    max_new_tokens: int = setting(256, "tokens of the longest response", min=1)
    batch_size: int = setting(256, "sequences decoded at once", min=1)


@dataclass(slots=True)
class EvaluateConfig:
    """The final figures."""

    prompts: int = setting(512, "held-out prompts", min=1)
    samples: int = setting(3, "responses per prompt at temperature 1", min=1)
    best_of: int = setting(
        16, "samples of which the reward model picks the best, as a baseline for PPO; 0: none", min=0
    )
    seeds: Any = setting(None, "of a study's PPO runs; none: 0, 1 and 2", kind="seeds", changes=NOTHING)
    parents: Any = setting(
        None, "runs whose stages a study builds on, one per seed; none: this run for all", kind="names", changes=NOTHING
    )
    updates: int = setting(30, "of each run of study=frontier", min=1, changes=NOTHING)
    cells: Any = setting(
        None, "of study=details: names of the choices to compare; none: all", kind="names", changes=NOTHING
    )
    processes: int = setting(1, "runs of a study at the same time", min=1, max=MAX_PROCESSES, changes=NOTHING)


@dataclass(slots=True)
class RejectionConfig:
    """Rejection sampling: fine-tune the SFT model on the best of n of its own samples."""

    prompts: int = setting(2000, "of the training split", min=1)
    samples: int = setting(16, "n", min=1)
    epochs: int = setting(1, "passes over the best ones", min=1)


@dataclass(slots=True)
class GoldConfig:
    """The embedded world in which the truth is known."""

    enabled: bool = setting(False, "read the world's files where no data.… is given")
    documents: int = setting(96_000, "of pretraining text", min=1)
    demonstrations: int = setting(3000, "demonstrations written", min=1)
    train_prompts: int = setting(4000, "prompts of the training split", min=1)
    dev_prompts: int = setting(256, "prompts for choosing settings", min=1)
    test_prompts: int = setting(512, "prompts for the final figures", min=1)
    comparison_prompts: int = setting(3000, "prompts whose responses are ranked, in all rounds", min=1)
    rounds: int = setting(
        1, "of labelling: after the first, PPO's model of the round before answers, and all rankings train", min=1
    )
    early_episodes: int | None = setting(
        None, "of PPO in the rounds before the last; none: ppo.episodes, which is the most", min=1, changes=NOTHING
    )
    comparison_dev_prompts: int = setting(100, "of the dev split, for the held-out figures of training", min=0)
    comparison_test_prompts: int = setting(300, "of the test split, for the reward model's held-out accuracy", min=0)
    responses_min: int = setting(4, "K", min=2, max=100)
    responses_max: int = setting(9, "largest K", min=2, max=100)
    second_labeler: float = setting(0.25, "share of prompts that a second labeler ranks too", min=0, max=1)
    held_out_labelers: int = setting(2, "further labelers, who rank dev and test prompts only: 0 to 2", min=0, max=2)
    labeler_noise: float = setting(1.4, "standard deviation of a judgement; the gold score's range is 10", min=0)
