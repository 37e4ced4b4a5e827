"""Injection: units become hooked modules inside a host, and leave again without a trace."""

from swd_lens.units.attach import Attachment, attach, by_site, require_free
from swd_lens.units.coder import CoderUnits, Units, UnitSourceError
from swd_lens.units.match import AttachError, described, matrices_of, weight_fingerprint
from swd_lens.units.probe import add_probe, is_bare, probe_tokens
from swd_lens.units.projection import Projection, UnitProjection
from swd_lens.units.saelens import from_saelens
from swd_lens.units.transport import origin_of, transport_set
from swd_lens.units.unit_set import UnitSet, as_units
from swd_lens.units.watch import SiteDidNotRunWarning

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
    "add_probe",
    "as_units",
    "attach",
    "by_site",
    "described",
    "from_saelens",
    "is_bare",
    "matrices_of",
    "origin_of",
    "probe_tokens",
    "require_free",
    "transport_set",
    "weight_fingerprint",
]
