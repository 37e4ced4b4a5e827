"""Tasks for workers, and what their results have in common."""

import torch

from swd_lens.factorization.workers import Solved, SolveTask


def task(i: int = 0, d_in: int = 24, d_out: int = 16, gram: bool = True, **settings) -> SolveTask:
    generator = torch.Generator().manual_seed(i)
    weight = torch.randn(d_in, d_out, generator=generator)
    inputs = torch.randn(2 * d_in, d_in, generator=generator)
    settings = {"preset": "quick", "tokens": 2 * d_in if gram else None, "bytes": 10**6} | settings
    return SolveTask(f"blocks.{i}.mlp_out", weight, inputs.T @ inputs / (2 * d_in) if gram else None, **settings)


def misaligned(matrix: torch.Tensor) -> torch.Tensor:
    """The same values, starting four bytes further on than torch would have them."""
    return torch.cat([torch.zeros(1), matrix.reshape(-1)])[1:].view(matrix.shape)


def tasks_of_many_kinds() -> list[SolveTask]:
    plain, few = task(0, 48, 24), {"outer_iterations": 4}
    variants = [
        task(1, 48, 24, gram=False),
        task(2, 24, 48, preset="best", options=few),
        task(3, 40, 40, preset="paper", options=few),
        task(4, 48, 24, gram=False, preset="paper", options={**few, "rounding": "exact"}),
        task(5, 24, 48, preset="best", units="2x", sparsity=0.75, options=few),
    ]
    transposed = SolveTask("transposed", plain.weight.T.contiguous().T, plain.gram, preset="quick", tokens=96)
    shifted = SolveTask("shifted", misaligned(plain.weight), misaligned(plain.gram), preset="quick", tokens=96)
    short = SolveTask("bfloat16", plain.weight.bfloat16(), plain.gram.double(), preset="quick", tokens=96)
    return [plain, *variants, transposed, shifted, short]


def assert_same_bits(one: Solved, other: Solved) -> None:
    assert one.site == other.site
    for side in ("read", "write"):
        a, b = getattr(one, side), getattr(other, side)
        assert a.is_contiguous() and b.is_contiguous()
        assert torch.equal(a.view(torch.int32), b.view(torch.int32)), one.site  # int32: -0.0 is not 0.0
    assert (one.relmse, one.relative_frobenius) == (other.relmse, other.relative_frobenius)
    assert (one.settings, one.solver) == (other.settings, other.solver)
