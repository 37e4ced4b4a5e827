"""CalibrationText: calibration tokens that remember Grams, so that several factorizations of one host calibrate once.

1. It is a `TokenStream`, and stands wherever calibration tokens do: `factorize`, `allocate`, `sweep`, `run_study`.
2. The Gram of a matrix that nothing replaced lies before depends on host, tokens, batch size and dtype, and on no sparsity, width
   or preset. Of dense calibration these are all matrices, else those of the first stage (stages.py): they are collected by the
   first factorization that wants them, and handed to every later one. Behind replaced matrices each factorization runs its own.
3. `expect` names sites that later calls will want: they are collected in the same pass.
4. What the text says of the sides of a matrix (basis.py) is remembered in the same way.
5. A host whose parameters, attached units or hooks have changed is another host. Grams of more than `n_bytes` are not kept.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from jaxtyping import Int
from torch import Tensor

from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.factorization.checkpoint import host_fingerprint
from swd_lens.factorization.grams import Grams, collect_grams
from swd_lens.hosts.recording import standing_hooks
from swd_lens.hosts.sites import Site, execution_key
from swd_lens.tasks.counting import Counting
from swd_lens.tasks.streams import TokenStream, as_stream

KEPT_BYTES = 2**29


@with_torch_defaults
class CalibrationText(TokenStream):
    """Calibration tokens of several factorizations, which collect what they share once.

        text = CalibrationText(tokens, model)
        factors = {s: swd.factorize(model, sites, sparsity=s, tokens=text) for s in (0.5, 0.75)}

    Args:
        tokens: whatever `factorize` takes.
        model: the host, whose vocabulary the tokens are checked for.
        n_bytes: of Grams kept in memory.

    Raises:
        TokenError: see `swd_lens.tasks.streams.as_stream`.
    """

    def __init__(self, tokens: Any, model: Any, n_bytes: int = KEPT_BYTES):
        stream = as_stream(tokens, model)
        super().__init__(lambda: iter(()), stream.n_rows)
        self.counting = stream.counting
        self._stream, self._known, self.n_bytes = stream, stream._known, n_bytes
        # Shared with the copies that are bound to other hosts.
        self._kept: dict[Any, Tensor] = {}
        self._first: dict[Any, tuple[float, Tensor]] = {}  # of Grams: first_share and first
        self._expected: dict[str, Site] = {}
        self._side_costs: dict[Any, dict[str, Any]] = {}
        self.divisions: dict[Any, Any] = {}  # how this text was divided for goals (goal.py)

    def bound_to(self, model: Any) -> "CalibrationText":
        bound = copy.copy(self)
        bound._stream = self._stream.bound_to(model)
        return bound

    def leaving_out(self, counting: Counting) -> "CalibrationText":
        other = copy.copy(self)
        other._stream, other.counting = self._stream.leaving_out(counting), counting
        return other

    def batches(self, batch_size: int) -> Iterator[Int[Tensor, "_rows pos"]]:
        yield from self._stream.batches(batch_size)

    def first_row(self) -> Int[Tensor, " pos"]:
        return self._stream.first_row()

    def _look_through(self) -> None:
        self._stream._look_through()

    def expect(self, sites: Iterable[Site]) -> None:
        """Name sites that later calls will need: their Grams are collected together with the first that is asked for."""
        self._expected |= {site.name: site for site in sites}

    def side_costs(self, stands: tuple[str, str, str]) -> dict[str, Any]:
        """Site name -> costs of its sides in a host that stands so; callers add what they find out."""
        return self._side_costs.setdefault((*stands, self.counting.key), {})


class KnownGrams:
    """Grams of one host as it stood when this was made, under the settings that decide their bits.

    Args:
        stands: how it stands, where the caller has it; to hash a host of a billion parameters takes seconds.
    """

    def __init__(
        self,
        text: CalibrationText,
        model: Any,
        batch_size: int,
        dtype: Literal["float32", "float64"],
        stands: tuple[str, str, str] | None = None,
    ):
        self.text, self.model, self.batch_size = text, model, batch_size
        self.dtype: Literal["float32", "float64"] = dtype
        self._key = (*(stands or as_it_stands(model)), batch_size, dtype, text.counting.key)

    def collect(self, sites: Sequence[Site], progress: bool = False) -> Grams | None:
        """The Grams of sites, in one pass with what is expected beside them, if any is missing; None where they cannot be kept.

        To be called while the host runs as it did when this was made. Raises what `collect_grams` does.
        """
        kept, firsts = self.text._kept, self.text._first
        if any(site.expert is not None for site in sites):  # theirs are means over fewer tokens
            return None
        if any(self._of(site) not in kept for site in sites):
            room = self.text.n_bytes - sum(gram.nbytes for gram in {id(gram): gram for gram in kept.values()}.values())
            together: dict[str, Site] = {}
            # What is expected first: the passes of a call that goes on from a folder are those of one that does not.
            for site in {**self.text._expected, **{site.name: site for site in sites}}.values():
                size = site.d_in**2 * (8 if self.dtype == "float64" else 4)
                if self._of(site) not in kept and size <= room:
                    together[site.name] = site
                    room -= size
            if not all(self._of(site) in kept or site.name in together for site in sites):
                return None
            ordered = sorted(together.values(), key=lambda site: execution_key(site.name))
            grams = collect_grams(self.model, ordered, self.text, batch_size=self.batch_size, dtype=self.dtype, progress=progress)
            kept |= {self._of(site): grams[site.name] for site in ordered}
            firsts |= {self._of(site): (grams.first_share[site.name], grams.first[site.name]) for site in ordered}
        by_site = {site.name: kept[self._of(site)] for site in sites}
        shares = {site.name: firsts[self._of(site)][0] for site in sites}
        vectors = {site.name: firsts[self._of(site)][1] for site in sites}
        return Grams(by_site, self.text.n_counted, shares, vectors)

    def _of(self, site: Site) -> Any:
        return (*self._key, site.name)


def grams_of(model: Any, sites: Sequence[Site], tokens: Any, *, batch_size: int = 16, progress: bool = False) -> Grams:
    """The float32 Grams of a host as it is now: those that calibration text remembers, or of a pass of their own. Raises See
    `collect_grams`."""
    known = None
    if isinstance(tokens, CalibrationText):
        known = KnownGrams(tokens, model, batch_size, "float32").collect(sites, progress)
    return collect_grams(model, sites, tokens, batch_size=batch_size, progress=progress) if known is None else known


def as_it_stands(model: Any) -> tuple[str, str, str]:
    """State of a host: parameters and settings, hooks and units, device."""
    return host_fingerprint(model), str(standing_hooks(model)), str(next(model.parameters()).device)


def shared_sites(stages: Sequence[Sequence[Site]], kind: str) -> list[Site]:
    """Those sites of a factorization's stages whose Grams do not depend on its factors."""
    if kind == "zero-data":
        return []
    return [site for stage in (stages if kind == "dense" else stages[:1]) for site in stage]
