"""A Ray cluster (cluster.py)."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from swd_lens.base.errors import RayMissingError
from swd_lens.factorization.workers import open_workers

HERE = Path(__file__).parent


def test_without_ray_installed_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RayMissingError, match=r"pip install 'swd-lens\[ray\]'") as raised, open_workers("ray"):
        pass
    assert isinstance(raised.value, ValueError) and isinstance(raised.value, ImportError)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (pip install 'swd-lens[ray]')")
def test_ray_gives_the_same_bits_though_a_worker_is_killed():
    # In a process of its own: Ray speaks TCP, which pytest-socket blocks here.
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run([sys.executable, HERE / "workers_ray.py"], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "same bits, one worker killed", done.stdout + done.stderr
