"""The page of a graph: one file that needs nothing else, in which text is data."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch

import swd_lens as swd
from swd_lens.analysis.audit.labels import UnitLabel
from swd_lens.analysis.graph import Replays
from swd_lens.analysis.graph.viewer import page as page_module
from swd_lens.analysis.graph.viewer.page import SCRIPTS, _resources
from swd_lens.base.errors import encodable
from tests.analysis.graph_pages import large_graph, page_data, small_graph

HOSTILE = "</script><b>$x ' \" & \ud83d\u202e\n"


def test_the_page_holds_all_that_it_needs_and_forbids_the_rest() -> None:
    page = large_graph(20, 60).show()
    assert not re.search(r"""(src|href)=["'](?!#)|@import|url\((?!#)|https?://(?!www\.w3\.org/)""", page.html)
    script = re.findall(r"<script>(.*?)</script>", page.html, flags=re.DOTALL)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page.html)
    assert len(script) == 1 and policy
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy[1] and policy[1].startswith("default-src 'none'")
    assert page.html.count("</script>") == 2 and "<!--" not in script[0]


def test_text_of_labels_and_prompts_ispage_data() -> None:
    _, _, graph = small_graph()
    unit = "blocks.0.mlp_out/1"
    graph.nodes.loc[graph.nodes["kind"] == "token", "label"] = HOSTILE
    graph.settings["prompt"] = HOSTILE
    page = graph.show(labels={unit: UnitLabel(HOSTILE, note=HOSTILE)}, groups={HOSTILE: [f"{unit}@4"]})
    assert page.html.count("</script>") == 2 and "<b>" not in page.html.replace("<b>0</b>", "").split("<script")[0]
    page.html.encode("utf-8")
    values = page_data(page)
    assert values["units"][unit]["label"] == encodable(HOSTILE) and "</script><b>" in values["groups"][0]["name"]
    assert "<title>Unit graph of “&lt;/script&gt;" in page.html


def test_saving_and_showing(tmp_path: Path) -> None:
    page = large_graph(20, 60).show()
    path = page.save(tmp_path / "deep" / "graph.html")
    assert path.read_text(encoding="utf-8") == page.html and [p.name for p in path.parent.iterdir()] == ["graph.html"]
    frame = re.fullmatch(r'<iframe .*?srcdoc="(.*?)".*?></iframe>', page._repr_html_(), flags=re.DOTALL)
    assert frame and html.unescape(frame[1]) == page.html
    assert repr(page).startswith("GraphPage(Unit graph of")


def test_the_largest_page_that_is_promised_has_at_most_5_megabytes() -> None:
    """400 nodes, 4,000 links, every unit clamped at three strengths."""
    graph = large_graph()
    units = graph.nodes[graph.nodes["kind"] == "unit"]["node"].tolist()
    answers = graph.nodes[graph.nodes["kind"] == "logit"]["node"].tolist()
    n, targets = len(units), (*units, *answers)
    made = Replays(
        tuple(units), (0.0, 0.5, 2.0), targets, torch.ones(n), torch.randn(n, len(targets)), torch.randn(n, 3, len(targets)), {}
    )
    page = graph.show(replays=made)
    assert len(graph.nodes) == 400 and len(graph.edges) == 4_000
    assert len(page.html.encode()) < 5e6


def test_the_files_of_the_page_are_in_the_wheel() -> None:
    folder = Path(page_module.__file__).parent
    project = (Path(swd.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    line = re.search(r'^"swd_lens.analysis.graph.viewer" = (\[.*\])$', project, flags=re.MULTILINE)
    assert line
    patterns = json.loads(line[1])
    carried = {path for pattern in patterns for path in folder.glob(pattern)}
    assert {path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")} == carried
    assert {f"{name}.js" for name in SCRIPTS} == {path.name for path in folder.glob("scripts/*")}


def test_lines_of_every_sign_can_be_read_on_a_dark_ground() -> None:
    """WCAG's contrast of the weakest line's colour to the stage, at least 4.5, and of the full colour to the panel."""
    style, script, _ = _resources()
    dark = style[style.index("@media screen and (prefers-color-scheme: dark)") :]
    signs = {name: [int(n) for n in found.split(",")] for name, found in re.findall(r"--(plus|minus|unsigned): ([\d, ]+)", dark)}
    page = style[style.rindex("@media (prefers-color-scheme: dark)") :]
    grounds = re.findall(r"--(paper|panel): (#[0-9a-f]{6})", page)[:2]
    paper, panel = ([int(ground[i : i + 2], 16) for i in (1, 3, 5)] for _, ground in grounds)
    [alpha] = re.findall(r"DARK_ALPHA = ([\d.]+)", script)
    assert set(signs) == {"plus", "minus", "unsigned"} and [name for name, _ in grounds] == ["paper", "panel"]
    for name, colour in signs.items():
        weakest = [float(alpha) * c + (1 - float(alpha)) * ground for c, ground in zip(colour, paper, strict=True)]
        assert _contrast(weakest, paper) >= 4.5 and _contrast(colour, panel) >= 4.5, name


def _contrast(one: Sequence[float], other: Sequence[float]) -> float:
    def luminance(colour: Sequence[float]) -> float:
        linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
