"""`rlhf serve run=x`: models of a run behind an OpenAI-style API, and a page to chat with, compare and label them."""

import gc
import ipaddress
import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf.config import Config
from rlhf.config.setting import FromEnvironment, listed
from rlhf.data.encoding import names_of
from rlhf.data.reading import load_comparisons, load_rules
from rlhf.data.records import first_repeat
from rlhf.errors import UserError, optional, reading
from rlhf.runs.folders import existing_run, read_record, refuse_inside_stage, run_folder, stages_of
from rlhf.system.files import check_regular
from rlhf.system.terminal import say

LEAST_SECRET = 16  # characters of serve.token
# Helpfulness comes first for data to train on, truth and harmlessness for the final evaluation (Ouyang et al. 2022, section 3.4).
TRAINING = """If what helps the user conflicts with truth or harmlessness, rank by help to the user, and mark what is wrong with flags."""
EVALUATION = """Truth and harmlessness count more than helpfulness, unless what was asked is plainly harmless."""
INSTRUCTIONS = """Read the request, then every response, before you rank. Put the response first that you would most want to get.

Helpful: it does what was asked, follows every constraint, and is clear. If the request is unclear, asking back is better than guessing.
Truthful: it claims nothing that you know or can check to be wrong, and invents nothing about the text that it was given.
Harmless: it hurts nobody, insults nobody, and helps nobody to do so.

{first} Length alone is no merit. Responses that you find equally good are a tie. If you cannot tell, say so.
"""


def run(config: Config) -> None:
    for package in ("fastapi", "uvicorn"):
        optional(package, "serve")
    folder, loopback = existing_run(config), check_address(config)
    host, port = config.serve.host, config.serve.port
    with ExitStack() as held:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = held.enter_context(socket.create_server((host, port), family=family))
        except OSError as error:
            taken = f"serve.host={host} serve.port={port}: {error.strerror}"
            raise UserError(f"{taken}: choose another, or 0 for any free one") from None
        host, port = listening.getsockname()[:2]
        shown = socket.gethostname() if ipaddress.ip_address(host).is_unspecified else host  # links for other machines
        address = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/"
        thread, app, rounds = make(config, folder, loopback, address, held)
        gc.collect()
        gc.freeze()  # what is loaded stays: the collector, which stops all requests, need not look at it again
        say(f"serve: {address} (Ctrl-C stops)")
        try:
            make_server(app).run(sockets=[listening])
        finally:
            if rounds:
                rounds.stop()
            thread.stop()


def answered_by(folder: Path) -> Path:
    """The run whose models are served: this one, or while it has only the tasks of its labelling round, the one that answered them."""
    record = {} if stages_of(folder) else read_record(folder / "sample" / "sample.json", "round") or {}
    name = record.get("policy", "").partition("/")[0]  # of <run>/<stage>@<hash>
    return folder.parent / name if name else folder


def make_server(app: Any) -> Any:
    """The web server. The guard counts requests; connections without one are closed after a time."""
    import uvicorn

    from rlhf.serving.security import Connection

    quiet: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False, "proxy_headers": False}
    timeouts: dict[str, Any] = {"timeout_keep_alive": 15, "timeout_graceful_shutdown": 5}
    return uvicorn.Server(uvicorn.Config(app, http=Connection, ws="none", lifespan="off", **quiet, **timeouts))


def check_address(config: Config) -> bool:
    """Whether the server listens on loopback only. Raises: UserError for another address without a token."""
    host, token = config.serve.host, config.serve.token
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise UserError(f"serve.host={host}: want an IP address, such as 127.0.0.1 or 0.0.0.0") from None
    if token is None and not loopback:
        raise UserError(f"serve.host={host}: other machines can reach it: set serve.token='${{oc.env:RLHF_TOKEN}}'")
    if token is not None and len(token) < LEAST_SECRET:
        where = token.source if isinstance(token, FromEnvironment) else "serve.token"
        raise UserError(f"{where}: {len(token)} characters: want a secret of at least {LEAST_SECRET}")
    return loopback


def make(config: Config, folder: Path, loopback: bool, address: str, held: ExitStack) -> tuple[Any, Any, Any]:
    """The models' thread, the application, and the labelling rounds that its manager may start. held: what the models need."""
    from rlhf.serving.app import make_app
    from rlhf.serving.labelling import LabelFile, Labelling
    from rlhf.serving.managing import Rounds, Staff
    from rlhf.serving.models import ModelThread, served_models
    from rlhf.serving.security import Access

    settings = config.serve
    labels = Path(settings.labels) if settings.labels else folder / "serve" / "labels.jsonl"
    refuse_inside_stage(labels, "serve.labels")
    held.callback((file := LabelFile(labels)).close)
    names, tasks = names_of(settings.labelers), load_tasks(settings.tasks, folder)
    written = Path(settings.instructions) if settings.instructions else labels.with_name("instructions.txt")
    judged = any(len({response.policy for response in task.responses}) > 1 for task in tasks)  # not to be trained on
    instructions = INSTRUCTIONS.format(first=EVALUATION if judged else TRAINING)
    if settings.instructions or written.is_file():
        instructions = read_instructions(written)
    staff = Staff(labels.parent, names, address, written) if names else None
    if staff is not None:
        links = f"{labels.parent}/labelers.txt, manager.txt"
        say(f"serve: the links of {len(staff.secrets)} labelers, and the manager's: {links}")
    say(f"serve: {len(tasks)} labelling tasks, {len(file.records)} labels so far -> {labels}")
    stages, answered = listed(settings.stages), answered_by(folder)
    models, context = held.enter_context(served_models(config, answered, stages, settings.batch))
    thread = ModelThread(models, settings.batch, settings.queue, settings.max_new_tokens, context)
    say(f"serve: {', '.join(model.policy_id for model in models.values())}")
    gold, rules = load_gold(config, tasks), load_rules("serve.rules", settings.rules)
    labelling = Labelling(file, tasks, settings, config.seed, gold, rules)
    labelling.instructions = instructions
    access = Access(settings, staff.secrets if staff else {}, loopback, staff.manager if staff else None)
    rounds = None
    if settings.pipeline is not None:
        if staff is None or not (run_folder(replace(config, run=settings.pipeline)) / "settings.json").is_file():
            wanted = f"want a run of `rlhf pipeline` in {config.runs_dir}, and labelers=[…]"
            raise UserError(f"serve.pipeline={settings.pipeline}: {wanted}")
        rounds = Rounds(config, folder, settings.pipeline)
    return thread, make_app(thread, access, labelling, staff, rounds), rounds


def read_instructions(path: Path) -> str:
    """The text of serve.instructions. Raises: UserError if it is not a text file."""
    check_regular(path)
    with reading(f"serve.instructions={path}: not readable", "want a text file in UTF-8"):
        return path.read_text("utf-8")


def load_gold(config: Config, tasks: list[Any]) -> dict[str, Any]:
    """The gold items of serve.gold by id. Raises: UserError for one without a ranking or with a task's id, or too few of them."""
    settings = config.serve
    records = [] if settings.gold is None else load_comparisons(settings.gold)[0]
    unordered = next((record.id for record in records if not record.pair_list()), None)
    if wrong := first_repeat(record.id for record in [*tasks, *records]) or unordered:
        raise UserError(f"serve.gold={settings.gold}: {wrong!r}: want rankings with an order, and ids of their own")
    if settings.qualification > len(records):
        few = f"serve.gold has {len(records)} rankings: want as many"
        raise UserError(f"serve.qualification={settings.qualification}: {few}")
    return {record.id: record for record in records}


def load_tasks(given: str | None, run: Path) -> list[Any]:
    """The tasks that `rlhf sample` wrote: of serve.tasks, or of the run's own round if there is one. Raises: UserError."""
    path = Path(given) if given else run / "sample" / "tasks.jsonl"
    if given is None and not path.is_file():
        return []
    tasks, _ = load_comparisons(str(path / "tasks.jsonl" if path.is_dir() else path), "native")
    if twice := first_repeat(task.id for task in tasks):
        raise UserError(f"{path}: two tasks have the id {twice!r}: want one of each")
    return [task for task in tasks if len(task.responses) > 1]
