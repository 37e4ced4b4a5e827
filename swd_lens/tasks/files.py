"""Task files: auto-circuit's JSON, JSON lines, and Edge-Pruning's dataset folders, read into examples.

1. `find_format` says which reader a path is for, by what it holds rather than by its name alone.
2. `read_auto_circuit`: one JSON object with prompts, as auto-circuit writes it.
3. `read_jsonl`: one object per line, with our fields (prompt, answers, distractors, corrupt) or Edge-Pruning's.
4. `read_edge_pruning`: DatasetDict folders of greater-than, gendered pronoun and IOI, the two splits that the paper used, or the
   small ones where a folder lacks those, and its "validation" where it has one. A row's fields say which task it is (`FIELDS`).
5. `row_example` makes an example of such a row. Greater-than: the candidates are "00" to "99" without a space, right are those
   above the start year's two digits, wrong those below; the year itself is in neither, unless `inclusive`. A year that
   leaves a side empty cannot be scored. Pronoun: the row's, against the other one. IOI: the sentence's last word, against
   the name that is said twice before it.
"""

import json
import reprlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swd_lens.base.errors import TaskError, quoted
from swd_lens.tasks.generators.words import SPLITS
from swd_lens.tasks.split import TaskExample, Unusable

AUTO_CIRCUIT, EDGE_PRUNING, JSON_LINES = "auto-circuit JSON", "Edge-Pruning folder", "JSONL"


def find_format(path: Path) -> str:
    """AUTO_CIRCUIT, EDGE_PRUNING or JSON_LINES. Raises TaskError: a folder that is no DatasetDict (those inside it are named),
    or an empty file."""
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


# ---------------------------------------------------------------------------------------------- auto-circuit


def read_auto_circuit(path: Path) -> list[TaskExample]:
    """The prompts of an auto-circuit JSON file, in its order, duplicates included. Raises TaskError: not JSON, no "prompts"
    list, or a prompt without the needed fields (its number is named)."""
    try:
        prompts = json.loads(path.read_text(encoding="utf-8-sig"))["prompts"]
    except (ValueError, RecursionError, KeyError, TypeError) as cause:
        why = f"{type(cause).__name__}: {cause}"  # not repr, which holds the whole file where it is not UTF-8
        raise TaskError(f'{path} is not an auto-circuit task file (JSON with a "prompts" list): {why}') from None
    if not isinstance(prompts, list):
        raise TaskError(f'{path}: "prompts" must be a list, got {type(prompts).__name__}')
    examples = []
    for i, prompt in enumerate(prompts):
        try:
            clean, answers, wrong = prompt["clean"], prompt["answers"], prompt["wrong_answers"]
        except (KeyError, TypeError):
            raise TaskError(f'{path}: prompt {i} lacks "clean", "answers" or "wrong_answers"') from None
        corrupt = prompt.get("corrupt")
        if not isinstance(answers, list) or not isinstance(wrong, list):
            raise TaskError(f'{path}: "answers" and "wrong_answers" of prompt {i} must be lists of strings')
        if not all(isinstance(text, str) for text in [clean, *answers, *wrong, "" if corrupt is None else corrupt]):
            raise TaskError(
                f"{path}: prompt {i} holds token ids instead of strings, which tie it to one tokenizer; not supported"
            )
        examples.append(TaskExample(clean, tuple(answers), tuple(wrong), corrupt, {"file": path.name}))
    return examples


# ---------------------------------------------------------------------------------------------- JSON lines

OURS = ("prompt", "answers", "distractors")


def read_jsonl(path: Path, *, inclusive: bool = False) -> tuple[list[TaskExample], Counter[str]]:
    """The examples of a JSONL file, in its order, and reason -> count of the lines that no tokenizer could make usable; empty
    lines are skipped. inclusive: see `read_edge_pruning`. Raises TaskError: a line that is not UTF-8, no JSON object, lacks
    fields or has a bad value; its number is named."""
    examples, dropped = [], Counter[str]()
    with path.open("rb") as file:  # bytes, so that a line that is not text can be named
        for number, raw in enumerate(file, 1):
            where, line = f"{path}, line {number}", ""
            try:
                line = raw.decode("utf-8-sig").strip()
                record = json.loads(line) if line else {}
            except UnicodeDecodeError as cause:
                raise TaskError(f"{where} is not UTF-8 text ({cause}); save the file as UTF-8") from None
            except (ValueError, RecursionError) as cause:  # a ValueError, too, for a number of thousands of digits
                raise TaskError(f"{where} is not JSON ({cause}): {quoted(line[:60])}") from None
            if line and not isinstance(record, dict):
                raise TaskError(f"{where} must hold a JSON object, got {quoted(line[:60])}")
            try:
                examples += [_line_example(record, where, path, inclusive)] if line else []
            except Unusable as why:
                dropped[why.reason] += 1
    return examples, dropped


def _line_example(record: dict[str, Any], where: str, path: Path, inclusive: bool) -> TaskExample:
    for task, fields in FIELDS.items():
        if set(fields) <= set(record):
            return row_example(task, record, where, inclusive)
    if missing := [field for field in OURS if field not in record]:
        raise TaskError(
            f"{where} lacks {', '.join(map(repr, missing))}; it has {', '.join(record) or 'no fields'}. A line needs "
            "prompt, answers and distractors (corrupt is optional), or the fields of one of Edge-Pruning's datasets"
        )
    if inclusive:
        raise TaskError(f"inclusive=True is about Edge-Pruning's greater-than, but {where} names its distractors itself")
    prompt, corrupt = record["prompt"], record.get("corrupt")
    if not isinstance(prompt, str) or not isinstance(corrupt, str | None):
        raise TaskError(f"{where}: 'prompt' and 'corrupt' must be text")
    sides: list[tuple[str, ...]] = []
    for field in ("answers", "distractors"):
        texts = [record[field]] if isinstance(record[field], str) else record[field]
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise TaskError(f"{where}: {quoted(field)} must be a string or a list of strings, got {quoted(record[field])}")
        sides.append(tuple(texts))
    return TaskExample(prompt, sides[0], sides[1], corrupt, {"file": path.name})


# ---------------------------------------------------------------------------------------------- Edge-Pruning

# task -> the fields that tell it from the others, then the paper's train split (None: it did not use this one).
FIELDS = {
    "greater_than": ("prefix", "corr_prefix", "digits"),
    "gendered_pronoun": ("prefix", "corr_prefix", "pronoun", "corr_pronoun"),
    "ioi": ("ioi_sentences", "corr_ioi_sentences"),
}
PAPER_TRAIN = {"greater_than": "train_80k", "gendered_pronoun": "train_3k"}
OTHER_PRONOUN = {"he": "she", "she": "he"}
# Shared by all examples: 80,000 of them have about 99 candidates each.
_LATER = [tuple(f"{later:02d}" for later in range(year + 1, 100)) for year in range(101)]
_EARLIER = [tuple(f"{earlier:02d}" for earlier in range(year)) for year in range(101)]


@dataclass(frozen=True)
class SavedSplits:
    """Train, validation and test examples of a folder, in its order."""

    task: str  # "greater_than", "gendered_pronoun" or "ioi"
    train: list[TaskExample]
    validation: list[TaskExample] | None  # None where the folder has none, or none was named
    test: list[TaskExample]
    dropped: dict[str, Counter[str]]  # split -> reason -> count, of the rows that no tokenizer could make usable
    source: str  # which splits were read, in words


def read_edge_pruning(path: Path, *, splits: Sequence[str] | None = None, inclusive: bool = False) -> SavedSplits:
    """Read a folder that datasets' `DatasetDict.save_to_disk` wrote.

    splits: names of the train and the test split, or of train, validation and test; None = the paper's ("train_80k" for
    greater-than, "train_3k" for the pronoun, both with "test"), or "train" and "test" where the folder lacks the large one, and
    "validation" where there is one. inclusive: greater-than: the start year itself counts as wrong, not as neither (as in
    auto-circuit's file).

    Raises TaskError: no such folder, neither two nor three splits, a split that is missing (those that are there are named),
    unknown fields, a bad row.
    """
    import datasets  # half a second, so only where it is needed

    if splits is not None and (isinstance(splits, str) or len(splits) not in (2, 3)):
        raise TaskError(
            f"splits={quoted(splits)} must be two names, splits=(train, test), of which the first is divided, or three, "
            "splits=(train, validation, test)"
        )
    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as cause:
        raise TaskError(f"{path} cannot be read by datasets.load_from_disk: {cause}") from None
    if not isinstance(saved, datasets.DatasetDict):
        raise TaskError(f"{path} holds one split; pass the folder that holds all of them (with dataset_dict.json)")
    if not saved:
        raise TaskError(f"{path} cannot be read by datasets.load_from_disk: it has no splits")
    fields = next(iter(saved.values())).column_names
    task = next((task for task, needed in FIELDS.items() if set(needed) <= set(fields)), None)
    if task is None:
        known = "; ".join(f"{task}: {', '.join(needed)}" for task, needed in FIELDS.items())
        raise TaskError(f"{path} has the fields {', '.join(fields)}, which belong to none of Edge-Pruning's tasks ({known})")
    # Split of the task -> its name in the folder, and what is to be said of that.
    has = [str(name) for name in saved]
    asked, note = list(splits or (PAPER_TRAIN.get(task, "train"), "test")), ""
    if splits is None and asked[0] not in has and "train" in has:
        asked[0], note = "train", f" (the paper's {asked[0]} is not there)"
    if splits is None and "validation" in has:
        asked.insert(1, "validation")
    if missing := [name for name in asked if name not in has]:
        raise TaskError(
            f"{path} has no split {quoted(missing[0])}; it has {', '.join(has)}. Name those you mean: splits=(train, "
            "test) or splits=(train, validation, test)"
        )
    names = dict(zip(("train", "test") if len(asked) == 2 else SPLITS, asked, strict=True))
    rows: dict[str, list[TaskExample]] = {split: [] for split in names}
    dropped: dict[str, Counter[str]] = {split: Counter() for split in names}
    for split, name in names.items():
        for i, row in enumerate(_rows_of(saved[name], path)):
            try:
                rows[split].append(row_example(task, dict(row), f"{path}: {name}, row {i}", inclusive))
            except Unusable as why:
                dropped[split][why.reason] += 1
    *first, last = names.values()
    source = f"Edge-Pruning folder {path.name}, splits {', '.join(first)} and {last}{note}"
    source += ", inclusive" if inclusive else ""
    return SavedSplits(task, rows["train"], rows.get("validation"), rows["test"], dropped, source)


def _rows_of(split: Any, path: Path) -> Iterator[Any]:
    """The rows of a split; what Arrow raises on damaged ones has no common class."""
    try:
        # Arrow itself does not look, and reads past the end of a file whose offsets were changed.
        split.data.table.validate(full=True)
        yield from split
    except Exception as cause:
        raise TaskError(f"{path} cannot be read by datasets.load_from_disk: {cause}") from None


def row_example(task: str, row: Mapping[str, Any], where: str, inclusive: bool = False) -> TaskExample:
    """One row as an example. Raises TaskError: a value that the task does not allow; `where` and the value are named;
    Unusable: a row that is in order but cannot be scored."""
    if inclusive and task != "greater_than":
        raise TaskError(f"inclusive=True is about greater-than's start year, but {where} is of {task}")
    for field in FIELDS[task]:
        if not isinstance(row[field], str) and field != "digits":
            raise TaskError(f"{where}: {quoted(field)} must be text, got {quoted(row[field])}")
    meta = {"family": f"edge_pruning_{task}"}
    if task == "greater_than":
        digits, year = row["digits"], -1  # text or a number
        with suppress(TypeError, ValueError):
            year = -1 if isinstance(digits, float) and not digits.is_integer() else int(digits)
        if not 0 <= year < 100:
            shown = reprlib.repr(digits)
            raise TaskError(f"{where}: 'digits' must be the start year's last two digits (0 to 99), got {shown}")
        later, earlier = _LATER[year], _EARLIER[year + 1 if inclusive else year]
        if not later or not earlier:
            raise Unusable("no year on one side of the start year", f"digits {year:02d}")
        return TaskExample(row["prefix"], later, earlier, row["corr_prefix"], {**meta, "content": f"{year:02d}"})
    if task == "gendered_pronoun":
        pronoun = row["pronoun"].strip().lower()
        if pronoun not in OTHER_PRONOUN:
            raise TaskError(f"{where}: 'pronoun' must be he or she, got {quoted(row['pronoun'])}")
        return TaskExample(row["prefix"], (f" {pronoun}",), (f" {OTHER_PRONOUN[pronoun]}",), row["corr_prefix"], meta)
    prompt, _, name = row["ioi_sentences"].strip().rpartition(" ")
    if not prompt:
        raise TaskError(f"{where}: 'ioi_sentences' must end in a name, got {quoted(row['ioi_sentences'])}")
    said = Counter(word.strip(".,;:!?") for word in prompt.split() if word[:1].isupper())
    twice = [word for word, count in said.items() if count == 2 and word != name]
    if len(twice) != 1 or said[name] != 1:
        raise Unusable("no name said twice beside one said once", repr(row["ioi_sentences"]))
    corrupt = row["corr_ioi_sentences"].strip().rpartition(" ")[0]
    return TaskExample(prompt, (f" {name}",), (f" {twice[0]}",), corrupt or None, meta)
