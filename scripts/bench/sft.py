"""SFT: demonstrations per second on mixed lengths, against trl's SFTTrainer with its defaults and a bare loop over transformers.

    python scripts/bench/sft.py --out /tmp/sft.json

Same weights (GPT-2), rows, order, batches, optimizer and loss: the response's tokens, prompts masked. `ours` is the
loop of the SFT stage; `SFTTrainer` and `SFTTrainer, by length` train transformers' GPT-2 with the fused form of its
activation, the latter with group_by_length, which changes which rows share a batch; `bare` pads each batch to its
longest row. With --checkpoint FOLDER the bare loops train that model, with 8 rows per batch. A turn is a number of optimizer
steps; units are rows.
"""

import contextlib
import tempfile
from functools import partial
from typing import Any

import harness
from harness import Spec, Turns

FIELDS = "size batch steps context"  # rows per batch, steps per turn, the longest row
CASES = {"tiny": ("tiny", 32, 4, 1024), "small": ("small", 32, 1, 1024)}
QUICK = {"quick": ("quick", 8, 2, 1024)}
CUDA_CASES = {"gpt2": ("gpt2", 64, 8, 1024)}
IGNORED = -100


def make_rows(spec: Spec) -> list[dict[str, list[int]]]:
    """Prompt and response lengths spread as those of instructions: log-normal, cut to the context."""
    import random

    random_ = random.Random(0)
    shape = spec["shape"]
    context, rows = min(shape["n_positions"], spec["context"]), []
    for _ in range(4096):
        prompt = min(context // 2, max(4, round(random_.lognormvariate(0.0, 0.5) * context / 8)))
        response = min(context - prompt, max(2, round(random_.lognormvariate(0.0, 0.8) * context / 5)))
        tokens = [random_.randrange(8, shape["vocab_size"]) for _ in range(prompt + response)]
        rows.append({"prompt": tokens[:prompt], "response": tokens[prompt:]})
    return rows


def by_turns(turns: Turns, steps: int, batch: int) -> Any:
    """A Trainer's callback that ends a turn every `steps` optimizer steps."""
    from transformers import TrainerCallback

    class ByTurns(TrainerCallback):
        def __init__(self) -> None:
            self.turns = iter(turns)

        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step % steps == 0 and next(self.turns, self) is self:
                raise KeyboardInterrupt  # a trainer has no other way out

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step % steps == 0:
                turns.done(units=float(steps * batch))

    return ByTurns()


def run(trainer: Any) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        trainer.train()


def make_tokenizer(size: str) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({f"t{i}": i for i in range(harness.SIZES[size]["vocab_size"])}, "t2")
    special = {"pad_token": "t0", "eos_token": "t1", "bos_token": "t1", "unk_token": "t2"}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special)


def ours(spec: Spec, turns: Turns) -> None:
    import torch

    from rlhf.config.compose import compose_config
    from rlhf.model.fused_loss import NextToken
    from rlhf.ops.fast import keep_freed_memory
    from rlhf.runs.metric_table import Sums
    from rlhf.runs.stage import open_stage
    from rlhf.stages import sft
    from rlhf.training.batches import Batches, accelerate_order, train_step
    from rlhf.training.engine import make_engine
    from rlhf.training.setup import be_quiet

    be_quiet()
    with tempfile.TemporaryDirectory() as home:
        settings = f"runs_dir={home} run=bench tracking=off device={spec['device']} threads={spec['threads']} sft.lr=1e-4 sft.dropout=0"
        batch = f"sft.batch_size={spec['batch']} sft.micro_batch_size={spec['batch']}"
        config = compose_config([*settings.split(), *batch.split()])
        keep_freed_memory()
        tokenizer = make_tokenizer(spec["size"])
        with open_stage(config, "tokenizer") as stage:
            model = harness.ours_like(harness.gpt2(spec["size"]))
            device = torch.device(spec["device"])
            model.to(device)
            engine = make_engine(config, NextToken(model), config.sft, device)
            rows = sft.make_rows(make_rows(spec), spec["context"], pack=False)
            batches = Batches(rows, spec["batch"], accelerate_order(0)).after(0)
            objective, sums = sft.make_objective(config, engine, tokenizer.pad_token_id), Sums()
            for _ in turns:
                for _ in range(spec["steps"]):
                    train_step(engine, next(batches), objective, sums)
                turns.done(units=float(spec["steps"] * spec["batch"]))
            stage.finish()


def ours_bare(spec: Spec, turns: Turns) -> None:
    """Our model and loss in a bare loop, rows of similar length together."""
    import torch

    from rlhf.model import batching
    from rlhf.model.fused_loss import NextToken
    from rlhf.ops.fast import keep_freed_memory

    def loss_of(model: Any, tokens: Any, labels: Any, lengths: Any) -> Any:
        loss, count, parts = NextToken(model), int((labels[:, 1:] != IGNORED).sum()), []
        for group in batching.by_length(lengths.tolist(), 8):
            width = int(lengths[group].max())
            parts.append(loss(labels[group, :width], count, input_ids=tokens[group, :width]))
        return torch.stack(parts).sum()

    keep_freed_memory()
    bare_loop(harness.ours_like(harness.gpt2(spec["size"])), spec, turns, loss_of)


def bare(spec: Spec, turns: Turns) -> None:
    import torch

    def loss_of(model: Any, tokens: Any, labels: Any, lengths: Any) -> Any:
        mask = (torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]).long()
        return model(input_ids=tokens, attention_mask=mask, labels=labels, use_cache=False).loss

    bare_loop(harness.gpt2(spec["size"], activation="gelu_pytorch_tanh"), spec, turns, loss_of)


def bare_loop(model: Any, spec: Spec, turns: Turns, loss_of: Any) -> None:
    import torch
    from torch.nn.utils.rnn import pad_sequence

    device = torch.device(spec["device"])
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    rows, size, at = make_rows(spec), spec["batch"], 0
    for _ in turns:
        for _ in range(spec["steps"]):
            batch = [rows[(at + i) % len(rows)] for i in range(size)]
            at += size
            tokens = pad_sequence([torch.tensor(r["prompt"] + r["response"]) for r in batch], batch_first=True)
            marked = [torch.tensor([IGNORED] * len(r["prompt"]) + r["response"]) for r in batch]
            labels = pad_sequence(marked, batch_first=True, padding_value=IGNORED)
            lengths = torch.tensor([len(r["prompt"]) + len(r["response"]) for r in batch])
            with harness.half(spec["device"]):
                loss = loss_of(model, tokens.to(device), labels.to(device), lengths.to(device))
            loss.backward()
            harness.update(model, optimizer)
        turns.done(units=float(spec["steps"] * size), loss=loss.item())


def sft_trainer(spec: Spec, turns: Turns, **settings: Any) -> None:
    import datasets
    from trl import SFTConfig, SFTTrainer

    rows = make_rows(spec)
    labels = [[IGNORED] * len(row["prompt"]) + row["response"] for row in rows]
    data = datasets.Dataset.from_dict({"input_ids": [r["prompt"] + r["response"] for r in rows], "labels": labels})
    with tempfile.TemporaryDirectory() as home:
        longest = harness.SIZES[spec["size"]]["n_positions"]
        given = harness.trainer_settings(spec, spec["batch"], learning_rate=1e-4, max_length=longest, **settings)
        config = SFTConfig(output_dir=home, **given)
        trainer = SFTTrainer(
            model=harness.gpt2(spec["size"], activation="gelu_pytorch_tanh"),
            args=config,
            train_dataset=data,
            processing_class=make_tokenizer(spec["size"]),
            callbacks=[by_turns(turns, spec["steps"], spec["batch"])],
        )
        run(trainer)


by_length = partial(sft_trainer, train_sampling_strategy="group_by_length")
CONTESTANTS: dict[str, harness.Contestant] = {
    "ours": ours, "ours, bare loop": ours_bare, "SFTTrainer": sft_trainer, "SFTTrainer, by length": by_length,
    "bare": bare,
}  # fmt: skip


def main() -> None:
    options = harness.arguments(__doc__, repeats=9)
    cases = harness.pick(options, FIELDS, QUICK, CASES, CUDA_CASES, (8, 1, 160))
    names = ["ours, bare loop", "bare"] if options.checkpoint else list(CONTESTANTS)
    results = {name: harness.compare(__file__, names, spec, options) for name, spec in cases.items()}
    harness.report("sft", "rows", results, options)


if __name__ == "__main__":
    harness.serve(CONTESTANTS) if harness.is_worker() else main()
