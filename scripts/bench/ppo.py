"""A PPO update, from prompts to the last optimizer step, against TRL 1.12.0's PPOTrainer: seconds, tokens per second, memory.

    python scripts/bench/ppo.py --out /tmp/ppo.json            # needs scripts/bench/setup.sh
    python scripts/bench/ppo.py --scaling                      # ours alone, from 8 to 512 episodes

Equal work: the same policy, reference, reward model and critic (GPT-2 of one size and seed, critic from the reward model),
the same number of prompts of one length, new tokens, epochs and minibatches, float32. Each takes the micro-batch that is
fastest for it here: `micro` and `peer_micro`. With --checkpoint FOLDER all models are
that one, and our PPO on transformers' class of it (as with model.native=false) is a contestant too. A turn is a whole
update; units are response tokens. With --lora our contestants train adapters of rank 16, which needs a third of the memory.
"""

import contextlib
import os
import random
import sys
import tempfile
from functools import partial
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import harness
from harness import Spec, Turns

# Sizes of the policy, and of the reward model and critic; episodes, prompt and new tokens, epochs; our micro-batch, the peer's.
FIELDS = "size reward episodes prompt new epochs micro peer_micro"
CASES = {"tiny": ("tiny", "tiny", 64, 32, 48, 4, 32, 64)}
QUICK = {
    "quick": ("quick", "quick", 8, 16, 12, 2, 8, 8),
    "quick, deepspeed-chat": ("quick", "shallow", 8, 16, 12, 1, 8, 8),
}
CUDA_CASES = {
    "gpt2": ("gpt2", "gpt2", 512, 64, 256, 4, 64, 64),
    "1.3b": ("1.3b", "1.3b", 128, 64, 256, 4, 16, 16),
    "deepspeed-chat": ("1.3b", "350m", 1024, 256, 256, 1, 32, 32),  # its step 3: prompts and answers of 256, one epoch
}
SCALING = (8, 32, 128, 512)
CALIBRATION = (1.0, 0.0)  # gain and shift of the scores: as the head gives them


def make_tokenizer(folder: Path, size: str) -> None:
    """A tokenizer with exactly the model's vocabulary."""
    from rlhf.data.tokenizer import train_tokenizer

    shape = harness.SIZES[size]
    random_, wanted = random.Random(0), max(300, shape["vocab_size"])
    count = max(8000, wanted)  # words that are enough for so many merges
    words = ["".join(random_.choices(ascii_lowercase, k=random_.randint(2, 9))) for _ in range(count)]
    tokenizer = train_tokenizer([" ".join(words)], wanted, context_length=shape["n_positions"])
    if len(tokenizer) != wanted:
        raise SystemExit(f"the tokenizer has {len(tokenizer)} entries, wanted {wanted}")
    tokenizer.save_pretrained(str(folder))


def make_prompts(spec: Spec) -> list[list[int]]:
    random_, count = random.Random(0), 4 * spec["episodes"]
    return [[random_.randrange(8, spec["vocabulary"]) for _ in range(spec["prompt"])] for _ in range(count)]


def gpt2(spec: Spec, seed: int, part: str = "size") -> Any:
    """The policy, or with part="reward" the trunk of the reward model."""
    if spec[part] not in harness.SIZES:
        return harness.gpt2(spec[part])
    shape = harness.SIZES[spec[part]] | {"vocab_size": spec["vocabulary"]}
    harness.SIZES["benchmark"] = shape
    return harness.gpt2("benchmark", seed)


# ------------------------------------------------------------------------------------------------------------ ours


def write_parents(config: Any, spec: Spec, native: bool) -> None:
    """The stages that PPO builds on, as if they had been trained."""
    from rlhf.data.tokenizer import load_tokenizer
    from rlhf.model.heads import RewardModel
    from rlhf.runs.stage import open_stage

    tokenizer = load_tokenizer(spec["tokenizer"])
    convert = harness.ours_like if native else lambda model: model
    policy = convert(gpt2(spec, seed=0))
    for name in ("tokenizer", "pretrain", "sft", "reward"):
        with open_stage(config, name) as stage:
            tokenizer.save_pretrained(str(stage.model))
            if name == "pretrain":
                policy.save_pretrained(str(stage.model))
            elif name == "sft":
                for path in (Path(config.runs_dir) / "bench" / "pretrain" / "model").iterdir():
                    if not (stage.model / path.name).exists():
                        os.link(path, stage.model / path.name)
            elif name == "reward":
                model: Any = RewardModel.from_causal_lm(convert(gpt2(spec, seed=1, part="reward")))
                model.calibrate(*CALIBRATION)
                model.save_pretrained(str(stage.model))
            stage.finish()


def ours(spec: Spec, turns: Turns, native: bool = True) -> None:
    from rlhf.config.compose import compose_config
    from rlhf.data.records import PromptRecord
    from rlhf.ppo.experience import Prompts
    from rlhf.runs.stage import open_stage
    from rlhf.stages import ppo

    with tempfile.TemporaryDirectory() as home:
        prompts = Path(home) / "prompts.jsonl"
        prompts.write_text('{"kind": "prompt", "id": "a", "prompt": "a"}\n', encoding="utf-8")
        settings = f"""
            runs_dir={home} run=bench tracking=off device={spec["device"]} threads={spec["threads"]}
            precision={spec.get("precision", "auto")} data.prompts={prompts} data.dev=0 data.test=0
            model.context_length={spec["shape"]["n_positions"]} rollout.max_new_tokens={spec["new"]}
            ppo.episodes_per_update={spec["episodes"]} ppo.episodes={spec["episodes"] * 1000} ppo.minibatches=1
            ppo.epochs={spec["epochs"]} ppo.micro_batch_episodes={spec["micro"]} ppo.eval_every=0 ppo.warmup_fraction=0
            lora.rank={16 * spec.get("lora", 0)} lora.alpha=32
        """
        config = compose_config([*settings.split(), *spec.get("more", ())])
        write_parents(config, spec, native)
        with open_stage(config, "ppo") as stage:
            parts = ppo.load_parts(config, stage)
            given = [
                (PromptRecord.model_validate({"id": str(i), "prompt": "any"}), tokens)
                for i, tokens in enumerate(make_prompts(spec))
            ]
            parts.prompts = Prompts(given, [], parts.prompts.tokenizer)
            for update, _ in enumerate(turns, 1):
                metrics = ppo.one_update(update=update, **vars(parts))
                keys = {"generation": "time/rollout_s", "scoring": "time/score_s", "training": "time/update_s"}
                keys |= {"kl": "objective/kl", "entropy": "policy/entropy_avg"}
                length, figures = metrics["rollout/response_len"], {name: metrics[key] for name, key in keys.items()}
                processed = (length + spec["prompt"]) * spec["episodes"]
                turns.done(units=length * spec["episodes"], processed=processed, **figures)


# -------------------------------------------------------------------------------------------------------------- TRL


def peer(spec: Spec, turns: Turns) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
    from transformers import GPT2ForSequenceClassification as Classifier
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(spec["tokenizer"], padding_side="left", trust_remote_code=False)

    def classifier() -> Any:
        if spec["size"] not in harness.SIZES:
            how = {"num_labels": 1, "dtype": torch.float32}
            return AutoModelForSequenceClassification.from_pretrained(spec["size"], trust_remote_code=False, **how)
        base = gpt2(spec, seed=1, part="reward")
        base.config.num_labels, base.config.pad_token_id = 1, tokenizer.pad_token_id
        model = Classifier(base.config)
        model.transformer.load_state_dict(base.transformer.state_dict())
        return model

    class ByTurns(TrainerCallback):
        """Ends the turn after each update, and waits for the next one."""

        def __init__(self) -> None:
            self.turns = iter(turns)

        def on_train_begin(self, *arguments: Any, **more: Any) -> None:
            next(self.turns)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            figures = {"kl": logs["objective/kl"], "entropy": logs["policy/entropy_avg"]}
            turns.done(units=float(spec["episodes"] * spec["new"]), **figures)

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if next(self.turns, self) is self:
                raise KeyboardInterrupt  # the trainer has no other way out

    with tempfile.TemporaryDirectory() as home:
        every = harness.trainer_settings(spec, spec["peer_micro"], logging_steps=1, num_sample_generations=0)
        del every["max_steps"], every["eos_token"]
        every |= {"stop_token": "eos", "missing_eos_penalty": 1.0, "kl_coef": 0.02, "learning_rate": 1e-5}
        every |= {"gradient_accumulation_steps": spec["episodes"] // spec["peer_micro"], "num_mini_batches": 1}
        every |= {
            "num_ppo_epochs": spec["epochs"],
            "total_episodes": 1000 * spec["episodes"],
            "response_length": spec["new"],
        }
        settings = PPOConfig(output_dir=home, local_rollout_forward_batch_size=spec["episodes"], **every)
        policy, reference = gpt2(spec, seed=0), gpt2(spec, seed=0)
        for model in (policy, reference):
            model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
        data = Dataset.from_dict({"input_ids": make_prompts(spec)})
        models = {"model": policy, "ref_model": reference, "reward_model": classifier(), "value_model": classifier()}
        rest = {"train_dataset": data, "eval_dataset": data, "callbacks": [ByTurns()]}
        trainer = PPOTrainer(args=settings, processing_class=tokenizer, **models, **rest)
        assert trainer.accelerator.device.type == torch.device(spec["device"]).type
        with contextlib.suppress(KeyboardInterrupt):
            trainer.train()


CLASS, TRL = "ours, transformers' class", "trl 1.12.0"
CONTESTANTS: dict[str, harness.Contestant] = {"ours": ours, CLASS: partial(ours, native=False), TRL: peer}


def main() -> None:
    options = harness.arguments(__doc__, 5, "scaling", "lora")
    cases = harness.pick(options, FIELDS, QUICK, CASES, CUDA_CASES, (options.checkpoint, 8, 24, 32, 1, 8, 8))
    sys.path.insert(0, str(harness.HERE.parents[1]))
    with tempfile.TemporaryDirectory() as home:
        results = {}
        for name, spec in cases.items():
            folder = Path(options.checkpoint or Path(home) / name)
            if not options.checkpoint:
                make_tokenizer(folder, spec["size"])
            spec |= {
                "tokenizer": str(folder),
                "lora": int(options.lora),
                "vocabulary": max(300, spec["shape"]["vocab_size"]),
            }
            if options.scaling:
                for count in SCALING[:2] if options.quick else SCALING:
                    more = spec | {"episodes": count}
                    results[f"{name}, {count} episodes"] = harness.compare(__file__, ["ours"], more, options)
                continue
            names = harness.only(options, [name for name in CONTESTANTS if options.checkpoint or name != CLASS])
            pythons = {TRL: harness.peer_python("trl-1.12.0")} if TRL in names else {}
            results[name] = harness.compare(__file__, names, spec, options, pythons)
    harness.report("ppo", "response tokens", results, options)
    for name, figures in results.items():
        if f := figures["contestants"].get("ours"):
            print(
                f"{name}, ours: {f['processed'] / f['seconds']:.1f} tokens/s with the prompts'; rollout {f['generation']:.3f} s, "
                f"scoring {f['scoring']:.3f}, training {f['training']:.3f}"
            )


if __name__ == "__main__":
    harness.serve(CONTESTANTS) if harness.is_worker() else main()
