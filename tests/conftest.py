"""Shared fixtures. One thread, or as many as OMP_NUM_THREADS says: the tests pass with any number."""

import gc
import os
import signal
import sys

# A shell that starts them in the background has interrupts ignored; tests of Ctrl-C want Python's own handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported: a waiting thread spins a little (LAPACK wants that), then sleeps. Spinning on costs a factor of
# ten on a busy machine.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Asserts that say their values and annotations that are checked take half a minute to compile: once, not in each worker, run and
# command, whatever the environment says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # and here, below the imports

from pathlib import Path

import pytest
import torch

from tests import checked_types
from tests.quick import mark_all_but_quick_cases

sys.dont_write_bytecode = False
checked_types.install()
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference data beside the checkout; tests that need it are skipped, by name, where it is missing."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the reference data in {SHARED}, which is not there")
    return SHARED


@pytest.fixture(scope="session")
def default_model():
    """The embedded model, shared by tests that leave it as they found it (every attach test checks that they do)."""
    import swd_lens

    return swd_lens.load_default_model()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Every second worker reads the files backwards: each compiles half of them, and finds the other half compiled."""
    report = yield
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    if not isinstance(collector, pytest.File | pytest.Class) and int(worker[2:]) % 2:
        report.result.reverse()
    return report


# What takes minutes in a row is begun first: xdist hands out whole files, in this order.
LONGEST = ("real/test_notebook.py", "test_notebooks.py", "fuzz/", "study/paper/", "real/test_smollm2.py", "solver/test_golden.py")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    mark_all_but_quick_cases(items)
    items.sort(key=lambda item: (place_of(item.nodeid), item.path))  # whichever way the files were read


def place_of(nodeid: str) -> int:
    return next((i for i, path in enumerate(LONGEST) if nodeid.startswith(f"tests/{path}")), len(LONGEST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """As --dist=loadfile, but the paper's items go to one worker: what they start from takes a minute to make."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return "tests/study/paper" if nodeid.startswith("tests/study/paper/") else super()._split_scope(nodeid)

    return Scheduling(config, log)


def pytest_collection_finish(session):
    """What is there before the first test stays: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    checked_types.next_test()
