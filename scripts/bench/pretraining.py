"""Pretraining: tokens per second of our GPT against transformers' GPT-2, same weights, blocks and optimizer.

    python scripts/bench/pretraining.py --out /tmp/pretraining.json

Every contestant runs a bare loop: forward with loss, backward, gradient norm, fused AdamW. Ours takes a batch in two halves on
a CPU, which halves the activations; `ours, whole` takes it in one. `gpt2` is transformers' model unchanged, `gpt2 fused`
with the fused form of the same activation (`gelu_pytorch_tanh`). On a GPU both run in bf16 (autocast), at gpt2's size,
undivided, and MFU is printed.
"""

import sys
from functools import partial
from typing import Any

import harness
from harness import Spec, Turns

FIELDS = "size batch steps"  # sequences per batch, steps per turn
CASES = {"tiny": ("tiny", 16, 4), "small": ("small", 8, 1)}
CUDA_CASES = {"gpt2": ("gpt2", 16, 10), "gpt2-xl": ("gpt2-xl", 4, 4)}


def train(model: Any, spec: Spec, turns: Turns, loss_of: Any, parts: int = 1) -> None:
    """Turns of `steps` optimizer steps over the same random blocks, each batch in `parts` parts of equal size."""
    import torch

    device = torch.device(spec["device"])
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    shape = harness.SIZES[spec["size"]]
    width, batch = shape["n_positions"], spec["batch"]
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(2, shape["vocab_size"], (8 * batch, width), generator=generator).to(device)
    number = 0
    for _ in turns:
        for _ in range(spec["steps"]):
            rows = blocks[number % 8 * batch : (number % 8 + 1) * batch]
            number += 1
            loss = torch.zeros((), device=device)
            for part in rows.chunk(parts):
                with harness.half(spec["device"]):
                    share = loss_of(model, part) / parts
                share.backward()
                loss += share.detach()
            harness.update(model, optimizer)
        turns.done(units=spec["steps"] * batch * width, loss=loss.item())


def plain_loss(model: Any, rows: Any) -> Any:
    return model(input_ids=rows, labels=rows, use_cache=False).loss


def ours(spec: Spec, turns: Turns, parts: int | None = None) -> None:
    from rlhf.model.fused_loss import NextToken
    from rlhf.ops.fast import keep_freed_memory

    keep_freed_memory()

    def loss_of(model: Any, rows: Any) -> Any:
        return NextToken(model)(rows, rows[:, 1:].numel(), input_ids=rows)

    parts = parts or (2 if spec["device"] == "cpu" else 1)
    train(harness.ours_like(harness.gpt2(spec["size"])), spec, turns, loss_of, parts)


def peer(
    spec: Spec, turns: Turns, activation: str = "gelu_new", keep: bool = False, parts: int = 1, ours: bool = False
) -> None:
    """keep: with our setting of the allocator too; ours: our model, without the fast paths."""
    from rlhf.ops.fast import keep_freed_memory

    if keep:
        keep_freed_memory()
    model = harness.gpt2(spec["size"], activation=activation)
    train(harness.ours_like(model) if ours else model, spec, turns, plain_loss, parts)


fused = partial(peer, activation="gelu_pytorch_tanh")
CONTESTANTS: dict[str, harness.Contestant] = {
    "ours": ours, "ours, whole": partial(ours, parts=1), "ours plain": partial(peer, ours=True), "gpt2": peer, "gpt2 fused": fused,
    "gpt2 fused, kept memory": partial(fused, keep=True), "the same in halves": partial(fused, keep=True, parts=2),
}  # fmt: skip


def main() -> None:
    options = harness.arguments(__doc__, repeats=9)
    names = list(CONTESTANTS) if options.device == "cpu" else ["ours", "gpt2", "gpt2 fused"]
    results = {}
    for size, spec in harness.pick(options, FIELDS, {"quick": ("quick", 4, 2)}, CASES, CUDA_CASES).items():
        results[size] = harness.compare(__file__, names, spec, options)
        losses = [f["loss"] for f in results[size]["contestants"].values()]
        if max(losses) - min(losses) > 0.02:
            raise SystemExit(f"{size}: the losses differ ({losses}), so the work is not equal")
        for name, figures in results[size]["contestants"].items():
            if (share := mfu(size, figures["units_per_second"], options.device)) is not None:
                figures["mfu"] = share
                print(f"{size}, {name}: MFU {share:.3f}")
    harness.report("pretraining", "tokens", results, options)


def mfu(size: str, rate: float, device: str) -> float | None:
    """Share of the device's dense bf16 peak: 6 N + 12 L D T FLOPs per token (N without embeddings but the unembedding).

    None if the peak is unknown, as on a CPU.
    """
    if device != "cuda":
        return None
    import torch

    sys.path.insert(0, str(harness.HERE.parents[1]))
    from rlhf.training.usage import known_peak

    peak, s = known_peak(torch.cuda.get_device_name(), half=True), harness.SIZES[size]
    weights = 12 * s["n_layer"] * s["n_embd"] ** 2 + s["vocab_size"] * s["n_embd"]
    flops = 6 * weights + 12 * s["n_layer"] * s["n_embd"] * s["n_positions"]
    return None if peak is None else rate * flops / peak


if __name__ == "__main__":
    harness.serve(CONTESTANTS) if harness.is_worker() else main()
