"""Every site that was asked for must have been seen in a forward: a silent hook would leave zeros in a sum, or nothing."""

from collections.abc import Container, Iterable, Mapping, Sequence

from swd_lens.hosts import UnsupportedHostError
from swd_lens.hosts.sites import Site


def require_seen(sites: Iterable[Site], seen: Container[str], what: str) -> None:
    """Do nothing if every site's name is among those seen.

    Args:
        what: what should have been seen there ("input", "output", "units").

    Raises:
        UnsupportedHostError: some were not; all of them are named.
    """
    silent = [site.name for site in sites if site.name not in seen]
    if silent:
        raise UnsupportedHostError(
            f"the forward of this host never showed the {what} of {', '.join(silent)}: it goes by another way there (a fused "
            "or skipped module, or hooks that were removed). Leave these sites out, and please report the model"
        )


def require_one_per_token(sites: Sequence[Site], vectors: Mapping[str, int], n_tokens: int) -> None:
    """Do nothing if every site read one vector per token.

    Args:
        vectors: site name -> how many it read.

    Raises:
        UnsupportedHostError: a site was silent (all of them are named), or read another number.
    """
    require_seen(sites, vectors, "input")
    for site in sites:
        if vectors[site.name] != n_tokens:
            raise UnsupportedHostError(
                f"{site.name} read {vectors[site.name]} vectors on {n_tokens} tokens; swd_lens needs one per token (a layer "
                "that runs several times, or on some tokens only, has no single Gram)"
            )
