"""Injection: factors become hooked modules inside a host, and leave again without a trace."""

from swd_lens.inject.attach import AttachError, Attachment, attach, by_site
from swd_lens.inject.units import UnitProjection

__all__ = ["AttachError", "Attachment", "UnitProjection", "attach", "by_site"]
