"""Pretraining, SFT, the reward model and PPO by two processes, plainly and under ZeRO-1, 2 and 3, compute what one process computes,
in shares, and resume. Offload, whose optimizer is compiled at first use, in long tests only.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf.commands.launch import import_once, run_processes
from rlhf.planning.formulas import ELEMENT, model_state_bytes
from rlhf.runs.folders import is_complete, read_stage
from rlhf.runs.run_files import read_jsonl
from rlhf.stages import ppo, reward
from tests.stages.conftest import ONE_LABELER, PRELOADED, Run, run_ranks, stopped_in_second
from tests.stages.sharding_ranks import draw_head_alike

# <stage>, <ways>: a run is begun by two processes in the first way, cut off, and resumed in the last one if there are several.
# All stages run on the same engine; the other ways in a long test. "alone" is one process without ZeRO.
QUICK = (
    ("pretrain", "zero3", "zero3"), ("sft", "zero2", "zero2"), ("reward", "zero2"), ("reward", "zero3"), ("ppo", "none"),
    ("ppo", "zero1", "zero3"), ("ppo", "alone", "zero2"), ("ppo", "zero3", "alone"),
)  # fmt: skip
REST = (
    *((stage, way) for stage in ("pretrain", "sft", "reward") for way in ("none", "zero1", "zero2", "zero3")),
    *(("ppo", way) for way in ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")),
)
# Six steps each. SFT's last batch is smaller (400 rows: 4 x 90 + 40), and 40 rows leave 8 over micro-batches of 2 x 16; of 7 prompts
# and 13 episodes one process has one more. Updates that begin with the same policy but for rounding draw the same responses, unless a
# random number falls between the two roundings of a token's bound: with seed 0 one of 26 responses does so in the third update.
ADAMW = "pretrain.optimizer=adamw"
SETTINGS = {
    "pretrain": ["pretrain.tokens=12288", "pretrain.eval_sequences=8", "pretrain.micro_batch_sequences=4", ADAMW],
    "sft": ["sft.epochs=1", "sft.batch_size=90", "sft.micro_batch_size=16", "sft.dropout=0"],
    "reward": [
        "reward.epochs=2", "reward.batch_prompts=7", "reward.micro_batch_responses=12", "reward.audit=0",
        "reward.calibration_samples=16", *ONE_LABELER,
    ],
    "ppo": [
        "seed=11", "ppo.critic_warmup_updates=1", "ppo.episodes_per_update=26", "ppo.episodes=78", "ppo.minibatches=2", "ppo.epochs=1",
        "ppo.micro_batch_episodes=3", "ppo.clip_range=0.01", "ppo.value_clip_range=0.01", "ppo.ema_decay=0.9", "ppo.max_grad_norm=1e9",
        "sharding.bucket_elements=100000", "sharding.persistence_threshold=200",
    ],
}  # fmt: skip
SHARDING = "sharding.persistence_threshold=0"
OVERLAP = {stage: ["sharding.overlap=true"] for stage in ("pretrain", "sft")}
EVALUATION = ["evaluate.prompts=8", "evaluate.samples=1", "evaluate.best_of=2"]
CUT_AT = {"pretrain": 3, "sft": 3, "ppo": 2}
ADAPTERS = ["lora.rank=2", "lora.alpha=8", "sft.lr=1e-2", "sft.batch_size=40", "data.limit=120"]  # three steps
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
    return f"{stage}:{saves}:{' '.join(run.words(SHARDING, *SETTINGS.get(stage, []), *cut, *more))}"


def metrics(run: Run, stage: str) -> list[dict[str, float]]:
    """Of each step, what does not depend on time; not the root of a KL that is rounding, nor the mean of scores, which may drift."""
    kinds = (f"{stage}/loss", "objective/", "loss/", "policy/", "val/", "eval/dev/", "optim/grad_norm")
    rows = [r for r in read_jsonl(run.folder / stage / "metrics.jsonl") if f"{stage}/loss" in r or "objective/kl" in r]
    assert [r["progress/step"] for r in rows] == list(range(1, len(rows) + 1)), "no step missing, none twice"
    return [{n: x for n, x in r.items() if n.startswith(kinds) and n != "objective/sqrt_kl"} for r in rows]


def weights(run: Run, stage: str, folder: str = "model") -> dict[str, torch.Tensor]:
    return load_file(run.folder / stage / folder / "model.safetensors")


def alike(a: torch.Tensor, b: torch.Tensor, stage: str, tolerance: float) -> bool:
    """AdamW divides by the gradient's own size, so that where it is 0 but for rounding a step's sign is chance: of the reward model
    and of PPO one element in a thousand may be a step off.
    """
    near, chance = (tolerance / 5, 1e-3) if stage in ("reward", "ppo") else (tolerance, 0.0)
    gap = (a - b).abs()
    return bool((gap > near).float().mean() <= chance and gap.max() <= max(near, chance))


def assert_same(one: Run, two: Run, stage: str, tolerance: float) -> None:
    for mine, theirs in zip(metrics(two, stage), metrics(one, stage), strict=True):
        assert mine == pytest.approx(theirs, abs=tolerance, rel=tolerance)
    for folder in ("model", "last") if stage == "ppo" else ("model",):  # PPO's model is the average
        a, b = weights(one, stage, folder), weights(two, stage, folder)
        assert a.keys() == b.keys()
        for name in a.keys() - {"head.bias"}:  # of the reward model: its gradient is 0 but for rounding
            assert a[name].dtype == b[name].dtype == torch.float32
            assert alike(a[name], b[name], stage, tolerance), name
    summaries = [read_stage(run.folder / stage)["summary"] for run in (one, two)]
    assert summaries[1] == pytest.approx(summaries[0], abs=1e-3)


@pytest.fixture(scope="module")
def single(gold_run, tmp_path_factory) -> dict[str, Run]:
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reward, "make_model", draw_head_alike)
        for stage in SETTINGS:
            made[stage] = gold_run.copy(tmp_path_factory.mktemp("single"), stage, stage)
            made[stage].stage(stage, *SETTINGS[stage])
    return made


@pytest.fixture(scope="module")
def launched(gold_run, tmp_path_factory) -> tuple[dict[tuple[str, ...], Run], dict[tuple[str, ...], Any]]:
    """What QUICK names by two processes, but for what one process does last; and what a process then held.

    ("held", case) is what `measure_state` measured. ("adapters", precision) is SFT of adapters under ZeRO-3.
    """
    folder, runs = tmp_path_factory.mktemp("two"), {}
    jobs = [*(f"held:{case}" for case in HELD), f"loading:{gold_run.folder / 'sft' / 'model'}"]
    keys: list[tuple[str, ...]] = [*(("held", case) for case in HELD), ("loading",)]
    jobs += [f"average:{way}" for way in ("zero1", "zero2", "zero3")]
    keys += [("average",)] * 3
    for stage, *ways in QUICK:
        run = runs[stage, *ways] = gold_run.copy(folder, stage, "-".join((stage, *ways)))
        if ways[0] == "alone":
            with stopped_in_second(ppo, "one_update"):
                run.stage(stage, *SETTINGS[stage])
        for number, way in enumerate(ways, 1):
            if way != "alone":
                saves = CUT_AT[stage] if number < len(ways) else 0
                jobs.append(job(run, stage, saves, f"deepspeed={way}", *OVERLAP.get(stage, [])))
                keys.append((stage, *ways))
    for precision in ("float32", "bfloat16"):
        run = runs["adapters", precision] = gold_run.copy(folder, "sft", f"adapters-{precision}")
        jobs.append(job(run, "sft", 0, *ADAPTERS, "deepspeed=zero3", f"precision={precision}"))
        keys.append(("adapters", precision))
    run = runs["evaluate",] = gold_run.copy(folder, "evaluate", "evaluate")
    jobs.append(job(run, "evaluate", 0, *EVALUATION, "deepspeed=zero3"))
    keys.append(("evaluate",))
    found = dict(zip(keys, launch(folder / "held.json", 2, jobs), strict=True))
    left = runs["ppo", "zero3", "alone"].folder / "ppo" / "checkpoints"
    return runs, found | {("kinds",): {path.suffix for path in left.rglob("*") if path.is_file()}}


def assert_equal_and_sharded(one: Run, two: Run, stage: str, way: str, held: Any, tolerance: float) -> None:
    assert_same(one, two, stage, tolerance)
    # Adam's moments are half on each process under every ZeRO stage, the weights under ZeRO-3 only, but for the slices' padding.
    expected = None if way in ("none", "alone") else {"weights": 0.5 if "zero3" in way else 1.0, "moments": 0.5}
    assert held == (pytest.approx(expected, rel=0.02) if expected else None)


@pytest.mark.parametrize("case", QUICK, ids="-".join)
def test_two_processes_equal_one(single, launched, case):
    """Losses, gradient norms, weights and held-out loss; of PPO also the responses, the critic's values, the average of the weights and
    what it answers held-out prompts.
    """
    stage, *ways = case
    runs, held = launched
    if ways[-1] == "alone":
        runs[case].stage(stage, *SETTINGS[stage])
    tolerance = 1e-4 if stage in ("reward", "ppo") else 1e-5
    assert_equal_and_sharded(single[stage], runs[case], stage, ways[-1], held[case], tolerance)


def test_what_is_compared_of_ppo(single):
    """Ratios and values are clipped, both models learn, and the average is not the last model."""
    first, *_, last = metrics(single["ppo"], "ppo")
    assert "loss/policy_avg" not in first and last["policy/clipfrac_avg"] > 0.01 and last["val/clipfrac_avg"] > 0
    assert any(not x.equal(weights(single["ppo"], "ppo", "last")[n]) for n, x in weights(single["ppo"], "ppo").items())


def test_an_evaluation_under_zero3_scores_with_whole_models(gold_run, launched, tmp_path):
    one = gold_run.copy(tmp_path, "evaluate", "one")
    one.stage("evaluate", *EVALUATION)
    mine, theirs = (run.results() for run in (launched[0]["evaluate",], one))
    assert mine["best_of_n"] == theirs["best_of_n"] and mine["reward"] == theirs["reward"]


def test_adapters_under_zero3_equal_one_process(gold_run, launched, tmp_path):
    one = gold_run.copy(tmp_path, "sft", "one")
    one.stage("sft", *SETTINGS["sft"], *ADAPTERS)
    assert_same(one, launched[0]["adapters", "float32"], "sft", 1e-4)


def test_a_model_trained_in_bfloat16_is_written_from_exact_weights(gold_run, launched):
    """The base's float32 weights with the adapters added, although ZeRO trains beside weights that bfloat16 has rounded."""
    run = launched[0]["adapters", "bfloat16"]
    base, written = weights(gold_run, "pretrain"), weights(run, "sft")
    adapters = load_file(run.folder / "sft" / "adapters" / "adapter_model.safetensors")
    losses = [
        [row["sft/loss"] for row in metrics(launched[0]["adapters", kind], "sft")] for kind in ("bfloat16", "float32")
    ]
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
GROUPS = "ppo.critic_warmup_updates=0 ppo.advantages=rloo ppo.responses_per_prompt=13"  # a prompt's responses are on one rank
DPO = "dpo.batch_prompts=20 dpo.micro_batch_prompts=5 dpo.epochs=1 dpo.lr=1e-3"


@pytest.mark.long
@pytest.mark.parametrize(("stage", "settings", "ways"), [
    ("pretrain", SWITCH, "none zero2 zero3"), ("pretrain", "model=gpt1-tiny", "zero3"), ("pretrain", "model=palm-tiny", "zero3"),
    ("pretrain", SINUSOIDAL, "zero3"), ("dpo", DPO, "none zero2 zero3"), ("ppo", GROUPS, "none"),
])  # fmt: skip
def test_other_blocks_dpo_and_groups_of_two_processes_equal_one(gold_run, tmp_path, stage, settings, ways):
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
    found = launched[1]["loading",]
    assert found["same"]
    assert found["most"] < 1.3 * found["whole"] / 2 + found["largest"] < found["whole"]


@pytest.mark.long
def test_bytes_held_in_all_ways(tmp_path):
    found = launch(tmp_path / "held.json", 2, [f"held:{case}" for case in MORE_HELD])
    for case, measured in zip(MORE_HELD, found, strict=True):
        assert_fits_the_formula(case, measured)


def test_checkpoints_hold_no_pickles(launched):
    """Reading a pickle can run code. What two processes under ZeRO-3 left is safetensors and JSON."""
    assert launched[1]["kinds",] == {".safetensors", ".json"}


@pytest.mark.long
@pytest.mark.parametrize("way", ["zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"])
def test_resume_on_another_number_of_processes(single, gold_run, tmp_path, way):
    fewer, more = (gold_run.copy(tmp_path, "pretrain", name) for name in ("fewer", "more"))
    launch(tmp_path / "held.json", 1, [job(more, "pretrain", CUT_AT["pretrain"], f"deepspeed={way}")])
    two = [job(more, "pretrain", 0, f"deepspeed={way}"), job(fewer, "pretrain", CUT_AT["pretrain"], f"deepspeed={way}")]
    launch(tmp_path / "held.json", 2, two)
    launch(tmp_path / "held.json", 1, [job(fewer, "pretrain", 0, f"deepspeed={way}")])
    for run in (fewer, more):
        assert_same(single["pretrain"], run, "pretrain", 1e-4 if "offload" in way else 1e-5)


def test_one_process_needs_no_launcher(gold_run, tmp_path):
    run = gold_run.copy(tmp_path, "reward", "alone")
    words = run.words("deepspeed=zero2", "reward.audit=0", *ONE_LABELER)
    import_once(PRELOADED)
    assert run_processes(["reward", "--shared-settings", *words], threads=1) == 0
    assert is_complete(run.folder / "reward")
