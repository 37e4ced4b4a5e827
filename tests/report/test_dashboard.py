"""Dashboards of hostile text and labels: escaped, linked, whole, and quiet in a real browser without a network."""

import html
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swd_lens.analysis.audit import Audit, UnitLabels, audit
from swd_lens.report import dashboard as module
from swd_lens.report.dashboard import dashboard
from tests.analysis.audit_models import made_scores, sparse_factors
from tests.chromium import CHROMIUM
from tests.refusals import refuses
from tests.report.conftest import HOSTILE, VOCABULARY, Page
from tests.report.gallery import run_chromium

SITE = "blocks.1.mlp_out"


@pytest.fixture(scope="module")
def found(host: Any) -> Audit:
    factors = sparse_factors(host, ["mlp_out", "blocks.0.attn_qkv"], units=8)
    tokens = torch.randint(0, len(VOCABULARY), (40, 20), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = host.tokenizer.bos_token_id
    scores = {"<i>task</i>": made_scores(factors)}
    heard = audit(host, factors, tokens, n=6, scores=scores, progress=False)
    labels = {f"{SITE}/{i}": {"label": text, "note": text, "author": text} for i, text in enumerate(HOSTILE[:6])}
    return heard.with_labels({**labels, "blocks.0.mlp_out/0": "</style><script>alert(1)</script>" + "w" * 90})


def links(page: Page) -> list[str]:
    return page.values("href", "src")


def check(text: str) -> Page:
    page = Page(text)
    assert not page.open and not page.errors and not page.tags["script"] and not page.handlers()
    ids = page.values("id")
    assert len(ids) == len(set(ids)) and not [link for link in links(page) if "//" in link]
    assert "\u202e" not in text and "{{" not in text.replace("{{7*7}}", "")
    return page


def test_one_page_holds_everything_and_links_within_itself(found: Audit, tmp_path: Path) -> None:
    path = dashboard(found, tmp_path / "units.html")
    assert path == tmp_path / "units.html"
    page = check(path.read_text(encoding="utf-8"))
    assert page.tags["article"] == len(found) == 24
    assert all(link.startswith("#") and link[1:] in page.values("id") for link in links(page))
    assert path.read_text(encoding="utf-8") == dashboard(found)
    assert [p.name for p in tmp_path.iterdir()] == ["units.html"]


def test_a_folder_has_an_index_and_a_page_per_unit(found: Audit, tmp_path: Path) -> None:
    index = dashboard(found, tmp_path / "units")
    assert index == tmp_path / "units" / "index.html"
    pages = {p.name: check(p.read_text(encoding="utf-8")) for p in index.parent.iterdir()}
    assert len(pages) == 25
    for page in pages.values():
        for link in links(page):
            file, _, anchor = link.partition("#")
            assert (not file or file in pages) and (not anchor or anchor in (pages[file] if file else page).values("id"))
    listed = [link for link in links(pages["index.html"]) if not link.startswith("#")]
    assert len(listed) == 24 and set(pages) == {*listed, "index.html"}
    # Within a site the task's best unit comes first.
    best = [f"{site}-{unit}.html" for site, unit in found.scores["<i>task</i>"].ranking() if site == SITE]
    assert [link for link in listed if link.startswith(SITE)] == best


def test_tokens_and_labels_are_text(found: Audit) -> None:
    text = dashboard(found)
    assert isinstance(text, str)
    for label in HOSTILE[:6]:
        if label.strip():
            assert html.escape(label.strip()) in text
    assert html.escape("</style><script>alert(1)</script>") in text and "<script" not in text
    shown = found.unit(f"{SITE}/0")._repr_html_()
    assert "<script" not in shown and Page(shown).open == []


def test_nothing_turns_a_page_around(found: Audit) -> None:
    """Right-to-left marks and control characters of labels, tasks and titles, in the index as on the pages."""
    odd = "x\u202ey\u2066\x00\ud83d"
    named = replace(found, scores={odd: next(iter(found.scores.values()))}, labels=UnitLabels({}))
    text = dashboard(named.with_labels({f"{SITE}/0": {"label": odd, "note": odd, "author": odd}}), title=odd)
    assert isinstance(text, str) and "x⟨U+202E⟩y⟨U+2066⟩␀⟨U+D83D⟩" in text
    assert not [c for c in text if not c.isprintable() and c != "\n"]


def test_profiles_alone(found: Audit, tmp_path: Path) -> None:
    one = found.unit(f"{SITE}/2")
    assert check(str(dashboard(one))).tags["article"] == 1
    some = dashboard(found.profiles([f"{SITE}/2", f"{SITE}/1"]), only=[f"{SITE}/1"])
    assert f'id="{SITE}-1"' in some and f'id="{SITE}-2"' not in some
    refuses(ValueError, "no unit to show", dashboard, [])
    refuses(ValueError, r"mlp_out/2 is given twice", dashboard, [one, one])
    refuses(KeyError, "was not audited", dashboard, found, only=[f"{SITE}/99"])


def test_too_many_units_for_one_page(found: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAGE_LIMIT", 23)
    refuses(ValueError, "24 units are too much for one page", dashboard, found, tmp_path / "units.html")
    assert not list(tmp_path.iterdir()) and dashboard(found, tmp_path / "units").is_file()


def test_an_interrupted_folder_has_no_index(found: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = module.write_text, []

    def stop(path: Path, text: str) -> None:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(path)
        write(path, text)

    monkeypatch.setattr(module, "write_text", stop)
    with pytest.raises(KeyboardInterrupt):
        dashboard(found, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in written)


def test_a_histogram_is_described_in_words(found: Audit) -> None:
    page = Page(found.unit(f"{SITE}/3")._repr_html_())
    assert "800 tokens: from " in page.values("aria-label")[-1]
    assert not Page(found.unit(f"{SITE}/7")._repr_html_()).tags["svg"]  # a dead unit has none


PROBE = """<!doctype html><body>{frames}<script>
const report = [];
addEventListener("load", () => {{
  for (const frame of document.querySelectorAll("iframe")) {{
    const page = frame.contentDocument, root = page.documentElement;
    const lost = [...page.links].filter(a => a.hash && !page.getElementById(decodeURIComponent(a.hash.slice(1))));
    report.push([frame.width, root.scrollWidth - root.clientWidth, page.scripts.length, lost.length,
      frame.contentWindow.performance.getEntriesByType("resource").length, page.querySelectorAll("article, table").length > 0]);
  }}
  document.body.innerHTML = "<pre>" + JSON.stringify(report) + "</pre>";
}});
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")
def test_in_a_browser_it_fits_and_loads_nothing(found: Audit, tmp_path: Path) -> None:
    index = dashboard(found, tmp_path / "units")
    assert isinstance(index, Path)
    units = (f"{SITE}-0", f"{SITE}-7", "blocks.0.attn_qkv-2")
    pages = ["units/index.html", *(f"units/{unit}.html" for unit in units), "one.html"]
    dashboard(found, tmp_path / "one.html")
    frames = "".join(f'<iframe width="{w}" height="800" src="{p}"></iframe>' for p in pages for w in (360, 1200))
    probe = tmp_path / "probe.html"
    probe.write_text(PROBE.format(frames=frames), encoding="utf-8")
    done = run_chromium(tmp_path / "profile", ["--allow-file-access-from-files", "--dump-dom"], probe)
    shown = re.search(r"<pre>(.*?)</pre>", done.stdout)
    assert shown, done.stderr[-2000:]
    expected = [f'["{w}",0,0,0,0,true]' for _ in pages for w in (360, 1200)]
    # per page: width, pixels too wide, scripts, dangling anchors, resources fetched, something to read
    assert shown[1] == f"[{','.join(expected)}]"
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_an_impossible_target_is_refused_before_any_profile(found: Audit, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.html").mkdir()
    for path, refusal in ((tmp_path / "file", NotADirectoryError), (tmp_path / "folder.html", IsADirectoryError)):
        with pytest.raises(refusal):
            dashboard(iter(lambda: 1 / 0, 0), path)  # type: ignore[arg-type]
    with pytest.raises(IsADirectoryError):
        found.export(tmp_path / "folder.html")
