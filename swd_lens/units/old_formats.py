"""Formats of factor folders that were written once are read for ever: each is turned into the index of the next.

1. Format 1 (until 07693c1) kept the pairs of all sites in one file, factors.safetensors, as "<site>.read.index" and so on,
   and named its hash at the top of factors.json. `from_1` gives every site that file and a prefix.
2. Format 2 is today's layout without a passport (passport.py): its index is one of format 3 already.

Only what storage.py cannot read otherwise is changed here; the checks of an index are its own.
"""

from collections.abc import Mapping
from typing import Any


def upgraded(described: Mapping[str, Any]) -> dict[str, Any]:
    """The index of a folder of any earlier format as one of the present format; not checked."""
    return from_1(described) if described["format"] == 1 else dict(described)


def from_1(described: Mapping[str, Any]) -> dict[str, Any]:
    """Every site's entry with "file" and "sha256" (of the file that they share) and the "prefix" of its tensors' names."""
    shared = {"file": "factors.safetensors", "sha256": described.get("tensors_sha256")}
    sites = described.get("sites")
    if isinstance(sites, dict):
        sites = {
            site: {**entry, **shared, "prefix": f"{site}."} if isinstance(entry, dict) else entry
            for site, entry in sites.items()
        }
    return {**described, "sites": sites}
