"""GPT-1's transfer: a base model fine-tuned on a labelled task, and measured on examples that it did not see.

    L3 = L2 + lambda L1      L2 = - mean over examples of log P(y | x)
    L1 = the language model's loss on the same text

Source: Radford et al. 2018, sections 3.2, 3.3 and 4.1 (batch 32, 3 epochs, rate 6.25e-5, warm-up over 0.2% of the
steps, linear decay, lambda 0.5, dropout 0.1 on the classifier). Differs: Adam's betas are those of the other stages.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.data.encoding import row_limit
from rlhf.data.labelled import Example, encode_examples, find_marks
from rlhf.errors import UserError
from rlhf.evaluation.shots import columns_of, hash_task, load_task
from rlhf.evaluation.statistics import classification, show
from rlhf.model.batching import by_length, right_pad, scoring_tokens
from rlhf.model.checkpoint import is_encoder
from rlhf.model.heads import LabelModel, transfer
from rlhf.runs.metric_table import Sums
from rlhf.runs.stage import Stage
from rlhf.system.files import write_json, write_jsonl
from rlhf.training.batches import Batches, Objective, shuffled_order, trained
from rlhf.training.engine import Engine, make_engine
from rlhf.training.setup import load_policy, parent_model, running

MEASURED_TOGETHER = 32  # examples per forward


class Coded(NamedTuple):
    """An example as token rows, and the number of its class."""

    rows: list[list[int]]
    label: int


def run(config: Config) -> None:
    """Write runs/<run>/classify: the model with its head, results.json, predictions.jsonl."""
    settings = config.classify
    columns = columns_of(config)
    with running(config, "classify", hash_task(config)) as (stage, device):
        # 1. The examples
        examples, held_out, classes = load_task(config, columns, stage.folder)
        base, tokenizer = parent_model(config, "pretrain")
        lm = load_policy(base, encoder=True)
        if is_encoder(lm.config) and settings.lm_coef:
            given = f"classify.lm_coef={settings.lm_coef}"
            raise UserError(f"{given}: {base} is an encoder, without a next-token loss: want 0")
        coded = [encode(stage, part, tokenizer, classes) for part in (examples, held_out)]

        # 2. The base, or its transferred part, with W_y
        if settings.from_scratch or settings.layers is not None:
            lm = transfer(lm, settings.layers)
        if len(tokenizer) > lm.get_input_embeddings().num_embeddings:
            lm.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        model = LabelModel(lm, classes, bool(columns.choices), settings.dropout)

        # 3. Train
        engine, pad = make_engine(config, model, settings, device), tokenizer.pad_token_id
        batches = Batches(coded[0], settings.batch_size, shuffled_order(f"{stage.name}-{config.seed}"))
        objective = make_objective(config, engine, pad, most=max(len(example.rows) for example in coded[0]))
        with trained(stage, engine, batches, objective, settings.epochs, settings, averages=False) as loop:
            lm.save_pretrained(str(stage.model))
            tokenizer.save_pretrained(str(stage.model))
            model.save_head(stage.model)

            # 4. Measure what was written
            model = LabelModel.with_head(load_policy(stage.model, encoder=True), stage.model).to(device)
            with inference(config, device):
                probabilities = predict(model, coded[1], pad, device)
            results = write_results(stage, held_out, [one.label for one in coded[1]], classes, probabilities)
            figures = {
                "accuracy": results["accuracy"]["value"],
                "macro_f1": results["macro_f1"],
                "loss": results["loss"],
            }
            loop.log_held_out(figures)
        stage.finish(figures)


def encode(stage: Stage, examples: list[Example], tokenizer: Any, classes: list[str]) -> list[Coded]:
    marks, added = find_marks(tokenizer)
    if added:
        stage.say(f"new tokens {' '.join(added)}, with random embeddings")
    rows, cut = encode_examples(examples, tokenizer, marks, row_limit(stage.config, tokenizer))
    count = f"{len(examples):,} examples, {len(classes)} classes, {sum(map(len, rows)):,} rows"
    stage.say(f"{count}, {cut:,} of them cut to fit")
    return [Coded(row, classes.index(example.label)) for row, example in zip(rows, examples, strict=True)]


def collate(examples: list[Coded], pad: int, device: torch.device) -> tuple[dict[str, Any], Tensor]:
    """(arguments of the model's forward, classes (N,))."""
    tokens, lengths = right_pad([row for example in examples for row in example.rows], pad)
    labels = torch.tensor([example.label for example in examples], device=device)
    return {"tokens": tokens.to(device), "lengths": lengths.to(device), "examples": len(examples)}, labels


def make_objective(config: Config, engine: Engine, pad: int, most: int) -> Objective[Coded]:
    """L2 + lambda L1, both means over the examples of a batch. most: rows of an example."""
    settings = config.classify

    def loss_of(part: list[Coded], count: int, sums: Sums) -> tuple[Tensor, dict[str, Tensor]]:
        inputs, labels = collate(part, pad, engine.device)
        logits, nats = engine(**inputs, with_lm=settings.lm_coef > 0)
        losses = F.cross_entropy(logits, labels, reduction="none")
        sums.add("classify/loss", losses.sum().item(), len(part))
        sums.add("classify/accuracy", (logits.argmax(-1) == labels).sum().item(), len(part))
        if settings.lm_coef > 0:
            sums.add("classify/lm_loss", nats.sum().item(), len(part))
        return (losses + settings.lm_coef * nats).sum() / count, inputs | {"logits": logits}

    return Objective(lambda example: example.rows, loss_of, settings.micro_batch_size * most)


@torch.no_grad()
def predict(model: LabelModel, examples: list[Coded], pad: int, device: torch.device) -> Tensor:
    """P(y | x) of every class, (N, C) float32 on the CPU."""
    model.eval()
    probabilities = torch.zeros(len(examples), len(model.classes))
    lengths = [max(map(len, example.rows)) for example in examples]
    for group in by_length(lengths, MEASURED_TOGETHER, scoring_tokens(model)):
        inputs, _ = collate([examples[i] for i in group], pad, device)
        probabilities[group] = model(**inputs)[0].softmax(-1).cpu()
    return probabilities


def write_results(
    stage: Stage, examples: list[Example], labels: list[int], classes: list[str], probabilities: Tensor
) -> dict[str, Any]:
    """Write predictions.jsonl, a line per held-out example, and results.json; returns the latter."""
    predicted = probabilities.argmax(-1).tolist()
    results = classification(labels, predicted, classes)
    right = probabilities[torch.arange(len(labels)), torch.tensor(labels)]
    results["loss"] = -right.clamp(min=1e-30).log().mean().item()
    rows = []
    for example, label, guess, row in zip(examples, labels, predicted, probabilities.tolist(), strict=True):
        chances = {name: round(p, 4) for name, p in zip(classes, row, strict=True)}
        said = {"label": classes[label], "predicted": classes[guess], "probabilities": chances}
        rows.append({"where": example.where, "rows": example.rows} | said)
    write_jsonl(stage.folder / "predictions.jsonl", rows)
    write_json(stage.folder / "results.json", results)
    majority = f"the most frequent label alone {results['majority']:.3f}"
    stage.say(f"held out: accuracy {show(results['accuracy'])} of {len(labels):,}; {majority}")
    return results
