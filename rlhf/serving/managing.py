"""Who runs the labelling: labelers who come and go while the server runs, progress, agreement, and decisions where labelers disagree."""

import itertools
import re
import secrets
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body
from pydantic import RootModel

from rlhf.data.agreement import AgreementCounter
from rlhf.data.records import Ranking, Text
from rlhf.errors import UserError
from rlhf.runs.folders import NAME
from rlhf.serving.labelling import Labelling, RankingRequest, task_body
from rlhf.serving.security import RefusedError
from rlhf.system.files import write_json, write_text
from rlhf.system.schemas import read_checked

LINK = re.compile(r"(\S+) \S+#([\w-]{32,})")  # a line of labelers.txt: name, and the address with the secret
DECIDES = "manager"  # the labeler of the decisions
FASTEST = 700  # words of responses per minute, about three times what adults read (238, Brysbaert 2019)
FEWEST = (10, 20)  # rankings for a warning of speed, and of a preferred place
Change = Literal["add", "revoke", "pause", "resume"]


class Changes(RootModel[dict[str, Change]]):
    """labelers.json, by name."""


class Staff:
    """The labelers of one server, who is paused, and their instructions; every change is on the disk before it is acknowledged.

    labelers.txt and manager.txt contain links with secrets: only their owner may read them. labelers.json: what the page changed.
    """

    def __init__(self, folder: Path, names: list[str], address: str, instructions: Path, text: str):
        if DECIDES in names:
            raise UserError(f"serve.labelers: {DECIDES!r} is who decides disagreements: choose another name")
        self.folder, self.address, self.path, self.text = folder, address, instructions, text
        remedy = "restore it; without it, labelers who were revoked or paused would come in again"
        self.changes: dict[str, Any] = read_checked(folder / "labelers.json", Changes, remedy) or {}
        known = [name for name in dict.fromkeys([*names, *self.changes]) if self.changes.get(name) != "revoke"]
        self.secrets = labeler_secrets(folder / "labelers.txt", known, address)
        self.manager = labeler_secrets(folder / "manager.txt", [DECIDES], address)[DECIDES]

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
        return f"{self.address}#{new[name]}" if new else None

    def paused(self, name: str, labelling: Labelling) -> bool:
        """Whether a labeler gets no tasks: paused, or not qualified and not let in by the manager, who resumed the labelling."""
        last = self.changes.get(name)
        return last == "pause" or (last != "resume" and not labelling.qualified(name))


def labeler_secrets(path: Path, names: list[str], address: str, without: str | None = None) -> dict[str, str]:
    """Each labeler's secret: those of an earlier call, and new ones; `without` loses the present one.

    Raises: UserError for an invalid name, or a file that `rlhf serve` did not write.
    """
    if bad := [name for name in names if not NAME.fullmatch(name)]:
        raise UserError(f"serve.labelers: {bad[0]!r}: want names of letters, digits, '.', '_' and '-'")
    by_name: dict[str, str] = {}
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: not a regular file: move it away")
    if path.is_file():
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
            if (link := LINK.fullmatch(line)) is None:
                raise UserError(f"{path}: line {number} is no link of `rlhf serve`: move this file away, or correct it")
            by_name[link[1]] = link[2]
    by_name |= {name: secrets.token_urlsafe(24) for name in names if name not in by_name}
    links = (f"{name} {address}#{secret}\n" for name, secret in by_name.items() if name != without)
    write_text(path, "".join(links), mode=0o600)
    return {name: by_name[name] for name in names}


def make_manage_router(labelling: Labelling, staff: Staff) -> APIRouter:
    """The routes of the manager's page; the guard lets nobody else reach them."""
    router = APIRouter(prefix="/api/manage")

    @router.get("")
    def overview() -> dict[str, Any]:
        with labelling.lock:
            said = {name: dict(by_labeler) for name, by_labeler in labelling.ranked.items()}
        counter, by_name = AgreementCounter(), dict[str, list[Ranking]]()
        for by_labeler in said.values():
            for name, record in by_labeler.items():
                by_name.setdefault(name, []).append(record)
                if name != DECIDES:
                    counter.add(record)
        agreed = counter.report()["by_labeler"] if counter.rankings else {}
        people = []
        for name in sorted({*staff.secrets, *by_name} - {DECIDES}):
            records = by_name.get(name, [])
            paused, checks = staff.paused(name, labelling), labelling.figures(name)
            row = {"name": name, "known": name in staff.secrets, "paused": paused, "done": len(records)}
            row |= {
                kind: one["right"] / one["pairs"] if (one := checks.get(kind)) else None for kind in ("gold", "again")
            }
            row["warnings"] = warnings_of(records) + ["did not qualify"] * (not labelling.qualified(name))
            row["seconds"] = median([r.seconds or 0 for r in records]) if records else None
            row["last"] = max((r.created or "" for r in records), default="")
            people.append(row | {"agreement": agreed.get(name, {}).get("agreement")})
        tasks: list[dict[str, Any]] = [
            {"name": name, "labels": len(by.keys() - {DECIDES}), "decided": DECIDES in by, **clashes(by)}
            for name, by in said.items() if by
        ]  # fmt: skip
        wanted = labelling.per_prompt * len(said)
        done = sum(min(labelling.per_prompt, task["labels"]) for task in tasks)
        return {"people": people, "tasks": tasks, "done": done, "wanted": wanted, "instructions": staff.text}

    @router.get("/task")
    def one_task(name: str) -> dict[str, Any]:
        if (task := labelling.tasks.get(name)) is None:
            raise RefusedError(404, "no such task", "name")
        labels = [
            {"labeler": who, "note": r.metadata.get("note", ""), **r.model_dump(include={"id", "ranking", "ratings", "flags", "seconds"})}
            for who, r in labelling.ranked[name].items()
        ]  # fmt: skip
        return task_body(task, task.responses) | {"labels": labels}

    @router.post("/decide")
    def decide(asked: RankingRequest) -> dict[str, Any]:
        return {"saved": labelling.rank(DECIDES, asked, decides=True).id}

    @router.post("/labeler")
    def change_labeler(name: Annotated[str, Body(max_length=100)], do: Annotated[Change, Body()]) -> dict[str, Any]:
        return {"link": staff.change(name, do)}

    @router.post("/instructions")
    def change_instructions(
        text: Annotated[Text, Body(embed=True, min_length=1, max_length=100_000)],
    ) -> dict[str, Any]:
        write_text(staff.path, text)
        staff.text = text
        return {"saved": True}

    return router


def warnings_of(records: list[Ranking]) -> list[str]:
    """What a labeler's rankings show: faster than anyone reads, or a preference for what is shown first or last."""
    found, shares = [], []
    words = [sum(len(one.text.split()) for one in record.responses) / (record.seconds or 0.1) for record in records]
    if len(words) >= FEWEST[0] and 60 * median(words) > FASTEST:
        found.append(f"{60 * median(words):.0f} words a minute")
    for record in records:
        place = {name: i for i, name in enumerate(record.metadata.get("order", ()))}
        ids = [response.id for response in record.responses]
        first = [place[ids[i]] < place[ids[j]] for i, j in record.pair_list() if {ids[i], ids[j]} <= place.keys()]
        shares += [fmean(first)] if first else []
    if len(shares) >= FEWEST[1]:
        error = max(stdev(shares), 0.1) / len(shares) ** 0.5
        if abs(fmean(shares) - 0.5) > 3 * error:
            found.append(f"the response shown first wins {fmean(shares):.0%}")
    return found


def clashes(by_labeler: dict[str, Ranking]) -> dict[str, int]:
    """The pairs of responses that two labelers of a task both put in order, and how many of them in opposite orders."""
    ordered = [set(record.pair_list()) for name, record in by_labeler.items() if name != DECIDES]
    two = list(itertools.combinations(ordered, 2))
    clash = sum((j, i) in b for a, b in two for i, j in a)
    return {"clashes": clash, "pairs": clash + sum(len(a & b) for a, b in two)}
