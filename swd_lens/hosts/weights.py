"""Weights: the parameter that holds a site's dense matrix, how to write to it, and how to forbid that it is rewritten.

1. `stored_matrix` finds the parameter of a site that writes to the residual stream: W_out and W_O of a HookedTransformer
   (W_O as (head, d_head, d_out)), the leaf's weight of a bridge (nn.Linear keeps it transposed, GPT-2's Conv1D does not).
   `Stored.matrix` is that parameter as (d_in, d_out), a view; `Stored.write` puts a matrix into it, in place, so that every
   alias (tied names, processed weights of a bridge) has the same numbers; `Stored.names` are its keys in a state_dict.
2. `shadow_methods` covers methods of a host for a while. A method is covered in the instance's own __dict__ by a `Shadow`,
   which knows the attachments that want it; the last one to leave takes it away, and nothing of the host's class is touched.
   A `Refusal` raises, with the reason; a host may bring other shadows (bridge: stacked weights).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from swd_lens.base.errors import error
from swd_lens.hosts import Host, Register
from swd_lens.hosts.families import is_hooked
from swd_lens.hosts.sites import RESIDUAL_MATRICES, Site

# ---------------------------------------------------------------------------------------------- stored matrices


@dataclass(frozen=True, eq=False)
class Stored:
    """Where a site's matrix is kept.

    Attributes:
        parameter: the host's own, of whatever shape and dtype it has.
        transposed: whether it is kept as (d_out, d_in).
    """

    parameter: nn.Parameter
    transposed: bool

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
    """Where a host keeps the matrix of an mlp_out or attn_o site.

    Raises:
        UnsupportedHostError: another kind of site.
    """
    if site.kind not in RESIDUAL_MATRICES:
        raise error("not-writable", site=site.name, kinds=", ".join(reversed(RESIDUAL_MATRICES)))
    block: Any = host.model.blocks[site.layer]
    if is_hooked(host.model):
        module, name = (block.mlp, "W_out") if site.kind == "mlp_out" else (block.attn, "W_O")
        return Stored(module._parameters[name], transposed=False)
    from swd_lens.hosts.bridge.leaves import leaves_of_block

    leaf: Any = leaves_of_block(block)[0][site.kind]
    return Stored(leaf._parameters["weight"], transposed=isinstance(leaf, nn.Linear))


# ---------------------------------------------------------------------------------------------- covered methods


class Shadow:
    """Stands in for a method. A class, not a closure, so that a deep copy of the host copies it too."""

    def __init__(self) -> None:
        self.wanted_by: set[int] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class Refusal(Shadow):
    """Raises RuntimeError, saying why."""

    def __init__(self, name: str, reason: str):
        super().__init__()
        self.name, self.reason = name, reason

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise error("weights-processed-while-attached", method=self.name, reason=self.reason)


def refusals(names: Iterable[str], reason: str) -> dict[str, Callable[[], Shadow]]:
    """For `shadow_methods`: each of the names raises RuntimeError; reason ends "fold_layer_norm was called ..."."""
    return {name: lambda name=name: Refusal(name, reason) for name in names}


def shadow_methods(model: Any, make: dict[str, Callable[[], Shadow]], register: Register) -> None:
    """Put shadows before those of the named methods that the model has; one that is there already is shared.

    Args:
        make: method name -> what makes its shadow.
        register: is given the undo before anything is done; the undo may be called more than once.
    """
    present = [name for name in make if getattr(type(model), name, None) is not None]
    owner = object()

    def undo() -> None:
        for name in present:
            shadow = model.__dict__.get(name)
            if isinstance(shadow, Shadow):
                shadow.wanted_by.discard(id(owner))
                if not shadow.wanted_by:
                    del model.__dict__[name]

    register(undo)
    for name in present:
        if not isinstance(model.__dict__.get(name), Shadow):
            model.__dict__[name] = make[name]()
        model.__dict__[name].wanted_by.add(id(owner))
