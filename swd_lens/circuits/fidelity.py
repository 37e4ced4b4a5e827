"""fidelity: how much of the host's behaviour a replacement keeps, on text that it was not fitted on.

1. Rows are run a few thousand tokens at a time. The dense host runs once for all replacements, in stages: what enters the first
   replaced layer of each is kept, and each replacement takes up there (`Runs`).
2. Residuals are unembedded a chunk of rows and positions at a time: no tensor of logits has more than CHUNK_BYTES, whatever the
   batch and the vocabulary.
3. Sum, over all next-token predictions that count (tasks/counting.py), cross-entropy of both hosts, KL(dense || replaced) and
   top-1 agreement; over all positions that count, squared error and squared norm of every site's output (bias included).
4. Divide at the end: means over predictions, and per site sum ||Y_rep - Y_dense||^2 / sum ||Y_dense||^2 (method.md §5.5).
   With `local=True` the dense run also adds up each site's local error (local_error.py): nothing upstream has a part in it.
   Both hosts predict the same tokens, so that the CE delta's standard error is that of the rows' differences.
5. A host in half precision runs one more replacement, a lossless one at the same sites (floor.py): what is not above its KL and
   CE difference is the dtype's rounding, and marked.

Runs in stages are verified on a few tokens before they are trusted; where a host gives other logits, everything is run whole.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.base.divergence import CHUNK_BYTES, Buffers, DensePredictions, Divergence
from swd_lens.base.errors import TokenError
from swd_lens.base.progress import tqdm
from swd_lens.base.record import Record
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.circuits.dense_cache import DenseCache
from swd_lens.circuits.floor import Floor, Floors
from swd_lens.circuits.local_error import LocalErrors, that_count
from swd_lens.hosts import Host, Start, host_of, require_no_dropout
from swd_lens.hosts.beginnings import text_for, warn_without_bos
from swd_lens.hosts.fused import fused_attention
from swd_lens.hosts.predictions import ends_in_whole_logits, tried_on
from swd_lens.hosts.recording import recording, require_seen, standing_hooks
from swd_lens.hosts.sites import Site
from swd_lens.tasks.counting import predicted
from swd_lens.units import Attachment, UnitSet, attach

_TOKENS = 2_048  # of a forward
_STAGES = "runs in stages"
_OUTPUT_BYTES = 2**29  # of the dense outputs of all replaced sites


@dataclass(frozen=True, repr=False)
class Fidelity(Record):
    """Replacement metrics; cross-entropies and KL in nats per predicted token.

    Attributes:
        ce_dense, ce: of the dense and of the replaced host.
        kl: KL(dense || replaced).
        top1_agreement: fraction of predictions whose most likely token is the same.
        relmse: site -> relative squared error of the site's output in the replaced host against the dense host, bias included;
            with several sites replaced it includes what earlier ones did to this one's input.
        n_predictions: next-token predictions averaged over.
        standing_hooks: hooks of the caller's that were on the host, by name; files name them only where there were any.
        ce_delta_se: standard error of `ce_delta`, rows being the independent observations; None of a single row.
        ce_delta_rows, kl_rows: delta and KL of each row; two replacements on the same rows are compared by their differences.
            Where rows have different numbers of predictions that count, each row's part in the mean (of a ratio, linearized).
        local_relmse: site -> relative squared error on the dense host's inputs, tr(E^T G E) / tr(W^T G W) with E = W - A B and G
            the Gram of these tokens: without bias, and without what earlier sites did. Of an encode/decode pair: its output's
            error, bias included, over the same denominator; over the dense output with its bias at a whole MLP. Empty
            unless measured with `local=True`; a site whose input the host never shows is left out.
        text: of the rows: `rows_begin_with_bos`, where the host has a BOS; with `exclude` or `attention_mask` what was left out,
            `left_out` being positions.
        floor: of a host in half precision, what a lossless replacement of the same sites shows on these tokens; None in float32,
            and where its factors would take more than 2 GiB.
    """

    derived: ClassVar[tuple[str, ...]] = ("ce_delta",)

    ce_dense: float
    ce: float
    kl: float
    top1_agreement: float
    relmse: Mapping[str, float]
    n_predictions: int
    standing_hooks: Sequence[str] = ()
    ce_delta_se: float | None = None
    ce_delta_rows: Sequence[float] = ()
    kl_rows: Sequence[float] = ()
    local_relmse: Mapping[str, float] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    floor: Floor | None = None

    def as_dict(self) -> dict[str, Any]:
        absent: dict[str, Any] = {"standing_hooks": [], "ce_delta_se": None, "ce_delta_rows": [], "kl_rows": []}
        absent |= {"local_relmse": {}, "text": {}, "floor": None}
        return {key: v for key, v in super().as_dict().items() if key not in absent or v != absent[key]}

    @property
    def ce_delta(self) -> float:
        """CE(replaced) - CE(dense)."""
        return self.ce - self.ce_dense

    @property
    def below_floor(self) -> tuple[str, ...]:
        """Which of "CE delta" and "KL" a lossless replacement in this dtype could show, too: no more than the floor's, the CE
        delta's within two standard errors."""
        if self.floor is None:
            return ()
        of_ce = abs(self.floor.ce_delta) + 2 * (self.floor.ce_delta_se or 0.0)
        below = {"CE delta": abs(self.ce_delta) <= of_ce, "KL": self.kl <= self.floor.kl}
        return tuple(name for name, is_below in below.items() if is_below)

    def difference_se(self, *others: "Fidelity", of: str = "CE") -> float | None:
        """Standard error of this CE (or `of="KL"`) less the others' mean, paired over rows.

        None unless all were measured on as many rows and against the same dense host: rows are differences from it.
        """
        if any(other.ce_dense != self.ce_dense for other in others):
            return None
        of_rows = [each.ce_delta_rows if of == "CE" else each.kl_rows for each in (self, *others)]
        rows = [torch.tensor(each, dtype=torch.float64) for each in of_rows]
        n_rows = len(rows[0])
        if not others or n_rows < 2 or any(len(of_other) != n_rows for of_other in rows):
            return None
        return float((rows[0] - torch.stack(rows[1:]).mean(0)).std() / n_rows**0.5)

    def table(self) -> pd.DataFrame:
        """One row: the model-level metrics, the CE delta's standard error where there is one, the floor of half precision, and
        site relMSE."""
        errors = list(self.relmse.values())
        row: dict[str, Any] = {"CE dense": self.ce_dense, "CE": self.ce, "CE delta": self.ce_delta}
        if self.ce_delta_se is not None:
            row["CE delta se"] = self.ce_delta_se
        row |= {"KL": self.kl, "top-1 agreement": self.top1_agreement}
        row |= {"mean relMSE": sum(errors) / len(errors), "max relMSE": max(errors)}
        if self.floor is not None:
            row |= {"CE delta floor": self.floor.ce_delta, "KL floor": self.floor.kl}
            row["below floor"] = ", ".join(self.below_floor)
        return pd.DataFrame([row])

    def title(self) -> str:
        of, se = f"Fidelity of {len(self.relmse)} sites on {self.n_predictions:,} predictions", self.ce_delta_se
        left_out = f" ({self.text['left_out']:,} positions left out)" if "left_out" in self.text else ""
        below = " and ".join(self.below_floor)
        marked = f"; {below}: not above what the host's dtype rounds off" if below else ""
        se = "" if se is None else f"± {se:.4f} "
        return f"{of}{left_out}: CE delta {self.ce_delta:+.4f} {se}nats, KL {self.kl:.3g} nats{marked}"

    def __repr__(self) -> str:
        """The title, then relMSE of each site in execution order, on the dense host's inputs beside it where measured."""
        lines = [f"{self.title()}, top-1 agreement {self.top1_agreement:.1%}"]
        for site, error in self.relmse.items():
            local = f" (local {self.local_relmse[site]:.3g})" if site in self.local_relmse else ""
            lines.append(f"  {site}: relMSE {error:.3g}{local}")
        return "\n".join(lines)

    def parts(self) -> tuple[Any, ...]:
        sites = pd.DataFrame({"site": list(self.relmse), "relMSE": list(self.relmse.values())})
        if self.local_relmse:
            sites["local relMSE"] = [self.local_relmse.get(site, float("nan")) for site in self.relmse]
        return (self.table(), "relMSE by site, largest first:", sites.sort_values("relMSE", ascending=False, kind="stable"))


@with_torch_defaults
def fidelity(
    model: Any,
    factors: Any,
    tokens: Any,
    *,
    batch_size: int | None = None,
    local: bool = False,
    exclude: Any = None,
    attention_mask: Any = None,
    dense: DenseCache | None = None,
    progress: bool = False,
) -> Fidelity:
    """Compare the host with and without the factors on held-out tokens (paper app. A.5; method.md §5.5).

    Logits are compared in float32; a host in half precision runs in its dtype, and a lossless replacement beside it says what
    its rounding alone makes (`Fidelity.floor`).

    Args:
        model: the host, with these sites not attached.
        factors: what to attach, see `swd_lens.attach`.
        tokens: (rows, pos) ids; each row predicts its own tokens 1..pos-1.
        batch_size: rows per forward; None = as many as make 2,048 tokens.
        local: also measure each site on the dense host's inputs (`Fidelity.local_relmse`). Of all 16 matrices of the embedded
            model it takes 45 % more time, of its four mlp_out 14 %.
        exclude: "special" (the tokenizer's special tokens, BOS among them) or token ids. Left out are predictions that are read
            at such a token, and predictions of such a token; of errors of outputs, their positions.
        attention_mask: (rows, pos), 0 where `tokens` are padding, which is left out. Padding before a text is moved behind it.
        dense: a cache of what enters the first replaced block and of what leaves the last one, for further replacements of this
            host on this text.

    Raises:
        TokenError: bad tokens, rows of a single token, or rows of which no prediction counts.
        AttachError: see `swd_lens.attach`.
        UnsupportedHostError: a site whose output the host's forward never shows.
    """
    how: dict[str, Any] = {"batch_size": batch_size, "local": local, "exclude": exclude, "dense": dense}
    return fidelities(model, {"": factors}, tokens, **how, attention_mask=attention_mask, progress=progress)[""]


@with_torch_defaults
def fidelities(
    model: Any,
    replacements: Mapping[str, Any],
    tokens: Any,
    *,
    batch_size: int | None = None,
    local: bool = False,
    exclude: Any = None,
    attention_mask: Any = None,
    dense: DenseCache | None = None,
    progress: bool = False,
) -> dict[str, Fidelity]:
    """`fidelity` of several replacements of one host: the dense host runs once for all of them. replacements: name -> what to
    attach; model, tokens, batch_size, local, exclude, attention_mask, dense: see `fidelity`. Raises See `fidelity`."""
    stream = text_for(model, tokens, exclude=exclude, attention_mask=attention_mask)
    rows = torch.cat(list(stream.batches(stream.n_rows)))
    counted = stream.counted(rows, 0)
    require_no_dropout(model)
    if rows.shape[1] < 2:
        raise TokenError("fidelity needs rows of at least two tokens: each position predicts the next")
    if (of_predictions := predicted(counted)) is not None and not bool(of_predictions.any()):
        raise TokenError("no prediction counts: every one is read at a token that is left out, or is of one")
    host = host_of(model)
    units = {name: UnitSet.of(model, factors) for name, factors in replacements.items()}
    floors = Floors(host, units, rows)
    asked, units = units, units | floors.units
    sums = {name: _Sums(of_name.sites) for name, of_name in units.items()}
    warn_without_bos(model, stream, "held-out tokens")
    with torch.no_grad(), ExitStack() as stack:
        # A single replacement stays mounted; several may share sites, and take turns.
        alone = stack.enter_context(attach(model, next(iter(units.values())))) if len(units) == 1 else None
        stack.enter_context(fused_attention(host, rows))
        errors = LocalErrors(host, asked, alone) if local else None
        runs = Runs(host, units, alone, dense)
        runs.verify(rows)
        outputs_at_once = _OUTPUT_BYTES // (4 * sum(site.d_out for site in runs.sites))
        size = batch_size or max(1, min(_TOKENS, outputs_at_once) // rows.shape[1])
        batches = [*zip(rows.split(size), [None] * len(rows) if counted is None else counted.split(size), strict=False)]
        for batch, of_batch in tqdm(batches, desc="fidelity", unit="batch", disable=not progress, leave=False):
            runs.counted = of_batch
            runs.add(batch, sums, errors.added(of_batch) if errors else nullcontext())
    for name in floors.units:
        lossless = sums[name].result()
        floors.add(name, Floor(lossless.kl, lossless.ce_delta, lossless.ce_delta_se))
    about = {"standing_hooks": tuple(standing_hooks(model).get("standing_hooks", ())), "text": stream.about(model)}
    local_of = errors.relmse if errors else lambda name: {}
    return {name: sums[name].result(local_relmse=local_of(name), floor=floors.of(name), **about) for name in asked}


# ---------------------------------------------------------------------------------------------- sums


@dataclass
class _Sums:
    """Sums of one replacement over batches, in float64."""

    sites: Sequence[Site]
    total: Divergence = field(default_factory=Divergence)
    errors: dict[str, Tensor] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)
    ce_deltas: list[Tensor] = field(default_factory=list)  # of each batch, (row,)
    kls: list[Tensor] = field(default_factory=list)
    n_of_rows: list[Tensor] = field(default_factory=list)  # predictions of each batch's rows, where not all count

    def result(self, **about: Any) -> Fidelity:
        """Divide the sums by their counts. about: further fields of the result."""
        # An expert to which none of these tokens is routed has no error.
        shown = [site.name for site in self.sites if site.expert is None or self.norms[site.name] > 0]
        relmse = {name: float(self.errors[name] / self.norms[name]) for name in shown}
        deltas, kls = (self._parts_of_rows(torch.cat(sums)) for sums in (self.ce_deltas, self.kls))
        means: dict[str, Any] = self.total.means()
        return Fidelity(
            **means,
            relmse=relmse,
            n_predictions=self.total.n_predictions,
            ce_delta_se=float(deltas.std() / len(deltas) ** 0.5) if len(deltas) > 1 else None,
            ce_delta_rows=tuple(deltas.tolist()),
            kl_rows=tuple(kls.tolist()),
            **about,
        )

    def _parts_of_rows(self, sums: Float[Tensor, " row"]) -> Float[Tensor, " row"]:
        """Each row's estimate of the mean over predictions, from what it adds to their sum: the mean of these is that mean."""
        n_predictions = self.total.n_predictions
        if self.n_of_rows:
            # The mean is a ratio of sums over rows: each row has the part in it that its linearization has.
            n_of_rows, mean = torch.cat(self.n_of_rows), float(sums.sum()) / n_predictions
            sums = sums - mean * n_of_rows + mean * n_predictions / len(sums)
        return sums * (len(sums) / n_predictions)


# ---------------------------------------------------------------------------------------------- runs


class Runs:
    """The dense host and its replacements on a batch of rows.

    In stages the dense host runs once for all, each replacement takes up at its first replaced layer, and logits are made a chunk
    of positions at a time. Whole, where that gives other logits, every run begins at the tokens and ends in its logits. units: by
    name of the replacement; alone: the attachment of the only one, which is mounted already, None: there are several; kept: what
    enters the first replaced block, and what leaves the last one, is kept there; random: names of replacements that draw anew in
    each run.
    """

    def __init__(
        self,
        host: Host,
        units: Mapping[str, UnitSet],
        alone: Attachment | None,
        kept: DenseCache | None = None,
        random: Sequence[str] = (),
    ):
        self.random = random
        self.host, self.units, self.alone, self.kept, self.staged = host, units, alone, kept, True
        self.buffers, self.end = Buffers(), host.model.cfg.n_layers
        self.counted: Tensor | None = None  # (batch, pos) positions of the present batch that count; None: all
        self.sites = list({site.name: site for of_name in units.values() for site in of_name.sites}.values())
        self.first = {name: min(site.layer for site in of_name.sites) for name, of_name in units.items()}
        self._starts: dict[int, Start] = {}

    def verify(self, rows: Int[Tensor, "rows pos"]) -> None:
        """Run whole from now on where the first tokens give other logits in stages, in the dense host or a replacement that is
        the same in every run (not noise); that warns."""
        few = tried_on(self.host, rows)
        with self.dense_host():
            check = functools.partial(ends_in_whole_logits, self.host, few, lambda: self.dense(few), shortcut=_STAGES)
            agrees = check() if self.kept is None else self.kept.agreement((_STAGES, *self.first.values()), few, check)
            if agrees and not self._starts:
                self.dense(few)  # the replacements below take up there
        for name, of_name in self.units.items():
            if name in self.random:
                continue
            with self.mounted(of_name):
                run = functools.partial(self.replaced_end, few, name)
                agrees = agrees and ends_in_whole_logits(self.host, few, run, shortcut=_STAGES)
        self.staged = agrees

    def add(self, batch: Int[Tensor, "batch pos"], sums: Mapping[str, _Sums], watching: AbstractContextManager[Any]) -> None:
        """Add this batch's part to every replacement's sums; `watching` is open while the dense host runs."""
        with self.dense_host(), watching, recording(self.host, outputs=self.sites, keep=Tensor.float) as seen:
            dense = self.dense(batch)
        replaced: dict[str, Tensor] = {}
        for name, of_name in self.units.items():
            for of_rows in (sums[name].ce_deltas, sums[name].kls):
                of_rows.append(torch.zeros(len(batch), dtype=torch.float64))
            if (counted := predicted(self.counted)) is not None:
                sums[name].n_of_rows.append(counted.sum(1))
            shown: set[str] = set()

            def compare(site: Site, y: Tensor, of: _Sums = sums[name], shown: set[str] = shown) -> None:
                shown.add(site.name)
                of_dense = seen.outputs[site.name]
                for of_sites, value in ((of.errors, y.float() - of_dense), (of.norms, of_dense)):
                    squared = that_count(value, self.counted).double().square().sum().cpu()
                    of_sites[site.name] = of_sites.get(site.name, 0.0) + squared

            with self.mounted(of_name), self.host.outputs(of_name.sites, compare):
                replaced[name] = self.replaced_end(batch, name)
            require_seen(of_name.sites, shown, "output")
        for rows, chunk in self.chunks(batch):
            tokens = batch[rows, chunk]
            predictions = DensePredictions(self.logits(tokens, dense[rows, chunk]), tokens, self.buffers)
            counted = None if self.counted is None else predicted(self.counted[rows, chunk])
            for name, end in replaced.items():
                logits, of_rows = self.logits(tokens, end[rows, chunk]), sums[name]
                added = of_rows.ce_deltas[-1][rows], of_rows.kls[-1][rows]
                of_rows.total += predictions.divergence(logits, *added, counted)

    def dense_host(self) -> AbstractContextManager[Any]:
        return self.alone.dense() if self.alone else nullcontext()

    def mounted(self, units: UnitSet) -> AbstractContextManager[Any]:
        return nullcontext() if self.alone else attach(self.host.model, units)

    def dense(self, batch: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos _width"]:
        """Run the dense host: the last block's output, or the logits of whole runs."""
        if not self.staged:
            return self.host.run(batch)
        self._starts, start, end = {}, None, None
        layers = sorted({*self.first.values(), self.end})
        if self.kept is not None:
            layer = layers.pop(0)
            start = self._starts[layer] = Start(layer, self.kept.residual(self.host, batch, layer))
            if (end := self.kept.known_residual(batch, self.end)) is not None:
                # Only as far as the sites go, whose inputs and outputs are looked at.
                layers[-1] = max(site.layer for site in self.sites) + 1
        for layer in layers:
            start = Start(layer, self.host.residual(batch, layer, start=start))
            self._starts[layer] = start
        if end is None:
            end = self._starts[self.end].residual
            if self.kept is not None:
                self.kept.keep_residual(batch, self.end, end)
        return end

    def replaced_end(self, batch: Int[Tensor, "batch pos"], name: str) -> Float[Tensor, "batch pos _width"]:
        """Run a replacement that is mounted, after `dense` of these rows; ends as that does."""
        if not self.staged:
            return self.host.run(batch)
        return self.host.residual(batch, self.end, start=self._starts[self.first[name]])

    def logits(self, tokens: Int[Tensor, "row pos"], end: Float[Tensor, "row pos _width"]) -> Float[Tensor, "row pos vocab"]:
        return self.host.unembed(tokens, end) if self.staged else end

    def chunks(self, batch: Int[Tensor, "batch pos"]) -> Iterator[tuple[slice, slice]]:
        """Rows and positions, as many at a time as CHUNK_BYTES allow; the last position of a chunk predicts nothing and begins
        the next. Of whole runs, row by row: the log-probabilities of all would be as large as the logits."""
        if not self.staged:
            yield from ((slice(row, row + 1), slice(None)) for row in range(len(batch)))
            return
        last, most = batch.shape[1] - 1, CHUNK_BYTES // (4 * self.host.model.cfg.d_vocab)
        # Sixteen rows are small under any vocabulary, and products of fewer round otherwise.
        n_rows = min(len(batch), max(16, most // 2))
        size = max(1, most // n_rows - 1)
        for row in range(0, len(batch), n_rows):
            for start in range(0, last, size):
                yield slice(row, row + n_rows), slice(start, min(start + size, last) + 1)
