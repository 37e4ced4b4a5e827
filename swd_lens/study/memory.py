"""The most memory that a study will need beyond the loaded model, in bytes: `memory_of`, `memory_of_replacement`.

From shapes alone, upper bounds of float32: what stays (factors of all replacements with their dense W, held-out text), and of the
parts that come one after the other the largest (factorization, fidelity, screen, attribution, curves), each as if no shortcut
applied.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swd_lens.base.divergence import CHUNK_BYTES
from swd_lens.factorization.estimate import estimate
from swd_lens.factorization.goal import Goal
from swd_lens.hosts import find_sites
from swd_lens.hosts.sites import Site, side_of_units, split_name
from swd_lens.study.controls import SOLVED, controls_of, sizes_of, solved_controls
from swd_lens.tasks.task import Task

# Tokens of a forward: of text, of prompts with gradients, of prompts under interventions.
_TEXT, _PROMPTS, _INTERVENTIONS = 2_048, 128, 16_384
_CHUNKS = 8  # tensors of logits or log-probabilities at a time
_LOGITS = 2**28  # of interventions that need the whole vocabulary


def memory_of(
    model: Any,
    surfaces: Mapping[str, Any],
    tasks: Sequence[Task],
    *,
    sparsities: Sequence[float | int] = (),
    kl: float | None = None,
    ce: float | None = None,
    factors: Mapping[str, Any] | None = None,
    controls: Sequence[str] | None = None,
    n_beside: int = 0,
    calibration_tokens: Any = None,
    heldout_length: int = 1024,
    **solver: Any,
) -> dict[str, int]:
    """Bound the memory of a study: part -> bytes beyond the loaded model, what stays included; arguments as for `run_study`.
    n_beside: further replacements of each surface, as large as a dense one; heldout_length: tokens in a row of held-out text."""
    sites = {label: find_sites(model, pattern) for label, pattern in surfaces.items()}
    estimates = {label: _estimate(model, surface, calibration_tokens, solver) for label, surface in sites.items()}
    # How many replacements have as many units as SWD, as there are neurons, and as the short side has coordinates.
    sizes = sizes_of(sparsities, kl, ce)
    controls = controls_of(controls, sizes, solver)
    n_sizes, exact = len(sizes), [control for control in controls if control not in SOLVED]
    of_neurons = ("neurons" in exact) + ("pruned" in controls) * n_sizes
    of_short_side = n_sizes * (("svd_pruned" in controls) + ("paper" in controls))
    of_short_side += len(exact) - ("neurons" in exact)
    widths_of: dict[Callable[[Any], int], int] = {
        _solved: n_sizes + n_beside,
        lambda row: row.d_out if side_of_units(split_name(row.site)[1]) == "output" else row.d_in: of_neurons,
        lambda row: min(row.d_in, row.d_out): of_short_side,  # singular vectors, and the paper's SWD
    }
    widths = [_solved, *(width for width, n in widths_of.items() if n)]
    most_units = max(sum(max(width(row) for width in widths) for row in each.rows) for each in estimates.values())
    given = sum(4 * f.n_units * (f.d_in + f.d_out) for each in (factors or {}).values() for f in each.values())
    stays = given + sum(n * _pairs(each, width) for width, n in widths_of.items() for each in estimates.values())
    largest = max(_pairs(each, width) for width in widths for each in estimates.values())

    solved = [*estimates.values()]
    for how in solved_controls(controls, sizes, solver).values():
        made = [surface for surface in sites.values() if how.without_edges(surface) is None]
        # A goal needs the memory of any sparsity.
        options = how.options if isinstance(how.size, Goal) else how.asked
        solved += [_estimate(model, surface, calibration_tokens, options) for surface in made]
    parts = {"factorize": max(each.peak_bytes for each in solved)} if sizes else {}
    n_starts = sum(widths_of.values()) + len(factors or {}) + 2
    parts["fidelity"] = max(_fidelity(model, surface, most_units, n_starts, heldout_length) for surface in sites.values())
    first = min(site.layer for surface in sites.values() for site in surface)
    for task in tasks:
        length = max(len(row) for split in task.splits for row in split.tokens)
        tokens = min(_PROMPTS, len(task.train)) * length
        scored = (model.cfg.n_layers - first) * _block(model, tokens, length) + 4 * 4 * tokens * most_units
        parts[f"attribution of {task.name}"] = scored
        kept = 4 * 2 * max(len(task.validation), len(task.test)) * length * model.cfg.d_model * model.cfg.n_layers
        judged = 2 * _block(model, _INTERVENTIONS, length) + 4 * 3 * _INTERVENTIONS * most_units + _LOGITS
        parts[f"curves of {task.name}"] = kept + judged
    return {part: stays + largest + n_bytes for part, n_bytes in parts.items()}


def memory_of_replacement(
    model: Any,
    sites: Any,
    *,
    tokens: Any,
    calibration: str = "corrected",
    sparsity: float | int = 0.5,
    tuned_rows: int = 0,
    row_length: int = 1024,
    **solver: Any,
) -> dict[str, int]:
    """Bound the memory of `replace_model`: part -> bytes beyond the loaded model. tuned_rows: of a step of fine-tuning; 0:
    there is none; row_length: tokens in a row of text."""
    surface = find_sites(model, sites)
    estimate = _estimate(model, surface, tokens, {**solver, "calibration": calibration, "sparsity": sparsity})
    pairs, units = _pairs(estimate, _solved), sum(row.units for row in estimate.rows)
    parts = {"factorize": estimate.peak_bytes, "fidelity": pairs + _fidelity(model, surface, units, 3, row_length)}
    if tuned_rows:
        # Values, gradients, two moments and places of each nonzero; the dense factors and their gradients; all activations.
        edges = (1 - sparsity) * sum(site.d_in * site.d_out for site in surface)
        activations = model.cfg.n_layers * _block(model, tuned_rows * row_length, row_length)
        parts["fine-tuning"] = int(24 * edges) + 3 * pairs + activations + 4 * 3 * tuned_rows * row_length * units
    return parts


def _pairs(estimate: Any, width: Callable[[Any], int]) -> int:
    """Count the bytes of read, write and W of every site, dense, with so many units."""
    return 4 * sum(width(row) * (row.d_in + row.d_out) + row.d_in * row.d_out for row in estimate.rows)


def _solved(row: Any) -> int:
    """Units of SWD at an estimate's site."""
    return int(row.units)


def _block(model: Any, tokens: int, length: int) -> int:
    """Count the bytes that one block of the host needs for so many tokens, in rows of this length."""
    cfg = model.cfg
    return 4 * tokens * (4 * cfg.n_heads * length + 12 * cfg.d_model + 4 * (getattr(cfg, "d_mlp", 0) or 0))


def _fidelity(model: Any, sites: Sequence[Site], n_units: int, n_starts: int, length: int) -> int:
    """Count the bytes of a batch of held-out text, and of what its divergences need."""
    tokens, outputs = max(_TEXT, length), sum(site.d_out for site in sites)
    kept = 4 * tokens * (3 * outputs + 2 * n_units + n_starts * model.cfg.d_model)
    return _block(model, tokens, length) + kept + _CHUNKS * CHUNK_BYTES


def _estimate(model: Any, sites: Sequence[Site], tokens: Any, solver: Mapping[str, Any]) -> Any:
    return estimate(model, [site.name for site in sites], tokens=tokens, **solver)
