"""Rejection sampling: the SFT model fine-tuned on the best of n of its own samples, picked by the reward model.

The simplest way to use a reward model for training (Touvron et al. 2023, Llama 2, section 3.2.3), and a baseline for
PPO.
Differs: one round, always from the SFT model.
"""

from typing import Any

import torch

from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.data.encoding import encode_demonstrations, row_limit
from rlhf.data.records import Demonstration
from rlhf.errors import UserError
from rlhf.evaluation.best_of import draw_best
from rlhf.evaluation.policies import Asked
from rlhf.ppo.experience import load_ppo_prompts
from rlhf.ppo.rewards import make_reward
from rlhf.runs.run_files import read_jsonl
from rlhf.runs.stage import Stage
from rlhf.stages.sft import fine_tuned, load_with_dropout
from rlhf.system.files import write_text
from rlhf.training.adapters import save_output
from rlhf.training.setup import load_frozen, parent_model, running


def run(config: Config) -> None:
    """Write runs/<run>/rejection: demonstrations.jsonl, the best samples as records, and the model trained on them."""
    with running(config, "rejection") as (stage, device):
        folder, tokenizer = parent_model(config, "sft")

        # 1. Sample n, keep the best that ends
        path = stage.folder / "demonstrations.jsonl"
        if path.exists():
            demonstrations = [Demonstration(**row) for row in read_jsonl(path)]
        else:
            demonstrations = choose(stage, load_frozen(config, folder, device), tokenizer, device)
            if stage.writes:
                write_text(path, "".join(r.model_dump_json() + "\n" for r in demonstrations))

        # 2. Fine-tune on them
        rows = encode_demonstrations(demonstrations, tokenizer, row_limit(config, tokenizer))
        model = load_with_dropout(config, folder, device)
        with fine_tuned(stage, model, tokenizer, rows, config.rejection.epochs, device):
            save_output(model, tokenizer, stage)
        stage.finish({"demonstrations": float(len(demonstrations))})


def choose(stage: Stage, policy: Any, tokenizer: Any, device: torch.device) -> list[Demonstration]:
    """The best of n samples of each prompt, of those that end. Raises: UserError if no sample ends."""
    config, n = stage.config, stage.config.rejection.samples
    prompts, _ = load_ppo_prompts(config, tokenizer, stage.say, config.rejection.prompts)
    reward, _ = make_reward(config, tokenizer, device, stage.say)
    with inference(config, device):
        drawn = draw_best(config, policy, Asked(prompts, tokenizer), n, reward, "rejection: sampling", ended=True)
    demonstrations = []
    for (record, _), (answer, score) in zip(prompts, drawn, strict=True):
        if answer.ended and answer.text:
            given: Any = {"id": record.id, "prompt": record.prompt, "response": answer.text}
            demonstrations.append(Demonstration(**given, source=f"best of {n}", metadata={"score": score}))
    if not demonstrations:
        raise UserError("rejection: no sample ends by itself: train SFT longer, or raise rollout.max_new_tokens")
    none = len(prompts) - len(demonstrations)
    stage.say(f"{len(demonstrations):,} prompts with a best of {n}; {none} had no sample that ends")
    return demonstrations
