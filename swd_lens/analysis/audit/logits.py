"""Direct logit effect: which tokens a write vector promotes, and which it suppresses.

1. The vector loses its mean where the final normalization takes means out, and is multiplied by that norm's weights; the
   norm's scale is held fixed.
2. Times the unembedding, less the mean over the vocabulary: the change of each token's centred logit per unit of z.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from swd_lens.analysis.audit.edges import write_vectors
from swd_lens.analysis.audit.names import TokenNames
from swd_lens.hosts import host_of
from swd_lens.hosts.sites import WRITES_RESIDUAL, split_name
from swd_lens.units.factors import Factors

_LOGITS_AT_ONCE = 2**22


@dataclass(frozen=True)
class LogitEffect:
    """Tokens a write vector promotes and suppresses for z > 0, strongest first, with the change in centred logits per unit z."""

    promoted: tuple[tuple[str, float], ...]
    suppressed: tuple[tuple[str, float], ...]


class Readout:
    """What stands between the residual stream and the logits of a host."""

    def __init__(self, model: Any, names: TokenNames | None = None):
        self.norm, self.unembedding = host_of(model).readout()
        self.centres = str(model.cfg.normalization_type).startswith("LN")  # RMSNorm leaves the mean
        self.names = names or TokenNames(model)

    def effects(self, write: Float[Tensor, "some d_model"], n: int = 8) -> list[LogitEffect]:
        """One per write vector, with the n tokens on either side."""
        unembedding = self.unembedding.detach().float()
        found = []
        for part in write.split(max(1, _LOGITS_AT_ONCE // unembedding.shape[1])):
            direction = part.to(unembedding.device)
            if self.centres:
                direction = direction - direction.mean(1, keepdim=True)
            if self.norm is not None:
                direction = direction * self.norm.detach().float()
            effect = direction @ unembedding
            effect = effect - effect.mean(1, keepdim=True)
            n = min(n, effect.shape[1])
            top, bottom = effect.topk(n), (-effect).topk(n)
            for row in range(len(part)):
                promoted = self._named(top.indices[row], top.values[row])
                found.append(LogitEffect(promoted, self._named(bottom.indices[row], -bottom.values[row])))
        return found

    def _named(self, tokens: Tensor, values: Tensor) -> tuple[tuple[str, float], ...]:
        return tuple((self.names(i), value) for i, value in zip(tokens.tolist(), values.tolist(), strict=True))


def logit_effect(
    model: Any, factors: Factors | Mapping[str, Factors], unit: tuple[str, int], *, n: int = 8
) -> LogitEffect:
    """Direct effect of a unit's write vector on the logits, for a site that writes to the residual stream.

    Raises:
        ValueError: the site does not write to the residual stream (its write vectors have no direct logit effect).
    """
    site, index = unit
    if split_name(site)[1] not in WRITES_RESIDUAL:
        raise ValueError(
            f"{site} does not write to the residual stream; logit_effect takes units of mlp_out and attn_o"
        )
    write = write_vectors(factors if isinstance(factors, Factors) else factors[site])
    if write is None:
        raise ValueError(f"the units of {site} show no write vectors, so they have no direct logit effect")
    return Readout(model).effects(write[index][None], n)[0]
