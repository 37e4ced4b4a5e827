"""load_task: a task by family name (our generators) or from a file, tokenized for a host.

1. A family name ("ioi", "docstring", "greater_than", "gendered_pronoun") generates prompts. Train and test prompts come from
   two content splits that are disjoint from each other and from everything the embedded model was trained on.
2. A path to an auto-circuit JSON file reads its prompts, shuffles them once (seed 42, as that library does) and takes the
   first n_train and the next n_test.
3. Either way the examples are tokenized for the host; unusable ones are dropped and counted.
"""

import difflib
import json
import random
from pathlib import Path
from typing import Any

from swd_lens.tasks.example import TaskExample
from swd_lens.tasks.generators import FAMILIES, generate
from swd_lens.tasks.task import Task, TaskError

# Hosts whose training documents began with BOS. Everyone else gets none by default: Hugging Face's GPT-2 and Edge-Pruning
# add none (method.md §6.4).
_TRAINED_WITH_BOS = {"swd-lens-default"}


def load_task(
    name: str | Path,
    model: Any,
    *,
    n_train: int = 600,
    n_test: int = 200,
    seed: int | None = None,
    prepend_bos: bool | None = None,
) -> Task:
    """Load a task for a host.

    Args:
        name: a family ("ioi", "docstring", "greater_than", "gendered_pronoun") or a path to an auto-circuit JSON file.
        model: the host, with a tokenizer.
        n_train, n_test: prompts per split; 600 / 200 are the paper's for IOI and docstring (app. A.4).
        seed: of the generator (default 0) or of the file's shuffle (default 42, auto-circuit's).
        prepend_bos: None = as the host was trained (yes for the embedded model, no otherwise).

    Raises:
        TaskError: unknown name, malformed file, n below 1, or no usable example.
    """
    if n_train < 1 or n_test < 1:
        raise TaskError(f"a task needs at least one prompt in each split, got n_train={n_train}, n_test={n_test}")
    if prepend_bos is None:
        prepend_bos = model.cfg.model_name in _TRAINED_WITH_BOS
    path = Path(name)
    if str(name) in FAMILIES:
        train = generate(str(name), "validation", n_train, seed=seed or 0)
        test = generate(str(name), "test", n_test, seed=seed or 0)
        source = f"swd_lens generator, seed {seed or 0}"
        return Task.from_examples(str(name), train, test, model, source=source, prepend_bos=prepend_bos, on_bad="drop")
    if not path.is_file():
        near = difflib.get_close_matches(str(name), FAMILIES, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise TaskError(f"{str(name)!r} is neither a task family ({', '.join(FAMILIES)}) nor a file.{hint}")
    examples = read_auto_circuit(path)
    random.Random(42 if seed is None else seed).shuffle(examples)
    if len(examples) < 2:
        raise TaskError(f"{path} holds {len(examples)} prompts; a train and a test split need at least two")
    if len(examples) < n_train + n_test:
        # Keep the asked proportion rather than leave the test split empty.
        n_train = max(1, len(examples) * n_train // (n_train + n_test))
        n_test = len(examples) - n_train
    train, test = examples[:n_train], examples[n_train : n_train + n_test]
    return Task.from_examples(
        path.stem, train, test, model, source=f"file {path.name}", prepend_bos=prepend_bos, on_bad="drop"
    )


def read_auto_circuit(path: Path) -> list[TaskExample]:
    """Prompts of an auto-circuit JSON file: {"prompts": [{"clean", "corrupt", "answers", "wrong_answers"}, ...]}.

    Duplicate clean prompts are kept once, so that none straddles train and test.

    Raises:
        TaskError: not JSON, no "prompts" list, or a prompt without the needed fields (its number is named).
    """
    try:
        prompts = json.loads(path.read_text(encoding="utf-8"))["prompts"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise TaskError(f'{path} is not an auto-circuit task file (JSON with a "prompts" list): {error!r}') from None
    examples: dict[str, TaskExample] = {}
    for i, prompt in enumerate(prompts):
        try:
            clean, answers, wrong = prompt["clean"], prompt["answers"], prompt["wrong_answers"]
        except (KeyError, TypeError):
            raise TaskError(f'{path}: prompt {i} lacks "clean", "answers" or "wrong_answers"') from None
        if not isinstance(clean, str) or not all(isinstance(text, str) for text in [*answers, *wrong]):
            raise TaskError(
                f"{path}: prompt {i} holds token ids instead of strings, which tie it to one tokenizer; not supported"
            )
        examples.setdefault(
            clean, TaskExample(clean, tuple(answers), tuple(wrong), prompt.get("corrupt"), {"file": path.name})
        )
    return list(examples.values())
