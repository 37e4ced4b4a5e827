"""A prompt's prefix in Hugging Face's own cache: what can be kept, and copies to run on that leave the kept one as it was.

Keys and values are never written to (an update concatenates), so copies share them. The states of linear attention are
small and are written in place, so copies have their own.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

# By name: which of these classes there are depends on the version of transformers.
_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer")


def is_known(cache: Any) -> bool:
    """Whether the cache is made of layers that are understood here; any other is not kept."""
    layers = getattr(cache, "layers", None) or ()
    return type(cache).__name__ == "DynamicCache" and all(type(layer).__name__ in _LAYERS for layer in layers)


def to_run_on(cache: Any) -> Any:
    """A copy that a forward may extend."""
    return _copy(cache, lambda state: state, Tensor.clone)


def repeated(cache: Any, times: int) -> Any:
    """A copy for `times` copies of the batch, one after the other."""

    def repeat(state: Tensor) -> Tensor:
        return state.repeat(times, *[1] * (state.ndim - 1))

    return _copy(cache, repeat, repeat)


def _copy(cache: Any, of_keys: Callable[[Tensor], Tensor], of_state: Callable[[Tensor], Tensor]) -> Any:
    copied = copy.copy(cache)
    copied.layers = [_copy_layer(layer, of_keys, of_state) for layer in cache.layers]
    return copied


def _copy_layer(layer: Any, of_keys: Callable[[Tensor], Tensor], of_state: Callable[[Tensor], Tensor]) -> Any:
    copied = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(copied, name, {key: of_state(x) if isinstance(x, Tensor) else x for key, x in value.items()})
        elif name in ("keys", "values") and isinstance(value, Tensor):
            setattr(copied, name, of_keys(value))
    if hasattr(layer, "recurrent_states"):
        # Upstream copies the new state over the old one (cache_utils.py:update_recurrent_state), which autograd still needs.
        copied.update_recurrent_state = partial(_keep_recurrent_state, copied)
    return copied


def _keep_recurrent_state(layer: Any, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
    layer.recurrent_states[state_idx] = recurrent_states
    return recurrent_states
