"""The machine: how much memory is free, and how fast it multiplies.

1. `available_bytes`: free memory on a device, inside a container's limit; `held_bytes`, `peak_bytes`: what this process has, and
   the most that it has had.
2. `keep_freed_memory`: what a command frees stays its own, for the next tensor of the size.
3. `is_out_of_memory` tells errors of the machine from errors of what was run on it: who would try another way after the latter
   lets the former through, so that no result depends on how much memory others take.
4. `product_speed`: operations per second of a float32 product now, at the present number of threads.
"""

import ctypes
import errno
import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from swd_lens.base.surroundings import with_torch_defaults

_MEASURE_SECONDS = 0.05
_STATUS = "/proc/self/status"
# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _MAPPED_BYTES = 2**30, 2**28
# torch has a class of its own for some devices' memory, and RuntimeError for that of the CPU and of its libraries.
_NO_MEMORY = re.compile("out of memory|allocate memory|not enough memory|alloc_failed|bad_alloc", re.IGNORECASE)


def available_bytes(device: torch.device) -> int | None:
    """Memory that a new allocation on the device can get; None where the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch's allocator keeps without using is free for us, too.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    system = _stated_bytes("/proc/meminfo", "MemAvailable")
    for pages in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES") if system is None else ():  # macOS says only how much there is at all
        with suppress(OSError, ValueError, AttributeError):
            system = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
            break
    known = [bytes_ for bytes_ in (system, _container_bytes()) if bytes_ is not None]
    return min(known, default=None)


def held_bytes() -> int | None:
    """Memory that this process has now; None where the system does not say."""
    return _stated_bytes(_STATUS, "VmRSS")


def peak_bytes() -> int | None:
    """The most memory that this process has had at a time; None where the system does not say."""
    if (peak := _stated_bytes(_STATUS, "VmHWM")) is not None:
        return peak
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from or behind, says that there was no memory, of the system or of a device."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return True
        if isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def keep_freed_memory() -> bool:
    """Have this process's allocator keep what is freed, up to 1 GB; true where it can be told so (glibc).

    It gives every block of some megabytes back to the system at once, which maps the next one page by page, with zeros in it:
    a tenth of the time of a forward of 2,048 tokens of SmolLM2. Blocks above 256 MB are still given back. It is the process's
    own setting, so commands call it, and no function of the package does.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # macOS, Windows, musl
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))


def peak_gpu_bytes() -> int:
    """The most memory that torch has had on a GPU at a time, over all of them together; 0 without one."""
    return sum(torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count()))


def _stated_bytes(path: str, name: str) -> int | None:
    """Bytes by a line of a status file of Linux, "MemAvailable:  16318480 kB"; None where there is no such file or line."""
    with suppress(OSError, ValueError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def _container_bytes(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory that the cgroup (version 2) of this process leaves; file cache that can be dropped counts as free."""
    try:
        limit = int((group / "memory.max").read_text())  # "max", no limit, is a ValueError
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(limit - used + int(stat.get("inactive_file", 0)), 0)
    except (OSError, ValueError):
        return None


@with_torch_defaults
def product_speed(device: torch.device) -> float:
    """Operations per second of a float32 matrix product, measured for about 50 ms at the present number of threads."""
    n = 4096 if device.type == "cuda" else 768
    a = torch.ones(n, n, device=device)  # not random: the caller's random numbers are not ours to use up
    with torch.no_grad():
        out = a @ a  # the first call sets things up
        _wait(device)
        done, began = 0, time.perf_counter()
        while True:
            torch.mm(a, a, out=out)
            _wait(device)
            done += 1
            if (spent := time.perf_counter() - began) >= _MEASURE_SECONDS:
                return done * 2.0 * n**3 / spent


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
