"""Shared fixtures. One thread, or as many as OMP_NUM_THREADS says: the tests pass with any number."""

import gc
import os
import signal

# A shell that starts them in the background has interrupts ignored; tests of Ctrl-C want Python's own handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported: a waiting thread spins a little (LAPACK wants that), then sleeps. Spinning on costs a factor of
# ten on a busy machine.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from pathlib import Path

import pytest
import torch

from tests import checked_types
from tests.quick import mark_all_but_quick_cases

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


# Files that take minutes in a row are begun first: xdist hands out whole files, in the order of collection.
LONGEST = ("test_notebook.py", "test_smollm2.py", "test_notebooks.py", "test_golden.py", "test_items.py", "test_fuzz.py")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    mark_all_but_quick_cases(items)
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_collection_finish(session):
    """What is there before the first test stays: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    checked_types.next_test()
