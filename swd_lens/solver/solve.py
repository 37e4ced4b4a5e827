"""solve: tensors in, a `Solution` out.

1. `resolve` the preset and overrides to a spec, and it to the matrix's shape (spec.py).
2. Validate weight, Gram, sparsity and units (validate.py); split the budget (budget.py).
3. Solve, small matrices in float64, large ones in float32 without TF32 or autocast (`precision`, spec.py): by the annealed
   solver (anneal.py, then refine.py), by the paper's (dsf.py), or by pruning alone, of W (prune.py) or of its singular vectors
   (svd_prune.py).
4. With `output_gram`, refit both factors to what the loss sees, on their supports (outputs.py).
5. Bring the factors into canonical form, and to float32. A S and S^-1 B are the same product for any diagonal S, so a rule is
   needed (`canonical`):
     scale: each unit's read and write vector have the same Euclidean norm;
     sign: the entry of largest magnitude in each write vector is positive (of those that tie the first, see support.py);
     order: the solver's own. Unit i started as coordinate i of the side that the spec's basis names, the short one if none
     (start.py, dsf.py); it keeps that place, so that units of two runs on the same matrix can be compared by index. A product
     of sparse factors may start elsewhere (pieces.py, span.py).
6. Return read and write factor with the settings that were used and the entries really kept.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.solver import anneal, dsf, outputs, prune, svd_prune
from swd_lens.solver.automatic import automatic_shrinkage
from swd_lens.solver.budget import Budget, edges_for, plan_budget, plan_shares
from swd_lens.solver.spec import AUTO, DEFAULT_PRESET, AnnealSpec, AnySpec, DsfSpec, OnIteration, PruneSpec, resolve
from swd_lens.solver.support import first_largest
from swd_lens.solver.validate import check_gram, check_sparsity, check_tokens, check_weight, resolve_units, sparsity_of


@dataclass(frozen=True)
class Solution:
    """Sparse read and write factor that the solver found, float32, on the weight's device."""

    read: Float[Tensor, "d_in unit"]
    write: Float[Tensor, "unit d_out"]
    settings: dict[str, Any]  # every value used, and the entries kept
    solver: str  # name of the algorithm, "anneal", "dsf", "prune" or "svd_prune"
    weight: Float[Tensor, "d_in d_out"]  # the float32 W that was solved for


@with_torch_defaults
def solve(
    weight: Tensor,
    gram: Tensor | None = None,
    sparsity: float | int = 0.5,
    *,
    edges: int | None = None,
    preset: str = DEFAULT_PRESET,
    units: int | float | str | None = None,
    tokens: int | None = None,
    output_gram: Tensor | None = None,
    on_iteration: OnIteration | None = None,
    **overrides: Any,
) -> Solution:
    """Sparse factors W ≈ read @ write with nnz(read) + nnz(write) <= K = (1 - sparsity) numel(W).

    Minimises tr((W - AB)^T G (W - AB)) heuristically (paper §swd-factorization and app. swd-optimization; method.md
    §5.2; solver.md). Deterministic: the same inputs on the same machine and threads give the same bits. Solved in float64
    (`precision`: the default for small matrices), other machines give the same supports and, up to rounding, the same
    values; solved in float32 they give other factors of about the same error (spec.py, `DOUBLE_UP_TO`). The factors are in
    canonical form: each unit's read and write vector have equal norms, and the write vector's largest entry is
    positive; unit i started as coordinate i of the short side (`canonical`).

    Args:
        weight: (d_in, d_out), any floating dtype; outputs are inputs @ weight. Taken to float32 first.
        gram: (d_in, d_in), E[h^T h] of the inputs at any scale; None (zero-data) means the identity.
        sparsity: s = 1 - K / numel(W), inside (0, 1).
        edges: K itself, in place of sparsity. The annealed solver takes more than numel(W): what a matrix is made of may need
            more entries than it has (toy models of superposition), but such factors are no longer told apart by their number.
        preset: a key of `PRESETS`: "best"; "quick", "thorough" and "deep", with fewer and more iterations; "paper", the paper's
            solver with the reference code's rounding; "pruned", W itself made sparse with its coordinates as units; "svd_pruned",
            its singular vectors made sparse, largest singular value first.
        units: width of the bottleneck: a number, None for one per coordinate that units start as (min(d_in, d_out), unless
            basis="input" or "output" says another side), or "2x" for twice that (any "1.5x" too). More units at the same K
            lower the error and cost time. The paper's solver and pruning know None only.
        tokens: how many tokens the Gram is the mean of, if known. The annealed solver then shrinks the Gram towards the
            identity by d_in / tokens, at most `MOST_SHRINKAGE` (spec.py); `settings["shrinkage"]` says by how much.
        output_gram: (d_out, d_out), E[g^T g] of the loss's gradients g at the outputs, at any scale and over the same tokens:
            errors that the loss does not see cost less. Supports are chosen without it; then the values are refitted (outputs.py;
            ours, for every preset). `settings["output_gram"]` says that it was given, `settings["refit_shrinkage"]` how far both
            Grams were shrunk for it.
        on_iteration: called with a `Step` after each outer iteration, for progress bars.
        **overrides: fields of the preset's spec (`AnnealSpec`, or `DsfSpec` for "paper"), e.g. outer_iterations=8 or
            precision="float64".

    Returns:
        Solution. Fewer than K entries are kept only where fewer can be of use (a weight of mostly zeros), and by the paper's
        solver as its rounding has it, or when a unit of a very small matrix dies (see `valid_units`).

    Raises:
        SpecError: unknown preset or setting (the nearest names are given), or a setting outside its range.
        WeightError: not two-dimensional, not finite (the first entry is named), or all zeros.
        GramError: (either Gram) wrong size, not finite, not symmetric, negative diagonal, or not positive semi-definite.
        SparsityError: outside (0, 1); or edges is no whole number of at least 2, or beyond numel(W) where the solver cannot.
        UnitsError: not a width, or one the preset cannot make.
        BudgetError: too few edges; the largest feasible sparsity is named.
        ValueError: tokens is not a positive number.
    """
    # 1. and 2. The spec for this matrix, and whether all of it can be asked.
    spec = resolve(preset, overrides)
    check_weight(weight)
    d_in, d_out = weight.shape
    for of_side, size, name in ((gram, d_in, "gram"), (output_gram, d_out, "output_gram")):
        if of_side is not None:
            check_gram(of_side, size, name)
    if edges is None:
        check_sparsity(sparsity)
    else:
        sparsity = sparsity_of(edges, d_in * d_out, spec)
    check_tokens(tokens)
    width = resolve_units(units, d_in, d_out, spec)
    spec = spec.for_matrix(d_in, d_out, width, calibrated=gram is not None)
    # 3. to 5. Solve, refit, and bring into canonical form.
    problem = _Problem.of(weight.detach().to(torch.float32), gram, spec, sparsity, width, tokens)
    with torch.no_grad():
        read, write, budget = problem.solved(on_iteration)
        if output_gram is not None:
            weighed, gram = output_gram.detach().to(problem.target), problem.gram
            read, write = outputs.refit(read, write, problem.target, gram, weighed, problem.refit_shrinkage)
        read, write = (factor.to(torch.float32) for factor in canonical(read, write))
    settings = {"preset": preset, **problem.settings(read, write, budget, refitted=output_gram is not None)}
    return Solution(read, write, settings, spec.solver, problem.dense)


@dataclass(frozen=True)
class _Problem:
    """A matrix with everything that its solver needs, in the precision that it is solved in."""

    dense: Float[Tensor, "d_in d_out"]  # float32
    target: Float[Tensor, "d_in d_out"]
    gram: Float[Tensor, "d_in d_in"] | None
    spec: AnySpec
    sparsity: float | int
    width: int
    shrinkage: float
    refit_shrinkage: tuple[float, float]  # of both Grams, where outputs are refitted

    @classmethod
    def of(
        cls, dense: Tensor, gram: Tensor | None, spec: AnySpec, sparsity: float | int, width: int, tokens: int | None
    ) -> "_Problem":
        d_in, d_out = dense.shape
        shrinkage = 0.0 if gram is None else spec.shrinkage_for(tokens, d_in)
        # The paper's solver knows no shrinkage; the refit behind it needs some, as it sees all of both Grams.
        of_inputs = automatic_shrinkage(AUTO, tokens, d_in) if isinstance(spec, DsfSpec) else shrinkage
        refit_shrinkage = of_inputs, automatic_shrinkage(AUTO, tokens, d_out)
        precision = spec.precision_for(d_in, d_out) if dense.device.type != "mps" else "float32"  # which has no float64
        target = dense.to(torch.float64 if precision == "float64" else torch.float32)
        metric = None if gram is None else gram.detach().to(target)
        return cls(dense, target, metric, spec, sparsity, width, shrinkage, refit_shrinkage)

    def solved(self, on_iteration: OnIteration | None) -> tuple[Tensor, Tensor, Budget | None]:
        """Read and write factor by the spec's solver, and the budget that was settled beforehand."""
        target, gram, spec, shrinkage = self.target, self.gram, self.spec, self.shrinkage
        d_in, d_out = target.shape
        if isinstance(spec, AnnealSpec):
            budget = plan_shares(d_in, d_out, self.sparsity, self.width, spec)
            factors = anneal.factorize(target, gram, self.width, budget, spec, shrinkage, on_iteration)
            return *factors, None if spec.balance else budget  # shares of a balance move
        if isinstance(spec, DsfSpec):
            budget = plan_budget(d_in, d_out, self.sparsity, spec)
            return *dsf.factorize(target, gram, budget, spec, on_iteration), budget
        kept = edges_for(1, d_in, d_out, self.sparsity)  # fewer no unit can live on
        if isinstance(spec, PruneSpec):
            return *prune.factorize(target, gram, kept, spec, shrinkage, on_iteration), None
        return *svd_prune.factorize(target, gram, kept, spec, shrinkage, on_iteration), None

    def settings(self, read: Tensor, write: Tensor, budget: Budget | None, *, refitted: bool) -> dict[str, Any]:
        """Every value used, and the entries kept."""
        nonzeros = int(read.count_nonzero()), int(write.count_nonzero())
        if budget is None:  # it was not settled beforehand
            budget = Budget(*(nonzeros[::-1] if self.spec.starts_at_output(*self.dense.shape) else nonzeros))
        refit = {"output_gram": True, "refit_shrinkage": list(self.refit_shrinkage)} if refitted else {}
        return {
            "sparsity": float(self.sparsity),
            "units": self.width,
            "calibrated": self.gram is not None,
            **self.spec.as_dict(),
            "shrinkage": self.shrinkage,
            "precision": "float64" if self.target.dtype == torch.float64 else "float32",
            "budget_square": budget.square,
            "budget_other": budget.other,
            "nonzeros_read": nonzeros[0],
            "nonzeros_write": nonzeros[1],
            **refit,
        }


def canonical(
    read: Float[Tensor, "d_in unit"], write: Float[Tensor, "unit d_out"]
) -> tuple[Float[Tensor, "d_in unit"], Float[Tensor, "unit d_out"]]:
    """Bring factors into canonical scale and sign, product and supports kept; a unit that is empty on either side stays as it is.

    `solve` always gives this form; the scale in which a solver leaves its units comes from its iterations and is not kept.
    Numbers that depend on scale (write norms, gamma, alpha, absolute learning rates) are in it, and need not be the paper's.
    """
    read_norm, write_norm = _norm(read, 0), _norm(write, 1)
    valid = (read_norm > 0) & (write_norm > 0)
    largest = write.gather(1, first_largest(write.abs(), 1)).squeeze(1)
    scale = (write_norm.sqrt() / read_norm.sqrt()).where(valid, 1.0) * (1 - 2 * (largest < 0).to(write.dtype))
    return read * scale, write / scale[:, None]


def _norm(factor: Float[Tensor, "rows columns"], dim: int) -> Float[Tensor, " unit"]:
    """Euclidean norms whose squares neither overflow nor vanish (weights of 1e25 and 1e-25 are float32, too)."""
    largest = factor.abs().amax(dim, keepdim=True)
    return (factor / largest.where(largest > 0, 1.0)).norm(dim=dim) * largest.squeeze(dim)
