"""Running parts of a TransformerBridge: starting at a block, stopping before one, and unembedding a few tokens only.

1. Hugging Face's own forward runs, so that positions, masks, rotary embeddings and caches are its own; for its duration some
   modules are called otherwise (`with_stand_ins`): a block that is not to run hands on, the block where a run stops raises,
   the unembedding multiplies by a few rows. It is the call that is replaced, not `forward`: PyTorch hooks on such a module
   (a watch on its units, say) are not called either.
2. The replacement is a change of class, as in leaves.py: an assignment to `block.forward` would be handed on to the
   Hugging Face module.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swd_lens.hosts import Start

StandIn = tuple[nn.Module, Callable[..., Any]]  # a module, and what is called in its place, for the time being


class Reached(Exception):
    """Carries the residual out of Hugging Face's forward, its only argument."""


# ---------------------------------------------------------------------------------------------- standing in

_STANDING_IN: dict[type, type] = {}  # plain class -> the class of the same module while another call stands in
_PLAIN: dict[type, type] = {}  # and back
_PLACE = "unit_stand_in"


def with_stand_ins(model: Any, stand_ins: Sequence[StandIn], run: Callable[[], Any]) -> Any:
    """run(), with something else called in place of some of the model's modules.

    Raises:
        RuntimeError: it is called from within such a run: what stands in there would stand in here, too.
    """
    if any(type(module) in _PLAIN for module in (*model.blocks, _unembedding(model))):
        raise RuntimeError(
            "a hook ran this host in the middle of one of its runs; run it before or after, or run a copy"
        )
    plain = [(module, type(module)) for module, _ in stand_ins]
    # Twice, because an interruption may hit the inner one. (Not a context manager: it could hit contextlib's lines.)
    try:
        try:
            for module, call in stand_ins:
                module.__dict__[_PLACE] = call
                module.__class__ = _standing_in(type(module))
            return run()
        finally:
            _restore(plain)
    finally:
        _restore(plain)


def _restore(plain: Sequence[tuple[nn.Module, type]]) -> None:
    for module, former in plain:
        module.__class__ = former
        module.__dict__.pop(_PLACE, None)


def _standing_in(plain: type) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[_PLACE](*args, **kwargs)

    if plain not in _STANDING_IN:
        made = type(plain.__name__, (plain,), {"__call__": call})
        _PLAIN[made] = plain
        _STANDING_IN[plain] = made
    return _STANDING_IN[plain]


def _call_itself(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    plain: Any = _PLAIN[type(module)]
    return plain.__call__(module, *args, **kwargs)


# ---------------------------------------------------------------------------------------------- blocks


class _HandedOn(Tensor):
    """A block's output whatever its form: used as a tensor it is the residual, and so is its first item.

    Some models' blocks return a tensor, some a tuple or list that begins with it.
    """

    # What is computed from it is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> Any:
        plain = self.as_subclass(Tensor)
        return plain if type(index) is int and index == 0 else plain[index]

    def __iter__(self) -> Any:
        return iter((self.as_subclass(Tensor), None))


def starting(model: Any, start: Start) -> list[StandIn]:
    """Blocks before start.layer hand on without running; what follows them takes up start.residual."""
    handed_on = start.residual.as_subclass(_HandedOn)  # type: ignore[arg-type]
    blocks = list(model.blocks)
    skipped: list[StandIn] = [(block, lambda *_, **__: handed_on) for block in blocks[: start.layer]]
    if start.layer == len(blocks):
        # Mostly next, and then no hook there sees but a plain tensor.
        norm = model._modules.get("ln_final")
        return skipped if norm is None else [*skipped, (norm, partial(_plainly, norm))]
    first = blocks[start.layer]
    return [*skipped, (first, partial(_take_up, first, start.residual))]


def stopping(model: Any, layer: int, start: Start | None = None) -> list[StandIn]:
    """What enters block `layer` (number of blocks: what leaves the last) is raised, as `Reached`.

    With a start, of a block before `layer`, the run takes up there.
    """
    blocks = list(model.blocks)
    stand_ins = [] if start is None else starting(model, start)
    if layer < len(blocks):
        return [*stand_ins, (blocks[layer], _raise_input)]
    last = blocks[-1]
    # The last block may be the one that takes up, too.
    call = dict(stand_ins).get(last, partial(_call_itself, last))
    return [*(one for one in stand_ins if one[0] is not last), (last, partial(_raise_output, call))]


def _take_up(block: nn.Module, residual: Tensor, *args: Any, **kwargs: Any) -> Any:
    if args:
        return _call_itself(block, residual, *args[1:], **kwargs)
    return _call_itself(block, **{**kwargs, "hidden_states": residual})


def _plainly(norm: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _call_itself(norm, hidden.as_subclass(Tensor), *args, **kwargs)  # type: ignore[arg-type]


def _raise_input(*args: Any, **kwargs: Any) -> Any:
    raise Reached(args[0] if args else kwargs["hidden_states"])


def _raise_output(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    output = call(*args, **kwargs)
    raise Reached(output if isinstance(output, Tensor) else output[0])


# ---------------------------------------------------------------------------------------------- unembedding


def unembedding_some(model: Any, token_ids: Tensor) -> list[StandIn]:
    """The unembedding computes these tokens' logits only; what the model does to logits (soft caps) it does to them.

    Empty where it is not a plain matrix, of which some rows can be taken.
    """
    linear = _unembedding(model)
    if type(linear) is not nn.Linear:
        return []
    rows = token_ids.to(linear.weight.device)

    def some(hidden: Tensor) -> Tensor:
        return F.linear(hidden, linear.weight[rows], None if linear.bias is None else linear.bias[rows])

    return [(linear, some)]


def _unembedding(model: Any) -> Any:
    unembed = model._modules.get("unembed")
    return None if unembed is None else unembed._modules.get("_original_component")
