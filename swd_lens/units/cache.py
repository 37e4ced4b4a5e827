"""TransformerLens' own helpers while units are attached: what multiplies by a dense matrix that did not run is given another one.

1. `run_with_cache` gives a `UnitCache`: an ActivationCache that remembers which units stood in its run, also after they are
   detached. What only reads activations is TransformerLens' own.
2. Helpers that multiply by W_O or W_out get read @ write there, so that the parts they give sum to what the run computed.
   Where an encode/decode pair or a whole MLP stood there is no such matrix, and they are refused.
3. `accumulated_bias` gets the constants of transported factors.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformer_lens.ActivationCache import ActivationCache

from swd_lens.base.errors import AttachError
from swd_lens.base.holding import own_method
from swd_lens.hosts.host import Register
from swd_lens.hosts.sites import split_name
from swd_lens.hosts.weights import Shadow, shadow_methods
from swd_lens.units.projection import Projection, UnitProjection

_BY_HEADS = ("compute_head_results", "stack_head_results", "get_full_resid_decomposition")
# Kind of site -> the module and the matrix of it that helpers multiply by.
_REPLACED = {"attn_o": ("attn", "W_O"), "mlp_out": ("mlp", "W_out"), "mlp": ("mlp", "W_out")}


class UnitCache(ActivationCache):
    """An ActivationCache that `run_with_cache` gives while units are attached. stood: site name -> the projection that
    computed there in this run."""

    stood: Mapping[str, Projection]

    @classmethod
    def of(cls, cache: ActivationCache, stood: Mapping[str, Projection]) -> "UnitCache":
        """Turn a cache into one that knows the units of its run."""
        cache.__class__ = cls
        assert isinstance(cache, UnitCache)
        cache.stood = stood
        return cache

    def apply_slice_to_batch_dim(self, batch_slice: Any) -> "UnitCache":
        return UnitCache.of(super().apply_slice_to_batch_dim(batch_slice), self.stood)


def _of_what_ran(helper: str) -> Callable[..., Any]:
    """This helper of an ActivationCache, on the same activations, with a model that shows the W_O and W_out that ran."""

    def call(cache: UnitCache, *args: Any, **kwargs: Any) -> Any:
        if helper in _BY_HEADS:
            # Upstream computes the heads of all layers at once: refused as a whole, so that none is kept without the others.
            for site, projection in cache.stood.items():
                if split_name(site)[1] == "attn_o":
                    _require_matrix(site, projection, f"cache.{helper}")
        plain = ActivationCache(cache.cache_dict, _HostAsRun(cache.model, cache.stood, helper), cache.has_batch_dim)
        return getattr(plain, helper)(*args, **kwargs)

    return wraps(getattr(ActivationCache, helper))(call)


for _helper in (*_BY_HEADS, "get_neuron_results", "stack_neuron_results"):
    setattr(UnitCache, _helper, _of_what_ran(_helper))


class _HostAsRun:
    """A model whose blocks show read @ write where units stood; all else is the model's. Raises AttachError: a helper asks for
    the matrix of units that have none."""

    def __init__(self, model: Any, stood: Mapping[str, Projection], helper: str):
        self._model, self._stood = model, stood
        matrices: dict[int, dict[str, dict[str, Any]]] = {}
        for site, projection in stood.items():
            layer, kind = split_name(site)
            if kind in _REPLACED:
                part, name = _REPLACED[kind]
                matrices.setdefault(layer, {}).setdefault(part, {})[name] = (site, projection, helper, model.cfg)
        self.blocks = [_Showing(block, matrices.get(layer, {})) for layer, block in enumerate(model.blocks)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def accumulated_bias(self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True) -> Tensor:
        """(d_model,) what blocks before `layer` add whatever the tokens."""
        return _with_offsets(self._model, self._stood, layer, mlp_input, include_mlp_biases)


class _Showing:
    """A module in which some matrices, or submodules with some, are others."""

    def __init__(self, module: Any, shown: Mapping[str, Any]):
        self._module, self._shown = module, shown

    def __getattr__(self, name: str) -> Any:
        shown = self._shown.get(name)
        if isinstance(shown, Mapping):
            return _Showing(getattr(self._module, name), shown)
        if shown is None:
            return getattr(self._module, name)
        # read @ write as TransformerLens keeps W_O (head, d_head, d_model) or W_out (d_mlp, d_model).
        site, projection, helper, cfg = shown
        projection = _require_matrix(site, projection, f"cache.{helper}")
        product = projection.read.factor @ projection.write.factor
        return product.view(cfg.n_heads, -1, product.shape[1]) if split_name(site)[1] == "attn_o" else product


def _require_matrix(site: str, projection: Projection, helper: str) -> UnitProjection:
    """Raises AttachError where the units are an encode/decode pair."""
    if not isinstance(projection, UnitProjection):
        raise AttachError(
            f"{helper} multiplies by the dense weight of {site}, but in this run units without such a matrix stood there. "
            "swd.stack_unit_results(cache, factors) gives what the units write; attachment.dense() runs the dense host "
            "for a moment"
        )
    return projection


class _RunWithCache(Shadow):
    """run_with_cache, whose cache knows what is attached."""

    def __init__(self, model: Any):
        super().__init__(model)
        self.attached: list[Mapping[str, Projection]] = []

    def stood(self) -> dict[str, Projection]:
        """Those that compute now, by site name: not those that hand over to the dense product for a moment."""
        return {site: p for projections in self.attached for site, p in projections.items() if not p.bypassed}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stood = self.stood()
        output, cache = type(self.owner).run_with_cache(self.owner, *args, **kwargs)
        return output, UnitCache.of(cache, stood) if stood and isinstance(cache, ActivationCache) else cache


class _AccumulatedBias(Shadow):
    """accumulated_bias, with the constants of what is attached."""

    def __call__(self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True) -> Tensor:
        stood = own_method(self.owner, "run_with_cache").stood()
        return _with_offsets(self.owner, stood, layer, mlp_input, include_mlp_biases)


def _with_offsets(
    model: Any, stood: Mapping[str, Projection], layer: int, mlp_input: bool, include_mlp_biases: bool
) -> Float[Tensor, " d_model"]:
    bias = type(model).accumulated_bias(model, layer, mlp_input, include_mlp_biases)
    for site, projection in stood.items():
        at, kind = split_name(site)
        asked = at < layer or (at == layer and mlp_input and kind == "attn_o")
        if kind not in _REPLACED or not asked or (kind != "attn_o" and not include_mlp_biases):
            continue
        projection = _require_matrix(site, projection, "accumulated_bias")
        if projection.offset_unit is not None:
            bias = bias + projection.offset_unit @ projection.write.factor
        if projection.offset_out is not None:
            bias = bias + projection.offset_out
    return bias


def cover_helpers(model: Any, projections: Mapping[str, Projection], register: Register) -> None:
    """Have the host's helpers know these projections, by site name, until the undo. register: is given the undo before
    anything is done; the undo may be called more than once."""

    def undo() -> None:
        shadow = own_method(model, "run_with_cache")
        if isinstance(shadow, _RunWithCache):
            shadow.attached = [other for other in shadow.attached if other is not projections]

    register(undo)
    shadow_methods(model, {"run_with_cache": _RunWithCache, "accumulated_bias": _AccumulatedBias}, register)
    own_method(model, "run_with_cache").attached.append(projections)
