"""writing: the parameter that holds a site's dense matrix, and how to write to it and give it back.

1. `stored_matrix` finds the parameter of a site that writes to the residual stream: W_out and W_O of a HookedTransformer
   (W_O as (head, d_head, d_out)), the leaf's weight of a bridge (nn.Linear keeps it transposed, GPT-2's Conv1D does not).
2. `Stored.seen` is that parameter as (d_in, d_out), a view; `Stored.write` puts a matrix into it, in place, so that every
   alias (tied names, processed weights of a bridge) sees the same numbers.
3. `Stored.names` are its keys in the host's state_dict.
"""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from swd_lens.hosts import Host, UnsupportedHostError
from swd_lens.hosts.bridge.leaves import leaves_of_block
from swd_lens.hosts.families import is_hooked
from swd_lens.hosts.sites import RESIDUAL_MATRICES, Site


@dataclass(frozen=True, eq=False)
class Stored:
    """Where a site's matrix is kept.

    Attributes:
        parameter: the host's own, of whatever shape and dtype it has.
        transposed: whether it is kept as (d_out, d_in).
    """

    parameter: nn.Parameter
    transposed: bool

    def seen(self) -> Float[Tensor, "d_in d_out"]:
        """The parameter as (d_in, d_out), in its own dtype: a detached view, which changes with it."""
        kept = self.parameter.detach()
        return kept.T if self.transposed else kept.reshape(-1, kept.shape[-1])

    def as_stored(self, matrix: Float[Tensor, "d_in d_out"]) -> Float[Tensor, "..."]:
        """A (d_in, d_out) matrix in the parameter's shape, dtype and place."""
        turned = matrix.T if self.transposed else matrix
        return turned.reshape(self.parameter.shape).to(self.parameter)

    def write(self, matrix: Float[Tensor, "d_in d_out"]) -> None:
        """Put a (d_in, d_out) matrix in, rounded to the parameter's dtype; one call, which Ctrl-C does not cut in two."""
        self.restore(self.as_stored(matrix))

    def restore(self, kept: Float[Tensor, "..."]) -> None:
        """Put back what the parameter held, as `parameter.detach().clone()` kept it: bit for bit."""
        # Not under torch.no_grad(): a Ctrl-C on the way out of it would leave gradients switched off.
        self.parameter.detach().copy_(kept.detach())

    def names(self, state: Any) -> list[str]:
        """Its keys in a state_dict that the host has just given (tensors there share their memory with the parameter)."""
        here = (self.parameter.data_ptr(), self.parameter.shape)
        return [name for name, tensor in state.items() if (tensor.data_ptr(), tensor.shape) == here]


def stored_matrix(host: Host, site: Site) -> Stored:
    """Where a host keeps the matrix of an mlp_out or attn_o site.

    Raises:
        UnsupportedHostError: another kind of site.
    """
    if site.kind not in RESIDUAL_MATRICES:
        raise UnsupportedHostError(
            f"{site.name} is not kept as one matrix to write to; {', '.join(reversed(RESIDUAL_MATRICES))} are"
        )
    block: Any = host.model.blocks[site.layer]
    if is_hooked(host.model):
        module, name = (block.mlp, "W_out") if site.kind == "mlp_out" else (block.attn, "W_O")
        return Stored(module._parameters[name], transposed=False)
    leaf: Any = leaves_of_block(block)[0][site.kind]
    return Stored(leaf._parameters["weight"], transposed=isinstance(leaf, nn.Linear))
