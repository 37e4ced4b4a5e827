"""A checkpoint that tests may damage."""

import json
import shutil
from pathlib import Path
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
import swd_lens as swd
from swd_lens.hosts import adapters
from tests import families


@pytest.fixture
def llama_folder(tmp_path, monkeypatch):
    """A copy of a small Llama's checkpoint."""
    monkeypatch.setenv("SWD_LENS_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(families.checkpoint("llama"), tmp_path / "llama"))
