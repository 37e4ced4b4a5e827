"""Injection: units become hooked modules inside a host, and leave again without a trace."""

from swd_lens.base.errors import AttachError, SiteDidNotRunWarning, UnitSourceError
from swd_lens.units.attach import (
    Attachment,
    attach,
    attached_at,
    detach,
    is_bare,
    probe_at,
    probe_tokens,
    require_detached,
    require_free,
)
from swd_lens.units.coder import CoderUnits, Units
from swd_lens.units.folders import load_coders
from swd_lens.units.match import described, matrices_of, origin_of, weight_fingerprint
from swd_lens.units.projection import Projection, UnitProjection
from swd_lens.units.saelens import from_saelens
from swd_lens.units.unit_set import UnitSet, as_units

__all__ = [
    "AttachError",
    "Attachment",
    "CoderUnits",
    "Projection",
    "SiteDidNotRunWarning",
    "UnitProjection",
    "UnitSet",
    "UnitSourceError",
    "Units",
    "as_units",
    "attach",
    "attached_at",
    "described",
    "detach",
    "from_saelens",
    "is_bare",
    "load_coders",
    "matrices_of",
    "origin_of",
    "probe_at",
    "probe_tokens",
    "require_detached",
    "require_free",
    "weight_fingerprint",
]
