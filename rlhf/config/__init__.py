"""The schema of every setting: its type, default (the papers' value), unit, meaning, range, and what it changes.

All of this is stated once, on the field (setting.py); YAML under conf/ holds differences. This package imports nothing
heavy.
"""

from dataclasses import dataclass, make_dataclass
from typing import Any

from rlhf.config import commands, stages
from rlhf.config.model import ModelConfig, TokenizerSettings
from rlhf.config.setting import MAX_PROCESSES, MAX_SEED, NOTHING, ROUNDING, group, setting
from rlhf.recipe import GOLD_STAGES, PARENTS, STAGES

# Name: ZeRO stage, and whether states are in the host's memory.
DEEPSPEED = {
    "none": (0, False), "zero1": (1, False), "zero2": (2, False), "zero3": (3, False), "zero2_offload": (2, True),
    "zero3_offload": (3, True),
}  # fmt: skip


@dataclass(slots=True)
class TrackingConfig:
    kind: str = setting("wandb", "wandb: offline without a key; off: no samples", choices=("wandb", "jsonl", "off"))
    project: str | None = setting(None, "W&B project; none: the variable WANDB_PROJECT, or rlhf")
    entity: str | None = setting(None, "W&B user or team; none: the key's own")
    name: str | None = setting(None, "name of the W&B runs, before the stage's; none: the run's name")
    group: str | None = setting(None, "W&B group of the stages; none: the run's name")
    tags: Any = setting(None, "W&B tags", kind="names")
    log_every: int | None = setting(None, "optimizer steps between lines; none: 10, fewer in a short run", min=1)
    peak_tflops: float | None = setting(None, "peak TFLOP/s of a device, for time/mfu; none: by its name", above=0)


@dataclass(slots=True)
class CheckpointConfig:
    every_seconds: float = setting(600.0, "seconds between them, more if writing is slow; 0: after each step", min=0)
    keep: int = setting(2, "newest checkpoints to keep", min=1)
    keep_best: int = setting(0, "best checkpoints to keep for good, by held-out score - kl.coef * KL (ppo)", min=0)
    keep_every: int = setting(0, "keep the checkpoint of each multiple of this step for good; 0: none", min=0)


@dataclass(slots=True)
class LauncherConfig:
    processes: int = setting(1, "processes per stage, on this machine", min=1, max=MAX_PROCESSES)


@dataclass(slots=True)
class ShardingConfig:
    bucket_elements: int = setting(50_000_000, "elements of each communication buffer", min=1)
    persistence_threshold: int = setting(10_000, "ZeRO-3: tensors with fewer elements stay whole on every rank", min=0)
    overlap: bool | None = setting(None, "ZeRO-2, 3: sum gradients during backward; none: on a GPU", changes=ROUNDING)
    file: str | None = setting(None, "your own DeepSpeed JSON, whose settings are added to ours")


@dataclass(slots=True)
class MemoryConfig:
    """How much memory training may take. Batches are divided to fit; no loss depends on it."""

    budget_gb: float | None = setting(None, "GB (10^9 bytes) for each process; none: 80% of what is free", above=0)


# Where the parents of a stage are: a run's name or a path; none: the same run.
_GOLD = dict.fromkeys(GOLD_STAGES, " (the gold world only)")
_PLACES = [(stage, str | None, setting(None, f"a run or a stage folder{_GOLD.get(stage, '')}")) for stage in PARENTS]
ParentsConfig: Any = make_dataclass("ParentsConfig", _PLACES, namespace={"__module__": __name__}, slots=True)


@dataclass(slots=True)
class Config:
    """Everything. One schema serves every command, so that one set of overrides runs a stage or the pipeline."""

    run: str = setting("default", "the run's name, a folder under runs_dir", changes=NOTHING)
    runs_dir: str = setting("runs", "the folder of all runs", changes=NOTHING)
    seed: int = setting(0, "seed of all random choices", min=0, max=MAX_SEED)
    overwrite: bool = setting(False, "replace what the run already has", changes=NOTHING)
    plugins: Any = setting(None, "functions called first, to register architectures", kind="functions", changes=NOTHING)
    device: str = setting("auto", "device", choices=("auto", "cpu", "cuda", "mps"), changes=ROUNDING)
    threads: int = setting(0, "CPU threads per process; 0: free cores", min=0, max=MAX_PROCESSES, changes=ROUNDING)
    precision: str = setting("auto", "bfloat16: mixed; auto: if the GPU can", choices=("auto", "float32", "bfloat16"))
    gradient_checkpointing: bool = setting(False, "recompute activations: less memory, more time", changes=ROUNDING)
    deepspeed: str = setting("none", "ZeRO stage", choices=tuple(DEEPSPEED), changes=ROUNDING)
    launcher: LauncherConfig = group(LauncherConfig, changes=ROUNDING)
    sharding: ShardingConfig = group(ShardingConfig, changes=ROUNDING)
    memory: MemoryConfig = group(MemoryConfig, changes=ROUNDING)
    model: ModelConfig = group(ModelConfig)
    tokenizer: TokenizerSettings = group(TokenizerSettings)
    data: stages.DataConfig = group(stages.DataConfig)
    pretrain: stages.PretrainConfig = group(stages.PretrainConfig)
    sft: stages.SftConfig = group(stages.SftConfig)
    reward: stages.RewardConfig = group(stages.RewardConfig)
    judge: stages.JudgeConfig = group(stages.JudgeConfig)
    ppo: stages.PpoConfig = group(stages.PpoConfig)
    kl: stages.KlConfig = group(stages.KlConfig)
    lora: stages.LoraConfig = group(stages.LoraConfig)
    rollout: stages.RolloutConfig = group(stages.RolloutConfig)
    rejection: stages.RejectionConfig = group(stages.RejectionConfig)
    rate: stages.RateConfig = group(stages.RateConfig)
    dpo: stages.DpoConfig = group(stages.DpoConfig)
    distill: stages.DistillConfig = group(stages.DistillConfig)
    classify: stages.ClassifyConfig = group(stages.ClassifyConfig)
    evaluate: stages.EvaluateConfig = group(stages.EvaluateConfig, changes=NOTHING)
    round: stages.RoundConfig = group(stages.RoundConfig)
    gold: stages.GoldConfig = group(stages.GoldConfig)
    tracking: TrackingConfig = group(TrackingConfig, changes=NOTHING)
    checkpoints: CheckpointConfig = group(CheckpointConfig, changes=NOTHING)
    parents: ParentsConfig = group(ParentsConfig, changes=NOTHING)
    sample: commands.SampleConfig = group(commands.SampleConfig, changes=NOTHING)
    generate: commands.GenerateConfig = group(commands.GenerateConfig, changes=NOTHING)
    report: commands.ReportConfig = group(commands.ReportConfig, changes=NOTHING)
    watch: commands.WatchConfig = group(commands.WatchConfig, changes=NOTHING)
    chat: commands.ChatConfig = group(commands.ChatConfig, changes=NOTHING)
    export: commands.ExportConfig = group(commands.ExportConfig, changes=NOTHING)
    clean: commands.CleanConfig = group(commands.CleanConfig, changes=NOTHING)
    serve: commands.ServeConfig = group(commands.ServeConfig, changes=NOTHING)
    rounds: int = setting(1, "labelling rounds; from the second on the previous PPO model's answers are ranked", min=1)
    # last, since it hides the module of that name from the fields after it
    stages: Any = setting(None, "last stages of the pipeline; none: what the data allow", kind="names", changes=NOTHING)

    @property
    def kl_in_loss(self) -> bool:
        """Whether the KL is a part of the loss rather than of the rewards."""
        return self.kl.penalty == "loss" or (self.kl.penalty == "auto" and self.ppo.advantages == "grpo")

    def processes_of(self, command: str) -> int:
        """How many processes run a command: launcher.processes if it can, and does not also run evaluations that cannot."""
        several = command in STAGES and STAGES[command].several_processes
        return self.launcher.processes if several and not (command == "evaluate" and self.evaluate.turned_on) else 1


@dataclass(slots=True)
class PlanConfig(Config):
    gpus: int = setting(1, "total GPUs", min=1)
    gpu_memory_gb: float = setting(80.0, "memory of one GPU, in 10^9 bytes", above=0)
    dtype: str = setting("bf16", "bf16: mixed precision", choices=("bf16", "fp32"))
    memory_margin: float = setting(0.1, "fraction of a GPU's memory kept free", min=0, below=1)
    mfu: float = setting(0.4, "fraction of the peak rate that training reaches", above=0, max=1)
    peak_tflops: float | None = setting(None, "peak TFLOP/s of a GPU; none: an A100's, 312 or 19.5 (fp32)", above=0)
    bandwidth_gb: float = setting(2039.0, "GB per second of one GPU's memory; default: an A100's with 80 GB", above=0)
    served_tokens: float | None = setting(None, "tokens in use, with which the cheapest size is printed", above=0)
    gpu_watts: float | None = setting(None, "power of one GPU with its share of the rest, for energy", above=0)
    gpu_price: float | None = setting(None, "price of one GPU for an hour, without energy", above=0)
    energy_price: float | None = setting(None, "price of a kilowatt-hour; needs gpu_watts", above=0)
    out: str | None = setting(None, "file or folder for plan.json")


# Commands that have a schema of their own; all others share `Config`.
SCHEMAS: dict[str, Any] = {"import": commands.ImportConfig, "corpus": commands.CorpusConfig, "plan": PlanConfig}
