"""FastForward: how interventions on a bucket of prompts are run without computing again what they share.

1. Nothing before the first replaced layer depends on an intervention: what enters that layer is computed once per bucket, and
   once for all replacements that begin there (dense_cache.py).
2. With positions="scoring" only the last position changes, so the keys and values of all others are kept, too. That is
   exact, because attention is causal.
3. Where the first replaced layer holds mlp_out alone, its z is the same in every run, and its output is added to the
   residual stream: what leaves the layer is the shared residual plus (z' - z) @ write, and runs start a layer later.
4. Only the last position's logits are wanted: the last block computes of the others keys and values alone.
5. Many interventions are run at once: the prompts are repeated, one copy per intervention. Their attention reads the kept
   keys and values where they lie, and copies none (`Host.share_prefix`).
6. Prompts of several lengths run together behind a padded prefix (`Host.join_prefixes`).

Each is exact where a host is built as most are, but not every host is (a norm may follow the MLP, attention may look both
ways). So `find_fast_forward` runs a few prompts plainly and by each shortcut, and keeps those that agree.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from swd_lens.base.interrupts import Undo
from swd_lens.circuits.ablation import replaced
from swd_lens.circuits.dense_cache import DenseCache
from swd_lens.hosts import Host, Start
from swd_lens.hosts.recording import recording
from swd_lens.hosts.sites import READS_ATTENTION_INPUT, Site, hook_name
from swd_lens.hosts.verified import verified
from swd_lens.tasks.task import TaskSplit
from swd_lens.units.coder import CoderUnits, Units
from swd_lens.units.factors import Factors

_CHECKED_PROMPTS = 4
# Of the largest change of a logit that half of the known site's units make.
_EFFECT = 0.02

# What is put in place of z: per site (batch or 1, pos or 1, unit).
Values = Mapping[str, Float[Tensor, "_batch _pos _unit"]]
# Which units are replaced, or to which share of the way: per site one row per intervention.
Masks = Mapping[str, Bool[Tensor, "circuit _unit"] | Float[Tensor, "circuit _unit"]]


@dataclass(frozen=True)
class FastForward:
    """Shortcuts of runs."""

    positions: str  # "scoring" (only the last position is intervened on) or "all"
    layer: int = 0  # runs start at this block; 0: from the tokens
    known: Site | None = None  # the one site of block layer - 1, whose z is known before a run starts; or None
    keeps_prefix: bool = False  # whether all positions but the last are run once (positions="scoring" only)
    shares: bool = False  # whether attention reads the kept positions without a copy for each intervention
    joins: bool = False  # whether prompts of several lengths run together behind it
    short: bool = False  # whether the last block computes of all positions but the last only keys and values
    begins: int = 0  # what enters this block is kept for other replacements, too; 0: nothing is


@dataclass(frozen=True)
class Shared:
    """State that all interventions on the same prompts share."""

    tokens: Int[Tensor, "batch pos"]
    prefix: Any = None  # what later positions need of all but the last, see `Host.freeze_prefix`
    start: Start | None = None  # the residual stream where runs take up
    z: Float[Tensor, "batch _pos unit"] | None = None  # of the known site


class Runner:
    """Runs interventions on attached units with some fast_forward. dense: what is known of the dense host."""

    def __init__(self, host: Host, units: Mapping[str, Units], fast_forward: FastForward, dense: DenseCache | None = None):
        self.host, self.units, self.fast_forward = host, units, fast_forward
        self.dense = DenseCache(0) if dense is None else dense
        points = host.model.hook_dict
        self._points = {site: points[hook_name(site)] for site in units}

    def share(self, tokens: Int[Tensor, "batch pos"]) -> Shared:
        """Compute once what interventions on these prompts share."""
        host, layer, known = self.host, self.fast_forward.layer, self.fast_forward.known
        with torch.no_grad():
            # The prefix, and where its last position (without one, every position) takes up; None: at the tokens.
            begins, keeps = self.fast_forward.begins, self.fast_forward.keeps_prefix
            begun = self.dense.begun(host, tokens, begins) if begins and keeps else None
            prefix = host.freeze_prefix(tokens, begun) if keeps else None
            start = None if begun is None else Start(begins, begun.last)
            if begins and prefix is None:  # prompts of one token, too
                start = Start(begins, self.dense.residual(host, tokens, begins))
            if not layer:
                return Shared(tokens, prefix)
            with recording(host, units=[known] if known else []) as seen:
                residual = host.residual(tokens, layer, prefix, start)
            kept = host.repeat_prefix(prefix, 1, layer) if prefix is not None else None
            return Shared(tokens, kept, Start(layer, residual), seen.units[known.name] if known else None)

    def join(self, parts: Sequence[Shared]) -> Shared:
        """What was computed for prompts of several lengths, for runs of all of them together."""
        longest = max(part.tokens.shape[1] for part in parts)
        tokens = torch.cat([F.pad(part.tokens, (longest - part.tokens.shape[1], 0)) for part in parts])
        starts = [part.start for part in parts if part.start is not None]
        z = [part.z for part in parts if part.z is not None]
        start = Start(starts[0].layer, torch.cat([start.residual[:, -1:] for start in starts])) if starts else None
        prefix = self.host.join_prefixes([part.prefix for part in parts])
        return Shared(tokens, prefix, start, torch.cat([each[:, -1:] for each in z]) if z else None)

    def logits(
        self, shared: Shared, masks: Masks, values: Values, token_ids: Int[Tensor, " answer"] | None = None
    ) -> Float[Tensor, "circuit batch _vocab"]:
        """Last-position logits of every prompt under every intervention, in one forward.

        Args:
            masks: site -> (circuit, unit), True where a unit is replaced; real numbers are shares of the way, and the logits
                have a gradient by them where they ask for one.
            values: site -> what replaced units are set to, broadcast over prompts and positions.
            token_ids: only these tokens' logits; None = all.
        """
        host, known, start = self.host, self.fast_forward.known, shared.start
        circuits, batch = len(next(iter(masks.values()))), len(shared.tokens)
        if start is not None:
            residual = start.residual.expand(circuits, *start.residual.shape)
            if known is not None and shared.z is not None:
                residual = self._moved(residual, known, shared.z, masks[known.name], values[known.name])
            start = Start(start.layer, residual.flatten(0, 1))
        tokens, prefix = shared.tokens.repeat(circuits, 1), shared.prefix
        prefix = host.repeat_prefix(prefix, circuits, self.fast_forward.layer) if prefix is not None else None
        undo = Undo()
        with undo, undo:
            for site, mask in masks.items():
                if (known is None or site != known.name) and mask.any():
                    # Not model.hooks(): its end goes through every hook point of the model.
                    hook = partial(self._replaced, mask, values[site])
                    undo.push(self._points[site].register_forward_hook(hook).remove)
            if self.fast_forward.shares:
                host.share_prefix(undo.push)
            logits = host.last_logits(tokens, prefix, start=start, token_ids=token_ids, short=self.fast_forward.short)
        return logits.view(circuits, batch, -1)

    def _moved(
        self, residual: Tensor, known: Site, z: Tensor, mask: Tensor, value: Tensor
    ) -> Float[Tensor, "circuit batch pos d"]:
        """The residual stream after the known site wrote z' in place of z (in float32: z' - z may be small)."""
        before = z.float().expand(len(mask), *z.shape)
        change = replaced(before, mask[:, None], value.to(z).float(), self.fast_forward.positions) - before
        units = self.units[known.name]
        if isinstance(units, Factors):
            written = change @ units.write.to(change)
        else:
            assert isinstance(units, CoderUnits)
            written = units.decode((z + change).to(z)).float() - units.decode(z).float()
        return (residual.float() + written).to(residual)

    def _replaced(self, mask: Tensor, value: Tensor, point: Any, args: Any, z: Float[Tensor, "rows pos unit"]) -> Tensor:
        """A forward hook on a hook point: z with the masked units of every intervention replaced."""
        by_circuit = z.view(len(mask), -1, *z.shape[1:])
        # In a short last block there is the last position only.
        return replaced(by_circuit, mask[:, None], value, self.fast_forward.positions).flatten(0, 1)


def find_fast_forward(
    host: Host,
    sites: list[Site],
    units: Mapping[str, Units],
    split: TaskSplit,
    positions: str,
    known: bool = True,
    dense: DenseCache | None = None,
) -> FastForward:
    """The shortcuts with which a few prompts of the split give what they give plainly, with half of the units set to zero. Warns
    where one that should hold on every host does not, or runs with it fail.

    sites, units: what is attached now; known: whether the first site's z may be taken as known beforehand, and the last block cut
    short (not where z is wanted at all positions, or gradients by it); dense: what is known of the dense host, where other
    replacements are run on the same prompts: shortcuts found for one of them hold for those of the same sites and kind of units.
    """
    find = partial(_agreeing, host, sites, units, split, positions, known, dense)
    of_sites = [units[site.name] for site in sites]
    factors = [each for each in of_sites if isinstance(each, Factors)]
    if dense is None or len(factors) < len(of_sites):  # what another coder does is its own
        return find()
    kinds = tuple((site.name, f.offsets is not None) for site, f in zip(sites, factors, strict=True))
    return dense.of_split(split, ("fast_forward", kinds, positions, known), find)


def _agreeing(
    host: Host,
    sites: list[Site],
    units: Mapping[str, Units],
    split: TaskSplit,
    positions: str,
    known: bool,
    dense: DenseCache | None,
) -> FastForward:
    """The shortcuts with which a few prompts, half of the units at zero, give what they give plainly."""
    # A few of the longest prompts: what goes wrong only beyond some length (a sliding window) goes wrong there.
    length = max(len(tokens) for tokens in split.tokens)
    tokens = torch.stack([tokens for tokens in split.tokens if len(tokens) == length][:_CHECKED_PROMPTS])

    def run(
        fast_forward: FastForward, masks: Masks, tokens: Int[Tensor, "batch pos"] = tokens
    ) -> Float[Tensor, "circuit batch vocab"]:
        """Last-position logits with the masked units at zero."""
        values = {name: torch.zeros(1, 1, mask.shape[1], dtype=torch.float32) for name, mask in masks.items()}
        runner = Runner(host, units, fast_forward, dense)
        with torch.no_grad():
            return runner.logits(runner.share(tokens), masks, values)

    best = plainly = FastForward(positions)
    # Two interventions, so that something is shared: either half of the units.
    half = {name: (torch.arange(of_site.n_units) + torch.tensor([[0], [1]])) % 2 == 0 for name, of_site in units.items()}
    plain = run(plainly, half)
    for step in _steps(host, sites, units, positions, known, dense is not None):
        tried = replace(best, **step)
        if tried.known is best.known:
            agrees = verified(partial(run, tried, half), plain, shortcut=step)
        else:  # what a site's units write need not be the whole of their effect: nothing to warn of
            agrees = verified(partial(run, tried, half), plain)
        if agrees and tried.known is not None and tried.known is not best.known:
            # The known site's units alone, judged by the size of what they do: beside the logits a wrong effect may look like
            # rounding, where the site does little.
            nothing = {name: torch.zeros_like(mask) for name, mask in half.items()}
            alone = nothing | {tried.known.name: half[tried.known.name]}
            expected = run(plainly, alone)
            most = _EFFECT * (expected - run(plainly, nothing)).abs().max()
            agrees = verified(partial(run, tried, alone), expected, within=most)
        best = tried if agrees else best
    shorter = [tokens for tokens in split.tokens if 1 < len(tokens) < length]
    if best.shares and shorter and host.freeze_prefix(tokens[:1]) is not None:
        # Together with a few of the shortest prompts.
        least = min(len(each) for each in shorter)
        few = torch.stack([each for each in shorter if len(each) == least][:_CHECKED_PROMPTS])
        values = {name: torch.zeros(1, 1, mask.shape[1], dtype=torch.float32) for name, mask in half.items()}
        both, runner = [tokens, few], Runner(host, units, replace(best, joins=True), dense)

        def together() -> Float[Tensor, "circuit batch vocab"]:
            return runner.logits(runner.join([runner.share(each) for each in both]), half, values)

        plain = torch.cat([plain, run(plainly, half, few)], dim=1)
        with torch.no_grad():
            best = replace(best, joins=verified(together, plain, shortcut={"joins": True}))
    return best


def _steps(
    host: Host, sites: list[Site], units: Mapping[str, Units], positions: str, known: bool, shares: bool
) -> Iterator[dict[str, Any]]:
    """Changes to a FastForward that may be tried, one after the other."""
    layer = min(site.layer for site in sites)
    if positions == "scoring":
        yield {"keeps_prefix": True}
        undo = Undo()
        with undo, undo:
            can_share = host.share_prefix(undo.push)  # in some layers
        if can_share:
            yield {"keeps_prefix": True, "shares": True}
    if layer:
        yield {"layer": layer, "begins": layer} if shares else {"layer": layer}
    first = [site for site in sites if site.layer == layer]
    if known and len(first) == 1 and first[0].kind == "mlp_out":
        of_site = units[first[0].name]
        # What the site adds to the residual stream has to be a function of z alone.
        of_z = isinstance(of_site, Factors) or (isinstance(of_site, CoderUnits) and of_site.writes == "output")
        if of_z and host.norm_behind(first[0]) is None:
            yield {"layer": layer + 1, "known": first[0]}
    # Units that read the attention's input would see the last block's positions in two parts.
    last = host.model.cfg.n_layers - 1
    splits = any(site.layer == last and site.kind in READS_ATTENTION_INPUT for site in sites)
    if known and positions == "all" and not splits:
        yield {"short": True}
