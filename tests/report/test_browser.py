"""The report and a notebook cell in a real browser, without a network.

Each page lies in frames of a phone's and a desktop's width. `probe.js` looks at them from outside: nothing is fetched, nothing
complains, everything fits; headings, names, text alternatives and contrast are what people need who do not see the page, or use
no mouse; and an attention head that is clicked, or entered from the keyboard, comes up in full size.
"""

import html
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swd_lens.base.figures import new_figure
from swd_lens.base.panels import attention_heads
from swd_lens.report import render_report
from swd_lens.study import Run
from swd_lens.study.section import Picture, ReportSection, SectionTable
from tests.chromium import CHROMIUM, Browser
from tests.report.conftest import HOSTILE, section_with_graph, with_attention, with_cards, with_screen
from tests.report.gallery import RECORDER, found_by, run_chromium

_PATIENCE = "--virtual-time-budget=60000"
DARK = ["--blink-settings=preferredColorScheme=0"]
WIDTHS = (360, 1200)
# What the README's first command writes; .ci/run runs it before the tests.
DEMO = Path(__file__).resolve().parents[2] / "swd-demo" / "report.html"
OUTER = """<!doctype html><body>{frames}<script>{probe}
addEventListener("load", async () => {{
  const found = {{}};
  for (const frame of document.querySelectorAll("iframe")) {{
    found[frame.width] = await probe(frame).catch(error => ({{ wrong: ["probe: " + error.stack] }}));
  }}
  document.body.innerHTML = "<pre id=found></pre>";
  document.getElementById("found").textContent = JSON.stringify(found);
}});
</script></body>"""

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)"),
    pytest.mark.filterwarnings("ignore:the mean margin of"),  # of a model with random weights
]


def _probed(page: str, folder: Path, options: list[str], widths: tuple[int, ...] = WIDTHS) -> dict[str, dict[str, Any]]:
    """Width -> what the probe found there."""
    inside = html.escape(page.replace("<head>", f"<head>{RECORDER}", 1))
    assert RECORDER in html.unescape(inside)
    frames = "".join(f'<iframe width="{width}" height="800" srcdoc="{inside}"></iframe>' for width in widths)
    outer = folder / "outer.html"
    probe = (Path(__file__).parent / "probe.js").read_text(encoding="utf-8")
    outer.write_text(OUTER.format(frames=frames, probe=probe), encoding="utf-8")
    done = run_chromium(folder / "profile", [*options, _PATIENCE, "--dump-dom"], outer)
    # What the browser itself tells the console: refused scripts, blocked requests.
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line and "Uncaught" in line]
    return found_by(done)


def _full(run: Run, host: Any) -> Run:
    """Hostile cards and panels, every kind of section."""
    figure, axes = new_figure(width=9.0)
    axes[0, 0].plot([1, 2])
    picture = Picture.of(figure, "A wide graph", "One line that rises.", "Wider than a phone.")
    table = SectionTable("Numbers", ("name", *"abcdefghij"), (("row", *range(10)),))
    views = [*run.attention, *with_attention(run, HOSTILE).attention]
    return replace(
        with_screen(with_cards(run, HOSTILE)),
        attention=views,
        extras=[ReportSection("More", ("Words.",), (picture,), (table,)), section_with_graph(host)],
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("options", "widths"), [([], WIDTHS), (DARK, WIDTHS[1:])], ids=["light", "dark"])
def test_the_report_fits_is_accessible_and_its_heads_can_be_chosen(
    run: Run, host: Any, tmp_path: Path, options: list[str], widths: tuple[int, ...]
) -> None:
    """In the dark other colours; what fits is the same."""
    full = _full(run, host)
    found = _probed(render_report(full), tmp_path, options, widths)
    heads = sum(len(view.names) for view in full.attention)
    for width in widths:
        assert found[str(width)] == {"wrong": [], "panels": len(full.attention), "buttons": heads}


@pytest.mark.slow
def test_the_unit_graph_unfolds_and_draws_itself(small: Run, host: Any, tmp_path: Path) -> None:
    section = section_with_graph(host)
    assert section.graph is not None
    path = tmp_path / "report.html"
    path.write_text(render_report(replace(small, extras=[section])), encoding="utf-8")
    with Browser(tmp_path) as browser:
        browser.size(1200, 900)
        browser.open(path)
        fold = "document.querySelector('details.graph-page')"
        browser.value(f"{fold}.open = true, {fold}.scrollIntoView(), 1")
        browser.rest(1500)
        # A frame that may not be the report's origin is a page of its own to the browser.
        (frame,) = [t for t in browser.call("Target.getTargets")["targetInfos"] if t["type"] == "iframe"]
        browser.session = browser.call("Target.attachToTarget", targetId=frame["targetId"], flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Network"):
            browser.call(f"{domain}.enable")  # and what its console has said so far
        browser.rest(300)
        assert browser.value("document.querySelectorAll('svg rect').length") >= len(section.graph.graph["nodes"])
        assert not browser.complaints and all(request.startswith("file:") for request in browser.requests)


@pytest.mark.slow
@pytest.mark.skipif(not DEMO.is_file(), reason=f"needs {DEMO}: run the README's first command in this clone first")
def test_the_demos_own_report(tmp_path: Path) -> None:
    page = DEMO.read_text(encoding="utf-8")
    assert len(page.encode()) < 5e6
    panels = page.count("<div data-drawn data-swd-panel=")
    found = _probed(page, tmp_path, [])
    assert panels > 4  # four tasks and the query-key pair
    for width in WIDTHS:
        assert found[str(width)]["wrong"] == [] and found[str(width)]["panels"] == panels
        assert found[str(width)]["buttons"] > panels


def test_a_notebook_cell_draws_itself_alone_and_again(tmp_path: Path) -> None:
    pattern = torch.softmax(torch.zeros(3, 4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf), -1)
    panel = attention_heads(["<b>", " </script>", "\n", "x"], pattern, title="A <cell>")
    cell = panel._repr_html_()
    page = f'<html lang="en"><head><meta charset="utf-8"><title>cell</title></head><body>{cell}{cell}</body></html>'
    found = _probed(f"<!doctype html>{page}", tmp_path, [])
    assert found == {str(width): {"wrong": [], "panels": 2, "buttons": 6} for width in WIDTHS}


@pytest.mark.slow
def test_on_paper_there_are_pictures_and_everything_is_unfolded(run: Run, small: Run, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_report(replace(small, attention=run.attention)), encoding="utf-8")
    pdf = tmp_path / "report.pdf"
    run_chromium(tmp_path / "profile", [_PATIENCE, f"--print-to-pdf={pdf}", "--no-pdf-header-footer"], page)
    assert pdf.read_bytes().startswith(b"%PDF") and pdf.stat().st_size > 50_000
    if shutil.which("pdftotext") is None:
        pytest.skip("needs pdftotext (apt-get install poppler-utils) to read the PDF")
    text = subprocess.run(["pdftotext", str(pdf), "-"], capture_output=True, text=True, check=True).stdout
    words = " ".join(text.split())
    assert "weight_sha256" in words  # in a folded table
    assert "Zoomed" not in words and "Head Selector" not in words  # CircuitsVis stays on the screen
    assert "L1H1" in words
