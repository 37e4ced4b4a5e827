"""solve_task: one matrix solved, here or in another process; it loads no model library, as workers must start fast.

1. A `SolveTask` is one matrix with everything its solve needs; `solve_task` makes `Solved` of it.
2. The solver's last bits depend on where its inputs lie in memory (transposed or not, aligned or not) and on how many threads
   it has. So a task's matrices are laid out row by row at an aligned address before the solve, and so are the factors after it;
   `threads_set_to` sets the threads. Negative zeros become zeros: files and parcels hold no zeros, so no sign of a zero either.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens import solver
from swd_lens.base.errors import SolveInputError
from swd_lens.solver import DEFAULT_PRESET, OnIteration
from swd_lens.solver.metric import relmse_of

# What torch's own CPU allocations are aligned to.
_ALIGNED = 64


def made_by(solver_name: str) -> dict[str, str]:
    """The beginning of every provenance: the algorithm, and this package's version."""
    try:
        version = metadata.version("swd-lens")
    except metadata.PackageNotFoundError:  # a source tree on the path, not installed
        version = "unknown"
    return {"solver": solver_name, "version": version}


@dataclass(frozen=True)
class SolveTask:
    """One matrix with everything its solve needs."""

    site: str  # its name; errors carry it
    # (d_in, d_out), any floating dtype; it travels in its own and is solved in float32, on its own device
    weight: Float[Tensor, "d_in d_out"]
    gram: Float[Tensor, "d_in d_in"] | None = None  # (d_in, d_in), or None for zero-data
    sparsity: float | int = 0.5  # sparsity, preset, units, tokens, options: as for `swd_lens.solve`
    preset: str = DEFAULT_PRESET
    units: int | float | str | None = None
    tokens: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    bytes: int = 0  # working memory that the solve will need, see `swd_lens.solver.cost`; 0 if unknown. Schedulers go by it.
    output_gram: Float[Tensor, "d_out d_out"] | None = None  # (d_out, d_out), or None: all outputs count the same
    # (vector, d_in), the Gram's part from first positions, see `Grams.first`; None where there is no Gram
    first: Float[Tensor, "_vector _d_in"] | None = None


@dataclass(frozen=True)
class Solved:
    """The outcome of a task, from which `Factors` are made where their host is known (factorize.py)."""

    site: str  # the task's
    read: Float[Tensor, "d_in unit"]  # read, write: (d_in, unit) and (unit, d_out), float32, on the task's device
    write: Float[Tensor, "unit d_out"]
    settings: Mapping[str, Any]  # every value used, and the entries kept
    solver: str  # name of the algorithm
    relmse: float  # under the task's Gram; relative_frobenius: without it. See `Factors.relmse`.
    relative_frobenius: float
    relmse_of_others: float | None = None  # under the Gram without first positions; None where there is none


def solve_task(task: SolveTask, on_iteration: OnIteration | None = None) -> Solved:
    """Solve and measure; the same values in the task give the same bits, wherever they lie in memory. Raises ValueError: what
    `swd_lens.solve` raises, with the site's name and shape in front."""
    weight = _laid_out(task.weight.detach(), torch.float32)
    gram, output_gram = (None if each is None else _laid_out(each.detach(), each.dtype) for each in (task.gram, task.output_gram))
    how: dict[str, Any] = {"preset": task.preset, "units": task.units, "tokens": task.tokens, **task.options}
    with naming(f"{task.site} {tuple(task.weight.shape)}"):
        found = solver.solve(weight, gram, task.sparsity, output_gram=output_gram, on_iteration=on_iteration, **how)
    read, write = ((factor + 0.0).contiguous() for factor in (found.read, found.write))
    others = None
    if task.first is not None and len(task.first):
        others = relmse_of(read, write, found.weight, gram, without=task.first)
    errors = relmse_of(read, write, found.weight, gram), relmse_of(read, write, found.weight) ** 0.5, others
    return Solved(task.site, read, write, found.settings, found.solver, *errors)


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
def naming(matrix: object) -> Iterator[None]:
    """A solver's ValueError with the matrix in front, the same kind of error: a solver only ever sees a tensor."""
    try:
        yield
    except ValueError as error:
        kind = type(error) if isinstance(error, SolveInputError) else ValueError
        raise kind(f"{matrix}: {error}") from error
