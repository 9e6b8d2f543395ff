"""One labelling round against a real Label Studio server, from sampling to a reward model.

    bash scripts/label_studio_setup.sh /tmp/label-studio        # once: an environment with Label Studio
    python scripts/label_studio_round.py --server /tmp/label-studio --run demo --out round experiment=gold

`rlhf sample` writes the tasks. A server is started on loopback with a temporary folder. Annotators sign up through the invite link,
and each sends the judgements of one of the gold world's simulated labelers through the HTTP API. The server exports the annotations;
`rlhf import` reads them, and `rlhf reward` trains on them. The judgements as sent are written next to each export
(`intended.jsonl`), so that the import can be compared with them. Further arguments are passed to every `rlhf` command. The run
must be a run of the gold world that has its SFT model.
"""

import argparse
import contextlib
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from rlhf.gold.truth import Labeler, Requests
from rlhf.gold.truth import judge as true_parts
from rlhf.gold.world import Task
from rlhf.runs.progress import Progress
from rlhf.system.files import write_jsonl

INTERFACES = ("pairwise", "ranker")
RANK, BETTER, EQUAL, EQUALLY_GOOD = "rank", "better", "equal", "equally good"  # names in the interfaces of rlhf sample
CLOSE = 0.8  # utilities that differ by less look equally good; the gold score's range is 10
START_SECONDS = 300.0
STOP_SECONDS = 20.0


# --- the server ------------------------------------------------------------------------------------------------------


class Client:
    """One user of the server, with an API token or, before there is one, a session with cookies."""

    def __init__(self, base: str, token: str | None = None):
        headers = {"Authorization": f"Token {token}"} if token else {}
        self.base = base
        self.http = httpx.Client(base_url=base, headers=headers, timeout=120, trust_env=False, follow_redirects=True)

    def request(self, method: str, path: str, **content: Any) -> bytes:
        """The body of the response. Raises: RuntimeError with the server's message."""
        answer = self.http.request(method, path, **content)
        if answer.is_error:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text[:500]}")
        return answer.content

    def json(self, method: str, path: str, body: Any = None) -> Any:
        answer = self.request(method, path, **({} if body is None else {"json": body}))
        return json.loads(answer) if answer else None


@contextlib.contextmanager
def running_server(environment: Path, folder: Path, port: int) -> Iterator[Client]:
    """Start Label Studio on 127.0.0.1 with its data in `folder`; yields the owner's client. The server is always stopped."""
    folder.mkdir(parents=True, exist_ok=True)
    token, password = secrets.token_hex(20), secrets.token_urlsafe(16)
    variables = {"PATH": f"{environment}/bin:/usr/bin:/bin", "HOME": str(folder), "LANG": "C.UTF-8"}
    variables |= {"SENTRY_DSN": "", "FRONTEND_SENTRY_DSN": ""}  # no reports to its makers
    variables |= {"COLLECT_ANALYTICS": "false", "LATEST_VERSION_CHECK": "false"}
    variables |= {"LABEL_STUDIO_USERNAME": "owner@example.com", "LABEL_STUDIO_PASSWORD": password}
    variables |= {"LABEL_STUDIO_USER_TOKEN": token, "LABEL_STUDIO_ENABLE_LEGACY_API_TOKEN": "true"}
    variables |= {"LABEL_STUDIO_DISABLE_SIGNUP_WITHOUT_LINK": "true"}
    address = ["--internal-host", "127.0.0.1", "--port", str(port)]
    options = ["--no-browser", "--data-dir", str(folder / "data"), *address, "--enable-legacy-api-token"]
    command = [str(environment / "bin" / "label-studio"), "start", *options]
    owner = Client(f"http://127.0.0.1:{port}", token)
    log = folder / "server.log"
    with log.open("w", encoding="utf-8") as file:
        output: dict[str, Any] = {"stdout": file, "stderr": file, "start_new_session": True}
        process = subprocess.Popen(command, env=variables, cwd=folder, **output)
        try:
            wait_until_up(owner, process, log)
            yield owner
        finally:
            stop(process)


def wait_until_up(owner: Client, process: subprocess.Popen, log: Path) -> None:
    """Raises: RuntimeError if the server ends, or does not answer in time."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}: {log.read_text(encoding='utf-8')[-2000:]}")
        with contextlib.suppress(httpx.HTTPError, RuntimeError):
            owner.request("GET", "/health")
            return
        time.sleep(1.0)
    raise RuntimeError(f"the server did not answer in {START_SECONDS:.0f} s: {log.read_text(encoding='utf-8')[-2000:]}")


def stop(process: subprocess.Popen) -> None:
    """Stop the server's process group: with SIGTERM, then with SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
            return


# --- people ----------------------------------------------------------------------------------------------------------


def sign_up(owner: Client, email: str) -> Client:
    """A new annotator, through the invite link and the form of the sign-up page, with the API token of the new account."""
    invite = owner.json("GET", "/api/invite")["invite_url"]
    person = Client(owner.base)
    page = person.request("GET", invite).decode()
    csrf = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page)
    if csrf is None:
        raise RuntimeError(f"{invite}: the sign-up page has no form")
    form = {"csrfmiddlewaretoken": csrf[1], "email": email, "password": secrets.token_urlsafe(12)}
    person.request("POST", invite, data=form, headers={"Referer": owner.base})
    person = Client(owner.base, person.json("GET", "/api/current-user/token")["token"])
    who = person.json("GET", "/api/current-user/whoami")["email"]
    if who != email:
        raise RuntimeError(f"signed up as {email}, but the token is that of {who}")
    return person


def shown(data: dict[str, Any]) -> dict[str, str]:
    """{response id: text} of a task."""
    if "responses" in data:
        return {response["id"]: response["body"] for response in data["responses"]}
    return {data["left_id"]: data["left"], data["right_id"]: data["right"]}


def opinions(data: dict[str, Any], labeler: Labeler, seed: int) -> dict[str, float]:
    """{response id: a labeler's utility of the shown text, noise included}.

    The same labeler gives the same item the same utilities in every task.
    """
    task, key = Task(**data["metadata"]["gold"]), f"round-{seed}-{data['item']}-{labeler.name}"
    return {
        name: labeler.utility(true_parts(task, text), text) + random.Random(f"{key}-{name}").gauss(0, labeler.noise)
        for name, text in shown(data).items()
    }


def judge(data: dict[str, Any], labeler: Labeler, seed: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The annotation's result as Label Studio's page sends it, and the judgement in response ids."""
    utility = opinions(data, labeler, seed)
    order = sorted(utility, key=lambda name: -utility[name])
    value: dict[str, Any]
    if "responses" in data:
        names, value = (RANK, "responses", "ranker"), {"ranker": {RANK: order}}
        meant: dict[str, Any] = {"ranking": [[name] for name in order]}
    elif utility[order[0]] - utility[order[1]] < CLOSE:
        names, value, meant = (EQUAL, "prompt", "choices"), {"choices": [EQUALLY_GOOD]}, {"equal": sorted(order)}
    else:
        names, value = (BETTER, BETTER, "pairwise"), {"selected": "left" if order[0] == data["left_id"] else "right"}
        meant = dict(zip(("better", "worse"), order, strict=True))
    result = dict(zip(("from_name", "to_name", "type"), names, strict=True)) | {"value": value, "origin": "manual"}
    return [result], {"item": data["item"], **meant}


# --- the round -------------------------------------------------------------------------------------------------------


def make_project(owner: Client, folder: Path, annotators: int) -> tuple[int, list[dict[str, Any]]]:
    """Make a project from the tasks and configuration of `rlhf sample`; returns its id and its tasks on the server."""
    config: dict[str, Any] = {"title": folder.name, "label_config": (folder / "config.xml").read_text(encoding="utf-8")}
    config |= {"maximum_annotations": annotators, "show_skip_button": True}
    project = owner.json("POST", "/api/projects/", config)["id"]
    sent = json.loads((folder / "tasks.json").read_text(encoding="utf-8"))
    owner.json("POST", f"/api/projects/{project}/import", sent)
    listed = owner.json("GET", f"/api/projects/{project}/tasks/?page_size={len(sent)}")
    if len(listed) != len(sent):
        raise RuntimeError(f"{folder.name}: sent {len(sent)} tasks, the server has {len(listed)}")
    return project, sorted(listed, key=lambda task: task["id"])


def annotate(people: dict[str, Client], tasks: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Every annotator judges every task, but the last one skips the first task; returns the judgements in order."""
    intended = []
    labelers = Requests().labelers()
    with Progress(len(people) * len(tasks), "annotate", unit="annotation") as bar:
        for number, (email, person) in enumerate(people.items()):
            labeler = labelers[number % len(labelers)]
            for task in tasks:
                data = task["data"]
                result, meant = judge(data, labeler, seed)
                skips = 0 < number == len(people) - 1 and task is tasks[0]
                texts = (data["prompt"], *shown(data).values())
                seconds = 4 + 0.25 * sum(len(text.split()) for text in texts)  # of reading
                body = {"result": [] if skips else result, "lead_time": seconds, "was_cancelled": skips}
                answer = person.json("POST", f"/api/tasks/{task['id']}/annotations/", body)
                if not skips:
                    intended.append(meant | {"labeler": email, "labeler_id": answer["completed_by"]})
                bar.update(1)
    return intended


def run_rlhf(command: str, *arguments: str) -> str:
    """Run one command of the project and print its output. Raises: SystemExit if it fails."""
    line = [sys.executable, "-m", "rlhf", command, *arguments]
    print(f"$ rlhf {command} {' '.join(arguments)}", flush=True)
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, env=os.environ | {"RLHF_PROGRESS": "off"})
    print(done.stdout, end="", flush=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--server", type=Path, required=True, help="the environment that label_studio_setup.sh made")
    parser.add_argument("--run", required=True, help="a run of the gold world that has its SFT model")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--responses", type=int, default=4)
    parser.add_argument("--annotators", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8081)
    parser.add_argument("--no-reward", action="store_true", help="stop after the import")
    known, overrides = parser.parse_known_args()
    out: Path = known.out.resolve()
    common = [*overrides, f"run={known.run}"]

    # 1. Sample
    for interface in INTERFACES:
        tasks = f"sample.prompts={known.prompts} sample.responses={known.responses} sample.tool=label_studio"
        place = [f"sample.interface={interface}", f"sample.out={out / interface}", f"seed={known.seed}"]
        run_rlhf("sample", *common, *tasks.split(), *place)

    # 2. Annotate on the server
    with tempfile.TemporaryDirectory(prefix="label-studio-") as folder:
        started = time.monotonic()
        with running_server(known.server.resolve(), Path(folder), known.port) as owner:
            print(f"server: {owner.base} up after {time.monotonic() - started:.0f} s", flush=True)
            emails = [f"annotator-{n}@example.com" for n in range(1, known.annotators + 1)]
            people = {email: sign_up(owner, email) for email in emails}
            for interface in INTERFACES:
                project, made = make_project(owner, out / interface, known.annotators)
                intended = annotate(people, made, known.seed)
                write_jsonl(out / interface / "intended.jsonl", intended)
                exported = owner.request("GET", f"/api/projects/{project}/export?exportType=JSON")
                (out / interface / "export.json").write_bytes(exported)
                print(f"server: {interface}: {len(made)} tasks, {len(intended)} annotations by {len(people)} people")
    print("server: stopped", flush=True)

    # 3. Import, and train on what came back
    for interface in INTERFACES:
        exports = out / interface
        run_rlhf("import", f"path={exports / 'export.json'}", f"out={exports / 'imported'}", "overwrite=true")
    if not known.no_reward:
        imported = ",".join(str(out / interface / "imported") for interface in INTERFACES)
        name = f"{known.run}-round"
        parents = [f"parents.{stage}={known.run}" for stage in ("world", "sft", "label")]
        data = [f"data.comparisons=[{imported}]", "overwrite=true"]
        run_rlhf("reward", *overrides, f"run={name}", *parents, *data)


if __name__ == "__main__":
    main()
