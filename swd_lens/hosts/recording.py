"""Recording: what a forward showed of sites and of hook points, kept by name.

1. `record` runs tokens (the blocks that are needed, the whole host, or up to the last position's logits) and keeps inputs and
   outputs of sites, the units of attached sites, and what other hook points saw.
2. `recording` keeps the same of any run made while it is open.
3. Every site that was asked for must have been seen: a silent hook would leave zeros in a sum, or nothing at all.
4. Standing hooks are those that a caller has hooked to a host. Calls of swd_lens run with them; results name them in their
   settings.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from swd_lens.base.errors import UnsupportedHostError
from swd_lens.hosts.host import Host, Start
from swd_lens.hosts.sites import Site

# Hooks of packages that are part of how a host runs. Of ours only those that look at it, or watch attached units: interventions
# that a caller has hooked (`unit_hooks`, `Circuit.hooks`) are the caller's.
_PARTS_OF_THE_HOST = ("transformer_lens", "transformers", "accelerate", "torch", "swd_lens.hosts", "swd_lens.units")
_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def standing_hooks(model: Any) -> dict[str, list[str]]:
    """{"standing_hooks": names} of the hooks that are on a host now, for a result's settings; {} where there are none.

    A name is that of the hook point or module and that of the function: "blocks.0.hook_resid_post: steer".
    """
    hooked: list[tuple[str, Any]] = []
    for path, module in model.named_modules():
        wrapped: set[int] = set()
        if isinstance(module, HookPoint):
            handles = (*module.fwd_hooks, *module.bwd_hooks)
            wrapped = {handle.hook.id for handle in handles}  # TransformerLens' own functions around them
            hooked += [(module.name or path, hook) for hook in hooks_of(module)]
        for kind in _KINDS:
            hooks = getattr(module, kind, {})
            hooked += [(path or "the model", hook) for key, hook in hooks.items() if key not in wrapped]
    names: set[str] = set()
    for point, hook in hooked:
        function = hook.func if isinstance(hook, partial) else hook
        package = str(getattr(function, "__module__", None) or type(function).__module__)
        if not f"{package}.".startswith(tuple(f"{part}." for part in _PARTS_OF_THE_HOST)):
            names.add(f"{point}: {name_of(hook)}")
    return {"standing_hooks": sorted(names)} if names else {}


def hooks_of(point: HookPoint) -> list[Any]:
    """The functions that were given to a hook point."""
    return [handle.user_hook for handle in (*point.fwd_hooks, *point.bwd_hooks)]


def name_of(hook: Any) -> str:
    """The name that a hook has in its own code."""
    function = hook.func if isinstance(hook, partial) else hook
    return getattr(function, "__qualname__", type(function).__qualname__)


Shown = dict[str, Tensor]


@dataclass(frozen=True)
class Recording:
    """Tensors that forwards have shown; the last one where a run shows something more than once."""

    inputs: Shown = field(default_factory=dict)  # site name -> (batch, pos, d_in), or what `keep` made of it
    outputs: Shown = field(default_factory=dict)  # site name -> (batch, pos, d_out)
    units: Shown = field(default_factory=dict)  # name of an attached site -> z, (batch, pos, unit)
    hooks: Shown = field(default_factory=dict)  # name of a hook point -> its tensor; those that were not called are missing
    vectors: Counter[str] = field(default_factory=Counter)  # site name -> how many input vectors it was shown, over all calls
    # of a run to them: (batch, pos, vocab) of the whole host, (batch, vocab) of the last position
    logits: Float[Tensor, "..."] | None = None


def record(
    host: Host,
    tokens: Int[Tensor, "batch pos"],
    *,
    inputs: Iterable[Site] = (),
    outputs: Iterable[Site] = (),
    units: Iterable[Site] = (),
    hooks: Iterable[str] = (),
    run: Literal["blocks", "last", "whole"] = "blocks",
    start: Start | None = None,
    keep: Callable[[Tensor], Tensor] | None = None,
    gradient: bool = False,
) -> Recording:
    """Run tokens once and keep what was asked for.

    Args:
        inputs, outputs, units: sites of which these are kept; those of `units` are attached.
        hooks: names of further hook points, such as "blocks.0.attn.hook_pattern".
        run: "blocks" runs no block behind the last one that is asked for; "last" runs to the logits of the last position,
            "whole" to those of every position.
        start: take up from there; not with run="whole".
        keep: what is kept of each tensor, taken when it is shown; None = the tensor itself.
        gradient: leave gradients as the caller has them; else the run is made without.

    Raises UnsupportedHostError: the forward never showed a site that was asked for.
    """
    inputs, outputs, units, hooks = list(inputs), list(outputs), list(units), list(hooks)
    logits = None
    with (
        torch.set_grad_enabled(gradient and torch.is_grad_enabled()),
        recording(host, inputs=inputs, outputs=outputs, units=units, hooks=hooks, keep=keep) as seen,
    ):
        if run == "whole":
            logits = host.run(tokens)
        elif run == "last":
            logits = host.last_logits(tokens, start=start)
        else:
            # "blocks.3.attn.hook_pattern" -> 3
            layers = [site.layer for site in (*inputs, *outputs, *units)] + [int(name.split(".")[1]) for name in hooks]
            # Without a start not even the argument: hosts that take none are hosts, too.
            host.run_blocks(tokens, max(layers) + 1, **({} if start is None else {"start": start}))
    return Recording(seen.inputs, seen.outputs, seen.units, seen.hooks, seen.vectors, logits)


@contextmanager
def recording(
    host: Host,
    *,
    inputs: Iterable[Site] = (),
    outputs: Iterable[Site] = (),
    units: Iterable[Site] = (),
    hooks: Iterable[str] = (),
    keep: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[Recording]:
    """While open, keep what forwards of the host show; see `record` for the arguments. Raises UnsupportedHostError: at the
    end, where a site that was asked for was never shown."""
    inputs, outputs, units = list(inputs), list(outputs), list(units)
    seen = Recording()

    def into(shown: Shown, name: str) -> Callable[..., None]:
        def keep_one(tensor: Tensor, hook: Any = None) -> None:
            shown[name] = tensor if keep is None else keep(tensor)

        return keep_one

    def keep_input(site: Site, h: Tensor) -> None:
        seen.vectors[site.name] += h.numel() // h.shape[-1]
        into(seen.inputs, site.name)(h)

    points: list[tuple[str, Callable[..., None]]] = [(site.hook_name, into(seen.units, site.name)) for site in units]
    points += [(name, into(seen.hooks, name)) for name in hooks if name in host.model.hook_dict]
    with ExitStack() as stack:
        if points:
            stack.enter_context(host.model.hooks(fwd_hooks=points))
        stack.enter_context(host.outputs(outputs, lambda site, y: into(seen.outputs, site.name)(y)))
        stack.enter_context(host.inputs(inputs, keep_input))
        yield seen
    require_seen(inputs, seen.inputs, "input")
    require_seen(outputs, seen.outputs, "output")
    require_seen(units, seen.units, "units")


def require_seen(sites: Iterable[Site], seen: Container[str], what: str) -> None:
    """Require that every site's name is among those seen. what: what should have been seen there ("input", "output", "units").
    Raises UnsupportedHostError: some were not; all of them are named."""
    silent = [site.name for site in sites if site.name not in seen]
    if silent:
        raise UnsupportedHostError(
            f"the forward of this host never showed the {what} of {', '.join(silent)}: it goes by another way there (a "
            "fused or skipped module, or hooks that were removed). Leave these sites out, and please report the model"
        )


def require_one_per_token(sites: Sequence[Site], vectors: Mapping[str, int], n_tokens: int) -> None:
    """Require that every site read one vector per token. vectors: site name -> how many it read. Raises UnsupportedHostError:
    a site was silent (all of them are named), or read another number."""
    require_seen(sites, vectors, "input")
    for site in sites:
        if vectors[site.name] != n_tokens:
            raise UnsupportedHostError(
                f"{site.name} read {vectors[site.name]} vectors on {n_tokens} tokens; swd_lens needs one per token (a "
                "layer that runs several times, or on some tokens only, has no single Gram)"
            )
