"""The fuzz runner's bars: in a process of its own, where no plugin checks types and forked children find everything made.

By hand: `python -m tests.fuzz --cases 30000 --kills 200 --rounds 500` (see the package's docstring).
"""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    int(version("transformer_lens").split(".")[0]) >= 4, reason="needs HookedTransformer, which transformer_lens 4 lacks"
)


@pytest.mark.slow
def test_bars():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.fuzz", "--cases", "700", "--kills", "15", "--rounds", "15", "--disks", "15"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, f"{ended.stdout[-6000:]}\n{ended.stderr[-3000:]}"
