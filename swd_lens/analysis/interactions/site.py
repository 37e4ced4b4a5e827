"""One site over a text, as both studies of interactions need it.

1. `site_named` and `text_of` check what was asked for before anything runs.
2. `attached` puts the factors into the host and gives a `SiteRun`: the site, its units and the text. `SiteRun.batches` runs the
   text up to the site's block and hands over what was seen there; `SiteRun.provenance` says how a result was made.
3. `PairResult` is the base of both results; `strongest` and `bars` are the strongest pairs of a matrix, as
   indices and as a figure.
4. `find_activation`: the activation f of an MLP, among the functions that the block's modules call theirs. The right one gives
   post = f(pre), gated f(pre) * up, plus a constant (TransformerLens adds b_in of a gated MLP there). What else may stand between
   (a LayerNorm as in solu_ln, a softmax over channels) is refused: then one channel's change is not that channel's alone. Where
   a kernel of torch gives the same values on a fine grid, it is used: GELU is spelled out in eight passes over memory elsewhere.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from swd_lens.base import __version__
from swd_lens.base.checks import bounded
from swd_lens.base.errors import TokenError, UnsupportedHostError, quoted
from swd_lens.base.figures import ATTENTION, INK, NEGATIVE, POSITIVE
from swd_lens.base.machine import is_out_of_memory
from swd_lens.base.progress import tqdm
from swd_lens.base.record import Record
from swd_lens.hosts import Host, require_no_dropout, sites_of
from swd_lens.hosts.recording import Recording, record, standing_hooks
from swd_lens.hosts.sites import Pattern, Site
from swd_lens.tasks.streams import TokenStream, as_stream
from swd_lens.units import attach
from swd_lens.units.factors import Factors
from swd_lens.units.match import weight_fingerprint
from swd_lens.units.unit_set import UnitSet

SMALL = 8  # points


def site_named(host: Host, pattern: Pattern) -> Site:
    """The single site that a pattern names. Raises UnknownSiteError: none; ValueError: several."""
    sites = sites_of(host, pattern)
    if len(sites) > 1:
        raise ValueError(
            f"{quoted(pattern)} names {len(sites)} sites ({', '.join(site.name for site in sites[:3])} ...); pairs are "
            "taken within one site: name one"
        )
    return sites[0]


def text_of(model: Any, tokens: Any, batch_size: Any, least: int, why: str) -> TokenStream:
    """The text as a stream of at least so many tokens. Raises ValueError: a batch size that is no whole number of rows, or a
    model in train mode with dropout; TokenError: fewer tokens than `least`; and see `as_stream`."""
    bounded("batch_size", batch_size, 1)
    require_no_dropout(model)
    stream = as_stream(tokens, model)
    if stream.n_tokens < least:
        raise TokenError(f"got {stream.n_tokens} token; {why} at least {least} positions: give more text")
    return stream


@dataclass(frozen=True, eq=False)
class SiteRun:
    """A site with its factors attached, and the text that runs over it."""

    host: Host  # with all the factors attached
    site: Site  # the site
    units: Factors  # the site's
    attached: UnitSet  # the units of all sites
    stream: TokenStream  # the text
    batch_size: int  # rows per forward

    @property
    def n_batches(self) -> int:
        return -(-self.stream.n_rows // self.batch_size)

    def batches(
        self, *, label: str | None = None, outputs: Sequence[Site] = (), inputs: Sequence[Site] = (), others: Sequence[Site] = ()
    ) -> Iterator[Recording]:
        """Run every batch up to the site's block; gives z of the site's units and what else was asked for, as (token, width).

        Args:
            label: what the progress bar says; None: no bar.
            others: further sites whose z is given.

        Raises:
            UnsupportedHostError: the forward never showed one of them.
            ValueError: z is not finite.
        """
        batches = self.stream.batches(self.batch_size)
        bar = tqdm(batches, desc=label, total=self.n_batches, unit="batch", disable=label is None, leave=False)
        for rows in bar:
            seen = record(
                self.host,
                rows,
                units=[self.site, *others],
                outputs=outputs,
                inputs=inputs,
                keep=lambda tensor: tensor.detach().flatten(0, 1),
            )
            for site in (self.site, *others):
                if not bool(seen.units[site.name].isfinite().all()):
                    raise ValueError(
                        f"the units of {site.name} are not finite on these tokens: activations overflow, or the factors "
                        "are damaged; run the host in float32, or factorize the site again"
                    )
            yield seen

    def provenance(self, **choices: Any) -> dict[str, Any]:
        """Settings of a result: how it was made, as plain JSON values. Nothing here is drawn at random: there is no seed."""
        return {
            "model": getattr(self.host.model.cfg, "model_name", None),
            "site": self.site.name,
            "weight_sha256": weight_fingerprint(self.host, self.site),
            "attached": list(self.attached),
            "factors": self.attached.identities,
            "tokens": self.stream.n_tokens,
            "row_length": self.stream.row_length,
            "tokens_sha256": self.stream.fingerprint(),
            "version": __version__,
            **standing_hooks(self.host.model),
            **choices,
        }


@contextmanager
def attached(host: Host, factors: Any, site: Site, stream: TokenStream, batch_size: int) -> Iterator[SiteRun]:
    """The factors in the host while open. Raises ValueError: there are none at the site, they are no read/write factors, or
    fewer than two of their units have edges; AttachError, UnknownSiteError, UnsupportedHostError: see `swd_lens.attach`."""
    with attach(host.model, factors) as attachment:
        by_site = attachment.factors
        yield SiteRun(host, site, paired_factors(by_site, site), by_site, stream, batch_size)


def paired_factors(by_site: UnitSet, site: Site) -> Factors:
    """The site's factors among those attached. Raises ValueError: there are none, they are no read/write factors, or fewer
    than two of their units have edges."""
    if site.name not in by_site:
        raise ValueError(
            f"these factors hold nothing for {site.name}; they are for {', '.join(by_site)}. Factorize the site, or name "
            "one of those"
        )
    units = by_site[site.name]
    if not isinstance(units, Factors):
        raise ValueError(f"{site.name} holds {type(units).__name__}, which shows no write vectors; pairs of units need Factors")
    if (valid := int(units.valid_units.sum())) < 2:
        raise ValueError(
            f"{site.name} has {valid} valid units (units with a read and a write edge); a pair needs two. Factorize it at "
            "a lower sparsity"
        )
    return units


class PairResult(Record):
    """The result of a study of one site's pairs; subclasses are dataclasses that have these attributes."""

    site: str
    settings: Mapping[str, Any]
    n_pairs: int  # unordered pairs that have a value
    table: Callable[[], pd.DataFrame]
    left_out: Callable[[], str]  # how many units have no value, and why; empty where all have one

    @property
    def whose(self) -> str:
        """Whose units the pairs are of: the site, or both sites."""
        return self.site

    def in_words(self) -> str:
        """Site, pairs, tokens, activation, and what was left out."""
        parts = [self.whose, f"{self.n_pairs:,} pairs", f"{self.settings['tokens']:,} tokens"]
        parts += [self.settings["activation"]] if "activation" in self.settings else []
        left_out = self.left_out()
        return ", ".join(parts) + (f"; {left_out}" if left_out else "")

    def __repr__(self) -> str:
        table = self.table().to_string(index=False, float_format="{:.4g}".format)
        return f"{type(self).__name__}: {self.in_words()}\n{table}"


def strongest(matrix: Float[Tensor, "unit other"], n: int, *, within: bool = True) -> list[tuple[int, int]]:
    """Index pairs (i, j) of the n largest absolute entries, largest first; NaN never. within: rows and columns are the same
    units: only i < j."""
    rows, columns = torch.triu_indices(*matrix.shape, offset=1) if within else torch.ones_like(matrix).nonzero().T
    size = matrix[rows, columns].abs().nan_to_num(nan=-1.0)
    best = size.topk(min(n, len(size)))
    defined = best.indices[best.values >= 0]
    return list(zip(rows[defined].tolist(), columns[defined].tolist(), strict=True))


def bars(ax: Any, pairs: pd.DataFrame, column: str, title: str, *, signed: bool) -> None:
    """Pairs of units as horizontal bars, the strongest on top, named by the two units."""
    values = pairs[column].tolist() if len(pairs) else []
    units = zip(pairs["unit"], pairs["other unit"], strict=True) if len(pairs) else []
    names = [f"{unit.rpartition('/')[2]} – {other.rpartition('/')[2]}" for unit, other in units]
    colours = [(POSITIVE if v >= 0 else NEGATIVE) if signed else ATTENTION for v in values]
    ax.barh(range(len(values)), values, height=0.72, color=colours)
    ax.set_yticks(range(len(names)), names, fontsize=7)
    ax.invert_yaxis()
    ax.set_ylim(len(values) - 0.4, -0.6)
    ax.grid(False, axis="y")
    ax.axvline(0, color=INK, linewidth=0.8)
    ax.set(xlabel=column, ylabel="units of the pair")
    ax.set_title(title, fontsize=10, color=INK)


Activation = Callable[[Tensor], Tensor]

# What modules call their activation: TransformerLens and most of Hugging Face (act_fn), GPT-2 and NeoX (act), BERT, OPT.
_NAMES = ("act_fn", "act", "intermediate_act_fn", "activation_fn", "activation", "activation_func")
_KERNELS: dict[str, Activation] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu (tanh)": partial(F.gelu, approximate="tanh"),
}
_GRID = torch.linspace(-12, 12, 24_001, dtype=torch.float64)
_SAME = 1e-7  # of float64 values on the grid; gelu and gelu (tanh) differ by 5e-4
_ROUNDING = 8  # of the dtype's eps, relative to the largest |post|


def find_activation(host: Host, site: Site, pre: Tensor, up: Tensor | None, post: Tensor) -> tuple[Activation, str]:
    """The host's activation at a site, and its name. pre, up, post: (token, d_mlp) what the host computed; up None where
    nothing is gated. Raises UnsupportedHostError: no function of the host leads from pre to post channel by channel."""
    for name, function in _candidates(host, site):
        try:
            value = function(pre)
            every_second = function(pre[:, ::2])  # a softmax over channels would differ
            constant = post - (value if up is None else value * up)
            allowed = _ROUNDING * torch.finfo(post.dtype).eps * float(post.abs().max())
            same = float((constant - constant[:1]).abs().max()) <= allowed
            if same and float((every_second - value[:, ::2]).abs().max()) <= allowed:
                return _kernel(function, name)
        except (TypeError, RuntimeError, IndexError) as cause:
            # A module of that name is no function of one tensor.
            if is_out_of_memory(cause):
                raise
    between = "activation(pre)" if up is None else "activation(gate) * up"
    raise UnsupportedHostError(
        f"the MLP of blocks.{site.layer} does not feed {between} into mlp_out: another step stands there, such as the "
        "LayerNorm of solu_ln or a softmax over channels, or its activation was not found in the host. Pair interactions "
        "need an activation that acts on each channel by itself"
    )


def _candidates(host: Host, site: Site) -> Iterator[tuple[str, Any]]:
    known: set[int] = set()
    for module in host.model.blocks[site.layer].modules():
        for name in _NAMES:
            function = module.__dict__.get(name, module._modules.get(name))
            if callable(function) and id(function) not in known:
                known.add(id(function))
                yield getattr(function, "__name__", type(function).__name__), function


def _kernel(function: Activation, name: str) -> tuple[Activation, str]:
    try:
        value = function(_GRID)
    except RuntimeError as cause:  # its parameters sit elsewhere
        if is_out_of_memory(cause):
            raise
        return function, name
    for known, kernel in _KERNELS.items():
        if value.dtype == _GRID.dtype and float((value - kernel(_GRID)).abs().max()) <= _SAME:
            return kernel, known
    return function, name
