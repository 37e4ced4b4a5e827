"""dashboard: audited units as pages to read, offline and without scripts.

1. An index lists the units site by site, best ranks first where the audit knows a task; each row has the unit's label,
   numbers and strongest place, and leads to the unit.
2. A unit's part is made by `swd_lens.analysis.audit.drawing.unit_html`, the same that notebooks show; neighbours are links.
3. To a file: everything in one page. To a folder: index.html and one page per unit, written as their profiles are made; the
   index comes last, so that it never leads nowhere.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from swd_lens.analysis.audit import Audit, UnitProfile, unit_html
from swd_lens.analysis.audit.drawing import number, unit_style, words_html
from swd_lens.analysis.audit.result import kept_apart
from swd_lens.base import __version__
from swd_lens.base.errors import legible
from swd_lens.base.files import write_text
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.base.writer import require_writable, require_writable_file, writing, writing_file
from swd_lens.hosts.sites import execution_key, parse_unit
from swd_lens.report.page import encodable, template
from swd_lens.report.wording import count, percent, plural
from swd_lens.units.keys import read_units, single_units

INDEX = "index.html"
_AROUND = 5  # tokens on either side of the peak in the index
_PAGE_LIMIT = 400  # units in one file: about 10 MB, as much as a phone opens


@with_torch_defaults
def dashboard(
    units: Audit | UnitProfile | Iterable[UnitProfile],
    path: str | Path | None = None,
    *,
    only: Any = None,
    title: str | None = None,
) -> str | Path:
    """Units as HTML: one file, or a folder with an index and one page per unit.

    Args:
        units: an Audit, or profiles (`Audit.unit`, `Audit.profiles`).
        path: ends in .html: one file. Otherwise a folder, made if need be; pages of the same name are replaced, others left.
            None: the one page as text.
        only: the audit's units to show, in this order: names, pairs, a table or circuit of them; None = all.
        title: None = names the model.

    Returns:
        The page as text; or the path of the file, or of the folder's index.

    Raises:
        ValueError: no unit at all, one unit twice, or too many for one page.
        KeyError: a unit in `only` was not audited.
        OSError: a file cannot be written (a FolderInUseError: another call writes the folder); before any profile is made.
    """
    to_file = path is not None and Path(path).suffix.lower() in (".html", ".htm")
    if path is not None:
        (require_writable_file if to_file else require_writable)(path)
    names, profiles, settings = _of(units, only)
    if not names:
        raise ValueError("there is no unit to show; give an audit that holds some, or profiles")
    if twice := sorted({name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else ()):
        raise ValueError(f"{legible(', '.join(twice))} is given twice; a dashboard shows every unit once")
    title = title or f"Units of {settings.get('model') or 'a model'}"
    if path is None or to_file:
        if len(names) > _PAGE_LIMIT:
            raise ValueError(
                f"{len(names):,} units are too much for one page (at most {_PAGE_LIMIT}); give the name of a folder, "
                "which gets a page per unit, or fewer units with only="
            )
        if path is None:
            return _one_page(names, profiles, settings, title)
        with writing_file(path, "dashboard") as file:
            write_text(file, _one_page(names, profiles, settings, title))
        return file
    with writing(path, "dashboard") as folder:
        return _folder(folder, names, profiles, settings, title)


def _of(units: Any, only: Any) -> tuple[list[str], Iterator[UnitProfile], dict[str, Any]]:
    """Names in the order shown, their profiles in that order, and the settings."""
    if isinstance(units, Audit):
        if only is not None:
            names = ["{}/{}".format(*units.place(unit)) for unit in single_units(only)]
        else:  # site by site; within one by the first task that scored it, else by number
            first = next(iter(units.scores.values()), None)
            ranking = [] if first is None else first.ranking()
            ranks = {f"{site}/{unit}": rank for rank, (site, unit) in enumerate(ranking)}
            placed = [
                (execution_key(site), ranks.get(name, 0), i, name) for name in units.units for site, i in [parse_unit(name)]
            ]
            names = [name for *_, name in sorted(placed)]
        return names, units.profiles(names), dict(units.settings)
    profiles = [units] if isinstance(units, UnitProfile) else list(units)
    if only is not None:
        by_name = {p.unit: p for p in profiles}
        wanted = ["{}/{}".format(*unit) for unit in read_units(only, {p.site for p in profiles})]
        if missing := [name for name in wanted if name not in by_name]:
            raise KeyError(f"{legible(missing[0])} is not among the profiles, which are of {legible(', '.join(by_name))}")
        profiles = [by_name[name] for name in wanted]
    return [p.unit for p in profiles], iter(profiles), dict(profiles[0].settings) if profiles else {}


# ------------------------------------------------------------------ pages


def _one_page(names: Sequence[str], profiles: Iterable[UnitProfile], settings: dict[str, Any], title: str) -> str:
    shown = set(names)
    rows, articles = [], []
    for profile in profiles:
        rows.append(_row(profile, f"#{_anchor(profile.unit)}"))
        html = unit_html(profile, lambda unit: f"#{_anchor(unit)}" if unit in shown else None)
        articles.append({"anchor": _anchor(profile.unit), "html": Markup(html)})
    return _render(title, settings, groups=_groups(rows), articles=articles)


def _folder(folder: Path, names: Sequence[str], profiles: Iterable[UnitProfile], settings: dict[str, Any], title: str) -> Path:
    shown, rows = set(names), []
    for i, profile in enumerate(profiles):
        html = unit_html(profile, lambda unit: _file(unit) if unit in shown else None)
        around = [("previous", unit) for unit in names[max(0, i - 1) : i]] + [("next", unit) for unit in names[i + 1 : i + 2]]
        links = [(word, unit, _file(unit)) for word, unit in around]
        article = {"anchor": _anchor(profile.unit), "html": Markup(html)}
        page = _render(f"{profile.unit} · {title}", settings, articles=[article], links=links, home=title)
        write_text(folder / _file(profile.unit), page)
        rows.append(_row(profile, _file(profile.unit)))
    index = folder / INDEX
    write_text(index, _render(title, settings, groups=_groups(rows)))
    return index


def _render(
    title: str,
    settings: dict[str, Any],
    *,
    groups: Sequence[dict[str, Any]] = (),
    articles: Sequence[dict[str, Any]] = (),
    links: Sequence[tuple[str, str, str]] = (),
    home: str = "",
) -> str:
    facts = [f"{count(settings['tokens'])} tokens of text"] if "tokens" in settings else []
    facts += [f"SHA-256 of the tokens {settings['tokens_sha256'][:12]}…"] if "tokens_sha256" in settings else []
    facts += [words] if (words := kept_apart(settings)) else []
    facts += [f"made by swd_lens {__version__}"]
    page = template("dashboard").render(
        title=title,
        style=Markup(unit_style()),
        groups=groups,
        tasks=list(dict.fromkeys(task for group in groups for row in group["rows"] for task in row["ranks"])),
        labelled=any(row["label"] for group in groups for row in group["rows"]),
        articles=articles,
        links=links,
        home=home,
        index=INDEX,
        facts=" · ".join(facts),
    )
    return encodable(page)


# ------------------------------------------------------------------ index


def _groups(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by site, in their order."""
    sites = list(dict.fromkeys(row["site"] for row in rows))
    groups = [{"site": site, "rows": [row for row in rows if row["site"] == site]} for site in sites]
    return [{**group, "n": plural(len(group["rows"]), "unit")} for group in groups]


def _row(profile: UnitProfile, target: str) -> dict[str, Any]:
    first = profile.contexts[0] if profile.contexts else None
    largest = max(map(abs, first.z)) if first else 0.0
    return {
        "site": profile.site,
        "index": profile.index,
        "target": target,
        "label": "" if profile.label is None else profile.label.label,
        "ranks": {task: count(rank.rank) for task, rank in profile.tasks.items()},
        "largest": number(profile.peak, signed=False),
        "density": percent(profile.density),
        "excerpt": Markup(words_html(first.around_peak(_AROUND), largest)) if first else "",
    }


def _anchor(unit: str) -> str:
    return unit.replace("/", "-")


def _file(unit: str) -> str:
    return f"{_anchor(unit)}.html"
