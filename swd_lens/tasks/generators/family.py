"""Family: everything about one task family, in one record that its module declares.

A new family is one module beside this one with `FAMILIES = (Family(...),)`; the package finds it there. Its examples have
meta["family"] (the name), "split", "template" and "content" (the piece of content that belongs to the split, words.py).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swd_lens.tasks.split import TaskExample


@dataclass(frozen=True)
class Family:
    """A task family."""

    name: str  # as `load_task` takes it
    sample: Callable[[random.Random, str, str], TaskExample]  # (rng, split, "seen" or "unseen") -> one prompt
    # another corrupt prompt of the example, with other names; None: it has only its own
    corrupt: Callable[[random.Random, TaskExample], str] | None = None
    # the same sentence about other people of the split; None: there is none
    variant: Callable[[random.Random, TaskExample], TaskExample] | None = None
    # (example, TaskTokenizer): raises Unusable where this tokenizer cannot score the example, TaskError where none of the family
    check: Callable[[TaskExample, Any], None] | None = None
    document: Callable[[random.Random, str], str] | None = None  # a complete text of a split, for the embedded model's training
    trained: int = 0  # the place, from 1, among the families that the embedded model was trained on; 0: it read none of it
