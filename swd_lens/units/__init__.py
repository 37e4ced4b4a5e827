"""Injection: units become hooked modules inside a host, and leave again without a trace."""

from swd_lens.units.attach import Attachment, attach, attached_at, is_bare, probe_at, probe_tokens, require_detached, require_free
from swd_lens.units.coder import CoderUnits, Units
from swd_lens.units.match import described, matrices_of, origin_of, weight_fingerprint
from swd_lens.units.projection import Projection
from swd_lens.units.unit_set import UnitSet

__all__ = [
    "Attachment",
    "CoderUnits",
    "Projection",
    "UnitSet",
    "Units",
    "attach",
    "attached_at",
    "described",
    "is_bare",
    "matrices_of",
    "origin_of",
    "probe_at",
    "probe_tokens",
    "require_detached",
    "require_free",
    "weight_fingerprint",
]
