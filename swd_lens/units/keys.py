"""keys: the ways to name a site of a set, or a unit.

1. A key of a set names one matrix ("blocks.8.mlp_out", "blocks.8.mlp.W_out", "h.8.mlp.c_proj", ("mlp_out", 8) as a cache has it)
   or several (a glob, a kind "mlp_out", "all", a list): `sites_of_key` says which, and `names_one` which of the two it is.
2. A unit is a name ("blocks.8.mlp_out/205"), a pair (site, index), or a row of a table with a column "unit": `read_unit`. Several
   are a list of these, a table, or what has `.units` (a circuit): `read_units`. Whether there is such a unit the caller looks.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, SupportsInt, TypeGuard

import pandas as pd

from swd_lens.base.errors import UnknownSiteError, legible, quoted
from swd_lens.hosts.sites import KINDS, Site, is_site_name, matches, parse_unit, select_sites, split_name

_LISTED = 4  # names in a message
_A_UNIT = 'a unit is "blocks.8.mlp_out/205", ("blocks.8.mlp_out", 205), or a row of a table with a column "unit"'
_HOOK = re.compile(r"^(?:blocks\.(\d+)\.)?hook_(\w+)_unit$|^(\w+)_unit$")


def names_one(key: Any) -> bool:
    """Whether a key is the name of one matrix, whatever a set holds; the others name as many as match."""
    if isinstance(key, Site) or _is_layer_pair(key):
        return True
    return isinstance(key, str) and key != "all" and key not in KINDS and not set(key) & set("*?[")


def sites_of_key(key: Any, available: Mapping[str, tuple[int, int]]) -> list[str]:
    """Names of a set's sites that a key means, in execution order. available: name -> (d_in, d_out) of the sites that the set
    holds. Raises KeyError: none of them; the message has the nearest names."""
    if isinstance(key, str) and key in available:
        return [key]
    sites = [Site(*split_name(name), *shape) for name, shape in available.items() if is_site_name(name)]
    listed: Any = [key] if isinstance(key, str | Site) or _is_layer_pair(key) else key
    patterns: list[Any] = []  # as `select_sites` reads them
    for each in listed if isinstance(listed, Iterable) else ():
        if _is_layer_pair(each):
            patterns.append(f"blocks.{int(each[1])}.{_without_hook(each[0])}")
        else:
            name = each.name if isinstance(each, Site) else each
            patterns.append(_without_hook(name) if isinstance(name, str) else name)
    if not all(isinstance(pattern, str) for pattern in patterns) or not patterns:
        raise KeyError(
            f'{quoted(key)} is no key of a FactorSet; give "blocks.2.mlp_out", ("mlp_out", 2), a glob or a list of such names'
        )
    try:
        return [site.name for site in select_sites(sites, patterns)]
    except UnknownSiteError:
        missing = next((p for p in patterns if not any(matches(site, p) for site in sites)), patterns[0])
        names = list(available)
        nearest = difflib.get_close_matches(missing, names, n=4, cutoff=0.3) or names[:4]
        raise KeyError(
            f"no factors for site {quoted(missing)} among this set's {len(names)} sites. Nearest: "
            f"{legible(', '.join(nearest) or 'nothing')}"
        ) from None


def _is_layer_pair(key: Any) -> bool:
    """("mlp_out", 8), as a cache is asked."""
    return isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str) and _is_whole(key[1])


def _without_hook(name: str) -> str:
    """The site of a unit's hook point: blocks.8.hook_mlp_out_unit, hook_mlp_out_unit or mlp_out_unit; other names as they are."""
    hook = _HOOK.match(name)
    if hook is None:
        return name
    kind = hook[2] or hook[3]
    return f"blocks.{hook[1]}.{kind}" if hook[1] else kind


def read_unit(given: Any, sites: Collection[str] = ()) -> tuple[str, int]:
    """Site and index of one unit, in any of the forms of this module.

    Args:
        given: "blocks.8.mlp_out/205", ("blocks.8.mlp_out", 205), a table's row, or an object whose `.unit` is a unit's name.
        sites: names that are known. Their other names (`blocks.8.mlp.W_out/205`, `h.8.mlp.c_proj/205`) are then read, too, and
            a site may be left out where there is one: 205, "205" or "mlp_out/205".

    Raises ValueError: none of these.
    """
    if isinstance(given, pd.Series | Mapping) and "unit" in given:  # a row of a table
        given = (given["site"], given["unit"]) if "site" in given and _is_whole(given["unit"]) else given["unit"]
    elif not isinstance(given, str | tuple | list) and isinstance(unit := getattr(given, "unit", None), str):
        given = unit
    if _is_unit_pair(given):
        name = given[0].name if isinstance(given[0], Site) else given[0]
        return _known_site(name, sites) or name, int(given[1])
    if _is_whole(given) or (isinstance(given, str) and given.isdecimal()):
        if len(sites) != 1:
            known = ", ".join(list(sites)[:_LISTED]) + (f" and {len(sites) - _LISTED} more" if len(sites) > _LISTED else "")
            raise ValueError(
                f"unit {quoted(given)} does not say of which site; there are {known or 'none'}. Give (site, "
                f'{legible(given)}) or "site/{legible(given)}"'
            )
        return next(iter(sites)), int(given)
    if not isinstance(given, str):
        raise ValueError(f"{quoted(given)} is no unit; {_A_UNIT}")
    name, slash, index = given.rpartition("/")
    if slash and index.isdecimal() and (site := _known_site(name, sites)) is not None:
        return site, int(index)
    return parse_unit(given)


def read_units(given: Any, sites: Collection[str] = ()) -> list[tuple[str, int]]:
    """Sites and indices of units: one unit, several, a table with a column "unit", or a circuit. See `read_unit`."""
    return [read_unit(unit, sites) for unit in single_units(given)]


def single_units(given: Any) -> list[Any]:
    """Split what was given for units into single units. Raises ValueError: nothing that could be a unit or several."""
    if isinstance(given, pd.DataFrame):
        return given.to_dict("records")
    row = isinstance(given, pd.Series | Mapping) and "unit" in given
    single = row or isinstance(given, str | Site) or _is_whole(given) or _is_unit_pair(given)
    if single or isinstance(getattr(given, "unit", None), str):
        return [given]
    given = getattr(given, "units", given)
    if not isinstance(given, Iterable):
        raise ValueError(f"{quoted(given)} is no unit; {_A_UNIT}")
    return list(given)


def _is_unit_pair(given: Any) -> TypeGuard[tuple[Any, SupportsInt]]:
    pair = isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[0], str | Site)
    return pair and _is_whole(given[1])


def _known_site(name: str, sites: Collection[str]) -> str | None:
    """Find the one of these sites that goes by a name; None where none does, or several."""
    if name in sites and is_site_name(name):  # a FactorSet holds its matrices' other names, too
        return name
    named = [Site(*split_name(site), 1, 1) for site in sites if is_site_name(site)]
    fitting = [site.name for site in named if matches(site, _without_hook(name))] if names_one(name) or name in KINDS else []
    return fitting[0] if len(fitting) == 1 else None


def _is_whole(value: Any) -> TypeGuard[SupportsInt]:
    """Whether a value is a whole number of Python, NumPy or torch; True is not."""
    if isinstance(value, bool | str) or not hasattr(value, "__int__") or getattr(value, "ndim", 0) != 0:
        return False
    try:
        return bool(int(value) == value)
    except (TypeError, ValueError, OverflowError):
        return False
