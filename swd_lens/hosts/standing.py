"""Standing hooks: what a caller has hooked to a host. Calls of swd_lens run with them; results name them in their settings."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from transformer_lens.hook_points import HookPoint

# Hooks of packages that are part of how a host runs. Of ours only those that look at it, or watch attached units: interventions
# that a caller has hooked (`unit_hooks`, `Circuit.hooks`) are the caller's.
_PARTS_OF_THE_HOST = ("transformer_lens", "transformers", "accelerate", "torch", "swd_lens.hosts", "swd_lens.units")
_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def standing_hooks(model: Any) -> dict[str, list[str]]:
    """{"standing_hooks": names} of the hooks that are on a host now, for a result's settings; {} where there are none.

    A name is that of the hook point or module and that of the function: "blocks.0.hook_resid_post: steer".
    """
    names = sorted({f"{point}: {name_of(hook)}" for point, hook in _hooks(model) if not _is_part_of_the_host(hook)})
    return {"standing_hooks": names} if names else {}


def hooks_of(point: HookPoint) -> list[Any]:
    """The functions that were given to a hook point."""
    return [handle.user_hook for handle in (*point.fwd_hooks, *point.bwd_hooks)]


def name_of(hook: Any) -> str:
    """What a hook is called in its own code."""
    function = hook.func if isinstance(hook, partial) else hook
    return getattr(function, "__qualname__", type(function).__qualname__)


def _hooks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        wrapped: set[int] = set()
        if isinstance(module, HookPoint):
            handles = (*module.fwd_hooks, *module.bwd_hooks)
            wrapped = {handle.hook.id for handle in handles}  # TransformerLens' own functions around them
            yield from ((module.name or path, hook) for hook in hooks_of(module))
        for kind in _KINDS:
            hooks = getattr(module, kind, {})
            yield from ((path or "the model", hook) for key, hook in hooks.items() if key not in wrapped)


def _is_part_of_the_host(hook: Any) -> bool:
    function = hook.func if isinstance(hook, partial) else hook
    module = str(getattr(function, "__module__", None) or type(function).__module__)
    return any(module == package or module.startswith(f"{package}.") for package in _PARTS_OF_THE_HOST)
