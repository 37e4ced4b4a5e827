"""Unit graph: a circuit's units as nodes by layer, and how strongly each speaks to each through the residual stream.

build.py (unit_graph) -> frozen.py (one run, held) -> edges.py (weights) -> pruning.py (influence, what is kept) -> result.py
(UnitGraph, whose tables are data.py's). aligned.py (task_graph) is the mean over a task's aligned prompts.

To look at: viewer/ (a page to look into), drawing.py (SVG of the page's data). replays.py clamps units in true runs, beside what
the frozen run predicts. attention.py splits what crosses positions by head, and its patterns' scores by pairs of query and key
units. feeders.py asks for the edges into one unit alone. paths.py is the paper's figure of the best units.

For other tools' viewers: export.py, with nodes.py (what they draw, and query-key pairs), pinned.py (what they open with, and
where), groups.py (units shown as one), features.py (what they show of a unit).
"""

from swd_lens.analysis.graph.aligned import task_graph
from swd_lens.analysis.graph.attention import AttentionPaths, attention_paths
from swd_lens.analysis.graph.build import unit_graph
from swd_lens.analysis.graph.drawing import GraphDrawing, draw
from swd_lens.analysis.graph.export import ExportedGraph
from swd_lens.analysis.graph.feeders import feeders
from swd_lens.analysis.graph.groups import groups
from swd_lens.analysis.graph.paths import plot_unit_paths
from swd_lens.analysis.graph.replays import Replays, replays
from swd_lens.analysis.graph.result import UnitGraph

__all__ = [
    "AttentionPaths",
    "ExportedGraph",
    "GraphDrawing",
    "Replays",
    "UnitGraph",
    "attention_paths",
    "draw",
    "feeders",
    "groups",
    "plot_unit_paths",
    "replays",
    "task_graph",
    "unit_graph",
]
