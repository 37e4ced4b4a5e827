"""torch.compile on a host with units at every site."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("transformer_lens.HookedTransformer") is None, reason="torch.compile is promised for HookedTransformer only"
)
def test_units_compile_into_one_graph_that_is_not_compiled_anew():
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "tests.hosts.compile_check"]
    done = subprocess.run(
        command, cwd=root, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [result["family"] for result in results] == ["gpt2", "llama"]
    for result in results:
        assert (result["breaks"], result["graphs"], result["difference"]) == (0, 1, 0.0), result
