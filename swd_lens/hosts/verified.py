"""verified: whether a run that leaves something out may be trusted, tried on a few tokens beside a plain run.

Runs are shortened all over the package: they take up within the host, keep a prefix, unembed apart, fuse attention. Each is exact
where a host is built as most are, but not every host is; so each is tried before it is used, here and by one tolerance.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from swd_lens.base.errors import legible, warn
from swd_lens.base.machine import is_out_of_memory

# Of the largest logit. The same sums in another order differ by 1e-6 of it in float32; a wrong shortcut by a good part of it.
AGREES = 1e-4


def verified(
    fast: Callable[[], Tensor],
    plain: Tensor | Callable[[], Tensor],
    *,
    shortcut: Any = None,
    rounded: bool = True,
    within: Tensor | float = math.inf,
    tolerance: float = AGREES,
) -> bool:
    """Whether a run that leaves something out gives the logits of a plain one; infinite and NaN ones in the same places, which
    are for whoever measures them to refuse.

    Args:
        fast: the shortened run. It may fail: a user's hook may want more positions than it has, a host may not start within.
        plain: logits of the plain run, or that run, which comes after the fast one.
        shortcut: what is left out, for the warning; None: nobody is warned.
        rounded: logits may also differ by what the dtype of the plain ones rounds off.
        within: logits that they may differ by at most, besides.
        tolerance: how far they may differ, of the largest logit.

    Raises MemoryError, RuntimeError: there is no memory for the fast run, which says nothing of the host. Warns where the fast
    run gives other logits, or fails.
    """
    try:
        shortened = fast()
    except Exception as cause:
        if is_out_of_memory(cause):
            raise
        reason = legible(f"{type(cause).__name__}: {cause}")
        if shortcut is not None:
            warn(
                f"a run of this host fails when it is shortened ({shortcut}): {reason}. So it will not be: slower, but right. A "
                "hook of yours that wants every position does this; where there is none, please report the model"
            )
        return False
    plain = plain if isinstance(plain, Tensor) else plain()
    agrees, finite = False, plain.isfinite()
    if torch.equal(finite, shortened.isfinite()):
        tolerance = max(tolerance, 8 * torch.finfo(plain.dtype).eps) if rounded else tolerance
        apart = (shortened.float() - plain.float())[finite].abs()
        agrees = not apart.numel() or bool(apart.max() <= tolerance * plain[finite].abs().max() and apart.max() <= within)
    if not agrees and shortcut is not None:
        warn(
            f"this host gives other logits when a run is shortened ({shortcut}) than when it is not, so it will not be: slower, "
            "but right. Please report the model"
        )
    return agrees
