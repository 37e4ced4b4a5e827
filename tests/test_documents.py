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


def python_blocks(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_read_in_three_minutes():
    text = README.read_text()
    assert len(text.splitlines()) <= 130 and len(text.split()) <= 1200


@pytest.mark.slow
def test_the_readmes_code_prints_what_stands_below_it(capsys):
    [(code, printed)] = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("name", COMMANDS)
def test_the_readme_has_its_two_commands(name):
    after_marker = README.read_text().split(f"<!-- command: {name} -->\n```bash\n")
    assert len(after_marker) == 2
    assert after_marker[1].split("\n```")[0] == COMMANDS[name]


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


def test_python_blocks_compile():
    for number, block in enumerate(python_blocks(README)):
        compile(block, f"README.md, block {number}", "exec")


# ---------------------------------------------------------------------------------------------- measurements


def test_documents_are_fresh():
    assert results.stale_documents() == []


def test_the_readme_shows_a_table_from_the_results():
    assert "<!-- results: single_calls/" in README.read_text()
    assert README.read_text().count("<!-- results:") == README.read_text().count("<!-- end results -->")


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


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_record_takes_the_commit_of_the_clone(tmp_path):
    path = record("speed", [MEASURED], **SENTENCES, folder=tmp_path)
    assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", read_result(path).commit)


def test_a_first_record_needs_its_sentences(tmp_path):
    with pytest.raises(ResultsError, match="a first record needs about, order, section, title"):
        record("speed", [MEASURED], commit=COMMIT, folder=tmp_path)


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


def changed(tmp_path: Path, **values: object) -> Path:
    path = record("speed", [MEASURED], **SENTENCES, commit=COMMIT, folder=tmp_path)
    value = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))
    return path


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"machine": None}, "speed: missing fields: machine"),
        ({"speedup": 2}, "speed: unknown fields: speedup"),
        ({"threads": ["2"]}, "speed: threads is not of type"),
        ({"order": "first"}, "speed: order is not of type"),
        ({"section": "Speed"}, "section 'Speed'; choose of Demo"),
        ({"commit": "main"}, "commit 'main' is no hash"),
        ({"date": "yesterday"}, "date 'yesterday' is not of the form"),
        ({"name": "size"}, "its name is 'size'"),
        ({"tables": [{"title": "t", "columns": ["a", "b"], "rows": [["1"]]}]}, "a row has 1 cells for 2 columns"),
        ({"tables": [{"title": "t", "columns": ["a"], "rows": [["|x|"]]}]}, "ends a cell"),
        ({"tables": [{"title": "t", "columns": ["a"], "rows": [], "align": ["up"]}]}, "align has 'up'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_damaged_file_is_refused_with_its_name(tmp_path, values, message):
    path = changed(tmp_path, **values)
    with pytest.raises(ResultsError, match=re.escape(message)) as refused:
        read_result(path)
    assert str(refused.value).startswith("speed.json: ")


def test_every_result_of_the_repository_is_complete():
    for result in read_results().values():
        assert isinstance(result, Result) and result.about and result.tables and all(table.rows for table in result.tables)
