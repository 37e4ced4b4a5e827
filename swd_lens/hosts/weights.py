"""Weights: the parameter that holds a site's dense matrix, how to write to it, and how to forbid that it is rewritten.

1. `stored_matrix` is the parameter of a site that writes to the residual stream, and can be written to: W_out and W_O (as
   (head, d_head, d_out)) of a HookedTransformer, the leaf's weight of a bridge (nn.Linear keeps it transposed, GPT-2's Conv1D
   does not). `Stored.matrix` is that parameter as (d_in, d_out), a view; `Stored.write` puts a matrix into it, in place, so that
   every alias (tied names, processed weights of a bridge) has the same numbers; `Stored.names` are its keys in a state_dict.
2. `shadow_methods` covers methods of a host for a while. A method is covered in the instance's own __dict__ by a `Shadow`,
   which knows the attachments that want it; the last one to leave takes it away, and nothing of the host's class is touched.
   A `Refusal` raises, with the reason; a host may bring other shadows (bridge: stacked weights).
3. `listed_in` has a host know what stands in it: under STANDING the units that `host_of`, with which every function of swd_lens
   begins, asks whether they still hold.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from swd_lens.base.errors import UnsupportedHostError, legible
from swd_lens.base.holding import own_method, set_own_method
from swd_lens.hosts.host import Host, Register
from swd_lens.hosts.sites import RESIDUAL_MATRICES, Site


@dataclass(frozen=True, eq=False)
class Stored:
    """Where a site's matrix is kept."""

    parameter: nn.Parameter  # the host's own, of whatever shape and dtype it has
    transposed: bool  # whether it is kept as (d_out, d_in)

    def matrix(self) -> Float[Tensor, "d_in d_out"]:
        """The parameter as (d_in, d_out), in its own dtype: a detached view, which changes with it."""
        kept = self.parameter.detach()
        return kept.T if self.transposed else kept.reshape(-1, kept.shape[-1])

    def as_stored(self, matrix: Float[Tensor, "d_in d_out"]) -> Float[Tensor, "..."]:
        """A (d_in, d_out) matrix in the parameter's shape, dtype and place."""
        oriented = matrix.T if self.transposed else matrix
        return oriented.reshape(self.parameter.shape).to(self.parameter)

    def write(self, matrix: Float[Tensor, "d_in d_out"]) -> None:
        """Put a (d_in, d_out) matrix in, rounded to the parameter's dtype; one call, which Ctrl-C does not cut in two."""
        self.restore(self.as_stored(matrix))

    def restore(self, kept: Float[Tensor, "..."]) -> None:
        """Put back what the parameter held, as `parameter.detach().clone()` kept it: bit for bit."""
        # Not under torch.no_grad(): a Ctrl-C on the way out of it would leave gradients switched off.
        self.parameter.detach().copy_(kept.detach())

    def names(self, state: Any) -> list[str]:
        """Its keys in a state_dict that the host has just given (tensors there share their memory with the parameter)."""
        own = (self.parameter.data_ptr(), self.parameter.shape)
        return [name for name, tensor in state.items() if (tensor.data_ptr(), tensor.shape) == own]


def stored_matrix(host: Host, site: Site) -> Stored:
    """Where a host keeps the matrix of an mlp_out or attn_o site. Raises UnsupportedHostError: another kind of site."""
    if site.kind not in RESIDUAL_MATRICES:
        raise UnsupportedHostError(
            f"{site.name} is not kept as one matrix to write to; {', '.join(reversed(RESIDUAL_MATRICES))} are"
        )
    ((parameters, name),) = host.stored_parameters(site)
    kept: Any = parameters[name]
    return Stored(kept, host.stores_transposed(site))


class Shadow:
    """Stands in for a method of its owner. A class, not a closure, so that a deep copy of the host copies it too."""

    def __init__(self, owner: Any):
        self.owner = owner
        self.wanted_by: set[int] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class Refusal(Shadow):
    """Raises RuntimeError, saying why."""

    def __init__(self, name: str, reason: str, owner: Any):
        super().__init__(owner)
        self.name, self.reason = name, reason

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{legible(self.name)} was called {legible(self.reason)}")


def refusals(names: Iterable[str], reason: str) -> dict[str, Callable[[Any], Shadow]]:
    """Make shadows for `shadow_methods` that raise RuntimeError; the reason ends "fold_layer_norm was called ..."."""
    return {name: partial(Refusal, name, reason) for name in names}


def shadow_methods(model: Any, make: Mapping[str, Callable[[Any], Shadow]], register: Register) -> None:
    """Put shadows before those of the named methods that the model has; one that is there already is shared. make: method name
    -> what makes its shadow, of the model; register: is given the undo."""
    present = [name for name in make if getattr(type(model), name, None) is not None]
    owner = object()

    def undo() -> None:
        for name in present:
            shadow = own_method(model, name)
            if isinstance(shadow, Shadow):
                shadow.wanted_by.discard(id(owner))
                if not shadow.wanted_by:
                    set_own_method(model, name, None)

    register(undo)
    for name in present:
        shadow = own_method(model, name)
        if not isinstance(shadow, Shadow):
            shadow = make[name](model)
            set_own_method(model, name, shadow)
        shadow.wanted_by.add(id(owner))


def while_wanted(state: dict[str, Any], begin: Callable[[], None], end: Callable[[], None], register: Register) -> None:
    """Keep something changed as long as one of those who asked for it still wants it.

    Args:
        state: of the object that is changed, its `__dict__`; it lists who wants the change.
        begin: makes the change; it is called by everyone who asks.
        end: takes the change back, after the last undo.
        register: is given the undo.
    """
    owner = object()

    def undo() -> None:
        owners = state.get("unit_holders", set())
        owners.discard(id(owner))
        if not owners and "unit_holders" in state:
            end()
            del state["unit_holders"]

    register(undo)
    state.setdefault("unit_holders", set()).add(id(owner))
    begin()


def listed_in(model: Any, key: str, item: Any, register: Register, kind: Callable[[], list[Any]] = list) -> None:
    """List an item in the model's own __dict__, until the undo. kind: of the list that is made where there is none."""

    def undo() -> None:
        items = model.__dict__.get(key, kind())
        items[:] = [other for other in items if other is not item]
        if not items:
            model.__dict__.pop(key, None)

    register(undo)
    model.__dict__.setdefault(key, kind()).append(item)
