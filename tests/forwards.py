"""Counting what is run: rows, and positions, that enter the blocks of a host."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor


@dataclass
class Runs:
    """Rows and tokens that entered the counted blocks, all blocks together."""

    rows: int = 0
    tokens: int = 0


@contextmanager
def block_runs(model: Any, *layers: int) -> Iterator[Runs]:
    """Count what enters the blocks (all of them where none are named). No hook stands on the host meanwhile."""
    runs, counted = Runs(), [model.blocks[layer] for layer in (layers or range(len(model.blocks)))]
    forward = type(counted[0]).forward

    def counting(block: Any, *args: Any, **kwargs: Any) -> Any:
        if any(block is each for each in counted):
            residual = args[0] if args else kwargs.get("hidden_states", kwargs.get("resid_pre"))
            assert isinstance(residual, Tensor)
            runs.rows += residual.shape[0]
            runs.tokens += residual.shape[0] * residual.shape[1]
        return forward(block, *args, **kwargs)

    with mock.patch.object(type(counted[0]), "forward", counting):
        yield runs
