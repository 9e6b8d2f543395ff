"""`rlhf plan`: what a configuration needs on a cluster, by closed formulas (docs/planning.md), as a table, and as plan.json with out=…."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf.config import PlanConfig
from rlhf.planning.estimates import BYTE_PARTS, make_plan, peak_bytes
from rlhf.system.files import check_replaceable, write_json
from rlhf.system.memory import GB
from rlhf.system.terminal import say


def run(config: PlanConfig) -> None:
    """Print the plan, and write it to `out`, a .json file or a folder, if that is set."""
    plan = make_plan(config)
    for line in plan_lines(plan):
        say(line)
    if config.out is not None:
        path = Path(config.out) if config.out.endswith(".json") else Path(config.out) / "plan.json"
        check_replaceable(path, config.overwrite, "out", "file", Path.is_file)
        write_json(path, plan)
        say(f"written to {path}")


def plan_lines(plan: dict[str, Any]) -> Iterator[str]:
    """The plan as lines: model, memory, time, compute-optimal sizes, and last the verdict."""
    shape, setup, counts = plan["shape"], plan["setup"], plan["parameters"]
    yield (
        f"model    {shape['n_layer']} blocks, width {shape['width']}, {shape['n_head']} heads, context "
        f"{shape['context_length']}, vocabulary {shape['vocab_size']:,}: {counts['policy']:,} parameters "
        f"(reward model {counts['reward']:,}, critic {counts['critic']:,})"
    )
    yield (
        f"machine  {setup['gpus']} GPU{'s' if setup['gpus'] > 1 else ''} with {setup['gpu_memory_gb']:g} GB, "
        f"{setup['memory_margin']:.0%} of it kept free; "
        f"{setup['peak_tflops']:g} TFLOPS at {setup['mfu']:.0%} MFU; {setup['bandwidth_gb']:g} GB/s"
    )
    trained = f"gradient checkpointing {'on' if setup['checkpointing'] else 'off'}; trained: {setup['lora']}"
    yield f"setting  deepspeed={setup['deepspeed']}, {setup['dtype']}, AdamW, {trained}"
    used = {name for parts in plan["bytes"].values() for name, count in parts.items() if count}
    columns = ["rows", *(name for name in (*BYTE_PARTS, "sum", "host") if name in used | {"sum"})]
    yield from ("", "GB per GPU   " + "  ".join(f"{name:>7}" for name in columns) + "  fits")
    for stage, parts in plan["bytes"].items():
        most = peak_bytes(parts)
        figures = {"rows": str(plan["micro_batches"][stage]), "sum": gigabytes(most)}
        cells = [figures.get(name) or gigabytes(parts[name]) for name in columns]
        text = "  ".join(f"{cell:>{max(7, len(name))}}" for cell, name in zip(cells, columns, strict=True))
        yield f"{stage:<12} {text}  {'yes' if most <= plan['room_bytes'] else 'NO'}"
    yield from ("", f"{'time':<12} {'FLOPs':>9}")
    for name, figures in plan["time"].items():
        yield f"{name:<12} {figures['flops']:>9.2e}  {format_hours(figures['hours'])}"
    whole = sum(figures["hours"] for name, figures in plan["time"].items() if name.startswith("ppo"))
    yield from (f"{'ppo in all':<12} {'':>9}  {format_hours(whole)}", "")
    if optimal := plan["compute_optimal"]:
        budget = f"{optimal['budget_flops']:.2e}"
        yield f"compute-optimal (Hoffmann et al. 2022)     for this model          for {budget} FLOPs"
        for number in (1, 2, 3):
            row = optimal[f"approach {number}"]
            best = f"{amount(row['budget_parameters']):>8} parameters on {amount(row['budget_tokens'])} tokens"
            yield f"  approach {number}:  {amount(row['model_tokens']):>8} tokens, {row['model_flops']:.2e} FLOPs;  {best}"
    else:
        yield "an adopted model: no pretraining is planned (set pretrain.tokens to continue it on data.corpus)"
    if served := plan["served"]:
        yield ""
        yield f"of one loss, {served['loss']:.3f} nats per token, with {amount(served['served_tokens'])} tokens in use"
        for name in ("this model", "compute-optimal", "cheapest"):
            row = served[name]
            more = f", {amount(row['kwh'])} kWh" if "kwh" in row else ""
            more += f", cost {amount(row['cost'])}" if "cost" in row else ""
            yield (
                f"  {name:<16} {amount(row['parameters']):>8} parameters on {amount(row['tokens'])} tokens: {row['train_flops']:.2e} FLOPs "
                f"to train, {row['served_flops']:.2e} in use: {amount(row['gpu_hours'])} GPU hours{more}"
            )
    largest, fewest = plan["largest"], plan["fewest_gpus"]
    needs = f"{largest['stage']} needs {gigabytes(largest['bytes'])} of {gigabytes(plan['room_bytes'])} GB per GPU"
    why = "no number of GPUs does with these settings" if fewest is None else f"the fewest GPUs that do: {fewest}"
    hints = " or ".join(plan["suggestions"]) or "a smaller model, or GPUs with more memory"
    verdict = f"fits: of all stages {needs}; {why}" if plan["fits"] else f"does not fit: {needs}; {why}; try {hints}"
    yield from ("", verdict)


def gigabytes(count: float) -> str:
    """Bytes in units of 10^9, with at least three digits."""
    value = count / GB
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def amount(number: float) -> str:
    """1.32 B, 117 M, 26.3 B, 3.7 T."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}" if number < 1000 * size else f"{number / size:,.0f} {unit}"
    return f"{number:,.0f}"


def format_hours(hours: float) -> str:
    if hours >= 1:
        return f"{hours / 24:,.1f} days" if hours >= 48 else f"{hours:.1f} hours"
    return f"{hours * 60:.1f} minutes" if hours * 60 >= 1 else "under a minute"
