"""Running a host over tokens and handing over, batch by batch, what one site's units and its neighbours show."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from swd_lens.base._version import __version__
from swd_lens.hosts import Host, sites_of
from swd_lens.hosts.recording import require_seen
from swd_lens.hosts.sites import Site
from swd_lens.tasks.streams import TokenStream
from swd_lens.tasks.text import TokenError
from swd_lens.units import Attachment
from swd_lens.units.factors import Factors, fingerprint
from swd_lens.units.unit_set import identities

Use = Callable[[dict[str, Tensor]], None]


def one_site(host: Host, pattern: Any) -> Site:
    """The single site that a pattern names.

    Raises:
        UnknownSiteError: none. ValueError: several.
    """
    found = sites_of(host, pattern)
    if len(found) > 1:
        raise ValueError(
            f"{pattern!r} names {len(found)} sites ({', '.join(site.name for site in found[:3])} ...); pairs are taken "
            "within one site: name one"
        )
    return found[0]


def factors_at(attachment: Attachment, site: Site) -> Factors:
    """The factors attached at a site, with two valid units at least.

    Raises:
        ValueError: none are there, they are no read/write factors, or fewer than two of their units have edges.
    """
    if site.name not in attachment.factors:
        raise ValueError(
            f"these factors hold nothing for {site.name}; they are for {', '.join(attachment.factors)}. Factorize the site, or "
            "name one of those"
        )
    units = attachment.factors[site.name]
    if not isinstance(units, Factors):
        raise ValueError(
            f"{site.name} holds {type(units).__name__}, which shows no write vectors; pairs of units need Factors"
        )
    if (valid := int(units.valid_units.sum())) < 2:
        raise ValueError(
            f"{site.name} has {valid} valid units (units with a read and a write edge); a pair needs two. Factorize it at a "
            "lower sparsity"
        )
    return units


def require_batch_size(batch_size: Any) -> None:
    """Raises ValueError unless it is a whole number of rows."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r}: give how many rows run in one forward, 1 or more")


def require_tokens(stream: TokenStream, least: int, why: str) -> None:
    """Raises TokenError where the stream holds fewer tokens than `least`."""
    if stream.n_tokens < least:
        raise TokenError(f"got {stream.n_tokens} token; {why} at least {least} positions: give more text")


def watch(
    host: Host,
    site: Site,
    stream: TokenStream,
    use: Use,
    *,
    batch_size: int,
    label: str | None = None,
    outputs: Sequence[Site] = (),
    inputs: Sequence[Site] = (),
) -> None:
    """Run every batch up to the site's block and call `use` with what was seen there, flattened to (token, width).

    Args:
        use: gets "z", the site's units; the outputs of sites under "out <kind>", inputs under "in <kind>".
        label: what the progress bar says; None: no bar.

    Raises:
        UnsupportedHostError: the forward never showed one of them.
        ValueError: z is not finite.
    """
    seen: dict[str, Tensor] = {}

    def keep(key: str, value: Tensor) -> None:
        seen[key] = value.detach().flatten(0, 1)

    with torch.no_grad(), ExitStack() as stack:
        stack.enter_context(host.model.hooks(fwd_hooks=[(site.hook_name, lambda z, hook: keep("z", z))]))
        stack.enter_context(host.outputs(outputs, lambda at, y: keep(f"out {at.kind}", y)))
        stack.enter_context(host.inputs(inputs, lambda at, h: keep(f"in {at.kind}", h)))
        batches = stream.batches(batch_size)
        total = -(-stream.n_rows // batch_size)
        for rows in tqdm(batches, desc=label, total=total, unit="batch", disable=label is None, leave=False):
            seen.clear()
            host.run_blocks(rows, site.layer + 1)
            require_seen([site], {site.name} if "z" in seen else set(), "units")
            require_seen(outputs, {one.name for one in outputs if f"out {one.kind}" in seen}, "output")
            require_seen(inputs, {one.name for one in inputs if f"in {one.kind}" in seen}, "input")
            if not bool(seen["z"].isfinite().all()):
                raise ValueError(
                    f"the units of {site.name} are not finite on these tokens: activations overflow, or the factors are "
                    "damaged; run the host in float32, or factorize the site again"
                )
            use(seen)


def provenance(
    host: Host, attachment: Attachment, site: Site, stream: TokenStream, chosen: Mapping[str, Any]
) -> dict[str, Any]:
    """What a result says of how it was made; plain JSON values. Nothing here is drawn at random: there is no seed."""
    return {
        "model": getattr(host.model.cfg, "model_name", None),
        "site": site.name,
        "weight_sha256": fingerprint(host.weight(site)),
        "attached": list(attachment.factors),
        "factors": identities(attachment.factors),
        "tokens": stream.n_tokens,
        "row_length": stream.row_length,
        "tokens_sha256": stream.fingerprint(),
        "version": __version__,
        **chosen,
    }
