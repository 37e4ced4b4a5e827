"""Sites: the names of a host's factorizable matrices, and how a user's pattern selects among them.

1. A `Site` is one dense projection, always seen as (d_in, d_out): y = h @ W + b. Nothing outside the hosts transposes.
2. `select_sites` matches a pattern (exact name, glob, bare kind, "all", TransformerLens parameter name or Hugging Face
   module name) against the sites a host offers; a pattern that matches nothing raises and lists the nearest names.
3. `Ends` names the coordinates that a site reads and writes: heads, neurons, the residual stream.
4. `parse_unit` reads a unit's name, "blocks.8.mlp_out/205".

Names beyond the kinds have a dot: "blocks.3.mlp_in.5" is expert 5's matrix of kind mlp_in, and "blocks.3.attn.kv_a_proj_with_mqa"
a linear map that no kind fits, by the name that its module has within the block.
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from swd_lens.base.display import card
from swd_lens.base.errors import UnknownSiteError, quoted
from swd_lens.hosts.families import block_paths, module_paths

# Execution order within a block: a later kind of the same layer may read what an earlier one wrote.
# attn_gate, attn_beta and attn_decay are the further input projections of linear attention (Qwen3.5's gated delta net).
KINDS = (
    *("attn_qkv", "attn_q", "attn_k", "attn_v", "attn_gate", "attn_beta", "attn_decay", "attn_o"),
    *("mlp_gate", "mlp_in", "mlp_out", "mlp"),
)
# These are made of those; one layer holds units at one or the other. "mlp" is no matrix: only transcoders go there.
PACKED = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "mlp": ("mlp_gate", "mlp_in", "mlp_out")}

# Which coordinates of a matrix are the MLP's neurons; other matrices have none of their own.
NEURON_SIDE = {"mlp_gate": "output", "mlp_in": "output", "mlp_out": "input"}


def side_of_units(kind: str) -> str:
    """The side whose coordinates are exact units of a matrix: its neurons', and the input of one that has none."""
    return NEURON_SIDE.get(base_kind(kind), "input")


def base_kind(kind: str) -> str:
    """The kind of an expert's matrix, "mlp_in" of "mlp_in.5"; other kinds as they are."""
    base, _, expert = kind.partition(".")
    return base if expert.isdecimal() else kind


def expert_of(site_name: str) -> int | None:
    """Which expert a matrix belongs to; None for the others. It reads only the tokens that are routed to that expert; what is
    shown of others is zero."""
    match = _NAME.match(site_name)
    return int(match[3][1:]) if match is not None and match[2] in EXPERT_KINDS and match[3][1:].isdecimal() else None


def kind_order(kind: str) -> tuple[int, int, str]:
    """Sort key of the kinds of one layer, in the order in which they run.

    Experts' matrices follow each other within their kind. A map without a kind goes before what the attention (or, of an MLP's
    module, the MLP) writes; among themselves these go by their names.
    """
    base = base_kind(kind)
    if base in KINDS:
        return KINDS.index(base), int(kind.rpartition(".")[2]) if base != kind else -1, ""
    first, last = ("mlp_gate", "mlp_out") if base.startswith("mlp.") else ("attn_q", "attn_o")
    before = KINDS.index(first if "router" in base else last)  # the router decides what experts read
    later = [rank for rank, words in enumerate(_RUN_LATER, 1) if re.search(words, base)]
    return before, max(later, default=0) - 100, base


READS_ATTENTION_INPUT = ("attn_qkv", "attn_q", "attn_k", "attn_v", "attn_gate", "attn_beta", "attn_decay")
# Their output goes to the residual stream as it is (an expert's is weighted by its router before); those of RESIDUAL_MATRICES
# hold one matrix.
RESIDUAL_MATRICES = ("attn_o", "mlp_out")
WRITES_RESIDUAL = (*RESIDUAL_MATRICES, "mlp")

# TransformerLens parameter names, relative to blocks.{L}.
_TL_NAMES = {f"attn_{part.lower()}": (f"attn.W_{part}",) for part in "QKVO"}
_TL_NAMES |= {f"mlp_{part}": (f"mlp.W_{part}",) for part in ("gate", "in", "out")}
# Modules around the lists of blocks of Hugging Face's models.
_OUTER_MODULES = re.compile(rf"^(?:(?:{'|'.join(sorted({m for path in block_paths() for m in path.split('.')[:-1]}))})\.)+")
_NAME = re.compile(r"^blocks\.(\d+)\.(\w+)((?:\.\w+)*)$")
# Of a packed stack of experts; JetMoe has experts in its attention, too.
EXPERT_KINDS = ("attn_q", "attn_o", "mlp_gate", "mlp_in", "mlp_out")
# In a dotted name these are parameters, components' own hooks, or nothing of swd_lens.
_NO_MODULE = re.compile(r"^(?:W_\w+|b_(?:Q|K|V|O|in|out|gate)|hook_\w+|weight|bias)$")
# Maps without a kind, in the order in which their modules run: those that no word fits come first.
_RUN_LATER = (r"x_proj", r"b_proj|dt_proj", r"out_proj|o_proj|down_proj|w2|dense_4h_to_h|c_proj")


@dataclass(frozen=True, order=False)
class Site:
    """One factorizable matrix of a host: y = h @ W + b with W (d_in, d_out)."""

    layer: int
    kind: str
    d_in: int
    d_out: int

    @property
    def name(self) -> str:
        return f"blocks.{self.layer}.{self.kind}"

    @property
    def hook_name(self) -> str:
        """Where z lives once the site is attached; block level, so that get_act_name(f"{kind}_unit", layer) finds it."""
        return hook_name(self.name)

    @property
    def numel(self) -> int:
        return self.d_in * self.d_out

    @property
    def expert(self) -> int | None:
        """See `expert_of`."""
        return expert_of(self.name)

    def __str__(self) -> str:
        return f"{self.name} ({self.d_in}, {self.d_out})"

    def _repr_html_(self) -> str:
        shape = {"reads": f"{self.d_in:,} inputs", "writes": f"{self.d_out:,} outputs", "entries": f"{self.numel:,}"}
        return card(f"Site {self.name}", {**shape, "hook of its units": self.hook_name})


@dataclass(frozen=True)
class BlockShapes:
    """The matrices of one block, as a host reads them."""

    shapes: tuple[tuple[str, int, int], ...]  # (kind, d_in, d_out) of every matrix and of the whole MLP
    alternatives: tuple[str, ...]  # kinds among them that overlap others, so that they are no sites proper
    other_matrices: tuple[str, ...] = ()  # parts that hold matrices and are no sites: "mlp: MoEBridge"
    numel_left: int = 0  # entries of those parts' matrices


@lru_cache(maxsize=64)
def sites_of_blocks(blocks: tuple[BlockShapes, ...]) -> tuple[tuple[Site, ...], tuple[Site, ...]]:
    """The sites proper and the alternatives of these blocks, in execution order.

    Remembered by the shapes themselves, so that a model whose modules were replaced never gets those of before.
    """
    sites: list[Site] = []
    alternatives: list[Site] = []
    for layer, block in enumerate(blocks):
        for kind, d_in, d_out in sorted(block.shapes, key=lambda shape: kind_order(shape[0])):
            (alternatives if kind in block.alternatives else sites).append(Site(layer, kind, d_in, d_out))
    return tuple(sites), tuple(alternatives)


class HookName(str):
    """The name of a unit's hook point, as hooks that are handed to a host carry it.

    TransformerLens raises KeyError(name) where a host has none; the name then says why.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"{str(self)!r} (it is there while the units are attached: with swd.attach(model, factors): ...)"


def hook_name(site_name: str) -> str:
    """blocks.8.mlp_out -> blocks.8.hook_mlp_out_unit; blocks.8.mlp_out.5 -> blocks.8.hook_mlp_out_5_unit."""
    layer, kind = split_name(site_name)
    return f"blocks.{layer}.hook_{kind.replace('.', '_')}_unit"


def split_name(site_name: str) -> tuple[int, str]:
    """blocks.8.mlp_out -> (8, "mlp_out"). Raises UnknownSiteError: the name is not of the form blocks.{layer}.{kind}."""
    match = _NAME.match(site_name)
    if match is None or not is_site_name(site_name):
        raise UnknownSiteError(f"{quoted(site_name)} is not a site name; sites are called blocks.{{layer}}.{{{'|'.join(KINDS)}}}")
    return int(match[1]), match[2] + match[3]


def is_site_name(name: str) -> bool:
    """Whether a name is that of a host's site (a matrix without a host may be called anything)."""
    match = _NAME.match(name)
    if match is None:
        return False
    _, first, rest = match.groups()
    if not rest:
        return first in KINDS
    if rest[1:].isdecimal():
        return first in EXPERT_KINDS
    return (first == "mlp" or first not in KINDS) and _NO_MODULE.match(rest.rpartition(".")[2]) is None


def execution_key(site_name: str) -> tuple[int, tuple[int, int, str]]:
    """Sort key that puts site names in the order in which the host runs them."""
    layer, kind = split_name(site_name)
    return layer, kind_order(kind)


def overlapping(site_name: str) -> list[str]:
    """Names of the sites that hold some of the same weights: the parts of a packed site, or the site a part is packed in."""
    layer, kind = split_name(site_name)
    others = PACKED.get(kind, ()) + tuple(packed for packed, parts in PACKED.items() if kind in parts)
    return [f"blocks.{layer}.{other}" for other in others]


def parse_unit(name: str) -> tuple[str, int]:
    """blocks.8.mlp_out/205 -> ("blocks.8.mlp_out", 205)."""
    site, slash, index = name.rpartition("/")
    if not slash or not index.isdigit():
        raise ValueError(f"{quoted(name)} is not a unit name; a unit is called like blocks.8.mlp_out/205")
    split_name(site)
    return site, int(index)


Pattern = str | Site | Iterable[str | Site]


def select_sites(available: Sequence[Site], pattern: Pattern, alternatives: Sequence[Site] = ()) -> list[Site]:
    """The available sites that a pattern (or any of several) names, in execution order, each once.

    Args:
        available: the host's sites.
        alternatives: sites that overlap those (q, k, v apart beside attn_qkv); looked at only by a pattern that matches
            none of `available`, so that "all" and "attn_*" name every weight once.
        pattern: a Site, "blocks.8.mlp_out", a glob "blocks.[0-3].mlp_*", a bare kind "mlp_out" (every layer), "all",
            a TransformerLens parameter name "blocks.8.mlp.W_out", or a Hugging Face module name "h.8.mlp.c_proj".

    Raises UnknownSiteError: a pattern matches nothing (the message lists the nearest names), or the patterns together name one
    weight twice.
    """
    given = [pattern] if isinstance(pattern, str | Site) or not isinstance(pattern, Iterable) else list(pattern)
    for item in given:
        if not isinstance(item, str | Site):
            kinds = ", ".join(dict.fromkeys(base_kind(site.kind) for site in available))
            raise UnknownSiteError(
                f"{quoted(item)} names no site: give a name such as 'blocks.3.mlp_out', a kind ({kinds}), a glob, or 'all'"
            )
    patterns = [item.name if isinstance(item, Site) else item for item in given]
    if not patterns:
        raise UnknownSiteError("no site was named: pass a pattern such as 'mlp_out' or 'blocks.0.mlp_out'")
    selected: dict[str, Site] = {}
    by_name = {site.name: site for site in available}
    for name in patterns:
        # A site's own name is nobody else's: sets of hundreds of them need no matching.
        matching = [by_name[name]] if name in by_name else [site for site in available if matches(site, name)]
        matching = matching or [site for site in alternatives if matches(site, name)]
        if not matching:
            names = [site.name for site in available]
            near = difflib.get_close_matches(name, names, n=4, cutoff=0.3) or names[:4]
            kinds = sorted({base_kind(site.kind) for site in available}, key=kind_order)
            layers = max((site.layer for site in available), default=-1)
            raise UnknownSiteError(
                f"no site matches {quoted(name)}. Nearest: {', '.join(near)}. This host has blocks.0 to blocks.{layers} with "
                f"{', '.join(kinds)}; globs such as 'blocks.*.mlp_out' work too."
            )
        selected.update({site.name: site for site in matching})
    for name in selected:
        twice = [part for part in overlapping(name) if part in selected]
        if twice:
            raise UnknownSiteError(f"{name} and {twice[0]} are the same weights; name one or the other")
    return sorted(selected.values(), key=lambda site: execution_key(site.name))


def matches(site: Site, pattern: str) -> bool:
    """Whether a pattern (see `select_sites`) names a site."""
    # With underscores: as in the names of hook points.
    names = list(dict.fromkeys((site.name, site.kind, base_kind(site.kind), site.kind.replace(".", "_"))))
    names += [f"blocks.{site.layer}.{name}" for name in (*names[2:], *_TL_NAMES.get(site.kind, ()))]
    names += module_paths(site.layer, site.kind)
    # A pattern may name the model's list of blocks by its whole path, or by its last part alone.
    patterns = (pattern, _OUTER_MODULES.sub("", pattern))
    return pattern == "all" or any(fnmatchcase(name, each) for name in names for each in patterns)


@dataclass(frozen=True)
class Span:
    """Coordinates start .. start + size - 1 of one end, such as a head; named by coordinate where the size is the whole."""

    name: str
    start: int
    size: int


@dataclass(frozen=True)
class Ends:
    """Names of the coordinates that the units of a host read and write.

    mlp_out reads MLP neurons, attn_o head by head; both write residual dimensions. attn_qkv writes the heads of Q, K and V one
    after the other; mlp_in and mlp_gate write neurons.
    """

    n_heads: int  # n_heads, n_kv_heads, d_head: the host's attention
    n_kv_heads: int
    d_head: int
    other_attention: frozenset[int]  # layers whose attention has other heads than these (linear attention)

    @classmethod
    def of(cls, host: Any) -> "Ends":
        """Read the names off a Host."""
        cfg = host.model.cfg
        linear = {site.layer for site in host.sites() if site.kind in ("attn_beta", "attn_decay")}
        n_heads = int(cfg.n_heads)
        n_kv_heads = int(getattr(cfg, "n_key_value_heads", None) or n_heads)
        return cls(n_heads, n_kv_heads, int(cfg.d_head), frozenset(linear))

    def read(self, site: str, width: int) -> list[Span]:
        """The spans of the site's input, d_in = width."""
        layer, kind = split_name(site)
        if kind == "mlp_out":
            return [Span("neuron", 0, width)]
        if kind == "attn_o":
            return self._heads(layer, width, (("", self.n_heads),)) or [Span("input", 0, width)]
        return [Span("residual", 0, width)]

    def written(self, site: str, width: int) -> list[Span]:
        """The spans of the site's output, d_out = width."""
        layer, kind = split_name(site)
        if kind in WRITES_RESIDUAL:
            return [Span("residual", 0, width)]
        if kind in ("mlp_in", "mlp_gate"):
            return [Span("neuron", 0, width)]
        q, k, v = ("Q", self.n_heads), ("K", self.n_kv_heads), ("V", self.n_kv_heads)
        parts = {"attn_q": (q,), "attn_k": (k,), "attn_v": (v,), "attn_qkv": (q, k, v)}
        known = kind in READS_ATTENTION_INPUT and kind in parts
        return (self._heads(layer, width, parts[kind]) if known else []) or [Span("output", 0, width)]

    def _heads(self, layer: int, width: int, parts: tuple[tuple[str, int], ...]) -> list[Span]:
        """One span per head of each part; none where the width shows that these are not the heads."""
        if layer in self.other_attention or width != sum(n for _, n in parts) * self.d_head:
            return []
        names = [f"{part} head {head}".strip() for part, n in parts for head in range(n)]
        return [Span(name, i * self.d_head, self.d_head) for i, name in enumerate(names)]
