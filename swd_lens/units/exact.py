"""Exact factorizations of one matrix, the controls without an error.

1. `svd_factors`: W = U S V^T; read = U S, write = V^T. Units are ordered by singular value. With a Gram of the inputs, and of the
   loss's gradients at the outputs, singular vectors are those of the metrics that the Grams give.
2. `random_b_factors`: a random orthogonal Q instead of the singular vectors; the basis carries no information of W.
3. `neuron_factors`: W's own coordinates. Unit i is input i with everything that it writes (read = I, write = W), or output i
   with everything that it reads (read = W, write = I).

The first two are the paper's (app. exact-dense-controls; method.md §4.1): min(d_in, d_out) units, computed in float64 and stored
in float32; they count k (d_in + d_out) edges for k units whatever zeros they may hold (settings["edges"] = "dense" says so).
The paper never compares with the third. Its edges are nonzeros: 1 + d_out of an input, d_in + 1 of an output.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.base.checks import one_of
from swd_lens.base.settings import AUTO
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.solver.automatic import automatic_shrinkage
from swd_lens.solver.metric import Metric, correlations, power_of_two, require_positive
from swd_lens.solver.shapes import Dense, InputGram, Read, Write
from swd_lens.solver.validate import check_gram, check_tokens
from swd_lens.units.factors import Factors

SIDES = ("input", "output")

# Least share of the identity in the outputs' Gram, whose root is inverted: behind a LayerNorm no gradient goes along the ones.
_LEAST_OUTPUT_SHRINKAGE = 1e-4


@with_torch_defaults
def svd_factors(
    weight: Float[Tensor, "d_in d_out"],
    gram: Tensor | None = None,
    output_gram: Tensor | None = None,
    *,
    tokens: int | None = None,
) -> Factors:
    """Singular value decomposition as units: read[:, i] = sigma_i u_i, write[i] = v_i, largest sigma first.

    With the Gram G = C^T C of the inputs, sigma and v are those of C W ("whitened"): of all sums of k units the first k come
    nearest to W in E |h W - h A_k B_k|^2, what they leave out being the sum of the other sigma squared. With H = D D^T of the
    outputs, too, they are those of C W D ("causal"), and the error is that of E |(h W - h A_k B_k) D|^2. All min(d_in, d_out)
    units are kept: the product is W whatever the Grams are.

    The sign of a pair is free; it is fixed by making the largest-magnitude entry of each write vector positive.

    Args:
        weight: (d_in, d_out), any floating dtype.
        gram: (d_in, d_in) E[h^T h] of what the matrix reads, of any rank; None: the identity.
        output_gram: (d_out, d_out) E[g^T g] of the loss's gradients at what it writes; None: all outputs count the same. A
            ten-thousandth of its mean diagonal is added at least: its root is inverted.
        tokens: how many the Grams were averaged over; both are shrunk towards the identity as in `swd_lens.solve`. None: not
            shrunk, but for what is said of output_gram.

    Raises:
        ValueError: a weight that is not finite; or (GramError) no Gram of this matrix.

    Source: paper, app. exact-dense-controls; method.md §4.1. The metrics: ours, after truncation-aware SVD (Wang et al., SVD-LLM,
    2024) and K-FAC (solver/outputs.py).
    """
    dense = _finite(weight)
    left, singular, write = torch.linalg.svd(dense, full_matrices=False)
    read, method = left * singular, "svd"
    if gram is not None or output_gram is not None:
        method = "svd_outputs" if gram is None else "svd_whitened" if output_gram is None else "svd_causal"
        read, write = _turned(read, write, _root(gram, dense, tokens), _output_root(output_gram, dense, tokens))
    sign = _signs(write.gather(1, write.abs().argmax(1, keepdim=True)))
    return _factors(weight, read * sign.T, write * sign, {"method": method})


def _turned(
    read: Read, write: Write, root: InputGram | None, output_root: Float[Tensor, "d_out d_out"] | None
) -> tuple[Read, Write]:
    """Rewrite the product as A M M^-1 B, with the singular vectors of C A B D as units.

    The units of W itself are mixed among themselves and C is never inverted: what the inputs hardly show keeps its place
    in W, and a Gram of low rank makes no factor large. M = R Y with D's part R of B and the right singular vectors Y of C A R;
    without D it is orthogonal.
    """
    mix, back = None, None
    seen = read if root is None else root @ read
    if output_root is not None:
        left, scale, _ = torch.linalg.svd(write @ output_root, full_matrices=False)
        mix, back, seen = left * scale, (left / scale).T, seen @ (left * scale)
    right = torch.linalg.svd(seen, full_matrices=False)[2]
    turn = right.T if mix is None else mix @ right.T
    turned, written = read @ turn, (right if back is None else right @ back) @ write
    if output_root is None:
        return turned, written
    norms = written.norm(dim=1, keepdim=True)  # as everywhere write vectors have norm 1
    return turned * norms.T, written / norms


def _root(gram: Tensor | None, dense: Dense, tokens: int | None) -> InputGram | None:
    """C with C^T C = G as the solver's metric has it (solver/metric.py), up to a factor."""
    if gram is None:
        return None
    check_gram(gram, dense.shape[0])
    check_tokens(tokens)
    gram = gram.to(dense)
    shrinkage = automatic_shrinkage(AUTO, tokens, dense.shape[0])
    metric = Metric.of(gram / power_of_two(gram.diagonal()), dense, shrinkage)
    if metric.matrix is None:
        return metric.scale.squeeze(1).diag()
    values, vectors = metric.eigen
    return values.sqrt().unsqueeze(1) * vectors.T * metric.scale.T


def _output_root(gram: Tensor | None, dense: Dense, tokens: int | None) -> Float[Tensor, "d_out d_out"] | None:
    """D with D D^T = H as the refit of outputs has it (solver/outputs.py), up to a factor."""
    if gram is None:
        return None
    check_gram(gram, dense.shape[1], "output_gram")
    check_tokens(tokens)
    gram = gram.to(dense)
    require_positive(correlations(gram)[0], "output_gram")
    share = max(_LEAST_OUTPUT_SHRINKAGE, automatic_shrinkage(AUTO, tokens, dense.shape[1]))
    shrunk = gram / gram.diagonal().mean() * (1 - share)
    shrunk.diagonal().add_(share)
    values, vectors = torch.linalg.eigh(shrunk)
    return vectors * values.clamp_min(share / 2).sqrt()


@with_torch_defaults
def random_b_factors(weight: Float[Tensor, "d_in d_out"], seed: int) -> Factors:
    """Random-B: write = Q, read = W Q^T for a Haar-random orthogonal Q (d_out, d_out), the sign-fixed QR of a Gaussian.

    The paper states this for d_in >= d_out. For a wide matrix the random side is the read factor, Q (d_in, d_in), and
    write = Q^T W, so that there are min(d_in, d_out) units here, too (ours). Units have no order.

    Args:
        weight: (d_in, d_out), any floating dtype.
        seed: of the Gaussian, which is drawn on the CPU: the same Q on every device.

    Raises:
        ValueError: a weight that is not finite.

    Source: paper, app. exact-dense-controls; method.md §4.1 (the sign fix, which makes Q Haar, is recommended there).
    """
    dense = _finite(weight)
    d_in, d_out = dense.shape
    generator, size = torch.Generator().manual_seed(seed), min(d_in, d_out)
    q, r = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    random = (q * _signs(r.diagonal())).to(dense.device)  # QR is Haar only once R's diagonal is positive
    read, write = (dense @ random.T, random) if d_in >= d_out else (random, random.T @ dense)
    return _factors(weight, read, write, {"method": "random_b", "seed": seed})


@with_torch_defaults
def neuron_factors(weight: Float[Tensor, "d_in d_out"], side: str = "input") -> Factors:
    """W's own coordinates as units: W = I W ("input"), or W I ("output").

    Behind an activation function, at mlp_out, inputs are neurons; at attn_o they are dimensions of heads.

    Args:
        weight: (d_in, d_out), any floating dtype.
        side: whose coordinates.

    Raises:
        ValueError: a weight that is not finite, or another side.

    Source: ours (evidence.md, controls).
    """
    one_of("side", side, SIDES)
    dense = _finite(weight).float()
    identity = torch.eye(dense.shape[SIDES.index(side)], dtype=torch.float32, device=dense.device)
    read, write = (identity, dense) if side == "input" else (dense, identity)
    settings = {"method": "neurons", "side": side, "units": len(identity)}
    return Factors(read, write.clone(), settings, {"solver": "exact.neurons"}, dense)


def _finite(weight: Dense) -> Dense:
    if not bool(torch.isfinite(weight).all()):
        i, j = (~torch.isfinite(weight)).nonzero()[0].tolist()
        raise ValueError(f"weight[{i}, {j}] is {float(weight[i, j])}: every entry must be finite")
    return weight.detach().double()


def _signs(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """+1 or -1; zero counts as positive, so that multiplying by it loses nothing."""
    return torch.where(values < 0, -1.0, 1.0).to(values.dtype)


def _factors(weight: Dense, read: Read, write: Write, settings: dict[str, str | int]) -> Factors:
    settings = {**settings, "edges": "dense", "units": read.shape[1]}
    solver = {"solver": f"exact.{settings['method']}"}
    return Factors(read.float().contiguous(), write.float().contiguous(), settings, solver, weight.detach().float())
