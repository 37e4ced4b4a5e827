"""compare: one prompt, several ways to edit for it, several requested shifts; what each moves and what it costs elsewhere.

1. The target is read once; every method makes one edit per requested shift from the same dense W (paper, app. component
   editing). "unit", "random" and "oracle" share one calibration, h* dW d = shift; "lora" is trained for the final margin.
2. Each is measured: the realised change of the final margin, KL behind the other prompts, KL on text if there is any.
3. Methods are compared at what they realised, never at what was asked for: `cost_at`, and the Pareto figure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from swd_lens.analysis.edit.edited import Edit
from swd_lens.analysis.edit.effects import measure
from swd_lens.analysis.edit.lora import LEARNING_RATE, lora_edits
from swd_lens.analysis.edit.make import RANDOM_SEED, factor_set, oracle_edit, random_unit, unit_edit, unit_of
from swd_lens.analysis.edit.pareto import plot_pareto
from swd_lens.analysis.edit.target import EditError, Target, find_target, require_number
from swd_lens.base._version import __version__
from swd_lens.base.display import card
from swd_lens.hosts import host_of
from swd_lens.units.attach import require_free
from swd_lens.units.match import check_weights

METHODS = ("unit", "random", "oracle", "lora")
SHIFTS = (-2, -1, -0.5, 0, 0.5, 1, 2, 3)  # paper


@dataclass(frozen=True, repr=False)
class EditComparison:
    """Every edit of every method, with what it did.

    Attributes:
        rows: one row per method and requested shift; see `SideEffects.row`.
        edits: (method, requested shift) -> the edit.
        target: the prompt that is edited for.
        prompts: the other prompts.
        settings: every choice.
    """

    rows: pd.DataFrame
    edits: Mapping[tuple[str, float], Edit]
    target: Target
    prompts: tuple[str, ...]
    settings: Mapping[str, Any]

    def table(self) -> pd.DataFrame:
        """A copy of the rows: method, unit, requested shift, margins, KL on the other prompts and on text (nats)."""
        return self.rows.copy()

    def cost_at(self, change: float | int, of: str = "KL other prompts") -> pd.DataFrame:
        """What a realised margin change costs each method, cheapest first; NaN where no edit reached it.

        Between two edits the square root of KL is interpolated linearly: KL grows with the square of a small change.

        Args:
            change: of the final margin, logits; not 0.
            of: "KL other prompts", "largest KL" or "KL text".

        Raises:
            EditError: a change that is 0 or not finite, or no such column.
        """
        change = require_number("change", change)
        if change == 0 or of not in ("KL other prompts", "largest KL", "KL text"):
            raise EditError(
                f"cost_at takes a change other than 0 and one of the three KL columns, got {change} and {of!r}"
            )
        costs = [
            {"method": method, "unit": some["unit"].iloc[0], of: _interpolated(some, change, of)}
            for method, some in self.rows.groupby("method", sort=False)
        ]
        return pd.DataFrame(costs).sort_values(of, kind="stable", ignore_index=True)

    def plot(self, of: str = "KL other prompts"):
        """The Pareto figure: realised margin change against mean KL, one line per method; a matplotlib Figure."""
        return plot_pareto(self.rows, self.target, len(self.prompts), of)

    def __repr__(self) -> str:
        shown = self.table().to_string(index=False, float_format="{:.4g}".format)
        return f"EditComparison({self.target.prompt!r}: {self.target.answer!r} over {self.target.foil!r})\n{shown}"

    def _repr_html_(self) -> str:
        what = (
            f"{self.target.prompt!r}: {self.target.answer!r} over {self.target.foil!r}, margin {self.target.margin:.3f}"
        )
        return card(f"Edits of {self.target.site}", what, self.plot(), self.table())


def compare_edits(
    model: Any,
    factors: Any,
    unit: str,
    prompt: Any,
    answer: str | int,
    foil: str | int,
    *,
    other_prompts: Sequence[Any],
    tokens: Any = None,
    shifts: Sequence[float | int] = SHIFTS,
    methods: Sequence[str] = METHODS,
    direction: str = "unembedding",
    prepend_bos: bool | None = None,
    random_seed: int = RANDOM_SEED,
    lora_seed: int = 0,
    lora_learning_rate: float | int = LEARNING_RATE,
    batch_size: int = 8,
    progress: bool = True,
) -> EditComparison:
    """Edit one prompt's margin in four ways, and measure what else moves; the defaults are the paper's.

    Args:
        model: the host, with nothing attached at the unit's site.
        factors, unit, prompt, answer, foil, direction, prepend_bos: see `edit_unit`.
        other_prompts: prompts that should not change; mean KL of their next token is the cost.
        tokens: text for a second cost, KL per next-token prediction; None = none.
        shifts: requested, in logits: h* dW d of unit, random and oracle, the final margin of lora.
        methods: any of METHODS.
        random_seed: draws the control unit (paper: 17); lora_seed draws L_A (ours: 0).
        lora_learning_rate: of AdamW (paper: 0.08).

    Raises:
        ValueError: (EditError) whatever `edit_unit` refuses, no other prompts, no or unknown methods, or bad shifts.
    """
    wanted = [require_number("a shift", shift) for shift in shifts]
    if not wanted or len(set(wanted)) != len(wanted):
        raise EditError(f"shifts must be different numbers, at least one, got {tuple(shifts)}")
    methods = list(dict.fromkeys(methods))
    if not methods or set(methods) - set(METHODS):
        raise EditError(f"methods must be some of {METHODS}, got {tuple(methods)}")
    if isinstance(other_prompts, str) or not len(other_prompts):
        raise EditError("other_prompts must be a list of at least one prompt: the cost is what happens to them")
    host, given = host_of(model), factor_set(factors)
    site, index = unit_of(host, given, unit)
    require_free(host, [site])
    check_weights(host, site, given[site.name])
    target = find_target(model, site, prompt, answer, foil, direction=direction, prepend_bos=prepend_bos)
    made: list[Edit] = []
    for method in methods:
        if method == "lora":
            made += lora_edits(
                model, site, target, wanted, learning_rate=lora_learning_rate, seed=lora_seed, progress=progress
            )
        elif method == "oracle":
            made += [oracle_edit(model, site, target, shift) for shift in wanted]
        else:
            which = index if method == "unit" else random_unit(given[site.name], target, seed=random_seed, but=index)
            made += [unit_edit(model, given, site, which, target, shift, method=method) for shift in wanted]
    found = measure(
        model, made, other_prompts, tokens, batch_size=batch_size, prepend_bos=prepend_bos, progress=progress
    )
    settings = {
        "unit": unit,
        "methods": methods,
        "shifts": wanted,
        "random_seed": random_seed,
        "lora_seed": lora_seed,
        "lora_learning_rate": float(lora_learning_rate),
        "n_prompts": len(other_prompts),
        "n_text_predictions": found[0].n_predictions,
        "target": target.described(),
        "model": str(model.cfg.model_name),
        "weight_sha256": made[0].settings["weight_sha256"],
        "swd_lens": __version__,
    }
    rows = pd.DataFrame([one.row() for one in found])
    edits = {(edit.method, edit.shift): edit for edit in made}
    return EditComparison(rows, edits, target, found[0].prompts, settings)


def _interpolated(some: pd.DataFrame, change: float, of: str) -> float:
    """KL at a realised change, between the edits of its sign and no edit at all."""
    moved, paid = some["margin change"].to_numpy(float), some[of].to_numpy(float)
    branch = np.sign(moved) == np.sign(change)
    reached = np.concatenate([[0.0], np.abs(moved[branch])])
    roots = np.concatenate([[0.0], np.sqrt(paid[branch])])
    order = np.argsort(reached, kind="stable")
    if abs(change) > reached.max():
        return float("nan")
    return float(np.interp(abs(change), reached[order], roots[order]) ** 2)
