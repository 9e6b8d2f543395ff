"""Files as records: the rows of a source, the format of a file, and one validated record after another.

A row is an object under its keys or its header's names. A bad line of a line-based file is a reject, and reading goes
on; a damaged array or table ends with a UserError that names the place.
"""

import inspect
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf.data.formats import dialogues, scored, tools
from rlhf.data.formats.shapes import BadRow, Format, Values, is_text
from rlhf.data.formats.table import WANTS, propose_columns
from rlhf.data.inputs import RECORD_SUFFIXES, Source, printable_path, resolve_sources
from rlhf.data.records import (
    KINDS,
    Demonstration,
    PromptRecord,
    Ranking,
    Record,
    RecordType,
    check_of,
    without_replaced,
)
from rlhf.data.rows import Row, read_rows
from rlhf.data.splits import given_split, prompt_key
from rlhf.data.storage import read_records, verify
from rlhf.errors import UserError
from rlhf.system.files import read_json
from rlhf.system.plugins import load_named
from rlhf.system.schemas import first_problem, shown
from rlhf.system.terminal import one_line

HEAD_ROWS = 1000  # rows at the beginning of a file that are looked at together
LOOK_AHEAD = 20  # of these, for recognition
_KEYS = 12  # keys of a row that a message shows
JOINED = "label_studio"  # the format whose judgements with the same `metadata.item` become one ranking per labeler

# The formats and the shapes of their rows, by the module that contains their functions: `from_<name>` and, if the rows of
# a file belong together, `gather_<name>`.
_TABLE: dict[Any, dict[str, str]] = {
    dialogues: {
        "alpaca": "keys instruction, input and output or response",
        "sharegpt": "key conversations with turns of from and value, and perhaps chosen and rejected",
        "messages": "key messages with turns of role and content",
        "self_instruct": "keys instruction and instances of input and output",
        "question_answer": "keys question and answer",
        "decoded": "keys instruction, text (a person's answer) and decoded (a model's)",
        "mt_bench": "key turns with a list of texts",
        "hh": "keys chosen and rejected with dialogues of Human: and Assistant:, or text with two of them and score",
        "trl": "keys chosen and rejected, or prompt and completion (strings or messages); or prompt",
        "pairs": "a prompt (prompt, question or instruction) and chosen_response and rejected_response, "
        "response_j and response_k, or chosen and rejected",
        "choices": "keys prompt, and chosen and rejected, each a list of strings",
        "kto": "prompt and completion, or messages or conversations, and key label (true or false)",
    },
    scored: {
        "ultrafeedback": "keys instruction and completions with response and scores",
        "nectar": "keys prompt and answers, a list of answer, model and rank",
        "webgpt": "keys question with full_text, answer_0, answer_1, score_0 and score_1",
        "openai_comparisons": "keys info, and summaries and choice or a summary with axes",
        "qa_feedback": "keys question, passages, prediction 1 … 4, preference",
        "oasst": "the first message of a tree, or key prompt with it: text, role and replies",
        "oasst_messages": "keys message_id, parent_id, text, role, rank: one message of a tree per row; "
        "rows are counted as trees",
    },
    tools: {
        "argilla": "keys fields and responses (an export of version 2)",
        "label_studio": "keys data and annotations (an export), or data (a task)",
    },
}
FORMATS = {
    "native": Format("native", f"key kind ({', '.join(KINDS)}) and the keys of that record", lambda row: [dict(row)]),
    "table": Format("table", WANTS, lambda row: []),
}
for _module, _wants in _TABLE.items():
    for _name, _shape in _wants.items():
        _gather = getattr(_module, f"gather_{_name}", None)
        FORMATS[_name] = Format(_name, _shape, getattr(_module, f"from_{_name}"), _gather)


def recognise(row: Values) -> str | None:
    """The format of a row: the first of these shapes that it has. A row with an unknown `kind` counts as native."""
    match row:
        case {"kind": str(), "prompt": _}:
            return "native"
        case {"data": dict()} if "annotations" in row or row.keys() <= {"data", "id", "meta", "predictions"}:
            return "label_studio"
        case {"fields": dict(), "responses": dict()}:
            return "argilla"
        case {"prompt": {"text": _, "replies": _}} | {"text": str(), "role": _, "replies": list()}:
            return "oasst"
        case {"message_id": _, "text": _, "role": _}:
            return "oasst_messages"
        case {"info": dict(), "summaries": list(), "choice": _} | {"info": dict(), "summary": {"axes": _}}:
            return "openai_comparisons"
        case {"question": _, "preference": _} if row.keys() >= {f"prediction {i}" for i in range(1, 5)}:
            return "qa_feedback"
        case {"question": _, "answer_0": _, "answer_1": _, "score_0": _, "score_1": _}:
            return "webgpt"
        case {"instruction": _, "completions": [{"response": _}, *_]}:
            return "ultrafeedback"
        case {"prompt": _, "answers": [{"answer": _, "rank": _}, *_]}:
            return "nectar"
        case {"chosen": str(a), "rejected": str(b)} if "prompt" not in row and all(map(dialogues.is_dialogue, (a, b))):
            return "hh"
        case {"text": [str(first), *_], "score": _} if dialogues.is_dialogue(first):
            return "hh"
        case {"prompt": str(), "chosen": [str(), *_], "rejected": [str(), *_]}:
            return "choices"
        case _ if row.keys() & {"label", "kto_tag"} and dialogues.has_one_answer(row):
            return "kto"
        case _ if dialogues.pair_keys(row):
            return "pairs"
        case {"chosen": str() | [{"role": _}, *_], "rejected": str() | [{"role": _}, *_]} | {
            "prompt": _,
            "completion": _,
        }:
            return "trl"
        case {"conversations": [{}, *_]} if ("chosen" in row) == ("rejected" in row):
            return "sharegpt"
        case {"messages": [{"role": _, "content": _}, *_]}:
            return "messages"
        case {"instruction": _, "instances": list()}:
            return "self_instruct"
        case {"instruction": str(), "text": str(), "decoded": str()}:
            return "decoded"
        case {"instruction": _, "output": str() | None} | {"instruction": _, "response": str() | None}:
            return "alpaca"
        case {"question": str(), "answer": str()} if not row.keys() & {"context", "passages", "choices", "options"}:
            return "question_answer"  # a question about one of these columns would be incomplete without it
        case {"turns": [str(), *_]}:
            return "mt_bench"
        case {"prompt": str() | [{"role": _}, *_]} if dialogues.is_prompt_alone(row):
            return "trl"
    return None


Choose = Callable[[str, Sequence[Values]], Format]  # the format of a file, from its name and its first rows


def find_format(name: str, setting: str) -> Choose:
    """How files get the format of this name, or the one that is recognised if it is auto. Raises: UserError if there is none."""
    if name == "auto":
        return partial(_recognise_file, setting)
    if ":" in name:
        # a row that the function cannot read is a reject, so its errors stay as they are
        found = Format(name, "what the function reads", inspect.unwrap(load_named("format", name, ("row",))))
    elif name in FORMATS:
        found = FORMATS[name]
    else:
        known = ", ".join(sorted(FORMATS))
        raise UserError(f"{setting}={name}: no such format: want auto, {known}, or a function as file.py:name")
    return lambda *_: replace(found, why="asked for")


def _recognise_file(setting: str, name: str, rows: Sequence[Values]) -> Format:
    """The format of the first of a file's rows that has one. setting: which chooses a format, for the message. Raises:
    UserError that proposes columns, if there is none.
    """
    found = next(filter(None, map(recognise, rows[:LOOK_AHEAD])), None)
    if found is not None:
        return FORMATS[found]
    keys = ", ".join(one_line(key, 60) for key in list(rows[0])[:_KEYS])
    how = f"format=table {propose_columns(rows)}"
    if setting != "format":
        how = f"`rlhf import path={shlex.quote(name)} out=imported {how}`, then give the folder imported instead"
    raise UserError(f"{name}: no format recognised: rows have the keys {keys}. Name the columns, as: {how}")


def read(source: Source, choose: Choose) -> Iterator[Row]:
    """Every row of a source with its records. `source` gets the format and why. Raises: UserError if the source as a
    whole cannot be read, has no row that can be, or is of no known format.
    """
    rows = read_rows(source)
    head = list(islice(rows, HEAD_ROWS))
    values = [row.value for row in head if not row.problem]
    if not values:
        raise UserError(str(head[0]) if head else f"{source.name}: has no row: want rows of a known format")
    chosen = choose(source.name, values)
    source.format = chosen.name
    source.why = "; ".join(filter(None, [chosen.why or chosen.wants, source.note, chosen.note]))
    every: Iterable[Row] = chain(head, rows)
    stem = printable_path(source.path.name) if source.path else source.name
    for row in every if chosen.gather is None else chosen.gather(every):
        yield convert_row(row, chosen, stem)


def convert_row(row: Row, chosen: Format, stem: str) -> Row:
    """The row with its validated records, or as a reject. A record without an id gets the row's, else
    `<file>:<number>`; of several with `.<i>`. An id of the row that is a number means nothing outside its file, so it
    stays in the metadata.
    """
    if row.problem:
        return row
    try:
        values = list(chosen.convert(row.value))
        if not values:
            raise BadRow("", f"got a row that gives no record, want {chosen.wants}")
        given = row.value["id"] if isinstance(row.value.get("id"), str) else ""
        records: list[Record] = []
        for i, fields in enumerate(values):
            kind = fields.get("kind")
            if not isinstance(kind, str) or kind not in KINDS:
                raise BadRow("kind", f"got {shown(kind)}, want {', '.join(KINDS)}")
            if fields.get("id") is None:
                own = given or f"{stem}:{row.number}"
                fields = fields | {"id": own + (f".{i}" if len(values) > 1 else "")}
                if given and isinstance(metadata := fields.get("metadata"), dict):
                    fields["metadata"] = {key: value for key, value in metadata.items() if key != "id"}
            records.append(KINDS[kind].model_validate(fields))
        own_id = bool(given) or all(fields.get("id") is not None for fields in values)
        return row._replace(records=records, own_id=own_id)
    except BadRow as error:
        field, problem = error.field, error.message
    except ValidationError as error:
        field, problem = first_problem(error)
    except KeyError as error:
        field = one_line(str(error.args[0]), 200)
        problem = f"{field}: missing"
    except Exception as error:  # an unexpected shape must not stop the other rows
        came = one_line(f"{type(error).__name__}: {error}", 60)
        field, problem = "", f"got a shape that {chosen.name} cannot read ({came}), want {chosen.wants}"
    return row._replace(field=field, problem=problem)


def load_all(sources: Any, format: str = "auto", allow_partial: bool = False) -> tuple[list[Record], list[Source]]:
    """All records of the sources, of every kind, and what each file was; of finished imports with the split that was
    written there. Raises: UserError if a source cannot be read, if any row is bad (the message has the first five and
    their number), or if an import had too many rejects, unless `allow_partial`.
    """
    files = resolve_sources(sources, RECORD_SUFFIXES, imports=True)
    records: list[Record] = []
    rejects: list[Row] = []
    for source in files:
        if source.imported:
            assert source.path is not None
            verify(source.path, allow_partial)
            source.format, source.why = "import", "written by rlhf import"
            made = list(read_records(source.path))
            source.rows = len(made)
        else:
            rows = list(read(source, find_format(format, "data.format")))
            source.rows = len(rows)
            rejects += [row for row in rows if row.problem]
            counting = without_replaced(record for row in rows for record in row.records)
            made = [record for record in counting if check_of(record) is None]
            if source.format == JOINED:
                came = f"is of the format {source.format}, whose rows belong together"
                raise UserError(f"{source.name}: {came}: give it to `rlhf import` first")
        source.records.update(record.kind for record in made)
        records += [record.read_from(source.name) for record in made]
    if rejects:
        first = "; ".join([*map(str, rejects[:5]), *(["…"] if len(rejects) > 5 else [])])
        count = sum(file.rows for file in files)
        wrong = format != "auto" and len(rejects) == count
        remedy = f"is data.format={format} right?" if wrong else "correct or remove them"
        raise UserError(f"{len(rejects)} of {count} rows cannot be used: {remedy}: {first}")
    return records, files


def prompts_of(records: Iterable[Record]) -> list[PromptRecord]:
    """The prompts of records of any kind, in order, each once; the first record with a prompt names it. The split and
    group of a demonstration or ranking are kept, since they determine the prompt's split; a demonstration's response is
    `reference` in the metadata, for reward functions that compare with it.
    """
    prompt_of: dict[str, PromptRecord] = {}
    for record in records:
        key = prompt_key(record.prompt)
        if key in prompt_of:
            continue
        if not isinstance(record, PromptRecord):
            kept = {"group": record.metadata.get("group"), "split": given_split(record)}
            kept["reference"] = record.response if isinstance(record, Demonstration) else None
            metadata = {name: value for name, value in kept.items() if value is not None}
            record = PromptRecord(id=record.id, prompt=record.prompt, metadata=metadata).read_from(record.file)
        prompt_of[key] = record
    return list(prompt_of.values())


def load_kind(
    wanted: type[RecordType], sources: Any, format: str = "auto", allow_partial: bool = False
) -> tuple[list[RecordType], list[Source]]:
    """The records of one kind in order, or the distinct prompts of records of any kind; and what each file was. Raises:
    UserError as `load_all`, and if there is none.
    """
    records, files = load_all(sources, format, allow_partial)
    chosen: list[Any] = prompts_of(records) if wanted is PromptRecord else [r for r in records if isinstance(r, wanted)]
    if not chosen:
        read = "; ".join(map(str, files))
        raise UserError(f"no {wanted.model_fields['kind'].default} record in the data: want at least one. Read: {read}")
    return chosen, files


load_comparisons = partial(load_kind, Ranking)  # those without an ordered pair (one response, all ties) included
load_demonstrations = partial(load_kind, Demonstration)
load_prompts = partial(load_kind, PromptRecord)


RULE = re.compile(r"[a-z0-9_]{1,40}")  # a rule's name


def load_rules(setting: str, path: str | None) -> dict[str, str]:
    """The rules of a file by name; none without one. Raises: UserError for another file than {"name": "what a response must keep", …}."""
    if path is None:
        return {}
    rules = read_json(Path(path))
    if not rules or not all(RULE.fullmatch(name) and is_text(text) for name, text in rules.items()):
        wanted = 'want JSON, {"name": "what a response must keep"}, with names of a-z, 0-9 and _'
        raise UserError(f"{setting}={path}: {wanted}")
    return rules
