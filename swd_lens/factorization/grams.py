"""Grams: the second moments of what each site reads, and the targets of corrected calibration, streamed over the tokens.

1. Take the tokens as a stream (tasks/streams.py), or what is kept of them at a later block (residuals.py). Run them in batches,
   no further than the last wanted layer, or, from what is kept, than the last wanted matrix. Each site must have read one
   vector per token: one that was silent, or read twice, is an error, not a wrong Gram.
2. `collect_grams`: G = mean over the tokens that count (tasks/counting.py) of h^T h. At every site h^T h is added to a running
   float64 sum. Memory is one (d_in, d_in) float64 sum per site, whatever the number of tokens, and one Gram while sums become
   Grams. Sites that read the very same vectors (attn_q, attn_k, attn_v; mlp_gate, mlp_in) share one. Beside it the share of the
   trace that comes from the first positions of rows: an attention sink may have most of it. (Gave it a tenth instead, factors of
   SmolLM2's blocks.11.mlp_out err 9 % less at the other positions, and the model's KL doubles.)
3. `collect_pairs` and `corrected`: what a matrix behind replaced ones should compute, so that it makes good what they changed.
   Sequential calibration fits the factors to W on the inputs of the replaced host, h. The dense host reads other inputs there,
   g, and writes g W. Fitting the factors to that instead,

       E |g W - h A B|^2  =  tr((T - AB)^T G (T - AB)) + what no factors can change,   G = E[h^T h],   T = G^-1 E[h^T g] W,

   is the solver's own problem with T in place of W (for second layers of pruned networks this is known as asymmetric
   calibration). Every batch is run twice, as the dense host and as the host is.

A host in float64 gives Grams that are the same to the last bit of float32, whatever kind of host it is and however many
threads it has; those of a float32 host differ in the last places, which choosing supports amplifies.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from swd_lens.base.machine import available_bytes
from swd_lens.base.progress import tqdm
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.factorization.residuals import Residuals
from swd_lens.hosts import Start, require_no_dropout
from swd_lens.hosts.fused import fused_attention
from swd_lens.hosts.recording import require_one_per_token
from swd_lens.hosts.sites import Site
from swd_lens.tasks.streams import as_stream

# Wider sums grow tile by tile, so that no product of their own size lies beside them. Up to here a product takes 64 MB, and
# is one call, as it always was: a tile's product differs from the whole one in the last bit.
_WHOLE_UP_TO = 4096
_TILE = 1024  # rows
# Sums of a graphics card that would take more than this share of its free memory sit on the CPU.
_SHARE_OF_DEVICE = 0.5

# Of a target, in units of the Gram's mean diagonal; it keeps directions that h hardly has as W has them. Embedded model,
# everything at s = .685: .01 and .1 give the same KL within 4 %.
RIDGE = 1e-2


@dataclass(frozen=True)
class Grams:
    """One Gram per site name, and the number of tokens (activation vectors) each was averaged over.

    Sites that read the very same vectors have one tensor: copy it before writing to it.

    Attributes:
        by_site: site name -> mean of h^T h.
        n_tokens: that count.
        first_share: site name -> share of the trace that comes from the first positions of rows.
        first: site name -> (vector, d_in) V with V^T V the first positions' part of the Gram; as many vectors as rows at most,
            and no more than twice d_in.
        n_routed: an expert's site name -> the tokens among these that were routed to it, over which its Gram is averaged.
    """

    by_site: Mapping[str, Float[Tensor, "_d_in _d_in"]]
    n_tokens: int
    first_share: Mapping[str, float] = field(default_factory=dict)
    first: Mapping[str, Float[Tensor, "_vector _d_in"]] = field(default_factory=dict)
    n_routed: Mapping[str, int] = field(default_factory=dict)

    def __getitem__(self, site: str) -> Tensor:
        return self.by_site[site]


@with_torch_defaults
def collect_grams(
    model: Any,
    sites: Sequence[Site],
    tokens: Any,
    *,
    batch_size: int = 16,
    progress: bool = False,
    dtype: Literal["float32", "float64"] = "float32",
    residuals: Residuals | None = None,
    exclude: Any = None,
) -> Grams:
    """Stream tokens through the host as it is now (attached units included) and average h^T h at every site, in one
    pass (method.md §5.2).

    Args:
        model: the host.
        sites: where to read.
        tokens: (rows, pos) ids, or a `TokenStream`; every position counts, the first included, where `exclude` says nothing else.
        batch_size: rows per forward.
        dtype: of the products of one batch and of the Grams. Sums over batches are float64 in both, and so are products of
            a float64 host.
        residuals: take up there, with its tokens and its batches, in place of `tokens` and `batch_size`. The same Grams, to
            the bit.
        exclude: "special" (the tokenizer's special tokens) or ids, whose positions do not count.

    Returns:
        Grams; entry (i, j) in units of activation squared, mean over tokens that count. On the device of the activations, or on
        the CPU where the sums are large beside that device's free memory.

    Raises:
        TokenError: see `swd_lens.tasks.streams.as_stream`.
        ValueError: an activation is not finite (site named); or a site lies before the block where the residuals take up.
        UnsupportedHostError: a site that the host's forward never shows, or shows several times per token.
    """
    require_no_dropout(model)
    if residuals is None:
        stream = as_stream(tokens, model, exclude=exclude)
        residuals = Residuals(model, stream, batch_size)  # of block 0: nothing is kept
    if before := [site.name for site in sites if site.layer < residuals.layer]:
        raise ValueError(
            f"{', '.join(before)} lie before block {residuals.layer}, where the residuals take up; make new Residuals"
        )
    double, n_tokens = dtype == "float64", residuals.stream.n_counted
    sums = _pass(sites, residuals, _Sums(double, share=True), progress)
    if sums.parted:
        sums = _pass(sites, residuals, _Sums(double, share=False), progress)
    return sums.grams(n_tokens, double)


def _pass(sites: Sequence[Site], residuals: Residuals, sums: "_Sums", progress: bool) -> "_Sums":
    """The sums over all tokens, or up to the batch in which they parted."""
    with torch.no_grad(), fused_attention(residuals.host, residuals.stream.first_row()[None]):
        first_row = 0
        for tokens, start in _shown(residuals.batches(), residuals, progress):
            sums.begin(tuple(tokens.shape), residuals.stream.counted(tokens, first_row))
            residuals.run(tokens, start, sites, sums.add)
            first_row += len(tokens)
            if sums.parted:
                break
    return sums


def _shown(batches: Iterable[Any], residuals: Residuals, progress: bool) -> Iterable[Any]:
    """The batches, with a bar."""
    total = -(-residuals.stream.n_rows // residuals.batch_size)
    return tqdm(batches, desc="calibration", total=total, unit="batch", disable=not progress, leave=False)


# ---------------------------------------------------------------------------------------------- sums


@dataclass
class _Sums:
    """Running float64 sums of h^T h. A site that reads the very vectors of the site before it shares its sum (`owner`). The first
    batch decides; should the two differ in a later one (a hook that acts on some batches), they have `parted`, and a pass without
    sharing is needed."""

    in_double: bool
    share: bool
    by_site: dict[str, Tensor] = field(default_factory=dict)
    owner: dict[str, str] = field(default_factory=dict)
    previous: tuple[Site, Tensor, int] | None = None  # that owns a sum: what it read, and that tensor's version then
    first: bool = True
    parted: bool = False
    shape: tuple[int, int] = (1, 1)  # of the present batch: rows, positions
    counted: Tensor | None = None  # (rows, pos) of the present batch; None: every position
    of_first: dict[str, "FirstPositions"] = field(default_factory=dict)
    n_routed: dict[str, int] = field(default_factory=dict)  # of experts: vectors that are not all zeros

    def begin(self, shape: tuple[int, int], counted: Bool[Tensor, "rows pos"] | None) -> None:
        """A batch of so many rows and positions begins, of which these positions count."""
        self.first = not self.by_site
        self.previous = None
        self.shape, self.counted = shape, counted

    def add(self, site: Site, h: Tensor) -> Float[Tensor, "counted d_in"]:
        """Add a batch of what a site reads; returns the vectors that count (none where the site shares another's sum). Raises
        UnsupportedHostError: where some do not count, the site did not read one vector per token."""
        h = h.detach()
        same = self._reads_as_before(site, h)
        if self.first and same is not None and site.name not in self.by_site:
            self.owner[site.name] = same
        if (owner := self.owner.get(site.name)) is not None:
            self.parted |= owner != same
            return h.new_zeros(0, site.d_in)
        flat = _vectors(h, self.in_double)
        n_rows, n_positions = self.shape
        at_first = flat[:0]
        if len(flat) == n_rows * n_positions:
            at_first = flat.view(n_rows, n_positions, -1)[:, 0]
            if self.counted is not None:
                counted = self.counted.to(flat.device)
                flat, at_first = flat[counted.flatten()], at_first[counted[:, 0]]
        elif self.counted is not None:  # it cannot be said which count
            require_one_per_token([site], {site.name: len(flat)}, n_rows * n_positions)
        if site.expert is not None:  # the others are other experts' tokens
            self.n_routed[site.name] = self.n_routed.get(site.name, 0) + int(flat.any(1).sum())
        self.of_first.setdefault(site.name, FirstPositions()).add(at_first)
        if site.name not in self.by_site:  # where the site is: layers may lie on several devices
            device = _home(site.d_in, flat.device)
            self.by_site[site.name] = torch.zeros(site.d_in, site.d_in, dtype=torch.float64, device=device)
        _add_product(self.by_site[site.name], flat)
        if self.share and not h.is_inference():  # inference tensors have no version
            self.previous = (site, h, h._version)
        return flat

    def _reads_as_before(self, site: Site, h: Tensor) -> str | None:
        """The site whose vectors were just added, if these are the same ones and nobody has written to them since."""
        if self.previous is None:
            return None
        other, there, version = self.previous
        if other.layer != site.layer or other.name == site.name or there.shape != h.shape or there.dtype != h.dtype:
            return None
        # Values, not addresses: a HookedTransformer normalizes anew for each of q, k and v.
        same = there.device == h.device and there._version == version and torch.equal(there, h)
        return other.name if same else None

    def grams(self, n_tokens: int, double: bool) -> Grams:
        """The means over so many tokens that count, in float64 or float32. Each sum goes as it is converted, so that at most one
        Gram lies beside the sums."""
        by_site, shares, first = dict[str, Tensor](), dict[str, float](), dict[str, Tensor]()
        for name in list(self.by_site):
            total, at_first = self.by_site.pop(name), self.of_first[name]
            _require_finite(name, total)
            trace, n = float(total.diagonal().sum()), max(self.n_routed.get(name, n_tokens), 1)
            shares[name] = at_first.squares / trace if trace > 0 else 0.0
            first[name] = at_first.vectors(n)
            total /= n
            by_site[name] = total if double else total.float()
        for name, owner in self.owner.items():
            by_site[name], shares[name], first[name] = by_site[owner], shares[owner], first[owner]
            if owner in self.n_routed:  # an expert's
                self.n_routed[name] = self.n_routed[owner]
        return Grams(by_site, n_tokens, shares, first, self.n_routed)


class FirstPositions:
    """Vectors with the second moment of what a site reads at the first positions of rows, no more than twice d_in of them."""

    def __init__(self) -> None:
        self.squares, self._kept = 0.0, list[Tensor]()

    def add(self, h: Float[Tensor, "vector d_in"]) -> None:
        self.squares += float(torch.linalg.vector_norm(h, dtype=torch.float64).square())
        if len(h):
            self._kept.append(h.float().cpu())
        if sum(map(len, self._kept)) > 2 * h.shape[1]:
            # R of a QR decomposition has the same second moment.
            self._kept = [torch.linalg.qr(torch.cat(self._kept).double(), mode="r").R.float()]

    def vectors(self, n: int) -> Float[Tensor, "vector d_in"]:
        """Divided so that their second moment is a part of a mean over n vectors."""
        return torch.cat(self._kept) / n**0.5 if self._kept else torch.zeros(0, 0)


def _vectors(h: Tensor, in_double: bool) -> Float[Tensor, "vector d_in"]:
    """Vectors that a site read, one per row, in the dtype of products: float64 of a float64 host in any case."""
    flat = h.detach().reshape(-1, h.shape[-1])
    return flat.double() if in_double or flat.dtype == torch.float64 else flat.float()


def _require_finite(site: str, total: Float[Tensor, "d_in d_in"]) -> None:
    if not all(rows.isfinite().all() for rows in total.split(_TILE)):
        raise ValueError(f"activations entering {site} are not finite on these tokens; the host itself is broken there")


def _add_product(total: Float[Tensor, "d_in d_in"], flat: Float[Tensor, "vector d_in"]) -> None:
    """total += flat^T flat; wide ones in tiles, of which those below the diagonal mirror those above."""
    d_in = total.shape[0]
    if d_in <= _WHOLE_UP_TO:
        total += (flat.T @ flat).to(total)
        return
    for start in range(0, d_in, _TILE):
        rows = slice(start, start + _TILE)
        for across in range(start, d_in, _TILE):
            columns = slice(across, across + _TILE)
            product = (flat[:, rows].T @ flat[:, columns]).to(total)
            total[rows, columns] += product
            if across > start:
                total[columns, rows] += product.T


def _home(d_in: int, device: torch.device) -> torch.device:
    """The device of a sum: beside the activations, or the CPU if it is large beside the device's free memory."""
    free = None if device.type == "cpu" else available_bytes(device)
    return torch.device("cpu") if free is not None and 8 * d_in**2 > _SHARE_OF_DEVICE * free else device


# ---------------------------------------------------------------------------------------------- targets


class Pair(NamedTuple):
    """Moments at one site: the Gram of what it reads, its products with what it reads in the dense host, `Grams.first_share`,
    `Grams.first` and (an expert's) `Grams.n_routed`."""

    gram: Float[Tensor, "_d_in _d_in"]
    cross: Float[Tensor, "_d_in _d_in"]
    first_share: float
    first: Float[Tensor, "_vector _d_in"]
    n_routed: int | None = None


def collect_pairs(
    sites: Sequence[Site],
    replaced: Residuals,
    dense: Residuals,
    as_dense: Callable[[], AbstractContextManager[Any]],
    *,
    progress: bool = False,
    dtype: str = "float32",
) -> dict[str, Pair]:
    """Site -> (G, C), float64 (d_in, d_in) means over tokens of h^T h and h^T g; memory does not grow with the tokens.

    sites: of one stage; replaced, dense: the tokens, and where runs take up, of the host as it is and of the dense host;
    as_dense: inside it the host runs its own matrices; dtype: of the products of one batch, "float32" or "float64" (of a float64
    host always). Raises ValueError: an activation is not finite (site named); UnsupportedHostError: a site that the host's
    forward never shows, or shows several times per token.
    """
    sums, counted, first_row = _Sums(dtype == "float64", share=False), None, 0
    crosses = {site.name: torch.zeros(site.d_in, site.d_in, dtype=torch.float64) for site in sites}
    dense_inputs: dict[str, Tensor] = {}

    def add(site: Site, h: Tensor) -> None:
        g = dense_inputs.pop(site.name)
        g = g if counted is None else g[counted.flatten().to(g.device)]
        crosses[site.name] += (sums.add(site, h).T @ g).to(crosses[site.name])

    both = zip(replaced.batches(), dense.batches(), strict=True)
    with torch.no_grad(), fused_attention(replaced.host, replaced.stream.first_row()[None]):
        for (tokens, start), (_, dense_start) in _shown(both, replaced, progress):
            with as_dense():
                dense_inputs |= _inputs(dense, sites, tokens, dense_start, dtype)
            counted = replaced.stream.counted(tokens, first_row)
            sums.begin(tuple(tokens.shape), counted)
            replaced.run(tokens, start, sites, add)
            first_row += len(tokens)
    pairs: dict[str, Pair] = {}
    grams = sums.grams(replaced.stream.n_counted, double=True)
    for name, gram in grams.by_site.items():
        _require_finite(name, crosses[name])
        cross = crosses[name] / max(grams.n_routed.get(name, grams.n_tokens), 1)
        pairs[name] = Pair(gram, cross, grams.first_share[name], grams.first[name], grams.n_routed.get(name))
    return pairs


def _inputs(
    residuals: Residuals, sites: Sequence[Site], tokens: Tensor, start: Start | None, dtype: str
) -> dict[str, Float[Tensor, "vector _d_in"]]:
    """Inputs of every site, one vector per row."""
    inputs: dict[str, Tensor] = {}

    def keep(site: Site, h: Tensor) -> None:
        inputs[site.name] = _vectors(h, dtype == "float64").clone()

    residuals.run(tokens, start, sites, keep)
    return inputs


def corrected(
    weight: Float[Tensor, "d_in d_out"], gram: Float[Tensor, "d_in d_in"], cross: Float[Tensor, "d_in d_in"]
) -> Float[Tensor, "d_in d_out"]:
    """T = (G + r)^-1 (C + r) W with r = `RIDGE` x mean diagonal of G: float32, solved in float64."""
    ridge = torch.eye(len(gram), dtype=torch.float64) * max(RIDGE * float(gram.diagonal().mean()), 1e-12)
    factor = torch.linalg.cholesky(gram.double().cpu() + ridge)
    wanted = (cross.double().cpu() + ridge) @ weight.double().cpu()
    return torch.cholesky_solve(wanted, factor).float().to(weight.device)
