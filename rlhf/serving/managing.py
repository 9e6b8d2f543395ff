"""The manager's page: labelers who come and go while the server runs, progress, agreement, and decisions where labelers
disagree; and labelling rounds: `rlhf pipeline` of one run, started with its own settings, and what a round's labels
changed.

The browser chooses neither the command nor a word of it: the operator names the run with `serve.pipeline`.
"""

import itertools
import re
import secrets
import subprocess
import sys
import threading
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Annotated, Any, Literal

import numpy as np
import torch
from fastapi import APIRouter, Body
from pydantic import RootModel

from rlhf.config import Config
from rlhf.data.agreement import DECIDES, AgreementCounter
from rlhf.data.encoding import join_rankings
from rlhf.data.reading import load_comparisons
from rlhf.data.records import Ranking, Text, sum_checks
from rlhf.errors import UserError
from rlhf.evaluation.scoring import held_out_labelers, judged_pairs, load_judge, score_each
from rlhf.recipe import ROUND_STAGES
from rlhf.runs.folders import NAME, is_complete, read_stage, rounds_before
from rlhf.runs.sources import in_split
from rlhf.serving.labelling import Labelling, RankingRequest, ordered_pairs, task_body
from rlhf.serving.security import RefusedError
from rlhf.system.files import check_regular, write_json, write_text
from rlhf.system.schemas import read_checked

LINK = re.compile(r"(\S+) \S+#([\w-]{32,})")  # a line of labelers.txt: name, and the address with the secret
FASTEST = 700  # words of responses per minute, about three times what adults read (238, Brysbaert 2019)
FEWEST = (10, 20)  # rankings for a warning of speed, and of a preferred place
Change = Literal["add", "revoke", "pause", "resume"]
Names = Annotated[list[str], Body()]
Instructions = Annotated[Text, Body(embed=True, min_length=1, max_length=100_000)]


class Staff:
    """The labelers of one server, who is paused, and what is assigned to whom; every change is on the disk before it is
    acknowledged.

    labelers.txt and manager.txt contain links with secrets: only their owner may read them. labelers.json and
    assigned.json: what the page changed.
    """

    def __init__(self, folder: Path, names: list[str], address: str, instructions: Path):
        if DECIDES in names:
            raise UserError(f"serve.labelers: {DECIDES!r} is who decides disagreements: choose another name")
        self.folder, self.address, self.path = folder, address, instructions
        remedy = "restore it; without it, labelers who were revoked or paused would come in again"
        by_name, by_task = RootModel[dict[str, Change]], RootModel[dict[str, list[str]]]
        self.changes: dict[str, Any] = read_checked(folder / "labelers.json", by_name, remedy) or {}
        known = [name for name in dict.fromkeys([*names, *self.changes]) if self.changes.get(name) != "revoke"]
        self.secrets = labeler_secrets(folder / "labelers.txt", known, address)
        self.manager = labeler_secrets(folder / "manager.txt", [DECIDES], address)[DECIDES]
        self.assigned: dict[str, list[str]] = {}
        self.assign(read_checked(folder / "assigned.json", by_task, "restore or remove it") or {})

    def change(self, name: str, do: str) -> str | None:
        """Add, revoke, pause or resume a labeler; returns the link of a new one. Raises: RefusedError, UserError."""
        if (do == "add") == (name in self.secrets) or name == DECIDES:
            raise RefusedError(409, f"{name!r} is {'no' if name not in self.secrets else 'a'} labeler", "name")
        links, revoked = self.folder / "labelers.txt", name if do == "revoke" else None
        new = labeler_secrets(links, [name] * (do == "add"), self.address, revoked)
        write_json(self.folder / "labelers.json", self.changes | {name: do})
        self.changes[name] = do
        self.secrets |= new
        if do == "revoke":
            del self.secrets[name]
            self.assign({})
        return f"{self.address}#{new[name]}" if new else None

    def assign(self, assigned: dict[str, list[str]]) -> None:
        """Give tasks to these labelers only, or to all if there are none; who is no labeler any more is left out."""
        before = self.assigned | assigned
        now = {task: [name for name in names if name in self.secrets] for task, names in before.items()}
        if now != self.assigned:
            write_json(self.folder / "assigned.json", now)
            self.assigned.update(now)

    def paused(self, name: str, labelling: Labelling) -> bool:
        """Whether a labeler gets no tasks: paused, or not qualified and not let in by the manager, who resumed the labelling."""
        last = self.changes.get(name)
        return last == "pause" or (last != "resume" and not labelling.qualified(name))


def labeler_secrets(path: Path, names: list[str], address: str, without: str | None = None) -> dict[str, str]:
    """Each labeler's secret, known or new; `without` loses the present one. Raises: UserError for an invalid name or a foreign file."""
    if bad := [name for name in names if not NAME.fullmatch(name)]:
        raise UserError(f"serve.labelers: {bad[0]!r}: want names of letters, digits, '.', '_' and '-'")
    check_regular(path)
    by_name: dict[str, str] = {}
    lines = path.read_text("utf-8", errors="replace").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        if (link := LINK.fullmatch(line)) is None:
            raise UserError(f"{path}: line {number} is no link of `rlhf serve`: move this file away, or correct it")
        by_name[link[1]] = link[2]
    by_name |= {name: secrets.token_urlsafe(24) for name in names if name not in by_name}
    links = (f"{name} {address}#{secret}\n" for name, secret in by_name.items() if name != without)
    write_text(path, "".join(links), mode=0o600)
    return {name: by_name[name] for name in names}


def make_manage_router(labelling: Labelling, staff: Staff, rounds: "Rounds | None" = None) -> APIRouter:
    """The routes of the manager's page; the guard lets nobody else reach them."""
    router = APIRouter(prefix="/api/manage")
    labelling.assigned = staff.assigned

    @router.get("")
    def overview() -> dict[str, Any]:
        return overview_of(labelling, staff)

    @router.get("/task")
    def one_task(name: str) -> dict[str, Any]:
        if (task := labelling.tasks.get(name)) is None:
            raise RefusedError(404, "no such task", "name")
        labels = [
            {"labeler": who, "note": r.metadata.get("note", ""), **r.model_dump(include={"id", "ranking", "ratings", "flags", "seconds"})}
            for who, r in list(labelling.ranked[name].items())
        ]  # fmt: skip
        return task_body(task) | {"labels": labels}

    @router.post("/decide")
    def decide(asked: RankingRequest) -> dict[str, Any]:
        return {"saved": labelling.rank(DECIDES, asked, decides=True).id}

    @router.post("/labeler")
    def change_labeler(name: Annotated[str, Body(max_length=100)], do: Annotated[Change, Body()]) -> dict[str, Any]:
        with labelling.lock:
            return {"link": staff.change(name, do)}

    @router.post("/assign")
    def assign(tasks: Names, labelers: Names) -> dict[str, Any]:
        if strangers := [*(set(tasks) - labelling.tasks.keys()), *(set(labelers) - staff.secrets.keys())]:
            raise RefusedError(404, f"{strangers[0]!r} is no task or labeler")
        with labelling.lock:
            staff.assign(dict.fromkeys(tasks, labelers))
        return {"saved": True}

    @router.post("/instructions")
    def change_instructions(text: Instructions) -> dict[str, Any]:
        write_text(staff.path, text)
        labelling.instructions = text
        return {"saved": True}

    if rounds is not None:
        router.get("/round")(rounds.state)
        router.post("/round")(rounds.start)
    return router


def overview_of(labelling: Labelling, staff: Staff) -> dict[str, Any]:
    """Each labeler and each task as the manager's page shows them, how many labels there are and should be, and the instructions."""
    with labelling.lock:
        said = {name: dict(labelling.ranked[name]) for name in labelling.tasks}
    counter, by_name = AgreementCounter(), dict[str, list[Ranking]]()
    for by_labeler in said.values():
        for name, record in by_labeler.items():
            by_name.setdefault(name, []).append(record)
            counter.add(record)
    agreed = counter.report()["by_labeler"]
    people = []
    for name in sorted({*staff.secrets, *by_name} - {DECIDES}):
        records, checks = by_name.get(name, []), sum_checks(labelling.said_by(name).values())
        shares = {kind: of["right"] / of["pairs"] for kind, of in checks.items() if of["pairs"]}
        people.append({
            "name": name, "known": name in staff.secrets, "paused": staff.paused(name, labelling), "done": len(records),
            "agreement": agreed.get(name, {}).get("agreement"), "gold": shares.get("gold"), "again": shares.get("again"),
            "warnings": warnings_of(records) + ["did not qualify"] * (not labelling.qualified(name)),
            "seconds": median([r.seconds or 0 for r in records]) if records else None,
            "last": max((r.created or "" for r in records), default=""),
        })  # fmt: skip
    tasks, done, wanted, per_task = list[dict[str, Any]](), 0, 0, labelling.settings.labels_per_prompt
    for name, by_labeler in said.items():
        to, labels = staff.assigned.get(name, []), len(by_labeler.keys() - {DECIDES})
        # the pairs of responses that two labelers both put in order, and how many of them in opposite orders
        orders = [ordered_pairs(record) for labeler, record in by_labeler.items() if labeler != DECIDES]
        two = list(itertools.combinations(orders, 2))
        clashes = sum(pair[::-1] in b for a, b in two for pair in a)
        task = {"name": name, "labels": labels, "assigned": to, "decided": DECIDES in by_labeler}
        tasks.append(task | {"clashes": clashes, "pairs": clashes + sum(len(a & b) for a, b in two)})
        wanted += len(to) or per_task
        done += len(by_labeler.keys() & set(to)) if to else min(per_task, len(by_labeler))
    return {"people": people, "tasks": tasks, "done": done, "wanted": wanted, "instructions": labelling.instructions}


def warnings_of(records: list[Ranking]) -> list[str]:
    """What a labeler's rankings show: faster than anyone reads, or a preference for what is shown first or last."""
    found, shares = [], []
    words = [sum(len(one.text.split()) for one in record.responses) / (record.seconds or 0.1) for record in records]
    if len(words) >= FEWEST[0] and 60 * median(words) > FASTEST:
        found.append(f"{60 * median(words):.0f} words a minute")
    for record in records:
        order, pairs = record.metadata.get("order"), ordered_pairs(record)
        if order and pairs:
            shares.append(fmean(order.index(better) < order.index(worse) for better, worse in pairs))
    if len(shares) >= FEWEST[1]:
        error = max(stdev(shares), 0.1) / len(shares) ** 0.5
        if abs(fmean(shares) - 0.5) > 3 * error:
            found.append(f"the response shown first wins {fmean(shares):.0%}")
    return found


# --- labelling rounds ------------------------------------------------------------------------------------------------


SHOWN_PAIRS = 100  # the most surprising ones


class Rounds:
    """The rounds of `rlhf pipeline run=<name>`; the labels of this server are those of the run in `folder`."""

    def __init__(self, config: Config, folder: Path, name: str):
        self.config, self.folder, self.name = config, folder, name
        self.log = folder / "serve" / "pipeline.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.effects: dict[str, dict[str, Any]] = {}  # by the hash of this round's reward model
        self.lock = threading.Lock()

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> dict[str, Any]:
        """Run the pipeline. Raises: RefusedError if it runs already."""
        with self.lock:
            if self.running:
                raise RefusedError(409, "the pipeline is running")
            words = ["pipeline", f"run='{self.name}'", f"runs_dir='{self.config.runs_dir}'"]
            command = [sys.executable, "-m", "rlhf", *words]
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return self.state()

    def stop(self) -> None:
        """End the pipeline with the server; the next call resumes it."""
        if self.process is not None and self.running:
            self.process.terminate()
            self.process.wait()

    def state(self) -> dict[str, Any]:
        """Whether it runs, its exit code, the last line that it printed, the stages of this round with their states, and its effect."""
        running, code = self.running, None if self.process is None else self.process.poll()
        said = self.log.read_text("utf-8", errors="replace") if self.log.exists() else ""
        last = said.strip().replace("\r", "\n").rpartition("\n")[2]
        stages = {stage: (read_stage(self.folder / stage) or {}).get("status", "waits") for stage in ROUND_STAGES}
        about = {"run": self.name, "running": running, "code": code, "last": last, "stages": stages}
        return about | {"effect": None if running else self.effect()}

    def effect(self) -> dict[str, Any] | None:
        """`compare_rounds`, made once per reward model; None before the reward models of two rounds are complete."""
        earlier = rounds_before(self.folder)[:1]
        if not earlier or not all(is_complete(folder / "reward") for folder in (self.folder, *earlier)):
            return None
        made = (read_stage(self.folder / "reward") or {})["hash"]
        with self.lock:
            if made not in self.effects:
                self.effects[made] = compare_rounds(self.config, earlier[0], self.folder)
        return self.effects[made]


def compare_rounds(config: Config, before: Path, after: Path) -> dict[str, Any]:
    """The reward models of two rounds on the same pairs.

    Returns {"held_out": {"before", "after": share of dev pairs ordered as labelers did, "pairs"}, "new": {how the
    prompts were chosen: {"before", "pairs"}} of the later round's own training labels, which the earlier model has not
    seen, and "pairs": the most surprising ones, each with the raw score difference d = r_better - r_worse and the
    surprise -log sigmoid(d) in nats, before and after}.
    """
    records = load_comparisons(str(after / "label" / "comparisons.jsonl"))[0]
    strangers = held_out_labelers(config, records)
    records = [record for record in records if record.labeler not in strangers]
    earlier = before / "label" / "comparisons.jsonl"
    source = str(earlier) if earlier.exists() else config.data.comparisons
    known = {(record.id, record.labeler) for record in load_comparisons(source)[0]} if source else set()
    new = [record for record in in_split(config, records, "train") if (record.id, record.labeler) not in known]
    groups = {"held_out": in_split(config, records, "dev")}
    for record in new:
        groups.setdefault(str(record.metadata.get("chosen", "all")), []).append(record)
    judges = [load_judge(config, str(folder), "serve.pipeline", torch.device("cpu"))[1:] for folder in (before, after)]
    shares: dict[str, dict[str, Any]] = {}
    pairs: list[dict[str, Any]] = []
    for name, rankings in groups.items():
        judged = []
        for model, encode in judges:
            items, _ = join_rankings(rankings, encode)
            judged.append(judged_pairs(items, score_each(model, [item.rows for item in items], False)))
        wins = [fmean(pair.won for pair in of) if of else None for of in judged]
        shares[name] = {"before": wins[0], "after": wins[1] if name == "held_out" else None, "pairs": len(judged[0])}
        told = [(item, *pair) for item in items for pair in item.pairs()]
        for (item, better, worse), *both in zip(told, *judged, strict=True):
            d = [one.margin for one in both]
            pairs.append({
                "group": name, "labeler": both[0].labeler, "prompt": item.record.prompt[-1].content,
                "better": item.answers[better][0], "worse": item.answers[worse][0],
                "difference": d, "surprise": [float(np.logaddexp(0.0, -x)) for x in d],
            })  # fmt: skip
    pairs.sort(key=lambda pair: -pair["surprise"][1])
    return {"held_out": shares.pop("held_out"), "new": shares, "pairs": pairs[:SHOWN_PAIRS]}
