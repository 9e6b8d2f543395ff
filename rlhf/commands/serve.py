"""`rlhf serve run=a[,b]`: models of a run behind an OpenAI-style API, and a page to chat with, compare and label them."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf.commands.report import run_folders
from rlhf.config import Config
from rlhf.config.setting import FromEnvironment
from rlhf.errors import UserError
from rlhf.terminal import say

SHORT = ("labelers", "labels_per_prompt")  # settings that may be given without their group
LEAST_SECRET = 16  # characters of serve.token


def join_runs(arguments: list[str]) -> list[str]:
    """`run=a run=b` and `run=a,b` as run='a,b', which Hydra would refuse, and take for a sweep."""
    runs: list[str] = []
    rest: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name == "run" and equals:
            runs.append(value.strip("'\""))
        else:
            rest.append(f"serve.{argument}" if name in SHORT and equals else argument)
    return [*rest, f"run='{','.join(runs)}'"] if runs else rest


def run(config: Config) -> None:
    """Serve until the process is told to stop. Raises: UserError for a run without models, or an address that is taken."""
    if not (find_spec("fastapi") and find_spec("uvicorn")):
        raise UserError("serve: needs FastAPI and uvicorn: pip install 'rlhf-recipe[serve]'")
    import uvicorn

    folders = run_folders(config)
    loopback = check_address(config)
    listening = listen(config)
    with listening:
        app = make(config, folders, loopback)
        host, port = listening.getsockname()[:2]
        say(f"serve: http://{f'[{host}]' if ':' in host else host}:{port}/ (Ctrl-C stops)")
        server = uvicorn.Server(uvicorn.Config(
            app, log_level="error", access_log=False, server_header=False, timeout_keep_alive=15, timeout_graceful_shutdown=5,
            limit_concurrency=4 * (config.serve.batch + config.serve.queue), h11_max_incomplete_event_size=64 * 1024,
        ))  # fmt: skip
        server.run(sockets=[listening])


def check_address(config: Config) -> bool:
    """Whether the server listens on loopback only. Raises: UserError for another address without a token."""
    import ipaddress

    settings = config.serve
    try:
        loopback = settings.host == "localhost" or ipaddress.ip_address(settings.host).is_loopback
    except ValueError:
        raise UserError(f"serve.host={settings.host}: want an IP address, such as 127.0.0.1 or 0.0.0.0") from None
    token = settings.token
    if token is None and not loopback:
        raise UserError(
            f"serve.host={settings.host}: other machines can reach it: set serve.token='${{oc.env:RLHF_TOKEN}}'"
        )
    if token is not None and len(token) < LEAST_SECRET:
        where = token.source if isinstance(token, FromEnvironment) else "serve.token"
        raise UserError(f"{where}: {len(token)} characters: want a secret of at least {LEAST_SECRET}")
    return loopback


def listen(config: Config) -> Any:
    """The socket. Raises: UserError if the address cannot be had."""
    import socket

    host, port = config.serve.host, config.serve.port
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise UserError(
            f"serve.host={host} serve.port={port}: {error.strerror}: choose another, or 0 for any free one"
        ) from None
    return made


def make(config: Config, folders: list[Path], loopback: bool) -> Any:
    """The application with its models."""
    from rlhf.api import LoadedRun
    from rlhf.serving.app import Limits, make_app
    from rlhf.serving.models import load_models
    from rlhf.serving.security import Access
    from rlhf.training.setup import set_up

    settings, device = config.serve, set_up(config)
    stages = [settings.stages] if isinstance(settings.stages, str) else settings.stages
    models = load_models([LoadedRun(folder, device.type) for folder in folders], stages)
    say(f"serve: {', '.join(model.policy_id for model in models.values())}")
    access = Access(settings.token, {}, loopback, settings.max_body_bytes, settings.requests_per_minute)
    limits = Limits(settings.batch, settings.queue, settings.max_new_tokens)
    return make_app(models, access, limits)
