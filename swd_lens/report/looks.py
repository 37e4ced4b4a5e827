"""How the methods of a run are drawn: a colour for each family, a line style and a marker for each of its members.

1. Methods that differ in sparsity alone are a family: SWD, the paper's SWD, pruned neurons, pruned singular vectors. So are the
   seeds of one method. Everything else is a family of its own.
2. Families get the colours in their order in the run, with SWD, the paper's SWD and what is pruned before what is exact.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from swd_lens.base.figures import family_style
from swd_lens.study import Run
from swd_lens.study.run_file import Replacement

_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class Look:
    """How one method is drawn.

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
        """Of dots: two neighbours in a family, and the first ones of two families, have different ones."""
        return _MARKERS[(2 * self.family + self.member) % len(_MARKERS)]


def looks_of(run: Run) -> dict[str, Look]:
    """Name of a curve or replacement -> how it is drawn, on every surface alike."""
    given = set(run.settings.get("factors", ()))
    families: dict[Hashable, list[str]] = {}
    for r in run.replacements:
        _join(families, _family(r, given), r.method)
    known = {r.method for r in run.replacements}
    for comparison in run.comparisons.values():
        for method, names in comparison.methods.items():
            for name in names:
                if name not in known:
                    _join(families, ("method", method), name)
    return {
        name: Look(family, member)
        for family, names in enumerate(families.values())
        for member, name in enumerate(names)
    }


def _join(families: dict[Hashable, list[str]], family: Hashable, name: str) -> None:
    members = families.setdefault(family, [])
    if name not in members:
        members.append(name)


def _family(r: Replacement, given: set[str]) -> Hashable:
    """What a replacement has in common with others that differ from it in sparsity alone."""
    if r.exact or r.method in given:
        return "method", r.method
    if r.paper:
        return "paper"
    return ("pruned", _preset(r.factors.summary())) if r.pruned else "SWD"


def _preset(summary: Mapping[str, Mapping[str, Any]]) -> Any:
    return next((of_site.get("settings", {}).get("preset") for of_site in summary.values()), None)
