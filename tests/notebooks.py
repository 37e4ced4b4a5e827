"""The notebooks and their stored outputs: `python -m tests.notebooks refresh [NAME ...]`, `python -m tests.notebooks check`.

Notebooks are committed with their outputs, so that the repository's pages show figures and tables.

1. `refresh` executes notebooks, each in an empty folder, and stores what the cells gave: nothing that differs from run to run
   (times, bars, widgets), nothing of this machine (absolute paths are refused).
2. It also stores a hash of the sources of the code cells. `complaints` compares: outputs of other sources are stale.
3. A name may be shortened to what it begins with: `refresh 04 05`. Without names, all are refreshed but those of `HUB`.

Outputs depend on the package, too, and no hash says when it has changed what they show: refresh after such a change.

Tests only `run` the cells: in a fork of their own process, since a kernel takes ten seconds to import what they have already.
"""

import argparse
import hashlib
import os
import re
import resource
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import nbformat
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

from tests import forks

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Needs the Hugging Face hub; where outputs are missing it was never refreshed on a machine that has one.
HUB = {"10_gpt2"}
LARGEST = 12_000_000  # bytes of all notebooks together
_LONGEST = 3_600  # seconds of a cell, on however busy a machine
_KEY = "swd_lens"
_WIDGET = "application/vnd.jupyter.widget-view+json"
# Addresses of objects and absolute paths: of this run, or of this machine.
_LOCAL = re.compile(r"\bat 0x[0-9a-f]{6,}|(?<![\w./])/(?:tmp|home|work|root|Users|var)/")

# Of swd_lens and of torch; of tqdm, where ipywidgets is missing, and of what transformer_lens is going to drop we know.
_WARNS = re.compile(r"(?<!Tqdm)(?<!Deprecation)Warning:")


def sources_hash(notebook: NotebookNode) -> str:
    """SHA-256 of the sources of the code cells, in their order."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()


def execute(notebook: NotebookNode) -> float:
    """Run the cells in place, in an empty folder and without progress bars; the seconds of processor time (a minute is meant for
    each, two for 04). An error of a cell is raised, and AssertionError where one warned."""
    os.environ["TQDM_DISABLE"] = "1"
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as in tests/conftest.py
    before = _processor_time()
    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=_LONGEST, resources=where, record_timing=False).execute()
    took = _processor_time() - before
    _refuse_warnings([output.text for output in outputs(notebook) if output.get("name") == "stderr"])
    return took


def run(notebook: NotebookNode) -> None:
    """Run the cells as `execute` does, without a kernel and without keeping outputs: IPython in a fork of this process.

    Raises tests.forks.Raised, with the cell and the traceback: a cell failed, or an object could not show itself;
    AssertionError: a cell warned.
    """
    with tempfile.TemporaryDirectory() as folder:
        _refuse_warnings(forks.run(partial(_run_cells, notebook, Path(folder)), _LONGEST))


def _run_cells(notebook: NotebookNode, folder: Path) -> list[str]:
    """In the fork: what each cell wrote to stderr."""
    (here := folder / "empty").mkdir()
    os.chdir(here)
    torch.set_num_threads(1)  # a pool of threads does not outlive a fork
    matplotlib.use("agg")
    # Warnings as a kernel shows them, not as pytest does, which collects them or makes them errors.
    warnings.resetwarnings()
    for unseen in (ResourceWarning, ImportWarning):
        warnings.simplefilter("ignore", unseen)
    warnings.showwarning = lambda *told: print(warnings.formatwarning(*told[:4]), file=sys.stderr)
    # swd_lens takes a shell with an IPKernelApp for a notebook's.
    config = Config(IPKernelApp={}, HistoryManager={"enabled": False})
    shell = _Shell.instance(config=config, ipython_dir=str(folder))
    said = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            with capture_output() as written:
                shell.run_cell(cell.source)
            assert not shell.errors, "\n".join(["in this cell:", cell.source, *shell.errors])
            said.append(written.stderr)
    return said


class _Shell(InteractiveShell):
    """An IPython that keeps the tracebacks it would show: of a cell, and of what an object's display raised."""

    def __init__(self, **how: Any):
        super().__init__(**how)
        self.errors: list[str] = []

    def _showtraceback(self, etype: Any, evalue: Any, stb: list[str]) -> None:
        self.errors.append("\n".join(stb))


def _refuse_warnings(said: list[str]) -> None:
    assert not [text for text in said if _WARNS.search(text)], said


def _processor_time() -> float:
    """Seconds of processor time of this process' finished children: the kernels."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def outputs(notebook: NotebookNode) -> list[NotebookNode]:
    """All outputs of a notebook."""
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def tidy(notebook: NotebookNode) -> None:
    """Take out what differs from run to run, and note which sources the outputs are of."""
    notebook.metadata = NotebookNode(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
        language_info={"name": "python"},
        **{_KEY: {"sources": sources_hash(notebook)}},
    )
    for cell in notebook.cells:
        cell.metadata = NotebookNode()
        if cell.cell_type == "code":
            kept = [output for output in cell.outputs if output.get("name") != "stderr"]
            cell.outputs = [output for output in kept if _WIDGET not in output.get("data", {})]


def complaints(path: Path) -> list[str]:
    """What is wrong with a notebook's stored outputs; empty where all is well."""
    notebook, name = nbformat.read(path, as_version=4), path.stem
    remedy = f"python -m tests.notebooks refresh {name}"
    stored = outputs(notebook)
    if not stored and name in HUB:
        return []
    wrong = []
    if notebook.metadata.get(_KEY, {}).get("sources") != sources_hash(notebook):
        wrong.append(f"{name}: the outputs are not of these code cells: {remedy}")
    if any(output.output_type == "error" for output in stored):
        wrong.append(f"{name}: an output is an error")
    if any(cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code"):
        wrong.append(f"{name}: a cell was not run: {remedy}")
    for text in (str(output.get("text", "")) + str(output.get("data", "")) for output in stored):
        if found := _LOCAL.search(text):
            wrong.append(f"{name}: an output names this machine: {text[max(0, found.start() - 40) : found.end() + 40]!r}")
    return wrong


def all_complaints() -> list[str]:
    """What is wrong with the stored outputs of all notebooks, their size included."""
    size = sum(path.stat().st_size for path in NOTEBOOKS)
    too_large = [f"the notebooks have {size / 1e6:.1f} MB, and at most {LARGEST / 1e6:.0f} MB are allowed"]
    return [line for path in NOTEBOOKS for line in complaints(path)] + (too_large if size > LARGEST else [])


def refresh(path: Path) -> float:
    """Execute a notebook and store its outputs; the seconds of processor time that it took."""
    notebook = nbformat.read(path, as_version=4)
    took = execute(notebook)
    tidy(notebook)
    nbformat.write(notebook, path)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.notebooks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=["refresh", "check"])
    parser.add_argument("names", nargs="*", help="of notebooks, or what they begin with")
    given = parser.parse_args()
    if given.command == "refresh":
        for path in NOTEBOOKS:
            wanted = any(path.name.startswith(name) for name in given.names) or (not given.names and path.stem not in HUB)
            if wanted:
                print(f"{path.name}: {refresh(path):.0f} s of processor time, {path.stat().st_size / 1e3:.0f} kB", flush=True)
    if wrong := all_complaints():
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
