"""Bits: what it takes to write down the units of a circuit, so that dense units and sparse ones are weighed on one scale.

An edge count forgets that the place of every nonzero has to be said, too; a unit count, that a unit may be all of W's size.

1. A unit of r read and w write nonzeros takes log2 C(d_in, r) + log2 C(d_out, w) bits for its supports (none where it is dense),
   and `VALUE_BITS` for each value (`unit_bits`).
2. `unit_bits_of` takes r and w from units as `active_edges` takes their sum: of an exact control every entry counts, what lacks
   a read or a write side takes no bits, as it has no edges.
3. Which k of n units a circuit has takes log2 C(n, k) bits more (`selection_bits`).
"""

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.units.coder import CoderUnits, Units
from swd_lens.units.factors import Factors

VALUE_BITS = 16  # half precision, in which models are stored


def unit_bits(read_nnz: Int[Tensor, " unit"], write_nnz: Int[Tensor, " unit"], d_in: int, d_out: int) -> Float[Tensor, " unit"]:
    """Bits of each unit: its two supports as log-binomials, its values at `VALUE_BITS` each; float64, on the CPU.

    Args:
        read_nnz, write_nnz: nonzeros of each unit's read and write vector; where either is 0 the unit takes no bits.
        d_in, d_out: how many places there are for them.

    Source: ours (the enumerative code of a sparse vector; Cover, Enumerative Source Encoding, 1973).
    """
    reads, writes = read_nnz.cpu(), write_nnz.cpu()
    bits = _log2_binomial(d_in, reads) + _log2_binomial(d_out, writes) + VALUE_BITS * (reads + writes).double()
    return torch.where((reads > 0) & (writes > 0), bits, 0.0)


def selection_bits(n_units: int, n_chosen: int) -> float:
    """log2 C(n_units, n_chosen): which of all units a circuit has."""
    of_all = math.lgamma(n_units + 1) - math.lgamma(n_chosen + 1) - math.lgamma(n_units - n_chosen + 1)
    return max(0.0, of_all / math.log(2))


def unit_bits_of(units: Mapping[str, Units]) -> dict[str, Float[Tensor, " _unit"]]:
    """Site -> bits of each unit (float64, on the CPU), of a UnitSet, a FactorSet or other units by site name. Encode/decode pairs
    count as in `CoderUnits.edges_per_unit`: nonzeros of the weights that they show, all places where they show none, every output
    behind W. A source that says its edges by itself has one support of `possible_edges` places where it says how many there are,
    else of d_in + d_out."""
    bits: dict[str, Tensor] = {}
    for site, of_site in units.items():
        if isinstance(of_site, Factors):
            if of_site.settings.get("edges") == "dense":
                reads, writes = (torch.full((of_site.n_units,), size) for size in (of_site.d_in, of_site.d_out))
            else:
                reads, writes = (of_site.read != 0).sum(0), (of_site.write != 0).sum(1)
            of_units = unit_bits(reads, writes, of_site.d_in, of_site.d_out)
        elif isinstance(of_site, CoderUnits) and not of_site.says_its_edges:
            of_units = unit_bits(*of_site.edges_by_side(), of_site.d_read, of_site.d_out)
        else:
            edges = of_site.edges_per_unit.cpu()
            places = getattr(getattr(of_site, "coder", of_site), "possible_edges", of_site.d_in + of_site.d_out)
            of_units = _log2_binomial(max([int(places), *edges.tolist()]), edges) + VALUE_BITS * edges.double()
        bits[site] = torch.where(of_site.valid_units.cpu(), of_units, 0.0)
    return bits


def _log2_binomial(n: int, k: Int[Tensor, " unit"]) -> Float[Tensor, " unit"]:
    """log2 C(n, k), float64; rounding never takes it below 0."""
    k, of_all = k.double(), torch.tensor(float(n), dtype=torch.float64)
    logs = torch.lgamma(of_all + 1) - torch.lgamma(k + 1) - torch.lgamma(of_all - k + 1)
    return (logs / math.log(2)).clamp(min=0)
