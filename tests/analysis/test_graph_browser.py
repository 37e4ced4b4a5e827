"""The viewer in headless Chromium without a network: mouse, keyboard and fingers, desktop and phone, light, dark and paper.

Every test ends with the page's complaints (uncaught errors, what the console was told) and requests, of which there are none but
the file itself. Numbers are read off the page with all their digits and compared with Python's.
"""

import json
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import swd_lens as swd
from swd_lens.analysis.audit.labels import UnitLabel, UnitLabels
from swd_lens.analysis.graph import unit_graph
from tests.analysis.graph_checks import TOKENS, all_units, drawn, held_hooks, set_hooks, shown_values
from tests.analysis.graph_pages import Paths
from tests.chromium import CHROMIUM, Browser

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")]
SITES = ("attn_v", "attn_o", "mlp_out")
PROBE = (Path(__file__).parents[1] / "report" / "probe.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


class Small:
    """A small true graph on two prompts, with everything that a page can show."""

    def __init__(self) -> None:
        how = {"attention": "frozen", "answers": 3, "keep": 150, "isolated": True}
        self.model, self.factors, self.graph = drawn(SITES, prompt=TOKENS, **how)
        self.other = unit_graph(self.model, self.factors, all_units(self.factors), prompt=TOKENS[::-1], **how)
        self.replays = swd.graph.replays(self.model, self.factors, self.graph, strengths=(0.0, 0.5, 2.0))


@pytest.fixture(scope="module")
def small() -> Small:
    return Small()


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Open a page; at the test's end it has complained of nothing and fetched nothing."""
    path = tmp_path / "graph.html"

    def shown(page: Any, **size: Any) -> Path:
        page.save(path)
        browser.size(**({"width": 1400, "height": 900} | size))
        browser.open(path)
        return path

    yield shown
    quiet(browser, path)


def quiet(browser: Browser, path: Path) -> None:
    assert browser.complaints == []
    fetched = {url for url in browser.requests if not url.startswith(("blob:", "data:"))}
    assert {url.partition("#")[0] for url in fetched} <= {path.resolve().as_uri()}


def box(node: str) -> str:
    """The element of a node, or of the group that it is in."""
    return f"""document.querySelector('[data-node~="{node.replace(" ", "_")}"]')"""


def middle(browser: Browser, node: str) -> tuple[float, float]:
    """Where a node's box stands in the window."""
    x, y, w, h = place(browser, f"{box(node)}.querySelector('.box')")
    return x + w / 2, y + h / 2


def place(browser: Browser, element: str) -> tuple[float, float, float, float]:
    return tuple(browser.value(f"(r => [r.x, r.y, r.width, r.height])({element}.getBoundingClientRect())"))


def slide(browser: Browser, element: str, value: float) -> None:
    """What dragging a slider to a value does."""
    browser.value(f"(() => {{ const s = {element}; s.value = {value}; s.dispatchEvent(new Event('input')); }})()")
    browser.rest(50)


def go_to(browser: Browser, node: str) -> None:
    """Focus a node from the keyboard's side: search for it, go on to it."""
    browser.value(f"{box(node)}.focus()")
    browser.rest()


def clamp(browser: Browser, node: str, factor: float) -> None:
    go_to(browser, node)
    browser.key("c")
    slide(browser, "[...document.querySelectorAll('#panel .slider input')].at(-1)", factor)


def fit(browser: Browser) -> None:
    browser.value("document.getElementById('fit').click()")
    browser.rest(200)


def nodes_shown(browser: Browser) -> set[str]:
    shown = browser.value("[...document.querySelectorAll('.node')].flatMap(n => n.dataset.node.split(' '))")
    return {name.replace("_", " ") if name.startswith("logit") else name for name in shown}


def on_nodes(browser: Browser, name: str) -> dict[str, Any]:
    """What boxes carry under "data-name", by node."""
    found = browser.value(
        f"[...document.querySelectorAll('.node[data-{name}]')].map(n => [n.dataset.node, JSON.parse(n.dataset.{name})])"
    )
    return {node.replace("_", " ") if node.startswith("logit") else node: value for node, value in found}


def panel(browser: Browser) -> str:
    browser.rest()
    return browser.value("document.getElementById('panel').innerText")


# ---------------------------------------------------------------------------------------------- looks


@pytest.mark.parametrize(
    ("size", "dark"), [((1400, 900, False), False), ((390, 844, True), True)], ids=["light desktop", "dark phone"]
)
def test_it_fits_is_accessible_and_complains_of_nothing(
    browser: Browser, small: Small, opened: Any, size: tuple[int, int, bool], dark: bool
) -> None:
    width, height, phone = size
    page = small.graph.show(replays=small.replays, attention=Paths(small.graph))
    opened(page, width=width, height=height, phone=phone, dark=dark)
    go_to(browser, "blocks.0.attn_o/1@4")
    for key in ("ArrowDown", "c", "t"):  # a unit clamped, its panel full, and the tables
        browser.key(key)
    for view in ("table", "graph"):
        call = "probe({ contentWindow: window, contentDocument: document })"
        found = browser.value(f"(() => {{ window.complaints = []; {PROBE}; return {call}; }})()")
        # Of the boxes one is reached by Tab, the others from it by arrows.
        assert [wrong for wrong in found["wrong"] if not wrong.startswith('not reachable: <g class="node')] == [], view
        assert browser.value("document.querySelectorAll('.node[tabindex=\"0\"]').length") == 1
        browser.value("document.getElementById('as-graph').click()")
        browser.rest(100)
    browser.key("?")
    assert browser.value("document.getElementById('help').open")


def test_on_paper(browser: Browser, small: Small, opened: Any, tmp_path: Path) -> None:
    opened(small.graph.show(replays=small.replays))
    clamp(browser, "blocks.0.attn_o/1@4", 2.0)
    pdf = browser.print(tmp_path / "graph.pdf")
    assert pdf.read_bytes().startswith(b"%PDF") and pdf.stat().st_size > 20_000
    if shutil.which("pdftotext") is None:
        pytest.skip("needs pdftotext (apt-get install poppler-utils) to read the PDF")
    text = subprocess.run(["pdftotext", str(pdf), "-"], capture_output=True, text=True, check=True).stdout
    assert "Predicted and true changes" in text and "answers" in text and "Search" not in text


def test_a_notebooks_frame_works_without_an_address(browser: Browser, small: Small, tmp_path: Path) -> None:
    path = tmp_path / "notebook.html"
    frame = small.graph.show(replays=small.replays)._repr_html_()
    path.write_text(f"<!doctype html><html lang=en><title>n</title><body>{frame}</body></html>", encoding="utf-8")
    browser.size(1200, 900)
    browser.open(path)
    browser.rest(300)
    inside = "document.querySelector('iframe').contentDocument"
    assert browser.value(f"{inside}.querySelectorAll('.node').length") == len(small.graph.nodes)
    left, top, _, _ = place(browser, "document.querySelector('iframe')")
    node = f"""{inside}.querySelector('[data-node="blocks.1.attn_o/1@4"] .box')"""
    x, y, w, h = place(browser, node)
    browser.click(left + x + w / 2, top + y + h / 2)
    browser.key("Enter")
    browser.rest(500)
    assert browser.value(f"{inside}.querySelectorAll('.node.pinned').length") == 1
    quiet(browser, path)


def counts(text: str) -> list[int]:
    return [int(n.replace(",", "")) for n in re.findall(r"\b\d[\d,]*\b(?= (?:nodes|edges))", text)]


@pytest.mark.parametrize("size", [(1400, 900), (390, 844)], ids=["desktop", "phone"])
def test_it_opens_on_the_whole_graph_says_what_it_shows_and_counts_alike(
    browser: Browser, small: Small, opened: Any, size: tuple[int, int]
) -> None:
    n_nodes, n_edges = len(small.graph.nodes), len(small.graph.edges)
    opened(small.graph.show(), width=size[0], height=size[1])
    left, top, width, height = place(browser, "document.querySelector('.frame')")
    boxes = browser.value(
        "[...document.querySelectorAll('.node .box')].map(b => b.getBoundingClientRect())"
        ".map(r => [r.left, r.top, r.right, r.bottom])"
    )
    assert len(boxes) == n_nodes
    assert all(left <= a and top <= b and c <= left + width and d <= top + height for a, b, c, d in boxes)
    sentence = browser.value("document.getElementById('sentence').textContent")
    possible = small.graph.settings["edges_possible"]
    assert sentence.startswith(f"The {n_edges} strongest of {possible:,} edges through which") and sentence.count(".") == 1
    assert browser.value("document.querySelectorAll('[data-leaving]').length") == 0
    # Header, slider, panel, legend and tables, before and after pruning.
    for shown in (1000, 500):
        slide(browser, "document.getElementById('edges')", shown)
        header = counts(browser.value("document.getElementById('subtitle').textContent"))
        drawn = int(browser.value("document.getElementById('subtitle').textContent").split(" and ")[1].split()[0])
        assert header[-1] == n_edges and (drawn == n_edges) == (shown == 1000)
        kinds = browser.value("['p', 'n', 'a'].map(look => Number(document.getElementById('legend-' + look).textContent))")
        assert sum(kinds) == drawn and kinds[2] <= int((small.graph.edges["kind"] == "attention").sum())
        slider = browser.value("document.getElementById('edges-said').textContent")
        assert slider == (f"all {n_edges}" if shown == 1000 else f"{drawn} of {n_edges}")
        assert browser.value("document.getElementById('subtitle').textContent").split(" \u00b7 ")[-1] in panel(browser)
        browser.value("document.getElementById('as-table').click()")
        browser.rest(100)
        captions = browser.value("[...document.querySelectorAll('#tables caption')].map(c => c.textContent)")
        assert captions[1] == f"{drawn} edges"
        browser.value("document.getElementById('as-graph').click()")
        browser.rest(100)
    legend = browser.value("document.getElementById('legend').innerText")
    assert "italics" in legend and "no label" in legend and "leaves the window" in legend


def test_attention_edges_that_leave_the_window_are_marked_on_its_rim(browser: Browser, small: Small, opened: Any) -> None:
    opened(small.graph.show())
    for _ in range(5):
        browser.value("document.querySelector('.zoom button').click()")
        browser.rest(200)
    left, top, width, height = place(browser, "document.querySelector('.frame')")
    marks = browser.value("[...document.querySelectorAll('[data-leaving]')].map(m => m.dataset.leaving.split(' '))")
    # An edge begins at the middle of its source's top and ends at the middle of its target's bottom; names have the rim.
    spots = browser.value(
        "Object.fromEntries([...document.querySelectorAll('.node')].map(n => { const r = n.querySelector('.box')"
        ".getBoundingClientRect(); return [n.dataset.node, [r.left + r.width / 2, r.top, r.bottom]]; }))"
    )

    def within(x: float, y: float) -> bool:
        return left + 88 <= x <= left + width and top <= y <= top + height - 26

    leaving = 0
    for edge in small.graph.edges[small.graph.edges["kind"] == "attention"].itertuples():
        source, target = (spots[str(name).replace(" ", "_")] for name in (edge.source, edge.target))
        leaving += within(source[0], source[1]) != within(target[0], target[2])
    assert leaving > 3 and sum(int(n) for _, n in marks) == leaving
    assert {side for side, _ in marks} <= {"left", "right", "top", "bottom"}
    fit(browser)
    assert browser.value("document.querySelectorAll('[data-leaving]').length") == 0


# ---------------------------------------------------------------------------------------------- mouse


def test_pointing_clicking_and_dragging(browser: Browser, default_model: Any, opened: Any) -> None:
    factors = swd.baselines.svd(default_model, "blocks.*.mlp_out")
    units = [(site, i) for site in factors for i in range(4)]
    graph = unit_graph(default_model, factors, units, prompt="The king said that he", answers=2, keep=60)
    heard = swd.audit(default_model, factors, swd.text_tokens(512), units=units, n=4, progress=False)
    opened(graph.show(audit=heard))
    fit(browser)
    rows = graph.nodes[graph.nodes["kind"] == "unit"]
    first, second = (rows[rows["layer"] == layer]["node"].iloc[0] for layer in (1, 2))
    browser.mouse("mouseMoved", *middle(browser, first))
    browser.rest(100)
    hover = browser.value("document.getElementById('hover').innerText")
    unit = heard.unit(first.partition("@")[0])
    assert unit.unit in hover and "promotes" in hover and unit.contexts[0].tokens[unit.contexts[0].peak].strip() in hover
    assert browser.value("document.querySelectorAll('#hover .histogram rect').length") > 3
    browser.click(*middle(browser, first))
    said = panel(browser)
    into, out = (graph.edges[graph.edges[end] == first] for end in ("target", "source"))
    for title, edges in (("Edges in", into), ("Edges out", out)):
        assert (f"{title} ({len(edges)})" in said) == bool(len(edges)), title
    assert len(out) > 0
    # Onto free ground: the box is moved. Onto another box: both are a group, which is renamed.
    x, y = middle(browser, first)
    browser.drag((x, y), (x + 70, y + 34))
    assert middle(browser, first) == pytest.approx((x + 70, y + 34), abs=3)
    browser.drag(middle(browser, first), middle(browser, second))
    grouped = "document.querySelector('.node.group').dataset.node"
    assert set(browser.value(grouped).split()) == {first, second}
    browser.value("(() => { const i = document.querySelector('[data-key=group-name]'); i.focus(); i.select(); })()")
    browser.type("two of a kind")
    assert browser.value("document.querySelector('.node.group .name').textContent").startswith("two of a")
    browser.value("document.querySelector('[data-key=dissolve]').click()")
    browser.rest()
    assert browser.value("document.querySelectorAll('.node.group').length") == 0


def test_the_sliders_prune_and_pins_stay(browser: Browser, small: Small, opened: Any) -> None:
    opened(small.graph.show())
    edges, names = small.graph.edges, set(small.graph.nodes["node"])
    joined = set(edges["source"]) | set(edges["target"])
    answers = {name for name in names if name.startswith("logit")}
    assert nodes_shown(browser) == names and joined < names
    pinned = edges["source"].iloc[-1]
    go_to(browser, pinned)
    browser.key("Enter")
    browser.key("Escape")
    slide(browser, "document.getElementById('edges')", 300)
    n = round(len(edges) * 0.3**2)
    ends = set(edges.head(n)["source"]) | set(edges.head(n)["target"])
    assert nodes_shown(browser) == (names - joined) | ends | answers | {pinned}
    assert f"{n} of {len(edges)}" in browser.value("document.getElementById('edges-said').textContent")
    browser.key("p")
    assert nodes_shown(browser) == answers | {pinned}


def test_what_makes_a_node_adds_up_as_it_is_pruned(browser: Browser, small: Small, opened: Any) -> None:
    """Drawn + not drawn + rest = activation, at every node; drawn is Python's sum of the edges that the slider leaves."""
    opened(small.graph.show())
    for value in (1000, 500):
        slide(browser, "document.getElementById('edges')", value)
        left = small.graph.edges.head(round(len(small.graph.edges) * (value / 1000) ** 2))
        sums, checked = on_nodes(browser, "sums"), 0
        for row in small.graph.nodes.to_dict("records"):
            if row["kind"] == "token" or row["node"] not in sums:
                continue
            drawn, hidden, rest = sums[row["node"]]
            expected = left[left["target"] == row["node"]]["contribution"].sum()
            assert drawn == pytest.approx(expected, abs=1e-5) and rest == pytest.approx(row["rest"], abs=1e-5)
            assert drawn + hidden + rest == pytest.approx(row["activation"], abs=1e-5)
            checked += 1
        assert checked > 10


def test_two_prompts_side_by_side(browser: Browser, small: Small, opened: Any) -> None:
    opened(small.graph.show(beside=small.other))
    fit(browser)
    assert browser.value("document.querySelectorAll('.scene').length") == 2
    browser.mouse("mouseMoved", *middle(browser, "blocks.0.attn_o/1@4"))
    browser.rest(100)
    twins = browser.value("[...document.querySelectorAll('.scene:nth-child(2) .twin')].map(n => n.dataset.node)")
    assert twins and all(name.startswith("blocks.0.attn_o/1@") for name in twins)


def test_fingers_move_and_zoom_the_graph(browser: Browser, small: Small, opened: Any) -> None:
    opened(small.graph.show(), width=390, height=844, phone=True)
    left, top, _, _ = place(browser, "document.querySelector('.frame')")
    matrix = "document.querySelector('.nodes').transform.baseVal.consolidate().matrix"
    x, scale = browser.value(f"[{matrix}.e, {matrix}.a]")
    ground = (left + 10, top + 20)  # where no box is, and the phone's window has not ended
    browser.touch("touchStart", ground)
    for i in range(1, 7):
        browser.touch("touchMove", (ground[0] + 20 * i, ground[1]))
    browser.touch("touchEnd")
    browser.rest(200)
    assert browser.value(f"{matrix}.e") == pytest.approx(x + 120, abs=1)
    a, b = (left + 150, top + 200), (left + 220, top + 200)
    browser.touch("touchStart", a, b)
    for i in range(1, 7):
        browser.touch("touchMove", (a[0] - 8 * i, a[1]), (b[0] + 8 * i, b[1]))
    browser.touch("touchEnd")
    browser.rest(200)
    assert browser.value(f"{matrix}.a") > 1.5 * scale


# ---------------------------------------------------------------------------------------------- keyboard


def test_everything_can_be_reached_by_keys(browser: Browser, small: Small, opened: Any) -> None:
    opened(small.graph.show(replays=small.replays))
    focused = "document.activeElement.dataset.node ?? document.activeElement.id"
    browser.key("ArrowDown")
    start = browser.value(focused)
    assert start.startswith("logit")
    assert float(browser.value("parseFloat(getComputedStyle(document.activeElement.querySelector('.box')).strokeWidth)")) >= 3
    browser.key("ArrowRight")
    right = browser.value(focused)
    browser.key("ArrowLeft")
    assert right != start and browser.value(focused) == start
    browser.key("ArrowDown")
    below = browser.value(focused)
    assert below.startswith("blocks.1.") and below.partition("@")[0] in panel(browser)
    browser.key("Enter")
    assert browser.value("document.activeElement.getAttribute('aria-pressed')") == "true"
    browser.key(" ")
    browser.key("ArrowRight")
    browser.key(" ")
    browser.key("g")
    assert browser.value("document.querySelectorAll('.node.group').length") == 1
    assert len(browser.value(focused).split()) == 2
    browser.key("c")
    assert browser.value("document.querySelectorAll('.slider').length") == 1
    browser.key("l")
    assert browser.value("document.activeElement.dataset.key") == "label"
    browser.key("Escape")
    browser.key("/")
    assert browser.value(focused) == "search"
    browser.type("blocks.0.attn_o/3")
    browser.key("Enter")
    assert "blocks.0.attn_o/3" in panel(browser)
    browser.key("Escape")
    browser.key("?")
    assert browser.value("document.getElementById('help').open")
    browser.key("Escape")
    browser.key("t")
    assert browser.value("document.querySelectorAll('#tables table').length") == 2


# ---------------------------------------------------------------------------------------------- clamp and attention


def test_the_live_clamp_is_a_frozen_replay_and_shows_the_true_ones(browser: Browser, small: Small, opened: Any) -> None:
    opened(small.graph.show(replays=small.replays))
    found, node = small.replays, "blocks.0.attn_o/1@4"
    clamp(browser, node, 2.0)
    shown, row = on_nodes(browser, "change"), found.nodes.index(node)
    for target, expected in zip(found.targets, found.frozen[row, 2].tolist(), strict=True):
        assert shown[target] == pytest.approx(expected, abs=1e-4, rel=1e-4), target
    held = held_hooks(small.model, small.factors)
    clean = shown_values(small.model, small.factors, small.graph, held)
    z = float(found.z[row])
    true = shown_values(small.model, small.factors, small.graph, [*set_hooks(node, 2.0, z, small.factors), *held]) - clean
    assert [shown[target] for target in found.targets] == pytest.approx(true.tolist(), abs=1e-4)
    said = panel(browser)
    answer = found.targets.index(next(t for t in found.targets if t.startswith("logit")))
    assert "Predicted and true changes" in said and "gap" in said
    assert browser.value("document.querySelectorAll('.charts .true').length") == 3 * 4  # three answers and a difference
    cells = browser.value("[...document.querySelector('.changes tbody tr').querySelectorAll('td')].map(td => td.textContent)")
    values = [float(cell.replace("\u2212", "-")) for cell in cells]
    expected = [float(found.frozen[row, 2, answer]), float(found.changes[row, 2, answer])]
    assert values == pytest.approx([*expected, expected[1] - expected[0]], rel=6e-3, abs=1e-4)
    # Several clamps hold each other.
    second = "blocks.1.mlp_out/2@4"
    clamp(browser, second, 0.5)
    z2 = float(found.z[found.nodes.index(second)])
    both = [*set_hooks(node, 2.0, z, small.factors), *set_hooks(second, 0.5, z2, small.factors), *held]
    true = shown_values(small.model, small.factors, small.graph, both) - clean
    shown = on_nodes(browser, "change")
    assert [shown[target] for target in found.targets] == pytest.approx(true.tolist(), abs=1e-4)


def test_without_replays_the_change_follows_the_drawn_edges(browser: Browser, small: Small, opened: Any) -> None:
    opened(small.graph.show())
    node = "blocks.0.attn_o/1@4"
    clamp(browser, node, 0.0)
    names = small.graph.nodes["node"].tolist()
    change = dict.fromkeys(names, 0.0)
    for row in small.graph.nodes.itertuples():
        into = small.graph.edges[small.graph.edges["target"] == row.node]
        change[row.node] = sum(w * change[s] for s, w in zip(into["source"], into["weight"], strict=True))
        if row.node == node:
            change[row.node] = -float(row.activation)  # pyright: ignore[reportArgumentType]
    shown = on_nodes(browser, "change")
    assert shown == pytest.approx({name: change[name] for name in shown}, abs=1e-5) and len(shown) > 20
    assert "Along the drawn edges alone" in panel(browser)


def test_an_attention_edge_opens_its_heads_and_pairs(browser: Browser, small: Small, opened: Any) -> None:
    opened(small.graph.show(attention=Paths(small.graph)))
    edge = small.graph.edges[small.graph.edges["kind"] == "attention"].iloc[0]
    # A click on the line itself, halfway between the source's top and the target's bottom, where only its ends are shown.
    for name in (edge["source"], edge["target"]):
        go_to(browser, name)
        browser.key("Enter")
    browser.key("Escape")
    browser.key("p")
    browser.rest(200)
    (x0, y0, w0, _), (x1, y1, w1, h1) = (
        place(browser, f"{box(edge[end])}.querySelector('.box')") for end in ("source", "target")
    )
    browser.click((x0 + w0 / 2 + x1 + w1 / 2) / 2, (y0 + y1 + h1) / 2)
    assert "Heads that carry it" in panel(browser)
    browser.key("Escape")
    assert "Heads that carry it" not in panel(browser)
    browser.key("p")
    browser.rest(200)
    # From the list of its source's edges.
    fit(browser)
    browser.click(*middle(browser, edge["source"]))
    browser.value("document.querySelector('#panel .chip').click()")
    said = panel(browser)
    layer = edge["target"].split(".")[1]
    assert "Heads that carry it" in said and f"L{layer}H0" in said and "pattern 75%" in said
    browser.value("document.querySelector('#panel .heads .link').click()")
    said = panel(browser)
    assert "its score before the softmax is +1.5" in said
    assert f"blocks.{layer}.attn_q/3" in said and "other pairs" in said


# ---------------------------------------------------------------------------------------------- state and files


def test_the_address_keeps_the_view(browser: Browser, small: Small, opened: Any) -> None:
    path = opened(small.graph.show(replays=small.replays))

    def view() -> Any:
        pinned = browser.value("[...document.querySelectorAll('.pinned')].map(n => n.dataset.node)")
        return nodes_shown(browser), pinned, panel(browser)

    go_to(browser, "blocks.1.attn_o/1@4")
    for key in ("Enter", " ", "ArrowRight", " ", "g"):
        browser.key(key)
    slide(browser, "document.getElementById('edges')", 700)
    browser.rest(400)
    anchor, before = browser.value("location.hash"), view()
    assert anchor.startswith("#s=") and len(anchor) < 800 and before[1]
    browser.open(path, anchor)
    browser.rest(100)
    assert view() == before
    browser.open(path, "#s=bm90aGluZw")  # of another graph
    assert nodes_shown(browser) == set(small.graph.nodes["node"])


def test_a_saved_view_is_opened_again(browser: Browser, small: Small, opened: Any) -> None:
    path = opened(small.graph.show(replays=small.replays))
    clamp(browser, "blocks.0.attn_o/1@4", 0.5)
    for key in ("Escape", "ArrowDown", "Enter", "ArrowDown", "Enter"):
        browser.key(key)

    def view() -> Any:
        return on_nodes(browser, "change"), browser.value("[...document.querySelectorAll('.pinned')].map(n => n.dataset.node)")

    before = view()
    (browser.folder / "graph-view.json").unlink(missing_ok=True)
    browser.value("document.getElementById('save-state').click()")
    saved = browser.downloaded("graph-view.json")
    assert json.loads(saved.read_text(encoding="utf-8"))["clamps"] == [["blocks.0.attn_o/1@4", 0.5]]
    browser.open(path)
    assert on_nodes(browser, "change") == {}
    document = browser.call("DOM.getDocument")["root"]["nodeId"]
    chosen = browser.call("DOM.querySelector", nodeId=document, selector="#load-state")["nodeId"]
    browser.call("DOM.setFileInputFiles", files=[str(saved)], nodeId=chosen)
    browser.rest(300)
    assert view() == before


def test_labels_typed_here_are_read_by_unit_labels(browser: Browser, small: Small, opened: Any) -> None:
    hostile = 'copies ‘names’ </b> \u2028 é 😀 \\ "'
    known = {"blocks.1.mlp_out/2": UnitLabel("known before", "a note", "somebody")}
    opened(small.graph.show(labels=known))
    fit(browser)
    browser.click(*middle(browser, "blocks.0.attn_o/1@4"))
    browser.key("l")
    browser.type(hostile)
    browser.value("document.querySelector('[data-key=note]').focus()")
    browser.type("seen by eye")
    assert browser.value(f"{box('blocks.0.attn_o/1@4')}.querySelector('.name').textContent").startswith("copies")
    (browser.folder / "unit-labels.jsonl").unlink(missing_ok=True)
    browser.value("document.getElementById('save-labels').click()")
    file = browser.downloaded("unit-labels.jsonl")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is sealed
        labels = UnitLabels.load(file)
    assert dict(labels) == {"blocks.0.attn_o/1": UnitLabel(hostile.strip(), "seen by eye"), **known}
    identities = dict(small.graph.settings["factors"])
    assert dict(labels.factors) == {site: identities[site] for site in ("blocks.0.attn_o", "blocks.1.mlp_out")}
    labels.require(identities, {site: f.n_units for site, f in small.factors.items()})
    opened(small.graph.show(labels=labels))
    assert browser.value(f"{box('blocks.0.attn_o/1@4')}.querySelector('.name').textContent").startswith("copies")
    # A line that somebody changed is noticed.
    file.write_text(file.read_text(encoding="utf-8").replace("seen by eye", "seen by me"), encoding="utf-8")
    with pytest.raises(ValueError, match="changed"):
        UnitLabels.load(file)
