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
    """A task family.

    Attributes:
        name: as `load_task` takes it.
        sample: (rng, split, "seen" or "unseen") -> one prompt.
        corrupt: (rng, example) -> another corrupt prompt of the example, with other names; None: it has only its own.
        variant: (rng, example) -> the same sentence about other people of the split; None: there is none.
        check: (example, TaskTokenizer): raises Unusable where this tokenizer cannot score the example, and TaskError where it
            can score none of the family.
        document: (rng, split) -> one complete text for the embedded model's training text.
        trained: the family's place, from 1, among those that the embedded model was trained on; 0: it read none of it.
    """

    name: str
    sample: Callable[[random.Random, str, str], TaskExample]
    corrupt: Callable[[random.Random, TaskExample], str] | None = None
    variant: Callable[[random.Random, TaskExample], TaskExample] | None = None
    check: Callable[[TaskExample, Any], None] | None = None
    document: Callable[[random.Random, str], str] | None = None
    trained: int = 0
