"""Checkpoints: the folder in which `factorize` keeps finished matrices, and what decides whether they may be used again.

1. A `Recipe` is everything that decides the bits of one matrix's factors, as plain values: its weight, the solver's
   settings, and with calibration the host, the tokens and the factors that stood before it. It is saved with them.
2. `Checkpoint.resume` reads what a folder holds and compares recipes; any difference is named and refused.
3. `Checkpoint.add` adds a finished matrix: its file first, then the index by a rename (index.py), so that the folder
   is a FactorSet at every moment, whatever interrupts. Nobody else writes the folder meanwhile (`writing_checkpoint`).
4. A `Shard` is one part of a factorization, for one job of a batch scheduler. It writes into a folder of its own inside the
   common one, out/shards/2-of-8, so that no two write the same file; `Checkpoint.in_shards` says what shards have finished, and
   `factorize` without a shard takes it over. Only matrices that do not depend on one another can be sharded.

Threads, torch version and device also change bits, in the last places; they are not compared, so that a run can move.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swd_lens.base.errors import FactorFileError, ResumeError, ShardError, quoted
from swd_lens.base.fingerprints import host_fingerprint as host_fingerprint
from swd_lens.base.fingerprints import tokens_fingerprint as tokens_fingerprint
from swd_lens.base.step_cache import HOW_TO_RESUME, differences
from swd_lens.base.writer import writing
from swd_lens.hosts.sites import Site, execution_key
from swd_lens.units.factors import Factors, fingerprint, write_factors
from swd_lens.units.index import INDEX, clear_remains, open_folder, read_index, remove_set, write_index, writing_factors
from swd_lens.units.storage import StoredSite

Recipe = Mapping[str, Any]

_SHARDS = "shards"


@contextmanager
def writing_checkpoint(folder: Path, sizes: Mapping[str, int], *, overwrite: bool) -> Iterator[None]:
    """Hold a folder while these matrices are factorized; a folder that has all of them is only read, and not held. sizes: site
    -> bytes of its file, about. Raises FolderInUseError: another call writes the folder, or a shard that would be overwritten;
    OSError: it cannot be written, or the disk is too small for the matrices that are missing."""
    held: Iterable[str] = ()
    with suppress(FactorFileError, FileNotFoundError):  # said by who reads it
        held = () if overwrite else read_index(folder)["sites"]
    missing = [size for site, size in sizes.items() if site not in held]
    if not missing:
        clear_remains(folder, "factorize")
        yield
        return
    with writing_factors(folder, "factorize", sum(missing)):
        for shard in _shards_of(folder) if overwrite else ():
            with writing(shard, "factorize"):  # in use, it is better known now
                pass
        yield


def _shards_of(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / _SHARDS).glob("[0-9]*-of-*[0-9]") if path.is_dir())


class Checkpoint:
    """A folder of finished matrices, in execution order; it is made with the first of them.

    provenance: of the whole set, written with every matrix; recipes: of every site that the call will make, in execution order,
    without "upstream_sha256"; chained: whether a site's calibration depends on the sites before it; overwrite: whether the first
    matrix that is added replaces all that the folder held, shards among it.
    """

    def __init__(
        self,
        folder: Path,
        provenance: Mapping[str, Any],
        recipes: Mapping[str, Recipe],
        *,
        chained: bool,
        overwrite: bool = False,
    ):
        self.folder, self.provenance, self.recipes = folder, dict(provenance), recipes
        self.chained, self.overwrite = chained, overwrite
        self._entries: dict[str, Mapping[str, Any]] = {}
        self._upstream: str | None = None  # chain of the sites that are finished

    def resume(self) -> dict[str, Factors]:
        """The finished matrices of the folder, in execution order; none where it holds no index or is to be overwritten.
        Raises ResumeError: the folder is damaged, holds other sites, or a recipe differs (every difference is named)."""
        if self.overwrite or not (self.folder / INDEX).is_file():
            return {}
        try:
            _, stored = open_folder(self.folder)
            if others := [site for site in stored if site not in self.recipes]:
                raise ResumeError(f"{self.folder} holds {', '.join(others)}, which this call does not factorize. {HOW_TO_RESUME}")
            finished = {site: Factors(**stored[site].parts()) for site in self.recipes if site in stored}
        except FactorFileError as cause:
            raise ResumeError(f"{cause}; or start again with overwrite=True") from cause
        for site, f in finished.items():
            recipe = f.provenance.get("recipe")
            if not isinstance(recipe, dict):
                raise ResumeError(
                    f"{self.folder} holds {site} without saying how it was made (not by factorize(..., out=...)). {HOW_TO_RESUME}"
                )
            missing = next((earlier for earlier in self.recipes if earlier not in finished or earlier == site), site)
            if self.chained and missing != site:
                raise ResumeError(
                    f"{self.folder} holds {site} without {missing}; sequential calibration would now put {missing} before "
                    f"it. {HOW_TO_RESUME}"
                )
            if changed := differences(recipe, self.recipe(site)):
                raise ResumeError(f"{self.folder} holds {site} made otherwise: {'; '.join(changed)}. {HOW_TO_RESUME}")
            self._entries[site] = stored[site].entry
            self._advance_chain(site, f)
        return finished

    def in_shards(self) -> dict[str, Callable[[], Factors]]:
        """Matrices that shards have finished and this folder does not hold: site -> what reads its Factors. Raises
        ResumeError: a shard's folder is damaged, or a recipe differs (every difference is named)."""
        missing = [site for site in self.recipes if site not in self._entries]
        if self.overwrite or not missing:
            return {}
        # A site has several where shards were cut in several ways.
        finished: dict[str, list[tuple[Path, StoredSite]]] = {}
        try:
            for shard in _shards_of(self.folder):
                if (shard / INDEX).is_file():
                    for site, stored in open_folder(shard)[1].items():
                        finished.setdefault(site, []).append((shard, stored))
        except FactorFileError as cause:
            raise ResumeError(f"{cause}; or remove that shard's folder to have its matrices made again") from cause
        return {site: self._reader(site, finished[site]) for site in missing if site in finished}

    def _reader(self, site: str, finished: Sequence[tuple[Path, StoredSite]]) -> Callable[[], Factors]:
        """Find the shard whose recipe is this call's; gives what reads the site from it. Other shards may hold other factors."""
        shard, changed = "", []
        for folder, stored in finished:
            recipe = stored.provenance.get("recipe", {})
            shard, changed = folder.name, differences(recipe, self.recipe(site))
            if not changed:
                return lambda: Factors(**stored.parts())
        raise ResumeError(f"{self.folder} holds {site} of shard {shard}, made otherwise: {'; '.join(changed)}. {HOW_TO_RESUME}")

    def recipe(self, site: str) -> dict[str, Any]:
        """Everything that decides a site's factors, those before it included; for the provenance of what is added next."""
        return {**self.recipes[site], "upstream_sha256": self._upstream}

    def add(self, site: str, f: Factors) -> None:
        """Put a finished matrix, with its `recipe`, into the folder; the first of a fresh start replaces what the folder held."""
        # A later call that goes on would find the shards made otherwise.
        shards = _shards_of(self.folder) if self.overwrite else []
        with ExitStack() as held:
            for folder in (self.folder, *shards):
                held.enter_context(writing_factors(folder, "factorize"))
            self._entries[site] = write_factors(self.folder, site, f)
            in_order = {name: self._entries[name] for name in sorted(self._entries, key=execution_key)}
            write_index(self.folder, in_order, self.provenance)
            for shard in shards:
                remove_set(shard)
        for folder in (*shards, self.folder / _SHARDS) if shards else ():
            with suppress(OSError):  # it holds something else
                folder.rmdir()
        self.overwrite = False
        self._advance_chain(site, f)

    def _advance_chain(self, site: str, f: Factors) -> None:
        if self.chained:
            self._upstream = chain(self._upstream, site, f)


@dataclass(frozen=True)
class Shard:
    """Number `number`, from 1, of `count`."""

    number: int
    count: int

    @classmethod
    def parse(cls, given: Any) -> "Shard":
        """From "2/8" or (2, 8). Raises ShardError for anything else, or a number outside 1 to count."""
        parts = given.split("/") if isinstance(given, str) else list(given) if isinstance(given, tuple | list) else []
        try:
            number, count = (int(part) for part in parts)
        except (TypeError, ValueError):
            raise ShardError(f"shard={quoted(given)}: give number and count, as in '2/8', the second of eight") from None
        if not 1 <= number <= count:
            raise ShardError(f"shard={quoted(given)}: the number must lie between 1 and {max(count, 1)}")
        return cls(number, count)

    def of(self, sites: Sequence[Site], flops: Mapping[str, float]) -> list[Site]:
        """This shard's sites, in execution order: the costliest first, each to the shard that has least so far. Raises
        ShardError: fewer sites than shards, so that this one has nothing to do."""
        loads, mine = [0.0] * self.count, []
        for site in sorted(sites, key=lambda site: (-flops[site.name], execution_key(site.name))):
            least = loads.index(min(loads))
            loads[least] += flops[site.name]
            if least == self.number - 1:
                mine.append(site)
        if not mine:
            raise ShardError(f"shard {self} has nothing to do: there are {len(sites)} matrices; use fewer shards")
        return sorted(mine, key=lambda site: execution_key(site.name))

    def folder(self, out: Path) -> Path:
        return out / _SHARDS / f"{self.number}-of-{self.count}"

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


# ---------------------------------------------------------------------------------------------- recipes


def chain(upstream: str | None, site: str, f: Factors) -> str:
    """SHA-256 of the factors up to and including this site's."""
    parts = (upstream or "", site, fingerprint(f.read), fingerprint(f.write))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def upstream_of(done: Mapping[str, Factors]) -> str | None:
    """The chain of all sites in `done`; None for none."""
    upstream = None
    for site, f in done.items():
        upstream = chain(upstream, site, f)
    return upstream
