"""render_report: a Run as one HTML page that needs nothing but itself.

1. Each `_section` function turns one part of the run into plain rows for the template: numbers already written as a reader
   wants them (`wording`), figures already as SVG (`plots`). What is text stays text: the template escapes it.
2. The template (templates/report.html.j2, with its style sheet and the schematic beside it) lays the rows out.
3. `write_report` writes the page whole or not at all.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from swd_lens.analysis.audit.drawing import unit_html, unit_style
from swd_lens.base.files import write_text
from swd_lens.base.panels import library
from swd_lens.circuits import Comparison, CostCurve
from swd_lens.circuits.compare import TaskComparison
from swd_lens.report import plots, wording
from swd_lens.report.attention import attention_section
from swd_lens.report.headline import control_of, headline, main_replacement
from swd_lens.report.recipe import load_code, run_code
from swd_lens.study import Run
from swd_lens.study.run_file import Replacement
from swd_lens.study.views import TaskUnit

SUFFICIENCY, NECESSITY = 0.9, 0.5
FAINT_DROP = 0.05  # a whole necessity drop under this share of the margin is mostly noise; half of it is no finding
FILTERS = ("count", "fixed", "tiny", "signed", "percent", "duration", "readable")


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

    A run with attention views brings the script that draws them, once; without them there is no script.
    """
    page = (
        _environment()
        .get_template("report.html.j2")
        .render(
            run=run,
            settings=run.settings,
            title=f"Sparse weight decomposition of {run.settings.get('model', 'a model')}",
            headline=headline(run, SUFFICIENCY),
            main=main_replacement(run),
            control=control_of(run),
            methods=list(dict.fromkeys(r.method for r in run.replacements)),
            sufficiency=SUFFICIENCY,
            necessity=NECESSITY,
            faint_drop=FAINT_DROP,
            fidelity=_fidelity_section(run),
            tasks=_tasks_section(run),
            surfaces=_circuits_section(run),
            units=_units_section(run),
            unit_style=Markup(unit_style()),
            attention=attention_section(run),
            library=Markup(library()) if run.attention else "",
            extras=_extra_sections(run),
            settings_rows=list(wording.settings_rows(run.settings)),
            provenance=_provenance_section(run),
            load_code=load_code(run),
            run_code=run_code(run),
        )
    )
    # A lone surrogate (half of an emoji, cut by a byte-level tokenizer) cannot be written as UTF-8.
    return page.encode("utf-8", "replace").decode("utf-8")


def _environment() -> Environment:
    loader = PackageLoader("swd_lens.report", "templates")
    env = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters.update({name: getattr(wording, name) for name in FILTERS})
    return env


def _fidelity_section(run: Run) -> list[dict[str, Any]]:
    """Per surface: its replacements, and a figure of relMSE by site."""
    by_surface: dict[str, list[Replacement]] = {}
    for r in run.replacements:
        by_surface.setdefault(r.surface, []).append(r)
    sections = []
    for i, (surface, replacements) in enumerate(by_surface.items()):
        figure = plots.relmse_dots(replacements)
        rows = [{"r": r, "f": r.fidelity, "errors": _mean_and_max(r)} for r in replacements]
        title = f"relMSE of every site of {surface}"
        description = "; ".join(f"{r.method}: mean {wording.tiny(_mean_and_max(r)[0])}" for r in replacements)
        sections.append(
            {
                "surface": surface,
                "rows": rows,
                "sites": list(replacements[0].fidelity.relmse),
                "figure": figure and Markup(plots.inline_svg(figure, f"relmse-{i}", title, description)),
                "legend": [
                    (r.method, Markup(plots.swatch(k, f"relmse-{i}-key-{k}", marker=True)))
                    for k, r in enumerate(replacements)
                    if max(r.fidelity.relmse.values(), default=0.0) > plots.EXACT
                ],
                "exact": [
                    r.method for r in replacements if max(r.fidelity.relmse.values(), default=0.0) <= plots.EXACT
                ],
            }
        )
    return sections


def _mean_and_max(r: Replacement) -> tuple[float, float]:
    errors = list(r.fidelity.relmse.values()) or [float("nan")]
    return sum(errors) / len(errors), max(errors)


def _tasks_section(run: Run) -> list[dict[str, Any]]:
    """Every task once: what it asks, its prompts, and how the dense host does."""
    rows: dict[str, dict[str, Any]] = {}
    for curve in _curves(run):
        described = run.settings.get("tasks", {}).get(curve.task, {})
        rows.setdefault(
            curve.task,
            {
                "task": curve.task,
                "question": wording.TASK_QUESTIONS.get(curve.task, ""),
                "train": described.get("train", curve.settings.get("n_examples")),
                "test": described.get("test", curve.settings.get("n_test")),
                "source": described.get("source", ""),
                "example": described.get("example", ""),
                "margin": curve.q_dense,
                "accuracy": curve.accuracy_dense,
            },
        )
    return list(rows.values())


def _curves(run: Run) -> Iterator[CostCurve]:
    for by_task in run.comparisons.values():
        for comparison in by_task.values():
            yield from comparison.curves.values()


def _circuits_section(run: Run) -> list[dict[str, Any]]:
    """Per surface: one figure column and one block of table rows per task."""
    sections = []
    for i, (surface, by_task) in enumerate(run.comparisons.items()):
        curves = list(dict.fromkeys(name for comparison in by_task.values() for name in comparison.curves))
        columns = []
        for j, (task, comparison) in enumerate(by_task.items()):
            if not comparison.curves:
                continue
            figure = plots.circuit_column(comparison.curves, SUFFICIENCY)
            title = f"{wording.readable(task)}, {surface}: sufficiency and necessity drop against active edges"
            svg = plots.inline_svg(figure, f"circuit-{i}-{j}", title, _describe(comparison))
            columns.append(
                {"task": task, "svg": Markup(svg), "rows": _cost_rows(comparison), "curves": comparison.curves}
            )
        legend = [
            (_called(by_task, name), Markup(plots.swatch(k, f"circuit-{i}-key-{k}"))) for k, name in enumerate(curves)
        ]
        sections.append({"surface": surface, "columns": columns, "legend": legend})
    return sections


def _called(comparison: Comparison, name: str) -> str:
    """A curve in the legend: circuits of another CE than the reference's are no fair match, so the difference stands there."""
    return comparison.label(name) if name in comparison.methods else name


def _cost_rows(comparison: TaskComparison) -> list[dict[str, Any]]:
    rows = [
        {
            "method": method,
            "margin": curve.q_unpruned,
            "accuracy": curve.accuracy_unpruned,
            "costs": [
                curve.cost_at(**{what: threshold}, cost=cost)
                for what, threshold in (("sufficiency", SUFFICIENCY), ("necessity", NECESSITY))
                for cost in ("units", "edges")
            ],
            "drop": curve.rows["necessity_drop"].iloc[-1],
            "faint": bool(abs(curve.rows["necessity_drop"].iloc[-1]) < FAINT_DROP * abs(curve.q_unpruned)),
        }
        for method, curve in comparison.curves.items()
    ]
    for column in range(4):
        costs = [row["costs"][column] for row in rows]
        # No circuit beats the empty one: where that suffices for some method, the others' sizes are no contest.
        least = min((cost for cost in costs if cost is not None), default=0)
        for row, cost in zip(rows, costs, strict=True):
            row.setdefault("best", []).append(least > 0 and cost == least and costs.count(least) < len(costs))
    return rows


def _describe(comparison: TaskComparison) -> str:
    """The figure in words, for those who hear the page."""
    parts = []
    for method, curve in comparison.curves.items():
        edges = curve.cost_at(sufficiency=SUFFICIENCY, cost="edges")
        reached = "is never reached" if edges is None else f"is reached with {edges:,} active edges"
        drop = wording.fixed(curve.rows["necessity_drop"].iloc[-1], 2)
        parts.append(
            f"{method}: sufficiency {SUFFICIENCY:g} {reached}; ablating every unit drops the margin by {drop} logits."
        )
    return " ".join(parts)


def _units_section(run: Run) -> list[dict[str, Any]]:
    """Per task that has cards: whose units they are, and the units as HTML."""
    by_task: dict[str, list[TaskUnit]] = {}
    for card in run.cards:
        by_task.setdefault(card.task, []).append(card)
    return [
        {
            "task": task,
            "surface": cards[0].surface,
            "method": cards[0].method,
            "units": [Markup(unit_html(card, level=4, legends=False)) for card in cards],
        }
        for task, cards in by_task.items()
    ]


def _provenance_section(run: Run) -> list[dict[str, Any]]:
    """Per replacement: what its factors say about themselves."""
    sections = []
    for r in run.replacements:
        said: Mapping[str, Any] = {
            **({"whole set": r.factors.provenance} if r.factors.provenance else {}),
            **{s: {**f.get("settings", {}), **f.get("provenance", {})} for s, f in r.factors.summary().items()},
        }
        rows: Sequence[tuple[int, str, str]] = list(wording.settings_rows(said))
        sections.append({"surface": r.surface, "method": r.method, "rows": rows})
    return sections


def _extra_sections(run: Run) -> list[dict[str, Any]]:
    """What the study added: pictures with ids of their own, tables with numbers as a reader wants them."""
    return [
        {
            "id": f"extra-{i}",
            "section": section,
            "pictures": [
                (one, Markup(plots.page_svg(one.svg, f"extra-{i}-{k}", one.title, one.description)))
                for k, one in enumerate(section.pictures)
            ],
            "tables": [
                {"caption": t.caption, "columns": t.columns, "rows": [[_cell(c) for c in row] for row in t.rows]}
                for t in section.tables
            ],
        }
        for i, section in enumerate(run.extras)
    ]


def _cell(value: str | int | float | None) -> tuple[str, bool]:
    """(text, whether it is a number)."""
    if value is None:
        return wording.UNDEFINED, True
    if isinstance(value, str):
        return value, False
    return wording.count(value) if isinstance(value, int) else wording.tiny(value, 4), True
