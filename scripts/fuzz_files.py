"""Damage the files of a small run, a foreign checkpoint, an import, a labelling server and YAML; read them with the commands. Seeded.

    python scripts/fuzz_files.py FOLDER [minutes=5] [seed=0]

Each case damages one file (JSON with values of other types, sizes and depths, cut or flipped bytes, a pipe, a device, a folder in
its place), gives the stage's record the hash of what is there, as a forger would, and runs one reader. Some readers get odd arguments,
hosts or closed streams instead. The reader must end with 0, or with 2 and one line: no traceback, no more than CASE_SECONDS and
CASE_BYTES. What broke lies in FOLDER/broken; exit code 1.
The first start trains the run (a minute). Readers run in processes forked from this one.
"""

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fault_run import arguments, import_everything, leave_after, run_stage, wait
from fuzz_rows import DAMAGES, byte_flip, cut, swapped
from safetensors.torch import save_file

import rlhf.cli
from rlhf.commands.sample import check_free
from rlhf.commands.serve import UserError, check_address
from rlhf.config import CheckpointConfig, Config
from rlhf.data.corpus import PackedCorpus
from rlhf.data.reading import load_all
from rlhf.data.storage import read_assignments
from rlhf.model.adopt import adopt
from rlhf.model.classifier import load_reward_model
from rlhf.runs.checkpoints import latest_checkpoint, save_checkpoint
from rlhf.runs.folders import hash_of
from rlhf.runs.sources import classifier_folder
from rlhf.runs.stage import RECORDS
from rlhf.serving.labelling import LabelFile, Labelling, ServeConfig
from rlhf.serving.managing import Staff
from rlhf.serving.security import Access, Guard, RefusedError
from rlhf.system.exits import ending
from rlhf.system.files import hash_files, read_json, write_json, write_jsonl
from rlhf.training.state import put_random_state, random_state, read_state, write_state

CASE_SECONDS, CASE_BYTES = 90, 12 << 30  # of address space, of which libraries map most
STAGES = ("world", "tokenizer", "pretrain", "sft", "label", "reward")
RUN = ("runs_dir=runs", "run=small", "device=cpu", "tracking=off", "--shared-settings")
# Keys that a damaged configuration may have besides those of the file.
KEYS = (
    "architectures", "attention_dropout", "return_dict", "num_hidden_layers", "vocab_size", "hidden_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings", "eos_token_id", "bos_token_id", "pad_token_id",
    "model_max_length", "tokenizer_class", "attn_implementation", "_attn_implementation", "dtype", "torch_dtype", "rope_parameters",
    "rope_scaling", "tie_word_embeddings", "num_labels", "id2label", "problem_type", "auto_map", "model_type", "quantization_config",
    "extra_special_tokens", "added_tokens_decoder", "chat_template", "pad_token", "eos_token", "transformers_version", "pruned_heads",
    "output_hidden_states", "layer_types", "sliding_window", "rms_norm_eps", "hidden_act", "initializer_range", "use_cache", "gain",
    "shift", "trunk", "read_tokens", "run", "versions", "config", "counts", "memory", "steps", "summary", "parents", "data", "git",
    "status", "files", "splits", "rlhf_import", "weight_map", "metadata", "task", "replaces", "group", "split", "user", "prompt_id",
)  # fmt: skip
ODD: tuple[Any, ...] = (
    5, -1, 0, 2**31, 2**63, 10**30, 1e308, "5", "", True, None, [], {}, [[1]], [None], {"a": [1]}, "../../x", "\0", "\ud800", -0.5,
)  # fmt: skip
PACKAGE = b"# @package _global_\n"  # first line of a YAML file; JSON, which is YAML too, follows
BOMB = b"".join(b"a%d: &a%d [%s]\n" % (i, i, b", ".join([b"*a%d" % (i - 1) if i else b"x"] * 9)) for i in range(9))


def damaged(raw: bytes, chance: random.Random) -> bytes:
    """One damage; most of them leave JSON."""
    if raw.startswith(PACKAGE):
        inside = raw[len(PACKAGE) :]
        return PACKAGE + (BOMB if chance.random() < 0.1 else damaged(inside, chance))
    try:
        value = json.loads(raw)
        if not isinstance(value, dict) or not value:
            raise ValueError
    except ValueError:
        first = raw.split(b"\n")[0]
        with contextlib.suppress(ValueError):
            row = json.loads(first)
            if isinstance(row, dict) and row:
                return damaged(first, chance) + raw[len(first) :]
        return chance.choice((byte_flip, cut))(raw or b"{}", {}, chance)
    way = chance.random()
    if way < 0.35:
        return json.dumps(value | {chance.choice([*KEYS, *value]): chance.choice(ODD)}).encode()
    if way < 0.7:
        return json.dumps(swapped(value, chance), default=str).encode()
    return DAMAGES[chance.choice(list(DAMAGES))](raw, value, chance)


def put(path: Path, chance: random.Random) -> str:
    """Damage a file; returns how."""
    raw, way = path.read_bytes(), chance.random()
    if way < 0.9:
        path.write_bytes(damaged(raw, chance))
        return "content"
    path.unlink()
    kind = chance.choice(("pipe", "zero", "folder", "missing", "itself", "empty"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind in ("zero", "itself"):
        path.symlink_to("/dev/zero" if kind == "zero" else path.name)
    elif kind == "folder":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    return kind


def forge(stage: Path) -> None:
    """Give a stage's record the hashes of what is there."""
    with contextlib.suppress(Exception):
        record = read_json(stage / "stage.json")
        record["files"] = hash_files(stage, skip=(*RECORDS, "checkpoints"))
        write_json(stage / "stage.json", record | {"hash": hash_of(record)})


def command(*words: str) -> Callable[[], None]:
    def read() -> None:
        rlhf.cli.main([*words, *(RUN if words[0] != "import" else ())])

    read.__name__ = " ".join(words)
    return read


def scores() -> None:
    run = rlhf.load("runs/small", device="cpu")
    run.score(["hello"], ["there"])
    run.sample(["hello"], "sft", max_new_tokens=4)


def adopts() -> None:
    adopt("foreign", say=lambda _: None)


def classifies() -> None:
    import torch

    model: Any = load_reward_model(classifier_folder(Config(), "judge", "reward.model"), torch.device("cpu"))
    model.network.eval()


def reads_import() -> None:
    load_all("imported")
    read_assignments(Path("imported"))


def reads_corpus() -> None:
    PackedCorpus.load("runs/small/pretrain/corpus").blocks("train", 16)


def reads_checkpoint() -> None:
    if (folder := latest_checkpoint(Path("runs/small/sft/checkpoints"), say=lambda _: None)) is not None:
        read_state(folder)
        put_random_state(folder)


def reads_labelling() -> None:
    Labelling(LabelFile(Path("serve/labels.jsonl")), [], ServeConfig(), 0)
    Staff(Path("serve"), ["ann"], "http://127.0.0.1/", Path("serve/instructions.txt"))
    check_free(Path("serve/sample"), overwrite=True)


def odd_call() -> None:
    """A loaded run with arguments of other types."""
    given: dict[str, Any] = {"prompts": ["hello"], "stage": "sft", "temperature": 1.0, "max_new_tokens": 2, "seed": 0}
    given[random.choice(list(given))] = random.choice((*ODD, ["sft"], [{"role": "user"}], [["a"]], float("nan")))
    rlhf.load("runs/small", device="cpu").sample(**given)


def odd_host() -> None:
    """A Host header, and an address to listen at."""
    parts = ("127.0.0.1", "localhost", "[::1]", "8000", "evil.com", *"[]:x@#\\/\0 é")
    host = "".join(random.choices(parts, k=random.randint(1, 5)))
    with contextlib.suppress(RefusedError):
        Guard(None, Access(Config().serve, {}, True)).check({"path": "/", "method": "GET"}, {"host": host})
        if host.removesuffix(":8000") not in ("127.0.0.1", "localhost", "[::1]"):
            raise AssertionError(f"the server answers to {host!r}")
    config = Config()
    config.serve.host = host
    with contextlib.suppress(UserError):
        check_address(config)


def closed_streams() -> None:
    names = random.choice((["stdout"], ["stderr"], ["stdout", "stderr"]))
    vars(sys).update(dict.fromkeys(names))  # so does Python, if they are closed when it starts
    command("watch", "watch.wait=false")()


CHAT = ("chat.stage=sft", "rollout.max_new_tokens=2")


def odd_text() -> None:
    texts = ("\ud800", "a\udfffb", "\0", "\x1b[31m", "${oc.env:HOME}", "[" * 999, "\U0010ffff", "a" * 10_000)
    command("chat", *CHAT, f"chat.message={random.choice(texts)}")()


ODD_READERS = odd_call, odd_host, closed_streams, odd_text
EXPORT = command("export", "export.stage=sft", "export.out=out", "overwrite=true")
EXPORT_REWARD = command("export", "export.stage=reward", "export.out=out", "overwrite=true")
TALK = command("chat", *CHAT, "chat.message=hello")
SHOW = command("report"), command("watch", "watch.wait=false")
READERS: dict[str, tuple[Callable[[], None], ...]] = {
    "runs/small/sft/stage.json": (EXPORT, *SHOW, TALK, scores, command("reward", "overwrite=true", "reward.epochs=0")),
    "runs/small/reward/stage.json": (EXPORT_REWARD, *SHOW, scores),
    **{f"runs/small/{name}": SHOW for name in (
        "evaluate/results.json", "evaluate/samples.jsonl", "pipeline.json", "reward/audit.json", "sft/metrics.jsonl",
        "sft/samples.jsonl", "sft/config.yaml")},
    **{f"runs/small/sft/model/{name}.json": (EXPORT, TALK, scores) for name in (
        "config", "generation_config", "tokenizer", "tokenizer_config")},
    "runs/small/sft/model/model.safetensors": (EXPORT, TALK),
    "runs/small/reward/model/config.json": (EXPORT_REWARD, scores),
    "runs/small/pretrain/corpus/meta.json": (reads_corpus,),
    "runs/small/pretrain/adopted.json": (EXPORT,),
    "runs/small/settings.json": (TALK, SHOW[0]),
    "own/experiment/mine.yaml": (command("chat", "--config-dir", "own", "experiment=mine", *CHAT, "chat.message=hello"),),
    **{f"serve/{name}": (reads_labelling,) for name in ("labels.jsonl", "labelers.json", "labelers.txt", "sample/sample.json")},
    "serve/instructions.txt": ODD_READERS,
    **{f"runs/small/sft/checkpoints/step-1/{name}.json": (reads_checkpoint,) for name in ("manifest", "state")},
    **{f"foreign/{name}": (adopts,) for name in (
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json",
        "special_tokens_map.json", "chat_template.jinja", "README.md")},
    **{f"judge/{name}": (classifies,) for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "text_reward.json")},
    "imported/dataset.json": (reads_import, command("import", "path=labels.jsonl", "out=out", "earlier=imported", "overwrite=true")),
    "labels.jsonl": (command("import", "path=labels.jsonl", "out=out", "overwrite=true"),),
}  # fmt: skip


def make_models() -> None:
    """A language model and a classifier under transformers' names."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained("runs/small/sft/model", trust_remote_code=False)
    blocks = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 2)
    sizes: dict[str, Any] = blocks | dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    sizes |= {"vocab_size": len(tokenizer), "max_position_embeddings": 32}
    ends: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": [tokenizer.eos_token_id], "pad_token_id": 0}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **ends))
    model.save_pretrained("foreign", max_shard_size="20KB")
    Path("foreign/README.md").write_text("---\nlicense: mit\n---\n", encoding="utf-8")
    judge = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes | {"num_labels": 1}))
    judge.save_pretrained("judge")
    write_json(Path("judge/text_reward.json"), {"gain": 1.0, "shift": 0.0, "rendering": "template"})
    for folder in ("foreign", "judge"):
        tokenizer.save_pretrained(folder)
        write_json(Path(folder, "special_tokens_map.json"), {"eos_token": tokenizer.eos_token})


def make_files(home: Path) -> None:
    """A run, a foreign checkpoint, a classifier, labels and their import."""
    for stage in STAGES:
        run_stage(stage, home, [])
    os.chdir(home)
    make_models()
    import torch

    run = Path("runs/small")
    (run / "evaluate").mkdir(exist_ok=True)
    interval = {"value": 0.5, "ci95": [0.4, 0.6]}
    gold: dict[str, Any] = dict.fromkeys(("win_rate_vs_sft", "win_rate_greedy"), interval)
    gold |= {"mean_score": {"ppo": interval}, "parts": {"ppo": {"a": 1}}}
    reward = {"accuracy": interval, "calibration": [{"gap": 1, "predicted": 0.5, "observed": 0.5, "n": 3}]}
    results = {"kl_to_sft_nats": 1.0, "gold": gold, "reward_model": reward}
    results |= {"reward": {"ppo": interval}, "ended": {"ppo": 1.0}}
    write_json(run / "evaluate/results.json", results)
    prompt = [{"role": "user", "content": "a"}]
    sample = {"step": 1, "prompt": prompt, "response": "b", "score": 1.0, "answers": {"sft": "c"}}
    for place in ("evaluate/samples.jsonl", "sft/samples.jsonl"):
        write_jsonl(run / place, [sample])
    stages = {"sft": {"seconds": 1.0, "peak_rss_mb": 1.0, "state": "done", "summary": {}}}
    write_json(run / "pipeline.json", {"stages": stages, "seconds": 2.0})
    write_json(run / "reward/audit.json", {"attacks": {"length": {"value": 1.0, "ci95": [0, 1]}}})

    def write(folder: Path) -> None:
        write_state(folder, {"weights": {"a": torch.zeros(2)}, "steps": {}}, {})
        save_file(random_state(), str(folder / "rng.safetensors"))

    save_checkpoint(run / "sft/checkpoints", 1, write, CheckpointConfig())
    rows = [
        {"kind": "ranking", "id": f"r{i}", "prompt": f"Say {i}", "responses": [{"id": "a", "text": "A"}, {"id": "b", "text": "B"}],
         "ranking": [["a"], ["b"]], "labeler": "x", "metadata": {"task": f"t{i}", "replaces": f"q{i}", "group": "g", "deep": {"a": [1]}}}
        for i in range(8)
    ]  # fmt: skip
    Path("serve/sample").mkdir(parents=True)
    for file in (Path("labels.jsonl"), Path("serve/labels.jsonl")):
        write_jsonl(file, rows)
    Path("serve/instructions.txt").touch()
    write_json(Path("serve/labelers.json"), {"ben": "add", "ann": "pause"})
    Path("serve/labelers.txt").write_text(f"ann http://127.0.0.1/#{'a' * 32}\n", encoding="utf-8")
    write_json(Path("serve/sample/sample.json"), {"counts": {"items": 1}, "files": {}})
    write_json(run / "pretrain/adopted.json", {"source": "x", "revision": None, "licence": "mit", "sha256": {}})
    write_json(run / "settings.json", {"sft.lr": "0.001"})
    Path("own/experiment").mkdir(parents=True)
    mine = b'{"sft": {"lr": 0.001, "epochs": 1}, "chat": {"greedy": true}}'
    Path("own/experiment/mine.yaml").write_bytes(PACKAGE + mine)
    command("import", "path=labels.jsonl", "out=imported")()


def run_reader(reader: Callable[[], None], said: Path) -> tuple[int | None, str]:
    """Exit code (None: it took too long) and output of a reader in a process of its own."""
    for left in (Path("out"), Path("out.partial")):
        shutil.rmtree(left, ignore_errors=True)
    pid = os.fork()
    if not pid:
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2), os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = io.StringIO()
        resource.setrlimit(resource.RLIMIT_AS, (CASE_BYTES, CASE_BYTES))

        def read() -> None:
            with ending():
                reader()

        leave_after(read)
    ended = wait(pid, CASE_SECONDS)
    if ended is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return ended, said.read_text(encoding="utf-8", errors="replace")


def problem(code: int | None, said: str) -> str | None:
    """The promise that a reader broke, or None."""
    if code is None:
        return f"no end within {CASE_SECONDS} s"
    errors = sum(line.startswith("rlhf: error:") for line in said.splitlines())
    if code not in (0, 2) or "Traceback" in said or "panicked" in said:
        return f"exit code {code}"
    return f"exit code 2 with {errors} lines of error" if code == 2 and errors != 1 else None


def main(folder: Path, minutes: float, seed: int) -> int:
    """Damage and read until the time is over; returns the exit code."""
    import_everything()
    good, home, broken = folder / "good", folder / "home", folder / "broken"
    if not (good / "imported").is_dir():
        shutil.rmtree(good, ignore_errors=True)
        good.mkdir(parents=True)
        make_files(good)
    for old in (broken, home):
        shutil.rmtree(old, ignore_errors=True)
    broken.mkdir()
    shutil.copytree(good, home)
    os.chdir(home)
    for readers in READERS.values():
        for reader in dict.fromkeys(readers):
            code, said = run_reader(reader, folder / "said.txt")
            if code and reader not in (READERS["runs/small/sft/stage.json"][-1], *ODD_READERS):
                sys.exit(f"{reader.__name__}: ends with {code} on good files: {said[-2000:]}")
    begun, cases, tally = time.monotonic(), 0, Counter[str]()
    while time.monotonic() < begun + 60 * minutes:
        chance = random.Random(f"files-{seed}-{cases}")
        random.seed(f"arguments-{seed}-{cases}")
        name = chance.choice(list(READERS))
        way = put(home / name, chance)
        stage = Path(*Path(name).parts[:3]) if name.startswith("runs/") and name.count("/") > 2 else None
        if stage is not None:
            forge(home / stage)
        reader = chance.choice(READERS[name])
        code, said = run_reader(reader, folder / "said.txt")
        tally[f"exit {code}"] += 1
        if (why := problem(code, said)) is not None:
            told = f"{name} ({way}), {reader.__name__}: {why}"
            if (home / name).is_file():
                shutil.copy(home / name, broken / f"{cases}-{Path(name).name}")
            (broken / f"{cases}.txt").write_text(f"{told}\n{said}", encoding="utf-8")
            print(f"BROKEN {cases}: {told}: {said.strip().splitlines()[-1:]}", flush=True)
        for place in {home / name, home / (stage or "") / "stage.json"}:
            shutil.rmtree(place, ignore_errors=True)
            place.unlink(missing_ok=True)
            if (good / place.relative_to(home)).exists():
                shutil.copy(good / place.relative_to(home), place)
        cases += 1
        if cases % 50 == 0:
            print(f"{cases} cases after {time.monotonic() - begun:.0f} s: {dict(tally)}", flush=True)
    print(f"{cases:,} cases in {minutes:g} minutes: {dict(tally)}; broken: {len(list(broken.glob('*.txt')))}")
    return 1 if any(broken.iterdir()) else 0


if __name__ == "__main__":
    sys.exit(main(*arguments(minutes=5.0, seed=0)))
