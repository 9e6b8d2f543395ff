"""The data sources of a stage, and their hashes. Imports neither torch nor transformers."""

import contextlib
import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlhf.config import Config
from rlhf.config.setting import listed
from rlhf.config.stages import pretraining_tokens
from rlhf.data.inputs import RECORD_SUFFIXES, ROW_SUFFIXES, TEXT_SUFFIXES, resolve_sources
from rlhf.data.reading import load_comparisons, load_demonstrations, load_prompts
from rlhf.data.records import PromptRecord, Record
from rlhf.data.splits import given_split, prompt_key, record_split, shared_beginnings, uniform
from rlhf.data.storage import MANIFEST, verify
from rlhf.errors import UserError
from rlhf.recipe import BASELINES, REWARD_SOURCES, STAGES
from rlhf.runs.folders import check_output, is_complete, policy_folder, rates, reward_sources, stage_folder
from rlhf.system.files import download, read_json, sha256_file
from rlhf.system.plugins import is_address, is_function, source_sha256

T = TypeVar("T", bound=Record)
P = TypeVar("P")
FEW_PROMPTS = 10  # a split with fewer gives no figures
LABELS = ("demonstrations", "comparisons", "prompts")  # the kinds of data with prompts
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")  # on the hub: owner/name, optionally @revision
CLASSIFIER_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def fractions(config: Config) -> dict[str, float]:
    """Shares of train, dev and test, for `record_split`."""
    dev, test = config.data.dev, config.data.test
    return {"train": 1.0 - dev - test, "dev": dev, "test": test}


def in_split(config: Config, records: Sequence[T], *splits: str) -> list[T]:
    """The label records of these splits."""
    seed, shares, shared = config.data.split_seed, fractions(config), beginnings(config, records)
    return [record for record in records if record_split(record, seed, shares, shared) in splits]


def beginnings(config: Config, records: Sequence[Record] | None = None) -> tuple[str, ...]:
    """`shared_beginnings` of the files that the user named, whichever stage reads `records`: a prompt has one split in
    all stages. Empty if every one of the records states its split or group.
    """
    if records is not None and all(given_split(record) or "group" in record.metadata for record in records):
        return ()
    sources = tuple(tuple(map(str, listed(getattr(config.data, kind)))) for kind in LABELS)
    return beginnings_in(sources, config.data.format, config.data.allow_partial)


@functools.lru_cache(maxsize=8)
def beginnings_in(sources: tuple[tuple[str, ...], ...], format: str, allow_partial: bool) -> tuple[str, ...]:
    prompts: list[PromptRecord] = []
    for given in sources:
        with contextlib.suppress(UserError):  # the stage that reads the source reports it
            prompts += load_prompts(list(given), format, allow_partial)[0] if given else []
    return shared_beginnings(record.prompt for record in prompts)


def sample_prompts(
    config: Config, items: Sequence[P], count: int, of: Callable[[Any], PromptRecord] = lambda prompt: prompt
) -> list[P]:
    """`count` of the prompts in their order: those with the least hashes by data.split_seed, and one of each file."""
    records = [of(item) for item in items]
    drawn = [uniform(f"sampled {prompt_key(record.prompt)}", config.data.split_seed) for record in records]
    order = sorted(range(len(drawn)), key=drawn.__getitem__)
    of_file = {records[i].file: i for i in reversed(order)}
    order.sort(key=lambda i: of_file[records[i].file] != i)
    return [items[i] for i in sorted(order[:count])]


def data_source(config: Config, kind: str) -> Any:
    """The sources of one kind of data (for prompts also those of the others), or None if none are given and no stage writes them."""
    given = getattr(config.data, kind)
    if kind == "comparisons" and config.rounds > 1 and not config.gold.enabled:  # those given, and of the rounds
        return str(stage_folder(config, "label") / "comparisons.jsonl")
    if given is not None:
        return given
    if config.gold.enabled and (kind, config.gold.truth) != ("corpus", "vader"):
        row = next(row for row in STAGES.values() if kind in row.gold_data)
        return str(stage_folder(config, row.name) / row.gold_data[kind])
    if kind == "prompts":
        return [*listed(config.data.demonstrations), *listed(config.data.comparisons)] or None
    return None


def need_source(config: Config, kind: str) -> Any:
    """As `data_source`. Raises: UserError if there is none."""
    source = data_source(config, kind)
    if source is None:
        adopted = kind == "demonstrations" and config.model.pretrained
        more = ", or sft.epochs=0 to take the pretrained model as the SFT model" if adopted else ""
        raise UserError(f"data.{kind} is not set: give a file, a folder or a hub id, or use experiment=gold{more}")
    return source


def kinds_read(config: Config, stage: str) -> tuple[str, ...]:
    """The kinds of data that a stage reads. An adopted model needs no corpus; if there is one, pretraining continues. A
    world of passages takes them from the corpus; SFT without epochs needs no demonstrations.
    """
    adopts = config.model.pretrained is not None
    continues = stage == "pretrain" and pretraining_tokens(config) > 0 and data_source(config, "corpus") is not None
    corpus = config.gold.truth == "vader" if stage == "world" else not adopts or continues
    # of the others only `rate` cannot do without
    shown = stage == "rate" or data_source(config, "demonstrations") is not None
    reads = {"corpus": corpus, "demonstrations": config.sft.epochs > 0 if stage == "sft" else shown}
    return tuple(kind for kind in STAGES[stage].data if reads.get(kind, True))


def hash_model(name: str | None, prefix: str) -> dict[str, str]:
    """{prefix + file: sha256} of a local model's folder or file; empty for None and for a hub id."""
    path = Path(name or "").expanduser()
    if name is None or not path.exists():
        return {}
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    return {f"{prefix}{file.name}": sha256_file(file) for file in files}


def reward_folder(config: Config, name: str | None, setting: str = "ppo.rewards") -> Path:
    """The reward stage of this run, or of the run or folder that is named; or a classifier's folder, which has no
    stage.json. PPO also takes a rate stage: `rate` of this run, or run/rate. Raises: UserError.
    """
    if name is None:
        return stage_folder(config, "reward")
    runs, kinds = Path(config.runs_dir), ("judge", "rate") if setting == "ppo.rewards" else ("judge",)
    if name == "rate" and "rate" in kinds:
        folder = stage_folder(config, "rate")
        check_output(folder, "rate")
        return folder
    for candidate in (runs / name / "reward", Path(name) / "reward", Path(name), runs / name):
        if (candidate / "stage.json").exists():
            check_output(candidate, candidate.name if candidate.name in kinds else "reward")
            return candidate
    return classifier_folder(config, name, setting)


def classifier_folder(config: Config, name: str, setting: str) -> Path:
    """The files of a finished classifier: a local folder, or a hub id (optionally `owner/name@revision`).
    Raises: UserError if it is neither, or does not have exactly one label.
    """
    folder = Path(name) if (Path(name) / "config.json").is_file() else hub_folder(name, setting)
    if folder is None:
        no = f"no run under {config.runs_dir}/ with a reward model, and no folder or hub id of a classifier"
        raise UserError(f"{setting}: {name}: {no}, nor a function file.py:name: check the name")
    described = read_json(folder / "config.json")
    if described.get("model_type") == "rlhf_reward":
        raise UserError(f"{setting}: {name}: the model of a reward stage: name the stage's folder, with stage.json")
    labels = described.get("id2label")
    count = len(labels) if isinstance(labels, dict) else 2  # transformers' default
    if count != 1 and not (folder / "text_reward.json").is_file():
        kind = f"a {described.get('model_type', 'model')} with {count} labels"
        raise UserError(f"{setting}: {name}: {kind}: want a classifier with one label, or give reward.model")
    return folder


def hub_folder(name: str, setting: str) -> Path | None:
    """The local copy of a hub repository `owner/name` or `owner/name@revision`; None if it is not such a name.
    Raises: UserError if it cannot be downloaded.
    """
    if not REPOSITORY.fullmatch(name) or Path(name.partition("/")[0]).exists():
        return None
    repository, _, revision = name.partition("@")
    return download(f"{setting}: ", repository, revision or None, CLASSIFIER_FILES)


def reward_model_folder(folder: Path) -> Path:
    """The model's folder in the result of `reward_folder`."""
    return folder / "model" if (folder / "stage.json").exists() else folder


def hash_rewards(config: Config) -> dict[str, Any]:
    """Hashes of the reward sources except the run's own reward model and servers: models, files of classifiers and functions."""
    hashes: dict[str, Any] = {}
    for name in filter(None, reward_sources(config)[0]):
        if is_address(name):
            continue
        if is_function(name):
            key = f"reward:{name}"
            if key in hashes:  # functions given from Python may share a name, such as <lambda>
                key += f"#{len(hashes)}"
            hashes[key] = source_sha256("reward function", name)
        elif ((folder := reward_folder(config, name)) / "stage.json").exists():
            hashes[f"reward:{name}"] = check_output(folder, "rate" if folder.name == "rate" else "reward")["hash"]
        else:
            hashes |= hash_model(str(folder), f"reward:{name}/")
    return hashes


def hash_sources(config: Config, stage: str) -> dict[str, str]:
    """{kind:file: sha256} of the data files that the user named and the stage reads; the gold world's are covered by
    its stages' hashes.
    Raises: UserError if a source is missing, or an import is damaged, or partial without data.allow_partial.
    """
    hashes: dict[str, Any] = {}
    raw = False  # whether splits are drawn here
    for kind in kinds_read(config, stage):
        labels = kind != "corpus"
        suffixes = RECORD_SUFFIXES if labels else ROW_SUFFIXES + TEXT_SUFFIXES
        given = getattr(config.data, kind)
        for source in [] if given is None else resolve_sources(given, suffixes, labels):
            if source.path is not None:
                name = f"{kind}:{source.path.name}"
                if name in hashes:  # files with the same name in several folders
                    name += f"#{len(hashes)}"
                raw |= labels and not source.imported
                if source.imported:
                    verify(source.path, config.data.allow_partial)
                # an import's manifest names the hash of every file
                hashes[name] = sha256_file(source.path / MANIFEST if source.imported else source.path)
    if raw and (shared := beginnings(config)):  # on which the splits of all files depend
        hashes["shared beginnings"] = hashlib.sha256("\n".join(shared).encode()).hexdigest()
    if stage in ("tokenizer", "pretrain") or (stage == "world" and config.gold.truth == "vader"):
        hashes |= hash_model(config.model.pretrained, "model.pretrained:")  # of a hub id the record holds the commit
    base = {"reward": config.reward.model, "judge": config.judge.model}.get(stage)
    hashes |= hash_model(base, f"{stage}.model:")
    hashes |= hash_model(config.rate.rules if rates(config, stage) else None, "rate.rules:")
    if {"ppo", *REWARD_SOURCES} & set(STAGES[stage].settings):
        hashes |= hash_rewards(config)
    estimator = config.ppo.advantages
    if stage == "ppo" and is_function(estimator):
        hashes[f"advantages:{estimator}"] = source_sha256("advantage estimator", estimator)
    # stages that these read with some settings only (of SFT pretraining is a parent)
    replays = {"ppo": config.ppo.ptx_coef, "rejection": config.sft.pretrain_fraction, "distill": 0.0}
    reads = {"pretrain": replays.get(stage), "label": stage in replays and config.ppo.prompts != "all"}
    for name in (name for name, wanted in reads.items() if wanted):
        if is_complete(folder := stage_folder(config, name)):
            hashes[name] = check_output(folder, name)["hash"]
    for folder in compared_folders(config).values() if stage == "evaluate" else ():
        hashes[f"{folder.parent.name}/{folder.name}"] = check_output(folder, folder.name)["hash"]
    return {name: digest for name, digest in hashes.items() if digest is not None}  # a built-in function has no file


def compared_folders(config: Config) -> dict[str, Path]:
    """The policies that `evaluate` measures besides PPO's, those of evaluate.compare and this run's complete optional ones, by name."""
    given = {name: policy_folder(config, name, "evaluate.compare") for name in listed(config.evaluate.compare)}
    return given | {name: folder for name in BASELINES if is_complete(folder := stage_folder(config, name))}


def _read(kind: str, load: Callable[..., Any], config: Config, say: Callable[[str], None] | None = None) -> Any:
    """say: prints what was read."""
    records, files = load(need_source(config, kind), config.data.format, config.data.allow_partial)
    said = [str(file) for file in files]
    if (limit := config.data.limit) is not None:
        keys = {prompt_key(record.prompt) for record in records}
        chosen = set(sorted(keys, key=lambda key: hashlib.sha256(key.encode()).digest())[:limit])
        records = [record for record in records if prompt_key(record.prompt) in chosen]
        said.append(f"data.limit={limit}: {len(chosen):,} of {len(keys):,} prompts of data.{kind}")
    if say is not None:
        wanted = [split for split, share in fractions(config).items() if share > 0]
        counts = {split: len({prompt_key(r.prompt) for r in in_split(config, records, split)}) for split in wanted}
        if few := [f"{count} {split}" for split, count in counts.items() if count < FEW_PROMPTS]:
            said.append(
                f"warning: data.{kind} has {' and '.join(few)} prompts: too few for figures to mean much: add prompts"
            )
        for text in said:
            say(text)
    return records


read_comparisons = functools.partial(_read, "comparisons", load_comparisons)
read_demonstrations = functools.partial(_read, "demonstrations", load_demonstrations)
read_prompts = functools.partial(_read, "prompts", load_prompts)
