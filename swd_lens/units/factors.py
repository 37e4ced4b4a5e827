"""Factors: two sparse matrices in place of a dense one. W (d_in, d_out) is replaced by read (d_in, unit) @ write (unit, d_out).

The flow through this module:

1. `Factors` holds the two factors of one matrix with how they were made; counts (edges, valid units) and errors
   (relmse, relative Frobenius) are derived, never stored. They are dense; `sparse` gives the sparse view. They know the
   values that they were made with: changed in place they are refused (`require_unedited`); `dataclasses.replace` makes new
   ones, without the errors and the probe of the old values.
2. `FactorSet` maps site names to Factors in execution order and carries the provenance of the whole replacement.
3. `FactorSet.save` / `FactorSet.load` write and read a folder (index.py): indices and values of the nonzeros, settings,
   provenance, integrity. A loaded set keeps its files memory-mapped and makes a site's Factors when they are first asked
   for; that is also when their probe is checked. `Factors.save` / `Factors.load` are those of a set of one.
4. `FactorSet.push_to_hub` / `FactorSet.from_pretrained` do the same with a repository on the Hugging Face hub (hub.py).
"""

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from swd_lens.base.display import card, folded_settings
from swd_lens.base.errors import AttachError, brief, legible, seen
from swd_lens.base.snapshots import TensorSnapshot, as_normal_tensor, count_nonzeros
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts import host_of, sites_of
from swd_lens.solver.metric import relmse_of
from swd_lens.units.directions import ranked
from swd_lens.units.hub import OnHub
from swd_lens.units.index import open_folder, write_index, writing_factors
from swd_lens.units.integrity import Offsets, Origin, Probe, fingerprint
from swd_lens.units.keys import names_one, sites_of_key
from swd_lens.units.match import transported
from swd_lens.units.storage import StoredSite, write_site

__all__ = ["FactorSet", "Factors", "fingerprint", "write_factors"]

# Columns of a float64 error are computed this many entries at a time: relmse needs no second matrix of W's size.
EDITED = (
    "read, write or offsets were changed in place after these factors were made: their errors, their probe and what is "
    "attached of them are of the old values. To go on with the new ones, take dataclasses.replace(factors), which has neither "
    "the old errors nor the old probe, and attach that"
)
# What provenance says of the values: how far they were from W, and the call that makes them.
MEASURED = ("relmse", "relative_frobenius", "recipe")


@with_torch_defaults
@dataclass(frozen=True, repr=False)
class Factors:
    """Two sparse factors of one matrix, W ≈ read @ write.

    Attributes:
        read: (d_in, unit) float32; column i is the read vector of unit i. z_i = h @ read[:, i].
        write: (unit, d_out) float32; row i is the write vector of unit i.
        settings: how they were made (preset, sparsity, iterations, ...); plain JSON values.
        provenance: of what (site, weight fingerprint, tokens, version, seed); plain JSON values.
        weight: (d_in, d_out) the dense matrix, kept in memory for `relmse`; it is never saved.
        origin: what they were made from, as far as another host needs it (integrity.py). On the CPU, like probe.
        offsets: constants that transported factors add: z = h @ read + offsets.unit; y = z @ write + bias + offsets.out.
        probe: an input, the z and the y it must give. `dataclasses.replace` with other values drops it.
        held: checksums of read, write and offsets, which provenance's errors and the probe were made with. Left out, it is
            that of the present values. `dataclasses.replace` hands it on: where the new values are others, `MEASURED` and
            the probe are dropped; give held=None with values, provenance and probe that belong together.
        mark: read, write and offsets as they were when these Factors were made.
    """

    read: Float[Tensor, "d_in unit"]
    write: Float[Tensor, "unit d_out"]
    settings: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    weight: Float[Tensor, "d_in d_out"] | None = None
    origin: Origin | None = None
    offsets: Offsets | None = None
    probe: Probe | None = None
    held: tuple[Any, ...] | None = field(default=None, repr=False, compare=False)
    mark: TensorSnapshot = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Inference tensors count no versions, and no gradient could be taken through units made of them.
        tensors: dict[str, Tensor | None] = {"read": as_normal_tensor(self.read), "write": as_normal_tensor(self.write)}
        changes: dict[str, Any] = dict(tensors)
        if self.offsets is not None:
            tensors |= {"offsets.unit": self.offsets.unit, "offsets.out": self.offsets.out}
        mark = TensorSnapshot((tensors, name) for name in tensors)
        if self.held not in (None, mark.checksums) and not self.read.is_meta:
            changes |= {"probe": None, "provenance": {k: v for k, v in self.provenance.items() if k not in MEASURED}}
        # The dense matrix is watched apart: it may change, as long as no error is asked of it.
        changes |= {"held": mark.checksums, "mark": mark, "_weight_mark": _weight_mark(self.weight)}
        for name, value in changes.items():
            object.__setattr__(self, name, value)  # frozen for others

    def require_unedited(self, site: str = "") -> None:
        """Require that read, write and offsets hold the values that these Factors were made with. site: how the message calls
        them; "" = as their provenance does. Raises AttachError: they were changed in place."""
        if self.mark.changed():
            raise AttachError(f"{site or self.provenance.get('site', 'these factors')}: {EDITED}")

    @property
    def d_in(self) -> int:
        return self.read.shape[0]

    @property
    def n_units(self) -> int:
        return self.read.shape[1]

    @property
    def d_out(self) -> int:
        return self.write.shape[1]

    @property
    def edges_per_unit(self) -> Int[Tensor, " unit"]:
        """Active edges of each unit: nonzeros of its read vector plus nonzeros of its write vector (paper, app. A.2).

        Exact controls (settings["edges"] == "dense") count d_in + d_out, whatever zeros they hold (method.md §4.1).
        """
        if self.settings.get("edges") == "dense":
            return torch.full((self.n_units,), self.d_in + self.d_out)
        return (self.read != 0).sum(0) + (self.write != 0).sum(1)

    @property
    def valid_units(self) -> Bool[Tensor, " unit"]:
        """Units with at least one read and one write edge; the others contribute nothing."""
        return (self.read != 0).any(0) & (self.write != 0).any(1)

    @property
    def edges(self) -> int:
        """nnz(read) + nnz(write): the K that was really used; `edges_per_unit` summed."""
        if self.settings.get("edges") == "dense":
            return self.n_units * (self.d_in + self.d_out)
        return count_nonzeros(self.read) + count_nonzeros(self.write)

    @property
    def sparsity(self) -> float:
        """s = 1 - K / numel(W)."""
        return 1.0 - self.edges / (self.d_in * self.d_out)

    def product(self) -> Float[Tensor, "d_in d_out"]:
        """read @ write, dense."""
        return self.read @ self.write

    def relmse(
        self,
        gram: Float[Tensor, "d_in d_in"] | None = None,
        weight: Float[Tensor, "d_in d_out"] | None = None,
        *,
        without: Float[Tensor, "_vector d_in"] | None = None,
    ) -> float:
        """tr((W-AB)^T G (W-AB)) / tr(W^T G W); gram None means G = I. Computed in float64.

        Args:
            without: vectors V, with G - V^T V in place of G: `Grams.first`, for the error at the other positions. Where they
                are all there is, they count.

        Raises:
            ValueError: no weight given and none remembered (factors that were loaded from a file), or the one that was
                remembered was changed in place since.
        """
        dense = self.weight if weight is None else weight
        if dense is None:
            raise ValueError(
                "these Factors do not remember their dense weight (factors loaded from a file never do); pass it: "
                "factors.relmse(gram, weight=swd_lens.hosts.host_of(model).weight(site))"
            )
        if weight is None and self._weight_mark.changed():  # type: ignore[attr-defined]
            raise ValueError(
                f"{self.provenance.get('site', 'these factors')}: the dense weight that these factors remember was "
                "changed in place since they were made; pass the one to compare with: factors.relmse(gram, weight=...)"
            )
        return relmse_of(self.read, self.write, dense, gram, without=without)

    def relative_frobenius(self, weight: Float[Tensor, "d_in d_out"] | None = None) -> float:
        """||W - AB||_F / ||W||_F."""
        return self.relmse(None, weight) ** 0.5

    def sparse(self, layout: torch.layout = torch.sparse_coo) -> tuple[Shaped[Tensor, "d_in unit"], Shaped[Tensor, "unit d_out"]]:
        """Read and write factor as sparse tensors of their nonzeros.

        The default, COO, lists edges: `read.indices()` is (2, edges), input above unit, and `read.values()` their
        weights; `write.indices()` is unit above output. torch multiplies sparse by dense: z = (read.T @ h.T).T.
        `layout=torch.sparse_csc` for read and `torch.sparse_csr` for write keep each unit's edges together.
        """
        return self.read.to_sparse(layout=layout), self.write.to_sparse(layout=layout)

    def save(self, folder: str | Path) -> Path:
        """Write these factors into a folder, as a set of one; see `FactorSet.save`."""
        return self._alone().save(folder)

    @classmethod
    def load(cls, folder: str | Path) -> "Factors":
        """Read the one matrix in a folder.

        Raises:
            ValueError: the folder holds several (or none), and whatever `FactorSet.load` raises.
        """
        matrices = FactorSet.load(folder)
        if len(matrices) != 1:
            raise ValueError(
                f"{legible(folder)} holds {len(matrices)} matrices ({', '.join(matrices)}); load them with FactorSet.load "
                "and take one"
            )
        return matrices[next(iter(matrices))]

    def with_records(self, **records: Any) -> "Factors":
        """These factors with other settings, provenance, weight, origin or probe, given by these names.

        Read, write and offsets are shared: they are not hashed again, and changes in place are noticed in both.
        """
        assert records.keys() <= {"settings", "provenance", "weight", "origin", "probe"}, records.keys()
        other = copy(self)
        for name, value in records.items():
            object.__setattr__(other, name, value)
        if "weight" in records:
            object.__setattr__(other, "_weight_mark", _weight_mark(other.weight))
        return other

    def to(self, device: torch.device | str) -> "Factors":
        """These factors on a device (themselves if they are there), with all that takes part in y.

        Origin and probe, records to compare with, stay where they are.
        """
        weight = None if self.weight is None else self.weight.to(device)
        offsets = None if self.offsets is None else self.offsets.to(device)
        read, write = self.read.to(device), self.write.to(device)
        if read is self.read and write is self.write and offsets is self.offsets:
            return self if weight is self.weight else self.with_records(weight=weight)
        return replace(self, read=read, write=write, weight=weight, offsets=offsets)

    def transport(self, model: Any) -> "Factors":
        """These factors, moved exactly to the weight processing of another host; see `FactorSet.transport`."""
        (moved,) = self._alone().transport(model).values()
        return moved

    def writers(self, direction: Any, model: Any = None, **how: Any) -> pd.DataFrame:
        """The units that write a direction to the residual stream; see `FactorSet.writers`."""
        return self._alone().writers(direction, model, **how)

    def readers(self, direction: Any, model: Any = None, **how: Any) -> pd.DataFrame:
        """The units that read a direction of the residual stream; see `FactorSet.readers`."""
        return self._alone().readers(direction, model, **how)

    def _alone(self) -> "FactorSet":
        return FactorSet({self.provenance.get("site", "matrix"): self})

    @seen
    def __repr__(self) -> str:
        name = self.provenance.get("site", "matrix")
        zero_data = ", zero-data" if self.provenance.get("calibration") == "zero-data" else ""
        relmse = self.provenance.get("relmse")  # where they were measured when they were made
        error = f", relMSE {relmse:.3g}" if isinstance(relmse, float) else ""
        return (
            f"Factors({name}: ({self.d_in}, {self.d_out}) -> {self.n_units} units, "
            f"{int(self.valid_units.sum())} valid, {self.edges:,} edges, s={self.sparsity:.4f}{error}{zero_data})"
        )

    def _repr_html_(self) -> str:
        counts = pd.DataFrame(
            {
                "factor": ["read (d_in, unit)", "write (unit, d_out)"],
                "shape": [f"{tuple(self.read.shape)}", f"{tuple(self.write.shape)}"],
                "nonzeros": [int((self.read != 0).sum()), int((self.write != 0).sum())],
            }
        )
        valid = f"{int(self.valid_units.sum()):,} of {self.n_units:,} units have read and write edges."
        name = f"Factors of {self.provenance.get('site', 'a matrix')}: {self.edges:,} edges, s={self.sparsity:.4f}"
        settings, provenance = folded_settings(self.settings), folded_settings(self.provenance, "provenance")
        return card(name, counts, valid, settings, provenance)


def _weight_mark(weight: Tensor | None) -> TensorSnapshot:
    tensors = {} if weight is None else {"weight": weight}
    return TensorSnapshot((tensors, name) for name in tensors)


# Plain at run time: a checker of types that looks into a Mapping[str, Factors] would make the Factors of a loaded set.
_SetBase = Mapping[str, Factors] if TYPE_CHECKING else Mapping


@with_torch_defaults
class FactorSet(OnHub, _SetBase):
    """Site name -> Factors, in execution order, with the provenance of the whole replacement.

    Iterating gives site names. `factors[key]` gives the Factors of one matrix for "blocks.2.mlp_out", for its TransformerLens or
    Hugging Face name (blocks.2.mlp.W_out, h.2.mlp.c_proj) and for ("mlp_out", 2), as a cache is asked; and a FactorSet, a subset
    with the set's provenance, for what names several: a glob, a kind ("mlp_out"), "all", a list. Printing it lists one line per
    site. On the hub: `push_to_hub`, `from_pretrained` (hub.py).
    """

    def __new__(cls, *arguments: Any, **named: Any):  # the hub mixin's own searches the arguments for a JSON configuration
        return object.__new__(cls)

    def __init__(self, factors: Mapping[str, Any], provenance: Mapping[str, Any] | None = None):
        """factors: site name -> Factors. Raises TypeError for units that are no pair of factors (a transcoder's, say)."""
        self._factors: dict[str, Factors | StoredSite] = dict(factors)
        for site, held in self._factors.items():
            if not isinstance(held, Factors | StoredSite):
                raise TypeError(
                    f"{site}: a {type(held).__name__} is no Factors, and a FactorSet holds nothing else; attach and save "
                    "these units as what they are (LearnedUnits.save), or make Factors(read, write)"
                )
        self.provenance: dict[str, Any] = dict(provenance or {})

    # A glob is a str as well: what it gives is a FactorSet, which types of arguments cannot say.
    @overload
    def __getitem__(self, key: str | tuple[str, int]) -> Factors: ...

    @overload
    def __getitem__(self, key: list[str]) -> "FactorSet": ...

    def __getitem__(self, key: Any) -> Any:
        held = self._factors.get(key) if isinstance(key, str) else None
        if held is None:
            sites = sites_of_key(key, {site: (f.d_in, f.d_out) for site, f in self._factors.items()})
            if names_one(key) and len(sites) == 1:
                return self[sites[0]]
            # The probe of a set does not hold for a part of it, because what enters its sites may differ.
            whole = len(sites) == len(self._factors)
            kept = {k: v for k, v in self.provenance.items() if whole or not k.startswith("probe_")}
            return _set_of({site: self._factors[site] for site in sites}, kept)
        if isinstance(held, StoredSite):
            held = self._factors[key] = Factors(**held.parts())
        return held

    def __iter__(self) -> Iterator[str]:
        return iter(self._factors)

    def __len__(self) -> int:
        return len(self._factors)

    def __contains__(self, key: object) -> bool:
        """Whether the key names one matrix of the set; Mapping's own would make the Factors."""
        if isinstance(key, str) and key in self._factors:
            return True
        try:
            return names_one(key) and bool(sites_of_key(key, {s: (f.d_in, f.d_out) for s, f in self._factors.items()}))
        except KeyError:
            return False

    @property
    def edges(self) -> int:
        """Nonzeros of all factors together."""
        return sum(f.edges for f in self._factors.values())

    @property
    def n_units(self) -> int:
        return sum(f.n_units for f in self._factors.values())

    @property
    def sparsity(self) -> float:
        """1 - (all edges) / (all dense weights)."""
        return 1.0 - self.edges / sum(f.d_in * f.d_out for f in self._factors.values())

    @property
    def share(self) -> float | None:
        """Share of the entries of all matrices in the host's blocks that these sites hold, the rest being dense; None where the
        provenance does not say how many there are."""
        entries = self.provenance.get("matrix_entries")
        return sum(f.d_in * f.d_out for f in self._factors.values()) / entries if entries else None

    def summary(self) -> dict[str, dict[str, Any]]:
        """Site -> d_in, d_out, units, edges, settings and provenance; plain values. Factors still in files stay there.

        Raises:
            AttachError: factors were changed in place: their provenance does not speak of them any more.
        """
        for site, f in self._factors.items():
            if isinstance(f, Factors):
                f.require_unedited(site)
        return {
            site: {"d_in": f.d_in, "d_out": f.d_out, "units": f.n_units, "edges": f.edges}
            | {"settings": dict(f.settings), "provenance": dict(f.provenance)}
            for site, f in self._factors.items()
        }

    def table(self) -> pd.DataFrame:
        """One row per site: d_in, d_out, units, edges, s, and the relMSE that its factors were measured with when they were made
        (on the Gram of their calibration, zero-data: on W itself; missing where they were changed since); and of calibrated
        ones "first positions", the share of their Gram's trace that comes from the first positions of rows, where attention
        sinks are, with the relMSE of the others. What a set does to the model, CE and KL, `swd_lens.fidelity` measures."""
        rows = [
            {"site": site, "d_in": f.d_in, "d_out": f.d_out, "units": f.n_units, "edges": f.edges, "s": f.sparsity}
            for site, f in self._factors.items()
        ]
        table = pd.DataFrame(rows, columns=["site", "d_in", "d_out", "units", "edges", "s"])
        names = {"relMSE": "relmse", "first positions": "first_position_share", "relMSE of others": "relmse_of_others"}
        columns = {label: [f.provenance.get(name) for f in self._factors.values()] for label, name in names.items()}
        measured = {label for label, values in columns.items() if any(isinstance(value, float) for value in values)}
        if "first positions" not in measured:
            measured -= {"relMSE of others"}
        return table.assign(**{label: values for label, values in columns.items() if label in measured})

    @property
    def tried(self) -> pd.DataFrame:
        """Trials of a search for a goal (`factorize(kl=...)`), a row per factorization: method, s, edges, KL and CE delta on
        held-out text with their standard errors (nats per prediction), the larger of both over the goal, seconds; of each
        method's end "text edges" (those that carry half of the effect on a next token) and, where fitted rows were measured,
        too, what the held-out ones alone say ("KL judged"); and which one was taken. Empty where there was no goal."""
        goal = self.provenance.get("goal") or {"trials": [], "chosen": {}}
        rows = pd.DataFrame(goal["trials"])
        chosen = {"method": goal["chosen"].get("method"), "s": goal["chosen"].get("s")}
        return rows.assign(taken=[all(row[name] == chosen[name] for name in chosen) for row in goal["trials"]])

    def __or__(self, other: "FactorSet") -> "FactorSet":
        """Both sets together. Raises ValueError where a site is in both."""
        twice = set(self) & set(other)
        if twice:
            raise ValueError(f"both sets hold factors for {', '.join(sorted(twice))}; drop one of them first")
        provenance = {**other.provenance, **self.provenance}
        # What enters a site of one set may pass the other's: neither probe holds for both together.
        return _set_of({**self._factors, **other._factors}, {k: v for k, v in provenance.items() if not k.startswith("probe_")})

    def transport(self, model: Any) -> "FactorSet":
        """The set for a host with the same weights under another processing (fold_ln, centring, folded value biases).

        Exact: attached there, it gives the logits and every z that this set gives on the host it was made on. The support
        stays; `swd_lens/units/match.py` says how.

        Raises:
            AttachError: the factors do not lead to this host's weights (another checkpoint), or carry no origin.
            UnknownSiteError: a site that this host does not have.
        """
        host = host_of(model)
        moved = {site.name: transported(host, site, self[site.name]) for site in sites_of(host, list(self))}
        return FactorSet(moved, self.provenance)

    def writers(
        self, direction: Any, model: Any = None, *, n: int | None = 20, by: str = "cosine", tokens_as: str = "unembedding"
    ) -> pd.DataFrame:
        """The units that write a direction to the residual stream, those that write most of it first.

            factors.writers((" he", " she"), model)             # he minus she: cosine > 0 writes he for z > 0

        Args:
            direction: (d_model,) tensor; a token, as text (" he") or id; or a pair of tokens, the first less the second.
            model: whose tokens they are; not needed with a tensor.
            n: how many units; None: all.
            by: "cosine" or "dot product", by size: a unit whose z is negative writes the opposite.
            tokens_as: "unembedding", what the logits read through the final norm, so that the dot product, times the norm's
                1 / scale, is the change of the logit (less the mean over the vocabulary) per unit of z; or "embedding", the
                token's row of W_E.

        Returns:
            rank (from 1), unit, cosine, dot product. Of the set's sites those that write to the residual stream (mlp_out, attn_o)
            take part, with their valid units; the direction is that of the sites' outputs, before a norm that a host has there.

        Raises:
            UnitSourceError: none of the sites writes there, or a direction that is none: of another width, zero or not
                finite, tokens without a model, a text that is not one token.
        """
        return ranked(self, "write", direction, model, n=n, by=by, tokens_as=tokens_as)

    def readers(
        self, direction: Any, model: Any = None, *, n: int | None = 20, by: str = "cosine", tokens_as: str = "embedding"
    ) -> pd.DataFrame:
        """The units that read a direction of the residual stream, as `writers` ranks those that write it.

        Of the set's sites those take part that read the stream through a norm (attn_q, attn_k, attn_v, attn_qkv, mlp_in,
        mlp_gate). The norm's weight counts with the read vector; its scale, and the mean that a LayerNorm takes out, do not.

        Args:
            tokens_as: "embedding", the token's row of W_E, which enters the stream where the token stands; or "unembedding".
            direction, model, n, by: see `writers`.
        """
        return ranked(self, "read", direction, model, n=n, by=by, tokens_as=tokens_as)

    @seen
    def __str__(self) -> str:
        return "\n  ".join([self._counted(), *map(repr, self._factors.values())])

    def __repr__(self) -> str:
        return brief(str(self))

    def _counted(self) -> str:
        s = f", s={self.sparsity:.4f}" if self._factors else ""
        share = "" if self.share is None else f" ({self.share:.1%} of the entries of the blocks' matrices)"
        counted = f"FactorSet: {len(self)} sites{share}, {self.n_units:,} units, {self.edges:,} edges{s}"
        if goal := self.provenance.get("goal"):
            taken, methods = goal["chosen"], {trial["method"] for trial in goal["trials"]}
            se = "" if taken["KL se"] is None else f" ± {taken['KL se']:.1g}"
            of = f", of {len(methods)} methods" if len(methods) > 1 else ""
            ce_se = "" if taken.get("CE delta se") is None else f" ± {taken['CE delta se']:.1g}"
            of_ce = f", CE {taken['CE delta']:+.3g}{ce_se}" if "CE delta" in taken else ""
            counted += f"; {taken['method']}{of}: KL {taken['KL']:.3g}{se}{of_ce} nats on held-out text (.tried)"
        if basis := self.provenance.get("basis"):
            sides = [f.settings.get("basis") for f in self._factors.values()]
            words = {"input": "inputs", "output": "outputs", "paper": "the short side"}
            counts = [f"{words[side]} ({sides.count(side)})" for side in words if side in sides]
            counted += f"; units start as {', '.join(counts)}, by {basis['by']}"
        return counted + (", zero-data" if self.provenance.get("calibration") == "zero-data" else "")

    def _repr_html_(self) -> str:
        first = next((f.settings for f in self._factors.values()), {})
        settings = folded_settings(first, "settings" if len(self) == 1 else "settings of the first site")
        # A set knows the errors of its matrices; what it does to predictions only where a goal was measured.
        ask = "relMSE is each matrix's own. CE ± se and KL of the set: swd.fidelity(model, factors, heldout_tokens)."
        unmeasured = None if self.provenance.get("goal") else ask
        return card(self._counted(), self.table(), unmeasured, settings, folded_settings(self.provenance, "provenance"))

    def save(self, folder: str | Path) -> Path:
        """Write the set into the folder (made if need be), in place of a set that is there; 8 bytes per edge.

        One file per site and an index. The index is replaced last, by a rename: interrupted, the folder holds what it held.

        Raises:
            AttachError: factors were changed in place since they were made.
            ValueError: (FactorFileError) a factor is not finite (site and entry are named), or what travels with it does
                not fit it.
            OSError: (FolderInUseError) another call writes the folder; or it cannot be written, or its disk is too small.
        """
        folder = Path(folder)
        with writing_factors(folder, "FactorSet.save", 8 * self.edges):
            write_index(folder, {site: write_factors(folder, site, f) for site, f in self.items()}, self.provenance)
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> "FactorSet":
        """Read a folder that `save` (or `factorize(..., out=folder)`) wrote.

        Every file is read once, in blocks, to check its hash, and then memory-mapped; a site's dense Factors are made when
        they are first asked for. Afterwards the set no longer needs the folder. A call that writes the folder meanwhile is
        no hindrance: what is read is all of the old set or all of the new one.

        Raises:
            FileNotFoundError: no factors.json there.
            ValueError: (FactorFileError) another format, or the files are damaged or do not belong together; found when a
                site is first asked for: an index outside its matrix, a value that is not finite, a probe with another z.
        """
        provenance, stored = open_folder(Path(folder))
        return _set_of(stored, provenance)


def _set_of(held: Mapping[str, Factors | StoredSite], provenance: Mapping[str, Any]) -> FactorSet:
    """A set whose Factors may still be in their files."""
    factors = FactorSet({}, provenance)
    factors._factors.update(held)
    return factors


def write_factors(folder: Path, site: str, f: Factors) -> dict[str, Any]:
    """Write one site's file; returns its entry for `swd_lens.units.index.write_index`. Raises what `write_site` does."""
    f.require_unedited(site)
    entry = write_site(folder, site, f.read, f.write, f.origin, f.offsets, f.probe)
    return {**entry, "settings": dict(f.settings), "provenance": dict(f.provenance)}
