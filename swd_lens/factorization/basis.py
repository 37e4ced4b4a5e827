"""choose_basis: whose coordinates a matrix's units should start as, its inputs or its outputs, told on text without a task.

A coordinate alone is an exact unit: an input reads one thing and writes W's row, an output reads W's column and writes one
thing. On the side where few of them carry what the matrix does to a prediction, units that stay near one coordinate make cheap
circuits.

1. The text goes forward and back through the dense host (gradients.py): x, what a matrix reads, and g, the gradient of the
   next tokens' cross-entropy by what it writes, at every token.
2. Of each token: what removing a coordinate would cost to first order, -x_i (g W^T)_i of an input, -y_j g_j of an output
   y = x W, where it costs something; and the edges of the fewest coordinates, the strongest first, that together have `share`
   of it all.
3. The mean over tokens of the logarithms' difference says which side is cheaper. Where it is not clear, and at queries, the kind
   of the matrix says it: an MLP's neurons, the dimensions of heads at their output, the paper's basis elsewhere.

The result is a mapping site name -> "input", "output" or "paper", which `swd_lens.factorize(model, sites, basis=choice)` takes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from swd_lens.base import __version__
from swd_lens.base.checks import bounded
from swd_lens.base.errors import FactorFileError, GradientError, ResumeError, TokenError, UnsupportedHostError
from swd_lens.base.progress import tqdm
from swd_lens.base.record import Record
from swd_lens.base.sealed import damaged, readable
from swd_lens.base.shares import fewest_with
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.factorization.calibration_text import CalibrationText
from swd_lens.factorization.gradients import AtSite, gradient_passes, require_loss, rows_per_pass
from swd_lens.factorization.job import Job
from swd_lens.factorization.matrices import LIKELY
from swd_lens.hosts import find_sites, host_of
from swd_lens.hosts.families import facts_of
from swd_lens.hosts.recording import standing_hooks
from swd_lens.hosts.sites import Pattern, Site, base_kind, split_name
from swd_lens.tasks.counting import predicted
from swd_lens.tasks.streams import TokenStream, as_stream
from swd_lens.units.index import INDEX, WHAT, read_index

# Text chooses a side where its edges are at most this share of the other's, and the difference is not chance. Nearer to each
# other it is no guide (tests.benchmarks.sides), and the kind of the matrix is (tests.benchmarks.single_calls, bases).
CLEAR = 2 / 3
STANDARD_ERRORS = 2.0

# Where tasks contradicted text, clear or not (most cells of the embedded model, and SmolLM2's blocks.8): the paper's basis stays.
UNTOLD = ("attn_q", "attn_qkv")

PAPER = "paper"
SHARE = 0.5
N_TOKENS = 2_048
GROUP_BYTES = 2**30  # activations and gradients of the matrices that are looked at in one pass


@dataclass(frozen=True)
class SideCosts(Record):
    """Cost of an effect on a next token, on either side of one matrix."""

    # inputs, outputs: edges of the fewest coordinates that have the share; geometric means over tokens, NaN of none
    inputs: float
    outputs: float
    log_se: float  # standard error of log(inputs / outputs), tokens being the observations; NaN of fewer than two
    n_predictions: int  # tokens at which the matrix helps at all

    @property
    def ratio(self) -> float | None:
        """Edges on the side of inputs over those on the side of outputs; None where the matrix helps at no token."""
        return self.inputs / self.outputs if self.n_predictions else None

    @property
    def cheaper(self) -> str | None:
        """The side that is clearly cheaper, "input" or "output"."""
        if self.n_predictions < 2:
            return None
        difference = math.log(self.inputs / self.outputs)
        if abs(difference) < max(-math.log(CLEAR), STANDARD_ERRORS * self.log_se):
            return None
        return "input" if difference < 0 else "output"


@dataclass(frozen=True, repr=False, eq=False)
class BasisChoice(Record, Mapping[str, str]):
    """Basis per site: a mapping site name -> "input", "output" or "paper" in execution order, with the reasons.

    Attributes:
        share: of the effect.
        settings: everything else that was used; plain JSON values.
        sites: site name -> what was measured.
    """

    share: float
    settings: Mapping[str, Any]
    sites: Mapping[str, SideCosts]

    def __getitem__(self, site: str) -> str:
        kind = base_kind(split_name(site)[1])
        return (None if kind in UNTOLD else self.sites[site].cheaper) or LIKELY.get(kind, PAPER)

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def told(self) -> dict[str, Any]:
        """The choice, and edges on the side of inputs over those on the side of outputs, as a set's provenance keeps them."""
        ratios = {name: costs.ratio for name, costs in self.sites.items()}
        return {"by": "text", "chosen": dict(self), "inputs over outputs": ratios}

    def table(self) -> pd.DataFrame:
        """One row per site: edges on either side, their ratio, the standard error of its logarithm, the basis."""
        rows = [
            {
                "site": name,
                "inputs": costs.inputs,
                "outputs": costs.outputs,
                "inputs / outputs": costs.inputs / costs.outputs,
                "log se": costs.log_se,
                "basis": self[name],
            }
            for name, costs in self.sites.items()
        ]
        return pd.DataFrame(rows)

    def title(self) -> str:
        counts = {side: sum(basis == side for basis in self.values()) for side in ("input", "output", PAPER)}
        chosen = ", ".join(f"{n} {side}" for side, n in counts.items() if n)
        return f"Basis of {len(self)} matrices: {chosen}; by the edges that carry {self.share:.0%} of the effect on a next token."

    def parts(self) -> tuple[pd.DataFrame]:
        formats = {"site": "{}", "inputs": "{:,.0f}", "outputs": "{:,.0f}", "inputs / outputs": "{:.2f}"}
        formats |= {"log se": "{:.2f}", "basis": "{}"}
        table = self.table()
        return (pd.DataFrame({name: table[name].map(form.format) for name, form in formats.items()}),)

    def __repr__(self) -> str:
        return f"{self.title()}\n{self.parts()[0].to_string(index=False)}"


@with_torch_defaults
def choose_basis(
    model: Any,
    sites: Pattern = "all",
    tokens: Any = None,
    *,
    share: float | int = SHARE,
    n_tokens: int = N_TOKENS,
    progress: bool = True,
) -> BasisChoice:
    """Which side's coordinates units of each matrix should start as, told on text (ours; tests/benchmarks/RESULTS.md).

    A pass forward and back for as many matrices as have room (GROUP_BYTES); of each only its costs are kept. SmolLM2's 210
    matrices take two minutes on one thread, and 3.6 GB with the model.

    Args:
        model: the host, with nothing attached.
        sites: a pattern or several, see `swd_lens.hosts.sites.select_sites`.
        tokens: (rows, pos) ids, or a `TokenStream`; each row predicts its own tokens 1..pos-1.
        share: of the effect on a next token, between 0 and 1.
        n_tokens: as many whole rows as have so many tokens are taken; all where the text has fewer.
        progress: show a bar over the tokens.

    Raises:
        UnknownSiteError: see `swd_lens.find_sites`.
        TokenError: no tokens, or rows of a single one.
        UnsupportedHostError: a model that does not predict next tokens, or through which no gradient passes.
        AttachError: a site is attached.
        ValueError: a share outside (0, 1), fewer tokens than 1, or a gradient that is not finite (site named).
    """
    if not 0 < share < 1:
        raise ValueError(f"share={share}: a share of the effect lies between 0 and 1, say .5")
    bounded("n_tokens", n_tokens, 1)
    if tokens is None:
        raise TokenError("choose_basis needs tokens: it looks at what the host does with a text; give tokens=")
    return chosen(model, find_sites(model, sites), as_stream(tokens, model), float(share), n_tokens, progress)


def chosen(model: Any, sites: Sequence[Site], stream: TokenStream, share: float, n_tokens: int, progress: bool) -> BasisChoice:
    """Choose bases of sites that are found already, on a stream; see `choose_basis`."""
    require_loss(model, stream)
    n_rows = min(stream.n_rows, -(-n_tokens // stream.row_length))
    # Sites whose activations and gradients have room beside each other, in their order.
    tokens = min(rows_per_pass(stream), n_rows) * stream.row_length
    groups: list[list[Site]] = [[]]
    room = GROUP_BYTES
    for site in sites:
        needed = 4 * tokens * (site.d_in + site.d_out)
        if needed > room and groups[-1]:
            groups.append([])
            room = GROUP_BYTES
        groups[-1].append(site)
        room -= needed
    costs: dict[str, SideCosts] = {}
    with tqdm(total=n_rows * len(groups), desc="basis", unit="row", disable=not progress, leave=False) as bar:
        for group in groups:
            costs |= _costs_of(model, group, stream, n_rows, share, bar)
    settings = {"swd_lens": __version__, "model": str(model.cfg.model_name), "rows": n_rows}
    settings |= {"tokens": n_rows * stream.row_length, **standing_hooks(model)}
    return BasisChoice(share, settings, costs)


def _costs_of(
    model: Any, sites: Sequence[Site], stream: TokenStream, n_rows: int, share: float, bar: Any
) -> dict[str, SideCosts]:
    """Costs of some sites, by one pass over the rows."""
    host, size, left = host_of(model), rows_per_pass(stream), n_rows
    logs: dict[str, list[Tensor]] = {site.name: [] for site in sites}
    with gradient_passes(model, sites, stream.first_row()[None], reads=True) as gradients_of:
        for rows in stream.batches(size):
            rows = rows[:left]
            counted = stream.counted(rows, n_rows - left)
            seen = gradients_of(rows, predicted(counted))
            for site in sites:
                log_costs = _log_costs(site, host.weight(site).float(), seen.pop(site.name), share, counted)
                logs[site.name].append(log_costs)
            bar.update(min(size, left))
            left -= size
            if left <= 0:
                break
    costs: dict[str, SideCosts] = {}
    for name, of_site in logs.items():
        together = torch.cat(of_site)
        inputs, outputs = together.mean(0).exp().tolist()
        difference, n = together[:, 0] - together[:, 1], len(together)
        costs[name] = SideCosts(inputs, outputs, float(difference.std() / n**0.5) if n > 1 else math.nan, n)
    return costs


def _log_costs(
    site: Site, weight: Float[Tensor, "d_in d_out"], at_site: AtSite, share: float, counted: Bool[Tensor, "rows pos"] | None
) -> Float[Tensor, "prediction 2"]:
    """Logarithms of the edges at each token that counts and helps, on the sides of inputs and outputs."""
    read, gradient = at_site
    assert read is not None
    # The last token of a row predicts nothing.
    x, g = (values[:, :-1].float().flatten(0, -2) for values in (read, gradient))
    if not bool(g.isfinite().all()):
        raise GradientError(
            f"the loss's gradients at {site.name} are not finite on these tokens; the host itself is broken there"
        )
    if counted is not None:
        that_count = counted[:, :-1].flatten().to(x.device)
        x, g = x[that_count], g[that_count]
    entries = weight != 0
    sides = (-x * (g @ weight.T), 1 + entries.sum(1)), (-(x @ weight) * g, 1 + entries.sum(0))
    costs = torch.stack([fewest_with(share, gains.clamp_(min=0), edges)[:, 0] for gains, edges in sides], 1)
    return costs[(costs > 0).all(1)].double().log().cpu()


def with_chosen_bases(job: Job, *, progress: bool, folder: Path | None = None) -> Job:
    """Choose bases by the job's text, where it leaves them open: on a host that predicts next tokens, with rows of two tokens or
    more. By default a host without gradients, or without finite ones, keeps what is LIKELY (matrices.py). folder: of the factors
    that are being made; a call that goes on there takes over what the first one was told. Raises ResumeError: the folder's index
    names a basis that there is not."""
    stream, told = job.stream, None
    if job.basis_by_text != "no" and folder is not None:
        # What text said of exactly these matrices to the call whose factors lie in the folder.
        with suppress(FactorFileError, FileNotFoundError):  # a damaged index is said by who reads it
            told = read_index(folder)["provenance"].get("basis")
        if isinstance(told, dict) and "chosen" not in told:  # by kind, or by a caller's word
            told = None
    if told and folder is not None:
        try:
            with readable(folder / INDEX, WHAT, FactorFileError):
                bases = dict(told["chosen"])
                if unknown := [basis for basis in bases.values() if basis not in ("input", "output", PAPER)]:
                    reason = f"basis {unknown[0]!r}"
                    raise FactorFileError(damaged(folder / INDEX, WHAT, reason))
        except FactorFileError as cause:
            raise ResumeError(f"{cause}; or start again with overwrite=True") from cause
        if bases.keys() == {site.name for site in job.sites}:
            return job.with_bases(told)
    if job.basis_by_text == "no" or stream is None or stream.row_length < 2 or not facts_of(job.model).causal:
        return job
    known = {} if job.stands is None or not isinstance(stream, CalibrationText) else stream.side_costs(job.stands)
    unknown = [site for site in job.sites if site.name not in known]
    try:
        known |= chosen(job.model, unknown, stream, SHARE, N_TOKENS, progress).sites if unknown else {}
    except (UnsupportedHostError, GradientError):  # a factorization needs no gradients
        if job.basis_by_text == "asked":
            raise
        return job
    return job.with_bases(BasisChoice(SHARE, {}, {site.name: known[site.name] for site in job.sites}).told())
