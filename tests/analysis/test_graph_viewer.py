"""The viewer's page as a file: all in it, nothing from anywhere, text as text. In a browser: test_graph_browser.py."""

import base64
import hashlib
import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import swd_lens as swd
from swd_lens.analysis.audit.labels import UnitLabel
from swd_lens.analysis.graph import Replays, unit_graph
from swd_lens.analysis.graph.viewer import page as page_module
from swd_lens.analysis.graph.viewer.page import SCRIPTS, GraphPage
from swd_lens.base.errors import encodable
from tests.analysis.graph_checks import TOKENS, all_units, random_factors
from tests.analysis.graph_pages import Paths, large_graph
from tests.micro import toy_model

HOSTILE = "</script><b>$x ' \" & \ud83d\u202e\n"


def _data(page: GraphPage) -> Any:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page.html, flags=re.DOTALL)
    assert found
    return json.loads(found[1])


def _small() -> tuple[Any, Any, Any]:
    model = toy_model()
    factors = random_factors(model, "attn_v", "attn_o", "mlp_in", "mlp_out")
    return (
        model,
        factors,
        unit_graph(
            model, factors, all_units(factors), prompt=TOKENS, attention="frozen", answers=3, keep=None, isolated=True
        ),
    )


def test_the_page_holds_all_that_it_needs_and_forbids_the_rest() -> None:
    page = large_graph(20, 60).show()
    assert not re.search(r"""(src|href)=["'](?!#)|@import|url\((?!#)|https?://(?!www\.w3\.org/)""", page.html)
    script = re.findall(r"<script>(.*?)</script>", page.html, flags=re.DOTALL)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page.html)
    assert len(script) == 1 and policy
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy[1] and policy[1].startswith("default-src 'none'")
    assert page.html.count("</script>") == 2 and "<!--" not in script[0]


def test_text_of_labels_and_prompts_is_data() -> None:
    _, _, graph = _small()
    unit = "blocks.0.mlp_out/1"
    graph.nodes.loc[graph.nodes["kind"] == "token", "label"] = HOSTILE
    graph.settings["prompt"] = HOSTILE
    page = graph.show(labels={unit: UnitLabel(HOSTILE, note=HOSTILE)}, groups={HOSTILE: [f"{unit}@4"]})
    assert page.html.count("</script>") == 2 and "<b>" not in page.html.replace("<b>0</b>", "").split("<script")[0]
    page.html.encode("utf-8")
    values = _data(page)
    assert values["units"][unit]["label"] == encodable(HOSTILE) and "</script><b>" in values["groups"][0]["name"]
    assert "<title>Unit graph of “&lt;/script&gt;" in page.html


def test_saving_and_showing(tmp_path: Path) -> None:
    page = large_graph(20, 60).show()
    path = page.save(tmp_path / "deep" / "graph.html")
    assert path.read_text(encoding="utf-8") == page.html and [p.name for p in path.parent.iterdir()] == ["graph.html"]
    frame = re.fullmatch(r'<iframe .*?srcdoc="(.*?)".*?></iframe>', page._repr_html_(), flags=re.DOTALL)
    assert frame and html.unescape(frame[1]) == page.html
    assert repr(page).startswith("GraphPage(Unit graph of")


def test_numbers_add_up_in_the_page_as_in_the_graph() -> None:
    """Drawn edges and rest make the activation (an answer: its centred logit) at every node, to 1e-5."""
    _, _, graph = _small()
    values = _data(graph.show())["graphs"][0]
    nodes, edges = values["nodes"], values["edges"]
    drawn = [0.0] * len(nodes["node"])
    for target, contribution in zip(edges["target"], edges["contribution"], strict=True):
        drawn[target] += contribution
    checked = 0
    for i, kind in enumerate(nodes["kind"]):
        if kind != "token":
            assert drawn[i] + nodes["rest"][i] == pytest.approx(nodes["activation"][i], abs=1e-5), nodes["node"][i]
            checked += abs(drawn[i]) > 1e-3
    assert checked > 50


def test_tables_of_effects_are_the_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    model, factors, graph = _small()
    found = swd.graph.replays(model, factors, graph, ["blocks.0.mlp_out/1", "blocks.1.attn_o/2@4"], (0.0, 2.0))
    values = _data(graph.show(replays=found, attention=Paths(graph)))["graphs"][0]
    names = values["nodes"]["node"]
    assert tuple(names[i] for i in values["replays"]["nodes"]) == found.nodes

    def unpacked(name: str) -> torch.Tensor:
        return torch.frombuffer(bytearray(base64.b64decode(values["replays"][name])), dtype=torch.float32)

    assert torch.equal(unpacked("effects"), found.effects.flatten())
    assert torch.equal(unpacked("changes"), found.changes.flatten())
    assert len(values["attention"]["heads"]["source"]) == 2 * int((graph.edges["kind"] == "attention").sum())


def test_units_bring_what_the_audit_knows(default_model: Any) -> None:
    factors = swd.baselines.svd(default_model, "blocks.3.mlp_out")
    unit = "blocks.3.mlp_out/2"
    graph = unit_graph(default_model, factors, [unit, "blocks.3.mlp_out/9"], prompt="The king said")
    heard = swd.audit(default_model, factors, swd.text_tokens(512), units=[unit], n=6, progress=False)
    heard = heard.with_labels({unit: {"label": "by the audit", "author": "somebody"}})
    shown = _data(graph.show(audit=heard))["units"]
    assert shown[unit]["label"] == "by the audit" and shown[unit]["author"] == "somebody"
    assert len(shown[unit]["contexts"]) == 5 and sum(shown[unit]["histogram"]["counts"]) == 512
    assert len(shown[unit]["promoted"]) == 8 and shown["blocks.3.mlp_out/9"] == {}
    profile = heard.unit(unit)
    peak, pieces, z = shown[unit]["contexts"][0]
    assert pieces[peak].strip() and z[peak] == pytest.approx(profile.contexts[0].z[profile.contexts[0].peak], rel=1e-2)
    assert _data(graph.show(audit=[profile], labels={unit: "typed"}))["units"][unit]["label"] == "typed"


def test_graphs_without_a_prompt_and_without_edges_are_shown() -> None:
    model, factors, _ = _small()
    static = unit_graph(model, factors, all_units(factors), answers=[3, 5])
    values = _data(static.show())["graphs"][0]
    assert values["has_prompt"] is False and set(values["nodes"]["activation"]) == {None}
    assert len(values["edges"]["weight"]) == len(static.edges)


def test_the_largest_page_that_is_promised_has_at_most_5_megabytes() -> None:
    """400 nodes, 4,000 links, every unit clamped at three strengths."""
    graph = large_graph()
    units = graph.nodes[graph.nodes["kind"] == "unit"]["node"].tolist()
    answers = graph.nodes[graph.nodes["kind"] == "logit"]["node"].tolist()
    n, targets = len(units), (*units, *answers)
    made = Replays(
        tuple(units),
        (0.0, 0.5, 2.0),
        targets,
        torch.ones(n),
        torch.randn(n, len(targets)),
        torch.randn(n, 3, len(targets)),
        {},
    )
    page = graph.show(replays=made)
    assert len(graph.nodes) == 400 and len(graph.edges) == 4_000
    assert len(page.html.encode()) < 5e6


def test_what_belongs_to_other_graphs_is_refused() -> None:
    graph = large_graph(20, 60)
    with pytest.raises(ValueError, match=r"these groups are of another graph: 1 of their nodes .* such as nothing"):
        graph.show(groups={"a": ["nothing"]})
    with pytest.raises(TypeError, match="an Audit, or cards"):
        graph.show(audit=[1])
    with pytest.raises(TypeError, match="is a float"):
        graph.show(labels={f"{graph.nodes['site'].iloc[16]}/{graph.nodes['unit'].iloc[16]}": 1.0})
    with pytest.raises(TypeError, match="beside must be a UnitGraph"):
        graph.show(beside=graph.nodes)  # pyright: ignore[reportArgumentType]


def test_the_files_of_the_page_are_in_the_wheel() -> None:
    folder = Path(page_module.__file__).parent
    project = (Path(swd.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    line = re.search(r'^"swd_lens.analysis.graph.viewer" = (\[.*\])$', project, flags=re.MULTILINE)
    assert line
    patterns = json.loads(line[1])
    carried = {path for pattern in patterns for path in folder.glob(pattern)}
    assert {path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")} == carried
    assert {f"{name}.js" for name in SCRIPTS} == {path.name for path in folder.glob("scripts/*")}
