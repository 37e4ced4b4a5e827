"""find_format: which reader a path is for, by what it holds rather than by its name alone."""

import json
from pathlib import Path

from swd_lens.tasks.errors import TaskError

AUTO_CIRCUIT, EDGE_PRUNING, JSON_LINES = "auto-circuit JSON", "Edge-Pruning folder", "JSONL"


def find_format(path: Path) -> str:
    """AUTO_CIRCUIT, EDGE_PRUNING or JSON_LINES.

    Raises:
        TaskError: a folder that is no DatasetDict (those inside it are named), or an empty file.
    """
    if path.is_dir():
        if (path / "dataset_dict.json").is_file():
            return EDGE_PRUNING
        inside = sorted(str(found.parent) for found in path.glob("*/dataset_dict.json"))
        hint = f" It holds {', '.join(inside)}: pass one of these" if inside else ""
        if (path / "state.json").is_file():
            hint = f" It is one split; pass the folder that holds all of them, perhaps {path.parent}"
        raise TaskError(f"{path} is not a folder saved by DatasetDict.save_to_disk: it has no dataset_dict.json.{hint}")
    if path.suffix in (".jsonl", ".ndjson"):
        return JSON_LINES
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        first = next((line for line in file if line.strip()), None)
    if first is None:
        raise TaskError(f"{path} is empty")
    try:
        record = json.loads(first)
    except (ValueError, RecursionError):
        return AUTO_CIRCUIT  # one object over many lines, or no JSON at all: its reader says which
    return JSON_LINES if isinstance(record, dict) and "prompts" not in record else AUTO_CIRCUIT
