"""responses: what one unit of z, at one position, changes at every unit and answer of the frozen run.

With the norms' scales, attention patterns and slopes of the activation functions held at a run (frozen.py), a host is linear. So
one change per source is sent through it, many sources side by side:

1. Where it begins, the source's z is changed by 1 at its position.
2. Block by block the change of the residual stream is read through the norms; through the values and the pattern; through both
   sides of the MLP and the slopes. A site with units hands it on by all its units, drawn or not; a dense one by its matrix.
3. On the way the drawn units' changes of z are read off, at the end those of the answers' centred logits.

Nothing is left out but what the held parts do when they move: the change of a true run less this is theirs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.analysis.graph.edges import layout_of, value_columns
from swd_lens.analysis.graph.frozen import PRE_ACTIVATION, FrozenRun, by_head
from swd_lens.base.machine import available_bytes
from swd_lens.base.progress import tqdm
from swd_lens.hosts import sites_of
from swd_lens.hosts.sites import split_name
from swd_lens.units import UnitSet

_MOST_BYTES = 2**28  # of one batch; more is no faster on a CPU
_SHARE = 0.25  # of the free memory


def room(device: torch.device) -> int:
    """The bytes that one batch of changes, or of runs, may take."""
    free = available_bytes(device)
    return _MOST_BYTES if free is None else min(_MOST_BYTES, int(_SHARE * free))


class ResponseSlot(NamedTuple):
    """A unit at a position of the prompt."""

    site: str
    unit: int
    position: int


def responses(
    units: UnitSet,
    run: FrozenRun,
    sources: Sequence[ResponseSlot],
    targets: Sequence[ResponseSlot],
    answers: Sequence[int] = (),
    *,
    progress: bool = False,
) -> Float[Tensor, "source target_and_answer"]:
    """The change of every target's z, then of every answer's logit less the vocabulary's mean, per unit of each source's z.

    Args:
        run: of one prompt with all of `units` attached, at every position, with the patterns and slopes of every layer.
        sources, targets: of the attached sites.
        answers: token ids; their logits are those before a soft cap.
        progress: show a bar.
    """
    bare = replace(run, slopes={}, patterns={})  # with them the layout would multiply out matrices
    vectors = layout_of(units, {}, bare, answers=answers, static=False, bounded=False).groups[-1].read if answers else None
    place_of = {site.name: place for place, site in enumerate(units.sites)}  # in the order of execution
    order = sorted(range(len(sources)), key=lambda i: (place_of[sources[i].site], sources[i].position, sources[i].unit))
    response = torch.zeros(len(sources), len(targets) + len(answers), dtype=torch.float32)
    widest = max(site.d_in + site.d_out for site in units.host.sites())
    at_once = max(1, room(torch.device("cpu")) // (len(run.embedded) * widest * 4 * 4))
    batches = [order[i : i + at_once] for i in range(0, len(order), at_once)]
    for batch in tqdm(batches, desc="frozen paths", disable=not progress or len(batches) == 1, leave=False):
        change = _Change(units, run, [sources[i] for i in batch], targets)
        response[batch, : len(targets)] = change.of_targets
        if vectors is not None:
            response[batch, len(targets) :] = change.stream[:, -1] @ vectors
    return response


class _Change:
    """The changes that some sources make, row by row; to make one sends them through all blocks.

    Attributes:
        stream: (source, pos, d_model) of the residual stream.
        of_targets: (source, target) of the targets' z.
    """

    def __init__(self, units: UnitSet, run: FrozenRun, sources: Sequence[ResponseSlot], targets: Sequence[ResponseSlot]):
        self.units, self.run = units, run
        self.by_name = {site.name: site for site in units.host.sites()}
        self.sources = _by_site(sources)
        self.targets = _by_site(targets)
        n_positions, d_model = run.embedded.shape
        self.stream = torch.zeros(len(sources), n_positions, d_model, dtype=torch.float32)
        self.of_targets = torch.zeros(len(sources), len(targets), dtype=torch.float32)
        first = min((split_name(place.site)[0] for place in sources), default=0)
        for layer in range(first, 1 + max(site.layer for site in self.by_name.values())):
            entering, site = self.stream, self.by_name.get(f"blocks.{layer}.attn_o")
            if site is not None and (layer, "attn") in run.readings:
                h = run.readings[layer, "attn"].push(entering)
                for kind in ("attn_q", "attn_k"):  # they end at the pattern
                    self._units(f"blocks.{layer}.{kind}", h)
                packed = f"blocks.{layer}.attn_qkv"
                if packed in units.factors:
                    values = self._units(packed, h) @ value_columns(units.factors[packed].write, site.d_in).detach().float().cpu()
                else:
                    values = self._out(f"blocks.{layer}.attn_v", h)
                v = by_head(values, int(units.host.model.cfg.n_heads), site.d_in)
                self.stream = entering + self._write(site.name, torch.einsum("hds,bshe->bdhe", run.patterns[layer], v).flatten(2))
            site, reading = self.by_name.get(f"blocks.{layer}.mlp_out"), run.readings.get((layer, "mlp"))
            if site is not None and reading is not None:
                h = reading.push(self.stream if reading.behind_attention else entering)
                post = torch.zeros(*h.shape[:2], site.d_in, dtype=torch.float32)
                for name in (f"blocks.{layer}.{kind}" for kind in PRE_ACTIVATION):
                    if name in run.slopes:
                        post += run.slopes[name] * self._out(name, h)
                self.stream = self.stream + self._write(site.name, post)

    def _write(self, name: str, h: Tensor) -> Tensor:
        """The change of the residual stream by a change of a site's input."""
        output, norm = self._out(name, h), self.run.writings.get(name)
        return output if norm is None else norm.push(output)

    def _out(self, name: str, h: Tensor) -> Tensor:
        """The change of a site's output by one of its input: by its units, or by its matrix where it has none."""
        if name in self.units.factors:
            return self._units(name, h) @ self.units.factors[name].write.detach().float().cpu()
        (site,) = sites_of(self.units.host, [name])
        return h @ self.units.host.weight(site).cpu()

    def _units(self, name: str, h: Tensor) -> Tensor:
        """The change of all z of a site, its sources' own put in; those of targets are kept."""
        if name not in self.units.factors:
            return h
        z = h @ self.units.factors[name].read.detach().float().cpu()
        rows, places = self.sources.get(name, ([], []))
        if rows:
            z[rows, [place.position for place in places], [place.unit for place in places]] += 1.0
        columns, places = self.targets.get(name, ([], []))
        if columns:
            self.of_targets[:, columns] = z[:, [place.position for place in places], [place.unit for place in places]]
        return z


def _by_site(places: Sequence[ResponseSlot]) -> Mapping[str, tuple[list[int], list[ResponseSlot]]]:
    """Site -> the numbers of its places, and these."""
    by_site: dict[str, tuple[list[int], list[ResponseSlot]]] = {}
    for i, place in enumerate(places):
        numbers, of_site = by_site.setdefault(place.site, ([], []))
        numbers.append(i)
        of_site.append(place)
    return by_site
