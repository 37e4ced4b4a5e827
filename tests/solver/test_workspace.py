"""One block update of the annealed solver beside its formula, and where its budgets end (anneal.py, step 3)."""

import pytest
import torch

from swd_lens.solver.anneal import Phase, update_read
from swd_lens.solver.metric import Metric
from swd_lens.solver.start import Block
from swd_lens.solver.workspace import Workspace
from tests.solver.matrices import gram_of, weight_of


@pytest.mark.parametrize("steps, relaxation", [(1, 1.0), (2, 1.0), (3, 1.0), (2, 1.8), (1, 0.6)])
@pytest.mark.parametrize("blend", [0.0, 0.6])
def test_a_read_update_in_shared_buffers_is_the_formula(steps: int, relaxation: float, blend: float):
    """Step 3 written out, every sum in memory of its own."""
    g = torch.Generator().manual_seed(7)
    d_in, units, d_out, budget = 6, 5, 9, 12
    metric = Metric.of(gram_of(d_in).double(), weight_of((d_in, d_out)).double(), 0.0)
    read, dual = (torch.randn(d_in, units, generator=g, dtype=torch.float64) for _ in range(2))
    write = torch.randn(units, d_out, generator=g, dtype=torch.float64)
    goal = torch.randn(d_in, d_out, generator=g, dtype=torch.float64)
    phase = Phase(blend=blend, rho=0.3, ridge=0.01, steps=steps, balance=0.0, held_back=0.0, last=True)
    block = Block(read.clone(), dual.clone(), budget, relaxation=relaxation)
    update_read(block, write, goal, metric, phase, Workspace.of(read, write, buffers=3))

    norm = write.norm(dim=1)
    unit = write / norm[:, None]
    normal = unit @ unit.T + 0.01 * torch.eye(units, dtype=torch.float64)
    mixed = (1 - blend) * torch.eye(d_in, dtype=torch.float64) + blend * metric.matrix
    system = torch.kron(mixed, normal) + 0.3 * torch.eye(d_in * units, dtype=torch.float64)
    factor, support = read * norm, None
    for _ in range(steps):
        right = goal @ unit.T + 0.3 * (factor - dual)
        dense = torch.linalg.solve(system, right.flatten()).view(d_in, units)
        dense = relaxation * dense + (1 - relaxation) * factor + dual
        if support is None:
            of_units = dense.abs() >= dense.abs().amax(0)
            others = (dense.abs() * ~of_units).flatten().topk(budget - units).indices
            support = of_units.flatten().index_fill(0, others, True).view(d_in, units)
        factor = dense * support
        dual = dense - factor
    torch.testing.assert_close(block.factor, factor / norm)
    torch.testing.assert_close(block.dual, dual)
