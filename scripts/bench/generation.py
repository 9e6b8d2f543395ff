"""Generation: tokens per second of our sampler, with log-probs and ragged prompts, against transformers' `generate`.

    python scripts/bench/generation.py --out /tmp/generation.json

Both sample at temperature 1, without top_k and top_p. `generate` gets the prompts padded on the left, a preallocated
(static or dynamic, whichever is faster here: dynamic) cache and returns no log-probs; `generate with log-probs` returns
its logits, from which log-probs are taken, which is the equal work. With --checkpoint FOLDER both hold that model (batch 32, 24 + 64
tokens) and no token ends a sequence. Case `stopping`: each token ends its sequence with a
probability of 1/24, so that lengths are geometric as in a chat model's; units are the tokens up to each end.
"""

import random
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import harness
from harness import Spec, Turns

FIELDS = "size batch shortest longest new stop"  # shortest and longest prompt, new tokens, probability of the end token
CASES = {
    "tiny, batch 32": ("tiny", 32, 32, 32, 64, 0.0),
    "tiny, batch 32, ragged": ("tiny", 32, 8, 32, 64, 0.0),
    "small, batch 32, ragged": ("small", 32, 8, 32, 64, 0.0),
    "tiny, batch 128, ragged, stopping": ("tiny", 128, 8, 32, 64, 1 / 24),
    "small, batch 128, ragged, stopping": ("small", 128, 8, 32, 64, 1 / 24),
}
QUICK = {"quick": ("quick", 8, 4, 16, 16, 1 / 8), "quick, whole": ("quick", 8, 4, 16, 16, 0.0)}
CUDA_CASES = {
    "gpt2, batch 1": ("gpt2", 1, 64, 64, 256, 0.0),
    "gpt2, batch 32, ragged": ("gpt2", 32, 64, 256, 256, 0.0),
    "gpt2, batch 256, ragged": ("gpt2", 256, 64, 256, 256, 0.0),
    "gpt2, batch 256, ragged, stopping": ("gpt2", 256, 64, 256, 256, 1 / 96),
}


def make_model(spec: Spec) -> Any:
    """GPT-2 whose end token always has the probability `stop`.

    The unembedding is a matrix of its own here; the other tokens' rows are scaled down and the end token's is 0, so that
    the logits of the others are nearly equal and the end token's is the only one that a shift moves: it is set through
    the last norm's bias, which all rows but the end token's are orthogonal to.
    """
    import math

    import torch

    if spec["size"] not in harness.SIZES:
        return harness.gpt2(spec["size"]).eval()  # an unchanged checkpoint
    model = harness.gpt2(spec["size"], tie_word_embeddings=False)
    with torch.no_grad():
        head = model.lm_head.weight
        head[:, 0] = 0.0  # one direction of the hidden state affects only the end token
        head[harness.EOS] = 0.0
        head[harness.EOS, 0] = 1.0
        model.transformer.ln_f.weight[0] = 0.0
        share = spec["stop"] if spec["stop"] else 1e-9
        spread = float((head**2).sum(1).mean()) / 2  # log of the mean of exp(logit), for logits N(0, |row|^2)
        model.transformer.ln_f.bias[0] = math.log(share / (1 - share) * (len(head) - 1)) + spread
    return model.eval()


def make_prompts(spec: Spec) -> list[list[int]]:
    random_ = random.Random(0)
    vocabulary = harness.shape_of(spec["size"])["vocab_size"]
    return [
        [random_.randrange(2, vocabulary) for _ in range(random_.randint(spec["shortest"], spec["longest"]))]
        for _ in range(spec["batch"])
    ]


def ours(spec: Spec, turns: Turns) -> None:
    from rlhf.engines.sampling import sample
    from rlhf.ops.fast import keep_freed_memory

    keep_freed_memory()
    model = harness.ours_like(make_model(spec)).to(spec["device"]).eval()
    if spec["device"] == "cuda":
        model = model.bfloat16()
    prompts = make_prompts(spec)
    ids: dict[str, Any] = {"eos_token_id": spec["end"], "pad_token_id": harness.PAD}
    for number, _ in enumerate(turns):
        out = sample(model, prompts, max_new_tokens=spec["new"], seed=number, **ids)
        turns.done(units=sum(map(len, out.responses)), mean_logp=float(out.logprobs.sum() / out.mask.sum()))


def generate(spec: Spec, turns: Turns, with_logprobs: bool) -> None:
    import torch

    model = make_model(spec).to(spec["device"])
    if spec["device"] == "cuda":
        model = model.bfloat16()
    prompts = make_prompts(spec)
    width = max(map(len, prompts))
    tokens = torch.tensor([[harness.PAD] * (width - len(p)) + p for p in prompts], device=spec["device"])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=spec["device"])
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": spec["new"]}
    settings |= {"eos_token_id": spec["end"], "pad_token_id": harness.PAD}
    settings |= dict.fromkeys(("return_dict_in_generate", "output_logits"), with_logprobs)
    for number, _ in enumerate(turns):
        torch.manual_seed(number)
        with torch.inference_mode():
            out = model.generate(tokens, attention_mask=mask, **settings)
            response = (out.sequences if with_logprobs else out)[:, width:]
            ends = (response == spec["end"]).int()
            ended = ends.cumsum(1) - ends > 0  # after the end
            figures = {}
            if with_logprobs:
                total = torch.zeros((), device=spec["device"])
                for step, logits in enumerate(out.logits):
                    logp = torch.log_softmax(logits.float(), -1).gather(-1, response[:, step, None])[:, 0]
                    total += logp.masked_fill(ended[:, step], 0.0).sum()
                figures["mean_logp"] = float(total / (~ended).sum())
        turns.done(units=int((~ended).sum()), **figures)


CONTESTANTS: dict[str, harness.Contestant] = {
    "ours": ours, "generate": partial(generate, with_logprobs=False), "generate with log-probs": partial(generate, with_logprobs=True),
}  # fmt: skip


def main() -> None:
    options = harness.arguments(__doc__, repeats=7)
    results = {}
    for name, spec in harness.pick(options, FIELDS, QUICK, CASES, CUDA_CASES, (32, 24, 24, 64, 0.0)).items():
        spec["end"] = -1 if options.checkpoint else harness.EOS
        results[name] = harness.compare(__file__, list(CONTESTANTS), spec, options)
        results[name]["bandwidth"] = share_of_bandwidth(spec, options, results[name]["contestants"])
        if options.device == "cpu":
            bound = results[name]["roofline"] = roofline(spec, options.threads)
            rate = results[name]["contestants"]["ours"]["units_per_second"]
            print(
                f"{name}: {rate / bound['tokens_per_second']:.2f} of the roofline; products {bound['flops_per_second'] / 1e9:.0f} "
                f"GFLOP/s, memory {bound['bytes_per_second'] / 1e9:.1f} GB/s"
            )
    harness.report("generation", "tokens", results, options)
    for name, figures in results.items():
        read = f"{figures['bandwidth']['bytes_per_second'] / 1e9:.0f} GB/s read here"
        for contestant, share in figures["bandwidth"].get("shares", {}).items():
            print(f"{name}, {contestant}: {share:.3f} of the {read}")


def share_of_bandwidth(spec: Spec, options: Any, contestants: dict[str, Any]) -> dict[str, Any]:
    """Bytes that decoding must read per second, at each contestant's rate, over what this device reads.

    A step reads every weight and the keys and values of all rows, at their mean length, and gives `batch` tokens. bf16
    on a GPU, float32 on a CPU. For sequences that do not stop; what was read for the prompts is not counted.
    """
    s, element = spec["shape"], 2 if options.device == "cuda" else 4
    cache = 2 * s["n_layer"] * s["n_embd"] * mean_context(spec)
    step = element * (weights_of(spec) + spec["batch"] * cache)
    rate = bytes_per_second(options.device)
    bandwidth: dict[str, Any] = {"bytes_per_second": rate, "bytes_per_step": step}
    if not spec["stop"]:
        bandwidth["shares"] = {
            name: f["units_per_second"] / spec["batch"] * step / rate for name, f in contestants.items()
        }
    return bandwidth


@cache
def bytes_per_second(device: str) -> float:
    """Of reading: the best of five sums of 2^27 float32 values."""
    import torch

    many = torch.randn(2**27, device=device)
    return 4 * many.numel() / least(many.sum, 5, device)


def least(work: Callable[[], object], repeats: int, device: str = "cpu") -> float:
    """Seconds of the fastest repeat."""
    import torch

    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return min(times)


def mean_context(spec: Spec) -> float:
    return (spec["shortest"] + spec["longest"]) / 2 + spec["new"] / 2


def weights_of(spec: Spec) -> int:
    """Parameters that multiply."""
    s = spec["shape"]
    if spec["size"] not in harness.SIZES:
        return sum(p.numel() for p in harness.gpt2(spec["size"]).parameters())
    return 12 * s["n_layer"] * s["n_embd"] ** 2 + s["vocab_size"] * s["n_embd"]


def roofline(spec: Spec, threads: int) -> dict[str, float]:
    """Tokens per second if only the products, or only reading the weights, took time, at the rates measured here.

    A step reads every weight once and multiplies `batch` rows with it: 2 flops per weight and token, plus 4 L D t for
    attention over t tokens. The rate is that of the fastest product of one of these shapes, the bandwidth that of a sum.
    """
    import torch

    sys.path.insert(0, str(harness.HERE.parents[1]))
    from rlhf.cpu.products import onednn_product

    torch.set_num_threads(threads)
    s, batch = spec["shape"], spec["batch"]
    x, w = torch.randn(batch, s["n_embd"]), torch.randn(4 * s["n_embd"], s["n_embd"])
    best = least(lambda: torch.nn.functional.linear(x, w), 50)
    if multiply := onednn_product():
        packed = torch.ops.mkldnn._reorder_linear_weight(w, batch)
        best = min(best, least(lambda: multiply(x, packed, None, "none", [], ""), 50))
    rate, bandwidth = 2 * batch * w.numel() / best, bytes_per_second("cpu")
    context, weights = mean_context(spec), weights_of(spec)
    flops = 2 * weights + 4 * s["n_layer"] * s["n_embd"] * context
    by_bandwidth = bandwidth * batch / (4 * weights)
    return {
        "flops_per_second": rate,
        "flops_per_token": flops,
        "tokens_per_second": min(rate / flops, by_bandwidth),
        "bytes_per_second": bandwidth,
        "tokens_per_second_by_bandwidth": by_bandwidth,
    }


if __name__ == "__main__":
    harness.serve(CONTESTANTS) if harness.is_worker() else main()
