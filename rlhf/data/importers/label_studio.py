"""Label Studio: exports (JSON, JSON-MIN, CSV) and task files, with pairwise, ranker, rating and choices interfaces.

One annotation is one record; a skipped one is no judgement. A task without any annotation is a ranking still to be
made. Tasks that `rlhf sample` wrote keep their ids; `data/label_studio.py` reads other tasks. The import joins the pairs
of one item into a ranking.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data.conversion.foreign import ranking_of, require
from rlhf.data.conversion.paths import as_json
from rlhf.data.conversion.verdicts import as_number
from rlhf.data.importers import BadRow, Format, other_keys
from rlhf.data.label_studio import (
    VALUES,
    Judgement,
    Task,
    is_own,
    preferred,
    read_result,
    target_keys,
    task_fields,
    usable_number,
)
from rlhf.data.records import shown

MIN_KEYS = ("annotation_id", "annotator", "lead_time")  # the keys of an annotation in a flat export (JSON-MIN, CSV)
OWN_KEYS = ("item", "prompt", "dialogue", "about", "metadata", "responses", "left", "right", "left_id", "right_id")
FLAT_KEYS = ("id", "annotation_id", "annotator", "created_at", "updated_at", "lead_time")


def recognise(row: Mapping[str, Any]) -> str | None:
    """Why a row is a task of Label Studio; None if it is not."""
    if isinstance(row.get("data"), dict):
        if isinstance(row.get("annotations"), list):
            return "keys data and annotations"
        if set(row) <= {"data", "id", "meta", "predictions"}:
            return "a task without annotations: key data"
    if all(key in row for key in MIN_KEYS):
        return "keys " + ", ".join(MIN_KEYS)
    if {"prompt", "answer1", "answer2"} <= set(row) <= {"id", "prompt", "answer1", "answer2"}:
        return "a task of the pairwise template: keys prompt, answer1, answer2"
    return None


def labeler_of(annotation: Mapping[str, Any]) -> str | None:
    """The annotator as the export gives it: an e-mail address if there is one, else an id."""
    who = annotation.get("completed_by")
    if isinstance(who, dict):
        who = who.get("email") or who.get("username") or who.get("id")
    return None if who is None else str(who)


def without_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that are not null or empty; an export has dozens that are."""
    return {key: value for key, value in values.items() if value is not None and value not in ([], {}, "")}


def make_record(task: Task, judgement: Judgement) -> dict[str, Any]:
    """The native record of one annotation, or of none. Scores outside 1 to 7 are kept in metadata and still rank."""
    ranking = judgement.ranking
    if ranking is None and len(judgement.scores) > 1:
        ranking = ranking_of(judgement.scores, best="highest")
    ratings = judgement.scores if all(1 <= score <= 7 for score in judgement.scores.values()) else {}
    record = {
        "kind": "ranking",
        "prompt": task.prompt,
        "responses": task.responses,
        "ranking": ranking,
        "ratings": ratings,
        "flags": judgement.flags,
        "metadata": dict(task.rest),
    }
    return with_metadata(record, scores={} if ratings else judgement.scores, results=judgement.other)


def convert(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One ranking per annotation that judges; one without a judgement if the task has no annotation.

    Annotations without a judgement (skipped, empty, or of which no response can be told) are named in the metadata of
    the task's other records, under `skipped_by`, what they said under `unread`; a task that has no others is rejected.
    Predictions are kept in the metadata and judge nothing.

    Raises: BadRow.
    """
    if all(key in row for key in MIN_KEYS):
        yield from convert_flat(row)
        return
    if not isinstance(row.get("data"), dict):  # a task file without the wrapping `data`
        row = {"data": other_keys(row, "id")} | ({"id": row["id"]} if "id" in row else {})
    annotations = checked_annotations(row)
    named = [name for a in annotations for result in a["result"] for name in target_keys(result)]
    task = task_fields(row["data"], named)
    about = without_empty(other_keys(row, "data", "annotations"))
    if not annotations:
        yield with_metadata(make_record(task, Judgement()), task=about)
        return
    read = [(annotation, judgement_of(annotation, task)) for annotation in annotations]
    without = [(labeler_of(annotation) or "unknown", said) for annotation, said in read if not said.is_judgement]
    unread = {labeler: said.other for labeler, said in without if said.other}
    if len(without) == len(read):
        wanted = f"a ranking, or a choice or rating whose control names one of {', '.join(task.keys)}"
        require(not unread, "result", unread, wanted)
        wanted = "a judgement: label the task or leave it out of the export"
        raise BadRow("annotations", f"got {len(without)} that were skipped or left empty, want {wanted}")
    skipped = [labeler for labeler, _ in without]
    for annotation, said in read:
        if said.is_judgement:
            record = annotated(annotation, make_record(task, said), about)
            yield with_metadata(record, skipped_by=skipped, unread=unread)


def checked_annotations(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A task's annotations, each with a list of results. Raises: BadRow."""
    annotations = row.get("annotations")
    if annotations is None:
        return []
    require(isinstance(annotations, list), "annotations", annotations, "a list")
    for annotation in annotations:
        results: Any = annotation.get("result") if isinstance(annotation, dict) else None
        require(isinstance(results, list), "annotations", annotation, "objects with a list result")
        for result in results:
            fits = isinstance(result, dict) and isinstance(result.get("value"), dict)
            require(fits, "result", result, "an object with value")
    return annotations


def judgement_of(annotation: Mapping[str, Any], task: Task) -> Judgement:
    """What an annotation says; nothing if it was skipped."""
    judgement = Judgement()
    for result in [] if annotation.get("was_cancelled") else annotation["result"]:
        read_result(result, task, judgement)
    return judgement


def annotated(annotation: Mapping[str, Any], record: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """The record with who judged, when and for how long; what else is known of task and annotation is metadata."""
    seconds, created = usable_number(annotation.get("lead_time")), annotation.get("created_at")
    used = ["result", "completed_by"]
    record["labeler"] = labeler_of(annotation)
    if seconds is not None and seconds >= 0:
        record["seconds"] = seconds
        used.append("lead_time")
    if isinstance(created, str):
        record["created"] = created
        used.append("created_at")
    if isinstance(annotation.get("unique_id"), str) and annotation["unique_id"]:
        record["id"] = annotation["unique_id"]
        used.append("unique_id")
    rest = without_empty(other_keys(annotation, *used))
    return with_metadata(record, task=about, annotation=rest)


def with_metadata(record: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """The record with these parts of its metadata, if they are not empty."""
    record["metadata"] |= {name: value for name, value in parts.items() if value}
    return record


def convert_flat(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The one annotation of a row of JSON-MIN or CSV, whose keys mix the task's data with the controls.

    A control is a list of objects as {"selected": "left"}, or a text that says which response is better. CSV writes lists
    as JSON text.

    Raises: BadRow if no key is a judgement.
    """
    is_csv = isinstance(row["annotation_id"], str)
    values = {key: _unpacked(value) if is_csv else value for key, value in row.items()}
    data = other_keys(values, *FLAT_KEYS)
    controls = {key: value for key, value in data.items() if _is_control(value)}
    data = other_keys(data, *controls)
    if is_own(data):
        data |= {side: "" for side in ("left", "right") if side in data and data[side] is None}  # an empty cell
    task = task_fields(data)
    if "data" in task.rest:
        task.rest["data"] = without_empty(task.rest["data"])  # CSV has a cell for every control
    judgement = Judgement()
    for control, value in controls.items():
        read_result({"from_name": control, "value": value[0]}, task, judgement)
    left = other_keys(data, *OWN_KEYS) if is_own(data) else task.rest.get("data", {})
    for control, value in left.items():
        if isinstance(value, str) and (ranking := preferred(value, task)) is not None:
            judgement.rank(ranking, control)
    if not judgement.is_judgement:
        wanted = "left or right, an order, a rating or a choice: export as JSON"
        raise BadRow("", f"got the keys {shown(list(row), 200)}, found no judgement among them, want {wanted}")
    annotation = {"completed_by": values["annotator"], "id": values["annotation_id"]}
    annotation |= {key: values.get(key) for key in ("created_at", "updated_at")}
    annotation["lead_time"] = as_number(values["lead_time"])
    yield annotated(annotation, make_record(task, judgement), without_empty({"id": values.get("id")}))


def _unpacked(value: Any) -> Any:
    """A cell of CSV that holds an object or a list of objects, as these; any other as it is."""
    parsed = as_json(value)
    objects = parsed if isinstance(parsed, list) else [parsed]
    return parsed if objects and all(isinstance(one, dict) for one in objects) else value


def _is_control(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and any(kind in first for kind in VALUES) and "id" not in first


FORMAT = Format(
    "label_studio", "keys data and annotations (an export), or data (a task)", recognise, convert, joins=True
)
