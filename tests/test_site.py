"""The documentation site: every code block runs on the embedded model, and every how-to page is short."""

import re
from pathlib import Path

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


@pytest.mark.parametrize("page", sorted(PAGES.glob("how-to/*.md")), ids=lambda page: page.stem)
def test_a_how_to_page_is_short(page):
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("page", sorted(PAGES.glob("measures/*.md")), ids=lambda page: page.stem)
def test_a_measure_says_what_it_assumes_and_when_it_means_nothing(page):
    text = page.read_text(encoding="utf-8")
    parts = ("Definition.", "Where.", "It assumes.", "It means nothing where", "Hold it against", "Source.")
    assert page.stem == "index" or all(f"**{part}**" in text for part in parts)
