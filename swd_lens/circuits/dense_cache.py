"""Caches of the circuit protocol, so that nothing is run twice.

1. On disk, where a call has a folder: scores and curves as its finished parts (base/step_cache.py). Tensors keep their dtype and
   bits; of a curve, rows and settings are JSON, which keeps every digit of a float.
2. In memory, from one replacement to the next for as long as the host stays as it is: `DenseCache`, what the dense host gives on
   prompts. Its margins on a split. What enters the first replaced block, since no replacement that begins there, and no
   intervention on it, changes that, and on text what leaves the last one; up to a bound of bytes, prompts beyond it are run anew
   each time. Which shortcuts agree with plain runs: that is the host's, and the same for every replacement of its kind.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.base.record import checked, require_equal
from swd_lens.base.step_cache import Key, StepCache
from swd_lens.circuits.curve import CostCurve
from swd_lens.circuits.scores import UnitScores
from swd_lens.hosts import Begun, Host
from swd_lens.tasks.task import TaskSplit
from swd_lens.units.unit_set import require_made_for


def kept_scores(parts: StepCache, key: Key, make: Callable[[], UnitScores], units: Mapping[str, Any] | None = None) -> UnitScores:
    """Scores of a part, made now or finished earlier. Raises ResumeError: the part is damaged, or of other factors than these
    units are now."""
    if parts.folder is None:
        return make()

    def part() -> tuple[dict[str, Tensor], dict[str, Any]]:
        scores = make()
        tensors = _named("scores", scores.scores) | _named("means", scores.means)
        heads = {site: [list(head) for head in of_site] for site, of_site in scores.heads.items()}
        return tensors, {"sites": list(scores.scores), "settings": dict(scores.settings), "heads": heads}

    def read(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> UnitScores:
        kinds = {"sites": list[str], "settings": Mapping[str, Any], "heads": Mapping[str, list[tuple[str, float]]]}
        values = checked("UnitScores", values, kinds)
        settings = {"units": Mapping[str, int], "factors": Mapping[str, str]}
        n_units = checked("UnitScores", values["settings"], settings)["units"]
        require_equal("UnitScores", "sites", sorted(values["sites"]), sorted(n_units))
        for site in values["sites"]:
            _require_tensor(tensors, f"scores/{site}", (n_units[site],))
            _require_tensor(tensors, f"means/{site}", (..., n_units[site]))
        by_site = {what: {site: tensors[f"{what}/{site}"] for site in values["sites"]} for what in ("scores", "means")}
        if units is not None:
            require_made_for(units, values["settings"], "the ranking there")
        return UnitScores(by_site["scores"], by_site["means"], values["settings"], values["heads"])

    return parts.tensors(key, part, read)


def kept_curve(parts: StepCache, key: Key, scores: UnitScores, make: Callable[[], CostCurve]) -> CostCurve:
    """Curve of a part, made now or finished earlier, with these scores."""
    if parts.folder is None:
        return make()

    def part() -> tuple[dict[str, Tensor], dict[str, Any]]:
        curve = make()
        tensors = _named("edges", curve.edges) | _named("bits", curve.bits) | _named("margins", curve.margins)
        return tensors, {"sites": list(curve.edges), "margins": list(curve.margins), "curve": curve.as_dict()}

    def read(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> CostCurve:
        require_equal("CostCurve", "sites", sorted(values["sites"]), sorted(scores.scores))
        for site, of_site in scores.scores.items():
            _require_tensor(tensors, f"edges/{site}", tuple(of_site.shape), floating=False)
            _require_tensor(tensors, f"bits/{site}", tuple(of_site.shape))
        for name in values["margins"]:
            _require_tensor(tensors, f"margins/{name}", (..., tensors["margins/dense"].numel()))
        edges, bits = ({site: tensors[f"{part}/{site}"] for site in values["sites"]} for part in ("edges", "bits"))
        margins = {name: tensors[f"margins/{name}"] for name in values["margins"]}
        found = {"scores": scores, "edges": edges, "bits": bits, "margins": margins}
        return replace(CostCurve.from_dict(values["curve"]), **found)

    return parts.tensors(key, part, read)


def _require_tensor(tensors: Mapping[str, Tensor], name: str, shape: tuple[Any, ...], floating: bool = True) -> None:
    """Require a tensor of this shape; where it begins with `...`, one more axis may stand before."""
    tensor, may_have_more = tensors[name], shape[0] is ...
    last_axes = shape[1:] if may_have_more else shape
    n_more = tensor.ndim - len(last_axes)
    require_equal("part", f"{name}: whether real numbers", tensor.is_floating_point(), floating)
    require_equal("part", f"{name}: axes", tensor.ndim, len(last_axes) + (may_have_more and n_more == 1))
    require_equal("part", f"{name}: shape", tuple(tensor.shape[n_more:]), last_axes)


def _named(what: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{what}/{name}": tensor for name, tensor in tensors.items()}


_KEPT_BYTES = 2**28
T = TypeVar("T")


class DenseCache:
    """Results of the dense host on prompts, kept for further replacements (point 2 above). One object for one host, whose hooks
    and weights must not change meanwhile."""

    def __init__(self, n_bytes: int = _KEPT_BYTES):
        self._room = n_bytes
        self._kept: dict[Any, Any] = {}
        self._of_splits: dict[Any, tuple[TaskSplit, Any]] = {}

    def of_split(self, split: TaskSplit, key: Hashable, find: Callable[[], T]) -> T:
        """Find something that holds for a split, once; later calls get what was found."""
        key = (id(split), key)  # the split is kept beside it, so that no other one gets its id
        if key not in self._of_splits:
            self._of_splits[key] = split, find()
        return self._of_splits[key][1]

    def begun(self, host: Host, tokens: Int[Tensor, "batch pos"], layer: int) -> Begun | None:
        """`Host.begin` on these prompts; whatever is attached from the layer on may stay."""
        return self._made(
            ("begun", layer), tokens, lambda: host.begin(tokens, layer), lambda of: of.earlier.nbytes + of.last.nbytes
        )

    def residual(self, host: Host, tokens: Int[Tensor, "batch pos"], layer: int) -> Float[Tensor, "batch pos d_model"]:
        """Residual stream that enters a block, at every position."""
        with torch.no_grad():
            return self._made(("residual", layer), tokens, lambda: host.residual(tokens, layer), lambda residual: residual.nbytes)

    def known_residual(self, tokens: Int[Tensor, "batch pos"], layer: int) -> Float[Tensor, "batch pos d_model"] | None:
        """What `residual` gave, or `keep_residual` was given; None where that is not kept."""
        return self._kept.get(_key(("residual", layer), tokens))

    def keep_residual(self, tokens: Int[Tensor, "batch pos"], layer: int, residual: Float[Tensor, "batch pos d_model"]) -> None:
        """Keep what the caller's own run of the dense host found to enter a block, where there is room."""
        self._made(("residual", layer), tokens, lambda: residual, lambda residual: residual.nbytes)

    def agreement(self, shortcut: Hashable, tokens: Int[Tensor, "batch pos"], check: Callable[[], bool]) -> bool:
        """Whether a shortcut agrees with plain runs of the dense host on these tokens, found out once."""
        return self._made(("agrees", shortcut), tokens, check, lambda _: 0)

    def _made(self, key: tuple[Any, ...], tokens: Tensor, make: Callable[[], Any], size: Callable[[Any], int]) -> Any:
        """Kept, or made now and kept where there is room."""
        key = _key(key, tokens)
        if key in self._kept:
            return self._kept[key]
        made = make()
        if made is not None and size(made) <= self._room:
            self._kept[key] = made
            self._room -= size(made)
        return made


def _key(key: tuple[Any, ...], tokens: Tensor) -> tuple[Any, ...]:
    """By the ids themselves: buckets of prompts are made anew each time."""
    return (*key, tuple(tokens.shape), tokens.cpu().numpy().tobytes())
