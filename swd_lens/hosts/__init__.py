"""Hosts: the model that is being factorized, behind one small protocol.

`host_of(model)` wraps a model; `find_sites(model, pattern)` lists its factorizable matrices. Everything above this
package (calibration, injection, fidelity, circuits) speaks to `Host` only, so that a second kind of host is one file.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor, nn

from swd_lens.sites import Pattern, Site, select_sites

Undo = Callable[[], None]


class UnsupportedHostError(TypeError):
    """The model is of a kind or shape that swd_lens cannot inject into; the message says what and why."""


@runtime_checkable
class Host(Protocol):
    """What the rest of swd_lens needs from a model."""

    model: Any

    def sites(self) -> list[Site]:
        """Every factorizable matrix, in execution order."""
        ...

    def weight(self, site: Site) -> Float[Tensor, "d_in d_out"]:
        """The dense matrix, float32, detached; a copy or a view, never to be written to."""
        ...

    def inputs(self, sites: Iterable[Site], use: Callable[[Site, Tensor], None]) -> AbstractContextManager[None]:
        """While open, every forward calls use(site, h) with h (batch, pos, d_in), the site's input."""
        ...

    def outputs(self, sites: Iterable[Site], use: Callable[[Site, Tensor], None]) -> AbstractContextManager[None]:
        """While open, every forward calls use(site, y) with y (batch, pos, d_out), the projection's output, bias included."""
        ...

    def freeze_prefix(self, tokens: Int[Tensor, "batch pos"]) -> Any:
        """Run all positions but the last (no gradient) and keep their keys and values; None for one-token prompts."""
        ...

    def repeat_prefix(self, prefix: Any, times: int) -> Any:
        """The same prefix for `times` copies of the batch, one after the other."""
        ...

    def last_logits(self, tokens: Int[Tensor, "batch pos"], prefix: Any = None) -> Float[Tensor, "batch vocab"]:
        """Logits after the last position; with a prefix only that position is run (exact, since attention is causal)."""
        ...

    def swap(self, site: Site, projection: nn.Module, hook: nn.Module) -> Undo:
        """Run `projection(h, bias)` in place of the dense product and mount `hook` at site.hook_name; returns the undo."""
        ...

    def is_swapped(self, site: Site) -> bool:
        """Whether a projection is mounted at the site now."""
        ...


def host_of(model: Any) -> Host:
    """Wrap a model.

    Raises:
        UnsupportedHostError: not a HookedTransformer, or one whose matrices cannot be seen as (d_in, d_out).
    """
    if not any(cls.__name__ == "HookedTransformer" for cls in type(model).__mro__):
        raise UnsupportedHostError(
            f"swd_lens works on a transformer_lens HookedTransformer; got {type(model).__name__}. "
            "Load one with HookedTransformer.from_pretrained(name) or swd_lens.load_default_model()."
        )
    # Imported here: transformer_lens 4 has no HookedTransformer, and importing swd_lens must work there.
    from swd_lens.hosts.hooked_transformer import HookedTransformerHost

    return HookedTransformerHost(model)


def find_sites(model: Any, pattern: Pattern = "all") -> list[Site]:
    """The sites of a model that a pattern names, in execution order. See `swd_lens.sites.select_sites`.

    Raises:
        UnknownSiteError: nothing matches (nearest names listed).
        UnsupportedHostError: see `host_of`.
    """
    return select_sites(host_of(model).sites(), pattern)
