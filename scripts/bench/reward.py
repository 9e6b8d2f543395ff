"""Reward model with K answers per prompt: pairs per second, against the same pairs through a pairwise trainer.

    python scripts/bench/reward.py --out /tmp/reward.json

Ours scores each answer once and computes the loss over all C(K, 2) pairs of the prompt; trl's RewardTrainer and the bare loop
score both answers of every pair. Same weights, answers and optimizer. A turn is one optimizer step over the same prompts;
units are pairs.
"""

import itertools
import tempfile
from typing import Any

import harness
from harness import Spec, Turns

# Prompts per step, K, pairs per forward of the peer, answers per forward of ours.
FIELDS = "size prompts answers pairs micro"
CASES = {"tiny": ("tiny", 4, 9, 36, 36), "tiny, K = 2": ("tiny", 36, 2, 36, 36)}
QUICK = {"quick": ("quick", 2, 4, 6, 8)}
CUDA_CASES = {"gpt2": ("gpt2", 64, 9, 144, 288)}


def make_answers(spec: Spec) -> list[list[list[int]]]:
    """Prompts, each with K rows of prompt + answer."""
    import random

    random_ = random.Random(0)
    shape = harness.SIZES[spec["size"]]
    context = shape["n_positions"]

    def tokens(least: int, most: int) -> list[int]:
        return [random_.randrange(8, shape["vocab_size"]) for _ in range(random_.randint(least, most))]

    prompts = []
    for _ in range(16 * spec["prompts"]):
        prompt = tokens(context // 8, context // 3)
        prompts.append([prompt + tokens(context // 16, context // 2) for _ in range(spec["answers"])])
    return prompts


def classifier(spec: Spec) -> Any:
    from transformers import GPT2ForSequenceClassification

    base = harness.gpt2(spec["size"], activation="gelu_pytorch_tanh")
    base.config.num_labels = 1
    model = GPT2ForSequenceClassification(base.config)
    model.transformer.load_state_dict(base.transformer.state_dict())
    return model


def ours(spec: Spec, turns: Turns) -> None:
    import torch

    from rlhf.data.encoding import Item, Judgement
    from rlhf.evaluation.scoring import by_item, item_length, pad_weights
    from rlhf.model.batching import joins_rows, scoring_tokens
    from rlhf.model.heads import RewardModel
    from rlhf.ops.fast import keep_freed_memory
    from rlhf.ops.ranking import ranking_loss
    from rlhf.training.batches import Objective, put

    keep_freed_memory()
    device = torch.device(spec["device"])
    model: Any = RewardModel.from_causal_lm(harness.ours_like(harness.gpt2(spec["size"])))
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    pairs = list(itertools.combinations(range(spec["answers"]), 2))
    items = [
        Item(str(i), rows, [0] * len(rows), judgements=[Judgement(None, pairs)])
        for i, rows in enumerate(make_answers(spec))
    ]
    joined: Any = {"length": item_length, "joined": joins_rows(model)}
    objective = Objective(lambda item: item.rows, None, spec["micro"], **joined)  # type: ignore[arg-type]
    for turn, _ in enumerate(turns):
        batch = [items[(turn * spec["prompts"] + i) % len(items)] for i in range(spec["prompts"])]
        for part in objective.micro_batches(batch, scoring_tokens(model), 0, 1):
            inputs = put(model.collate([row for item in part for row in item.rows]), device)
            with harness.half(spec["device"]):
                scores = by_item(part, model(**inputs, calibrated=False))
            loss, _ = ranking_loss(scores, pad_weights(part, device), denominator=len(batch))
            loss.backward()
        harness.update(model, optimizer)
        turns.done(units=float(spec["prompts"] * len(pairs)))


def bare(spec: Spec, turns: Turns) -> None:
    """A bare loop over transformers' classifier, one pair per element."""
    import torch

    device = torch.device(spec["device"])
    model = classifier(spec).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    prompts, size = make_answers(spec), spec["pairs"]
    for turn, _ in enumerate(turns):
        batch = [prompts[(turn * spec["prompts"] + i) % len(prompts)] for i in range(spec["prompts"])]
        pairs = [pair for rows in batch for pair in itertools.combinations(rows, 2)]
        for start in range(0, len(pairs), size):
            part = pairs[start : start + size]
            rows = [pair[side] for side in (0, 1) for pair in part]
            width = max(map(len, rows))
            tokens = torch.tensor([row + [harness.PAD] * (width - len(row)) for row in rows], device=device)
            mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
            with harness.half(spec["device"]):
                better, worse = model(tokens, attention_mask=mask, use_cache=False).logits[:, 0].chunk(2)
            (-torch.nn.functional.logsigmoid(better - worse).sum() / len(pairs)).backward()
        harness.update(model, optimizer)
        turns.done(units=float(len(pairs)))


def reward_trainer(spec: Spec, turns: Turns) -> None:
    import datasets
    from sft import by_turns, make_tokenizer, run
    from trl import RewardConfig, RewardTrainer

    pairs = [pair for rows in make_answers(spec) for pair in itertools.combinations(rows, 2)]
    data = datasets.Dataset.from_dict(
        {"chosen_ids": [better for better, _ in pairs], "rejected_ids": [worse for _, worse in pairs]}
    )
    step = spec["prompts"] * spec["answers"] * (spec["answers"] - 1) // 2
    with tempfile.TemporaryDirectory() as home:
        given = harness.trainer_settings(spec, spec["pairs"], learning_rate=1e-5, max_length=None)
        config = RewardConfig(output_dir=home, gradient_accumulation_steps=step // spec["pairs"], **given)
        trainer = RewardTrainer(
            model=classifier(spec),
            args=config,
            train_dataset=data,
            processing_class=make_tokenizer(spec["size"]),
            callbacks=[by_turns(turns, 1, step)],
        )
        run(trainer)


CONTESTANTS = {"ours": ours, "RewardTrainer": reward_trainer, "bare pairs": bare}


def main() -> None:
    options = harness.arguments(__doc__, repeats=7)
    cases = harness.pick(options, FIELDS, QUICK, CASES, CUDA_CASES)
    results = {name: harness.compare(__file__, list(CONTESTANTS), spec, options) for name, spec in cases.items()}
    harness.report("reward", "pairs", results, options)


if __name__ == "__main__":
    harness.serve(CONTESTANTS) if harness.is_worker() else main()
