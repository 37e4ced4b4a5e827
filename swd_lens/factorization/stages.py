"""Stages: which matrices are calibrated together, and the host with the finished ones in place.

1. `stages_of` cuts the sites, in execution order, into stages: what is calibrated in one pass over the tokens.
     sequential, corrected: the matrices that read one input (q, k and v; gate and in; those of all experts): none changes
       what another reads, and as many as have room for their Grams;
     per_block: a block; dense: as many as have room for their Grams; zero-data: all, nothing is run.
2. `ReplacedHost` is the host while that goes on: finished matrices are attached one by one and stay until the end; `calibrate`
   collects a stage's Grams, from the host as it stands (or, for dense calibration, from its own matrices), and, corrected, what
   each matrix should compute there (grams.py); with them, where outputs are weighed, output Grams of the dense host. Grams
   that do not depend on factors may be known (calibration_text.py).
   With several stages, what enters the present block is kept on disk (residuals.py), so that a block's forward is run a few
   times and not once per later stage.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from torch import Tensor

from swd_lens.base.errors import warn
from swd_lens.base.interrupts import Undo, joint
from swd_lens.factorization.calibration_text import CalibrationText, KnownGrams
from swd_lens.factorization.gradients import collect_output_grams
from swd_lens.factorization.grams import Grams, collect_grams, collect_pairs, corrected
from swd_lens.factorization.residuals import Residuals
from swd_lens.hosts import host_of
from swd_lens.hosts.sites import READS_ATTENTION_INPUT, Site, base_kind
from swd_lens.tasks.streams import TokenStream
from swd_lens.units import Attachment, attach
from swd_lens.units.factors import Factors

# Grams of one dense stage, in float32; their float64 sums take twice as much. All of GPT-2 small's are .5 GB.
GRAM_BYTES = 2**31
_READS_MLP_INPUT = ("mlp_gate", "mlp_in")


@dataclass(frozen=True)
class Calibrated:
    """Results of calibration for one matrix."""

    gram: Tensor | None  # (d_in, d_in); None: of an expert to which no token was routed
    target: Tensor | None  # (d_in, d_out), to be factorized in W's place; None: W itself
    first_share: float  # of the Gram's trace, from first positions of rows
    first: Tensor | None = None  # what `Grams.first` has of it
    n_routed: int | None = None  # tokens that were routed to the expert whose matrix it is; None: every token reads it
    output_gram: Tensor | None = None  # (d_out, d_out); None where all outputs count the same


def calibrated_by(grams: Grams, site: str) -> Calibrated:
    """Collect a site's Gram and first positions from a pass over the host as it is; no Gram where no token was routed to it."""
    n_routed = grams.n_routed.get(site)
    gram = None if n_routed == 0 else grams[site]
    return Calibrated(gram, None, grams.first_share[site], grams.first[site], n_routed)


def warn_of_few_routed(sites: Sequence[Site], n_routed: Mapping[str, int], n_tokens: int) -> None:
    """Warn once of the experts to which fewer tokens were routed than their matrices have inputs."""
    few = {site.name: n_routed[site.name] for site in sites if n_routed.get(site.name, site.d_in) < site.d_in}
    if few:
        least = min(few, key=lambda name: few[name])
        warn(
            f"{len(few)} matrices of experts read fewer of the {n_tokens} calibration tokens than they have inputs "
            f"({least}: {few[least]}); their Grams are shrunk where the preset does so, and the "
            f"{sum(n == 0 for n in few.values())} without any are made zero-data"
        )


def stages_of(sites: Sequence[Site], kind: str, gram_bytes: int = GRAM_BYTES) -> list[tuple[Site, ...]]:
    """The sites in execution order, cut into stages. kind: of calibration, or "zero-data"."""
    if kind == "zero-data":
        return [tuple(sites)]
    if kind == "per_block":
        return [tuple(block) for _, block in groupby(sites, lambda site: site.layer)]
    if kind in ("sequential", "corrected"):

        def input_of(site: Site) -> tuple[int, str]:
            kind = base_kind(site.kind)
            return site.layer, next((kinds[0] for kinds in (READS_ATTENTION_INPUT, _READS_MLP_INPUT) if kind in kinds), kind)

        shared = [tuple(same) for _, same in groupby(sites, input_of)]
        return [stage for same in shared for stage in _with_room(same, gram_bytes)]
    return _with_room(sites, gram_bytes)


def _with_room(sites: Sequence[Site], gram_bytes: int) -> list[tuple[Site, ...]]:
    """Sites that do not change each other's input, cut where their Grams would take more than so much memory."""
    stages: list[list[Site]] = []
    room = 0
    for site in sites:
        room -= 4 * site.d_in**2
        if not stages or room < 0:
            stages.append([])
            room = gram_bytes - 4 * site.d_in**2
        stages[-1].append(site)
    return [tuple(stage) for stage in stages]


def with_room(sites: Sequence[Site], later: Sequence[Site]) -> list[Site]:
    """The sites, and as many of the later ones as have room for their output Grams beside theirs."""
    together, room = list(sites), GRAM_BYTES - sum(4 * site.d_out**2 for site in sites)
    for site in later:
        room -= 4 * site.d_out**2
        if room < 0:
            break
        together.append(site)
    return together


class ReplacedHost:
    """A host in which the finished matrices are replaced, one after the other; a context manager that gives it back dense.

    kind: of calibration; stream: its tokens, None for zero-data; keep: whether several stages follow, so that it pays to keep
    what enters the present block; dtype: of the Grams; scratch: folder for what is kept, None: the system's temporary one;
    weighed: matrices that will be calibrated and whose outputs are weighed, in order; stands: how the host stands, where that is
    known (calibration_text.py).
    """

    def __init__(
        self,
        model: Any,
        stream: TokenStream | None,
        kind: str,
        *,
        batch_size: int,
        keep: bool,
        dtype: Literal["float32", "float64"] = "float32",
        scratch: Path | None = None,
        weighed: Sequence[Site] = (),
        stands: tuple[str, str, str] | None = None,
    ):
        self.model, self.stream, self.kind = model, stream, kind
        self.batch_size, self.scratch = batch_size, scratch
        self.dtype: Literal["float32", "float64"] = dtype
        self.keep = keep and stream is not None
        self._attachments: list[Attachment] = []
        self._residuals: dict[str, Residuals] = {}
        self._undo = Undo()
        # Of the host without factors: what it is now.
        text = stream if isinstance(stream, CalibrationText) else None
        self._weighed, self._output_grams = list(weighed), dict[str, Tensor]()
        self._known = None if text is None else KnownGrams(text, model, batch_size, dtype, stands)

    def __enter__(self) -> "ReplacedHost":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._undo.__exit__(kind, error, trace)

    @joint
    def replace(self, site: Site, f: Factors) -> None:
        """From now on the site runs by these factors."""
        attachment = attach(self.model, {site.name: f})
        self._undo.push(lambda: attachment.detach() if attachment.attached else None)
        self._attachments.append(attachment)

    def calibrate(self, sites: Sequence[Site], progress: bool = False) -> dict[str, Calibrated]:
        """Calibrate the sites: see `_inputs`; where outputs are weighed, with output Grams of the dense host."""
        calibrated = self._inputs(sites, progress)
        if not self._weighed:
            return calibrated
        # The sites' output Grams, of the dense host; those of later matrices, as many as have room, are collected with them.
        if missing := [site for site in sites if site.name not in self._output_grams]:
            together = with_room(missing, self._weighed[self._weighed.index(missing[-1]) + 1 :])
            with self._dense():
                self._output_grams |= collect_output_grams(self.model, together, self.stream, progress=progress)
        outputs = {site.name: self._output_grams.pop(site.name) for site in sites}
        return {name: replace(of_site, output_gram=outputs[name]) for name, of_site in calibrated.items()}

    def _inputs(self, sites: Sequence[Site], progress: bool = False) -> dict[str, Calibrated]:
        """The sites' Grams, in one pass: behind what has been replaced, or, with dense calibration, in the dense host. With
        corrected calibration also their targets, once something is replaced."""
        layer = min(site.layer for site in sites)
        if self.kind == "corrected" and self._attachments:
            replaced = self._at(layer, "replaced")
            with self._dense():
                dense = self._at(layer, "dense")
            pairs = collect_pairs(sites, replaced, dense, self._dense, progress=progress, dtype=self.dtype)
            n_routed = {name: pair.n_routed for name, pair in pairs.items() if pair.n_routed is not None}
            warn_of_few_routed(sites, n_routed, replaced.stream.n_counted)
            calibrated: dict[str, Calibrated] = {}
            for site in sites:
                pair = pairs.pop(site.name)
                if pair.n_routed == 0:
                    calibrated[site.name] = Calibrated(None, None, 0.0, n_routed=0)
                    continue
                target = corrected(host_of(self.model).weight(site), pair.gram, pair.cross)
                gram = pair.gram if self.dtype == "float64" else pair.gram.float()
                calibrated[site.name] = Calibrated(gram, target, pair.first_share, pair.first, pair.n_routed)
            return calibrated
        with self._dense() if self.kind == "dense" else ExitStack():
            if self._known is not None and (self.kind == "dense" or not self._attachments):
                known = self._known.collect(sites, progress)
                if known is not None:
                    return {site.name: calibrated_by(known, site.name) for site in sites}
            grams = collect_grams(
                self.model,
                sites,
                self.stream,
                batch_size=self.batch_size,
                progress=progress,
                dtype=self.dtype,
                residuals=self._at(layer, "replaced") if self.keep else None,
            )
        warn_of_few_routed(sites, grams.n_routed, grams.n_tokens)
        return {site.name: calibrated_by(grams, site.name) for site in sites}

    def _at(self, layer: int, host: Literal["replaced", "dense"]) -> Residuals:
        """Residuals of the host as it is, or dense, at a layer; not moved forward where they would not be used again."""
        if host not in self._residuals:
            residuals = Residuals(self.model, self.stream, self.batch_size, self.scratch)
            self._undo.push(residuals.close)
            self._residuals[host] = residuals
        if self.keep:
            self._residuals[host].advance(layer)
        return self._residuals[host]

    @contextmanager
    def _dense(self) -> Iterator[None]:
        """The dense host for a moment, with everything left in its place."""
        with ExitStack() as stack:
            for attachment in self._attachments:
                stack.enter_context(attachment.dense())
            yield
