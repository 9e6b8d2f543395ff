"""Settings of the commands that are not stages."""

from dataclasses import dataclass
from typing import Any

from rlhf.config.setting import MAX_PROCESSES, MAX_SEED, NOTHING, group, setting
from rlhf.recipe import POLICY_STAGES


@dataclass(slots=True)
class SampleConfig:
    """`rlhf sample`: the next labelling round."""

    stage: str = setting("sft", "whose model answers", choices=POLICY_STAGES)
    split: str = setting("train", "whose prompts", choices=("train", "dev", "test"))
    prompts: int = setting(100, "prompts to sample for", min=1)
    responses: int = setting(4, "K", min=1, max=100)
    temperature: float = setting(1.0, "of sampling", above=0)
    tool: str = setting("native", "form of the tasks", choices=("native", "label_studio", "csv"))
    interface: str = setting("ranker", "of Label Studio and CSV", choices=("pairwise", "ranker"))
    out: str | None = setting(None, "a folder; none: runs/<run>/sample")


@dataclass(slots=True)
class GenerateConfig:
    """`rlhf generate`: responses to a file of prompts (data.prompts), one JSON line a prompt."""

    stage: str = setting("ppo", "whose model answers", choices=POLICY_STAGES)
    samples: int = setting(1, "responses a prompt", min=1)
    temperature: float = setting(1.0, "of sampling", above=0)
    greedy: bool = setting(False, "take the likeliest token instead of sampling")
    logprobs: bool = setting(False, "with the tokens of each response and their log-probs in nats")
    out: str | None = setting(None, "a file of JSON lines; none: runs/<run>/generate/<stage>.jsonl")


@dataclass(slots=True)
class ReportConfig:
    """`rlhf report`. run=a,b,c draws several runs over each other."""

    out: str | None = setting(
        None, "the page; none: report.html in the run's folder, report-<runs>.html beside several"
    )
    figures: str | None = setting(None, "a folder for every figure as a file of its own; none: only the page")
    form: str = setting("svg", "of these files", choices=("svg", "png"))


@dataclass(slots=True)
class WatchConfig:
    """`rlhf watch`: follows a run from another terminal."""

    every_seconds: float = setting(1.0, "seconds between two looks at the run's files", above=0, max=86400)
    wait: bool = setting(True, "for the run's end; false: say where it stands and leave")


@dataclass(slots=True)
class ChatConfig:
    """`rlhf chat`."""

    stage: str = setting("ppo", "whose model answers", choices=POLICY_STAGES)
    greedy: bool = setting(False, "take the likeliest token instead of sampling")
    message: str | None = setting(None, "answer this one message and leave")


@dataclass(slots=True)
class ExportConfig:
    """`rlhf export`."""

    stage: str = setting("ppo", "whose model", choices=POLICY_STAGES)
    form: str = setting(
        "auto",
        "architecture to write",
        choices=("auto", "gpt2", "openai-gpt", "llama", "mistral", "qwen2", "qwen3", "gpt_neox", "rlhf"),
    )
    out: str | None = setting(None, "none: runs/<run>/export")


@dataclass(slots=True)
class ColumnsConfig:
    """`format=table`: which columns hold what; nested ones by dotted path."""

    prompt: Any = setting(None, "the request; several columns are joined by a blank line", kind="columns")
    system: str | None = setting(None, "a system turn before it")
    id: str | None = setting(None, "the record's id")
    user: str | None = setting(None, "who asked")
    response: str | None = setting(None, "a demonstration, or the one response that is rated")
    rating: str | None = setting(None, "of the one response: a number from 1 to 7, or a verdict such as true or bad")
    responses: Any = setting(None, "two or more columns, compared by winner or scores", kind="columns")
    winner: Any = setting(None, "a column, or one per labeler", kind="columns")
    ranked: Any = setting(None, "columns with responses, best first", kind="columns")
    scores: Any = setting(None, "columns with the scores of responses, or one with the list of them", kind="columns")
    labeler: str | None = setting(None, "who judged")
    created: str | None = setting(None, "when")


@dataclass(slots=True)
class WordsConfig:
    """`format=table`: the words of the winner column, each one or a list; none: the usual vocabularies."""

    first: Any = setting(None, "the first response is better", kind="words")
    second: Any = setting(None, "the second one", kind="words")
    tie: Any = setting(None, "neither", kind="words")


@dataclass(slots=True)
class ImportConfig:
    """`rlhf import`: foreign files as records in Arrow, with every row accounted for."""

    path: Any = setting(None, "a file, a folder, a hub id, or a list of these", kind="paths")
    format: str = setting("auto", "a format's name, or auto")
    out: str | None = setting(None, "the folder to write", changes=NOTHING)
    columns: ColumnsConfig = group(ColumnsConfig)
    words: WordsConfig = group(WordsConfig)
    sheet: str | None = setting(None, "of a spreadsheet; none: the first one")
    encoding: str = setting("utf-8", "of CSV and TSV files", kind="encoding")
    max_rejects: int = setting(0, "more than these, and the result needs data.allow_partial=true", min=0)
    duplicates: str = setting("drop", "what happens to them", choices=("drop", "keep"))
    max_prompts_per_user: int = setting(200, "further ones are filtered", min=1)
    prefix_characters: int = setting(
        200, "prompts that begin alike for so long stay in one split (letters and digits: 3/4)", min=1
    )
    filter_prefixes: bool = setting(True, "of such prompt records, keep only the first")
    pii: str = setting("flag", "e-mail addresses, phone and card numbers in prompts", choices=("flag", "drop", "keep"))
    dev: float = setting(0.05, "share of prompts kept for choosing settings", min=0, max=1)
    test: float = setting(0.10, "share of prompts kept for the final figures", min=0, max=1)
    seed: int = setting(0, "of the splits", min=0, max=MAX_SEED)
    earlier: Any = setting(None, "folders of earlier imports whose prompts keep their splits", kind="paths")
    processes: int = setting(1, "that parse", min=1, max=MAX_PROCESSES, changes=NOTHING)
    overwrite: bool = setting(False, "replace what out holds; its prompts keep their splits", changes=NOTHING)
