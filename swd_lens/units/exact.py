"""Exact factorizations of one matrix, the controls without an error.

1. `svd_factors`: W = U S V^T; read = U S, write = V^T. Units are ordered by singular value.
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

from swd_lens.base.errors import error
from swd_lens.base.surroundings import in_plain_surroundings
from swd_lens.units.factors import Factors

SIDES = ("input", "output")


@in_plain_surroundings
def svd_factors(weight: Float[Tensor, "d_in d_out"]) -> Factors:
    """Singular value decomposition as units: read[:, i] = sigma_i u_i, write[i] = v_i, largest sigma first.

    The sign of a pair is free; it is fixed by making the largest-magnitude entry of each write vector positive.

    Args:
        weight: (d_in, d_out), any floating dtype.

    Raises:
        ValueError: a weight that is not finite.

    Source: paper, app. exact-dense-controls; method.md §4.1.
    """
    dense = _finite(weight)
    left, singular, write = torch.linalg.svd(dense, full_matrices=False)
    sign = _signs(write.gather(1, write.abs().argmax(1, keepdim=True)))
    read = left * singular * sign.T
    return _factors(weight, read, write * sign, {"method": "svd"})


@in_plain_surroundings
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
    random = _haar_orthogonal(min(d_in, d_out), seed).to(dense.device)
    read, write = (dense @ random.T, random) if d_in >= d_out else (random, random.T @ dense)
    return _factors(weight, read, write, {"method": "random_b", "seed": seed})


@in_plain_surroundings
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
    if side not in SIDES:
        raise error("neurons-of-no-side", side=side, sides=" or ".join(map(repr, SIDES)))
    dense = _finite(weight).float()
    identity = torch.eye(dense.shape[SIDES.index(side)], dtype=torch.float32, device=dense.device)
    read, write = (identity, dense) if side == "input" else (dense, identity)
    settings = {"method": "neurons", "side": side, "units": len(identity)}
    return Factors(read, write.clone(), settings, {"solver": "exact.neurons"}, dense)


def _finite(weight: Float[Tensor, "d_in d_out"]) -> Float[Tensor, "d_in d_out"]:
    if not bool(torch.isfinite(weight).all()):
        i, j = (~torch.isfinite(weight)).nonzero()[0].tolist()
        raise error("exact-weight-not-finite", i=i, j=j, value=float(weight[i, j]))
    return weight.detach().double()


def _haar_orthogonal(size: int, seed: int) -> Float[Tensor, "size size"]:
    """QR of a Gaussian is Haar only once R's diagonal is positive: the columns take its signs."""
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(size, size, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    return q * _signs(r.diagonal())


def _signs(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """+1 or -1; zero counts as positive, so that multiplying by it loses nothing."""
    return torch.where(values < 0, -1.0, 1.0).to(values.dtype)


def _factors(
    weight: Float[Tensor, "d_in d_out"],
    read: Float[Tensor, "d_in unit"],
    write: Float[Tensor, "unit d_out"],
    settings: dict[str, str | int],
) -> Factors:
    settings = {**settings, "edges": "dense", "units": read.shape[1]}
    solver = {"solver": f"exact.{settings['method']}"}
    return Factors(read.float().contiguous(), write.float().contiguous(), settings, solver, weight.detach().float())
