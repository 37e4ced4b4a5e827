"""dense_transfer: whether a circuit found in a replacement says the same of the dense model, whose error term stays.

1. In the replacement a kept circuit gives y = sum over its units of z_i B_i + sum over the others of mu_i B_i + b: what the units
   do not explain of h W is gone in every run, and circuits are judged by a model without it.
2. With the error term kept, y = h W + b - sum over the others of (z_i - mu_i) B_i (`Attachment.keeping_errors`). All units
   kept is the dense host to the bit; with exact factors both ways are one.
3. The circuit, the empty one and the circuit ablated are run both ways on the test prompts; the gap is the value with the error
   term less that in the replacement, of what is recovered, of sufficiency and of the drop.
4. Null: on each prompt the two ways change places, which flips the sign of the prompt's difference, and the gap is computed anew.
   Prompts about one thing change places together. p = (1 + how many of n flips have a gap as far from 0) / (n + 1), exact where
   the two ways are exchangeable (tests/circuits/test_transfer.py).
"""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.base.checks import bounded
from swd_lens.base.figures import new_figure, style
from swd_lens.base.record import SavedRecord
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.circuits.ablation import replaced_masks
from swd_lens.circuits.circuit import Circuit
from swd_lens.circuits.dense_cache import DenseCache
from swd_lens.circuits.interventions import InterventionRunner
from swd_lens.circuits.measure import VALUES, Carried, content_members, contents_of, does_not_carry, surface_name
from swd_lens.hosts import host_of, require_no_dropout
from swd_lens.hosts.recording import standing_hooks
from swd_lens.tasks.task import Task, TaskSplit
from swd_lens.units import attach

WAYS = ("replacement", "error kept")
_RUNS = ("keep", "ablate", "empty", "full")
_EQUAL = 1e-5  # gaps that differ by less are ties: rounding alone may order them


@dataclass(frozen=True, repr=False)
class DenseTransfer(SavedRecord):
    """A circuit in the replacement, and in the dense model whose error term stays, on one task.

    Attributes:
        rows: "measure" ("recovered", "sufficiency", "drop" in logits), its value in the "replacement" and with the "error kept",
            their "gap", and "p" of the gap.
        prompts: one row per test prompt: "content", and margins in logits, "keep", "ablate", "empty" and "full", each of
            " (replacement)" and " (error kept)"; full with the error kept is the dense host.
        task: the task's name.
        surface: the sites, as a sentence names them.
        units, edges: of the circuit.
        settings: n, seed, ablation, positions, split, contents, the circuit's provenance.
        circuit: in memory alone.
    """

    WHAT: ClassVar[str] = "a dense transfer"
    in_memory: ClassVar[tuple[str, ...]] = ("circuit",)
    derived: ClassVar[tuple[str, ...]] = ("gap", "p")

    rows: pd.DataFrame
    prompts: pd.DataFrame
    task: str
    surface: str
    units: int
    edges: int
    settings: Mapping[str, Any]
    circuit: Circuit | None = None

    @property
    def gap(self) -> float:
        """Recovered with the error term less recovered in the replacement; NaN where either does not carry the task."""
        return self._of("recovered", "gap")

    @property
    def p(self) -> float:
        """p of the gap in what is recovered."""
        return self._of("recovered", "p")

    def _of(self, measure: str, column: str) -> float:
        return float(self.rows.set_index("measure").loc[measure, column])  # pyright: ignore[reportArgumentType]

    def table(self) -> pd.DataFrame:
        """One row per measure: its value both ways, the gap and its p."""
        return self.rows.copy()

    def plot(self):
        """Each prompt's kept margin with the error term against that in the replacement, in logits; a matplotlib Figure."""
        figure, ((ax,),) = new_figure(width=3.6, height=3.2)
        x, y = (self.prompts[f"keep ({way})"] for way in WAYS)
        ends = [min(x.min(), y.min()), max(x.max(), y.max())]
        ax.plot(ends, ends, linewidth=1.0, color="#888888")
        ax.plot(x, y, marker="o", markersize=3, **(style(0) | {"linestyle": ""}))
        ax.set(xlabel="margin in the replacement (logits)", ylabel="margin with the error term (logits)")
        return figure

    def in_words(self) -> str:
        """One sentence: what the circuit recovers both ways, or which way does not carry the task."""
        for way in WAYS:
            carried, q_full, q_empty = _carried(self.prompts, way)
            if not carried.enough:
                kind = self.settings.get("ablation")
                return f"With the {way}: " * (way != WAYS[0]) + does_not_carry(
                    self.surface, self.task, carried, q_full, q_empty, kind
                )
        values = [self._of("recovered", way) for way in WAYS]
        return (
            f"{self.units:,} units with {self.edges:,} active edges recover {values[0]:.0%} of {self.task} in the replacement "
            f"and {values[1]:.0%} in the dense model with its error term (gap {self.gap:+.3f}, p = {self.p:.3g})."
        )

    def __repr__(self) -> str:
        return f"DenseTransfer({self.in_words()})"

    def parts(self) -> tuple[Any, ...]:
        return self.table(), self.plot()


@with_torch_defaults
def dense_transfer(
    model: Any,
    factors: Any,
    task: Task | TaskSplit,
    circuit: Circuit,
    *,
    n: int = 999,
    seed: int = 0,
    ablation: str = "mean",
    batch_size: int = 256,
    tokens_per_forward: int = 16_384,
    dense: DenseCache | None = None,
) -> DenseTransfer:
    """Evaluate a circuit in the dense model, where ablation takes units' contributions off and leaves the error term (ours).

    Args:
        model: the host, with these sites not attached.
        factors: the replacement that the circuit is of. Of an encode/decode pair what ablation takes off is decode(z) less
            decode of what z becomes.
        task: its test split, or a split alone.
        circuit: kept, and for the drop ablated; its means are those of its scores both ways.
        n: flips; they need no runs.
        seed: of them.
        ablation, batch_size, tokens_per_forward, dense: see `swd_lens.evaluate`.

    Returns:
        DenseTransfer: recovered, sufficiency and drop both ways, gaps and p-values; a sentence where the surface does not carry
        the task.

    Raises:
        ValueError: no flips, a circuit of other factors; and see `swd_lens.evaluate`.

    Source: ours; the error term as in sparse feature circuits (Marks et al., arXiv:2403.19647), where it is a node.
    """
    bounded("n, the number of flips,", n, 1)
    require_no_dropout(model)
    split, scores = task.test if isinstance(task, Task) else task, circuit.scores
    dense = DenseCache() if dense is None else dense
    sets = [circuit.masks("keep"), circuit.masks("ablate"), replaced_masks(scores, [], "keep")]
    masks = {site: torch.stack([of[site] for of in sets]) for site in sets[0]}
    prompts = pd.DataFrame({"content": contents_of(split)})
    with attach(model, factors) as attachment:
        for way in WAYS:
            with attachment.keeping_errors() if way == WAYS[1] else nullcontext():
                how = {"batch_size": batch_size, "tokens_per_forward": tokens_per_forward, "dense": dense}
                runner = InterventionRunner(host_of(model), attachment, split, scores, ablation, **how)
                outcome, full = runner.run(3, lambda rows: {site: mask[rows] for site, mask in masks.items()})
            for name, margins in zip(_RUNS, (*outcome.margins, full.margins[0]), strict=True):
                prompts[f"{name} ({way})"] = margins.tolist()
    carries = all(_carried(prompts, way)[0].enough for way in WAYS)
    rows = gaps(prompts, n, seed)
    if not carries:
        rows.loc[rows["measure"] == "recovered", [*WAYS, "gap", "p"]] = math.nan
    settings = {"n": n, "seed": seed, "ablation": ablation, "positions": scores.settings["positions"], "test_split": split.name}
    settings |= {"n_test": len(split), "contents": prompts["content"].nunique(), "circuit": dict(circuit.provenance)}
    about = (split.task, surface_name(scores.scores), circuit.n_units, circuit.n_edges, settings | standing_hooks(model))
    return DenseTransfer(rows, prompts, *about, circuit)


def _carried(prompts: pd.DataFrame, way: str) -> tuple[Carried, float, float]:
    """The part that the surface carries one way, and its mean margins with all units and with none."""
    columns = (f"full ({way})", f"empty ({way})", f"full ({WAYS[1]})")
    full, empty, dense = (torch.tensor(prompts[column].to_numpy()) for column in columns)
    return Carried.of(full, empty, float(dense.mean())), float(full.mean()), float(empty.mean())


def gaps(prompts: pd.DataFrame, n: int, seed: int) -> pd.DataFrame:
    """`DenseTransfer.rows`, from `DenseTransfer.prompts`."""
    generator = torch.Generator().manual_seed(seed)
    sums = [_sums(prompts, way) for way in WAYS]
    flips = torch.randint(0, 2, (n, sums[0].shape[1]), generator=generator).double()
    own = [_values(of.sum(1)[None], len(prompts)) for of in sums]
    flipped = [_values((1 - flips) @ a.T + flips @ b.T, len(prompts)) for a, b in (sums, sums[::-1])]
    gap, others = (own[1] - own[0])[0], (flipped[1] - flipped[0]).nan_to_num(nan=math.inf)
    as_far = (others.abs() >= gap.abs() - _EQUAL).sum(0)
    rows = pd.DataFrame({"measure": VALUES, WAYS[0]: own[0][0].tolist(), WAYS[1]: own[1][0].tolist()})
    rows["gap"], rows["p"] = gap.tolist(), ((1 + as_far.double()) / (n + 1)).tolist()
    rows.loc[rows["gap"].isna(), "p"] = math.nan
    return rows


def _sums(prompts: pd.DataFrame, way: str) -> Float[Tensor, "run content"]:
    """Sums of margins over the prompts of each content."""
    margins = torch.tensor([prompts[f"{name} ({way})"].tolist() for name in _RUNS], dtype=torch.float64)
    return margins @ content_members(prompts["content"].tolist())


def _values(sums: Float[Tensor, "flip run"], n_prompts: int) -> Float[Tensor, "flip value"]:
    """Recovered, sufficiency and drop, from sums of margins; sufficiency is NaN where the full margin is not positive."""
    keep, ablate, empty, full = (sums / n_prompts).unbind(1)
    sufficiency = torch.where(full > 0, keep / full, math.nan)
    return torch.stack([(keep - empty) / (full - empty), sufficiency, full - ablate], 1)
