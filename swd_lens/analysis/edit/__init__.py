"""edit: change one unit's write vector, or its equal in the dense weight, so that one prompt's answer moves and little else.

1. target.py reads prompt, answer, foil, h* and d; make.py calibrates an edit along a unit's read vector, `edit_unit`, and the
   controls that share the calibration (random unit, oracle), or changes units at run time (`unit_hooks`).
2. edited.py: the `Edit` itself, to apply, undo, save and export.
3. effects.py measures an edit, compare.py all methods against each other, LoRA among them; select.py proposes a unit.
4. localization.py asks of a task's units whether editing them moves that task rather than others, beside random units.
"""

from swd_lens.analysis.edit.compare import EditComparison, compare_edits
from swd_lens.analysis.edit.edited import Delta, Edit
from swd_lens.analysis.edit.effects import SideEffects, side_effects
from swd_lens.analysis.edit.localization import EditLocalization, localize
from swd_lens.analysis.edit.make import edit_unit, unit_hooks
from swd_lens.analysis.edit.select import EditSelection, select_edit_unit
from swd_lens.base.errors import EditError

__all__ = [
    "Delta",
    "Edit",
    "EditComparison",
    "EditError",
    "EditLocalization",
    "EditSelection",
    "SideEffects",
    "compare_edits",
    "edit_unit",
    "localize",
    "select_edit_unit",
    "side_effects",
    "unit_hooks",
]
