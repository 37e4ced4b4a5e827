"""A checkpoint that tests may damage."""

import shutil
from pathlib import Path

import pytest

from tests import families


@pytest.fixture
def llama_folder(tmp_path, monkeypatch):
    """A copy of a small Llama's checkpoint."""
    monkeypatch.setenv("SWD_LENS_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(families.checkpoint("llama"), tmp_path / "llama"))
