"""Small matrices on one thread: with two, waiting for each other costs more than the work when the machine is busy."""

import pytest
import torch


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
