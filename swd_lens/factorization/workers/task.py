"""One matrix to solve: the task, its result, and the function that every road runs.

The solver's last bits depend on where its inputs lie in memory (transposed or not, aligned or not) and on how many threads
it has, so both are settled here: matrices are laid out row by row at an aligned address before the solve, and so are the
factors after it. Negative zeros become zeros: files and parcels hold no zeros, so no sign of a zero either.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.factorization.solve import solve
from swd_lens.solver import DEFAULT_PRESET, OnIteration
from swd_lens.units.factors import Factors

# What torch's own CPU allocations are aligned to.
_ALIGNED = 64


@dataclass(frozen=True)
class SolveTask:
    """One matrix with everything its solve needs.

    Attributes:
        site: its name; errors carry it.
        weight: (d_in, d_out), any floating dtype; it travels in its own and is solved in float32, on its own device.
        gram: (d_in, d_in), or None for zero-data.
        sparsity, preset, units, tokens, options: as for `swd_lens.solve`.
        bytes: working memory that the solve will need, see `swd_lens.solver.cost`; 0 if unknown. Schedulers go by it.
    """

    site: str
    weight: Float[Tensor, "d_in d_out"]
    gram: Float[Tensor, "d_in d_in"] | None = None
    sparsity: float | int = 0.5
    preset: str = DEFAULT_PRESET
    units: int | float | str | None = None
    tokens: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    bytes: int = 0


@dataclass(frozen=True)
class Solved:
    """What came of a task.

    Attributes:
        site: the task's.
        factors: on the task's device. `weight` is the task's own tensor, None where another process solved it.
        relmse: under the task's Gram; relative_frobenius: without it. See `Factors.relmse`.
    """

    site: str
    factors: Factors
    relmse: float
    relative_frobenius: float


def solve_task(task: SolveTask, on_iteration: OnIteration | None = None) -> Solved:
    """Solve and measure; the same values in the task give the same bits, wherever they lie in memory.

    Raises:
        ValueError: what `swd_lens.solve` raises, with the site's name and shape in front.
    """
    weight = _laid_out(task.weight.detach(), torch.float32)
    gram = None if task.gram is None else _laid_out(task.gram.detach(), task.gram.dtype)
    with _naming(task):
        f = solve(
            weight,
            gram,
            task.sparsity,
            preset=task.preset,
            units=task.units,
            tokens=task.tokens,
            on_iteration=on_iteration,
            **task.options,
        )
    f = replace(f, read=(f.read + 0.0).contiguous(), write=(f.write + 0.0).contiguous())
    relmse, relative_frobenius = f.relmse(gram), f.relative_frobenius()
    return Solved(task.site, replace(f, weight=task.weight.detach()), relmse, relative_frobenius)


@contextmanager
def threads_set_to(threads: int | None) -> Iterator[None]:
    """This thread's number of CPU threads inside, restored after; None leaves it alone."""
    before = torch.get_num_threads()
    if threads is not None and threads != before:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def _laid_out(matrix: Float[Tensor, "rows columns"], dtype: torch.dtype) -> Float[Tensor, "rows columns"]:
    """The matrix in row order at an aligned address; itself if it is so already."""
    laid = matrix.to(dtype).contiguous()
    return laid.clone() if laid.data_ptr() % _ALIGNED else laid


@contextmanager
def _naming(task: SolveTask) -> Iterator[None]:
    """A solver's ValueError with the site in front, the same kind of error: a solver only ever sees a tensor."""
    try:
        yield
    except ValueError as error:
        message = f"{task.site} {tuple(task.weight.shape)}: {error}"
        try:
            named: ValueError = type(error)(message)
        except TypeError:  # a kind that is made of more than a message
            named = ValueError(message)
        raise named from error
