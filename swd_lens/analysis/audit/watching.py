"""watch: one pass over a text, in which every site's units are looked at as they come by.

1. Blocks up to the last site run, batch by batch; nothing behind them is computed, the unembedding least of all.
2. A site's observer gets z of the batch inside the forward, so that one site's activations are in memory at a time.
3. Every site must be seen in every batch, and z must be finite.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from swd_lens.base.machine import plain_float32
from swd_lens.hosts import Host
from swd_lens.hosts.recording import require_seen
from swd_lens.hosts.sites import Site
from swd_lens.tasks.streams import TokenStream

# (number of the batch's first row, its rows of token ids, z of all units there)
Observer = Callable[[int, Int[Tensor, "rows pos"], Float[Tensor, "rows pos unit"]], None]

_TOKENS_AT_ONCE = 8192  # z of 768 units on as many tokens is 25 MB


def watch(
    host: Host,
    stream: TokenStream,
    observers: Mapping[Site, Observer],
    batch_size: int | None = None,
    progress: bool = False,
) -> str:
    """Run the stream once and hand every site's z to its observer, float32, on the device where it was computed.

    Args:
        batch_size: rows per forward; None = about 8,192 tokens.

    Returns:
        SHA-256 of the tokens, the one that `TokenStream.fingerprint` would take another pass for.

    Raises:
        UnsupportedHostError: a site whose units the host's forward never shows.
        ValueError: a z that is not finite; site and unit are named.
    """
    rows_at_once = batch_size or max(1, _TOKENS_AT_ONCE // stream.row_length)
    digest = hashlib.sha256(str((stream.n_rows, stream.row_length)).encode())
    stop, at = max(site.layer for site in observers) + 1, 0
    rows: Tensor = torch.empty(0, 0, dtype=torch.int64)
    seen: set[str] = set()

    def reader(site: Site, observe: Observer) -> Any:
        def read(z: Tensor, hook: Any) -> None:
            seen.add(site.name)
            z = z.detach().float()
            _require_finite(site, z)
            observe(at, rows, z)

        return read

    batches = tqdm(
        stream.batches(rows_at_once),
        desc="audit",
        total=-(-stream.n_rows // rows_at_once),
        unit="batch",
        disable=not progress,
        leave=False,
    )
    hooks = [(site.hook_name, reader(site, observe)) for site, observe in observers.items()]
    device = next(host.model.parameters()).device
    with torch.no_grad(), plain_float32(device), host.model.hooks(fwd_hooks=hooks):
        for rows in batches:
            seen.clear()
            host.run_blocks(rows, stop)
            require_seen(observers, seen, "units")
            digest.update(rows.contiguous().numpy().data)
            at += len(rows)
    return digest.hexdigest()


def _require_finite(site: Site, z: Float[Tensor, "rows pos unit"]) -> None:
    if bool(torch.isfinite(z.sum())):  # cheap; a sum can overflow, so look again before complaining
        return
    bad = ~torch.isfinite(z).flatten(0, 1).all(0)
    if bool(bad.any()):
        raise ValueError(
            f"z of {site.name}/{int(bad.nonzero()[0])} is not finite on this text; run the host in float32, or look for the "
            "tokens at which its activations overflow"
        )
