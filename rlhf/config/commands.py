"""The commands: module, help, the settings that each reads; and the settings of those that are not stages.

Imports neither torch nor hydra.
"""

from dataclasses import dataclass
from typing import Any

from rlhf.config.setting import LEAST_TEMPERATURE, MAX_SEED, NOTHING, group, setting
from rlhf.recipe import GOLD_STAGES, POLICY_STAGES, SAMPLER, STAGES

# Each command's module, one line of help, and the groups of settings that its help shows; the stages have rows of their own.
_STAGES = {row.name: (row.module, row.help, row.groups) for row in STAGES.values()}
COMMANDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "pipeline": ("rlhf.commands.pipeline", "all stages, from raw text to an aligned model and its report",
                 (*dict.fromkeys(group for row in STAGES.values() for group in row.groups), "tracking", "checkpoints", "parents",
                  "launcher", "sharding", "memory", "round")),
    **{name: row for name, row in _STAGES.items() if name not in GOLD_STAGES},
    "report": ("rlhf.commands.report", "write the report of a run as one HTML page", ("report",)),
    "watch": ("rlhf.commands.watch", "follow a run from another terminal", ("watch",)),
    "dashboard": ("rlhf.commands.dashboard", "create or update the W&B dashboard", ("tracking",)),
    "chat": ("rlhf.commands.chat", "talk to a model of a run in the terminal", ("chat",)),
    "serve": ("rlhf.commands.serve", "serve models: an OpenAI-style API, and a page to chat, compare, rank and demonstrate",
              ("serve",)),
    "export": ("rlhf.commands.export", "write a model that plain transformers loads", ("export",)),
    "clean": ("rlhf.commands.clean", "list what can go of a run, and delete it with yes=true", ("clean",)),
    "corpus": ("rlhf.commands.corpus", "clean pretraining text as C4 and GPT-3's was, and account for every document", ()),
    "import": ("rlhf.commands.import_data", "turn labelling data of any known format into records", ("columns", "words")),
    "sample": ("rlhf.commands.sample", "draw K responses per prompt and write the tasks of a labelling round",
               ("sample", "data")),
    "generate": ("rlhf.commands.generate", "have a model answer a file of prompts, for judges and labelers", ("generate",)),
    "plan": ("rlhf.commands.plan", "memory per GPU and stage, hours, and compute-optimal sizes of a planned run",
             ("model", "tokenizer")),
    **{name: row for name, row in _STAGES.items() if name in GOLD_STAGES},
}  # fmt: skip
# Settings that every stage reads, and those that a command reads outside the groups of its help.
_EVERY_STAGE = ("tracking", "checkpoints", "parents", "gold.enabled", "gold.truth", "data.allow_partial")
_ALSO_READ = {
    "chat": ("rollout.max_new_tokens", "parents"),
    "export": ("parents",),
    "generate": ("rollout.max_new_tokens", *SAMPLER, "memory.budget_gb", "parents", "gold.enabled", "data.prompts", "data.demonstrations",
                 "data.comparisons", "data.format", "data.allow_partial"),
    "sample": ("rollout.max_new_tokens", *SAMPLER, "memory.budget_gb", "parents", "gold.enabled"),
}  # fmt: skip
# Commands that read the settings of several, or have a schema of their own.
OF_SEVERAL = ("pipeline", "plan", "import", "corpus")
# Marks overrides meant for several commands: those that this one does not use are ignored.
SHARED_FLAG = "--shared-settings"
CONFIG_GROUPS = ("model", "experiment", "tracking")
WITHOUT_GROUPS = ("import", "corpus")  # commands whose schema has no groups of YAML files


def uses(command: str, key: str) -> bool:
    """Whether a command reads a setting: for a stage, its row in rlhf/recipe.py lists them."""
    if "." not in key:
        return True
    if command in STAGES:
        row = STAGES[command]
        shared = ("memory", *(("sharding", "launcher") if row.several_processes else ()))
        read = (*row.settings, *row.reads, *_EVERY_STAGE, *shared)
    else:
        read = (*COMMANDS[command][2], *_ALSO_READ.get(command, ()))
    return key in read or key.partition(".")[0] in read


CHOOSE = ("first", "random", "uncertain", "disagreement")


@dataclass(slots=True)
class SampleConfig:
    stage: str = setting("sft", "stage whose model answers", choices=POLICY_STAGES)
    stages: Any = setting(None, "policies to compare, as sft or run/ppo: tasks with one response of each", kind="names")
    split: str = setting("train", "split of the prompts", choices=("train", "dev", "test"))
    prompts: int = setting(100, "prompts to sample responses for", min=1)
    choose: str = setting("first", "prompts: in the order of the data, at random, or by reward models", choices=CHOOSE)
    rewards: Any = setting(None, "runs whose reward models choose; none: the run's own", kind="names")
    pool: int = setting(4, "prompts that are answered per prompt that reward models choose", min=1)
    random_fraction: float = setting(0.25, "fraction of chosen prompts that is drawn at random", min=0, max=1)
    turn: str = setting("last", "turn of a dialogue that is answered", choices=("last", "random"))
    responses: int = setting(4, "responses per prompt, K", min=2, max=26)  # whose ids are letters
    temperature: float = setting(1.0, "temperature of sampling", min=LEAST_TEMPERATURE)
    tool: str = setting("native", "tool the tasks are written for", choices=("native", "label_studio"))
    interface: str = setting("ranker", "tasks of a pair, or of a prompt", choices=("pairwise", "ranker"))
    out: str | None = setting(None, "output folder; none: runs/<run>/sample")


@dataclass(slots=True)
class GenerateConfig:
    stage: str = setting("ppo", "stage whose model answers", choices=POLICY_STAGES)
    samples: int = setting(1, "responses per prompt", min=1)
    temperature: float = setting(1.0, "temperature of sampling", min=LEAST_TEMPERATURE)
    greedy: bool = setting(False, "take the most probable token instead of sampling")
    logprobs: bool = setting(False, "with the tokens of each response and their log-probs in nats")
    out: str | None = setting(None, "a file of JSON lines; none: runs/<run>/generate/<stage>.jsonl")


@dataclass(slots=True)
class ReportConfig:
    out: str | None = setting(None, "output file; none: report.html in the run's folder")


@dataclass(slots=True)
class WatchConfig:
    every_seconds: float = setting(1.0, "seconds between two reads of the run's files", above=0, max=86400)
    wait: bool = setting(True, "wait for the run's end; false: print the state and exit")


@dataclass(slots=True)
class ChatConfig:
    stage: str = setting("ppo", "stage whose model answers", choices=POLICY_STAGES)
    temperature: float = setting(1.0, "temperature of sampling", min=LEAST_TEMPERATURE)
    greedy: bool = setting(False, "take the most probable token instead of sampling")
    message: str | None = setting(None, "answer this one message and exit")
    system: str | None = setting(None, "a system prompt before every dialogue")


@dataclass(slots=True)
class ServeConfig:
    port: int = setting(8000, "port to listen on; 0: any free one", min=0, max=65535)
    host: str = setting("127.0.0.1", "address to listen on; any but loopback needs serve.token")
    token: str | None = setting(None, "secret of each request; better as '${oc.env:NAME}'")
    stages: Any = setting(None, "stages to load; none: all finished ones", kind="names")
    batch: int = setting(32, "responses of one model that are drawn together", min=1, max=256)
    queue: int = setting(64, "responses that may wait; further requests get 429", min=0, max=10_000)
    max_new_tokens: int = setting(1024, "largest max_tokens of a request", min=1)
    requests_per_minute: int = setting(1200, "per client", min=1)
    max_body_bytes: int = setting(2**20, "of one request", min=1024, max=2**26)
    tasks: str | None = setting(None, "tasks.jsonl of `rlhf sample`; none: runs/<run>/sample/tasks.jsonl, if any")
    labels: str | None = setting(None, "file that labels are appended to; none: runs/<run>/serve/labels.jsonl")
    labelers: Any = setting(None, "names; each gets a link with a secret; none: one labeler, local", kind="labelers")
    labelers_chat: bool = setting(False, "labelers may also use Chat and Compare")
    labels_per_prompt: int = setting(1, "labelers who rank each prompt", min=1)
    rules: str | None = setting(None, "JSON file of rules, which labelers mark as broken per response; data/rules.json")
    gold: str | None = setting(None, "rankings that are known: each labeler gets them among the tasks")
    check_every: int = setting(0, "after so many tasks comes a gold item, or one ranked before again; 0: never", min=0)
    qualification: int = setting(0, "gold items that each labeler ranks first", min=0)
    qualified: float = setting(0.7, "share of their pairs to order as known, for more tasks", min=0, max=1)
    pipeline: str | None = setting(None, "run whose next labelling round the manager may start; none: no button")
    instructions: str | None = setting(None, "text file that is shown to labelers; none: a short guide")


@dataclass(slots=True)
class ExportConfig:
    stage: str = setting("ppo", "stage whose model is exported", choices=(*POLICY_STAGES, "reward"))
    out: str | None = setting(None, "output folder; none: runs/<run>/export/<stage>")


@dataclass(slots=True)
class CleanConfig:
    yes: bool = setting(False, "delete what is listed")


@dataclass(slots=True)
class ColumnsConfig:
    """`format=table`: what each column contains; nested values by dotted path."""

    prompt: Any = setting(None, "the request; several columns are joined by a blank line", kind="columns")
    system: str | None = setting(None, "a system turn before the prompt")
    id: str | None = setting(None, "the record's id")
    user: str | None = setting(None, "the user who asked")
    response: str | None = setting(None, "the response of a demonstration")
    responses: Any = setting(None, "columns with the responses that winner or scores compare", kind="columns")
    winner: Any = setting(None, "column with the verdict, or one column per labeler", kind="columns")
    ranked: Any = setting(None, "columns with responses, best first", kind="columns")
    scores: Any = setting(None, "columns with the responses' scores, or one with a list", kind="columns")
    labeler: str | None = setting(None, "the labeler")
    created: str | None = setting(None, "time of the judgement")


@dataclass(slots=True)
class WordsConfig:
    """`format=table`: the words of the winner column, each one or a list; none: the usual vocabularies."""

    first: Any = setting(None, "the first response is better", kind="words")
    second: Any = setting(None, "the second response is better", kind="words")
    tie: Any = setting(None, "neither is better", kind="words")


@dataclass(slots=True)
class CorpusConfig:
    """`rlhf corpus`: cleans pretraining text. The steps run in the order of these settings."""

    path: Any = setting(None, "text files, JSON Lines with `text`, folders, hub ids, or a list of these", kind="paths")
    out: str | None = setting(None, "the folder to write: corpus.jsonl, documents.jsonl, report.json", changes=NOTHING)
    encoding: str = setting("utf-8", "encoding of plain text", kind="encoding")
    rules: bool = setting(True, "C4's rules of lines and pages")
    bad_words: str | None = setting(None, "file of words, one per line; a page with one of them goes")
    min_words: int = setting(5, "fewest words of a line", min=1)
    min_sentences: int = setting(3, "fewest sentences of a page", min=0)
    near: float | None = setting(0.8, "least Jaccard index of a near duplicate; none: exact ones alone", above=0, max=1)
    evaluation: Any = setting(None, "prompt or label files whose 13-word sequences are cut out", kind="paths")
    reference: Any = setting(None, "text of good quality, which a classifier tells from path", kind="paths")
    seed: int = setting(0, "seed of the draw that keeps some documents of low quality", min=0, max=MAX_SEED)
    overwrite: bool = setting(False, "replace the contents of out", changes=NOTHING)


@dataclass(slots=True)
class ImportConfig:
    path: Any = setting(None, "a file, a folder, a hub id, or a list of these", kind="paths")
    format: str = setting("auto", "name of the format, auto, or a function as module:name or file.py:name")
    out: str | None = setting(None, "the folder to write", changes=NOTHING)
    columns: ColumnsConfig = group(ColumnsConfig)
    words: WordsConfig = group(WordsConfig)
    sheet: str | None = setting(None, "sheet of a spreadsheet; none: the first one")
    encoding: str = setting("utf-8", "encoding of CSV and TSV files", kind="encoding")
    max_rejects: int = setting(0, "with more rejects, the result is partial and needs data.allow_partial=true", min=0)
    duplicates: str = setting("drop", "what to do with exact duplicates", choices=("drop", "keep"))
    min_gold_accuracy: float = setting(0.0, "leave out labelers who order fewer gold pairs as known", min=0, max=1)
    max_prompts_per_user: int = setting(200, "more prompts of one user are filtered", min=1)
    filter_prefixes: bool = setting(True, "keep only the first of such prompt records")
    pii: str = setting("flag", "e-mail addresses, phone and card numbers in prompts", choices=("flag", "drop", "keep"))
    dev: float = setting(0.05, "fraction of prompts kept for choosing settings", min=0, max=1)
    test: float = setting(0.10, "fraction of prompts kept for the final figures", min=0, max=1)
    seed: int = setting(0, "seed of the splits", min=0, max=MAX_SEED)
    earlier: Any = setting(None, "folders of earlier imports whose prompts keep their splits", kind="paths")
    overwrite: bool = setting(False, "replace the contents of out; its prompts keep their splits", changes=NOTHING)
