"""Roads: how interventions on a bucket of prompts are run without computing again what they share.

1. Nothing before the first replaced layer depends on an intervention: what enters that layer is computed once per bucket.
2. With positions="scoring" only the last position changes, so the keys and values of all others are kept, too. That is
   exact, because attention is causal.
3. Where the first replaced layer holds mlp_out alone, its z is the same in every run, and its output is added to the
   residual stream: what leaves the layer is the shared residual plus (z' - z) @ write, and runs start a layer later.
4. Only the last position's logits are wanted: the last block computes of the others keys and values alone.
5. Many interventions are run at once: the prompts are repeated, one copy per intervention.

Each is exact where a host is built as most are, but not every host is (a norm may follow the MLP, attention may look both
ways). So `find_road` runs a few prompts plainly and by each road, and takes the shortest one that agrees.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from swd_lens.hosts import Host, Start, norms_output
from swd_lens.hosts.sites import READS_ATTENTION_INPUT, Site, hook_name
from swd_lens.tasks.task import TaskSplit
from swd_lens.units.coder import CoderUnits, Units
from swd_lens.units.factors import Factors

_CHECKED_PROMPTS = 4
# Of the largest logit. The same sums in another order differ by 1e-6 of it in float32; a wrong road by a good part of it.
_AGREES = 1e-4
# Of the largest change of a logit that half of the known site's units make.
_EFFECT = 0.02

# What is put in place of z: per site (batch or 1, pos or 1, unit).
Values = Mapping[str, Float[Tensor, "_batch _pos _unit"]]
# Which units are replaced: per site one row per intervention.
Masks = Mapping[str, Bool[Tensor, "circuit _unit"]]


@dataclass(frozen=True)
class Road:
    """How runs are shortened.

    Attributes:
        positions: "scoring" (only the last position is intervened on) or "all".
        layer: runs start at this block; 0: from the tokens.
        known: the one site of block layer - 1, whose z is known before a run starts; or None.
        keeps_prefix: whether all positions but the last are run once (positions="scoring" only).
        short: whether the last block computes of all positions but the last only keys and values.
    """

    positions: str
    layer: int = 0
    known: Site | None = None
    keeps_prefix: bool = False
    short: bool = False


@dataclass(frozen=True)
class Ground:
    """What all interventions on the same prompts share."""

    tokens: Int[Tensor, "batch pos"]
    prefix: Any = None
    start: Start | None = None
    z: Float[Tensor, "batch _pos unit"] | None = None


class Runner:
    """Runs interventions on attached units by one road."""

    def __init__(self, host: Host, units: Mapping[str, Units], road: Road):
        self.host, self.units, self.road = host, units, road

    def ground(self, tokens: Int[Tensor, "batch pos"]) -> Ground:
        """Compute once what interventions on these prompts share."""
        host, road = self.host, self.road
        with torch.no_grad():
            prefix = host.freeze_prefix(tokens) if road.keeps_prefix else None
            if not road.layer:
                return Ground(tokens, prefix)
            seen: dict[str, Tensor] = {}
            with _watching(host, road.known, seen):
                residual = host.residual(tokens, road.layer, prefix)
            kept = host.repeat_prefix(prefix, 1, road.layer) if prefix is not None else None
            z = seen[road.known.name] if road.known else None
            return Ground(tokens, kept, Start(road.layer, residual), z)

    def logits(
        self, ground: Ground, masks: Masks, values: Values, token_ids: Int[Tensor, " answer"] | None = None
    ) -> Float[Tensor, "circuit batch _vocab"]:
        """Last-position logits of every prompt under every intervention, in one forward.

        Args:
            masks: site -> (circuit, unit), True where a unit is replaced.
            values: site -> what replaced units are set to, broadcast over prompts and positions.
            token_ids: only these tokens' logits; None = all.
        """
        host, known, start = self.host, self.road.known, ground.start
        circuits, batch = len(next(iter(masks.values()))), len(ground.tokens)
        if start is not None:
            residual = start.residual.expand(circuits, *start.residual.shape)
            if known is not None and ground.z is not None:
                residual = self._moved(residual, ground.z, masks[known.name], values[known.name])
            start = Start(start.layer, residual.flatten(0, 1))
        hooks = [
            (hook_name(site), self._replace(mask, values[site]))
            for site, mask in masks.items()
            if (known is None or site != known.name) and mask.any()
        ]
        tokens = ground.tokens.repeat(circuits, 1)
        prefix = host.repeat_prefix(ground.prefix, circuits, self.road.layer) if ground.prefix is not None else None
        with host.model.hooks(fwd_hooks=hooks):
            logits = host.last_logits(tokens, prefix, start=start, token_ids=token_ids, short=self.road.short)
        return logits.view(circuits, batch, -1)

    def _moved(self, residual: Tensor, z: Tensor, mask: Tensor, value: Tensor) -> Float[Tensor, "circuit batch pos d"]:
        """The residual stream after the known site wrote z' in place of z (in float32: z' - z may be small)."""
        assert self.road.known is not None
        last_only = self.road.positions == "scoring"
        chosen = slice(-1, None) if last_only else slice(None)
        change = torch.where(
            mask[:, None, None].to(z.device), value.to(z).float()[:, chosen] - z.float()[:, chosen], 0.0
        )
        if last_only and z.shape[1] > 1:
            earlier = change.new_zeros(*change.shape[:2], z.shape[1] - 1, change.shape[3])
            change = torch.cat([earlier, change], dim=2)
        units = self.units[self.road.known.name]
        if isinstance(units, Factors):
            written = change @ units.write.to(change)
        else:
            assert isinstance(units, CoderUnits)
            written = units.decode((z + change).to(z)).float() - units.decode(z).float()
        return (residual.float() + written).to(residual)

    def _replace(self, mask: Tensor, value: Tensor) -> Callable[..., Tensor]:
        circuits, last_only = len(mask), self.road.positions == "scoring"

        def hook_fn(z: Float[Tensor, "rows pos unit"], hook: Any) -> Float[Tensor, "rows pos unit"]:
            by_circuit = z.view(circuits, -1, *z.shape[1:])
            where, mu = mask[:, None, None].to(z.device), value.to(z)
            if last_only:
                last = torch.where(where, mu[:, -1:], by_circuit[:, :, -1:])
                changed = last if z.shape[1] == 1 else torch.cat([by_circuit[:, :, :-1], last], dim=2)
            else:
                # In a short last block there is the last position only.
                changed = torch.where(where, mu[:, -z.shape[1] :], by_circuit)
            return changed.flatten(0, 1)

        return hook_fn


@contextmanager
def _watching(host: Host, site: Site | None, seen: dict[str, Tensor]) -> Iterator[None]:
    if site is None:
        yield
        return
    with host.model.hooks(fwd_hooks=[(site.hook_name, lambda z, hook: seen.update({site.name: z.detach()}))]):
        yield


# ---------------------------------------------------------------------------------------------- which road


def find_road(
    host: Host, sites: list[Site], units: Mapping[str, Units], split: TaskSplit, positions: str, known: bool = True
) -> Road:
    """The shortest road on which a few prompts of the split give what they give plainly, with half of the units set to zero.

    Args:
        sites, units: what is attached now.
        known: whether the first site's z may be taken as known beforehand, and the last block cut short (not where z is
            wanted at all positions, or gradients by it).

    Warns:
        UserWarning: a shortcut that should hold on every host does not.
    """
    tokens = _longest(split)
    half = {site.name: torch.arange(units[site.name].n_units)[None] % 2 == 0 for site in sites}
    best = Road(positions)
    plain = _run(host, units, best, tokens, half)
    for shortcut in _shortcuts(host, sites, units, positions, known):
        road = replace(best, **shortcut)
        agrees = _agree(_try(host, units, road, tokens, half), plain)
        if agrees and (road.known is best.known or _moves_rightly(host, units, road, tokens, half)):
            best = road
        elif not agrees and road.known is best.known:
            warnings.warn(
                f"this host gives other logits when a run is shortened ({shortcut}) than when it is not, so it will not be: "
                "slower, but right. Please report the model",
                stacklevel=3,
            )
    return best


def _shortcuts(
    host: Host, sites: list[Site], units: Mapping[str, Units], positions: str, known: bool
) -> Iterator[dict[str, Any]]:
    """What may be left out, one thing after the other."""
    layer = min(site.layer for site in sites)
    if positions == "scoring":
        yield {"keeps_prefix": True}
    if layer:
        yield {"layer": layer}
    first = [site for site in sites if site.layer == layer]
    if known and len(first) == 1 and first[0].kind == "mlp_out" and _adds(host, first[0], units[first[0].name]):
        yield {"layer": layer + 1, "known": first[0]}
    # Units that read the attention's input would see the last block's positions in two parts.
    last = host.model.cfg.n_layers - 1
    splits = any(site.layer == last and site.kind in READS_ATTENTION_INPUT for site in sites)
    if known and positions == "all" and not splits:
        yield {"short": True}


def _longest(split: TaskSplit) -> Int[Tensor, "batch pos"]:
    """A few of the longest prompts: what goes wrong only beyond some length (a sliding window) goes wrong there."""
    length = max(len(tokens) for tokens in split.tokens)
    return torch.stack([tokens for tokens in split.tokens if len(tokens) == length][:_CHECKED_PROMPTS])


def _run(
    host: Host, units: Mapping[str, Units], road: Road, tokens: Tensor, masks: Masks
) -> Float[Tensor, "circuit batch vocab"]:
    """Last-position logits with the masked units at zero."""
    values = {name: torch.zeros(1, 1, mask.shape[1]) for name, mask in masks.items()}
    runner = Runner(host, units, road)
    with torch.no_grad():
        return runner.logits(runner.ground(tokens), masks, values)


def _try(host: Host, units: Mapping[str, Units], road: Road, tokens: Tensor, masks: Masks) -> Tensor | None:
    """`_run`, or None where it fails: a user's hook may want more positions than a short run has."""
    try:
        return _run(host, units, road, tokens, masks)
    except Exception:
        return None


def _adds(host: Host, site: Site, units: Units) -> bool:
    """Whether what the site adds to the residual stream is a function of z alone."""
    of_z = isinstance(units, Factors) or (isinstance(units, CoderUnits) and units.writes == "output")
    return of_z and not norms_output(host, site)


def _agree(found: Tensor | None, plain: Tensor) -> bool:
    tolerance = max(_AGREES, 8 * torch.finfo(plain.dtype).eps)
    return found is not None and bool((found - plain).abs().max() <= tolerance * plain.abs().max())


def _moves_rightly(host: Host, units: Mapping[str, Units], road: Road, tokens: Tensor, half: Masks) -> bool:
    """Whether the known site's units alone do by this road what they do plainly, judged by the size of what they do.

    Beside the logits a wrong effect may look like rounding, where the site does little; then the road is not taken.
    """
    assert road.known is not None
    alone = {name: mask if name == road.known.name else torch.zeros_like(mask) for name, mask in half.items()}
    nothing = {name: torch.zeros_like(mask) for name, mask in half.items()}
    plain, whole = (_run(host, units, Road(road.positions), tokens, masks) for masks in (alone, nothing))
    found = _try(host, units, road, tokens, alone)
    if found is None:
        return False
    effect = (plain - whole).abs().max()
    return bool((found - plain).abs().max() <= _EFFECT * effect) and _agree(found, plain)
