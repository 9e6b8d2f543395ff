"""The how-to pages of docs/: the commands of a page run in its order, on a tiny model; only sizes and the server's port are overridden.

A page's files of code (`# name.py`) are written beside the data. SmolLM2 is the tiny model, in the cache of the hub.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from rlhf import cli
from rlhf.commands import pipeline, serve
from rlhf.config.commands import SHARED_FLAG
from rlhf.system.files import read_json
from tests.test_docs import FENCE, ROOT, commands_in

from .conftest import Run
from .test_adopted import SMALL, save

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
STUDIO = ROOT / "tests" / "data" / "fixtures" / "label_studio"
HUB, COMMIT = "HuggingFaceTB/SmolLM2-135M-Instruct", "1" * 40
FEW = ["ppo.episodes=12", "ppo.episodes_per_update=4", "ppo.minibatches=2", "ppo.micro_batch_episodes=4"]
SIZES = {
    "pipeline": [*SMALL, *FEW, "evaluate.samples=1", "evaluate.best_of=2", "reward.audit=2", "rollout.max_new_tokens=8"],
    "ppo": FEW, "dpo": ["dpo.batch_prompts=4"], "plan": ["rollout.max_new_tokens=8"], "sample": ["sample.prompts=4"],
    "serve": ["serve.port=0"],
}  # fmt: skip


def label_all(address: str) -> None:
    """Each labeler of runs/x ranks all of the tasks through the link in labelers.txt, which lies beside the labels."""
    for link in next(Path().rglob("labelers.txt")).read_text(encoding="utf-8").splitlines():
        with httpx.Client(base_url=address, headers={"authorization": f"Bearer {link.partition('#')[2]}"}) as person:
            while (task := person.get("/api/rank/next").json()["task"]) is not None:
                names = [one["id"] for one in sorted(task["responses"], key=lambda one: one["text"])]
                ranked = {"name": task["name"], "submission": uuid.uuid4().hex, "seconds": 1.0}
                person.post("/api/rank", json=ranked | {"ranking": [[names[0]], names[1:]]}).raise_for_status()


def ask(address: str) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "serving.md").read_text("utf-8"), re.DOTALL)
    found: dict[str, Any] = {}
    exec(code[1].replace("http://127.0.0.1:8000/", address + "/"), found)
    assert isinstance(found["answer"].choices[0].message.content, str)


@dataclass(frozen=True)
class HowTo:
    """What is particular to a page. results: files that its commands leave; visit: what clients do while `rlhf serve` runs."""

    results: tuple[str, ...] = ()
    visit: Callable[[str], None] | None = None
    script: str = ""  # of its files of code, the one that is run after the commands
    before: Callable[[list[str]], list[str]] = lambda words: []  # prepares a command's folder; returns more overrides


def alternative(words: list[str]) -> list[str]:
    """ways.md: each command makes its run anew; the first one's is then `first`, from whose reward model x goes on."""
    run = Path("runs", next(word for word in words if word.startswith("run=")).removeprefix("run="))
    if run.exists() and not Path("runs/first").exists():
        run.rename("runs/first")
    shutil.rmtree(run, ignore_errors=True)
    policy = any(word.startswith("ppo.policy=") for word in words)
    if policy and run.name == "x":
        shutil.copytree("runs/first", run, ignore=shutil.ignore_patterns("ppo", "evaluate"))
    return ["lora.share_trunk=false"] if policy else []


def on_gold(words: list[str]) -> list[str]:
    """A finished run of the page, which no command of it makes, is the small gold run."""
    named = [word.partition("=")[2] for word in words if word.startswith(("parents.world=", "run="))]
    if not named or "experiment=align-laptop" in words:
        return []
    run = Path("runs", named[-1])
    if not (run / "world").exists() and not (run / "sample").exists():
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree("gold", run)
        (run / "settings.json").write_text('{"experiment": "gold"}')
    return ["device=cpu", "threads=1", *(["tracking=jsonl"] if words[0] in ("ppo", "reward") else [])]


HOWTOS = {
    "align.md": HowTo(("labels/dataset.json", "runs/x/report.html", "runs/x/export/ppo/config.json")),
    "own_reward.md": HowTo(("runs/x/ppo/stage.json",)),
    "labelling.md": HowTo(("checked/report.json", "runs/second/evaluate/results.json"), visit=label_all),
    "size.md": HowTo(("runs/hour/report.html",), before=lambda words: ["model.pretrained=m"] * ("run=hour" in words)),
    "curves.md": HowTo(("runs/x/report.html",)),
    "fix_a_run.md": HowTo(("runs/x/sample/tasks.jsonl", "runs/y/ppo/stage.json")),
    "sweeps.md": HowTo(("runs/kl-0.1/evaluate/results.json", "runs/python-kl-0.1/ppo/stage.json"), script="sweep.py"),
    "serving.md": HowTo(("runs/x/export/ppo/config.json", "runs/x/generate/ppo.jsonl"), visit=ask),
    "dpo.md": HowTo(("runs/x/dpo/stage.json",)),
    "start.md": HowTo(("runs/x/report.html",), before=on_gold),
    "judging.md": HowTo(("runs/x/evaluations/labels.json",), visit=label_all, before=on_gold),
    "ways.md": HowTo(("runs/third/evaluate/results.json",), before=alternative),
    "rounds.md": HowTo(("runs/x-round-2/serve/labels.jsonl", "runs/y/ppo/stage.json"), label_all, before=on_gold),
    "label_tools.md": HowTo(("from_table/dataset.json", "runs/demo-round/reward/stage.json"), before=on_gold),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, gold_run: Run) -> Path:
    folder = tmp_path_factory.mktemp("howtos")
    shutil.copytree(gold_run.folder, folder / "gold")
    shutil.copytree(STUDIO, folder / "round")
    shutil.copy(STUDIO / "ranker" / "export.json", folder)
    cli.main(["import", f"path={STUDIO / 'ranker'}/export.json", f"out={folder / 'round' / 'ranker' / 'imported'}"])
    (folder / "mine.py").write_text(FENCE.findall((ROOT / "docs" / "own_reward.md").read_text("utf-8"))[0][1])
    repository = folder / "cache" / f"models--{HUB.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    save(repository / "snapshots" / COMMIT, "llama")
    shutil.copytree(repository / "snapshots" / COMMIT, folder / "m")
    pairs = [f'"Where is the {i} cat?","On the mat {i}.","{"No " * (1 + i % 3)}"' for i in range(20)]
    (folder / "labels.csv").write_text("\n".join(["prompt,chosen,rejected", *pairs, ""]))
    (folder / "d.json").write_text(json.dumps([{"instruction": f"Say {i} words.", "output": "1."} for i in range(20)]))
    table = [f"What is {i}?,It is {i}.,No.,answer_{1 + i % 2}" for i in range(9)]
    (folder / "table.csv").write_text("\n".join(["question,answer_1,answer_2,label", *table, ""]))
    rows = {
        "prompts": [{"prompt": f"Say {i} words."} for i in range(20)],
        "p": [{"question": f"What is {i} and {i}?", "answer": str(2 * i)} for i in range(20)],
        "labels": [{"prompt": f"At {i}?", "chosen": f"Here {i}.", "rejected": "No " * (1 + i % 3)} for i in range(20)],
        "gold": [{"prompt": f"Is {i} even?", "chosen": "A", "rejected": "B"} for i in range(5)],
        "si100": [{"instruction": f"Say {i} words.", "output": "1."} for i in range(20)],
    }
    shutil.copy(folder / "labels.csv", folder / "hh800.csv")
    for name, records in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture(scope="module")
def first(home: Path) -> Path:
    """The folder of align.md after its commands: with the run x, from which the other pages go on."""
    with pytest.MonkeyPatch.context() as patch:
        return follow(patch, "align.md", home, home.parent / "first", "cache")


def follow(patch: pytest.MonkeyPatch, page: str, source: Path, folder: Path, *without: str) -> Path:
    """Run the commands of a page in a copy of a folder, with the stages in this process."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*without))
    patch.chdir(folder)
    patch.setattr("sys.argv", ["rlhf"])
    patch.setattr(pipeline, "run_stage", lambda config, stage, overrides: cli.main([stage, SHARED_FLAG, *overrides]))
    if (source / "cache").exists():
        patch.setattr(constants, "HF_HUB_CACHE", str(source / "cache"))
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL):
        Path(name).write_text(code, encoding="utf-8")
    for line in commands_in(ROOT / "docs" / page):
        words = [word for word in shlex.split(line)[1:] if word != "…"]
        sizes = [*SIZES.get(words[0], []), *HOWTOS[page].before(words)]
        end = words.index("--") if "--" in words else len(words)
        if words[0] == "serve":
            visited(patch, HOWTOS[page].visit, [*words, *sizes])
        elif "rounds=3" in words:
            with pytest.raises(SystemExit, match=r"^2$"):  # tasks wait for labels
                cli.main([*words, *sizes])
        else:
            cli.main([*words[:end], *sizes, *words[end:]])
    if script := HOWTOS[page].script:
        small = dict(word.replace("tracking=", "tracking.kind=").split("=") for word in SIZES["pipeline"])
        code = Path(script).read_text(encoding="utf-8")
        exec(code.replace("parents_sft", "**small, parents_sft"), {"small": small})
    for path in HOWTOS[page].results:
        assert Path(path).is_file(), path
    return folder


def visited(patch: pytest.MonkeyPatch, visit: Callable[[str], None], words: list[str]) -> None:
    """`rlhf serve`, until a thread's visit of its address is over."""
    failed: list[BaseException] = []

    def start(app: Any) -> Any:
        server = make_server(app)

        def act() -> None:
            try:
                while not server.started:
                    time.sleep(0.01)
                host, port = server.servers[0].sockets[0].getsockname()
                visit(f"http://{host}:{port}")
            except BaseException as error:
                failed.append(error)
            finally:
                server.should_exit = True

        threading.Thread(target=act, daemon=True).start()
        return server

    make_server = serve.make_server
    with patch.context() as within:
        within.setattr(serve, "make_server", start)
        cli.main(words)
    assert not failed, failed


def test_a_csv_of_preferences_becomes_a_model_that_transformers_loads(first):
    assert AutoModelForCausalLM.from_pretrained(first / "runs" / "x" / "export" / "ppo").config.vocab_size == 410
    assert read_json(first / "runs" / "x" / "evaluate" / "results.json")["policy"] == "ppo"


@pytest.mark.parametrize("page", [page for page in HOWTOS if page != "align.md"])
def test_the_commands_of_a_page_run(home, request, page, monkeypatch, tmp_path):
    # a command or the gold run is the run x
    if HOWTOS[page].before in (alternative, on_gold) or page in ("own_reward.md", "size.md"):
        follow(monkeypatch, page, home, tmp_path / "page", "cache")
    else:
        follow(monkeypatch, page, request.getfixturevalue("first"), tmp_path / "page", "export")


@pytest.mark.long  # every command starts processes
@pytest.mark.timeout(1800)
def test_the_commands_on_several_gpus_run_with_two_processes(home, tmp_path, monkeypatch):
    """scale.md: eight processes are two, two nodes of eight are two of one on this machine. accelerate counts CPUs as GPUs only if told,
    and so does deepspeed."""
    shutil.copytree(home / "m", tmp_path / "m")
    shutil.copy(home / "labels.csv", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    blocks = "\n".join(code for _, code in FENCE.findall((ROOT / "docs" / "scale.md").read_text(encoding="utf-8")))
    started: list[subprocess.Popen[bytes]] = []
    for line in re.findall(r"^(?:rlhf|torchrun|accelerate|deepspeed) .*$", blocks.replace("\\\n", " "), re.MULTILINE):
        count = "1" if "--nnodes" in line else "2"
        small = {"8": count, "node-0": "127.0.0.1", "launcher.processes=8": "launcher.processes=2"}
        words = [small.get(word, word.replace("/shared/", "")) for word in shlex.split(line.partition(" #")[0])]
        if words[0] == "accelerate":
            words.insert(2, "--multi_gpu")
        more = [*SIZES["pipeline"], "model.pretrained=m"] if "pipeline" in words else ["overwrite=true"]
        started.append(subprocess.Popen([*words, *more]))
        if "--node-rank 0" not in line:  # which waits for the other node
            assert [process.wait() for process in started] == [0] * len(started), line
            started.clear()
    assert not started and read_json(Path("runs/x/evaluate/results.json"))["policy"] == "ppo"
