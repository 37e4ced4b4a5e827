"""Presets of the solver: complete settings by name, and the settings of one call.

1. `PRESETS` names them: "best" (the default), "quick", "thorough", "deep", "paper", "pruned" and "svd_pruned".
2. `resolve(preset, overrides)` makes the settings of one call; an unknown name lists the nearest ones.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from swd_lens.base.errors import SpecError, quoted
from swd_lens.base.settings import nearest
from swd_lens.solver.spec import AnnealSpec, DsfSpec, PruneSpec, SvdPruneSpec

AnySpec = DsfSpec | AnnealSpec | PruneSpec | SvdPruneSpec

PRESETS: Mapping[str, AnySpec] = {
    "best": AnnealSpec(),
    "quick": AnnealSpec(outer_iterations=32),
    "thorough": AnnealSpec(outer_iterations=200),
    # Eight to ten times the time of "best" (calculated); on planted factors of 128 x 64, whose rotations help, twenty to two
    # hundred times (1 to 11 s), unless their pieces are exact. Golden rows: .409 of the reference's error, for .526 of "best",
    # where both saw the full Gram from half of the alternations on, by and by; from .7 on attention's rows have 1 % more in .82
    # of the time. .434 with held_back=0 and rho_start=.05, attn_out 2 % more with rho_start=.07, three rows 4 % with .15.
    # Small matrices (64 x 32 to 12 x 40) have 1.2 to 1.35 times the error without births. Before budgets grew: 400 alternations
    # .447 of the reference's error, 640 .428; inner_iterations=3 6 % worse on attn_out, rho_end=.35 8 % worse on mlp_in at
    # s = .75 and 2 % better on others; entries exchanged at the end (those that would lower the error most enter, the least
    # leave, values refitted, 30 turns) 3 % better on attn_out at s = .5, .2 to 1 % on others.
    "deep": AnnealSpec(outer_iterations=480, balance=0.5, late=0.0, births=30, restarts=1, rotations=1600, refine_rounds=12),
    "paper": DsfSpec(),
    "pruned": PruneSpec(),
    "svd_pruned": SvdPruneSpec(),
}
DEFAULT_PRESET = "best"


def resolve(preset: str, overrides: Mapping[str, Any]) -> AnySpec:
    """The spec of a preset with some fields replaced.

    Args:
        preset: a key of `PRESETS`.
        overrides: fields of the preset's spec and their values.

    Raises SpecError: no such preset or field (the nearest and all valid names are listed), or a value outside its range.
    """
    if preset not in PRESETS:
        raise SpecError(f"no preset {quoted(preset)}; {nearest(preset, sorted(PRESETS))}")
    spec = PRESETS[preset]
    known = sorted(each.name for each in fields(spec))
    for name in overrides:
        if name not in known:
            others = [repr(key) for key, other in PRESETS.items() if name in {each.name for each in fields(other)}]
            elsewhere = f"; preset {' or '.join(others)} has it" if others else ""
            raise SpecError(f"preset {quoted(preset)} has no setting {quoted(name)}; {nearest(name, known)}{elsewhere}")
    return spec.changed(overrides)
