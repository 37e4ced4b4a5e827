"""Circuit: a set of units with the scores and means it came from, so that it can be attached, compared, saved and shown.

A circuit is kept (every other unit gets its reference activation) or ablated (its own units do). Both need the reference of
all units, so a circuit carries the `UnitScores` that it was chosen by; they also say whose units these are.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from swd_lens.base import __version__
from swd_lens.base.errors import legible, quoted
from swd_lens.base.files import plain
from swd_lens.base.record import Record, require_format
from swd_lens.base.sealed import read_tensors, readable, write_tensors
from swd_lens.circuits.ablation import intervention_hooks, replaced_masks
from swd_lens.circuits.bits import selection_bits, unit_bits_of
from swd_lens.circuits.scores import UnitScores
from swd_lens.units import Attachment, attach
from swd_lens.units.coder import is_counted
from swd_lens.units.keys import read_units
from swd_lens.units.unit_set import active_edges, require_made_for, sources_by_site

_FORMAT, _VERSION, _WHAT = "swd_lens circuit", 1, "a circuit file"


@dataclass(frozen=True, repr=False, eq=False)
class Circuit(Record):
    """A set of units of attached sites.

    Attributes:
        units: (site, unit) pairs, each once, in the order in which they were chosen.
        scores: of all units of these sites, with their means and settings.
        edges: site -> (unit,) active edges of every unit (0 where it reads or writes nothing).
        provenance: how it was chosen; plain JSON values.
        bits: site -> (unit,) what it takes to write down each unit, see `swd_lens.circuits.bits`; {} where nobody said.
    """

    units: tuple[tuple[str, int], ...]
    scores: UnitScores
    edges: Mapping[str, Int[Tensor, " _unit"]]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    bits: Mapping[str, Float[Tensor, " _unit"]] = field(default_factory=dict)

    @classmethod
    def of(cls, factors: Any, scores: UnitScores, units: Any, **provenance: Any) -> "Circuit":
        """A circuit of the user's own choice.

        Args:
            factors: what the scores are of, by site name: a FactorSet, or what else `swd_lens.attach` takes.
            units: names ("blocks.2.mlp_out/17") or (site, index) pairs, a table with a column "unit", or another circuit.

        Raises:
            ValueError: a unit that the scores do not cover, or one named twice; scores of other factors.
            TypeError: a unit source whose edges cannot be counted by itself.
        """
        units_of = sources_by_site(factors)
        for site, source in units_of.items():
            if not is_counted(source):
                raise TypeError(
                    f"the units of {site} are a {type(source).__name__}, whose edges are not counted before it is "
                    "attached; take a circuit from the curve: evaluate(...).circuit(n_units)"
                )
        require_made_for(units_of, scores.settings, "this ranking")
        members = read_units(units, scores.scores)
        replaced_masks(scores, members, "ablate")  # refuses what is not there
        twice = [unit for unit in set(members) if members.count(unit) > 1]
        if twice:
            raise ValueError(f"unit {twice[0][0]}/{twice[0][1]} is named {members.count(twice[0])} times; name it once")
        return cls(tuple(members), scores, active_edges(units_of), provenance, unit_bits_of(units_of))

    # ------------------------------------------------------------------ counts

    @property
    def n_units(self) -> int:
        """C_unit of the paper (§3.2): every unit, valid or not."""
        return len(self.units)

    @property
    def n_edges(self) -> int:
        """C_edge of the paper (§3.2): read and write nonzeros of the units that have both."""
        return sum(int(self.edges[site][unit]) for site, unit in self.units)

    @property
    def n_bits(self) -> float | None:
        """Bits to write the circuit down: its units' factors, and which of all units they are; None where no bits are known."""
        if not self.bits:
            return None
        factors = sum(float(self.bits[site][unit]) for site, unit in self.units)
        return factors + selection_bits(self.scores.n_units, self.n_units)

    @property
    def names(self) -> list[str]:
        return [f"{site}/{unit}" for site, unit in self.units]

    def table(self) -> pd.DataFrame:
        """One row per unit: site, unit, head and its share (where a site has heads), rank among all units (from 1), score,
        mean z, active edges, bits (where they are known).
        """
        means = {site: mean if mean.ndim == 1 else mean[-1] for site, mean in self.scores.means.items()}
        columns: dict[str, list[Any]] = {"site": [site for site, _ in self.units], "unit": [i for _, i in self.units]}
        columns |= self.scores.head_columns(self.units)
        known = {"rank": self.scores.ranks(), "score": self.scores.scores, "mean z": means, "edges": self.edges}
        for name, of in (known | ({"bits": self.bits} if self.bits else {})).items():
            columns[name] = [of[site][unit].item() for site, unit in self.units]
        return pd.DataFrame(columns)

    def overlap(self, other: "Circuit") -> dict[str, float]:
        """How much two circuits of the same factors share: shared units, |A and B| / |A or B| in units and in edges, and the
        shares of this one's and the other's units that are shared.

        Raises:
            ValueError: circuits of other factors, whose unit i is another unit.
        """
        self._require_same_factors(other)
        shared, either = set(self.units) & set(other.units), set(self.units) | set(other.units)
        edges = {unit: int(self.edges[unit[0]][unit[1]]) for unit in either}
        both, any_ = sum(edges[unit] for unit in shared), sum(edges.values())
        return {
            "shared": float(len(shared)),
            "jaccard": len(shared) / len(either) if either else 1.0,
            "edge jaccard": both / any_ if any_ else 1.0,
            "share of this": len(shared) / self.n_units if self.units else 1.0,
            "share of other": len(shared) / other.n_units if other.units else 1.0,
        }

    def side_by_side(self, other: "Circuit") -> pd.DataFrame:
        """Two circuits of the same factors as a table, one row per unit of either: those of both first, by this one's rank.

        Returns:
            unit, in ("both", "this" or "other"), rank and other rank among all units (from 1, by either's scores), score and
            other score, active edges. `(a & b).table()` has the shared units alone.

        Raises:
            ValueError: circuits of other factors, whose unit i is another unit.
        """
        self._require_same_factors(other)
        ranks, other_ranks = self.scores.ranks(), other.scores.ranks()
        own, others, columns = set(self.units), set(other.units), {}
        groups = {"both": (own & others, ranks), "this": (own - others, ranks), "other": (others - own, other_ranks)}
        listed = [(name, *unit) for name, (of, by) in groups.items() for unit in sorted(of, key=lambda u: by[u[0]][u[1]])]
        columns["unit"] = [f"{site}/{unit}" for _, site, unit in listed]
        columns["in"] = [name for name, _, _ in listed]
        known = {"rank": ranks, "other rank": other_ranks, "score": self.scores.scores}
        for name, of in (known | {"other score": other.scores.scores, "edges": self.edges}).items():
            columns[name] = [of[site][unit].item() for _, site, unit in listed]
        return pd.DataFrame(columns)

    def __and__(self, other: "Circuit") -> "Circuit":
        """The units of both, in this circuit's order, with this one's scores and reference activations."""
        return self._with(other, "and", [unit for unit in self.units if unit in set(other.units)])

    def __or__(self, other: "Circuit") -> "Circuit":
        """This circuit's units and then the other's further ones, with this one's scores and reference activations."""
        return self._with(other, "or", [*self.units, *(unit for unit in other.units if unit not in set(self.units))])

    def __sub__(self, other: "Circuit") -> "Circuit":
        """This circuit's units that the other does not have."""
        return self._with(other, "without", [unit for unit in self.units if unit not in set(other.units)])

    def _with(self, other: "Circuit", how: str, units: Iterable[tuple[str, int]]) -> "Circuit":
        self._require_same_factors(other)
        of = {"this": dict(self.provenance), "other": dict(other.provenance)}
        of["other"]["task"] = other.scores.settings.get("task")
        return Circuit(tuple(units), self.scores, self.edges, {"kind": how, **of}, self.bits or other.bits)

    def _require_same_factors(self, other: "Circuit") -> None:
        for key in ("units", "factors"):
            if self.scores.settings.get(key) != other.scores.settings.get(key):
                raise ValueError(
                    "these circuits are of different factors, so equal numbers do not name equal units; compare circuits "
                    "that were found with the same FactorSet"
                )

    def __repr__(self) -> str:
        sites = len({site for site, _ in self.units})
        task = self.scores.settings.get("task", "a task")
        return f"Circuit({task}: {self.n_units} of {self.scores.n_units} units in {sites} sites, {self.n_edges:,} edges)"

    # ------------------------------------------------------------------ at work

    def masks(self, mode: str = "keep") -> dict[str, Bool[Tensor, " _unit"]]:
        """site -> (unit,), True where a unit is replaced when the circuit is kept or ablated."""
        return replaced_masks(self.scores, self.units, mode)

    def hooks(self, mode: str = "keep", *, ablation: str = "mean") -> list[tuple[str, Any]]:
        """For `model.run_with_hooks(tokens, fwd_hooks=...)` while the factors are attached, see `intervention_hooks`."""
        return intervention_hooks(self.scores, self.units, mode, ablation=ablation)

    @contextmanager
    def attach(self, model: Any, factors: Any, mode: str = "keep", *, ablation: str = "mean") -> Iterator[Attachment]:
        """The host as this circuit alone (keep) or without it (ablate), for any tool that runs the host.

        The interventions act at the last position of what is run, or at all, as the scores were taken.

        Raises:
            ValueError: factors other than those that the circuit is of.
            AttachError: see `swd_lens.attach`.
        """
        with attach(model, factors) as attachment:
            attachment.factors.require_made_for(self.scores.settings, "this circuit")
            with model.hooks(fwd_hooks=self.hooks(mode, ablation=ablation)):
                yield attachment

    # ------------------------------------------------------------------ files

    def save(self, path: str | Path) -> None:
        """Write one safetensors file with its hash, whole or not at all.

        Raises:
            OSError: the disk is full, or the folder cannot be written.
        """
        tensors = {f"scores/{site}": value for site, value in self.scores.scores.items()}
        tensors |= {f"means/{site}": value for site, value in self.scores.means.items()}
        tensors |= {f"edges/{site}": value.to(torch.int64) for site, value in self.edges.items()}
        tensors |= {f"bits/{site}": value.to(torch.float64) for site, value in self.bits.items()}
        heads = {site: [list(head) for head in of_site] for site, of_site in self.scores.heads.items()}
        about = {"version": _VERSION, "swd_lens": __version__, "units": [list(unit) for unit in self.units]}
        about |= {"sites": list(self.scores.scores), "heads": heads}
        about |= {"settings": dict(self.scores.settings), "provenance": dict(self.provenance)}
        write_tensors(Path(path), tensors, {"format": _FORMAT, "about": json.dumps(plain(about))})

    @classmethod
    def load(cls, path: str | Path) -> "Circuit":
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: not a circuit file, of a later format, or not what was written.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"there is no circuit file {legible(path)}")
        tensors, header = read_tensors(path, _WHAT)
        if header.get("format") != _FORMAT:
            raise ValueError(f"{legible(path)} is not a circuit file (its format is {quoted(header.get('format'))})")
        with readable(path, _WHAT):
            about = json.loads(header["about"])
        require_format(path, about.get("version"), _VERSION, _WHAT)
        with readable(path, _WHAT):  # files without a hash may hold anything
            parts = [{s: tensors[f"{part}/{s}"] for s in about["sites"]} for part in ("scores", "means", "edges")]
            heads = {s: [(str(n), float(share)) for n, share in of] for s, of in about["heads"].items()}
            scores = UnitScores(parts[0], parts[1], dict(about["settings"]), heads)
            units = tuple((str(site), int(unit)) for site, unit in about["units"])
            known = any(name.startswith("bits/") for name in tensors)
            bits = {s: tensors[f"bits/{s}"] for s in about["sites"]} if known else {}
            circuit = cls(units, scores, parts[2], dict(about["provenance"]), bits)
            circuit.table()  # every unit is there
        return circuit
