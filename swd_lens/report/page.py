"""render_report: a Run as one HTML page that needs nothing but itself.

1. SECTIONS lists the page's sections in their order: the name of a template (templates/NAME.html.j2) and the function that
   gives what it shows, as plain rows: numbers already written as a reader wants them (`wording`), figures already as SVG
   (`plots`). What is text stays text: the template escapes it.
2. templates/report.html.j2 lays the sections out, with style sheet and contents.
3. `write_report` writes the page whole or not at all.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from swd_lens.analysis.audit.drawing import unit_html, unit_style
from swd_lens.base.errors import visible, visible_lines
from swd_lens.base.files import write_text
from swd_lens.base.panels import attention_heads, library
from swd_lens.circuits.comparison import TaskComparison, priced
from swd_lens.circuits.measure import RECOVERED, Threshold
from swd_lens.circuits.screen import remark_of
from swd_lens.report import plots, wording
from swd_lens.report.plots import inline_svg, looks_of, swatch
from swd_lens.report.recipe import load_code, run_code
from swd_lens.report.verdict import verdict
from swd_lens.report.wording import headline, main_replacement, methods_of
from swd_lens.study import Run
from swd_lens.study.run import Replacement
from swd_lens.study.section import Cell, ReportSection

NECESSITY = 0.5
FILTERS = ("count", "fixed", "tiny", "signed", "percent", "duration", "readable")


@dataclass(frozen=True)
class Section:
    """The values of a template: the anchor of the section, its line in the contents, and the template's values."""

    anchor: str
    title: str
    values: Mapping[str, Any]


def write_report(run: Run, path: str | Path) -> Path:
    """Write the report of a run to one HTML file, atomically; returns its path.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(path)
    write_text(path, render_report(run))
    return path


def render_report(run: Run) -> str:
    """The report as HTML text: styles and figures inside, nothing loaded from anywhere.

    A run with attention views brings the script that draws them, once; without them there is no script. A unit graph to look into
    is a page of its own, in a frame.
    """
    parts = [
        {"anchor": section.anchor, "title": section.title, "html": Markup(template(name).render(section.values))}
        for name, sections in SECTIONS.items()
        for section in sections(run)
    ]
    page = template("report").render(
        parts=parts,
        run=run,
        settings=run.settings,
        title=f"Sparse weight decomposition of {run.settings.get('model', 'a model')}",
        unit_style=Markup(unit_style()),
        library=Markup(library()) if run.attention else "",
        framed=any(section.graph is not None for section in run.extras),
    )
    return encodable(page)


@cache
def template(name: str) -> Template:
    """templates/NAME.html.j2; whatever it is given is escaped and shown whole, and nothing may be missing."""
    loader = PackageLoader("swd_lens.report", "templates")
    env = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, finalize=_shown, trim_blocks=True, lstrip_blocks=True
    )
    env.filters.update({name: getattr(wording, name) for name in FILTERS}, code=lambda text: escape(visible_lines(text)))
    return env.get_template(f"{name}.html.j2")


def _shown(value: Any) -> Any:
    """Make a template's value what is put into the page."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def encodable(page: str) -> str:
    """The page without lone surrogates (half of an emoji, cut by a byte-level tokenizer), which UTF-8 cannot write."""
    return page.encode("utf-8", "replace").decode("utf-8")


# ---------------------------------------------------------------------------------------------- sections


def _what(run: Run) -> Iterator[Section]:
    """Show which methods were run, and which controls were left out."""
    beside = {"exact": methods_of(run, "control", exact=True), "paper": methods_of(run, "paper")}
    beside |= {"pruned": methods_of(run, "control"), "controls": run.settings.get("controls", [])}
    yield Section("what", "What was done", {**beside, "left_out": run.settings.get("controls left out", [])})


def _fidelity(run: Run) -> Iterator[Section]:
    """Show, per surface, its replacements, and a figure of relMSE by site."""
    by_surface: dict[str, list[Replacement]] = {}
    looks = looks_of(run)
    for r in run.replacements:
        by_surface.setdefault(r.surface, []).append(r)
    surfaces = []
    for i, (surface, replacements) in enumerate(by_surface.items()):
        errors = [list(r.fidelity.relmse.values()) or [float("nan")] for r in replacements]
        means = [sum(of_sites) / len(of_sites) for of_sites in errors]
        exact = [max(r.fidelity.relmse.values(), default=0.0) <= plots.EXACT for r in replacements]
        figure = plots.relmse_dots(replacements, looks)
        title = f"relMSE of every site of {surface}"
        words = "; ".join(f"{r.method}: mean {wording.tiny(m)}" for r, m in zip(replacements, means, strict=True))
        surfaces.append(
            {
                "surface": surface,
                "rows": [
                    {"r": r, "f": r.fidelity, "errors": (mean, max(of_sites))}
                    for r, mean, of_sites in zip(replacements, means, errors, strict=True)
                ],
                "figure": figure and Markup(inline_svg(figure, f"relmse-{i}", title, words)),
                "legend": [
                    (r.method, Markup(swatch(looks[r.method], f"relmse-{i}-key-{k}", marker=True)))
                    for k, r in enumerate(replacements)
                    if not exact[k]
                ],
                "exact": [r.method for r, is_exact in zip(replacements, exact, strict=True) if is_exact],
            }
        )
    yield Section("fidelity", "Fidelity", {"surfaces": surfaces, "main": main_replacement(run)})


def _tasks(run: Run) -> Iterator[Section]:
    """Show every task once: what it asks, its prompts, and how the dense host does."""
    rows: dict[str, dict[str, Any]] = {}
    for by_task in run.comparisons.values():
        for curve in (curve for comparison in by_task.values() for curve in comparison.curves.values()):
            described = run.settings.get("tasks", {}).get(curve.task, {})
            row = {"task": curve.task, "question": wording.TASK_QUESTIONS.get(curve.task, "")}
            row |= {"train": described.get("train", curve.settings.get("n_examples"))}
            row |= {"validation": described.get("validation")}
            row |= {"test": described.get("test", curve.settings.get("n_test"))}
            row |= {"source": described.get("source", ""), "example": described.get("example", "")}
            row |= {"margin": curve.q_dense, "accuracy": curve.accuracy_dense}
            row |= {"remark": remark_of(curve.q_dense, curve.accuracy_dense)}
            rows.setdefault(curve.task, row)
    yield Section("tasks", "Tasks", {"tasks": list(rows.values())})


def _screen(run: Run) -> Iterator[Section]:
    """Show what the tasks need of the dense model: per task a heat map of single sites, and what matters most."""
    if run.screen is None:
        return
    groups = []
    for i, (task, screened) in enumerate(run.screen.tasks.items()):
        rows = run.screen.table(n=5).query("task == @task").drop(columns="task").to_dict("records")
        title = f"{wording.readable(task)}: margin that is lost without one matrix"
        words = "; ".join(f"without {row['without']} {wording.percent(row['kept'], 0)} is kept" for row in rows)
        figure = run.screen.plot([task]) if len(run.screen.sites) > 1 and screened.margin > 0 else None
        groups.append(
            {"screened": screened, "rows": rows, "svg": figure and Markup(inline_svg(figure, f"screen-{i}", title, words))}
        )
    where = {"scoring": "the scoring position", "all": "all positions"}[run.screen.settings["positions"]]
    yield Section("screen", "Screen", {"groups": groups, "where": where})


def _circuits(run: Run) -> Iterator[Section]:
    """Show, per surface and intervention, one figure column and one block of table rows per task."""
    looks, surfaces = looks_of(run), []
    titled = [
        (f"{surface}: {wording.intervention_words(*intervention)}" if comparison.others else surface, each)
        for surface, comparison in run.comparisons.items()
        for intervention, each in comparison.under_each().items()
    ]
    for i, (title, by_task) in enumerate(titled):
        columns = []
        for j, of_task in enumerate(of_task for of_task in by_task.values() if of_task.curves):
            heading = f"{wording.readable(of_task.task)}, {title}: recovered and drop against"
            svgs = {}
            for cost, said in wording.COSTS.items():
                figure = plots.circuit_column(of_task.curves, looks, RECOVERED, cost)
                svg = inline_svg(figure, f"circuit-{i}-{j}-{cost}", f"{heading} {said}", _in_words(of_task, cost))
                svgs[cost] = Markup(svg)
            columns.append({"task": of_task.task, "rows": _cost_rows(of_task), "curves": of_task.curves, "svgs": svgs})
        # A method of worse CE or KL than the reference is no fair match, and its label says so.
        names = dict.fromkeys(name for of_task in by_task.values() for name in of_task.curves)
        legend = [
            (by_task.label(name) if name in by_task.methods else name, Markup(swatch(looks[name], f"circuit-{i}-key-{k}")))
            for k, name in enumerate(names)
        ]
        surfaces.append({"surface": title, "columns": columns, "legend": legend})
    thresholds = {"recovered": RECOVERED, "necessity": NECESSITY}
    yield Section("circuits", "Circuits", {"surfaces": surfaces, "costs": wording.COSTS, **thresholds})


def _cost_rows(comparison: TaskComparison) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for method, curve in comparison.curves.items():
        costs = [
            priced(curve, Threshold(of, value), cost)
            for of, value in (("recovered", RECOVERED), ("sufficiency", RECOVERED), ("necessity", NECESSITY))
            for cost in ("units", "edges")
        ]
        row = {"method": method, "margin": curve.q_full, "accuracy": curve.accuracy_full, "costs": costs}
        row |= {"carried": curve.carried, "sentence": "" if curve.carries else curve.in_words()}
        rows.append({**row, "best": []})
    for costs in zip(*(row["costs"] for row in rows), strict=True):
        known = [cost for cost in costs if cost is not None]
        for row, cost in zip(rows, costs, strict=True):
            row["best"].append(bool(known) and cost == min(known) and costs.count(cost) < len(costs))
    return rows


def _in_words(comparison: TaskComparison, cost: str) -> str:
    """The figure in words, for those who hear the page."""
    parts = []
    for method, curve in comparison.curves.items():
        if not curve.carries:
            parts.append(f"{method}: {curve.in_words()}")
            continue
        least = priced(curve, Threshold("recovered", RECOVERED), cost)
        reached = "is never reached" if least is None else f"is reached with {least:,} {wording.COSTS[cost]}"
        drop = wording.fixed(curve.rows["drop"].iloc[-1], 2)
        parts.append(f"{method}: recovered {RECOVERED:g} {reached}; ablating every unit drops the margin by {drop} logits.")
    return " ".join(parts)


def _units(run: Run) -> Iterator[Section]:
    """Show, per task that has cards, whose units they are, and the units as HTML."""
    groups: dict[str, dict[str, Any]] = {}
    for card in run.cards:
        group = {"task": card.task, "surface": card.surface, "method": card.method, "units": []}
        groups.setdefault(card.task, group)["units"].append(Markup(unit_html(card, level=4, legends=False)))
    yield Section("units", "Units", {"groups": list(groups.values())})


def _attention(run: Run) -> Iterator[Section]:
    """Show views as panels, by task, those of no task last; each also as a picture for paper and in words."""
    if not run.attention:
        return
    by_task: dict[str, list[dict[str, Any]]] = {}
    for i, view in enumerate(run.attention):
        title = f"{wording.readable(view.task)}: {view.title}" if view.task else view.title
        # A page with a hundred canvases opens slowly: a panel counts as drawn until its turn comes (templates/report.js).
        panel = attention_heads(view.tokens, view.tensor(), names=view.names, title=title, signed=view.signed, later=True)
        kind = "Values" if view.signed else "Attention patterns"
        words = f"{kind} of {wording.plural(len(view.names), 'head')} over {len(view.tokens)} tokens. {view.caption}"
        picture = plots.page_svg(plots.pattern_grid(view), f"attention-{i}", title, words)
        shown = {"view": view, "title": title, "panel": Markup(panel.html), "picture": Markup(picture)}
        heads = dict.fromkeys(head for column in view.measures.values() for head in column)
        rows = [(head, [column.get(head) for column in view.measures.values()]) for head in heads]
        by_task.setdefault(view.task, []).append({**shown, "columns": list(view.measures), "rows": rows})
    groups = [{"task": task, "views": by_task[task]} for task in sorted(by_task, key=lambda task: not task)]
    yield Section("attention", "Attention", {"groups": groups})


def extra_sections(sections: Sequence[ReportSection]) -> Iterator[Section]:
    """Give sections of a study's own, in whose tables numbers are as a reader wants them."""
    for i, section in enumerate(sections):
        tables = [
            {"caption": t.caption, "columns": t.columns, "rows": [[_cell(cell) for cell in row] for row in t.rows]}
            for t in section.tables
        ]
        page = None if section.graph is None else section.graph.page()
        values = {"anchor": f"extra-{i}", "section": section, "tables": tables}
        # In a frame of its own, whose own policy lets nothing in: neither page can change the other.
        values |= {"frame": None if page is None else escape(page), "size": len(page or "") / 1e6}
        yield Section(f"extra-{i}", section.short or section.title, values)


def _cell(value: Cell) -> tuple[str, bool]:
    """(text, whether it is a number)."""
    if value is None:
        return wording.UNDEFINED, True
    if isinstance(value, str):
        return value, False
    return wording.count(value) if isinstance(value, int) else wording.tiny(value, 4), True


def _settings(run: Run) -> Iterator[Section]:
    """Show the settings of the run, and per replacement what its factors say about themselves."""
    provenance = []
    for r in run.replacements:
        said: Mapping[str, Any] = {
            **({"whole set": r.factors.provenance} if r.factors.provenance else {}),
            **{s: {**f.get("settings", {}), **f.get("provenance", {})} for s, f in r.factors.summary().items()},
        }
        rows: Sequence[tuple[int, str, str]] = list(wording.settings_rows(said))
        provenance.append({"surface": r.surface, "method": r.method, "rows": rows})
    values = {"rows": list(wording.settings_rows(run.settings)), "seconds": run.seconds, "provenance": provenance}
    yield Section("settings", "Settings", values)


# Template -> what it shows of a run, once for each section; none where the run has nothing of the kind.
SECTIONS: Mapping[str, Callable[[Run], Iterable[Section]]] = {
    "results": lambda run: [
        Section("results", "Results", {"verdict": verdict(run), "headline": headline(run), "main": main_replacement(run)})
    ],
    "what": _what,
    "fidelity": _fidelity,
    "tasks": _tasks,
    "screen": _screen,
    "circuits": _circuits,
    "units": _units,
    "attention": _attention,
    "extra": lambda run: extra_sections(run.extras),
    "settings": _settings,
    "reproduce": lambda run: [
        Section("reproduce", "Load and reproduce", {"load_code": load_code(run), "run_code": run_code(run)})
    ],
}
