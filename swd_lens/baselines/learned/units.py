"""LearnedUnits: a trained baseline as a unit source, with its trajectory.

It is a mapping of one site to its units, which `attach`, `fidelity`, `attribute`, `evaluate` and `compare` take as they take
factors. `at(tokens)` is the same training after fewer tokens.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd
from torch import Tensor, nn

from swd_lens.baselines.learned.spec import TrainError
from swd_lens.inject.coder import CoderUnits


class LearnedUnits(Mapping[str, CoderUnits]):
    """One site's units after training.

    Attributes:
        provenance: method, settings, host, tokens used; plain JSON values.
        checkpoints: tokens -> weights, as training went.
        log: what every logged step said.
    """

    def __init__(
        self,
        make: Any,
        checkpoints: Mapping[int, Mapping[str, Tensor]],
        provenance: Mapping[str, Any],
        log: pd.DataFrame,
        tokens: int | None = None,
    ):
        self._make = make  # () -> an untrained coder and its widths
        self.checkpoints = dict(sorted(checkpoints.items()))
        self.provenance, self.log = dict(provenance), log
        self.tokens = max(self.checkpoints) if tokens is None else tokens
        coder: nn.Module = make()
        coder.load_state_dict(self.checkpoints[self.tokens])
        coder.requires_grad_(False)
        site = self.provenance["site"]
        d_in, d_out = coder.W_enc.shape[0], coder.W_dec.shape[1]  # type: ignore[union-attr,index]
        said = {**self.provenance, "tokens": self.tokens}
        name = str(self.provenance["method"])
        self._units = {site: CoderUnits(coder, d_in, d_out, coder.W_enc.shape[1], name=name, provenance=said)}  # type: ignore[union-attr,index]

    def __getitem__(self, site: str) -> CoderUnits:
        return self._units[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self._units)

    def __len__(self) -> int:
        return len(self._units)

    def at(self, tokens: int) -> "LearnedUnits":
        """The same training after this many tokens.

        Raises:
            TrainError: no checkpoint was kept there.
        """
        if tokens not in self.checkpoints:
            raise TrainError(
                f"no checkpoint at {tokens:,} tokens; there are {', '.join(f'{n:,}' for n in self.checkpoints)}"
            )
        return LearnedUnits(self._make, self.checkpoints, self.provenance, self.log, tokens)

    def trajectory(self) -> dict[int, "LearnedUnits"]:
        """Tokens -> the units after them, as training went."""
        return {tokens: self.at(tokens) for tokens in self.checkpoints}

    def __repr__(self) -> str:
        return f"LearnedUnits({self.provenance['method']}, {self.tokens:,} tokens: {next(iter(self.values()))!r})"
