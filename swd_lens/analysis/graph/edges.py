"""edges: the weights between the nodes of a unit graph, block by block of two sites, as matrix products.

A target's z is pulled back, as a vector (a cotangent), to what writes it:

1. attn_q, attn_k, attn_v, attn_qkv, mlp_in, mlp_gate: read vector -> through the norm -> residual stream.
2. attn_o (frozen attention only): read vector, head by head -> pattern[head, dest, src] -> the V units of its layer where the
   graph has some, else through W_V and the norm -> residual stream at the source position.
3. mlp_out (with a prompt only): read vector * slope of the activation function -> the mlp_in and mlp_gate units of its layer
   where the graph has some, else through W_in (and W_gate) and the norm -> residual stream.
4. The answers' logits: column of the unembedding -> final norm -> residual stream.

On the residual stream a vector meets the write vectors of every earlier attn_o and mlp_out, and the token embeddings:
weight[i, j] = write_i . cotangent_j, so that z_i * weight[i, j] is what unit i gives to z_j. Exact for 1, 2 and 4 once norms
and patterns are held; 3 is a linearization.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from swd_lens.analysis.graph.frozen import PRE_ACTIVATION, Frozen, Reading, by_head
from swd_lens.hosts.sites import READS_ATTENTION_INPUT, RESIDUAL_MATRICES, Site

# Edge kinds by number, in the order of the list above.
KINDS = ("", "residual", "attention", "mlp")
RESIDUAL, ATTENTION, MLP = 1, 2, 3
TOKEN, LOGIT = "token", "logit"


@dataclass(frozen=True)
class Group:
    """Nodes that stand side by side: the chosen units of one site at every position, the tokens, or the answers.

    Attributes:
        name: site name, "token" or "logit".
        start: number of its first node; nodes run position by position, unit by unit.
        positions: how many positions (answers stand at one).
        items: (unit,) numbers of the units, or the answers' token ids; one per position for tokens.
    """

    name: str
    start: int
    positions: int
    items: tuple[int, ...]
    site: Site | None = None

    @property
    def size(self) -> int:
        return self.positions * len(self.items)

    @property
    def nodes(self) -> slice:
        return slice(self.start, self.start + self.size)


@dataclass(frozen=True)
class Parts:
    """What the edges are made of.

    Attributes:
        groups: in execution order: tokens, sites, answers.
        read, write: site -> vectors of the chosen units.
        matrices: site -> (d_in, d_out) of what units are not drawn of but a path runs through: W, or read @ write.
        run: frozen, its rows cut to the drawn positions; of a static graph only the norms count.
        static: no prompt.
        answers: (answer, d_model) what the answers' centred logits read of the residual stream, behind the final norm.
    """

    groups: list[Group]
    read: Mapping[str, Float[Tensor, "_d_in _unit"]]
    write: Mapping[str, Float[Tensor, "_unit _d_out"]]
    run: Frozen
    static: bool
    n_heads: int
    matrices: Mapping[str, Float[Tensor, "_d_in _d_out"]] = field(default_factory=dict)
    answers: Float[Tensor, "_answer d_model"] | None = None
    cosine: bool = False

    def group(self, layer: int, *kinds: str) -> Group | None:
        """The group of a layer's site of one of these kinds, if some of its units are drawn."""
        found = (g for g in self.groups if g.site is not None and g.site.layer == layer and g.site.kind in kinds)
        return next(found, None)


def weights(parts: Parts) -> tuple[Float[Tensor, "node node"], UInt8[Tensor, "node node"]]:
    """(source, target) weights, and the kind of every pair as a number of KINDS (0: no edge is possible)."""
    n = sum(group.size for group in parts.groups)
    table = torch.zeros(n, n)
    kinds = torch.zeros(n, n, dtype=torch.uint8)
    for target in parts.groups:
        if target.name == LOGIT:
            _into_logits(parts, target, table, kinds)
        elif target.site is None:
            continue
        elif target.site.kind in READS_ATTENTION_INPUT:
            reading = parts.run.attn[target.site.layer]
            _into_reader(parts, target, reading, table, kinds)
        elif target.site.kind in PRE_ACTIVATION:
            reading = parts.run.mlp[target.site.layer]
            _into_reader(parts, target, reading, table, kinds)
        elif target.site.kind == "attn_o" and target.site.layer in parts.run.patterns:
            _into_heads(parts, target, table, kinds)
        elif target.site.kind == "mlp_out" and not parts.static:
            _into_neurons(parts, target, table, kinds)
    return table, kinds


# ---------------------------------------------------------------------------------------------- targets


def _into_logits(parts: Parts, target: Group, table: Tensor, kinds: Tensor) -> None:
    assert parts.answers is not None
    for source in parts.groups:
        # The last position alone is unembedded.
        if source.name == TOKEN:
            block = parts.run.embedded[-1] @ _unit(parts, parts.answers).T
            last = source.start + source.size - 1
            table[last, target.nodes], kinds[last, target.nodes] = block, RESIDUAL
        elif source.site is not None and source.site.kind in RESIDUAL_MATRICES:
            block = _unit(parts, parts.write[source.name]) @ _unit(parts, parts.answers).T
            first = source.start + source.size - len(source.items)
            rows = slice(first, first + len(source.items))
            table[rows, target.nodes], kinds[rows, target.nodes] = block, RESIDUAL


def _into_reader(parts: Parts, target: Group, reading: Reading | None, table: Tensor, kinds: Tensor) -> None:
    assert reading is not None
    pulled = reading.pull(parts.read[target.name].T)
    _same_position(parts, target, reading.inverse[:, None, None] * pulled, RESIDUAL, table, kinds)


def _into_neurons(parts: Parts, target: Group, table: Tensor, kinds: Tensor) -> None:
    layer = _site(target).layer
    reading = parts.run.mlp[layer]
    through: Tensor | None = None
    for kind in PRE_ACTIVATION:
        slope = parts.run.slopes.get(f"blocks.{layer}.{kind}")
        if slope is None:
            continue
        source = parts.group(layer, kind)
        # (pos, unit, d_mlp): what the units of mlp_out read of the pre-activations.
        neurons = slope[:, None, :] * parts.read[target.name].T
        if source is not None:
            _diagonal(table, source, target).copy_(torch.einsum("ik,pjk->ijp", parts.write[source.name], neurons))
            _diagonal(kinds, source, target).fill_(MLP)
        else:
            pulled = neurons @ parts.matrices[f"blocks.{layer}.{kind}"].T
            through = pulled if through is None else through + pulled
    if through is not None:
        assert reading is not None
        _same_position(parts, target, reading.inverse[:, None, None] * reading.pull(through), MLP, table, kinds)


def _into_heads(parts: Parts, target: Group, table: Tensor, kinds: Tensor) -> None:
    layer = _site(target).layer
    pattern, reading = parts.run.patterns[layer], parts.run.attn[layer]
    n_heads = parts.n_heads
    reads = parts.read[target.name].T.unflatten(-1, (n_heads, -1))  # (unit, head, d_head)
    source = parts.group(layer, "attn_v", "attn_qkv")
    width = n_heads * reads.shape[-1]
    if source is not None:
        values = parts.write[source.name]
        if _site(source).kind == "attn_qkv":
            values = values[:, -_value_width(values.shape[1], width) :]
        per_head = torch.einsum("ihe,jhe->ijh", by_head(values, n_heads, width), reads)
        _across(table, source, target).copy_(torch.einsum("hds,ijh->sidj", pattern, per_head))
        _across(kinds, source, target).fill_(ATTENTION)
        return
    assert reading is not None
    matrix = by_head(parts.matrices[f"blocks.{layer}.attn_v"], n_heads, width)  # (d_model, head, d_head)
    pulled = reading.pull(torch.einsum("xhe,jhe->jhx", matrix, reads))
    for source in parts.groups:
        if source.name == TOKEN:
            met = torch.einsum("sx,jhx->sjh", parts.run.embedded, pulled)
            block = torch.einsum("hds,sjh,s->sdj", pattern, met, reading.inverse)[:, None]
        elif _writes_before(source, layer, "attn", parts):
            met = torch.einsum("ix,jhx->ijh", parts.write[source.name], pulled)
            block = torch.einsum("hds,ijh,s->sidj", pattern, met, reading.inverse)
        else:
            continue
        _across(table, source, target).copy_(block)
        _across(kinds, source, target).fill_(ATTENTION)


def _value_width(packed: int, width: int) -> int:
    """Columns of the V slice of a packed matrix: q has `width`, k and v share the rest."""
    return (packed - width) // 2


# ---------------------------------------------------------------------------------------------- blocks


def _same_position(
    parts: Parts, target: Group, cotangent: Float[Tensor, "_pos _unit d_model"], kind: int, table: Tensor, kinds: Tensor
) -> None:
    """Edges from all that writes the residual stream before a target, at the target's own position."""
    norm = "attn" if _site(target).kind in READS_ATTENTION_INPUT else "mlp"
    cotangent = _unit(parts, cotangent)
    for source in parts.groups:
        if source.name == TOKEN:
            block = torch.einsum("px,pjx->jp", parts.run.embedded, cotangent)[None]
        elif _writes_before(source, _site(target).layer, norm, parts):
            block = torch.einsum("ix,pjx->ijp", _unit(parts, parts.write[source.name]), cotangent)
        else:
            continue
        _diagonal(table, source, target).copy_(block)
        _diagonal(kinds, source, target).fill_(kind)


def _writes_before(source: Group, layer: int, norm: str, parts: Parts) -> bool:
    """Whether a site writes to what a block's norm ("attn" or "mlp") reads."""
    site = source.site
    if site is None or site.kind not in RESIDUAL_MATRICES:
        return False
    if site.layer == layer:
        return site.kind == "attn_o" and norm == "mlp" and parts.run.mlp_reads_attn[layer]
    return site.layer < layer


def _across(table: Tensor, source: Group, target: Group) -> Tensor:
    """The block of two groups as a view (src, i, dest, j)."""
    block = table[source.nodes, target.nodes]
    return block.unflatten(0, (source.positions, -1)).unflatten(2, (target.positions, -1))


def _diagonal(table: Tensor, source: Group, target: Group) -> Tensor:
    """The part of a block where both positions are the same, as a view (i, j, pos)."""
    return _across(table, source, target).diagonal(dim1=0, dim2=2)


def _unit(parts: Parts, vectors: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vectors, dim=-1) if parts.cosine else vectors


def _site(group: Group) -> Site:
    assert group.site is not None
    return group.site
