"""The allocator keeps what is freed, up to a bound. In processes of their own: it is a process's setting."""

import subprocess
import sys

import pytest

HELD = """
import sys
import torch
from swd_lens.base.machine import held_bytes, keep_freed_memory

told = sys.argv[1] == "plain" or keep_freed_memory()
size = int(sys.argv[2])
before = held_bytes()
block = torch.ones(size, dtype=torch.uint8)
filled = held_bytes()
del block
print(told, filled - before, held_bytes() - before)
"""


def held(how: str, n_bytes: int) -> tuple[int, int]:
    """Bytes that a process has more while a block of this size lives, and afterwards."""
    done = subprocess.run([sys.executable, "-c", HELD, how, str(n_bytes)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told, filled, freed = done.stdout.split()
    if told == "False":
        pytest.skip("this system's allocator takes no such setting")
    return int(filled), int(freed)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_freed_is_kept_up_to_a_bound():
    for how, n_bytes, share in (("keep", 2**26, 1), ("plain", 2**26, 0), ("keep", 2**29, 0)):
        filled, freed = held(how, n_bytes)
        assert filled == pytest.approx(n_bytes, rel=0.05), (how, n_bytes)
        assert freed / n_bytes == pytest.approx(share, abs=0.05), (how, n_bytes)
