"""auto-circuit's task files: {"prompts": [{"clean", "corrupt", "answers", "wrong_answers"}, ...]} in one JSON file."""

import json
from pathlib import Path

from swd_lens.tasks.errors import TaskError
from swd_lens.tasks.example import TaskExample


def read_auto_circuit(path: Path) -> list[TaskExample]:
    """The prompts of an auto-circuit JSON file, in its order, duplicates included.

    Raises:
        TaskError: not JSON, no "prompts" list, or a prompt without the needed fields (its number is named).
    """
    try:
        prompts = json.loads(path.read_text(encoding="utf-8-sig"))["prompts"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"  # not repr, which holds the whole file where it is not UTF-8
        raise TaskError(f'{path} is not an auto-circuit task file (JSON with a "prompts" list): {why}') from None
    if not isinstance(prompts, list):
        raise TaskError(f'{path}: "prompts" must be a list, got {type(prompts).__name__}')
    return [_example(path, i, prompt) for i, prompt in enumerate(prompts)]


def _example(path: Path, i: int, prompt: dict) -> TaskExample:
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
    return TaskExample(clean, tuple(answers), tuple(wrong), corrupt, {"file": path.name})
