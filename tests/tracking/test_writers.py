"""The writers: names are checked, a resume repeats nothing, and W&B can fail without stopping anything."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from rlhf.errors import UserError
from rlhf.runs.run_files import read_jsonl
from rlhf.runs.trackers import make_tracker


def tracker(folder: Path, kind: Any = "jsonl", resume_step: int = 0) -> Any:
    return make_tracker(kind, folder=folder, run="r", stage="ppo", config={"seed": 1}, resume_step=resume_step)


def lines(path: Path) -> list[dict[str, Any]]:
    """Strict reading: every line must be JSON without NaN."""

    def refuse(constant: str) -> float:
        raise AssertionError(f"not JSON: {constant}")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_has_the_axes_and_is_there_at_once(tmp_path: Path) -> None:
    with tracker(tmp_path) as writer:
        writer.log({"objective/kl": 2.25}, step=3, episodes=96, tokens=4096)
        (row,) = lines(tmp_path / "metrics.jsonl")  # before finish: flushed
    assert row.pop("time/elapsed_s") >= 0
    assert row == {
        "progress/step": 3,
        "progress/episodes": 96,
        "progress/tokens": 4096,
        "objective/kl": 2.25,
        "objective/sqrt_kl": 1.5,
    }


@pytest.mark.parametrize("kind", ["jsonl", "off"])
def test_an_unknown_name_is_refused_and_writes_nothing(tmp_path: Path, kind: str) -> None:
    with tracker(tmp_path, kind) as writer:
        with pytest.raises(ValueError, match=r"unknown metric 'objective/klx'"):
            writer.log({"objective/kl": 1.0, "objective/klx": 1.0}, step=1)
        with pytest.raises(ValueError, match="unknown metric"):
            writer.summary({"final": 1.0})
    assert list(read_jsonl(tmp_path / "metrics.jsonl")) == []


def test_values_that_are_not_finite_become_null_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), tracker(tmp_path) as writer:
        writer.log({"loss/policy_avg": math.nan, "objective/kl": 1.0}, step=1)
        writer.log({"loss/policy_avg": math.inf, "objective/kl": 1.0}, step=2)
        writer.samples(2, [{"id": "p", "prompt": "a", "response": "b", "score": math.nan}])
    rows = lines(tmp_path / "metrics.jsonl")
    assert [row["loss/policy_avg"] for row in rows] == [None, None]
    assert [row["objective/kl"] for row in rows] == [1.0, 1.0]
    assert lines(tmp_path / "samples.jsonl")[0]["score"] is None
    assert sum("loss/policy_avg" in record.getMessage() for record in caplog.records) == 1


def test_resume_repeats_no_step_and_loses_none(tmp_path: Path) -> None:
    with tracker(tmp_path) as writer:
        for step in range(6):
            writer.log({"objective/kl": float(step)}, step=step)
            writer.samples(step, [{"id": "p", "prompt": "a", "response": str(step)}])
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"progress/step": 6, "step": 6, "objec')  # the process died in the middle of a line
    with tracker(tmp_path, resume_step=3) as writer:
        for step in range(4, 7):
            writer.log({"objective/kl": 10.0 + step}, step=step)
            writer.samples(step, [{"id": "p", "prompt": "a", "response": "again"}])
    rows = lines(tmp_path / "metrics.jsonl")
    assert [row["progress/step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert [row["objective/kl"] for row in rows] == [0, 1, 2, 3, 14, 15, 16]
    elapsed = [row["time/elapsed_s"] for row in rows]
    assert elapsed == sorted(elapsed)
    assert [row["response"] for row in lines(tmp_path / "samples.jsonl")] == list("0123") + ["again"] * 3


def test_the_clock_goes_on_over_a_resume(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"progress/step": 2, "time/elapsed_s": 500.0}\n')
    with tracker(tmp_path, resume_step=2) as writer:
        writer.log({"objective/kl": 0.0}, step=3)
    assert lines(tmp_path / "metrics.jsonl")[-1]["time/elapsed_s"] >= 500.0


def test_a_fresh_start_leaves_nothing_of_the_old_run(tmp_path: Path) -> None:
    for _ in range(2):
        with tracker(tmp_path) as writer:
            writer.log({"objective/kl": 0.0}, step=0)
            writer.samples(0, [{"id": "p", "prompt": "a", "response": "b"}])
    assert len(lines(tmp_path / "metrics.jsonl")) == len(lines(tmp_path / "samples.jsonl")) == 1


def test_samples_keep_their_text(tmp_path: Path) -> None:
    text = "naïve\nline \u2028 <script> \ud800 end"  # a lone surrogate has no UTF-8 form
    with tracker(tmp_path) as writer:
        writer.samples(4, [{"id": "p", "prompt": text, "response": text, "score": 1, "gold": {"total": 0.5}}])
        with pytest.raises(ValueError, match="a row lacks prompt, response"):
            writer.samples(4, [{"id": "p"}])
    (row,) = list(read_jsonl(tmp_path / "samples.jsonl"))
    assert row == {
        "step": 4,
        "id": "p",
        "prompt": text,
        "response": text,
        "score": 1,
        "kl": None,
        "gold": {"total": 0.5},
    }


def test_what_was_said_after_the_checkpoint_is_not_said_twice(tmp_path: Path) -> None:
    """Killed after the held-out figures of the last step, whose checkpoint it resumes from: they come once."""
    shown = [{"id": "p", "prompt": "a", "response": "b"}]
    for resume_step in (0, 2, 2):
        with tracker(tmp_path, resume_step=resume_step) as writer:
            if resume_step == 0:
                writer.log({"optim/lr": 0.1}, step=1, episodes=8)
                writer.log({"optim/lr": 0.2}, step=2, episodes=16)
            writer.log({"eval/dev/kl": 0.3}, step=2)
            writer.samples(2, shown)
            if resume_step:
                writer.log({"eval/dev/kl": 0.3, "eval/dev/scores": 1.0}, step=2)
    rows = lines(tmp_path / "metrics.jsonl")
    assert [sorted(n for n in row if not n.startswith(("progress", "time"))) for row in rows] == [
        ["optim/lr"],
        ["optim/lr"],
        ["eval/dev/kl"],
        ["eval/dev/scores"],
    ]
    assert [row["progress/episodes"] for row in rows] == [8, 16, 16, 16], "each stands where its step does"
    assert len(lines(tmp_path / "samples.jsonl")) == 1


def test_off_writes_numbers_and_no_text(tmp_path: Path) -> None:
    with tracker(tmp_path / "stage", "off") as writer:
        writer.log({"objective/kl": 0.5}, step=0)
        writer.samples(0, [{"id": "p", "prompt": "a", "response": "b"}])
    assert [path.name for path in (tmp_path / "stage").iterdir()] == ["metrics.jsonl"]
    assert next(iter(read_jsonl(tmp_path / "stage" / "metrics.jsonl")))["objective/kl"] == 0.5


def test_a_silent_one_writes_nothing(tmp_path: Path) -> None:
    with tracker(tmp_path / "stage", "silent") as writer:
        writer.log({"objective/kl": 0.0}, step=0)
        writer.samples(0, [{"id": "p", "prompt": "a", "response": "b"}])
    assert not (tmp_path / "stage").exists()


def test_an_unknown_kind_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="got 'wandbb', want wandb, tensorboard, jsonl or off"):
        tracker(tmp_path, "wandbb")


def test_a_second_line_of_a_step_has_the_same_axes(tmp_path: Path) -> None:
    with tracker(tmp_path) as writer:
        writer.log({"objective/kl": 4.0}, step=1, episodes=64, tokens=9)
        writer.log({"eval/dev/loss": 1.0}, step=1)
        writer.log({"eval/dev/loss": 1.0}, step=2)
    first, second, third = lines(tmp_path / "metrics.jsonl")
    assert first["objective/sqrt_kl"] == 2.0  # sqrt(4)
    assert (second["progress/episodes"], second["progress/tokens"]) == (64, 9)
    assert "progress/episodes" not in third


def test_a_negative_kl_estimate_has_no_root(tmp_path: Path) -> None:
    with tracker(tmp_path) as writer:
        writer.log({"objective/kl": -0.01}, step=1)
        writer.log({"objective/kl": math.nan}, step=2)
    assert [row["objective/sqrt_kl"] for row in lines(tmp_path / "metrics.jsonl")] == [0.0, None]


def test_tokens_and_their_kl_go_together(tmp_path: Path) -> None:
    row = {
        "id": "p",
        "prompt": "a",
        "response": "b c",
        "tokens": ["b", " c"],
        "kl_tokens": [0.5, math.nan],
        "parts": {"reward_model": 1.5},
        "length": 2,
    }
    with tracker(tmp_path) as writer:
        writer.samples(0, [row])
        with pytest.raises(ValueError, match="tokens and kl_tokens must be as many"):
            writer.samples(1, [row | {"tokens": ["b"]}])
    (told,) = lines(tmp_path / "samples.jsonl")
    assert (told["tokens"], told["kl_tokens"], told["parts"]) == (["b", " c"], [0.5, None], {"reward_model": 1.5})
