"""What the dense host gives on prompts, kept from one replacement to the next, for as long as the host stays as it is.

1. Its margins on a split of prompts.
2. What enters the first replaced block: no replacement that begins there, and no intervention on it, changes that. Kept up to a
   bound of bytes; prompts beyond it are run anew each time.
3. Which shortcuts agree with plain runs on the split: that is the host's, and the same for every replacement of its kind.
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.hosts import Begun, Host
from swd_lens.tasks.task import TaskSplit

_KEPT_BYTES = 2**28
T = TypeVar("T")


class DenseRuns:
    """See the module. One object for one host; hooks and weights before the replaced blocks must not change meanwhile."""

    def __init__(self, n_bytes: int = _KEPT_BYTES):
        self._room = n_bytes
        self._kept: dict[Any, Any] = {}
        self._of_splits: dict[Any, tuple[TaskSplit, Any]] = {}

    def outcome(self, split: TaskSplit, batch_size: int, run: Callable[[], Any]) -> Any:
        """What the dense host gives on a split: run now, or kept."""
        return self.of_split(split, ("outcome", batch_size), run)

    def of_split(self, split: TaskSplit, key: Hashable, find: Callable[[], T]) -> T:
        """Something that holds for a split: found now, or kept."""
        key = (id(split), key)  # the split is kept beside it, so that no other one gets its id
        if key not in self._of_splits:
            self._of_splits[key] = split, find()
        return self._of_splits[key][1]

    def begun(self, host: Host, tokens: Int[Tensor, "batch pos"], layer: int) -> Begun | None:
        """`Host.begin` on these prompts; whatever is attached from the layer on may stay."""
        key = ("begun", *_key(tokens, layer))
        if key not in self._kept:
            begun = host.begin(tokens, layer)
            if begun is None:
                return None
            self._keep(key, begun, begun.earlier.nbytes + begun.last.nbytes)
            return begun
        return self._kept[key]

    def residual(self, host: Host, tokens: Int[Tensor, "batch pos"], layer: int) -> Float[Tensor, "batch pos d_model"]:
        """What enters a block at every position."""
        key = ("residual", *_key(tokens, layer))
        if key not in self._kept:
            with torch.no_grad():
                residual = host.residual(tokens, layer)
            self._keep(key, residual, residual.nbytes)
            return residual
        return self._kept[key]

    def _keep(self, key: Any, value: Any, n_bytes: int) -> None:
        if n_bytes <= self._room:
            self._kept[key] = value
            self._room -= n_bytes


def _key(tokens: Tensor, layer: int) -> tuple[Any, ...]:
    """By the ids themselves: buckets of prompts are made anew for every pass."""
    return layer, tuple(tokens.shape), tokens.cpu().numpy().tobytes()
