"""Unit graph: a circuit's units as nodes by layer, and how strongly each speaks to each through the residual stream.

build.py (unit_graph) -> frozen.py (one run, held) -> edges.py (weights) -> pruning.py (influence, what is kept) -> result.py
(UnitGraph and its JSON), drawing.py (SVG). feeders.py asks for the edges into one unit alone. paths.py is the paper's figure of
the best units. export.py writes a graph for other tools' viewers: nodes.py (what they draw), pinned.py (what they open with),
panel.py (and where), groups.py (units shown as one), features.py (what they show of a unit), tracing.py (query-key pairs).
(UnitGraph and its JSON), drawing.py (SVG), viewer/ (a page to look into). replays.py clamps units in true runs, beside what the
frozen run predicts (responses.py). feeders.py asks for the edges into one unit alone. paths.py is the paper's figure of
the best units.
(UnitGraph and its JSON), drawing.py (SVG). attention.py splits what crosses positions by head, and its patterns' scores by pairs
of query and key units. feeders.py asks for the edges into one unit alone. paths.py is the paper's figure of the best units.
(UnitGraph and its JSON), drawing.py (SVG). aligned.py (task_graph) is the mean over a task's aligned prompts. attention.py splits
what crosses positions by head, and its patterns' scores by pairs of query and key units. feeders.py asks for the edges into one
unit alone. paths.py is the paper's figure of the best units.
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
    "ExportedGraph",
    "GraphDrawing",
    "UnitGraph",
    "draw",
    "feeders",
    "groups",
    "plot_unit_paths",
    "GraphDrawing",
    "Replays",
    "UnitGraph",
    "draw",
    "feeders",
    "plot_unit_paths",
    "replays",
    "AttentionPaths",
    "GraphDrawing",
    "UnitGraph",
    "attention_paths",
    "draw",
    "feeders",
    "plot_unit_paths",
    "task_graph",
    "unit_graph",
]
