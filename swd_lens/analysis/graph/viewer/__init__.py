"""The viewer of unit graphs: one HTML file that works without a network.

contents.py (what a page shows, as plain values) -> page.py (GraphPage: the file) with viewer.html, viewer.css and the scripts of
scripts/, in the order of page.SCRIPTS.
"""

from swd_lens.analysis.graph.viewer.page import GraphPage

__all__ = ["GraphPage"]
