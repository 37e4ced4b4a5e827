"""Edges: the weights between the nodes of a unit graph, block by block of two groups of nodes, as matrix products.

1. `layout_of` puts nodes into groups, in execution order: tokens, the drawn units of every site, answers. A group has the vectors
   that its nodes read and write.
2. `weights` pulls every target's read vectors back (as cotangents) to what writes them:

   a. attn_q, attn_k, attn_v, attn_qkv, mlp_in, mlp_gate: through the norm to the residual stream.
   b. attn_o (frozen attention only): head by head, through pattern[head, dest, src] to the V units of its layer where the graph
      has some, else through W_V and the norm to the residual stream at the source position.
   c. mlp_out (with a prompt only): times the slope of the activation function, to the mlp_in and mlp_gate units of its layer
      where the graph has some, else through W_in (and W_gate) and the norm to the residual stream.
   d. The answers' logits, before a soft cap: through the final norm to the residual stream.

   On the residual stream a cotangent meets the write vectors of every earlier attn_o and mlp_out, through the norm behind the
   site where there is one, and the token embeddings.

weight[i, j] = write_i . cotangent_j, so that z_i * weight[i, j] is what unit i gives to z_j. Exact for a, b and d once norms and
patterns are held; c is a linearization.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from swd_lens.analysis.graph.frozen import PRE_ACTIVATION, FrozenRun, by_head, final_reading, norm_before
from swd_lens.hosts import sites_of
from swd_lens.hosts.sites import RESIDUAL_MATRICES, Site
from swd_lens.units import UnitSet

# Edge kinds by number: a and d, b, c.
KINDS = ("", "residual", "attention", "mlp")
RESIDUAL, ATTENTION, MLP = 1, 2, 3
TOKEN, UNIT, LOGIT = "token", "unit", "logit"
# A dense table of weights: 6,000 nodes are 144 MB each for weights, contributions and shares.
_MOST_NODES = 6_000


class Contrast(NamedTuple):
    """The meaning of an answer's node: the mean logit of `right` less that of `wrong`, or of the whole vocabulary where there are
    none."""

    right: tuple[int, ...]
    wrong: tuple[int, ...] = ()

    def of(self, values: Float[Tensor, "*any vocab"]) -> Float[Tensor, "*any"]:
        """The contrast of logits, or of the columns of an unembedding."""
        others = values[..., list(self.wrong)] if self.wrong else values
        return values[..., list(self.right)].mean(-1) - others.mean(-1)


@dataclass(frozen=True)
class NodeGroup:
    """Nodes that stand side by side: the drawn units of one site at every position, the tokens, or the answers.

    Attributes:
        kind: "token", "unit" or "logit".
        start: number of its first node; nodes run position by position, item by item.
        positions: how many positions (answers stand at one).
        items: (unit,) numbers of the units, or the answers' token ids (numbers of contrasts); one per position for tokens.
        read: (d_in, item) what units read of their site's input, and the answers' centred logits of the residual stream.
        write: (item, d_out) what units write, where a norm stands behind the site through that norm, its scale left out; of
            tokens (position, d_model), the embeddings.
        site: of units.
        contrasts: of answers.
    """

    kind: str
    start: int
    positions: int
    items: tuple[int, ...]
    read: Float[Tensor, "_d_in _item"] | None = None
    write: Float[Tensor, "_item _d_out"] | None = None
    site: Site | None = None
    contrasts: tuple[Contrast, ...] = ()

    @property
    def size(self) -> int:
        return self.positions * len(self.items)

    @property
    def nodes(self) -> slice:
        return slice(self.start, self.start + self.size)


@dataclass(frozen=True)
class Layout:
    """Groups of nodes, and what the paths between them run through."""

    groups: list[NodeGroup]  # in execution order
    run: FrozenRun  # frozen, its rows those of the drawn positions; of a graph without a prompt only the norms count
    static: bool  # no prompt
    n_heads: int
    # site -> (d_in, d_out) of what units are not drawn of but a path runs through: W, or read @ write
    matrices: Mapping[str, Float[Tensor, "_d_in _d_out"]] = field(default_factory=dict)
    cosine: bool = False  # vectors on the residual stream are taken with length 1

    def group(self, layer: int, *kinds: str) -> NodeGroup | None:
        """The group of a layer's site of one of these kinds, if some of its units are drawn."""
        groups = (g for g in self.groups if g.site is not None and g.site.layer == layer and g.site.kind in kinds)
        return next(groups, None)

    def scaled(self, vectors: Tensor) -> Tensor:
        return torch.nn.functional.normalize(vectors, dim=-1) if self.cosine else vectors

    def inverse_behind(self, group: NodeGroup) -> Float[Tensor, " _pos"]:
        """1 / scale at every position of the norm between a group's site and the residual stream; 1 where there is none."""
        norm = None if group.site is None or self.cosine else self.run.writings.get(group.site.name)
        return torch.ones(group.positions, dtype=torch.float32) if norm is None else norm.inverse


def layout_of(
    units: UnitSet,
    drawn: Mapping[Site, Sequence[int]],
    run: FrozenRun,
    *,
    answers: Sequence[int | Contrast],
    static: bool,
    cosine: bool = False,
    bounded: bool = True,
) -> Layout:
    """The nodes of a graph: of drawn units and answers, and with a prompt of tokens, at every position of the run.

    Args:
        answers: tokens, each less the mean over the vocabulary, or contrasts, which are numbered.
        bounded: refuse more nodes than a table of all weights may have; False where no such table is made (`into`).

    Raises ValueError: too many nodes.
    """
    host, positions = units.host, len(run.embedded) if not static else 1
    pairs = {name: (f.read.detach().float().cpu(), f.write.detach().float().cpu()) for name, f in units.factors.items()}
    groups = [] if static else [NodeGroup(TOKEN, 0, positions, (0,), write=run.embedded)]
    for site, indices in drawn.items():
        read, write = pairs[site.name]
        start = groups[-1].nodes.stop if groups else 0
        norm, write = run.writings.get(site.name), write[indices]
        write = write if norm is None else norm.through(write)
        groups.append(NodeGroup(UNIT, start, positions, tuple(indices), read[:, indices], write, site))
    if answers:
        contrasts = tuple(each if isinstance(each, Contrast) else Contrast((each,)) for each in answers)
        items = tuple(i if isinstance(each, Contrast) else each for i, each in enumerate(answers))
        # What the answers' logits, before a soft cap, read of the residual stream.
        _, unembedding = host.readout()
        columns = torch.stack([contrast.of(unembedding) for contrast in contrasts], 1).float().cpu()
        reading = final_reading(host, run.leaving[-1:])
        pulled = reading.pull(columns.T)
        read = (pulled if static else pulled * reading.inverse[:, None]).T
        groups.append(NodeGroup(LOGIT, groups[-1].nodes.stop, 1, items, read, contrasts=contrasts))
    n_nodes = groups[-1].nodes.stop
    if bounded and n_nodes > _MOST_NODES:
        raise ValueError(
            f"this graph would have {n_nodes:,} nodes ({positions} positions), and can have {_MOST_NODES:,}; take fewer "
            "units, a shorter prompt, or attention='none'"
        )
    return Layout(groups, run, static, int(host.model.cfg.n_heads), _matrices(units, pairs, drawn, run), cosine)


def _matrices(
    units: UnitSet, pairs: Mapping[str, tuple[Tensor, Tensor]], drawn: Mapping[Site, Sequence[int]], run: FrozenRun
) -> dict[str, Tensor]:
    """Matrices that a path runs through: as they are in the run, that is the product where a site is replaced."""
    names = {site.name for site in drawn}
    passed = [name for name in run.slopes if name not in names]
    for layer in run.patterns:
        if not {f"blocks.{layer}.attn_v", f"blocks.{layer}.attn_qkv"} & names:
            passed.append(f"blocks.{layer}.attn_v")
    matrices: dict[str, Tensor] = {}
    for site in sites_of(units.host, passed) if passed else []:
        packed = f"blocks.{site.layer}.attn_qkv"
        if site.name in pairs:
            matrices[site.name] = pairs[site.name][0] @ pairs[site.name][1]
        elif site.kind == "attn_v" and packed in pairs:
            matrices[site.name] = pairs[packed][0] @ pairs[packed][1][:, -site.d_out :]
        else:
            matrices[site.name] = units.host.weight(site).cpu()
    return matrices


# ---------------------------------------------------------------------------------------------- weights


class _Block(NamedTuple):
    """Edges from one group: values as (src, i, dest, j), as (i, j, pos) within positions, or as (i, j) at the last position."""

    source: NodeGroup
    kind: int
    values: Tensor


def weights(layout: Layout) -> tuple[Float[Tensor, "node node"], UInt8[Tensor, "node node"]]:
    """(source, target) weights, and the kind of every pair as a number of KINDS (0: no edge is possible)."""
    n_nodes = layout.groups[-1].nodes.stop
    table, kinds = torch.zeros(n_nodes, n_nodes, dtype=torch.float32), torch.zeros(n_nodes, n_nodes, dtype=torch.uint8)
    for target in layout.groups:
        for block in _blocks(layout, target):
            for whole, values in ((table, block.values), (kinds, torch.tensor(block.kind, dtype=torch.uint8))):
                view = whole[block.source.nodes, target.nodes].unflatten(0, (block.source.positions, -1))
                view = view.unflatten(2, (target.positions, -1))
                if block.values.ndim == 3:
                    view = view.diagonal(dim1=0, dim2=2)
                elif block.values.ndim == 2:
                    view = view[-1, :, -1]
                view.copy_(values)
    return table, kinds


def into(layout: Layout, target: NodeGroup) -> Iterator[tuple[NodeGroup, str, Float[Tensor, "_pos _item"]]]:
    """Weights into the last position of a group of one unit: a source group, the kind of edge, and (position, item) weights.

    Within one position the source has one row of weights, those of the last position.
    """
    for block in _blocks(layout, target):
        values = block.values[:, :, -1, 0] if block.values.ndim == 4 else block.values[:, 0, -1][None]
        yield block.source, KINDS[block.kind], values


def _blocks(layout: Layout, target: NodeGroup) -> Iterator[_Block]:
    """The edges into one group."""
    site, run = target.site, layout.run
    if target.read is None:  # tokens
        return
    if site is None:  # answers: the last position alone is unembedded
        cotangent = layout.scaled(target.read.T)
        for source in layout.groups:
            if source.kind == TOKEN:
                yield _Block(source, RESIDUAL, (run.embedded[-1] @ cotangent.T)[None])
            elif source.write is not None and source.site is not None and source.site.kind in RESIDUAL_MATRICES:
                written = layout.scaled(source.write) * layout.inverse_behind(source)[-1]
                yield _Block(source, RESIDUAL, written @ cotangent.T)
    elif norm := norm_before(site.kind):
        reading = run.readings[site.layer, norm]
        cotangent = reading.inverse[:, None, None] * reading.pull(target.read.T)
        yield from _at_same_position(layout, site, norm, cotangent, RESIDUAL)
    elif site.kind == "attn_o" and site.layer in run.patterns:
        for paths in head_paths(layout, site, target.read):
            yield _Block(paths.source, ATTENTION, paths.summed(run.patterns[site.layer]))
    elif site.kind == "mlp_out" and not layout.static:
        through: Tensor | None = None
        for kind in PRE_ACTIVATION:
            source, name = layout.group(site.layer, kind), f"blocks.{site.layer}.{kind}"
            if name not in run.slopes:
                continue
            # (pos, unit, d_mlp): what the units of mlp_out read of the pre-activations.
            neurons = run.slopes[name][:, None, :] * target.read.T
            if source is not None and source.write is not None:
                yield _Block(source, MLP, torch.einsum("ik,pjk->ijp", source.write, neurons))
            else:
                pulled = neurons @ layout.matrices[name].T
                through = pulled if through is None else through + pulled
        reading = run.readings.get((site.layer, "mlp"))
        if through is not None and reading is not None:
            yield from _at_same_position(layout, site, "mlp", reading.inverse[:, None, None] * reading.pull(through), MLP)


class HeadPaths(NamedTuple):
    """Paths from a group of sources to units of attn_o, head by head: pattern[head, dest, src] * met * scale[src] is the
    weight."""

    source: NodeGroup
    # (item, unit, head), the dot product of what a source writes to the head's values and what a unit reads of the head's output;
    # of tokens (src, unit, head)
    met: Float[Tensor, "_item _unit head"]
    scale: Float[Tensor, " _src"] | None = None  # (src,) 1/scale of the norms on the way; None where values are units themselves

    def summed(self, pattern: Float[Tensor, "head _dest _src"]) -> Float[Tensor, "_src _item _dest _unit"]:
        """Weights through all heads."""
        if self.scale is None:
            return torch.einsum("hds,ijh->sidj", pattern, self.met)
        if self.source.kind == TOKEN:
            return torch.einsum("hds,sjh,s->sdj", pattern, self.met, self.scale)[:, None]
        return torch.einsum("hds,ijh,s->sidj", pattern, self.met, self.scale)

    def through_each(
        self, pattern: Float[Tensor, "head _dest _src"], src: int, item: int, dest: int, unit: int
    ) -> Float[Tensor, " head"]:
        """The weight of one edge through each head; they add up to the weight."""
        met = self.met[src if self.source.kind == TOKEN else item, unit]
        return pattern[:, dest, src] * met * (1.0 if self.scale is None else self.scale[src])


def head_paths(layout: Layout, site: Site, read: Float[Tensor, "d_z unit"]) -> Iterator[HeadPaths]:
    """The paths to units of attn_o through the heads of its layer, from each group of sources; see b above."""
    n_heads, width = layout.n_heads, len(read)
    reads = read.T.unflatten(-1, (n_heads, -1))  # (unit, head, d_head)
    source = layout.group(site.layer, "attn_v", "attn_qkv")
    if source is not None and source.site is not None and source.write is not None:
        values = value_columns(source.write, width) if source.site.kind == "attn_qkv" else source.write
        yield HeadPaths(source, torch.einsum("ihe,jhe->ijh", by_head(values, n_heads, width), reads))
        return
    reading = layout.run.readings[site.layer, "attn"]
    matrix = by_head(layout.matrices[f"blocks.{site.layer}.attn_v"], n_heads, width)  # (d_model, head, d_head)
    pulled = reading.pull(torch.einsum("xhe,jhe->jhx", matrix, reads))
    for source in _writers_before(layout, site, "attn"):
        assert source.write is not None
        scale = reading.inverse * layout.inverse_behind(source)
        yield HeadPaths(source, torch.einsum("ix,jhx->ijh", source.write, pulled), scale)


def value_columns(packed: Float[Tensor, "*n _width"], width: int) -> Float[Tensor, "*n _values"]:
    """The values' columns of what a packed attn_qkv writes: q has `width` columns, k and v share the rest."""
    return packed[..., -((packed.shape[-1] - width) // 2) :]


def _at_same_position(
    layout: Layout, site: Site, norm: str, cotangent: Float[Tensor, "pos unit d_model"], kind: int
) -> Iterator[_Block]:
    """Edges from all that writes the residual stream before a target, at the target's own position."""
    cotangent = layout.scaled(cotangent)
    for source in _writers_before(layout, site, norm):
        if source.kind == TOKEN:
            yield _Block(source, kind, torch.einsum("px,pjx->jp", source.write, cotangent)[None])
        else:
            assert source.write is not None
            met = torch.einsum("ix,pjx->ijp", layout.scaled(source.write), cotangent)
            yield _Block(source, kind, met * layout.inverse_behind(source))


def _writers_before(layout: Layout, site: Site, norm: str) -> Iterator[NodeGroup]:
    """The tokens, and the sites that write to what a block's norm ("attn" or "mlp") reads."""
    for group in layout.groups:
        writer = group.site
        if group.kind == TOKEN:
            yield group
        elif writer is not None and writer.kind in RESIDUAL_MATRICES:
            beside = writer.layer == site.layer and writer.kind == "attn_o" and norm == "mlp"
            if writer.layer < site.layer or (beside and layout.run.readings[site.layer, "mlp"].behind_attention):
                yield group
