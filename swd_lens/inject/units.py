"""UnitProjection: the module that computes h @ read, shows z to its hook point, and computes z @ write + bias."""

from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint


class UnitProjection(nn.Module):
    """One site's factors at work inside a host.

    The factors are non-persistent buffers: they follow the host's `.to()`, and the host's state_dict keys stay the same.

    Args:
        read: (d_in, unit).
        write: (unit, d_out).
        hook: the HookPoint that sees z (batch, pos, unit). It is a child of the host's block, not of this module, so that
            its name is blocks.{L}.hook_{site}_unit; here it is only referred to.
    """

    read: Tensor
    write: Tensor
    hook: HookPoint

    def __init__(self, read: Float[Tensor, "d_in unit"], write: Float[Tensor, "unit d_out"], hook: HookPoint):
        super().__init__()
        self.register_buffer("read", read, persistent=False)
        self.register_buffer("write", write, persistent=False)
        # Past nn.Module.__setattr__, which would register the hook as a child and give it a second name.
        object.__setattr__(self, "hook", hook)

    def forward(self, h: Float[Tensor, "*batch d_in"], bias: Float[Tensor, " d_out"]) -> Float[Tensor, "*batch d_out"]:
        z = self.hook(h @ self.read)
        return z @ self.write + bias

    def extra_repr(self) -> str:
        return f"d_in={self.read.shape[0]}, units={self.read.shape[1]}, d_out={self.write.shape[1]}"


def unit_projection(
    read: Float[Tensor, "d_in unit"], write: Float[Tensor, "unit d_out"], like: Tensor
) -> tuple[UnitProjection, HookPoint]:
    """A projection and its hook point, on the device and in the dtype of the host's own weight `like`."""
    hook = HookPoint()
    place = {"device": like.device, "dtype": like.dtype}
    return UnitProjection(read.detach().to(**place), write.detach().to(**place), hook), hook


def wants_grad(z: Tensor) -> Tensor:
    """A z to differentiate by: itself where it has a gradient path, else (every parameter frozen) a fresh leaf."""
    return z if z.requires_grad else z.detach().requires_grad_(True)
