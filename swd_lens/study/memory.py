"""memory_of: the most memory that the parts of a study will need beyond the loaded model, from shapes alone.

Upper bounds, in bytes of float32: what each part holds at its worst moment, as if no shortcut applied (every position of every
prompt with gradients, every replacement in memory).

1. What stays: factors of all replacements with their dense W, held-out text.
2. Of the parts that come one after the other, the largest: factorization (`swd_lens.estimate`), fidelity, screen, attribution,
   curves.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from swd_lens.base.divergence import CHUNK_BYTES
from swd_lens.factorization.estimate import estimate
from swd_lens.hosts import find_sites
from swd_lens.hosts.sites import Site
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
    factors: Mapping[str, Any] | None = None,
    n_controls: int = 1,
    calibration_tokens: Any = None,
    heldout_length: int = 1024,
    **solver: Any,
) -> dict[str, int]:
    """Part of a study -> bytes beyond the loaded model, what stays included; arguments as for `run_study`.

    Args:
        n_controls: exact or other dense replacements of each surface.
        heldout_length: tokens in a row of held-out text.
    """
    cfg = model.cfg
    sites = {label: find_sites(model, pattern) for label, pattern in surfaces.items()}
    rows = {
        label: {row.site: row for row in _estimate(model, of, calibration_tokens, solver).rows}
        for label, of in sites.items()
    }
    units = {label: sum(row.units for row in of.values()) for label, of in rows.items()}

    def pairs(of: Sequence[Site], label: str) -> int:
        """Read, write and W of a surface, once."""
        return 4 * sum(rows[label][s.name].units * (s.d_in + s.d_out) + s.d_in * s.d_out for s in of)

    given = sum(4 * f.n_units * (f.d_in + f.d_out) for of in (factors or {}).values() for f in of.values())
    n_dense = len(sparsities) + n_controls
    stays = given + sum(n_dense * pairs(of, label) for label, of in sites.items())

    def block(tokens: int, length: int) -> int:
        """What one block of the host needs for so many tokens, in rows of this length."""
        attention = 4 * cfg.n_heads * length
        return 4 * tokens * (attention + 12 * cfg.d_model + 4 * (getattr(cfg, "d_mlp", 0) or 0))

    text = max(_TEXT, heldout_length)
    outputs = max(sum(s.d_out for s in of) for of in sites.values())
    most_units, largest = max(units.values()), max(pairs(of, label) for label, of in sites.items())
    parts = {"factorize": max(_estimate(model, of, calibration_tokens, solver).peak_bytes for of in sites.values())}
    parts = parts if sparsities else {}
    residuals = 4 * text * cfg.d_model * (n_dense + len(factors or {}) + 2)
    parts["fidelity"] = (
        largest
        + block(text, heldout_length)
        + 4 * text * (3 * outputs + 2 * most_units)
        + residuals
        + _CHUNKS * CHUNK_BYTES
    )
    for task in tasks:
        length = max(len(row) for split in (task.train, task.test) for row in split.tokens)
        n = min(_PROMPTS, len(task.train))
        first = min(s.layer for of in sites.values() for s in of)
        graph = (cfg.n_layers - first) * block(n * length, length) + 4 * 4 * n * length * most_units
        parts[f"attribution of {task.name}"] = largest + graph
        parts[f"curves of {task.name}"] = (
            largest
            + 2 * block(_INTERVENTIONS, length)
            + 4 * 3 * _INTERVENTIONS * most_units
            + 4 * 2 * len(task.test) * length * cfg.d_model * cfg.n_layers
            + _LOGITS
        )
    return {part: stays + n_bytes for part, n_bytes in parts.items()}


def _estimate(model: Any, sites: Sequence[Site], tokens: Any, solver: Mapping[str, Any]) -> Any:
    return estimate(model, [site.name for site in sites], tokens=tokens, **solver)
