"""Golden trajectories: five steps of SFT, reward model and PPO on SmolLM2 through the command line, against recorded numbers.

A change in a library's numerics or in ours shows here. The numbers are in tests/golden/smollm2.json; after a change that
is meant to move them, GOLDEN_WRITE=1 records new ones.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parents[1] / "golden"
NUMBERS = GOLDEN / "smollm2.json"
# Room for float32 sums in another order. Adam magnifies rounding from step to step, and PPO's figures are differences of log-probs.
RELATIVE = {"sft": 1e-3, "reward": 1e-3, "ppo": 1e-2}
ABSOLUTE = 2e-4
# Of every machine its own, or no result.
CHANGING = ("time/", "progress/", "memory/", "optim/lr", "rollout/tokens_per_s")
SETTINGS = [
    "run=golden", "device=cpu", "threads=1", "precision=float32", "tracking=jsonl", "tracking.log_every=1", "data.dev=0", "data.test=0",
    f"data.demonstrations='{GOLDEN}/demonstrations.jsonl'", f"data.comparisons='{GOLDEN}/comparisons.jsonl'",
    "sft.epochs=1", "sft.batch_size=2", "sft.dropout=0", "reward.batch_prompts=2", "reward.calibration_samples=4", "reward.lr=2e-5",
    "rollout.max_new_tokens=8", "ppo.episodes=20", "ppo.episodes_per_update=4", "ppo.minibatches=2", "ppo.micro_batch_episodes=2",
    "ppo.eval_every=0", "ppo.warmup_fraction=0",
]  # fmt: skip


def trajectory(folder: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        for name, value in json.loads(line).items():
            if isinstance(value, float) and not name.startswith(CHANGING):
                found.setdefault(name, []).append(value)
    return found


def differences(stage: str, expected: dict[str, list[float]], measured: dict[str, list[float]]) -> list[str]:
    said = [f"{name}: only on one side" for name in sorted(expected.keys() ^ measured.keys())]
    for name in sorted(expected.keys() & measured.keys()):
        wanted, came = expected[name], measured[name]
        apart = [abs(w - c) > ABSOLUTE + RELATIVE[stage] * abs(w) for w, c in zip(wanted, came, strict=False)]
        if len(wanted) != len(came) or any(apart):
            said.append(f"{name}: recorded {wanted}, measured {came}")
    return said


@pytest.mark.long
def test_five_steps_of_each_stage_are_as_recorded(tmp_path, smollm2):
    arguments = [*SETTINGS, f"runs_dir='{tmp_path}'", f"model.pretrained='{smollm2}'"]
    measured: dict[str, Any] = {}
    for stage in ("tokenizer", "pretrain", "sft", "reward", "ppo"):
        command = [sys.executable, "-m", "rlhf", stage, "--shared-settings", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"RLHF_PROGRESS": "off"})
        assert done.returncode == 0, done.stderr
        if stage in RELATIVE:
            record = json.loads((tmp_path / "golden" / stage / "stage.json").read_text())
            assert record["peak_rss_mb"] / 1e3 == pytest.approx(record["memory"]["needs_gb"], rel=0.2), stage
            measured[stage] = trajectory(tmp_path / "golden" / stage)
    if os.environ.get("GOLDEN_WRITE"):
        NUMBERS.write_text(json.dumps(measured, indent=1) + "\n")
    expected = json.loads(NUMBERS.read_text())
    assert [f"{name}/{x}" for name in expected for x in differences(name, expected[name], measured[name])] == []


def test_the_recorded_trajectories_are_whole_and_any_change_beyond_rounding_is_seen():
    expected = json.loads(NUMBERS.read_text())
    named = expected["sft"] | expected["reward"] | expected["ppo"]
    for name in ("sft/loss", "reward/loss", "objective/kl", "loss/value_avg"):
        assert len(named[name]) == 5
    for stage, recorded in expected.items():
        assert differences(stage, recorded, recorded) == []
        for name, values in recorded.items():
            moved = recorded | {name: [value + 1e-3 + 0.02 * abs(value) for value in values]}
            assert [line.partition(":")[0] for line in differences(stage, recorded, moved)] == [name]
