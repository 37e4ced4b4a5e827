"""Shards: one part of a factorization for each job of a batch scheduler, and the parts put together again.

1. `Shard.parse("2/8")` is the second of eight. `Shard.of` picks its sites: all shards together hold every site once, and
   their estimated operations are about the same.
2. A shard writes into a folder of its own inside the common one, out/shards/2-of-8, so that no two write the same file.
3. `finished_in` says what the shards of a folder have finished. `factorize` without a shard takes it over.

Only matrices that do not depend on one another can be sharded: zero-data and dense calibration.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swd_lens.hosts.sites import Site, execution_key
from swd_lens.units.storage import INDEX, read_index

FOLDER = "shards"


class ShardError(ValueError):
    """Not a shard, or a factorization that cannot be cut into any."""


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
            raise ShardError(f"shard={given!r}: give number and count, as in '2/8', the second of eight") from None
        if not 1 <= number <= count:
            raise ShardError(f"shard={given!r}: the number must lie between 1 and {max(count, 1)}")
        return cls(number, count)

    def of(self, sites: Sequence[Site], flops: Mapping[str, float]) -> list[Site]:
        """This shard's sites, in execution order: the costliest first, each to the shard that has least so far.

        Raises:
            ShardError: fewer sites than shards, so that this one has nothing to do.
        """
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
        return out / FOLDER / f"{self.number}-of-{self.count}"

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def finished_in(out: Path) -> dict[str, list[tuple[Path, Mapping[str, Any]]]]:
    """Site -> (shard's folder, index entry) of everything that shards have finished in this folder.

    A site has several where shards were cut in several ways.

    Raises:
        FactorFileError: a shard's folder is damaged.
    """
    found: dict[str, list[tuple[Path, Mapping[str, Any]]]] = {}
    for index in sorted((out / FOLDER).glob(f"*/{INDEX}")):
        for site, entry in read_index(index.parent)["sites"].items():
            found.setdefault(site, []).append((index.parent, entry))
    return found


def forget(out: Path) -> None:
    """Remove what shards have finished in this folder."""
    for index in (out / FOLDER).glob(f"*/{INDEX}"):
        shutil.rmtree(index.parent)
    with suppress(OSError):  # it was never made, or holds something else
        (out / FOLDER).rmdir()
