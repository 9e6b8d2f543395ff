"""Distillation: a student with some of a policy's blocks learns to answer as the policy does.

    loss = mean over the answers' tokens of ce_coef T^2 CE(teacher, student) + lm_coef (-log q(token))
           + cos_coef (1 - cos(h, h_teacher))

The texts are the teacher's own samples on training prompts; the first term is of softened distributions, the second of
the sampled tokens, the third of the last hidden states.
Source: Sanh et al. 2019 (DistilBERT), sections 2 and 3: every second block, the three losses; Hinton et al. 2015,
section 2.
Differs: a causal language model on its answers, not a masked one on its pretraining text, so that the teacher may be
aligned; no dropout.
"""

import json
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.config.stages import DistillConfig
from rlhf.engines.sampling import make_sampler
from rlhf.errors import UserError
from rlhf.evaluation.policies import draw_divided
from rlhf.model.fused_loss import before_labels, in_chunks
from rlhf.model.heads import keep_every
from rlhf.model.interface import lm
from rlhf.ops.logprobs import soft_cross_entropy, token_logprobs
from rlhf.ops.masked import upcast
from rlhf.ppo.experience import load_ppo_prompts
from rlhf.runs.metric_table import Sums
from rlhf.runs.run_files import read_jsonl
from rlhf.runs.stage import Stage
from rlhf.stages.sft import Row, labels_in, make_collator, make_rows
from rlhf.system.files import write_text
from rlhf.training.adapters import save_output
from rlhf.training.batches import Batches, Objective, accelerate_order, evaluate_items, put, trained
from rlhf.training.engine import Engine, make_engine
from rlhf.training.setup import load_frozen, load_policy, parent_model, running


def run(config: Config) -> None:
    """Write runs/<run>/distill: answers.jsonl, the teacher's answers as tokens, and the student's model."""
    settings = config.distill
    with running(config, "distill") as (stage, device):
        folder, tokenizer = parent_model(config, settings.teacher)
        teacher = load_frozen(config, folder, device)
        student = keep_every(load_policy(folder, dropout=0.0), settings.every)
        sizes = {"parameters": student.num_parameters(), "teacher_parameters": teacher.num_parameters()}
        stage.say("student of {parameters:,} parameters, teacher of {teacher_parameters:,}".format(**sizes))

        # 1. The teacher's answers
        answers = load_answers(config, stage, teacher, tokenizer)
        rows = {split: make_rows(answers[split], 0, pack=False) for split in answers}

        # 2. Train the student
        engine = make_engine(config, Student(student, settings), settings, device)
        batches = Batches(rows["train"], settings.batch_size, accelerate_order(config.seed))
        objective = make_objective(config, engine, teacher, settings, tokenizer.pad_token_id)
        with trained(stage, engine, batches, objective, settings.epochs, settings) as loop:
            save_output(student, tokenizer, stage)

            # 3. Held-out figures
            summary = evaluate_items(config, engine, objective, rows["dev"])
            if summary:
                loop.log_held_out({"loss": summary["loss"]})
                stage.say(f"held out: KL to the teacher {summary['kl']:.3f} nats per token")
        stage.finish(summary | sizes)


def load_answers(config: Config, stage: Stage, teacher: Any, tokenizer: Any) -> dict[str, list[Any]]:
    """The teacher's answers, as rows, to prompts of the training split and to ppo.eval_prompts of the dev split; sampled unless there."""
    path = stage.folder / "answers.jsonl"
    if path.exists():
        lines = list(read_jsonl(path))
        return {split: [line for line in lines if line["split"] == split] for split in ("train", "dev")}
    prompts, held_out = load_ppo_prompts(config, tokenizer, stage.say, config.distill.prompts)
    engine, answers = make_sampler(config, teacher, tokenizer), dict[str, list[Any]]()
    for split, asked, count in (("train", prompts, config.distill.samples), ("dev", held_out, 1)):
        with inference(config, teacher.device):
            drawn = draw_divided(engine, tokenizer, asked, f"distill-{split}", count)
        pairs = ((ids, answer.ids) for (_, ids), row in zip(asked, drawn, strict=True) for answer in row)
        answers[split] = [{"split": split, "prompt": ids, "response": given} for ids, given in pairs if given]
    stage.say(f"{len(answers['train']):,} answers to {len(prompts):,} prompts, {len(answers['dev'])} held out")
    if not answers["train"]:
        raise UserError(f"distill: the {config.distill.teacher} policy answers no prompt: train it longer")
    if stage.writes:
        write_text(path, "".join(json.dumps(line) + "\n" for line in answers["train"] + answers["dev"]))
    return answers


class Student(nn.Module):
    """The student with its three losses; the teacher's hidden states come from outside."""

    def __init__(self, model: Any, settings: DistillConfig):
        super().__init__()
        self.model, self.settings = model, settings

    def forward(
        self, tokens: Tensor, kept: Tensor, targets: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the losses over the tokens (N,) that follow `kept` (N,), row * T + position; and {metric: its
        sum}. tokens (B, T), right-padded; targets (N,) int64; teacher_hidden (N, D) and teacher_weight (V, D), its
        unembedding.
        """
        head, settings = self.model.get_output_embeddings(), self.settings
        hidden = lm(self.model).hidden(tokens, kept)

        def measure(h: Tensor, of_teacher: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
            logits, wanted = head(h), of_teacher @ teacher_weight.to(of_teacher.dtype).t()
            ce, kl = soft_cross_entropy(logits, wanted, settings.temperature)
            return ce, kl, -token_logprobs(logits, chosen)

        ce, kl, nats = in_chunks(measure, head, hidden, teacher_hidden, targets)
        cosine = F.cosine_similarity(upcast(hidden), upcast(teacher_hidden.detach()), dim=-1)
        loss = settings.ce_coef * ce + settings.lm_coef * nats + settings.cos_coef * (1 - cosine)
        figures = {"loss": loss, "kl": kl, "lm_loss": nats, "cosine": cosine}
        return loss.sum(), {name: x.detach().sum() for name, x in figures.items()}


def make_objective(config: Config, engine: Engine, teacher: Any, settings: DistillConfig, pad: int) -> Objective[Row]:
    """The mean loss over the answers' tokens of a batch."""
    collate, weight = make_collator(pad, False, False), teacher.get_output_embeddings().weight.detach()

    def loss_of(part: list[Row], count: int, sums: Sums) -> tuple[Tensor, dict[str, Any]]:
        batch = put(collate(part), engine.device)
        targets, kept = before_labels(batch["labels"])
        with inference(config, engine.device):
            hidden = lm(teacher).hidden(batch["input_ids"], kept)
        loss, figures = engine(batch["input_ids"], kept, targets, hidden, weight)
        for name, value in figures.items():
            sums.add(f"distill/{name}", value, len(targets))
        return loss / count, batch

    return Objective(lambda row: [row["input_ids"]], loss_of, settings.micro_batch_size, count=labels_in)
