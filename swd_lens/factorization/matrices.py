"""Which matrices a factorization is of, and what each of them gets: a sparsity, and where units start.

1. Matrices are sites of a host; or, where the model is not loaded, known by their shapes only (`Shape`).
2. A sparsity or a basis is one for all of them, or a mapping whose keys are patterns (see `swd_lens.hosts.sites.select_sites`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from swd_lens.base.checks import one_of
from swd_lens.base.errors import SparsityError, SpecError, UnknownSiteError, legible, quoted
from swd_lens.base.settings import AUTO
from swd_lens.hosts.sites import NEURON_SIDE, Pattern, Site, base_kind, is_site_name, select_sites, split_name
from swd_lens.solver import BASES, PRESETS, AnnealSpec
from swd_lens.solver.validate import is_number

NEURONS = "neurons"  # the basis that is an MLP's neurons, whichever side they are
# The basis "auto" where no text says more: an MLP's neurons, and the dimensions of heads at their output.
LIKELY = {**NEURON_SIDE, "attn_o": "input"}
# With these, or a number of units, a caller has the short side in mind: shares of its factor, and where its units start.
_OF_THE_SHORT_SIDE = ("square_share", "balance", "start")


@dataclass(frozen=True)
class Shape(Site):
    """A matrix of which no more is known than a label and its shape: a block of its own, with an input of its own."""

    label: str

    @property
    def name(self) -> str:
        return self.label


def matrices_of(shapes: Any, sites: Pattern) -> tuple[Site, ...]:
    """Name -> (d_in, d_out), or one (d_in, d_out), as matrices: sites where the names are site names. Raises ValueError: no
    shapes, one that is not a pair of whole numbers of at least 1, or a pattern beside them."""
    if sites != "all":
        raise ValueError(f"sites={quoted(sites)}: every shape given is estimated; leave out those that you do not want")
    named = dict(shapes) if isinstance(shapes, Mapping) else {"matrix": shapes}
    if not named:
        raise ValueError("there are no shapes to estimate; give name -> (d_in, d_out)")
    matrices: list[Site] = []
    for name, shape in named.items():
        pair = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else ()
        if len(pair) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in pair):
            raise ValueError(f"{legible(name)}: {quoted(shape)} is no shape; give (d_in, d_out), two whole numbers of at least 1")
        label, block = str(name), -1 - len(matrices)
        matrices.append(Site(*split_name(label), *pair) if is_site_name(label) else Shape(block, "mlp_out", *pair, label=label))
    return tuple(matrices)


def sparsity_of_each(sites: Sequence[Site], sparsity: float | int | Mapping[str, float]) -> dict[str, float]:
    """Site name -> s: one for all, or a mapping whose keys are patterns (see `swd_lens.hosts.sites.select_sites`). Raises
    UnknownSiteError: a key matches none of the sites; SparsityError: a site without an s, or with two different ones; an s
    that is no number."""
    for s in sparsity.values() if isinstance(sparsity, Mapping) else [sparsity]:
        if not is_number(s):
            raise SparsityError(f"sparsity={quoted(s)}: give a number inside (0, 1); s = 1 - K / numel(W)")
    if not isinstance(sparsity, Mapping):
        return {site.name: float(sparsity) for site in sites}
    given: dict[str, float] = {}
    for pattern, s in sparsity.items():
        for site in _matching(sites, pattern):
            if given.setdefault(site.name, float(s)) != float(s):
                raise SparsityError(f"{site.name} is given two sparsities, {given[site.name]:g} and {float(s):g}")
    if missing := [site.name for site in sites if site.name not in given]:
        raise SparsityError(f"no sparsity is given for {', '.join(missing)}; name every site, or give one number for all")
    return given


def basis_asked(preset: str, units: Any, options: Mapping[str, Any]) -> Any:
    """The caller's basis, or the default: "auto" where the solver is ours and the number of units is left to it, else the
    preset's own."""
    if options.get("basis") is not None:
        return options["basis"]
    ours = isinstance(PRESETS.get(preset), AnnealSpec)
    return AUTO if ours and units is None and not any(name in options for name in _OF_THE_SHORT_SIDE) else None


def basis_of_each(sites: Sequence[Site], basis: Any) -> dict[str, str]:
    """Site name -> basis, of those that get one: one for all, or a mapping whose keys are patterns, as for sparsities. "neurons"
    is the side of an MLP's neurons, and nothing elsewhere; "auto" is what is LIKELY, until text has said more (basis.py). Raises
    UnknownSiteError: a key matches none of the sites; SpecError: a site with two different ones, or none that there is (all are
    listed)."""
    if basis is None:
        return {}
    choices = (*BASES, NEURONS)
    if isinstance(basis, Mapping):
        for pattern, each in basis.items():
            one_of(f"the basis of {legible(str(pattern))} in a mapping", each, choices, SpecError)
    else:
        one_of("basis (or a mapping from site names or patterns)", basis, (*choices, AUTO), SpecError)
    given: dict[str, str] = {}
    for pattern, each in basis.items() if isinstance(basis, Mapping) else [("all", basis)]:
        for site in _matching(sites, pattern):
            if given.setdefault(site.name, each) != each:
                raise SpecError(f"{site.name} is given two bases, {quoted(given[site.name])} and {quoted(each)}")
    by_kind = {NEURONS: NEURON_SIDE} | ({} if isinstance(basis, Mapping) else {AUTO: LIKELY})
    kinds = {site.name: "" if isinstance(site, Shape) else base_kind(site.kind) for site in sites}
    sides = {
        name: by_kind[each].get(kinds[name]) if isinstance(each, str) and each in by_kind else each
        for name, each in given.items()
    }
    return {name: side for name, side in sides.items() if side is not None}


def affordable(sites: Sequence[Site], bases: Mapping[str, str], sparsities: Mapping[str, float]) -> dict[str, str]:
    """The bases of those matrices that have an edge in both factors for each of the side's units: a long side has many."""
    units = {site.name: {"input": site.d_in, "output": site.d_out} for site in sites}
    room = {site.name: (1 - sparsities[site.name]) * site.numel for site in sites}
    return {name: basis for name, basis in bases.items() if 2 * units[name].get(basis, 0) <= room[name]}


def _matching(sites: Sequence[Site], pattern: str) -> Sequence[Site]:
    if not any(isinstance(site, Shape) for site in sites):
        return select_sites(sites, pattern)
    matching = [site for site in sites if pattern == "all" or fnmatchcase(site.name, pattern)]
    if not matching:
        raise UnknownSiteError(f"no matrix matches {quoted(pattern)}; there are {', '.join(site.name for site in sites)}")
    return matching
