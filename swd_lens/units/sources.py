"""Former place of `as_units`; take `UnitSet.of` (unit_set.py)."""

from swd_lens.units.unit_set import as_units

__all__ = ["as_units"]
