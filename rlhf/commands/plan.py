"""`rlhf plan`: what a configuration needs on a cluster, as a table, and as plan.json with out=….

Nothing is run or loaded: the numbers are closed formulas (`rlhf.planning`), explained in docs/planning.md.
"""

from pathlib import Path
from typing import Any

from rlhf.config import PlanConfig
from rlhf.errors import UserError
from rlhf.planning.plan import GB, PARTS, make_plan, peak_bytes
from rlhf.system.files import write_json
from rlhf.system.terminal import say


def run(config: PlanConfig) -> None:
    """Print the plan, and write it to `out` if that is set. Raises: UserError if it cannot be written."""
    plan = make_plan(config)
    for line in (*describe(plan), "", verdict(plan)):
        say(line)
    if config.out is not None:
        path = write_plan(plan, Path(config.out), config.overwrite)
        say(f"written to {path}")


def write_plan(plan: dict[str, Any], out: Path, overwrite: bool) -> Path:
    """Write `plan` as JSON to a file, or as plan.json into a folder, atomically.

    Raises: UserError if the folder is missing, the file exists, or the disk is full or not writable.
    """
    path = out if out.suffix == ".json" else out / "plan.json"
    if not path.parent.is_dir():
        raise UserError(f"out={out}: there is no folder {path.parent}: create it, or choose another out=…")
    if path.exists() and not overwrite:
        raise UserError(f"{path}: exists already: choose another out=…, or add overwrite=true")
    write_json(path, plan)
    return path


def describe(plan: dict[str, Any]) -> list[str]:
    """The lines above the verdict."""
    return [*_heading(plan), "", *_memory(plan), "", *_time(plan), "", *_optimal(plan)]


def verdict(plan: dict[str, Any]) -> str:
    """One line: whether every stage fits, which one needs most, and which overrides would fit."""
    stage, most, room = plan["largest"]["stage"], plan["largest"]["bytes"], plan["room_bytes"]
    needs = f"{stage} needs {gigabytes(most)} of {gigabytes(room)} GB per GPU"
    fewest = plan["fewest_gpus"]
    if plan["fits"]:
        return f"fits: of all stages {needs}; the fewest GPUs that do: {fewest}"
    why = "no number of GPUs does with these settings" if fewest is None else f"the fewest GPUs that do: {fewest}"
    hints = " or ".join(plan["suggestions"]) or "smaller micro-batches, or GPUs with more memory"
    return f"does not fit: {needs}; {why}; try {hints}"


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


def duration(hours: float) -> str:
    """Hours in a convenient unit."""
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    return f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"


def _heading(plan: dict[str, Any]) -> list[str]:
    shape, setup, counts = plan["shape"], plan["setup"], plan["parameters"]
    return [
        f"model    {shape['n_layer']} blocks, width {shape['width']}, {shape['n_head']} heads, context "
        f"{shape['context_length']}, vocabulary {shape['vocab_size']:,}: {counts['policy']:,} parameters "
        f"(reward model {counts['reward']:,}, critic {counts['critic']:,})",
        f"machine  {setup['gpus']} GPU{'s' if setup['gpus'] > 1 else ''} with {setup['gpu_memory_gb']:g} GB, "
        f"{setup['memory_margin']:.0%} of it kept free; "
        f"{setup['peak_tflops']:g} TFLOPS at {setup['mfu']:.0%} MFU; {setup['bandwidth_gb']:g} GB/s",
        f"setting  deepspeed={setup['deepspeed']}, {setup['dtype']}, AdamW, gradient checkpointing "
        f"{'on' if setup['checkpointing'] else 'off'}"
        + (f"; lora.rank={setup['lora_rank']} counts as training of all weights" if setup["lora_rank"] else ""),
    ]


def _memory(plan: dict[str, Any]) -> list[str]:
    used = [part for part in PARTS if any(parts[part] for parts in plan["bytes"].values())]
    columns = ["rows", *used, "sum", *(["host"] if any(parts["host"] for parts in plan["bytes"].values()) else [])]
    widths = [max(7, len(name)) for name in columns]
    lines = [
        "GB per GPU   " + "  ".join(f"{name:>{width}}" for name, width in zip(columns, widths, strict=True)) + "  fits"
    ]
    for stage, parts in plan["bytes"].items():
        most = peak_bytes(parts)
        cells = [str(plan["micro_batches"][stage]), *(gigabytes(parts[part]) for part in used), gigabytes(most)]
        cells += [gigabytes(parts["host"])] if "host" in columns else []
        text = "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        lines.append(f"{stage:<12} {text}  {'yes' if most <= plan['room_bytes'] else 'NO'}")
    return lines


def _time(plan: dict[str, Any]) -> list[str]:
    lines = [f"{'time':<12} {'FLOPs':>9}"]
    for name, figures in plan["time"].items():
        lines.append(f"{name:<12} {figures['flops']:>9.2e}  {duration(figures['hours'])}")
    whole = sum(figures["hours"] for name, figures in plan["time"].items() if name.startswith("ppo"))
    return [*lines, f"{'ppo in all':<12} {'':>9}  {duration(whole)}"]


def _optimal(plan: dict[str, Any]) -> list[str]:
    optimal = plan["compute_optimal"]
    if not optimal:
        return ["an adopted model: no pretraining is planned (set pretrain.tokens to continue it on data.corpus)"]
    lines = [
        f"compute-optimal (Hoffmann et al. 2022)     for this model          for {optimal['budget_flops']:.2e} FLOPs"
    ]
    for number in (1, 2, 3):
        figures = optimal[f"approach {number}"]
        lines.append(
            f"  approach {number}:  {amount(figures['model_tokens']):>8} tokens, {figures['model_flops']:.2e} FLOPs;  "
            f"{amount(figures['budget_parameters']):>8} parameters on {amount(figures['budget_tokens'])} tokens"
        )
    return lines
