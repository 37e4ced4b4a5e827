"""Unit graphs as SVG pictures."""

import xml.etree.ElementTree as ElementTree

import pytest

from swd_lens.analysis.graph import draw
from tests.analysis.graph_checks import TOKENS, toy_graph


def _elements(svg: str, tag: str) -> list:
    return ElementTree.fromstring(svg).findall(f".//{{http://www.w3.org/2000/svg}}{tag}")


@pytest.mark.parametrize("settings", [{}, {"prompt": TOKENS}, {"prompt": TOKENS, "attention": "frozen"}])
def test_the_drawing_shows_every_node_and_edge(settings, tmp_path):
    graph = toy_graph(**settings)
    drawing = draw(graph)
    boxes, paths = _elements(drawing.svg, "rect"), _elements(drawing.svg, "path")
    assert len(boxes) == len(graph.nodes) and len(paths) == len(graph.edges)
    signs = graph.edges["contribution" if settings else "weight"]
    assert sum("stroke-dasharray" in path.attrib for path in paths) == int((signs < 0).sum()) > 0
    width, height = (float(ElementTree.fromstring(drawing.svg).attrib[name]) for name in ("width", "height"))
    corners = [[float(box.attrib[name]) for name in ("x", "y", "width", "height")] for box in boxes]
    assert all(x >= 0 and y >= 0 and x + w <= width and y + h <= height for x, y, w, h in corners)
    # Boxes of one row do not overlap.
    for i, (x, y, w, _) in enumerate(corners):
        assert not any(y == v and x < u + wide and u < x + w for u, v, wide, _ in corners[i + 1 :])
    strongest = graph.edges.iloc[0]
    assert f"{strongest['source']} → {strongest['target']}" in drawing.words
    drawing.save(tmp_path / "graph.svg")
    assert (tmp_path / "graph.svg").read_text() == drawing.svg
    assert draw(graph).svg == drawing.svg


def test_labels_are_escaped_and_odd_ones_seen():
    graph = toy_graph(prompt=TOKENS)
    first, second = graph.nodes[graph.nodes["kind"] == "unit"].drop_duplicates(["site", "unit"]).to_dict("records")[:2]
    labels = {"<script>alert('x')</script>": first, "a\x1b\x00\u202e": second}
    page = draw(graph, {f"{row['site']}/{row['unit']}": label for label, row in labels.items()})._repr_html_()
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "a␛␀⟨U+202E⟩" in page and not [c for c in page if not c.isprintable() and c != "\n"]
    assert "overflow-x:auto" in page and 'role="img"' in page and "<details>" in page
