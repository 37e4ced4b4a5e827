"""Outputs weighed as the loss sees them: a last refit of both factors, supports held (ours).

A solver counts every output of a matrix as much as every other: tr((W - AB)^T G (W - AB)), G = E[h^T h]. The loss does not. To
second order an error e = h (W - AB) of an output costs E[(g . e)^2] / 2, g being the loss's gradient there; with inputs and
gradients taken for independent that is

    tr((W - AB)^T G (W - AB) H),   H = E[g^T g]

(the two factors of K-FAC: Martens and Grosse, Optimizing Neural Networks with Kronecker-factored Approximate Curvature, 2015).

1. The inputs' metric C is that of the solver (metric.py); H is brought to a mean diagonal of 1 and shrunk towards the identity.
2. Both factors are refined on their supports against both metrics (refine.py). Edges and units stay what they were.

KL(dense || replaced) of single matrices of the embedded model is .60 of what it was, geometric mean of 32 factorizations by four
solvers (.30 to .95); of all 16 replaced .82 and .86; of a matrix of SmolLM2 .87 (tests/benchmarks/RESULTS.md). Weighing outputs
while supports are chosen, by the diagonal of H, was no better in trials.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.solver.metric import Metric, correlations, require_positive
from swd_lens.solver.refine import refine

REFIT_ROUNDS, REFIT_STEPS = 6, 8  # half as many have nine tenths of the gain, twice as many hardly more


def refit(
    read: Float[Tensor, "d_in unit"],
    write: Float[Tensor, "unit d_out"],
    weight: Float[Tensor, "d_in d_out"],
    gram: Float[Tensor, "d_in d_in"] | None,
    output_gram: Float[Tensor, "d_out d_out"],
    shrinkage: tuple[float, float],
) -> tuple[Float[Tensor, "d_in unit"], Float[Tensor, "unit d_out"]]:
    """Read and write factor with the nonzeros where they were, all in the weight's dtype. gram, output_gram: validated second
    moments of inputs and of gradients, at any scale, gram None means G = I; shrinkage: of the two, towards the identity. Raises
    GramError: G or H is not positive semi-definite."""
    require_positive(correlations(output_gram)[0], "output_gram")
    metric, target, scale = Metric.scaled(weight, gram, shrinkage[0])
    outputs = output_gram / output_gram.diagonal().mean()
    outputs.mul_(1 - shrinkage[1]).diagonal().add_(shrinkage[1])
    refined, write = refine(read * (metric.scale / scale), write, target, metric, REFIT_ROUNDS, REFIT_STEPS, outputs)
    # What these tokens never use says nothing of its edges.
    return torch.where(metric.scale > 0, metric.undo(refined) * scale, read), write
