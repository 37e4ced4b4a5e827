"""Per-token use: how many units a single token needs, beside what a circuit keeps for all of them.

A circuit is one set of units for a whole task. Each token may do with fewer, and with others; this counts them.

By output (`by="output"`), at each site and token for itself:

1. z of all units on the text, in the host with the units attached; their means are the reference.
2. With y what the units write at this token and y_0 what they would write at their means, unit i contributes
   c_i = (z_i - mean_i) B_i to y - y_0. A set S writes y_S = y_0 + the sum of its contributions.
3. The fewest units with |y - y_S|^2 <= (1 - recovered) |y - y_0|^2, looked for greedily: the unit next that takes most off the
   squared error ("greedy"), or the longest c_i ("size"). Where contributions are orthogonal (SVD, also whitened) both are the
   minimum; else each is at least that. Embedded model: 36 and 64 neurons a token, 41 and 45 units of SWD, 34 and 31 of the
   causal SVD.

By loss (`by="loss"`), over all attached sites together:

1. CE of each next token with all units, and with all of them at their means at all positions.
2. Units of a position in the order of -(z_i - mean_i) dL/dz_i, L the row's cross-entropy: what restoring each is worth to first
   order.
3. Each position keeps its own first k units, all others are at their means; one run per k of a grid. The smallest k that takes
   CE at least `recovered` of the way from empty to full. A prediction also reads what earlier positions kept of theirs: it is k
   units at every position. Tokens that the units do not help by `least` nats are left out.

Memory: a batch's activations and no tensor of more than `_BYTES`; z of the text where they are fewer, else the host is run again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.base.checks import bounded, one_of
from swd_lens.base.divergence import cross_entropy, log_probabilities
from swd_lens.base.figures import INK, literal, new_figure, style
from swd_lens.base.progress import tqdm
from swd_lens.base.record import Record
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.circuits.circuit import Circuit
from swd_lens.circuits.scores import require_finite
from swd_lens.hosts import Host, Start, require_gradients, require_no_dropout
from swd_lens.hosts.host import frozen
from swd_lens.hosts.predictions import Predictions
from swd_lens.hosts.recording import record, require_seen, standing_hooks
from swd_lens.hosts.sites import Site
from swd_lens.tasks.text import as_rows
from swd_lens.units import UnitSet, attach
from swd_lens.units.coder import CoderUnits

BY, ORDERS = ("output", "loss"), ("greedy", "size")
_TOKENS = 1_024  # of a forward
_BYTES = 2**28
_TOGETHER = "all sites"  # what the units of several sites are called where they are counted together
_LINEAR = 1e-3  # relative: how far what a coder writes may be from the sum of its units' vectors


@dataclass(frozen=True, repr=False)
class PerTokenUse(Record):
    """How many units each token of a text needs.

    Attributes:
        needed: site -> (row, pos) units; -1 where a token was left out. By loss there is one entry for all units together, named
            by the site or "all sites", and a position stands for the prediction of the token after it.
        n_units: site -> how many units it has.
        recovered: the share of the output, or of the loss's change, that they recover at least.
        by: "output" or "loss".
        circuit_units: site -> units of the circuit beside them; {} without one.
        settings: model, text, order, grid, least.
    """

    needed: Mapping[str, Int[Tensor, "_row _pos"]]
    n_units: Mapping[str, int]
    recovered: float
    by: str
    circuit_units: Mapping[str, int]
    settings: Mapping[str, Any]

    def counts(self, site: str) -> Int[Tensor, " token"]:
        """Units that each counted token needs, in the order of the text."""
        flat = self.needed[site].flatten()
        return flat[flat >= 0]

    def share_with(self, site: str, k: int) -> float:
        """Share of the tokens for which k units suffice."""
        return float((self.counts(site) <= k).double().mean())

    def curve(self, site: str) -> pd.DataFrame:
        """k and the share of tokens for which k units suffice, wherever it rises."""
        values, tokens = self.counts(site).unique(return_counts=True)
        return pd.DataFrame({"k": values.tolist(), "share": (tokens.cumsum(0).double() / tokens.sum()).tolist()})

    def table(self) -> pd.DataFrame:
        """One row per site: tokens counted, units, the mean, median, 10th and 90th percentile of what a token needs; with a
        circuit its units, and the share of tokens that as many of their own would do for."""
        rows = []
        for site, n_units in self.n_units.items():
            counts = self.counts(site).double()
            low, median, high = (int(counts.quantile(q, interpolation="lower")) for q in (0.1, 0.5, 0.9))
            row = {"site": site, "tokens": len(counts), "units": n_units, "mean": float(counts.mean())}
            row |= {"10%": low, "median": median, "90%": high}
            if self.circuit_units:
                k = self.circuit_units[site]
                row |= {"circuit units": k, "tokens with as many": self.share_with(site, k)}
            rows.append(row)
        return pd.DataFrame(rows)

    def plot(self):
        """Share of tokens for which k units suffice, a line per site; a circuit's units are a dotted one. A matplotlib Figure."""
        figure, ((ax,),) = new_figure(width=5.2, height=3.2)
        for index, (site, n_units) in enumerate(self.n_units.items()):
            curve, look = self.curve(site), style(index)
            # No token does with fewer than the first k; all do with as many as there are.
            k, share = [*curve["k"].clip(lower=0.8), n_units], [*curve["share"], 1.0]
            ax.step([k[0], *k], [0.0, *share], where="post", label=literal(site), linewidth=1.4, **look)
            if self.circuit_units:
                ax.axvline(max(0.8, self.circuit_units[site]), color=look["color"], linewidth=1.0, linestyle=":")
        units = "units" + (" (dotted: of the circuit)" if self.circuit_units else "")
        ax.set(xscale="log", ylim=(0, 1.02), xlabel=units, ylabel="share of tokens")
        if len(self.n_units) > 1:
            ax.legend(fontsize=8, frameon=False)
        ax.set_title(literal(f"{self.recovered:.0%} of {self._of_what()}"), fontsize=9, color=INK)
        return figure

    def title(self) -> str:
        medians = [f"{row['median']} of {row['units']:,}" for row in self.table().to_dict("records")[:3]]
        more = ", ..." if len(self.n_units) > 3 else ""
        return (
            f"Per-token use: {', '.join(medians)}{more} units recover {self.recovered:.0%} of {self._of_what()} "
            "at the median token"
        )

    def _of_what(self) -> str:
        return "a site's output" if self.by == "output" else "what the units do to the loss"

    def __repr__(self) -> str:
        return f"{self.title()}\n{self.table().to_string(index=False)}"

    def parts(self) -> tuple[Any, ...]:
        return self.table(), self.plot()


@with_torch_defaults
def per_token_use(
    model: Any,
    factors: Any,
    tokens: Any,
    *,
    by: str = "output",
    recovered: float | int = 0.9,
    order: str = "greedy",
    grid: Sequence[int] | None = None,
    least: float | int = 0.1,
    circuit: Circuit | None = None,
    batch_size: int | None = None,
    progress: bool = False,
) -> PerTokenUse:
    """The fewest units that recover a share of a site's output, or of the units' effect on the loss, at each token of a text.

    An upper bound on the fewest: units are taken greedily. Exact by output for orthogonal write vectors (SVD).

    Args:
        model: the host, with these sites not attached.
        factors: the replacement, see `swd_lens.attach`; the output that is recovered is its own, not the dense host's.
        tokens: (rows, pos) ids. Means are over all of them.
        by: "output": each site by itself; "loss": all units together, by the cross-entropy of the next token.
        recovered: share, between 0 and 1: of the squared distance from the output with all units at their means, or of the CE
            that they take off.
        order: by output, "greedy": next the unit that takes most off the squared error; "size": by length of contribution.
        grid: by loss, numbers of units that are tried; None: 1, 2, 3, 4, 6, 8, 12, ... and all. What a token needs is rounded
            up to one of them.
        least: by loss, in nats: tokens that the units help by no more are left out.
        circuit: of the same factors; its units stand beside the tokens'.
        batch_size: rows per forward; None: about 1,024 tokens.
        progress: show a bar.

    Raises:
        ValueError: a share outside (0, 1), another `by` or `order`, a grid of no numbers of units, a circuit of other factors;
            units that do not write the sum of their vectors; by loss, rows of one token, or no token that the units help.
        TokenError, AttachError, UnsupportedHostError: see `swd_lens.fidelity`.

    Source: ours.
    """
    one_of("by", by, BY)
    one_of("order", order, ORDERS)
    if not 0 < recovered < 1:
        raise ValueError(f"recovered must be in (0, 1), such as 0.9, got {recovered}")
    rows = as_rows(tokens, model)
    require_no_dropout(model)
    if by == "loss":
        require_gradients(model)
        if rows.shape[1] < 2:
            raise ValueError('by="loss" needs rows of at least two tokens: each position predicts the next')
    with attach(model, factors) as attachment:
        units = attachment.factors
        if circuit is not None:
            units.require_made_for(circuit.scores.settings, "this circuit")
        size = batch_size or max(1, _TOKENS // rows.shape[1])
        activations = _Activations(units, rows, size, again=by == "output", progress=progress)
        means = activations.means()
        if by == "output":
            ks: list[int] = []
            needed = _by_output(activations, means, float(recovered), order)
        else:
            n = units.n_units
            if grid is None:
                grid = [k for i in range(n.bit_length()) for k in (2**i, 3 * 2**i) if k <= n]
            for k in grid:
                bounded("a number of units in grid=", k, 1, n)
            ks = sorted({*map(int, grid), n})
            needed = _by_loss(activations, means, float(recovered), float(least), ks)
        n_units = units.sizes if by == "output" else {next(iter(needed)): units.n_units}
    own = {"order": order} if by == "output" else {"grid": ks, "least": float(least)}
    settings = {"model": str(model.cfg.model_name), "rows": len(rows), "row_length": rows.shape[1], **own}
    members = [] if circuit is None else [site for site, _ in circuit.units]
    counts = {site: len(members) if by == "loss" else members.count(site) for site in n_units}
    beside = {} if circuit is None else counts
    return PerTokenUse(needed, n_units, float(recovered), by, beside, settings | standing_hooks(model))


# ---------------------------------------------------------------------------------------------- activations


class _Activations:
    """z of the units on the text, batch by batch: kept from the first pass where they are few, else run again."""

    def __init__(self, units: UnitSet, rows: Int[Tensor, "rows pos"], size: int, *, again: bool, progress: bool):
        """again: whether z is wanted more than once."""
        self.host, self.units, self.rows, self.size, self.progress = units.host, units, rows, size, progress
        self._keeps = again and 4 * rows.numel() * units.n_units <= _BYTES
        self._kept: list[Mapping[str, Tensor]] = []

    def batches(self, label: str) -> Iterator[tuple[Tensor, Mapping[str, Float[Tensor, "batch _pos _unit"]]]]:
        """Each batch's rows, with z at every site."""
        for i, batch in enumerate(self.split(label)):
            if i < len(self._kept):
                z = self._kept[i]
            else:
                z = record(self.host, batch, units=self.units.sites, keep=Tensor.float).units
                if self._keeps:
                    self._kept.append(z)
            yield batch, z

    def split(self, label: str) -> Any:
        """The rows in batches, with a bar."""
        return tqdm(self.rows.split(self.size), desc=label, unit="batch", disable=not self.progress, leave=False)

    def means(self) -> dict[str, Float[Tensor, " _unit"]]:
        """Site -> mean z over all tokens, float32, on the CPU."""
        sums: dict[str, Tensor] = {}
        for _, z in self.batches("means"):
            for site, value in z.items():
                sums[site] = sums.get(site, 0.0) + value.double().sum((0, 1)).cpu()
        return {site: (total / self.rows.numel()).float() for site, total in sums.items()}


# ---------------------------------------------------------------------------------------------- by output


def _by_output(
    activations: _Activations, means: Mapping[str, Tensor], recovered: float, order: str
) -> dict[str, Int[Tensor, "_row _pos"]]:
    needed: dict[str, list[Tensor]] = {site: [] for site in means}
    vectors: dict[str, Tensor] = {}
    for _, z in activations.batches("units per token"):
        for site in activations.units.sites:
            moved = z[site.name] - means[site.name].to(z[site.name])
            if site.name not in vectors:
                vectors[site.name] = _written(activations.host, activations.units, site, moved, means[site.name])
            found = fewest_by_output(moved.flatten(0, 1), vectors[site.name], recovered, order)
            needed[site.name].append(found.view(moved.shape[:2]))
    return {site: torch.cat(of_site) for site, of_site in needed.items()}


def _written(
    host: Host, units: UnitSet, site: Site, moved: Float[Tensor, "batch pos unit"], mean: Float[Tensor, " unit"]
) -> Float[Tensor, "unit d_out"]:
    """Write vectors: what one of each unit adds to the site's output. Raises ValueError: an encode/decode pair that writes
    anything else than the sum over its units."""
    vectors, of_site = units.write_vectors(site.name), units[site.name]
    if isinstance(of_site, CoderUnits):
        few = moved[0, :4]
        mean = mean.to(few)
        with torch.no_grad():
            change = of_site.decode(few + mean) - of_site.decode(mean.expand_as(few))
            linear = None if vectors is None else few @ vectors.to(few)
        if linear is None or float((change - linear).norm()) > _LINEAR * float(change.norm()) + 1e-6:
            raise ValueError(
                f"the units of {site.name} ({of_site.name}) do not write a sum of vectors, one per unit, so a unit has no "
                'contribution of its own; take by="loss" for them'
            )
        if of_site.writes == "input":
            assert vectors is not None
            vectors = vectors.float() @ host.weight(site).to(vectors.device)
    assert vectors is not None
    return vectors.detach().to(moved)


def fewest_by_output(
    moved: Float[Tensor, "token unit"], vectors: Float[Tensor, "unit d_out"], recovered: float, order: str
) -> Int[Tensor, " token"]:
    """How many units recover a share (`recovered`, of the squared length) of the sum of all contributions, moved @ vectors, of
    each token; int64, on the CPU. moved: how far each unit is from its reference; vectors: what one of each unit writes; order:
    "greedy" or "size", see the module."""
    n_units, d_out = vectors.shape
    at_once = max(1, _BYTES // (4 * (6 * n_units if order == "greedy" else 8 * n_units + 16 * d_out)))
    # Products of all pairs, where they are no larger than what else is in memory; else of the chosen ones, step by step.
    products = vectors @ vectors.T if order == "greedy" and 4 * n_units**2 <= _BYTES else None
    found = [
        _greedily(part, vectors, products, 1 - recovered) if order == "greedy" else _by_size(part, vectors, 1 - recovered)
        for part in moved.split(at_once)
    ]
    return torch.cat(found).cpu()


def _greedily(
    moved: Float[Tensor, "token unit"],
    vectors: Float[Tensor, "unit d_out"],
    products: Float[Tensor, "unit unit"] | None,
    left: float,
) -> Int[Tensor, " token"]:
    """Next comes the unit that takes most off |residual|^2: 2 c.r - |c|^2, c being its contribution and r the residual."""
    needed = torch.zeros(len(moved), dtype=torch.int64, device=moved.device)
    residual = moved @ vectors
    lost, along = residual.double().square().sum(1), residual @ vectors.T
    goal, lengths = left * lost, vectors.square().sum(1)
    # Of the tokens still short of their goal: their number, and what is theirs.
    token = (lost > 0).nonzero().flatten()
    moved, along, lost, goal = moved[token], along[token], lost[token], goal[token]
    used = torch.zeros_like(moved, dtype=torch.bool)
    for k in range(1, moved.shape[1] + 1):
        if not len(token):
            break
        gains = moved * (2 * along - moved * lengths)
        gain, unit = gains.masked_fill_(used, float("-inf")).max(1)
        used.scatter_(1, unit[:, None], True)
        lost = lost - gain
        taken = moved.gather(1, unit[:, None])
        along -= taken * (vectors[unit] @ vectors.T if products is None else products[unit])
        done = (lost <= goal) & (needed[token] == 0)
        needed[token[done]] = k
        open_ = needed[token] == 0
        if k == moved.shape[1]:
            needed[token[open_]] = k  # all of them are all of it, whatever rounding says
        elif 2 * int(open_.sum()) < len(token):  # the others' rows are in the way
            token, moved, along, lost, goal, used = (each[open_] for each in (token, moved, along, lost, goal, used))
    return needed


def _by_size(moved: Float[Tensor, "token unit"], vectors: Float[Tensor, "unit d_out"], left: float) -> Int[Tensor, " token"]:
    """The longest contributions first; the first k at which the residual is short enough."""
    n_units = moved.shape[1]
    residual = moved @ vectors
    goal = left * residual.double().square().sum(1)
    ranked = (moved.abs() * vectors.norm(dim=1)).argsort(dim=1, descending=True, stable=True)
    needed = torch.where(goal > 0, n_units, 0)
    token = (goal > 0).nonzero().flatten()
    start = 0
    while len(token) and start < n_units:
        size = max(1, _BYTES // (8 * len(token) * vectors.shape[1]))
        units = ranked[token, start : start + size]
        steps = (moved[token].gather(1, units)[..., None] * vectors[units]).cumsum(1)
        short = (residual[token, None] - steps).double().square().sum(2) <= goal[token, None]
        first = torch.where(short.any(1), short.int().argmax(1), n_units)
        reached = first < n_units
        needed[token[reached]] = start + 1 + first[reached]
        residual[token] -= steps[:, -1]
        token, start = token[~reached], start + size
    return needed


# ---------------------------------------------------------------------------------------------- by loss


def _by_loss(
    activations: _Activations, means: Mapping[str, Tensor], recovered: float, least: float, grid: Sequence[int]
) -> dict[str, Int[Tensor, "_row _pos"]]:
    """The smallest k of the grid that suffices at each position, counted over all units together. Raises ValueError: there is
    no token that the units help by `least`."""
    host, units = activations.host, activations.units
    predictions, needed = Predictions(host), []
    with frozen(host, "while gradients are taken by its units"):
        for batch in activations.split("units per token"):
            # Ranks of all units at all positions are the largest tensor.
            for rows in batch.split(max(1, _BYTES // (24 * units.n_units * batch.shape[1]))):
                needed.append(_of_rows(predictions, units, rows, means, (recovered, least), grid))
    found = torch.cat(needed)
    if not bool((found >= 0).any()):
        raise ValueError(
            f"these units take no more than {least} nats off the cross-entropy of any token of the text, so there is "
            "nothing to recover; give a lower least=, or more text"
        )
    return {units.sites[0].name if len(units.sites) == 1 else _TOGETHER: found}


def _of_rows(
    predictions: Predictions,
    units: UnitSet,
    rows: Int[Tensor, "rows pos"],
    means: Mapping[str, Tensor],
    goal: tuple[float, float],
    grid: Sequence[int],
) -> Int[Tensor, "rows pos"]:
    """The smallest k of the grid at every position; -1 where nothing is to be recovered, and at the last one."""
    recovered, least = goal
    with torch.no_grad():
        start = predictions.start(rows, min(site.layer for site in units.sites))
    full, ranks = _ranked(predictions, units.sites, rows, means, start)

    def kept(k: int) -> Float[Tensor, "rows prediction"]:
        """CE where every position has its first k units, and all others are at their means."""

        def keeping(mask: Tensor, mean: Float[Tensor, " unit"]) -> Callable[..., Tensor]:
            return lambda z, hook: torch.where(mask.to(z.device), z, mean.to(z))

        hooks = [(site.hook_name, keeping(ranks[site.name] < k, means[site.name])) for site in units.sites]
        with torch.no_grad(), predictions.host.model.hooks(fwd_hooks=hooks):
            return _cross_entropies(predictions, rows, predictions.run(rows, start))[1]

    empty = kept(0)
    undecided = empty - full > least
    needed = torch.full(rows.shape, -1)
    for k in grid:
        if not bool(undecided.any()):
            break
        # With all units it is the full replacement, whatever rounding says.
        reached = empty - (full if k == units.n_units else kept(k)) >= recovered * (empty - full)
        needed[:, :-1][undecided & reached] = k
        undecided &= ~reached
    return needed


def _ranked(
    predictions: Predictions,
    sites: Sequence[Site],
    rows: Int[Tensor, "rows pos"],
    means: Mapping[str, Tensor],
    start: Start | None,
) -> tuple[Float[Tensor, "rows prediction"], dict[str, Int[Tensor, "rows pos _unit"]]]:
    """CE with all units, and each unit's rank at its position among those of all sites, from 0."""
    shown: dict[str, Tensor] = {}

    def capture(name: str) -> Callable[..., Tensor]:
        def keep(z: Tensor, hook: Any) -> Tensor:
            shown[name] = z if z.requires_grad else z.detach().requires_grad_(True)
            return shown[name]

        return keep

    hooks = [(site.hook_name, capture(site.name)) for site in sites]
    with torch.enable_grad(), predictions.host.model.hooks(fwd_hooks=hooks):
        loss, full = _cross_entropies(predictions, rows, predictions.run(rows, start))
        require_seen(sites, shown, "units")
        gradients = torch.autograd.grad(loss, [shown[site.name] for site in sites])
    worth = [
        ((means[site.name].to(shown[site.name]) - shown[site.name].detach()) * gradient).float().cpu()
        for site, gradient in zip(sites, gradients, strict=True)
    ]
    require_finite("the effect", {site.name: each for site, each in zip(sites, worth, strict=True)})
    order = torch.cat(worth, 2).argsort(dim=2, descending=True, stable=True)
    ranks = torch.empty_like(order, dtype=torch.int32)
    ranks.scatter_(2, order, torch.arange(order.shape[2], dtype=torch.int32).expand_as(order))
    sizes = [each.shape[2] for each in worth]
    return full, dict(zip([site.name for site in sites], ranks.split(sizes, 2), strict=True))


def _cross_entropies(
    predictions: Predictions, rows: Int[Tensor, "rows pos"], run: Tensor
) -> tuple[Float[Tensor, ""], Float[Tensor, "rows prediction"]]:
    """Cross-entropy summed, with gradient where the run has one, and of each prediction (float64, on the CPU)."""
    pieces: list[Tensor] = []

    def measure(targets: Tensor, logits: Tensor) -> Tensor:
        each = cross_entropy(log_probabilities(logits), targets)
        pieces.append(each.detach().double().cpu())
        return each.sum()

    total = predictions.total(measure, rows, run)
    single = torch.empty(rows.shape[0], rows.shape[1] - 1, dtype=torch.float64)
    for (row, prediction), piece in zip(predictions.parts(rows, rows.shape[1] - 1), pieces, strict=True):
        single[row, prediction] = piece
    return total, single
