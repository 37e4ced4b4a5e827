"""attention_section: a run's attention views as panels, with the same as a picture for paper and in words.

1. Views are grouped by task, in the order of the run; those of no task come last, each under its own title.
2. A panel is CircuitsVis' (panels.py): it listens to mouse and keyboard, and carries its largest entries in words.
3. A page with a hundred canvases opens slowly: a panel counts as drawn until its turn comes (templates/report.js).
4. The picture is for print and for browsers that run no script.
"""

from typing import Any

from markupsafe import Markup

from swd_lens.base.panels import attention_heads
from swd_lens.report import plots, wording
from swd_lens.report.patterns import pattern_grid
from swd_lens.study import Run
from swd_lens.study.section import AttentionView


def attention_section(run: Run) -> list[dict[str, Any]]:
    """One entry per task: its name and its views."""
    by_task: dict[str, list[dict[str, Any]]] = {}
    for i, view in enumerate(run.attention):
        by_task.setdefault(view.task, []).append(_view(view, f"attention-{i}"))
    groups = [{"task": task, "views": views} for task, views in by_task.items() if task]
    return [*groups, *({"task": "", "views": views} for task, views in by_task.items() if not task)]


def _view(view: AttentionView, prefix: str) -> dict[str, Any]:
    title = f"{wording.readable(view.task)}: {view.title}" if view.task else view.title
    panel = attention_heads(view.tokens, view.tensor(), names=view.names, title=title, later=True)
    what = "Values" if view.signed else "Attention patterns"
    description = f"{what} of {wording.plural(len(view.names), 'head')} over {len(view.tokens)} tokens. {view.caption}"
    heads = list(dict.fromkeys(head for column in view.measures.values() for head in column))
    return {
        "view": view,
        "title": title,
        "panel": Markup(panel.html),
        "picture": Markup(plots.page_svg(pattern_grid(view), prefix, title, description)),
        "columns": list(view.measures),
        "rows": [(head, [column.get(head) for column in view.measures.values()]) for head in heads],
    }
