"""README and the page of measurements: short enough to be read, fresh, and without dead links."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.benchmarks import results
from tests.benchmarks.results import Result, ResultsError, Table, fill, read_result, read_results, record, record_command

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
CHANGELOG = ROOT / "swd_lens" / "CHANGELOG.md"

# .ci/run takes these two out of the README and runs them.
COMMANDS = {
    "demo": (
        "python3 -m venv .venv && .venv/bin/pip install -q torch==2.13.0 transformer_lens==3.9.0 -e . "
        "&& .venv/bin/swd-lens demo --out swd-demo"
    ),
    "test": (
        "python3 -m venv .venv && .venv/bin/pip install -q torch==2.13.0 && .venv/bin/pip install -q -e '.[dev]' "
        "&& .venv/bin/python -m pytest -q -n auto -m 'not slow'"
    ),
}


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_read_in_three_minutes_and_shows_a_table_of_the_results():
    text = README.read_text()
    assert len(text.splitlines()) <= 130 and len(text.split()) <= 1200
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)):
        compile(block, f"README.md, block {number}", "exec")
    assert "<!-- results: single_calls/" in text and text.count("<!-- results:") == text.count("<!-- end results -->")


@pytest.mark.slow
def test_the_readmes_code_prints_what_stands_below_it(capsys):
    [(code, printed)] = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == printed


def test_the_readme_has_its_two_commands():
    for name, command in COMMANDS.items():
        assert README.read_text().count(f"<!-- command: {name} -->\n```bash\n{command}\n```") == 1


@pytest.mark.parametrize("document", [README, results.RESULTS_PAGE, CHANGELOG], ids=lambda path: path.name)
def test_links_and_pictures_exist(document):
    links = re.findall(r"\]\(([^)\s]+)\)", document.read_text())
    dead = []
    for link in links:
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
            dead.append(link)
    assert not dead


def test_documents_are_fresh_and_every_result_is_complete():
    assert results.stale_documents() == []
    for result in read_results().values():
        assert isinstance(result, Result) and result.about and result.tables and all(table.rows for table in result.tables)


MEASURED = Table("speed", ["host", "s"], [["hooked", "1.50"]], ["left", "right"])
SENTENCES = {"title": "Speed", "section": "Hosts", "order": 1, "about": ["Two turns."]}
COMMIT = "0123abc"


def test_record_fills_in_where_figures_come_from(tmp_path):
    path = record("speed", [MEASURED], **SENTENCES, commit=COMMIT, folder=tmp_path)
    written = read_result(path)
    assert written.tables == [MEASURED] and written.machine and len(written.threads) == 1
    assert written.commit == COMMIT and written.command.startswith("python ")
    # Recorded again: other figures, the same sentences.
    slower = Table("speed", ["host", "s"], [["hooked", "2.00"]])
    record("speed", [slower], command="python slow.py", threads=[1, 4], commit=COMMIT, folder=tmp_path)
    again = read_result(path)
    assert (again.tables, again.threads, again.command) == ([slower], [1, 4], "python slow.py")
    assert (again.title, again.about) == ("Speed", ["Two turns."])
    if (ROOT / ".git").exists():  # the commit of the clone
        record("speed", [slower], folder=tmp_path)
        assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", read_result(path).commit)
    with pytest.raises(ResultsError, match="a first record needs about, order, section, title"):
        record("size", [MEASURED], commit=COMMIT, folder=tmp_path)


def test_a_benchmark_that_prints_is_recorded(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(results, "this_commit", lambda: COMMIT)
    path = record("speed", [MEASURED], **SENTENCES, folder=tmp_path)
    program = "print('2 turns\\n\\n| host | | s |\\n|---|:---:|---:|\\n| hooked |  | 1.50 |\\n\\n| a |\\n| --- |\\n| 1 |')"
    record_command("speed", [sys.executable, "-c", program, "--threads", "3"], folder=tmp_path)
    first, second = read_result(path).tables
    assert first == Table("2 turns", ["host", "", "s"], [["hooked", "", "1.50"]], ["left", "center", "right"])
    assert second == Table("a", ["a"], [["1"]], ["left"])
    assert read_result(path).threads == [3]
    for program, message in (("print('no table')", "printed no Markdown table"), ("exit(2)", "ended with 2")):
        with pytest.raises(ResultsError, match=message):
            record_command("speed", ["python", "-c", program], folder=tmp_path)
    assert "| hooked |" in capfd.readouterr().out


def test_fill_replaces_marked_tables_only(tmp_path):
    record("speed", [MEASURED], **SENTENCES, commit=COMMIT, folder=tmp_path)
    before = "Text.\n<!-- results: speed/1 -->\nold\n<!-- end results -->\nMore.\n"
    after = fill(before, read_results(tmp_path))
    table = "| host | s |\n| --- | ---: |\n| hooked | 1.50 |"
    assert after == f"Text.\n<!-- results: speed/1 -->\n\n{table}\n\n<!-- end results -->\nMore.\n"
    assert fill(after, read_results(tmp_path)) == after
    for marker in ("speed/2", "speed/0", "size/1"):
        with pytest.raises(ResultsError):
            fill(before.replace("speed/1", marker), read_results(tmp_path))


def test_a_damaged_file_is_refused_with_its_name(tmp_path):
    path = record("speed", [MEASURED], **SENTENCES, commit=COMMIT, folder=tmp_path)
    whole = json.loads(path.read_text())
    for values, message in (
        ({"machine": None}, "speed: missing fields: machine"),
        ({"speedup": 2}, "speed: unknown fields: speedup"),
        ({"threads": ["2"]}, "speed: threads is not of type"),
        ({"section": "Speed"}, "section 'Speed'; choose of Demo"),
        ({"commit": "main"}, "commit 'main' is no hash"),
        ({"date": "yesterday"}, "date 'yesterday' is not of the form"),
        ({"name": "size"}, "its name is 'size'"),
        ({"tables": [{"title": "t", "columns": ["a", "b"], "rows": [["1"]]}]}, "a row has 1 cells for 2 columns"),
        ({"tables": [{"title": "t", "columns": ["a"], "rows": [["|x|"]]}]}, "ends a cell"),
        ({"tables": [{"title": "t", "columns": ["a"], "rows": [], "align": ["up"]}]}, "align has 'up'"),
    ):
        path.write_text(json.dumps({key: item for key, item in (whole | values).items() if item is not None}))
        with pytest.raises(ResultsError, match=re.escape(message)) as refused:
            read_result(path)
        assert str(refused.value).startswith("speed.json: ")
