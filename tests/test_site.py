"""The documentation site: every code block runs on the embedded model, every how-to page is short, and every public name's
docstring has what its page needs (the checks of site.py, which end the build, too)."""

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import swd_lens as swd

PAGES = Path(swd.__file__).parent / "docs" / "pages"
# Those for contributors show parts of files, not programs.
WITH_CODE = sorted(
    page for page in PAGES.rglob("*.md") if page.parent.name != "contribute" and "```python" in page.read_text(encoding="utf-8")
)


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


def test_a_how_to_page_is_short_and_a_measure_says_what_it_assumes_and_when_it_means_nothing():
    for page in PAGES.glob("how-to/*.md"):
        assert len(page.read_text(encoding="utf-8").splitlines()) <= 120, page
    parts = ("Definition.", "Where.", "It assumes.", "It means nothing where", "Hold it against", "Source.")
    for page in PAGES.glob("measures/*.md"):
        text = page.read_text(encoding="utf-8")
        assert page.stem == "index" or all(f"**{part}**" in text for part in parts), page


MKDOCS = {"config.defaults": ["MkDocsConfig"], "exceptions": ["PluginError"], "structure.files": ["File", "Files"]}


@pytest.fixture(scope="module")
def site() -> Any:
    """The module of the site's hooks; what it takes from mkdocs stands in where that is not installed."""
    put = {}
    if importlib.util.find_spec("mkdocs") is None:
        for name in ("", ".config", ".structure", *(f".{module}" for module in MKDOCS)):
            put[f"mkdocs{name}"] = ModuleType(f"mkdocs{name}")
        for module, names in MKDOCS.items():
            for name in names:
                setattr(put[f"mkdocs.{module}"], name, type(name, (Exception,), {}))
    sys.modules.update(put)
    try:
        spec = importlib.util.spec_from_file_location("swd_lens_site", PAGES.parent / "site.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        for name in put:
            del sys.modules[name]
    return module


def test_every_public_name_has_a_page_whose_docstring_has_all_that_it_needs(site):
    pages = site.reference_pages()  # raises where one lacks anything
    names = {name for homes in site.public_names().values() for name in homes}
    assert {*swd.__all__} - {"__version__"} <= names | {*site_spaces()}
    own = [name for group, homes in site.public_names().items() if group != "ERRORS" for name in homes]
    assert all("Defined in [swd_lens/" in pages[f"reference/{name}.md"] for name in own) and len(own) > 100


def site_spaces() -> list[str]:
    """Public names that are modules, which have no page of their own."""
    return [name for name in swd.__all__ if isinstance(getattr(swd, name), ModuleType)]


def test_an_array_without_a_shape_is_found(site):
    for code, missing in (
        ("def f(x: Tensor):\n    'Takes x.'", ["f: x: Tensor"]),
        ("def f(x: Tensor | None = None):\n    'Takes x, (rows, pos) ids.'", []),
        ("def f(x: Float[Tensor, 'a b']):\n    'Takes x.'", []),
        ("def f() -> dict[str, Tensor]:\n    'Gives all.'", ["f: returns: dict[str, Tensor]"]),
        ("def f() -> dict[str, Tensor]:\n    'Site -> (unit,) ranks.'", []),
        ("class C:\n    'Holds z.'\n    z: Tensor\n    def m(self, y: Tensor): 'Adds.'", ["C: z: Tensor", "C.m: y: Tensor"]),
        ("class C:\n    'Holds z, (batch, pos, unit).'\n    z: Tensor\n    _y: Tensor", []),
    ):
        [node] = ast.parse(code).body
        found = site.shapes_missing(node)
        assert found == missing


def test_a_docstring_that_lacks_something_ends_the_build(site, tmp_path, monkeypatch):
    for code, message in (
        ("def f(): pass", "has no docstring"),
        ("def f():\n    'Refuses (ours).'\n    raise ValueError", "no 'Raises:'"),
        ("def f(x: Tensor):\n    'Takes x (ours).'", "no shape is given of f: x: Tensor"),
        ("def f():\n    'Does it.'", "does not say whose method it is"),
    ):
        (tmp_path / "made.py").write_text(code)
        monkeypatch.setattr(site, "source_of", lambda home: tmp_path / "made.py")
        with pytest.raises(Exception, match=message):
            site.require_documented("made", "f")


def test_a_notebook_becomes_a_page_with_its_outputs(site):
    """Text is Markdown, code is fenced; HTML and SVG wait behind a placeholder until the page is made."""
    [path] = [path for path in site.NOTEBOOKS if path.stem == "01_ten_lines"]
    page = site.notebook_page(path)
    assert page.startswith("# 01 \u00b7 ") and "```python\nimport" in page and "<svg" not in page
    kept = re.findall(r'<div id="(swd-output-[\w-]+)"></div>', page)
    finished = site.on_post_page(page, None, None)
    assert kept and finished.count('<div class="swd-output"') == len(kept) and "<svg" in finished
    assert len(site.notebook_pages()) == len(site.NOTEBOOKS)
    links = re.findall(r"\]\(([^)\s]+)\)", "".join(site.notebook_pages().values()))
    assert links and all("://" in link or link.startswith(("../results.md", "../changelog.md", "../models.md")) for link in links)


def test_names_that_are_described_together_become_entries_of_their_own():
    pytest.importorskip("griffe")
    spec = importlib.util.spec_from_file_location("swd_lens_names", PAGES.parent / "names.py")
    assert spec and spec.loader
    names = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(names)
    text = "F.\n\nArgs:\n    a, b: of both,\n        and more.\n    c: alone, d: it says.\n\nReturns:\n    x, y: a pair.\n"
    expected = text.replace(
        "    a, b: of both,\n        and more.\n", "    a: of both,\n        and more.\n    b: of both,\n        and more.\n"
    )
    assert names.apart(text) == expected
