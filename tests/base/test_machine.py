"""The allocator keeps what is freed, up to a bound (in processes of their own: it is a process's setting); want of memory."""

import errno
import subprocess
import sys

import pytest
import torch

import swd_lens.base.machine
from swd_lens.base.machine import is_out_of_memory

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


def test_want_of_memory_is_told_from_other_errors():
    for error, is_memory in (
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 12 bytes."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOENT, "No such file"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("a prompt about memory: out of memory"), False),
    ):
        assert is_out_of_memory(error) is is_memory
        try:
            try:
                raise error
            except Exception as cause:
                raise ValueError("the coder fails") from cause
        except ValueError as wrapped:
            assert is_out_of_memory(wrapped) is is_memory


def test_memory_and_speed_are_believable_and_a_failed_allocation_is_known_as_one():
    here = swd_lens.base.machine.available_bytes(torch.device("cpu"))
    assert here is not None and 10**7 < here < 10**14
    assert 1e8 < swd_lens.base.machine.product_speed(torch.device("cpu")) < 1e15
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**61, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)


def test_a_container_limit_counts(tmp_path, monkeypatch):
    for name, text in {"max": "1000000", "current": "700000", "stat": "anon 500000\ninactive_file 150000\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert swd_lens.base.machine._container_bytes(tmp_path) == 1_000_000 - 700_000 + 150_000
    (tmp_path / "memory.max").write_text("max\n")
    assert swd_lens.base.machine._container_bytes(tmp_path) is None
    assert swd_lens.base.machine._container_bytes(tmp_path / "nowhere") is None
    monkeypatch.setattr(swd_lens.base.machine, "_container_bytes", lambda: 12_345)
    assert swd_lens.base.machine.available_bytes(torch.device("cpu")) == 12_345
