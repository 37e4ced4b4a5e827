"""as_units: a unit source for one site, whatever it is, as Units.

Factors and CoderUnits are taken as they are, read/write tensors become Factors, a SAELens object is read by its metadata
(saelens.py), any other encode/decode pair becomes CoderUnits after a trial on a vector of zeros.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from swd_lens.hosts.sites import Site
from swd_lens.units.coder import CoderUnits, Units, UnitSourceError, has_pair, place_of, tried
from swd_lens.units.factors import Factors
from swd_lens.units.saelens import from_saelens, is_saelens


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
        return _from_read_write(source, site)
    if has_pair(source):
        return _from_pair(source, site)
    raise TypeError(
        f"{type(source).__name__} is no unit source for {site.name}. Accepted: Factors; CoderUnits; a SAELens SAE or "
        "transcoder; an object with tensors .read (d_in, unit) and .write (unit, d_out); an object with encode(x) and decode(z)"
    )


def _of_site(units: CoderUnits, site: Site) -> CoderUnits:
    made_for = units.provenance.get("site", site.name)
    if made_for != site.name:
        raise UnitSourceError(
            f"{units.name} makes units of {made_for}, not of {site.name}; attach it under {made_for!r}"
        )
    whole = replace(units, d_in=units.d_in or site.d_in, d_out=units.d_out or site.d_out)
    if (whole.d_in, whole.d_out) != (site.d_in, site.d_out):
        raise UnitSourceError(
            f"{units.name} is for ({units.d_in or '?'}, {units.d_out or '?'}), {site.name} is ({site.d_in}, {site.d_out}): "
            "it was made for another model"
        )
    return whole


def _from_read_write(source: Any, site: Site) -> Factors:
    read, write = source.read.detach().float(), source.write.detach().float()
    shapes = f"read {tuple(read.shape)} and write {tuple(write.shape)}"
    if read.ndim != 2 or write.ndim != 2 or read.shape[1] != write.shape[0]:
        raise UnitSourceError(f"{shapes} are no pair of factors: expected (d_in, unit) and (unit, d_out)")
    if (read.shape[0], write.shape[1]) != (site.d_in, site.d_out):
        raise UnitSourceError(f"{shapes} do not fit {site.name}, which is ({site.d_in}, {site.d_out})")
    if not (torch.isfinite(read).all() and torch.isfinite(write).all()):
        raise UnitSourceError(
            f"{shapes} for {site.name} hold values that are not finite; mend or leave out their units"
        )
    provenance = {**getattr(source, "provenance", {}), "site": site.name}
    return Factors(read, write, dict(getattr(source, "settings", {})), provenance)


def _from_pair(source: Any, site: Site) -> CoderUnits:
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
