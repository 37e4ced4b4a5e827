"""The looks of a run's methods: a colour for each family, a line style and a marker for each of its members.

1. Methods that differ in sparsity alone are a family: SWD, the paper's SWD, pruned neurons, pruned singular vectors. So are the
   seeds of one method. Everything else is a family of its own.
2. Families get the colours in their order in the run, with SWD, the paper's SWD and what is pruned before what is exact.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from swd_lens.base.figures import family_style
from swd_lens.study import Run

_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class Look:
    """The look of one method.

    Attributes:
        family: the place of its family in the run, which gives the colour.
        member: its place in the family.
    """

    family: int
    member: int

    @property
    def line(self) -> dict[str, Any]:
        """Colour and line style."""
        return family_style(self.family, self.member)

    @property
    def marker(self) -> str:
        """The marker of dots: two neighbours in a family, and the first ones of two families, have different ones."""
        return _MARKERS[(2 * self.family + self.member) % len(_MARKERS)]


def looks_of(run: Run) -> dict[str, Look]:
    """Name of a curve or replacement -> how it is drawn, on every surface alike."""
    given = set(run.settings.get("factors", ()))
    families: dict[Hashable, list[str]] = {}
    for r in run.replacements:
        if r.exact or r.method in given:
            family = "method", r.method
        else:
            presets = (of_site.get("settings", {}).get("preset") for of_site in r.factors.summary().values())
            family = r.role, next(presets, None) if r.role == "control" else None
        families.setdefault(family, []).append(r.method)
    known = {r.method for r in run.replacements}
    for comparison in run.comparisons.values():
        for method, names in comparison.methods.items():
            families.setdefault(("method", method), []).extend(name for name in names if name not in known)
    members = [list(dict.fromkeys(names)) for names in families.values() if names]
    return {name: Look(family, member) for family, names in enumerate(members) for member, name in enumerate(names)}
