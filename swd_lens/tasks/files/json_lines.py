"""JSONL task files: one object per line, with our fields (prompt, answers, distractors, corrupt) or Edge-Pruning's."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from swd_lens.tasks.errors import TaskError, Unusable
from swd_lens.tasks.example import TaskExample
from swd_lens.tasks.files.edge_pruning import FIELDS, row_example

OURS = ("prompt", "answers", "distractors")


def read_jsonl(path: Path, *, inclusive: bool = False) -> tuple[list[TaskExample], Counter[str]]:
    """The examples of a JSONL file, in its order, and reason -> count of the lines that no tokenizer could make usable.

    Args:
        path: of the file; empty lines are skipped.
        inclusive: see `read_edge_pruning`.

    Raises:
        TaskError: a line that is not UTF-8, no JSON object, lacks fields or has a bad value; its number is named.
    """
    examples, dropped = [], Counter[str]()
    with path.open("rb") as file:  # bytes, so that a line that is not text can be named
        for number, raw in enumerate(file, 1):
            where = f"{path}, line {number}"
            line = _text(raw, where)
            if not line.strip():
                continue
            try:
                examples.append(_example(_record(line, where), where, path, inclusive))
            except Unusable as why:
                dropped[why.reason] += 1
    return examples, dropped


def _text(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TaskError(f"{where} is not UTF-8 text ({error}); save the file as UTF-8") from None


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # a ValueError, too, for a number of thousands of digits
        raise TaskError(f"{where} is not JSON ({error}): {line.strip()[:60]!r}") from None
    if not isinstance(record, dict):
        raise TaskError(f"{where} must hold a JSON object, got {line.strip()[:60]!r}")
    return record


def _example(record: dict[str, Any], where: str, path: Path, inclusive: bool) -> TaskExample:
    for task, fields in FIELDS.items():
        if set(fields) <= set(record):
            return row_example(task, record, where, inclusive)
    if missing := [field for field in OURS if field not in record]:
        raise TaskError(
            f"{where} lacks {', '.join(map(repr, missing))}; it has {', '.join(record) or 'no fields'}. A line needs prompt, "
            "answers and distractors (corrupt is optional), or the fields of one of Edge-Pruning's datasets"
        )
    if inclusive:
        raise TaskError(
            f"inclusive=True is about Edge-Pruning's greater-than, but {where} names its distractors itself"
        )
    prompt, corrupt = record["prompt"], record.get("corrupt")
    if not isinstance(prompt, str) or not isinstance(corrupt, str | None):
        raise TaskError(f"{where}: 'prompt' and 'corrupt' must be text")
    answers, distractors = (_texts(record, field, where) for field in ("answers", "distractors"))
    return TaskExample(prompt, answers, distractors, corrupt, {"file": path.name})


def _texts(record: dict[str, Any], field: str, where: str) -> tuple[str, ...]:
    value = [record[field]] if isinstance(record[field], str) else record[field]
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise TaskError(f"{where}: {field!r} must be a string or a list of strings, got {record[field]!r}")
    return tuple(value)
