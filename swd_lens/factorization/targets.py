"""Targets: what a matrix behind replaced ones should compute, so that it makes good what they changed.

Sequential calibration fits the factors to W on the inputs of the replaced host, h. The dense host reads other inputs there,
g, and writes g W. Fitting the factors to that instead,

    E |g W - h A B|^2  =  tr((T - AB)^T G (T - AB)) + what no factors can change,   G = E[h^T h],   T = G^-1 E[h^T g] W,

is the solver's own problem with T in place of W (for second layers of pruned networks this is known as asymmetric
calibration).

1. `collect_pairs` runs every batch twice, as the dense host and as the host is, and averages h^T h and h^T g.
2. `corrected` makes T of them. A small ridge keeps directions that h hardly has as W has them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from swd_lens.base.machine import plain_float32
from swd_lens.factorization.residuals import Residuals
from swd_lens.hosts import host_of
from swd_lens.hosts.recording import require_one_per_token
from swd_lens.hosts.sites import Site

# In units of the Gram's mean diagonal. Embedded model, everything at s = .685: .01 and .1 give the same KL within 4 %.
RIDGE = 1e-2


def collect_pairs(
    sites: Sequence[Site],
    replaced: Residuals,
    dense: Residuals,
    as_dense: Callable[[], AbstractContextManager[Any]],
    *,
    progress: bool = False,
    dtype: str = "float32",
) -> dict[str, tuple[Tensor, Tensor]]:
    """Site -> (G, C), float64 (d_in, d_in) means over tokens of h^T h and h^T g; memory does not grow with the tokens.

    Args:
        sites: of one stage.
        replaced, dense: the tokens, and where runs take up, of the host as it is and of the dense host.
        as_dense: inside it the host runs its own matrices.
        dtype: of the products of one batch, "float32" or "float64"; those of a float64 host are float64.

    Raises:
        ValueError: an activation is not finite (site named).
        UnsupportedHostError: a site that the host's forward never shows, or shows several times per token.
    """
    host, stop = host_of(replaced.host.model), max(site.layer for site in sites) + 1
    sums = {site.name: [torch.zeros(site.d_in, site.d_in, dtype=torch.float64) for _ in range(2)] for site in sites}
    total = -(-replaced.stream.n_rows // replaced.batch_size)
    both = zip(replaced.batches(), dense.batches(), strict=True)
    with torch.no_grad():
        for (tokens, start), (_, dense_start) in tqdm(
            both, desc="calibration", total=total, unit="batch", disable=not progress, leave=False
        ):
            with as_dense():
                wanted = _inputs(host, sites, tokens, stop, dense_start, dtype)
            found = _inputs(host, sites, tokens, stop, start, dtype)
            for site in sites:
                h, g = found[site.name], wanted[site.name]
                with plain_float32(h.device):
                    for place, other in enumerate((h, g)):
                        sums[site.name][place] += (h.T @ other).to(sums[site.name][place])
    n = replaced.stream.n_tokens
    for name, pair in sums.items():
        if not all(one.isfinite().all() for one in pair):
            raise ValueError(
                f"activations entering {name} are not finite on these tokens; the host itself is broken there"
            )
    return {name: (gram / n, cross / n) for name, (gram, cross) in sums.items()}


def corrected(
    weight: Float[Tensor, "d_in d_out"], gram: Float[Tensor, "d_in d_in"], cross: Float[Tensor, "d_in d_in"]
) -> Float[Tensor, "d_in d_out"]:
    """T = (G + r)^-1 (C + r) W with r = `RIDGE` x mean diagonal of G: float32, solved in float64."""
    ridge = torch.eye(len(gram), dtype=torch.float64) * max(RIDGE * float(gram.diagonal().mean()), 1e-12)
    factor = torch.linalg.cholesky(gram.double().cpu() + ridge)
    wanted = (cross.double().cpu() + ridge) @ weight.double().cpu()
    return torch.cholesky_solve(wanted, factor).float().to(weight.device)


def _inputs(host: Any, sites: Sequence[Site], tokens: Tensor, stop: int, start: Any, dtype: str) -> dict[str, Tensor]:
    """(vector, d_in) of every site, in this dtype (float64 of a float64 host)."""
    found: dict[str, Tensor] = {}
    vectors: Counter[str] = Counter()

    def take(site: Site, h: Tensor) -> None:
        flat = h.detach().reshape(-1, site.d_in)
        vectors[site.name] += len(flat)
        double = dtype == "float64" or flat.dtype == torch.float64
        found[site.name] = (flat.double() if double else flat.float()).clone()

    with host.inputs(sites, take):
        host.run_blocks(tokens, stop, **({} if start is None else {"start": start}))
    require_one_per_token(sites, vectors, tokens.numel())
    return found
