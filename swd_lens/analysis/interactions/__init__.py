"""Interactions: whether the units of one site act apart or together (paper, app. "Interaction Patterns").

1. `unit_overlap` (overlap.py): the contributions z_i B_i of a site add up linearly; how correlated are they?
2. `unit_interactions` (finite.py): contributions that pass an activation do not add up; how much of a pair's effect belongs to
   neither unit alone? In gated MLPs also of a unit of the gate with one of the branch that it multiplies. site.py finds
   the activation that the host uses, difference.py holds the arithmetic of the pairs.

site.py runs the host and hands over what a site reads and writes.
"""

from swd_lens.analysis.interactions.finite import UnitInteractions, UpUnits, unit_interactions
from swd_lens.analysis.interactions.overlap import UnitOverlap, unit_overlap

__all__ = ["UnitInteractions", "UnitOverlap", "UpUnits", "unit_interactions", "unit_overlap"]
