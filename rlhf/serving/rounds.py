"""Labelling rounds on the manager's page: `rlhf pipeline` of one run, started with its own settings, and what a round's labels changed.

The browser chooses neither the command nor a word of it: the operator names the run with `serve.pipeline`.
"""

import math
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from fastapi import APIRouter

from rlhf.config import Config
from rlhf.data.encoding import join_rankings
from rlhf.data.reading import load_comparisons
from rlhf.data.records import Ranking
from rlhf.evaluation.scoring import held_out_labelers, judged_pairs, load_judge
from rlhf.evaluation.statistics import flatten, split_like
from rlhf.model.interface import score
from rlhf.recipe import ROUND_STAGES
from rlhf.runs.folders import is_complete, read_stage, rounds_before
from rlhf.runs.sources import in_split
from rlhf.serving.security import RefusedError
from rlhf.system.files import read_json, write_json

SHOWN_PAIRS = 100  # the most surprising ones
TAIL_BYTES = 4096  # of the pipeline's output


class Rounds:
    """The rounds of `rlhf pipeline run=<name>`; the labels of this server are those of the run in `folder`."""

    def __init__(self, config: Config, folder: Path, name: str):
        self.config, self.folder, self.name = config, folder, name
        self.log = folder / "serve" / "pipeline.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()

    def start(self) -> None:
        """Run the pipeline. Raises: RefusedError if it runs already."""
        with self.lock:
            if self.process is not None and self.process.poll() is None:
                raise RefusedError(409, "the pipeline is running")
            command = ["pipeline", f"run='{self.name}'", f"runs_dir='{self.config.runs_dir}'"]
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "rlhf", *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )

    def stop(self) -> None:
        """End the pipeline with the server; the next call resumes it."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait()

    def state(self) -> dict[str, Any]:
        """Whether it runs, its exit code, the last line that it printed, and the stages of this round with their states."""
        code = None if self.process is None else self.process.poll()
        said = b""
        if self.log.exists():
            with self.log.open("rb") as log:
                log.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
                said = log.read()
        lines = said.decode("utf-8", "replace").replace("\r", "\n").strip().splitlines()
        stages = {stage: (read_stage(self.folder / stage) or {}).get("status", "waits") for stage in ROUND_STAGES}
        running = self.process is not None and code is None
        return {
            "run": self.name,
            "running": running,
            "code": code,
            "last": lines[-1] if lines else "",
            "stages": stages,
        }

    def effect(self) -> dict[str, Any] | None:
        """`compare_rounds`, made once per reward model; None before the reward models of two rounds are complete."""
        earlier = rounds_before(self.folder)[:1]
        if not earlier or not all(is_complete(folder / "reward") for folder in (self.folder, *earlier)):
            return None
        made = [(read_stage(folder / "reward") or {})["hash"] for folder in (*earlier, self.folder)]
        path = self.folder / "serve" / "round.json"
        with self.lock:
            known = read_json(path) if path.exists() else {}
            if known.get("rewards") != made:
                known = {"rewards": made} | compare_rounds(self.config, earlier[0], self.folder)
                write_json(path, known)
        return known


def make_round_router(rounds: Rounds) -> APIRouter:
    """The manager's: the state and the effect of this round, and the start of the pipeline."""
    router = APIRouter(prefix="/api/manage/round")

    @router.get("")
    def found() -> dict[str, Any]:
        state = rounds.state()
        return state | {"effect": None if state["running"] else rounds.effect()}

    @router.post("")
    def start() -> dict[str, Any]:
        rounds.start()
        return rounds.state()

    return router


def compare_rounds(config: Config, before: Path, after: Path) -> dict[str, Any]:
    """The reward models of two rounds on the same pairs.

    Returns {"held_out": {"before", "after": share of dev pairs ordered as labelers did, "pairs"}, "new": {how the prompts were chosen:
    {"before", "pairs"}} of the later round's own training labels, which the earlier model has not seen, and "pairs": the most surprising
    ones, each with the raw score difference d = r_better - r_worse and the surprise -log sigmoid(d) in nats, before and after}.
    """
    records = load_comparisons(str(after / "label" / "comparisons.jsonl"))[0]
    strangers = held_out_labelers(config, records)
    records = [record for record in records if record.labeler not in strangers]
    earlier = before / "label" / "comparisons.jsonl"
    source = str(earlier) if earlier.exists() else config.data.comparisons
    known = {_key(record) for record in load_comparisons(source)[0]} if source else set()
    new = [record for record in in_split(config, records, "train") if _key(record) not in known]
    groups = {"held_out": in_split(config, records, "dev")}
    for record in new:
        groups.setdefault(str(record.metadata.get("chosen", "all")), []).append(record)
    judges = [load_judge(config, str(folder), "serve.pipeline", torch.device("cpu"))[1:] for folder in (before, after)]
    shares: dict[str, dict[str, Any]] = {}
    pairs: list[dict[str, Any]] = []
    for name, rankings in groups.items():
        margins, labelers = [], []
        for model, encode in judges:
            items, _ = join_rankings(rankings, encode)
            rows = [item.rows for item in items]
            raw = split_like(score(model, flatten(rows), calibrated=False).tolist(), rows)
            judged = judged_pairs(items, raw)
            margins.append([pair.margin for pair in judged])
            labelers = [(items[pair.item], pair.labeler) for pair in judged]
        wins = [sum((d > 0) + (d == 0) / 2 for d in of) / len(of) if of else None for of in margins]
        shares[name] = {"before": wins[0], "after": wins[1] if name == "held_out" else None, "pairs": len(labelers)}
        texts = [(item, pair) for item in items for judgement in item.judgements for pair in judgement.pairs]
        for (item, (better, worse)), (_, labeler), *d in zip(texts, labelers, *margins, strict=True):
            pairs.append({
                "group": name, "labeler": labeler, "prompt": item.record.prompt[-1].content if item.record else "",
                "better": item.answers[better][0], "worse": item.answers[worse][0],
                "difference": d, "surprise": [math.log1p(math.exp(-abs(x))) + max(0.0, -x) for x in d],
            })  # fmt: skip
    pairs.sort(key=lambda pair: -pair["surprise"][1])
    held_out = shares.pop("held_out")
    return {"held_out": held_out, "new": shares, "pairs": pairs[:SHOWN_PAIRS]}


def _key(record: Ranking) -> tuple[str, str | None]:
    return record.id, record.labeler
