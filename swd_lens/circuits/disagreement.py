"""disagreement: where a replacement predicts otherwise than the dense host, token by token, beside noise of the same size.

A mean KL hides its tail: a replacement may be right nearly everywhere and far off at a few tokens.

1. KL(dense || replaced) of every next-token prediction of a text that the replacement was not fitted on; of each slice of the
   text its median, 99th and 99.9th percentile, and maximum.
2. Null: at each replaced site Gaussian noise is added to the dense output in place of the replacement's error, with the mean and
   covariance that this error has on the dense host's own inputs (local_error.py), so that its relMSE is equal. It is drawn anew
   at each position: what the error has beyond its second moment, being large where it matters, or at the same tokens in every
   site, noise has not.
3. n such noises are run; p = (1 + how many have as large a value) / (n + 1), per slice and quantile. It is uniform for a
   replacement whose error is such noise (tests/circuits/test_disagreement.py).
4. The dense host runs once for the replacement and all noises, in stages (fidelity.py, `Runs`). Before that the blocks up to the
   last replaced one run for the error's covariance.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from swd_lens.base.checks import bounded, one_of
from swd_lens.base.divergence import DensePredictions
from swd_lens.base.errors import TokenError, quoted
from swd_lens.base.figures import INK, new_figure, style
from swd_lens.base.progress import tqdm
from swd_lens.base.record import SavedRecord
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.circuits.dense_cache import DenseCache
from swd_lens.circuits.fidelity import Runs
from swd_lens.circuits.local_error import LocalErrors
from swd_lens.hosts import Start, require_no_dropout
from swd_lens.hosts.beginnings import text_for, warn_without_bos
from swd_lens.hosts.fused import fused_attention
from swd_lens.hosts.recording import standing_hooks
from swd_lens.tasks.counting import predicted
from swd_lens.units import CoderUnits, UnitSet

QUANTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
SLICES = ("position", "surprise")
_POSITIONS = {"position 0": (0, 1), "positions 1 to 15": (1, 16), "positions from 16": (16, None)}
_TOKENS = 2_048  # of a forward
_COVARIANCE_BYTES = 2**31  # of all replaced sites
_EXACT = 1e-10  # relMSE of rounding: a replacement that is exact has no tail
_WORST = 10  # predictions that are listed

Slices = str | Mapping[str, Bool[Tensor, "rows pos"] | Callable[[Tensor], Tensor]]


@dataclass(frozen=True, repr=False)
class Disagreement(SavedRecord):
    """KL(dense || replaced) of single predictions, beside noise of equal relMSE and covariance.

    Attributes:
        rows: one row per slice and quantile: "slice", "predictions" (how many), "of" ("p50", "p99", "p99.9", "max"), "KL" (nats),
            "noise mean", "noise lowest" and "noise highest" over the noises, and "p".
        worst: the predictions of the largest KL: "row", "position" (at which the token after it is predicted), "token" and "next
            token" (ids), "KL" and "CE dense" (nats), the largest first.
        relmse: site -> squared error of its output over its squared norm, both on the dense host's inputs; noise has the same.
        settings: n, seed, slices, the text.
    """

    WHAT: ClassVar[str] = "a disagreement"

    rows: pd.DataFrame
    worst: pd.DataFrame
    relmse: Mapping[str, float]
    settings: Mapping[str, Any]

    @property
    def exact(self) -> bool:
        """Whether the replacement differs from the dense host by rounding alone: then its tail says nothing."""
        return max(self.relmse.values(), default=0.0) < _EXACT

    def value(self, of: str = "p99.9", slice: str = "all") -> float:
        """A quantile of KL in a slice, in nats."""
        return float(self._row(of, slice)["KL"])

    def p(self, of: str = "p99.9", slice: str = "all") -> float:
        """p of a quantile in a slice; NaN for a replacement that is exact."""
        return float(self._row(of, slice)["p"])

    def _row(self, of: str, slice: str) -> dict[str, Any]:
        one_of("of", of, QUANTILES)
        one_of("slice", slice, dict.fromkeys(self.rows["slice"]))
        return dict(self.rows.loc[(self.rows["of"] == of) & (self.rows["slice"] == slice)].iloc[0])

    def table(self) -> pd.DataFrame:
        """A copy of the rows."""
        return self.rows.copy()

    def plot(self):
        """KL at each quantile, a panel per slice, with the range of the noises; a matplotlib Figure."""
        slices = list(dict.fromkeys(self.rows["slice"]))
        figure, axes = new_figure(1, len(slices), width=2.6, height=2.6)
        for ax, name in zip(axes[0], slices, strict=True):
            rows = self.rows.loc[self.rows["slice"] == name]
            places = range(len(rows))
            ax.fill_between(places, rows["noise lowest"], rows["noise highest"], alpha=0.2, color=style(1)["color"], linewidth=0)
            ax.plot(places, rows["noise mean"], label="noise", linewidth=1.2, **style(1))
            ax.plot(places, rows["KL"], label="replacement", marker="o", markersize=4, linewidth=1.2, **style(0))
            ax.set_xticks(list(places), rows["of"].tolist())
            ax.set_yscale("log")
            ax.set_title(f"{name} ({int(rows['predictions'].iloc[0]):,})", fontsize=9, color=INK)
        axes[0, 0].set_ylabel("KL (nats)")
        axes[0, 0].legend(fontsize=8, frameon=False)
        return figure

    def in_words(self) -> str:
        """One sentence: median, tail and p of the whole text; or that the replacement is exact."""
        n = int(self._row("max", "all")["predictions"])
        if self.exact:
            return f"the replacement differs from the dense host by rounding alone: the tail of {n:,} predictions says nothing"
        values = ", ".join(f"{of} {self.value(of):.3g}" for of in QUANTILES)
        noise = float(self._row("p99.9", "all")["noise mean"])
        return f"KL of {n:,} predictions: {values} nats; noise of equal covariance has p99.9 {noise:.3g} (p = {self.p():.3g})"

    def __repr__(self) -> str:
        return f"Disagreement({self.in_words()})"

    def parts(self) -> tuple[Any, ...]:
        return self.table(), self.plot(), "Largest disagreements:", self.worst


@with_torch_defaults
def disagreement(
    model: Any,
    factors: Any,
    text: Any,
    *,
    slices: Slices | None = None,
    n: int = 20,
    seed: int = 0,
    batch_size: int | None = None,
    exclude: Any = None,
    attention_mask: Any = None,
    dense: DenseCache | None = None,
    progress: bool = False,
) -> Disagreement:
    """KL of every prediction of a replaced host from the dense one: quantiles by slice of the text, with noise beside (ours).

    Args:
        model: the host, with these sites not attached.
        factors: what to attach, see `swd_lens.attach`.
        text: (rows, pos) held-out ids; each row predicts its own tokens 1 .. pos-1.
        slices: further slices beside "all": name -> (rows, pos) mask of the positions at which a prediction is read, or a
            function of the rows that gives one; "position" (the first, 1 to 15, later ones) or "surprise" (quarters of the
            predictions by the dense host's cross-entropy).
        n: noises; the smallest possible p is 1 / (n + 1).
        seed: of them.
        batch_size: rows per forward; None = as many as make 2,048 tokens.
        exclude, attention_mask: predictions that are left out, see `swd_lens.fidelity`; errors there are left out of the noise's
            covariance, too.
        dense: what enters the first replaced block is kept there.
        progress: show a bar.

    Returns:
        Disagreement: quantiles and p-values by slice; a sentence where the replacement is exact.

    Raises:
        ValueError: no noise, an unknown slice, one of another shape or without predictions; covariances of the replaced sites
            would take more than 2 GiB.
        TokenError, AttachError, UnsupportedHostError: see `swd_lens.fidelity`.

    Source: ours.
    """
    bounded("n, the number of noises,", n, 1)
    stream = text_for(model, text, exclude=exclude, attention_mask=attention_mask)
    rows = torch.cat(list(stream.batches(stream.n_rows)))
    if rows.shape[1] < 2:
        raise TokenError("disagreement needs rows of at least two tokens: each position predicts the next")
    counted = stream.counted(rows, 0)
    masks = None if slices is None or isinstance(slices, str) else _masks(slices, rows)
    if isinstance(slices, str):
        one_of("slices", slices, SLICES)
    require_no_dropout(model)
    warn_without_bos(model, stream, "held-out tokens")
    units, dense = UnitSet.of(model, factors), DenseCache() if dense is None else dense
    size = batch_size or max(1, _TOKENS // rows.shape[1])
    kl, ce, relmse = _measured(units, rows, counted, size, dense, n, seed, progress)
    which = predicted(counted)
    which = torch.ones(ce.shape, dtype=torch.bool) if which is None else which
    if not bool(which.any()):
        raise TokenError("no prediction counts: every one is read at a token that is left out, or is of one")
    if masks is None:
        masks = {} if slices is None else _named_slices(str(slices), ce, which)
    table = quantiles(kl, {"all": which} | {name: mask & which for name, mask in masks.items()})
    if max(relmse.values(), default=0.0) < _EXACT:
        table["p"] = float("nan")
    worst = []
    order = kl[0][which].sort(descending=True, stable=True).indices[:_WORST]
    for row, position in which.nonzero()[order].tolist():
        about = {"row": row, "position": position, "token": int(rows[row, position]), "next token": int(rows[row, position + 1])}
        worst.append(about | {"KL": float(kl[0, row, position]), "CE dense": float(ce[row, position])})
    settings = {"n": n, "seed": seed, "slices": list(masks), "rows": len(rows), "row_length": rows.shape[1]}
    settings |= {"model": str(model.cfg.model_name), "replacement": units.provenance, **stream.about(model)}
    return Disagreement(table, pd.DataFrame(worst), relmse, settings | standing_hooks(model))


def _masks(slices: Mapping[str, Any], rows: Int[Tensor, "rows pos"]) -> dict[str, Bool[Tensor, "rows predictions"]]:
    """Masks of predictions, from masks of positions; a ValueError where one does not fit the rows."""
    masks = {}
    for name, given in slices.items():
        mask = given(rows) if callable(given) else given
        if not isinstance(mask, Tensor) or mask.shape != rows.shape or mask.dtype != torch.bool:
            what = f"{tuple(mask.shape)} of {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"the slice {quoted(name)} must be a bool mask of the rows, {tuple(rows.shape)}, got {what}")
        if name == "all":
            raise ValueError("the slice of all predictions is called 'all' already; give yours another name")
        masks[str(name)] = mask[:, :-1].cpu()
    return masks


def _named_slices(
    name: str, ce: Float[Tensor, "rows predictions"], which: Bool[Tensor, "rows predictions"]
) -> dict[str, Bool[Tensor, "rows predictions"]]:
    """The slices that have a name; those of no predictions are left out."""
    if name == "position":
        at = torch.arange(ce.shape[1]).expand_as(ce)
        masks = {label: (at >= low) & (at < (ce.shape[1] if high is None else high)) for label, (low, high) in _POSITIONS.items()}
    else:
        order = torch.zeros_like(ce, dtype=torch.int64)
        order[which] = ce[which].argsort(stable=True).argsort(stable=True)
        quarter = order * 4 // max(1, int(which.sum()))
        labels = ("least surprising quarter", "second quarter", "third quarter", "most surprising quarter")
        masks = {label: quarter == i for i, label in enumerate(labels)}
    return {label: mask for label, mask in masks.items() if bool((mask & which).any())}


def quantiles(kl: Float[Tensor, "run rows predictions"], slices: Mapping[str, Bool[Tensor, "rows predictions"]]) -> pd.DataFrame:
    """`Disagreement.rows`. kl: of the replacement, then of each noise. Raises ValueError: a slice of no predictions."""
    rows = []
    for name, mask in slices.items():
        if not bool(mask.any()):
            raise ValueError(f"the slice {quoted(name)} has no prediction that counts; leave it out")
        ordered = kl[:, mask].sort(1).values
        for of, share in QUANTILES.items():
            own, *others = ordered[:, max(0, -int(-share * ordered.shape[1] // 1) - 1)].tolist()
            noise = pd.Series(others)
            row = {"slice": name, "predictions": ordered.shape[1], "of": of, "KL": own, "noise mean": noise.mean()}
            row |= {"noise lowest": noise.min(), "noise highest": noise.max()}
            rows.append(row | {"p": (1 + int((noise >= own).sum())) / (1 + len(noise))})
    return pd.DataFrame(rows)


# ---------------------------------------------------------------------------------------------- runs


def _measured(
    units: UnitSet,
    rows: Int[Tensor, "rows pos"],
    counted: Bool[Tensor, "rows pos"] | None,
    size: int,
    dense: DenseCache,
    n: int,
    seed: int,
    progress: bool,
) -> tuple[Float[Tensor, "run rows predictions"], Float[Tensor, "rows predictions"], dict[str, float]]:
    """Run the dense host, the replacement and the noises on a text. Returns KL of each prediction, of the replacement first, and
    the dense host's cross-entropy (float64, in nats); and site -> local relative squared error. Raises ValueError: covariances
    would not fit."""
    host, predictions = units.host, (len(rows), rows.shape[1] - 1)
    kl, ce = torch.zeros(1 + n, *predictions, dtype=torch.float64), torch.zeros(predictions, dtype=torch.float64)
    of_batches = [None] * len(rows) if counted is None else counted.split(size)
    batches = list(zip(rows.split(size), of_batches, strict=False))
    with torch.no_grad(), fused_attention(host, rows):
        moments = {site.name: _Moments(site.d_out) for site in units.sites}
        n_bytes = sum(16 * each.width**2 for each in moments.values())
        if n_bytes > _COVARIANCE_BYTES:
            raise ValueError(
                f"the covariances of {len(moments)} sites' errors take {n_bytes / 2**30:.1f} GiB, more than "
                f"{_COVARIANCE_BYTES / 2**30:.0f}: measure fewer sites at a time"
            )
        of_sites = {site.name: noise_units(moments[site.name], site.d_in, (seed, i)) for i, site in enumerate(units.sites)}
        noises = UnitSet.of(host.model, of_sites)
        runs = Runs(host, {"": units, "noise": noises}, None, dense, random=("noise",))
        runs.verify(rows)
        # 1. The error's mean and covariance on the dense host's inputs.
        errors = LocalErrors(host, {"": units}, None, lambda name, site, lost: moments[site].add(lost))
        first, last = units.sites[0].layer, units.sites[-1].layer
        for batch, of_batch in batches:
            start = Start(first, dense.residual(host, batch, first)) if runs.staged and first else None
            with errors.added(of_batch):
                host.run_blocks(batch, last + 1, start)
        for each in moments.values():
            each.finish()
        # 2. Every run on each batch.
        coders = [each.coder for each in noises.coders.values()]
        done = 0
        for batch, _ in tqdm(batches, desc="disagreement", unit="batch", disable=not progress, leave=False):
            ends: dict[Any, Tensor] = {"dense": runs.dense(batch)}
            with runs.mounted(units):
                ends[0] = runs.replaced_end(batch, "")
            with runs.mounted(noises):
                for draw in range(n):
                    for coder in coders:
                        coder.draw = draw
                    ends[1 + draw] = runs.replaced_end(batch, "noise")
            of_rows = slice(done, done + len(batch))
            _compare(runs, batch, ends, kl[:, of_rows], ce[of_rows])
            done += len(batch)
    return kl, ce, errors.relmse("")


def _compare(
    runs: Runs,
    batch: Int[Tensor, "batch pos"],
    ends: Mapping[Any, Tensor],
    kl: Float[Tensor, "run batch predictions"],
    ce: Float[Tensor, "batch predictions"],
) -> None:
    """Fill in `kl` and `ce` of a batch, a chunk of rows and positions at a time. ends: of "dense", and of each run by number."""
    for some, chunk in runs.chunks(batch):
        tokens, first = batch[some, chunk], chunk.start or 0
        predictions = DensePredictions(runs.logits(tokens, ends["dense"][some, chunk]), tokens, runs.buffers)
        at = slice(first, first + tokens.shape[1] - 1)
        ce[some, at] = predictions.ce.cpu()
        for run, of_run in enumerate(kl):
            each = of_run[some, at]
            predictions.divergence(runs.logits(tokens, ends[run][some, chunk]), each=each)
            each.clamp_(min=0)  # rounding


class _Moments:
    """Mean and covariance of a site's error over tokens, and noise with both."""

    def __init__(self, width: int):
        self.width, self.n = width, 0
        self.sum = torch.zeros(width, dtype=torch.float64)
        self.products = torch.zeros(width, width, dtype=torch.float64)
        self.mean = self.root = torch.zeros(0, dtype=torch.float32)

    def add(self, lost: Float[Tensor, "*batch d_out"]) -> None:
        flat = lost.reshape(-1, self.width).double().cpu()
        self.n += len(flat)
        self.sum += flat.sum(0)
        self.products += flat.T @ flat

    def finish(self) -> None:
        """Set the mean, and a root of the covariance: g @ root has it where g is standard normal."""
        n = max(1, self.n)  # an expert to which none of these tokens is routed has no error
        mean = self.sum / n
        values, vectors = torch.linalg.eigh(self.products / n - mean[:, None] * mean)
        self.mean, self.root = mean.float(), (values.clamp(min=0).sqrt()[:, None] * vectors.T).float()


class Noise:
    """An encode/decode pair on a site's dense output, which adds noise: another one for each `draw`. moments: of the noise,
    finished before it runs; seed: of all draws at this site."""

    def __init__(self, moments: _Moments, seed: tuple[int, ...]):
        self.moments, self.seed, self.draw = moments, seed, 0
        self.generators: dict[int, torch.Generator] = {}

    def encode(self, y: Float[Tensor, "*batch d_out"]) -> Float[Tensor, "*batch d_out"]:
        return y

    def decode(self, z: Float[Tensor, "*batch d_out"]) -> Float[Tensor, "*batch d_out"]:
        if self.draw not in self.generators:
            self.generators[self.draw] = torch.Generator().manual_seed(hash((*self.seed, self.draw)) % 2**63)
        moments = self.moments
        if not len(moments.mean):  # a trial before anything was measured
            return z
        normal = torch.randn(z.shape, generator=self.generators[self.draw], dtype=torch.float32)
        return z + (moments.mean + normal @ moments.root).to(z)


def noise_units(moments: _Moments, d_in: int, seed: tuple[int, ...]) -> CoderUnits:
    """Noise as units of a site, which can be attached as others are."""
    width = moments.width
    return CoderUnits(Noise(moments, seed), d_in, width, width, reads="output", name="noise")
