"""Grams: the second moments of what each site reads, G = mean over tokens of h^T h, streamed.

1. Check the tokens against the host.
2. Run them in batches, no further than the last wanted layer; at every site add h^T h to a running float64 sum. Each site
   must have read one vector per token: one that was silent, or read twice, is an error, not a wrong Gram.
3. Divide by the number of tokens. Memory is one (d_in, d_in) sum per site, whatever the number of tokens.

A host in float64 gives Grams that are the same to the last bit of float32, whatever kind of host it is and however many
threads it has; those of a float32 host differ in the last places, which choosing supports amplifies.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from swd_lens.hosts import UnsupportedHostError, host_of, require_no_dropout
from swd_lens.hosts.seen import require_seen
from swd_lens.sites import Site
from swd_lens.tasks.text import as_rows


@dataclass(frozen=True)
class Grams:
    """One Gram per site name, and the number of tokens (activation vectors) each was averaged over."""

    by_site: Mapping[str, Float[Tensor, "_d_in _d_in"]]
    n_tokens: int

    def __getitem__(self, site: str) -> Tensor:
        return self.by_site[site]


def collect_grams(
    model: Any, sites: Sequence[Site], tokens: Any, *, batch_size: int = 16, progress: bool = False
) -> Grams:
    """Stream tokens through the host as it is now (attached units included) and average h^T h at every site.

    Args:
        model: the host.
        sites: where to read.
        tokens: (rows, pos) ids; every position counts, the first included.
        batch_size: rows per forward.

    Returns:
        Grams in float32; entry (i, j) in units of activation squared, mean over tokens.

    Raises:
        TokenError: see `swd_lens.tasks.text.as_rows`.
        ValueError: an activation is not finite (site named).
        UnsupportedHostError: a site that the host's forward never shows, or shows several times per token.
    """
    require_no_dropout(model)
    rows, host = as_rows(tokens, model), host_of(model)
    sums: dict[str, Tensor] = {}
    vectors: Counter[str] = Counter()  # of the present batch

    def add(site: Site, h: Tensor) -> None:
        flat = h.detach().reshape(-1, site.d_in)
        flat = flat if flat.dtype == torch.float64 else flat.float()
        vectors[site.name] += len(flat)
        if site.name not in sums:  # where the site is: layers may lie on several devices
            sums[site.name] = torch.zeros(site.d_in, site.d_in, dtype=torch.float64, device=flat.device)
        sums[site.name] += (flat.T @ flat).double()

    batches = tqdm(rows.split(batch_size), desc="calibration", unit="batch", disable=not progress, leave=False)
    stop = max(site.layer for site in sites) + 1
    with torch.no_grad(), host.inputs(sites, add):
        for batch in batches:
            vectors.clear()
            host.run_blocks(batch, stop)
            _check_vectors(sites, vectors, batch.numel())
    for name, total in sums.items():
        if not total.isfinite().all():
            raise ValueError(
                f"activations entering {name} are not finite on these tokens; the host itself is broken there"
            )
    # Sums are dropped as they are converted: float64 and float32 Grams of many sites need not be held together.
    return Grams({name: (sums.pop(name) / rows.numel()).float() for name in list(sums)}, rows.numel())


def _check_vectors(sites: Sequence[Site], vectors: Mapping[str, int], n_tokens: int) -> None:
    require_seen(sites, vectors, "input")
    for site in sites:
        if vectors[site.name] != n_tokens:
            raise UnsupportedHostError(
                f"{site.name} read {vectors[site.name]} vectors on {n_tokens} tokens; swd_lens needs one per token (a layer "
                "that runs several times, or on some tokens only, has no single Gram)"
            )
