"""Checkpoints: the folder in which `factorize` keeps finished matrices, and what decides whether they may be used again.

1. A `Recipe` is everything that decides the bits of one matrix's factors, as plain values: its weight, the solver's
   settings, and with calibration the host, the tokens and the factors that stood before it. It is saved with them.
2. `Checkpoint.resume` reads what a folder holds and compares recipes; any difference is named and refused.
3. `Checkpoint.add` adds a finished matrix: its file first, then the index by a rename (storage.py), so that the folder
   is a FactorSet at every moment, whatever interrupts.

Threads, torch version and device also change bits, in the last places; they are not compared, so that a run can move.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from swd_lens.factorization.shards import finished_in, forget
from swd_lens.hosts.sites import execution_key
from swd_lens.units.factors import Factors, fingerprint, read_factors, write_factors
from swd_lens.units.storage import INDEX, FactorFileError, read_index, write_index

Recipe = Mapping[str, Any]

# What the hashes in a recipe are of; the other keys name themselves.
_WORDS = {
    "weight_sha256": "its weight",
    "host_sha256": "the host",
    "tokens_sha256": "calibration tokens",
    "upstream_sha256": "factors of the earlier sites",
}


class ResumeError(ValueError):
    """A folder's finished matrices are not those that this call would make; nothing was changed."""


class Checkpoint:
    """A folder of finished matrices, in execution order.

    Args:
        folder: made with the first finished matrix.
        provenance: of the whole set, written with every matrix.
        overwrite: whether the first matrix that is added replaces all that the folder held, shards among it.
    """

    def __init__(self, folder: Path, provenance: Mapping[str, Any], overwrite: bool = False):
        self.folder, self.overwrite = folder, overwrite
        self.provenance = dict(provenance)
        self._entries: dict[str, Mapping[str, Any]] = {}

    def resume(self, recipes: Mapping[str, Recipe], *, chained: bool) -> dict[str, Factors]:
        """The finished matrices of the folder, in the order of `recipes`; none where the folder holds no index.

        Args:
            recipes: of every site that this call will make, in execution order, without "upstream_sha256".
            chained: whether a site's calibration depends on the sites before it.

        Raises:
            ResumeError: the folder is damaged, holds other sites, or a recipe differs (every difference is named).
        """
        if not (self.folder / INDEX).is_file():
            return {}
        try:
            entries = read_index(self.folder)["sites"]
            if others := [site for site in entries if site not in recipes]:
                raise self._refusal(f"holds {', '.join(others)}, which this call does not factorize")
            found = {site: read_factors(self.folder, site, entries[site]) for site in recipes if site in entries}
        except FactorFileError as error:
            raise ResumeError(f"{error}; or start again with overwrite=True") from error
        self._compare(found, recipes, chained)
        self._entries = {site: entries[site] for site in found}
        return found

    def in_shards(self, recipes: Mapping[str, Recipe]) -> dict[str, Callable[[], Factors]]:
        """What shards have finished (shards.py) and this folder does not hold: site -> what reads its Factors.

        Raises:
            ResumeError: a shard's folder is damaged, or a recipe differs (every difference is named).
        """
        missing = [site for site in recipes if site not in self._entries]
        if not missing:
            return {}
        try:
            found = finished_in(self.folder)
        except FactorFileError as error:
            raise ResumeError(f"{error}; or remove that shard's folder to have its matrices made again") from error
        return {
            site: partial(read_factors, folder, site, entry)
            for site in missing
            if site in found
            for folder, entry in [self._made_so(site, found[site], recipes[site])]
        }

    def _made_so(self, site: str, found: Sequence[tuple[Path, Mapping[str, Any]]], recipe: Recipe) -> Any:
        """That shard's folder and entry which this recipe makes; shards that were cut otherwise may hold others."""
        refused = ""
        for folder, entry in found:
            then = entry["provenance"].get("recipe", {})
            changed = differences(then, {**recipe, "upstream_sha256": None})
            if not changed:
                return folder, entry
            refused = f"holds {site} of shard {folder.name}, made otherwise: {'; '.join(changed)}"
        raise self._refusal(refused)

    def add(self, site: str, f: Factors) -> None:
        """Put a finished matrix into the folder. The first one of a fresh start replaces what the folder held."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._entries[site] = write_factors(self.folder, site, f)
        in_order = {name: self._entries[name] for name in sorted(self._entries, key=execution_key)}
        write_index(self.folder, in_order, self.provenance)
        if self.overwrite:
            forget(self.folder)  # a later call that goes on would find them made otherwise
            self.overwrite = False

    def _compare(self, found: Mapping[str, Factors], recipes: Mapping[str, Recipe], chained: bool) -> None:
        upstream, missing = None, None
        for site, recipe in recipes.items():
            if site not in found:
                missing = missing or site
                continue
            then = found[site].provenance.get("recipe")
            if not isinstance(then, dict):
                raise self._refusal(f"holds {site} without saying how it was made (not by factorize(..., out=...))")
            if chained and missing:
                raise self._refusal(
                    f"holds {site} without {missing}; sequential calibration would now put {missing} before it"
                )
            if changed := differences(then, {**recipe, "upstream_sha256": upstream}):
                raise self._refusal(f"holds {site} made otherwise: {'; '.join(changed)}")
            upstream = chain(upstream, site, found[site]) if chained else None

    def _refusal(self, what: str) -> ResumeError:
        return ResumeError(
            f"{self.folder} {what}. Call factorize as then to go on, give another folder, or overwrite=True to start again"
        )


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


def tokens_fingerprint(rows: torch.Tensor) -> str:
    """SHA-256 over shape and ids."""
    data = rows.to("cpu", torch.int64).contiguous()
    return _sha256([str(tuple(data.shape)).encode(), data.flatten().numpy().data])


def host_fingerprint(model: torch.nn.Module, cfg: Any) -> str:
    """SHA-256 over everything calibration sees of a host: parameters, buffers (factors attached to it among them) and the
    settings that change its forward without changing a parameter."""
    words = ("act_fn", "normalization_type", "positional_embedding_type", "eps", "attn_scale", "rotary_base")
    parts: list[Any] = [str({word: getattr(cfg, word, None) for word in words}).encode()]
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        parts.append(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        parts.append(tensor)
    return _sha256(parts)


def _sha256(parts: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, torch.Tensor):  # as bytes: numpy knows no bfloat16
            part = part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        digest.update(part)
    return digest.hexdigest()


def differences(then: Recipe, now: Recipe, words: Mapping[str, str] = _WORDS) -> list[str]:
    """One phrase per value that differs. `words` says what hashes are of; other keys name themselves."""

    def short(key: str, value: Any) -> str:
        return value[:8] if key in words and isinstance(value, str) else repr(value)

    keys = [*now, *(key for key in then if key not in now)]
    return [
        f"{words.get(key, key)} {short(key, then.get(key))} then, {short(key, now.get(key))} now"
        for key in keys
        if then.get(key) != now.get(key)
    ]
