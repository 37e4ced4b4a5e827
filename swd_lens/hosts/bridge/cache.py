"""A prompt's prefix in Hugging Face's own cache: what can be kept, and copies to run on that leave the kept one as it was.

Keys and values are never written to (an update concatenates), so copies share them, and a prefix repeated for many copies of
the batch holds them once: the copies are made when a layer is run. The states of linear attention are small and are written
in place, so copies have their own.
"""

import copy
from functools import partial
from typing import Any

from torch import Tensor

from swd_lens.hosts.families import CACHE_LAYERS
from swd_lens.hosts.host import appended, shape_only


def is_known(cache: Any) -> bool:
    """Whether the cache is made of layers that are understood here; any other is not kept."""
    layers = getattr(cache, "layers", None) or ()
    return type(cache).__name__ == "DynamicCache" and all(type(layer).__name__ in CACHE_LAYERS for layer in layers)


def to_run_on(cache: Any, from_layer: int = 0) -> Any:
    """A copy that a forward of the blocks from `from_layer` on may extend."""
    copied = copy.copy(cache)
    copied.layers = [layer if i < from_layer else _own(layer) for i, layer in enumerate(cache.layers)]
    return copied


def joined(earlier: Any, cache: Any, layer: int) -> Any:
    """A cache for runs of the blocks from `layer` on; the blocks before it keep the shapes that `earlier` has."""
    copied = copy.copy(cache)
    copied.layers, copied.from_layer = [*earlier.layers[:layer], *cache.layers[layer:]], layer
    return copied


def repeated(cache: Any, times: int, from_layer: int = 0) -> Any:
    """A copy for `times` copies of the batch, one after the other, and runs of the blocks from `from_layer` on.

    The layers before keep nothing but their shape, by which Hugging Face knows how long the prefix is.
    """
    whole = copy.copy(cache)
    whole.from_layer, whole.layers = max(from_layer, getattr(cache, "from_layer", 0)), []
    for i, layer in enumerate(cache.layers):
        kept = i >= from_layer
        if kept and times == 1:
            whole.layers.append(layer)
            continue
        # Its keys and values: shapes, and beside them, where they are kept, what is to be repeated how many times.
        copied = copy.copy(layer)
        former = vars(layer).get("unit_kept")
        copied.unit_kept = None
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                repeat = _repeat if kept else shape_only
                setattr(copied, name, {k: repeat(x, times) if isinstance(x, Tensor) else x for k, x in value.items()})
            elif name in ("keys", "values") and isinstance(value, Tensor):
                setattr(copied, name, shape_only(value, times))
        if kept and isinstance(vars(layer).get("keys"), Tensor):
            # Rows come copy after copy, so copies of copies are just more copies.
            keys, values, earlier = former or (layer.keys, layer.values, 1)
            copied.unit_kept = (keys, values, earlier * times)
        whole.layers.append(copied)
    return whole


def _own(layer: Any) -> Any:
    """A copy of a layer that a forward may write to."""
    copied = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(copied, name, {k: x.clone() if isinstance(x, Tensor) else x for k, x in value.items()})
    if hasattr(layer, "recurrent_states"):

        def keep(recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
            copied.recurrent_states[state_idx] = recurrent_states
            return recurrent_states

        # Upstream copies the new state over the old one (cache_utils.py:update_recurrent_state), which autograd still needs.
        copied.update_recurrent_state = keep
    if vars(layer).get("unit_kept"):
        copied.update = partial(_update_repeated, copied)
    return copied


def _update_repeated(layer: Any, new_keys: Tensor, new_values: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The first update of repeated keys and values; any further one is the layer's own."""
    keys, values, times = layer.unit_kept
    del layer.update
    if CACHE_LAYERS[type(layer).__name__]:
        # What its update does, in one copy instead of two.
        layer.keys, layer.values = appended(keys, new_keys, times, -2), appended(values, new_values, times, -2)
        return layer.keys, layer.values
    layer.keys, layer.values = _repeat(keys, times), _repeat(values, times)
    return layer.update(new_keys, new_values, *args, **kwargs)


def _repeat(state: Tensor, times: int) -> Tensor:
    return state.repeat(times, *[1] * (state.ndim - 1))
