"""Allocation: how many edges each matrix gets, and why; what `allocate` gives and `factorize(..., sparsity=...)` takes.

1. It is a mapping site name -> s. The budgets and the loss curves behind them stay with it.
2. It prints as a table, and is saved as JSON.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from swd_lens.base.display import card
from swd_lens.base.files import write_json
from swd_lens.factorization.spend import LossCurve
from swd_lens.hosts.sites import split_name


@dataclass(frozen=True, repr=False, eq=False)
class Allocation(Mapping[str, float]):
    """Sparsity per site: a mapping site name -> s in execution order, with the reasons.

    Attributes:
        sparsity: the uniform s whose total is spent.
        by: what was measured, "kl" or "error".
        numel: site -> entries of its matrix.
        uniform: site -> K at the uniform s.
        allocated: site -> K given.
        curves: site -> its loss at the budgets tried; nats per token for "kl", relMSE for "error".
        settings: everything else that was used; plain JSON values.
    """

    sparsity: float
    by: str
    numel: Mapping[str, int]
    uniform: Mapping[str, int]
    allocated: Mapping[str, int]
    curves: Mapping[str, LossCurve]
    settings: Mapping[str, Any]

    def __getitem__(self, site: str) -> float:
        return 1.0 - self.allocated[site] / self.numel[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self.allocated)

    def __len__(self) -> int:
        return len(self.allocated)

    @property
    def edges(self) -> int:
        """Total K: that of the uniform sparsity, exactly."""
        return sum(self.allocated.values())

    @property
    def predicted(self) -> dict[str, float]:
        """Summed loss of single replacements, "uniform" and "allocated". Not the loss of replacing all of them together."""
        return {"uniform": self._summed(self.uniform), "allocated": self._summed(self.allocated)}

    def _summed(self, budgets: Mapping[str, int]) -> float:
        return sum(curve.at(budgets[site]) for site, curve in self.curves.items())

    def table(self) -> pd.DataFrame:
        """One row per site: entries, K uniform and allocated, s, its measured loss at both, its share of the summed loss."""
        before = {site: curve.at(self.uniform[site]) for site, curve in self.curves.items()}
        after = {site: curve.at(self.allocated[site]) for site, curve in self.curves.items()}
        return pd.DataFrame(
            {
                "site": list(self),
                "numel": [self.numel[site] for site in self],
                "K uniform": [self.uniform[site] for site in self],
                "K allocated": [self.allocated[site] for site in self],
                "s": [self[site] for site in self],
                f"{self._loss} uniform": [before[site] for site in self],
                f"{self._loss} allocated": [after[site] for site in self],
                "share uniform": [before[site] / sum(before.values()) for site in self],
                "share allocated": [after[site] / sum(after.values()) for site in self],
            }
        )

    @property
    def _loss(self) -> str:
        return "KL" if self.by == "kl" else "relMSE"

    def as_dict(self) -> dict[str, Any]:
        """Plain values; `from_dict` takes them back."""
        return {
            "sparsity": self.sparsity,
            "by": self.by,
            "edges": self.edges,
            "predicted": self.predicted,
            "settings": dict(self.settings),
            "sites": {
                site: {"s": self[site], "numel": self.numel[site], "uniform": self.uniform[site]}
                | {"allocated": self.allocated[site], "curve": _plain(self.curves[site])}
                for site in self
            },
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Allocation":
        """What `as_dict` gave.

        Raises:
            ValueError: something is missing or not of its kind.
        """
        try:
            sites = dict(values["sites"])
            curves = {
                name: LossCurve(tuple(row["curve"]["edges"]), tuple(row["curve"]["losses"]))
                for name, row in sites.items()
            }
            numel, uniform, allocated = (
                {name: int(row[key]) for name, row in sites.items()} for key in ("numel", "uniform", "allocated")
            )
            for name in sites:
                split_name(name)
            s, by, settings = float(values["sparsity"]), str(values["by"]), dict(values["settings"])
            return cls(s, by, numel, uniform, allocated, curves, settings)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"these values are not an Allocation's ({error!r}); Allocation.save writes them"
            ) from error

    def save(self, path: str | Path) -> None:
        """Write it as JSON, atomically."""
        write_json(Path(path), self.as_dict())

    @classmethod
    def load(cls, path: str | Path) -> "Allocation":
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not the JSON of an Allocation; the path is named.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no JSON ({error}); give a file that Allocation.save wrote") from error
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def __repr__(self) -> str:
        return f"{self._title()}\n{self._shown().to_string(index=False)}"

    def _title(self) -> str:
        loss, predicted = self._loss, self.predicted
        return (
            f"Allocation by {loss}: {self.edges:,} edges over {len(self)} matrices, the total of s = {self.sparsity:g} for each. "
            f"Summed {loss} of single replacements: {predicted['uniform']:.4g} uniform, {predicted['allocated']:.4g} allocated."
        )

    def _repr_html_(self) -> str:
        return card(self._title(), self._shown())

    def _shown(self) -> pd.DataFrame:
        table, shown = self.table(), pd.DataFrame()
        for name in table.columns:
            look = "{}" if name == "site" else "{:,}" if table[name].dtype.kind == "i" else "{:.3g}"
            look = "{:.3f}" if name == "s" else "{:.1%}" if name.startswith("share") else look
            shown[name] = table[name].map(look.format)
        return shown


def _plain(curve: LossCurve) -> dict[str, Any]:
    return {key: list(value) for key, value in asdict(curve).items()}
