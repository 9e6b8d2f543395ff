"""The schema of every setting: its type, its default (the papers' value), its unit and its meaning live here only.

YAML under conf/ holds differences. `python -m rlhf <command> --cfg job` prints the composed result. This module imports
nothing heavy, so that checking an override costs milliseconds.
"""

from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Any

from rlhf.recipe import GOLD_STAGES, PARENTS


@dataclass(slots=True)
class ModelConfig:
    """The GPT to pretrain."""

    n_layer: int = 12  # blocks
    n_head: int = 12  # attention heads
    n_kv_head: int | None = None  # fewer than n_head: grouped-query attention
    width: int = 768  # of the residual stream, a multiple of n_head
    mlp_width: int | None = None  # hidden units of the MLP; none: 4 x width (GELU) or 8/3 x width (SwiGLU)
    context_length: int = 1024  # tokens
    positions: str = "learned"  # learned | rotary
    norm: str = "layernorm"  # layernorm | rmsnorm
    mlp: str = "gelu"  # gelu | swiglu
    bias: bool = True  # biases in linear layers and LayerNorm
    tie_word_embeddings: bool = True  # one matrix embeds and unembeds
    dropout: float = 0.0  # share dropped
    initializer_range: float = 0.02  # standard deviation of the random weights


@dataclass(slots=True)
class TokenizerSettings:
    """Byte-level BPE trained on the pretraining text."""

    vocab_size: int = 50257  # entries, special tokens included
    max_characters: int = 200_000_000  # of text that training the BPE reads


@dataclass(slots=True)
class DataConfig:
    """Where the four kinds of data come from: a file, a folder or a hub id, or a list of these."""

    corpus: Any = None  # pretraining text
    demonstrations: Any = None  # what SFT imitates
    comparisons: Any = None  # ranked responses
    prompts: Any = None  # for rollouts; none: those of the demonstrations and comparisons
    format: str = "auto"  # a format's name (`rlhf import --help` lists them), or auto
    allow_partial: bool = False  # train on an import that had too many rejects
    held_out_labelers: Any = None  # a labeler or a list: their rankings train nothing, and accuracy on them is reported
    encoding: str = "utf-8"  # of plain-text corpora
    held_out: float = 0.01  # share of the corpus kept for the held-out loss
    dev: float = 0.05  # share of prompts kept for choosing settings
    test: float = 0.10  # share of prompts kept for the final figures
    split_seed: int = 0  # of the splits, apart from `seed`, so that runs with other seeds keep the same test prompts


@dataclass(slots=True)
class PretrainConfig:
    """Language modelling on packed blocks (Brown et al. 2020, section 2.3 and appendix B)."""

    tokens: int = 300_000_000_000  # trained on in all
    global_batch_tokens: int = 524_288  # tokens an optimizer step
    micro_batch_sequences: int = 16  # sequences a forward on one device
    optimizer: str = "adamw"  # adamw | muon (Muon on matrices, AdamW on the rest)
    lr: float = 6e-4  # AdamW
    muon_lr: float = 0.02  # learning rate of Muon's matrices
    weight_decay: float = 0.1  # on matrices only
    beta1: float = 0.9  # of AdamW
    beta2: float = 0.95  # of AdamW
    warmup_tokens: int = 375_000_000  # tokens of linear warm-up
    final_lr_fraction: float = 0.1  # where the cosine ends, as a share of lr
    max_grad_norm: float = 1.0  # the gradient is scaled down to this norm
    shuffle: bool = True  # blocks in random order; false: in file order
    isolate_documents: bool = False  # documents in one block do not see each other
    eval_sequences: int = 256  # held-out blocks of the held-out loss


@dataclass(slots=True)
class SftConfig:
    """Supervised fine-tuning on demonstrations (Ouyang et al. 2022, appendix C.1)."""

    epochs: int = 16  # passes over the demonstrations
    batch_size: int = 32  # demonstrations an optimizer step
    lr: float = 9.65e-6  # AdamW, cosine without warm-up
    final_lr_fraction: float = 0.1  # where the cosine ends, as a share of lr
    weight_decay: float = 0.0  # on matrices only
    dropout: float = 0.2  # residual
    micro_batch_size: int = 32  # demonstrations a forward on one device
    max_grad_norm: float = 1.0  # the gradient is scaled down to this norm
    pack: bool = False  # several demonstrations a row, none seeing another


@dataclass(slots=True)
class RewardConfig:
    """The reward model (Ouyang et al. 2022, section 3.5 and appendix C.2)."""

    epochs: int = 1  # passes over the comparisons
    batch_prompts: int = 64  # prompts, each with all its responses, an optimizer step
    micro_batch_responses: int = 64  # responses a forward
    lr: float = 9e-6  # AdamW, cosine without warm-up
    final_lr_fraction: float = 0.1  # where the cosine ends, as a share of lr
    weight_decay: float = 0.0  # on matrices only
    max_grad_norm: float = 1.0  # the gradient is scaled down to this norm
    calibration_samples: int = 512  # SFT samples that set the gain
    labeler_weights: Any = None  # {name: what this labeler's judgements count}; who is not named counts 1
    model: str | None = None  # a text classifier with a tokenizer of its own: folder or hub name; none: SFT's trunk


@dataclass(slots=True)
class PpoConfig:
    """PPO with a clipped objective (Ouyang et al. 2022, appendix C.4)."""

    episodes: int = 256_000  # in all
    episodes_per_update: int = 512  # prompts of one rollout, over all devices
    minibatches: int = 8  # optimizer steps an epoch
    epochs: int = 1  # passes over one rollout
    micro_batch_episodes: int = 64  # episodes a forward
    clip_range: float = 0.2  # eps: how far a ratio may leave 1
    value_clip_range: float = 0.2  # eps_v: how far a value may leave the old one
    gamma: float = 1.0  # discount a token
    lam: float = 0.95  # lambda of GAE
    lr: float = 1e-5  # of the policy
    critic_lr: float = 9e-6  # of the value model
    warmup_updates: int = 10  # from a tenth of the learning rate
    critic_warmup_updates: int = 0  # updates at the start that train the critic alone
    value_coef: float | None = None  # weight of the value loss; none: 1, or 0.1 where the trunk is shared
    entropy_coef: float = 0.0  # weight of the bonus on the policy's entropy
    max_grad_norm: float = 1.0  # each model's gradient is scaled down to this norm
    advantages: str = "gae"  # gae | rloo | grpo (the latter two without a critic)
    responses_per_prompt: int = 1  # k; rloo and grpo need 2 or more
    whiten_advantages: bool = True  # mean 0 and variance 1 over the rollout (gae only)
    critic: str = "reward"  # what the critic starts from: reward | sft | random
    shared_critic: bool = False  # a value head on the policy's own trunk
    missing_eos_rule: str = "min"  # of a response without end token: min(score, …) | replace | subtract | none
    missing_eos_score: float = -1.0  # what that rule refers to
    truncation: str = "terminal"  # a response without end token is the end, or goes on: terminal | bootstrap
    calibrated: bool = True  # scores with the reward model's gain and shift; false: as its head gives them
    score_clip: float | None = None  # scores are cut to +- this
    rewards: Any = None  # what pays: reward models (runs or folders) and functions (module:name); none: the run's own
    reward_weights: Any = None  # one number a source; none: 1 each
    reward_combine: str = "sum"  # sum | mean | min | uncertainty (mean less a standard deviation, over an ensemble)
    ptx_coef: float = 0.0  # weight of the pretraining loss (PPO-ptx)
    ptx_blocks_per_episode: float = 8.0  # pretraining blocks an episode
    ema_decay: float | None = None  # the model is an average of the policy's weights, each step back this times less
    samples_every: int = 1  # updates between rows of the samples table
    eval_every: int = 1  # updates between looks at the policy on held-out prompts; 0: never
    eval_prompts: int = 64  # of the dev split, the same ones every time


@dataclass(slots=True)
class KlConfig:
    """The penalty for leaving the SFT model, in nats."""

    coef: float = 0.02  # score that a nat of KL costs; where it adapts, the first value
    target: float | None = None  # nats a sequence; none: a fixed coefficient
    horizon: int = 10_000  # episodes (adaptive only)
    penalty: str = "reward"  # where it acts: on the tokens' rewards, or (as in GRPO) k3 in the loss: reward | loss
    stop: float | None = None  # nats a token (approxkl) at which an update ends early; none: never
    ceiling: float | None = None  # nats a sequence (objective/kl) at which the run ends; none: never


@dataclass(slots=True)
class LoraConfig:
    """Low-rank adapters on the policy and the critic (PEFT); the reference is the policy without them."""

    rank: int = 0  # 0: train all weights
    alpha: int = 16  # the adapters' output is scaled by alpha / rank


@dataclass(slots=True)
class RolloutConfig:
    """How responses are drawn. PPO refuses anything but temperature 1, since it would bias the KL."""

    temperature: float = 1.0  # of sampling
    max_new_tokens: int = 256  # tokens of the longest response
    batch_size: int = 256  # sequences decoded at once


@dataclass(slots=True)
class EvaluateConfig:
    """The final figures."""

    prompts: int = 512  # held-out prompts
    samples: int = 3  # responses a prompt at temperature 1
    best_of: int = 16  # samples of which the reward model picks the best, as a baseline for PPO; 0: none
    seeds: Any = None  # of a study's PPO runs; none: 0, 1 and 2
    parents: Any = None  # runs whose stages a study builds on, one a seed; none: this run for all
    updates: int = 30  # of each run of study=frontier
    cells: Any = None  # of study=details: names of the choices to compare; none: all
    processes: int = 1  # runs of a study at the same time


@dataclass(slots=True)
class RejectionConfig:
    """Rejection sampling: fine-tune the SFT model on the best of n of its own samples."""

    prompts: int = 2000  # of the training split
    samples: int = 16  # n
    epochs: int = 1  # passes over the best ones


@dataclass(slots=True)
class GoldConfig:
    """The embedded world in which the truth is known."""

    enabled: bool = False  # read the world's files where no data.… is given
    documents: int = 96_000  # of pretraining text
    demonstrations: int = 3000  # demonstrations written
    train_prompts: int = 4000  # prompts of the training split
    dev_prompts: int = 256  # prompts for choosing settings
    test_prompts: int = 512  # prompts for the final figures
    comparison_prompts: int = 3000  # prompts whose responses are ranked, in all rounds
    rounds: int = 1  # of labelling: after the first, PPO's model of the round before answers, and all rankings train
    early_episodes: int | None = None  # of PPO in the rounds before the last; none: ppo.episodes, which is the most
    comparison_dev_prompts: int = 100  # of the dev split, for the held-out figures of training
    comparison_test_prompts: int = 300  # of the test split, for the reward model's held-out accuracy
    responses_min: int = 4  # K
    responses_max: int = 9  # largest K
    second_labeler: float = 0.25  # share of prompts that a second labeler ranks too
    held_out_labelers: int = 2  # further labelers, who rank dev and test prompts only: 0 to 2
    labeler_noise: float = 1.4  # standard deviation of a judgement; the gold score's range is 10


@dataclass(slots=True)
class TrackingConfig:
    """Where metrics go. JSONL is always written."""

    kind: str = "wandb"  # wandb (offline unless a key is set) | tensorboard | jsonl | off (numbers only, no samples)
    project: str = "rlhf"  # W&B project
    entity: str | None = None  # W&B user or team of the dashboard; none: the key's own
    artifacts: bool = False  # models and data sets go to W&B as artifacts with their lineage
    log_every: int = 10  # optimizer steps between lines (pretraining and SFT)
    peak_tflops: float | None = None  # of one device, for time/mfu; none: by the GPU's name, and no MFU on a CPU


@dataclass(slots=True)
class ReportConfig:
    """`rlhf report`. run=a,b,c draws several runs over each other."""

    out: str | None = None  # the page; none: report.html in the run's folder, report-<runs>.html beside several
    figures: str | None = None  # a folder for every figure as a file of its own; none: only the page
    form: str = "svg"  # of these files: svg | png


@dataclass(slots=True)
class WatchConfig:
    """`rlhf watch`: follows a run from another terminal."""

    every_seconds: float = 1.0  # between two looks at the run's files
    wait: bool = True  # for the run's end; false: say where it stands and leave


@dataclass(slots=True)
class CheckpointConfig:
    """What a killed run resumes from."""

    every_seconds: float = 600.0  # time between checkpoints
    keep: int = 2  # newest checkpoints that stay
    keep_best: int = 0  # checkpoints with the best held-out score (ppo) that stay too, after the stage's end as well
    keep_every: int = 0  # a checkpoint at each multiple of so many steps, which stays after the stage's end; 0: none


@dataclass(slots=True)
class LauncherConfig:
    """How `rlhf pipeline` starts the stages that train."""

    processes: int = 1  # of each of them, on this machine


@dataclass(slots=True)
class ShardingConfig:
    """What ZeRO is told beside its stage (`deepspeed=…`)."""

    bucket_elements: int = 50_000_000  # of each communication buffer
    persistence_threshold: int = 10_000  # ZeRO-3: tensors with fewer elements stay whole on every rank


if TYPE_CHECKING:
    ParentsConfig = Any
else:
    ParentsConfig = make_dataclass(
        "ParentsConfig",
        [
            (stage, str | None, field(default=None, metadata={"help": f"a run or a stage folder{gold}"}))
            for stage in PARENTS
            for gold in [" (the gold world only)" if stage in GOLD_STAGES else ""]
        ],
        namespace={
            "__doc__": "Where a stage finds what it builds on: a run's name or a path; none: the same run.",
            "__module__": __name__,
        },
        slots=True,
    )


@dataclass(slots=True)
class SampleConfig:
    """`rlhf sample`: the next labelling round."""

    stage: str = "sft"  # whose model answers: pretrain | sft | ppo
    split: str = "train"  # whose prompts: train | dev | test
    prompts: int = 100  # prompts to sample for
    responses: int = 4  # K
    temperature: float = 1.0  # of sampling
    tool: str = "native"  # native | label_studio | csv
    interface: str = "ranker"  # of Label Studio and CSV: pairwise | ranker
    out: str | None = None  # a folder; none: runs/<run>/sample


@dataclass(slots=True)
class ChatConfig:
    """`rlhf chat`."""

    stage: str = "ppo"  # whose model answers: pretrain | sft | ppo
    greedy: bool = False  # take the likeliest token instead of sampling
    message: str | None = None  # answer this one message and leave


@dataclass(slots=True)
class ExportConfig:
    """`rlhf export`."""

    stage: str = "ppo"  # whose model: pretrain | sft | ppo
    form: str = "auto"  # auto | gpt2 | llama | rlhf
    out: str | None = None  # none: runs/<run>/export


@dataclass(slots=True)
class Config:
    """Everything. One schema serves every command, so that one set of overrides runs a stage or the pipeline."""

    run: str = "default"  # the run's name, a folder under runs_dir
    runs_dir: str = "runs"  # the folder of all runs
    seed: int = 0  # of every random choice
    overwrite: bool = False  # replace what the run already has
    device: str = "auto"  # auto | cpu | cuda
    threads: int = 0  # CPU threads a process; 0: as many as there are cores
    precision: str = "auto"  # of training: float32 | bfloat16 (mixed) | auto (bfloat16 where a GPU has it)
    gradient_checkpointing: bool = False  # recompute activations: less memory, more time
    deepspeed: str = "none"  # none | zero1 | zero2 | zero3 | zero2_offload | zero3_offload
    study: str | None = None  # what `rlhf evaluate` runs instead of the final figures: frontier | details
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    data: DataConfig = field(default_factory=DataConfig)
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    ppo: PpoConfig = field(default_factory=PpoConfig)
    kl: KlConfig = field(default_factory=KlConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rejection: RejectionConfig = field(default_factory=RejectionConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    gold: GoldConfig = field(default_factory=GoldConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    parents: ParentsConfig = field(default_factory=ParentsConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    export: ExportConfig = field(default_factory=ExportConfig)


@dataclass(slots=True)
class ColumnsConfig:
    """`format=table`: which columns hold what; nested ones by dotted path."""

    prompt: Any = None  # the request; several columns are joined by a blank line
    system: str | None = None  # a system turn before it
    id: str | None = None  # the record's id
    user: str | None = None  # who asked
    response: str | None = None  # a demonstration, or the one response that is rated
    rating: str | None = None  # of the one response: a number from 1 to 7, or a verdict such as true or bad
    responses: Any = None  # two or more columns, compared by winner or scores
    winner: Any = None  # a column, or one a labeler
    ranked: Any = None  # columns with responses, best first
    scores: Any = None  # columns with the scores of responses, or one with the list of them
    labeler: str | None = None  # who judged
    created: str | None = None  # when


@dataclass(slots=True)
class WordsConfig:
    """`format=table`: the words of the winner column, each one or a list; none: the usual vocabularies."""

    first: Any = None  # the first response is better
    second: Any = None  # the second one
    tie: Any = None  # neither


@dataclass(slots=True)
class ImportConfig:
    """`rlhf import`: foreign files as records in Arrow, with every row accounted for."""

    path: Any = None  # a file, a folder, a hub id, or a list of these
    format: str = "auto"  # a format's name, or auto
    out: str | None = None  # the folder to write
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    words: WordsConfig = field(default_factory=WordsConfig)
    sheet: str | None = None  # of a spreadsheet; none: the first one
    encoding: str = "utf-8"  # of CSV and TSV files
    max_rejects: int = 0  # more than these, and the result needs data.allow_partial=true
    duplicates: str = "drop"  # drop | keep
    max_prompts_per_user: int = 200  # further ones are filtered
    prefix_characters: int = 200  # prompts that begin alike for so long stay in one split (letters and digits: 3/4)
    filter_prefixes: bool = True  # of such prompt records, keep only the first
    pii: str = "flag"  # e-mail addresses, phone and card numbers in prompts: flag | drop | keep
    dev: float = 0.05  # share of prompts kept for choosing settings
    test: float = 0.10  # share of prompts kept for the final figures
    seed: int = 0  # of the splits
    earlier: Any = None  # folders of earlier imports whose prompts keep their splits
    processes: int = 1  # that parse
    overwrite: bool = False  # replace what out holds; its prompts keep their splits


@dataclass(slots=True)
class PlanConfig(Config):
    """`rlhf plan`: the settings of training, and the machine they are planned for."""

    gpus: int = 1  # in all
    gpu_memory_gb: float = 80.0  # of one, in 10^9 bytes
    dtype: str = "bf16"  # bf16 (mixed precision) | fp32
    fused_attention: bool = True  # false: the attention probabilities are kept
    sequence: int | None = None  # tokens of the longest row of SFT, reward model and PPO; none: model.context_length
    memory_margin: float = 0.1  # share of a GPU's memory kept free
    mfu: float = 0.4  # share of the peak that training reaches
    peak_tflops: float | None = None  # of one GPU, dense; none: an A100's, 312 (bf16) or 19.5 (fp32)
    bandwidth_gb: float = 2039.0  # a second from one GPU's memory; an A100's with 80 GB
    out: str | None = None  # a file or folder for plan.json
