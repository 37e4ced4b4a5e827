"""Scores and curves as finished parts of a call: how they are kept (base/parts.py) and read again.

Tensors keep their dtype and bits; of a curve, rows and settings are JSON, which keeps every digit of a float.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from swd_lens.base.parts import Key, Parts
from swd_lens.base.record import checked, require_equal
from swd_lens.circuits.curve import CostCurve
from swd_lens.circuits.scores import UnitScores

_SCORES, _MEANS, _EDGES, _MARGINS = "scores", "means", "edges", "margins"


def kept_scores(parts: Parts, key: Key, make: Callable[[], UnitScores]) -> UnitScores:
    """The scores of a part: made now, or finished earlier."""
    if parts.folder is None:
        return make()

    def part() -> tuple[dict[str, Tensor], dict[str, Any]]:
        scores = make()
        tensors = _named(_SCORES, scores.scores) | _named(_MEANS, scores.means)
        return tensors, {"sites": list(scores.scores), "settings": dict(scores.settings)}

    def read(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> UnitScores:
        values = checked("UnitScores", values, {"sites": list[str], "settings": Mapping[str, Any]})
        settings = {"units": Mapping[str, int], "factors": Mapping[str, str]}
        units = checked("UnitScores", values["settings"], settings)["units"]
        require_equal("UnitScores", "sites", sorted(values["sites"]), sorted(units))
        for site in values["sites"]:
            _require_tensor(tensors, f"{_SCORES}/{site}", (units[site],))
            _require_tensor(tensors, f"{_MEANS}/{site}", (..., units[site]))
        by_site = {what: {site: tensors[f"{what}/{site}"] for site in values["sites"]} for what in (_SCORES, _MEANS)}
        return UnitScores(by_site[_SCORES], by_site[_MEANS], values["settings"])

    return parts.tensors(key, part, read)


def kept_curve(parts: Parts, key: Key, scores: UnitScores, make: Callable[[], CostCurve]) -> CostCurve:
    """The curve of a part, which was made with these scores."""
    if parts.folder is None:
        return make()

    def part() -> tuple[dict[str, Tensor], dict[str, Any]]:
        curve = make()
        tensors = _named(_EDGES, curve.edges) | _named(_MARGINS, curve.margins)
        return tensors, {"sites": list(curve.edges), "margins": list(curve.margins), "curve": curve.as_dict()}

    def read(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> CostCurve:
        require_equal("CostCurve", "sites", sorted(values["sites"]), sorted(scores.scores))
        for site, of_site in scores.scores.items():
            _require_tensor(tensors, f"{_EDGES}/{site}", tuple(of_site.shape), floating=False)
        for name in values["margins"]:
            _require_tensor(tensors, f"{_MARGINS}/{name}", (..., tensors[f"{_MARGINS}/dense"].numel()))
        edges = {site: tensors[f"{_EDGES}/{site}"] for site in values["sites"]}
        margins = {name: tensors[f"{_MARGINS}/{name}"] for name in values["margins"]}
        return replace(CostCurve.from_dict(values["curve"]), scores=scores, edges=edges, margins=margins)

    return parts.tensors(key, part, read)


def _require_tensor(tensors: Mapping[str, Tensor], name: str, shape: tuple[Any, ...], floating: bool = True) -> None:
    """A tensor of the last axes that `shape` says, of at most one more where it begins with `...`."""
    tensor, may_have_more = tensors[name], shape[0] is ...
    last_axes = shape[1:] if may_have_more else shape
    n_more = tensor.ndim - len(last_axes)
    require_equal("part", f"{name}: whether real numbers", tensor.is_floating_point(), floating)
    require_equal("part", f"{name}: axes", tensor.ndim, len(last_axes) + (may_have_more and n_more == 1))
    require_equal("part", f"{name}: shape", tuple(tensor.shape[n_more:]), last_axes)


def _named(what: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{what}/{name}": tensor for name, tensor in tensors.items()}
