"""What notebooks show: every public object has a card and a short repr; in a browser, light and dark, all of it can be read.

The slow test puts twelve objects with long names (gallery.py) into frames of a notebook's page at three widths; cards_probe.js
measures the contrast of every text against what is painted behind it, and looks for text that is cut. `python -m
tests.report.gallery OUT` takes pictures of the same pages.
"""

import html
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import pytest
import torch

import swd_lens as swd
from swd_lens.base import panels
from swd_lens.base.display import Folded, card
from swd_lens.base.errors import MOST_LINES, brief
from swd_lens.base.figures import ATTENTION, INK, NEGATIVE, POSITIVE, new_figure, svg
from swd_lens.tasks.task import TaskSplit
from tests.chromium import CHROMIUM
from tests.report.gallery import WIDTHS, found_by, html_of, make, page, run_chromium
from tests.report.readme_drawing import FILE, drawing

MEASURED = (
    *("Task", "TaskSplit", "FactorSet", "Attachment", "UnitScores", "CostCurve", "Circuit", "Comparison"),
    *("UnitProfile", "UnitGraph", "QKReplay", "figure of an audit"),
)
# No room for all columns: these may scroll at the width of a phone or a split screen.
NARROW = 900
OUTER = """<!doctype html><body>{frames}<script>{probe}
addEventListener("load", () => {{
  const found = {{}};
  for (const frame of document.querySelectorAll("iframe")) {{
    try {{ found[frame.title] = probeCard(frame, frame.width < {narrow}); }}
    catch (error) {{ found[frame.title] = [error.stack]; }}
  }}
  document.body.innerHTML = "<pre id=found></pre>";
  document.getElementById("found").textContent = JSON.stringify(found);
}});
</script></body>"""


def probed(outputs: dict[str, str], theme: str, folder: Path, widths: tuple[int, ...] = WIDTHS) -> dict[str, list[str]]:
    """Name and width of each output -> what is wrong with it in a notebook of this theme."""
    frames = "".join(
        f'<iframe title="{html.escape(name)} at {width}" width="{width}" height="900" '
        f'srcdoc="{html.escape(page(output, theme))}"></iframe>'
        for name, output in outputs.items()
        for width in widths
    )
    outer = folder / "outer.html"
    probe = (Path(__file__).parent / "cards_probe.js").read_text(encoding="utf-8")
    outer.write_text(OUTER.format(frames=frames, probe=probe, narrow=NARROW), encoding="utf-8")
    options = ["--window-size=1500,20000", "--virtual-time-budget=30000", "--dump-dom"]
    done = run_chromium(folder / "profile", options, outer)
    return found_by(done)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")
@pytest.mark.parametrize(("theme", "widths"), [("light", WIDTHS), ("dark", WIDTHS[:1])])
def test_twelve_objects_can_be_read_in_a_notebook(theme: str, widths: tuple[int, ...], tmp_path: Path) -> None:
    """What is cut depends on the width alone, contrast on the theme alone."""
    outputs = {name: html_of(make(name)) for name in MEASURED}
    assert max(map(len, outputs.values())) < 200_000  # a replay shows its patterns without the script of panels
    found = probed(outputs, theme, tmp_path, widths)
    assert len(found) == len(MEASURED) * len(widths)
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")
def test_the_probe_finds_what_cannot_be_read(tmp_path: Path) -> None:
    figure, axes = new_figure()
    axes[0, 0].set_title("a title", color="#333333")
    outputs = {
        "faint": "<p>good</p><p>good</p><p style='color: #444444'>faint</p>",
        "cut": "<p>good</p><p>good</p><p style='width: 30px; overflow: hidden; white-space: nowrap'>cut off here</p>",
        "figure": card("a card", figure, "one", "two"),
        "outside": "<p>good</p><p>good</p><svg width=40><text x=30 y=10 fill=currentColor>beyond</text></svg>",
    }
    found = probed(outputs, "dark", tmp_path, (900,))
    for name, words in {"faint": "contrast", "cut": "cut off", "figure": '"a title"', "outside": "outside"}.items():
        assert any(words in wrong for wrong in found[f"{name} at 900"]), (name, found)


# ---------------------------------------------------------------------------------------------- without a browser


def test_every_public_type_has_a_card() -> None:
    kinds = {name: getattr(swd.types, name) for name in dir(swd.types)}
    assert len(kinds) > 30
    assert [name for name, kind in kinds.items() if not hasattr(kind, "_repr_html_")] == []
    assert hasattr(TaskSplit, "_repr_html_")


def test_a_repr_has_few_lines_and_print_has_all(default_model: Any) -> None:
    factors = swd.FactorSet({f"blocks.{i}.mlp_out": swd.Factors(torch.eye(2), torch.eye(2)) for i in range(40)})
    task = swd.load_task("ioi", default_model)
    estimate = swd.estimate({f"blocks.{i}.mlp_{k}": (64, 8 * i + 8) for i in range(30) for k in ("in", "out")})
    for shown in (factors, task, task.train, task.train.examples[0], estimate):
        assert len(repr(shown).splitlines()) <= MOST_LINES, type(shown)
        assert len(repr(shown)) < 3_000, type(shown)
    assert len(str(factors).splitlines()) == 41 and "tensor" not in repr(task.train)
    assert "print() shows them" in repr(factors)
    assert brief("a\n" * 14) == "a\n" * 14 and brief("a\n" * 15).endswith("… and 2 more lines: print() shows them")


def test_what_is_looked_up_is_folded() -> None:
    shown = make("FactorSet")._repr_html_()
    folded = "".join(re.findall(r"<details>.*?</details>", shown, flags=re.DOTALL))
    outside = shown.replace(folded, "")
    for text in ("5f2b", "outer_iterations", "16384"):
        assert text in folded and text not in re.sub(r"<details>.*?</details>", "", shown, flags=re.DOTALL), text
    assert "blocks.25.mlp_out" in outside
    assert "(64 values)" in folded  # not all of its tokens
    assert "<details><summary>more</summary><p>a &lt; b</p></details>" in card("t", Folded("more", "a < b"))


def test_text_stands_left_numbers_right_and_a_prompt_is_said_once() -> None:
    import pandas as pd

    prompt = "a prompt that is longer than a name"
    shown = card("t", pd.DataFrame({"prompt": [prompt, prompt, "b"], "n": [1, 2, 3], "matched": [True, False, True]}))
    assert shown.count(prompt) == 1 and 'title="as above"' in shown
    assert '<th scope="col" class=w>prompt</th><th scope="col">n</th><th scope="col" class=w>matched</th>' in shown
    assert "<td>1</td>" in shown and '<td class="w">yes</td>' in shown


def test_a_figure_takes_the_pages_text_colour_and_brings_its_own_as_a_file() -> None:
    figure, axes = new_figure()
    axes[0, 0].plot([0, 1], color="black")
    axes[0, 0].set_title("a title", color=INK)
    text = svg(figure)
    drawn = text.replace(text[text.index("<style>") : text.index("</style>")], "")
    assert not re.search(rf"{INK}|#000000|fill: #ffffff", drawn) and drawn.count("currentColor") > 3
    assert "svg:root { color: #222222" in text and "prefers-color-scheme: dark" in text


def test_blue_is_negative_orange_positive_attention_green_everywhere() -> None:
    """The three colours stand in figures.py alone; style sheets have them from there."""
    package = Path(swd.__file__).parent
    for path in [*package.rglob("*.py"), *package.rglob("*.css"), *package.rglob("*.j2")]:
        text = path.read_text(encoding="utf-8")
        for colour in (NEGATIVE, POSITIVE, ATTENTION):
            triple = ", ?".join(str(round(255 * part)) for part in mpl.colors.to_rgb(colour))
            if path.name != "figures.py":
                assert not re.search(rf"{colour}|\b{triple}\b", text, flags=re.IGNORECASE), (path, colour)


def test_one_cell_of_a_notebook_brings_the_script_of_all_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    panel = panels.attention_heads(["a", "b"], torch.eye(2)[None])
    sizes = []
    monkeypatch.setattr(panels, "_CARRIERS", [])
    shell = SimpleNamespace()
    monkeypatch.setattr(panels, "ipython", lambda: shell)
    for said in ({"metadata": {"cellId": "first"}}, {"metadata": {"cellId": "second"}}, {"metadata": {"cellId": "first"}}, {}):
        shell.get_parent = lambda said=said: said
        sizes.append(len(panel._repr_html_()))
    monkeypatch.setitem(sys.modules, "google.colab", shell)
    shell.get_parent = lambda: {"metadata": {"cellId": "second"}}
    sizes.append(len(panel._repr_html_()))  # Colab shows each cell in a page of its own
    assert sizes[0] == sizes[2] == sizes[3] == sizes[4] > 1_000_000 and sizes[1] < 10_000


def test_the_readmes_drawing_is_the_reports() -> None:
    assert FILE.read_text(encoding="utf-8") == drawing(), "python -m tests.report.readme_drawing"
