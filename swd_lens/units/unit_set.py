"""UnitSet: the units at some sites of one host, in whatever form they were given.

1. `sources_by_site` brings what a caller gave (a set, a dict, one Factors or SAELens object) into a dict name -> source.
2. `as_units` turns the source of one site into `Units`: Factors and CoderUnits are taken as they are, read/write tensors
   become Factors, a SAELens object is read by its metadata (saelens.py), any other encode/decode pair becomes CoderUnits
   after a trial on a vector of zeros.
3. `UnitSet.of` does both for a host and resolves the names to its sites. What it derives (active edges, identities) is
   computed when first asked for, and kept: whoever takes `factors` takes a UnitSet, and hands it on as it is.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from swd_lens.base.errors import AttachError, UnitSourceError, legible, quoted
from swd_lens.hosts import Host, host_of, sites_of
from swd_lens.hosts.sites import Ends, Site, select_sites
from swd_lens.units.coder import CoderUnits, Units, has_pair, place_of, tried
from swd_lens.units.factors import Factors, FactorSet
from swd_lens.units.integrity import fingerprint
from swd_lens.units.keys import read_unit, single_units
from swd_lens.units.saelens import from_saelens, is_saelens


class UnitSet(Mapping[str, Units]):
    """Site name -> Units, in execution order, for one host.

    Attributes:
        host: the host whose sites these are.
        sites: its sites, in execution order.
        provenance: of the set as a whole, where it had one (a FactorSet has).
    """

    def __init__(self, host: Host, units: Mapping[Site, Units], provenance: Mapping[str, Any] | None = None):
        self.host, self.sites, self.provenance = host, list(units), dict(provenance or {})
        self._units = {site.name: of_site for site, of_site in units.items()}

    @classmethod
    def of(cls, host: Any, given: Any) -> "UnitSet":
        """The units that were given, for a host. They are not compared with its weights: `attach` does that.

        Args:
            host: a Host, or the model itself.
            given: a UnitSet (taken as it is, if it is of this host), a FactorSet, LearnedUnits, a dict site name -> unit
                source (see `as_units`), or one Factors or SAELens object that knows its site.

        Raises:
            AttachError: nothing at all, a single source that does not know its site, or Factors that were changed in place.
            UnknownSiteError: a site that this host does not have, or two that share weights.
            UnitSourceError, TypeError: see `as_units`.
            UnsupportedHostError: see `swd_lens.hosts.host_of`.
        """
        host = host if isinstance(host, Host) else host_of(host)
        if isinstance(given, UnitSet) and given.host.model is host.model:
            units = given
        else:
            sources = sources_by_site(given)
            by_site = {}
            for site in sites_of(host, sources):
                # Sources may be named as TransformerLens or Hugging Face name their sites.
                name = site.name if site.name in sources else next(n for n in sources if select_sites([site], n))
                by_site[site] = as_units(sources[name], site)
            units = cls(host, by_site, getattr(given, "provenance", {}))
        for name, f in units.factors.items():
            f.require_unedited(name)
        return units

    def __getitem__(self, site: str) -> Units:
        return self._units[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self._units)

    def __len__(self) -> int:
        return len(self._units)

    @cached_property
    def factors(self) -> FactorSet:
        """The sites whose units are read and write factors, as a set."""
        pairs = {name: units for name, units in self._units.items() if isinstance(units, Factors)}
        return FactorSet(pairs, self.provenance)

    @cached_property
    def coders(self) -> dict[str, CoderUnits]:
        """The sites whose units are an encode/decode pair, which has no read and write vectors in general."""
        return {name: units for name, units in self._units.items() if isinstance(units, CoderUnits)}

    @property
    def sizes(self) -> dict[str, int]:
        """Site -> number of units."""
        return {name: units.n_units for name, units in self._units.items()}

    @property
    def n_units(self) -> int:
        """Units of all sites together."""
        return sum(self.sizes.values())

    @cached_property
    def active_edges(self) -> dict[str, Int[Tensor, " _unit"]]:
        """Site -> (unit,) read plus write nonzeros of every unit; 0 for units that lack either (paper §3.2, S_eff)."""
        return active_edges(self._units)

    def read_vectors(self, site: str) -> Float[Tensor, "d_read unit"] | None:
        """Read vectors of a site's units, one per column; None where a coder does not show them."""
        units: Any = self._units[site]
        return units.read if isinstance(units, Factors) else getattr(units, "read_weights", None)

    def write_vectors(self, site: str) -> Float[Tensor, "unit d_write"] | None:
        """Write vectors of a site's units, one per row; None where a coder does not show them."""
        units: Any = self._units[site]
        return units.write if isinstance(units, Factors) else getattr(units, "write_weights", None)

    def units_named(self, given: Any) -> list[tuple[str, int]]:
        """Site and index of named units, see `swd_lens.units.keys`; a site's name or a glob stands for all its units. Raises
        ValueError: something else. Whether there is a unit of this number the caller looks; UnknownSiteError: a pattern that
        matches none of these sites."""
        named: list[tuple[str, int]] = []
        for each in single_units(given):
            if isinstance(each, Site) or (isinstance(each, str) and "/" not in each and not each.isdecimal()):
                sites = select_sites(self.sites, each)
                named += [(site.name, index) for site in sites for index in range(self[site.name].n_units)]
            else:
                named.append(read_unit(each, self))
        return named

    @cached_property
    def heads(self) -> dict[str, list[tuple[str, float]]]:
        """Site -> per unit the attention head that most of it lies in ("L3H1"), and the share of its squared norm there.

        For attn_o that is the head whose output the unit reads; for attn_q, attn_k, attn_v and attn_qkv the head whose query, key
        or value it writes ("L3H1 Q"; keys and values count stored heads). Other sites, and units without vectors, are left out.
        """
        ends, heads = Ends.of(self.host), {}
        for site in self.sites:
            reads, writes = self.read_vectors(site.name), self.write_vectors(site.name)
            if site.kind == "attn_o":
                vectors, spans = None if reads is None else reads.T, ends.read(site.name, site.d_in)
            else:
                vectors, spans = writes, ends.written(site.name, site.d_out)
            if vectors is None or len(spans) < 2 or vectors.shape[1] != sum(span.size for span in spans):
                continue
            energy = torch.stack([part.square().sum(1) for part in vectors.detach().double().split(spans[0].size, 1)], 1)
            share = (energy / energy.sum(1, keepdim=True).clamp_min(1e-300)).max(1)
            names = [f"L{site.layer}H{head} {part}".strip() for part, _, head in (s.name.rpartition("head ") for s in spans)]
            heads[site.name] = [
                (names[i] if of_unit > 0 else "", of_unit)
                for i, of_unit in zip(share.indices.tolist(), share.values.tolist(), strict=True)
            ]
        return heads

    @cached_property
    def identities(self) -> dict[str, str]:
        """Site -> a hash of the units' weights, which tells them from others of the same shape ("" where a coder shows none)."""
        return {site: _identity(units) for site, units in self._units.items()}

    def require_made_for(self, settings: Mapping[str, Any], what: str) -> None:
        """Require that `what`, with these settings, was made for exactly these units; see the function of this name."""
        require_made_for(self, settings, what)

    def __repr__(self) -> str:
        return "\n  ".join([f"UnitSet: {len(self)} sites, {self.n_units:,} units", *map(repr, self._units.values())])


def active_edges(units: Mapping[str, Units]) -> dict[str, Int[Tensor, " _unit"]]:
    """`UnitSet.active_edges` of units by site name, with or without a host."""
    return {
        site: torch.where(of_site.valid_units.cpu(), of_site.edges_per_unit.cpu(), 0).to(torch.int64)
        for site, of_site in units.items()
    }


def identities(units: Mapping[str, Units]) -> dict[str, str]:
    """`UnitSet.identities` of units by site name, with or without a host."""
    return units.identities if isinstance(units, UnitSet) else {site: _identity(u) for site, u in units.items()}


def require_made_for(units: Mapping[str, Units], settings: Mapping[str, Any], what: str) -> None:
    """Do nothing if `what`, with these settings (of scores, say), was made for exactly these units. Raises ValueError: other
    sites, other numbers of units, or the same numbers but other factors."""
    made_for, sizes = dict(settings.get("units", {})), {site: of_site.n_units for site, of_site in units.items()}
    if made_for and made_for != sizes:
        raise ValueError(
            f"{legible(what)} is of {made_for}, the factors are {legible(sizes)} (site: units); attribute these factors first"
        )
    known = dict(settings.get("factors", {}))
    others = [site for site, identity in identities(units).items() if known.get(site, identity) != identity]
    if others:
        raise ValueError(
            f"{legible(what)} was made with other factors of {', '.join(others)} (same number of units, other weights), "
            "where unit i is another unit; attribute these factors first"
        )


def _identity(units: Units) -> str:
    if isinstance(units, Factors):
        weights = [units.read, units.write]
    elif isinstance(units, CoderUnits) and isinstance(units.coder, nn.Module):
        weights = list(units.coder.state_dict().values())
    else:
        weights = [t for t in getattr(getattr(units, "coder", units), "__dict__", {}).values() if isinstance(t, Tensor)]
    weights = [w.reshape(w.shape[0] if w.ndim else 1, -1) for w in weights if w.is_floating_point()]
    return hashlib.sha256("".join(map(fingerprint, weights)).encode()).hexdigest() if weights else ""


def sources_by_site(given: Any) -> dict[str, Any]:
    """A dict site name -> unit source, whatever way they were given. Raises AttachError: nothing at all, or a single source
    that does not know its site."""
    if not isinstance(given, Mapping):
        known = from_saelens(given) if is_saelens(given) else {}
        site = next(iter(known), None) or getattr(given, "provenance", {}).get("site")
        if site is None:
            raise AttachError(
                f"this {type(given).__name__} does not know its site (swd_lens.solve only saw tensors); name it: "
                'attach(model, {"blocks.0.mlp_out": factors})'
            )
        return {site: known.get(site, given)}
    if not given:
        raise AttachError("there are no factors to attach: the set is empty")
    return dict(given)


def as_units(source: Any, site: Site) -> Units:
    """A unit source as Units of one site.

    Args:
        source: Factors or CoderUnits (taken as they are); an object with .read (d_in, unit) and .write (unit, d_out); a
            SAELens SAE or transcoder; any object with encode(x) and decode(z), whose own .reads and .writes ("input" or
            "output"; default: reads the input, writes the output) say what x and decode(z) are.
        site: where they will stand.

    Raises:
        UnitSourceError: the source is of another site or of other widths, its trial run failed, or see `from_saelens`.
        TypeError: none of the above.
    """
    if isinstance(source, Factors):
        return source
    if isinstance(source, CoderUnits):
        return _of_site(source, site)
    if is_saelens(source):
        return _of_site(next(iter(from_saelens(source).values())), site)
    if isinstance(getattr(source, "read", None), Tensor) and isinstance(getattr(source, "write", None), Tensor):
        read, write = source.read.detach().float(), source.write.detach().float()
        shapes = f"read {tuple(read.shape)} and write {tuple(write.shape)}"
        if read.ndim != 2 or write.ndim != 2 or read.shape[1] != write.shape[0]:
            raise UnitSourceError(f"{shapes} are no pair of factors: expected (d_in, unit) and (unit, d_out)")
        if (read.shape[0], write.shape[1]) != (site.d_in, site.d_out):
            raise UnitSourceError(f"{shapes} do not fit {site.name}, which is ({site.d_in}, {site.d_out})")
        if not (torch.isfinite(read).all() and torch.isfinite(write).all()):
            raise UnitSourceError(f"{shapes} for {site.name} hold values that are not finite; mend or leave out their units")
        provenance = {**getattr(source, "provenance", {}), "site": site.name}
        return Factors(read, write, dict(getattr(source, "settings", {})), provenance)
    if not has_pair(source):
        raise TypeError(
            f"{type(source).__name__} is no unit source for {site.name}. Accepted: Factors; CoderUnits; a SAELens SAE or "
            "transcoder; an object with tensors .read (d_in, unit) and .write (unit, d_out); an object with encode(x) and "
            "decode(z)"
        )
    # Any other pair.
    reads, writes = getattr(source, "reads", "input"), getattr(source, "writes", "output")
    provenance = {**getattr(source, "provenance", {}), "site": site.name}
    # The width of z is not known before the trial.
    units = CoderUnits(source, site.d_in, site.d_out, 0, reads, writes, type(source).__name__, provenance)
    device, dtype = place_of(source)
    zeros = torch.zeros(1, 1, units.d_read, device=device, dtype=dtype)
    with torch.no_grad():
        z = tried(f"{units.name}.encode", source.encode, zeros)
        y = tried(f"{units.name}.decode", source.decode, z)
    if y.shape != (1, 1, units.d_write):
        raise UnitSourceError(
            f"{units.name}.decode gave {tuple(y.shape)} for z {tuple(z.shape)}; {site.name} needs (1, 1, {units.d_write})"
        )
    return CoderUnits(source, site.d_in, site.d_out, z.shape[-1], reads, writes, units.name, provenance)


def _of_site(units: CoderUnits, site: Site) -> CoderUnits:
    made_for = units.provenance.get("site", site.name)
    if made_for != site.name:
        raise UnitSourceError(f"{units.name} makes units of {made_for}, not of {site.name}; attach it under {quoted(made_for)}")
    whole = replace(units, d_in=units.d_in or site.d_in, d_out=units.d_out or site.d_out)
    if (whole.d_in, whole.d_out) != (site.d_in, site.d_out):
        raise UnitSourceError(
            f"{units.name} is for ({units.d_in or '?'}, {units.d_out or '?'}), {site.name} is ({site.d_in}, "
            f"{site.d_out}): it was made for another model"
        )
    return whole
