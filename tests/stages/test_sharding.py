"""Pretraining and SFT by two processes, plainly and under ZeRO-1, 2 and 3, compute what one process computes, and resume."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf.planning.formulas import ELEMENT, model_state_bytes
from rlhf.runs.folders import read_stage
from rlhf.runs.run_files import read_jsonl

from .conftest import Run, run_ranks

# Both stages run on the same engine: two ways by one of them each, the others in a long test. Without ZeRO, and ZeRO-1: test_zero.py.
QUICK = (("pretrain", "zero3"), ("sft", "zero2"))
REST = (
    ("pretrain", "none"), ("pretrain", "zero1"), ("pretrain", "zero2"), ("sft", "none"), ("sft", "zero1"), ("sft", "zero3"),
)  # fmt: skip
# Six steps each. SFT's last batch is smaller (400 rows: 4 x 90 + 40), and 40 rows leave 8 over micro-batches of 2 x 16.
ADAMW = "pretrain.optimizer=adamw"
SETTINGS = {
    "pretrain": ["pretrain.tokens=12288", "pretrain.eval_sequences=8", "pretrain.micro_batch_sequences=4", ADAMW],
    "sft": ["sft.epochs=1", "sft.batch_size=90", "sft.micro_batch_size=16", "sft.dropout=0"],
}
SHARDING = "sharding.persistence_threshold=0"
OVERLAP = {name: ["sharding.overlap=true"] for name in ("zero2", "zero3")}
CUT_AT = 3
ADAPTERS = ["lora.rank=2", "lora.alpha=8", "sft.lr=1e-2"]
RESUMED = (("pretrain", "zero3"), ("sft", "zero2"))
# Of the bytes that a process holds: <deepspeed>:<precision>:<persistence threshold>. In the second some tensors stay whole.
HELD = ("zero1:fp32:0", "zero3:bf16:20000")
MORE_HELD = ("zero2:bf16:0", "zero2:fp32:0", "zero3:fp32:0", "zero1:bf16:0", "zero3:bf16:0")


def launch(out: Path, processes: int, jobs: list[str]) -> list[Any]:
    """Run the jobs in one launch; what each left on the devices."""
    run_ranks("sharding_ranks", processes, str(out), *jobs)
    return json.loads(out.read_text(encoding="utf-8"))


def job(run: Run, stage: str, saves: int, *more: str) -> str:
    """A job of sharding_ranks.py, cut off after so many checkpoints (0: not)."""
    cut = ["checkpoints.every_seconds=0"] if saves else []
    return f"{stage}:{saves}:{' '.join(run.words(*SETTINGS.get(stage, []), SHARDING, *cut, *more))}"


def metrics(run: Run, stage: str) -> list[tuple[float, float]]:
    names = [f"{stage}/loss", "optim/grad_norm"]
    rows = [r for r in read_jsonl(run.folder / stage / "metrics.jsonl") if names[0] in r]
    assert [r["progress/step"] for r in rows] == list(range(1, len(rows) + 1)), "no step missing, none twice"
    return [tuple(r[name] for name in names) for r in rows]


def weights(run: Run, stage: str) -> dict[str, torch.Tensor]:
    return load_file(run.folder / stage / "model" / "model.safetensors")


def assert_same(one: Run, two: Run, stage: str, tolerance: float) -> None:
    for mine, theirs in zip(metrics(two, stage), metrics(one, stage), strict=True):
        assert mine == pytest.approx(theirs, abs=tolerance, rel=tolerance)
    a, b = weights(one, stage), weights(two, stage)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype == torch.float32
        assert torch.allclose(a[name], b[name], rtol=0, atol=tolerance), name
    summaries = [read_stage(run.folder / stage)["summary"] for run in (one, two)]
    assert summaries[1] == pytest.approx(summaries[0], abs=tolerance)


@pytest.fixture(scope="module")
def single(gold_run, tmp_path_factory) -> dict[str, Run]:
    """One process's pretraining and SFT."""
    made = {}
    for stage in SETTINGS:
        made[stage] = gold_run.copy(tmp_path_factory.mktemp("single"), stage, stage)
        made[stage].stage(stage, *SETTINGS[stage])
    return made


@pytest.fixture(scope="module")
def launched(gold_run, tmp_path_factory) -> tuple[dict[tuple[str, str], Run], dict[tuple[str, str], Any]]:
    """What QUICK names by two processes, some cut off after step 3 and resumed; and what a process then held.

    ("held", case) is what `measure_state` measured. ("adapters", precision) is SFT of adapters under ZeRO-3.
    ("pretrain", "left") is cut off under ZeRO-3 and left so.
    """
    folder = tmp_path_factory.mktemp("two")
    left = gold_run.copy(folder, "pretrain", "left")
    runs, keys = {("pretrain", "left"): left}, [*(("held", case) for case in HELD), ("loading", ""), ("", "")]
    loading = f"loading:{gold_run.folder / 'sft' / 'model'}"
    jobs = [*(f"held:{case}" for case in HELD), loading, job(left, "pretrain", CUT_AT, "deepspeed=zero3")]
    for stage, way in QUICK:
        run = runs[stage, way] = gold_run.copy(folder, stage, f"{stage}-{way}")
        for saves in (CUT_AT, 0) if (stage, way) in RESUMED else (0,):
            jobs.append(job(run, stage, saves, f"deepspeed={way}", *OVERLAP.get(way, [])))
            keys.append((stage, way))
    for precision in ("float32", "bfloat16"):
        run = runs["adapters", precision] = gold_run.copy(folder, "sft", f"adapters-{precision}")
        jobs.append(job(run, "sft", 0, *ADAPTERS, "deepspeed=zero3", f"precision={precision}"))
        keys.append(("adapters", precision))
    return runs, dict(zip(keys, launch(folder / "held.json", 2, jobs), strict=True))


def assert_equal_and_sharded(one: Run, two: Run, stage: str, way: str, held: Any, tolerance: float) -> None:
    assert_same(one, two, stage, tolerance)
    # Adam's moments are half on each process under every ZeRO stage, the weights under ZeRO-3 only, but for the slices' padding.
    expected = None if way == "none" else {"weights": 0.5 if way == "zero3" else 1.0, "moments": 0.5}
    assert held == (pytest.approx(expected, rel=0.01) if expected else None)


@pytest.mark.parametrize(("stage", "way"), QUICK)
def test_two_processes_equal_one(single, launched, stage, way):
    """Losses, gradient norms, weights and held-out loss; some through a cut-off after step 3."""
    runs, held = launched
    tolerance = 1e-5 if (stage, way) in RESUMED else 1e-4
    assert_equal_and_sharded(single[stage], runs[stage, way], stage, way, held[stage, way], tolerance)


def test_adapters_under_zero3_equal_one_process(gold_run, launched, tmp_path):
    one = gold_run.copy(tmp_path, "sft", "one")
    one.stage("sft", *SETTINGS["sft"], *ADAPTERS)
    assert_same(one, launched[0]["adapters", "float32"], "sft", 1e-4)


def test_a_model_trained_in_bfloat16_is_written_from_exact_weights(gold_run, launched):
    """The base's float32 weights with the adapters added, although ZeRO trains beside weights that bfloat16 has rounded."""
    run = launched[0]["adapters", "bfloat16"]
    base, written = weights(gold_run, "pretrain"), weights(run, "sft")
    adapters = load_file(run.folder / "sft" / "adapters" / "adapter_model.safetensors")
    losses = [[loss for loss, _ in metrics(launched[0]["adapters", kind], "sft")] for kind in ("bfloat16", "float32")]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)  # bfloat16 has 8 bits: products near 10 are in steps of 1/16
    assert all(weight.norm() > 0.01 for name, weight in adapters.items() if "lora_B" in name)
    assert base.keys() == written.keys() and len(adapters) > 8
    for name, weight in base.items():
        low, high = (adapters.get(f"base_model.model.{name.removesuffix('weight')}lora_{part}.weight") for part in "AB")
        change = torch.zeros(()) if low is None else 4 * (high @ low)
        assert torch.allclose(written[name], weight + change, rtol=0, atol=1e-6), name
        assert "norm" in name or not torch.equal(weight.bfloat16().float(), weight)


@pytest.mark.long
def test_two_processes_equal_one_in_the_other_ways(single, gold_run, tmp_path):
    runs = [gold_run.copy(tmp_path, stage, f"{stage}-{way}") for stage, way in REST]
    jobs = [job(run, stage, 0, f"deepspeed={way}") for run, (stage, way) in zip(runs, REST, strict=True)]
    held = launch(tmp_path / "held.json", 2, jobs)
    for run, (stage, way), found in zip(runs, REST, held, strict=True):
        assert_equal_and_sharded(single[stage], run, stage, way, found, 1e-4)


SWITCH = "model=switch-tiny model.experts=8 model.mlp_width=48"  # some experts get no token in a process's forward
SINUSOIDAL = "model=gpt3-tiny model.positions=sinusoidal"
DPO = "dpo.batch_prompts=20 dpo.micro_batch_prompts=5 dpo.epochs=1 dpo.lr=1e-3"


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "settings", "ways"),
    [
        ("pretrain", SWITCH, "none zero2 zero3"), ("pretrain", "model=gpt1-tiny", "zero3"), ("pretrain", "model=palm-tiny", "zero3"),
        ("pretrain", SINUSOIDAL, "zero3"), ("dpo", DPO, "none zero2 zero3"),
    ],
)  # fmt: skip
def test_other_blocks_and_dpo_of_two_processes_equal_one(gold_run, tmp_path, stage, settings, ways):
    def copy(name: str) -> Run:
        return gold_run.copy(tmp_path, "reward" if stage == "dpo" else stage, name)

    one, runs = copy("one"), {way: copy(way) for way in ways.split()}
    one.stage(stage, *SETTINGS.get(stage, []), *settings.split())
    jobs = [job(run, stage, 0, *settings.split(), f"deepspeed={way}") for way, run in runs.items()]
    launch(tmp_path / "held.json", 2, jobs)
    for run in runs.values():
        assert_same(one, run, stage, 1e-4)


def assert_fits_the_formula(case: str, found: dict[str, int]) -> None:
    """The bytes of weights, gradients and optimizer states, part by part, but for padding and DeepSpeed's own small buffers."""
    name, dtype, _ = case.split(":")
    told = model_state_bytes(found["parameters"], 2, int(name[-1]), dtype)
    if name[-1] == "3":  # tensors below DeepSpeed's threshold are whole on every rank, in addition to its share
        told["weights"] += ELEMENT[dtype] * found["persistent"]
    for part in ("weights", "gradients", "optimizer"):
        assert found[part] == pytest.approx(told[part], rel=0.05), f"{case}: {part}"


def test_bytes_held_fit_the_formula(launched):
    _, found = launched
    assert found["held", "zero3:bf16:20000"]["persistent"] > 0
    for case in HELD:
        assert_fits_the_formula(case, found["held", case])


def test_loading_under_zero3_holds_a_share_and_one_weight(launched):
    """Every process at most 1.3 times its half of the weights, and the largest weight whole."""
    found = launched[1]["loading", ""]
    assert found["same"]
    assert found["most"] < 1.3 * found["whole"] / 2 + found["largest"] < found["whole"]


@pytest.mark.long
def test_bytes_held_in_all_ways(tmp_path):
    found = launch(tmp_path / "held.json", 2, [f"held:{case}" for case in MORE_HELD])
    for case, measured in zip(MORE_HELD, found, strict=True):
        assert_fits_the_formula(case, measured)


def test_checkpoints_hold_no_pickles(launched):
    """Reading a pickle can run code. What two processes under ZeRO-3 left is safetensors and JSON."""
    left = launched[0]["pretrain", "left"].folder / "pretrain" / "checkpoints"
    kinds = {path.suffix for path in left.rglob("*") if path.is_file()}
    assert kinds == {".safetensors", ".json"}


def test_resume_by_one_process_without_zero_of_what_two_began(single, launched):
    run = launched[0]["pretrain", "left"]
    run.stage("pretrain", *SETTINGS["pretrain"])
    assert_same(single["pretrain"], run, "pretrain", 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("way", ["zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"])
def test_resume_on_another_number_of_processes(single, gold_run, tmp_path, way):
    """Three steps by two processes and three by one; three by one and three by two."""
    fewer, more = (gold_run.copy(tmp_path, "pretrain", name) for name in ("fewer", "more"))
    launch(tmp_path / "held.json", 1, [job(more, "pretrain", CUT_AT, f"deepspeed={way}")])
    two = [job(more, "pretrain", 0, f"deepspeed={way}"), job(fewer, "pretrain", CUT_AT, f"deepspeed={way}")]
    launch(tmp_path / "held.json", 2, two)
    launch(tmp_path / "held.json", 1, [job(fewer, "pretrain", 0, f"deepspeed={way}")])
    for run in (fewer, more):
        assert_same(single["pretrain"], run, "pretrain", 1e-4 if "offload" in way else 1e-5)
