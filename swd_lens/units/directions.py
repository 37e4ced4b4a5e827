"""directions: the units that write, or read, a direction of the residual stream (`writers` and `readers` of factors).

1. `direction_of` makes a direction of tokens: their unembedding as the final norm lets it through, or their embedding.
2. `ranked` orders units by how well their write vectors, or their read vectors, point along it. A norm's weight that is not
   folded into W stands between the stream and a read vector, and counts with it.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from swd_lens.base.checks import bounded, one_of
from swd_lens.base.errors import UnitSourceError, quoted
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts import host_of
from swd_lens.hosts.families import facts_of
from swd_lens.hosts.sites import READS_ATTENTION_INPUT, WRITES_RESIDUAL, is_site_name, split_name
from swd_lens.tasks.split import Unusable
from swd_lens.tasks.tokenize import TaskTokenizer

TOKENS_AS = ("unembedding", "embedding")
RANKED_BY = ("cosine", "dot product")
# Side of a unit -> the kinds of sites that meet the residual stream with it.
_KINDS = {"write": WRITES_RESIDUAL, "read": (*READS_ATTENTION_INPUT, "mlp_in", "mlp_gate")}
_NO_DIRECTION = "a direction is a finite (d_model,) vector that is not zero, or two different tokens; got shape "


@with_torch_defaults
def ranked(
    factors: Mapping[str, Any], side: str, direction: Any, model: Any, *, n: int | None, by: str, tokens_as: str
) -> pd.DataFrame:
    """Rank the valid units of a set by their vectors along a direction; see `FactorSet.writers` for arguments and errors.
    factors: site name -> Factors; side: "write" or "read", the vectors that are compared."""
    sites = [site for site in factors if is_site_name(site) and split_name(site)[1] in _KINDS[side]]
    if not sites:
        raise UnitSourceError(
            f"none of these sites {side}s {'to' if side == 'write' else 'from'} the residual stream: {', '.join(factors)}; "
            f"those that do are of the kinds {', '.join(_KINDS[side])}"
        )
    one_of("by", by, RANKED_BY, UnitSourceError)
    if n is not None:
        bounded("n", n, 1, error=UnitSourceError)
    along = direction_of(direction, model, tokens_as)
    tables = []
    for site in sites:
        f = factors[site]
        vectors = (f.write if side == "write" else f.read.T).detach().float().cpu()
        if side == "read" and f.origin is not None and f.origin.scale is not None:
            vectors = vectors * f.origin.scale.float().cpu()
        if vectors.shape[1] != len(along):
            raise UnitSourceError(f"the direction has {len(along)} entries, the residual stream at {site} {vectors.shape[1]}")
        dot = vectors @ along
        cosine = dot / (vectors.norm(dim=1) * along.norm()).clamp_min(1e-30)
        valid = f.valid_units.cpu().nonzero()[:, 0].tolist()
        columns = {"cosine": cosine[valid].tolist(), "dot product": dot[valid].tolist()}
        tables.append(pd.DataFrame({"unit": [f"{site}/{index}" for index in valid], **columns}))
    table = pd.concat(tables, ignore_index=True)
    table = table.sort_values(by, key=lambda values: -values.abs(), kind="stable", ignore_index=True)
    table = table.head(n or len(table))
    table.insert(0, "rank", range(1, len(table) + 1))
    return table


def direction_of(direction: Any, model: Any = None, tokens_as: str = "unembedding") -> Float[Tensor, " d_model"]:
    """Make a direction of the residual stream, float32 on the CPU.

    Args:
        direction: (d_model,) tensor; a token, as text or id; or a pair of tokens, the first less the second.
        model: whose tokens they are.
        tokens_as: "unembedding": what the token's logit reads of the stream, less the mean over the vocabulary, through the final
            norm (without its scale): a dot product with a write vector, times the norm's 1 / scale, is the change of that logit
            per unit of z. "embedding": the token's row of W_E.

    Raises UnitSourceError: tokens without a model, a text that is not one token, or something else.
    """
    one_of("tokens_as", tokens_as, TOKENS_AS, UnitSourceError)
    if isinstance(direction, Tensor) and direction.is_floating_point():
        if direction.ndim != 1 or not bool(direction.isfinite().all()) or not bool(direction.any()):
            raise UnitSourceError(f"{_NO_DIRECTION}{tuple(direction.shape)}")
        return direction.detach().float().cpu()
    tokens: list[Any] = list(direction) if isinstance(direction, tuple | list) else [direction]
    if len(tokens) not in (1, 2) or not all(isinstance(t, str | int) and not isinstance(t, bool) for t in tokens):
        raise UnitSourceError(
            f"{quoted(direction)} is no direction; give a (d_model,) tensor, a token as text or id, or a pair of tokens"
        )
    if model is None:
        raise UnitSourceError(
            f"the direction {quoted(direction)} names tokens; pass the model that they are of: "
            f"factors.writers({quoted(direction)}, model)"
        )
    ids = [_token_id(model, token) for token in tokens]
    if tokens_as == "embedding":
        vectors = model.W_E.detach().float().cpu()
    else:
        norm, unembedding = host_of(model).readout()
        vectors = unembedding.detach().float().cpu().T
        vectors = vectors - vectors.mean(0)
        if norm is not None:
            vectors = vectors * norm.detach().float().cpu()
        if facts_of(model).norm == "layer":
            vectors = vectors - vectors.mean(1, keepdim=True)
    found = vectors[ids[0]] if len(ids) == 1 else vectors[ids[0]] - vectors[ids[1]]
    if not bool(found.any()):
        raise UnitSourceError(f"{_NO_DIRECTION}{tuple(found.shape)}")
    return found


def _token_id(model: Any, token: str | int) -> int:
    """The id of a token that was given as text or id. Raises UnitSourceError: an id outside the vocabulary, a text that is not
    one token, or a text for a host without a tokenizer."""
    if isinstance(token, int):
        reason = f"id {token} is outside 0 to {int(model.cfg.d_vocab) - 1}"
        if 0 <= token < int(model.cfg.d_vocab):
            return token
    elif model.tokenizer is None:
        reason = f"{token!r}: this host has no tokenizer, give token ids"
    else:
        try:
            return TaskTokenizer("direction", model, False).single(token, "a direction's token")
        except Unusable as why:
            reason = str(why)
    raise UnitSourceError(f"the direction cannot be made of this token: {reason}")
