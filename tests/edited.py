"""Ways past an attachment to a host's weights and to factors: units/test_projection.py and bridge/test_watch.py try each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def _load_state_dict(module: nn.Module, name: str) -> None:
    state = {key: value.clone() for key, value in module.state_dict().items()}
    state[name] *= 2
    module.load_state_dict(state, strict=False)


def _doubled(module: nn.Module, name: str) -> Tensor:
    return 2 * module._parameters[name].detach()


@torch.no_grad()
def _a_single_entry(module: nn.Module, name: str) -> None:
    parameter = module._parameters[name]
    parameter[(0,) * (parameter.ndim - 1) + (3,)] += 1


def _by_an_optimizer(module: nn.Module, name: str) -> None:
    parameter = module._parameters[name]
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.5).step()
    parameter.grad = None


def _rows_of_data_permuted(module: nn.Module, name: str) -> None:
    data = module._parameters[name].data
    rows = data.view(-1, data.shape[-1])
    rows.copy_(rows.flip(0))


Edit = Callable[[nn.Module, str], Any]
# Noticed at the next forward.
SEEN_BY_VERSION: dict[str, Edit] = {
    "load_state_dict of a submodule": _load_state_dict,
    "in place": torch.no_grad()(lambda module, name: module._parameters[name].mul_(2)),
    "a single entry": _a_single_entry,
    "replaced": lambda module, name: module._parameters.update({name: nn.Parameter(_doubled(module, name))}),
    "an optimizer's step": _by_an_optimizer,
}
# Noticed at the next call of swd_lens.
SEEN_BY_VALUE: dict[str, Edit] = {
    "data": lambda module, name: module._parameters[name].data.mul_(2),
    "data exchanged": lambda module, name: setattr(module._parameters[name], "data", _doubled(module, name)),
    "rows of data permuted": _rows_of_data_permuted,
}

# Of one factor: the same two kinds.
FACTOR_SEEN_BY_VERSION: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda factor: factor.mul_(3),
    "a single entry": lambda factor: factor.view(-1)[int(factor.view(-1).nonzero()[0])].add_(1),
    "pruned": lambda factor: factor[:, 0].zero_(),
}
FACTOR_SEEN_BY_VALUE: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda factor: factor.data.mul_(3),
    "rows of data permuted": lambda factor: factor.data.copy_(factor.data.flip(0)),
    "numpy": lambda factor: factor.numpy().__imul__(3),
}
