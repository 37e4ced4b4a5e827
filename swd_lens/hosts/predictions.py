"""Next-token predictions of whole rows, a part at a time: no tensor of logits has more than CHUNK_BYTES, whatever the batch and
the vocabulary.

1. `start` gives what enters a block, once for all runs that differ from there on.
2. `run` gives what leaves the last block at every position, or all logits where those have few enough bytes.
3. `total` unembeds that a part at a time (some rows, some positions) and adds up what is measured of each part. With gradient
   a part's logits are made again on the way back, so that they are never all there either.

Taking up at a block and unembedding apart are verified on a few tokens before they are trusted (`ends_in_whole_logits`); where
a host gives other logits so, or fails, its runs are whole.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from swd_lens.base.divergence import CHUNK_BYTES
from swd_lens.hosts.host import Host, Start
from swd_lens.hosts.recording import standing_hooks
from swd_lens.hosts.verified import verified

TOKENS = 2_048  # of a forward, where its caller says nothing else
_TRIED = 32  # positions on which a shortened run is tried
NO_TARGET = -1  # in place of a target, where a prediction does not count

Measure = Callable[..., Tensor]


def tried_on(host: Host, rows: Int[Tensor, "rows pos"]) -> Int[Tensor, "one few"]:
    """The first tokens of a row, on which a shortened run is tried beside a whole one: _TRIED, and as many as a part has where
    hooks of the user's stand, which may want a position of their own, or all of them."""
    of_part = CHUNK_BYTES // (4 * int(host.model.cfg.d_vocab))
    return rows[:1, : max(2, of_part if standing_hooks(host.model) else min(_TRIED, of_part))]


@torch.no_grad()
def ends_in_whole_logits(
    host: Host, few: Int[Tensor, "batch pos"], run: Callable[[], Tensor], *, rounded: bool = False, shortcut: Any = None
) -> bool:
    """Whether `run` ends in the logits of a whole run of these tokens. run: what leaves the last block, (batch, pos, d_model),
    its own way; it is unembedded in two parts, as longer rows are. Raises and warns as `verified`, which says what rounded and
    shortcut are."""
    whole, half = host.run(few), -(-few.shape[1] // 2)

    def in_parts() -> Tensor:
        residual = run()
        parts = [host.unembed(few[:, s], residual[:, s]) for s in (slice(0, half), slice(half, None))]
        return torch.cat(parts, 1)

    return verified(in_parts, whole, rounded=rounded, shortcut=shortcut)


class Predictions:
    """Predictions of a host as it is now: mount what is to be there before. host: one with next-token logits."""

    def __init__(self, host: Host):
        self.host = host
        self._d_vocab = int(host.model.cfg.d_vocab)
        self._apart: bool | None = None  # None: not tried yet
        self._starts: dict[int, bool] = {}  # block -> whether runs that take up there end in the logits of whole ones

    def start(self, rows: Int[Tensor, "rows pos"], layer: int) -> Start | None:
        """Prepare `run` of these rows from block `layer` on; None where runs from there have to be whole."""
        if layer not in self._starts:
            self._starts[layer] = self._agrees(rows, layer)
        return Start(layer, self.host.residual(rows, layer)) if self._starts[layer] else None

    def run(self, rows: Int[Tensor, "rows pos"], start: Start | None = None) -> Float[Tensor, "rows pos _width"]:
        """Run rows for `total`: gives the last block's output, or the logits where these have few enough bytes."""
        if self._unembeds_apart(rows):
            return self._residual(rows, start)
        return self.host.run(rows) if start is None else self.host.unembed(rows, self._residual(rows, start))

    def total(
        self,
        measure: Measure,
        rows: Int[Tensor, "rows pos"],
        *runs: Float[Tensor, "rows pos _width"],
        behind_last: bool = False,
        counted: Bool[Tensor, "rows predictions"] | None = None,
    ) -> Float[Tensor, "..."]:
        """Sum over parts of measure(targets (row, prediction), logits (row, prediction, vocab) of each run).

        Args:
            rows: what was run; position t predicts token t + 1.
            runs: of `run`, on these rows.
            behind_last: also of the last position, whose target is not known: there are fewer targets then than predictions.
            counted: predictions that count; the target of another one is NO_TARGET. None: all count.
        """
        targets_of = rows if counted is None else rows.clone()
        if counted is not None:
            targets_of[:, 1:].masked_fill_(~counted.to(rows.device), NO_TARGET)

        def of_part(row: slice, prediction: slice, *runs: Tensor) -> Tensor:
            targets = targets_of[row, prediction.start + 1 : prediction.stop + 1]
            logits = [run[row, prediction] for run in runs]
            if self._unembeds_apart(rows):
                logits = [self.host.unembed(rows[row, prediction], residual) for residual in logits]
            return measure(targets, *logits)

        parts = list(self.parts(rows, rows.shape[1] - (not behind_last)))
        if len(parts) == 1 or not any(run.requires_grad for run in runs):
            values = [of_part(*part, *runs) for part in parts]
        else:
            how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            values = [checkpoint(of_part, *part, *runs, **how) for part in parts]
        return values[0] if len(values) == 1 else torch.stack(values).sum(0)

    def parts(self, rows: Int[Tensor, "rows pos"], last: int) -> Iterator[tuple[slice, slice]]:
        """Rows and predictions, `last` of each row; all at once where whole logits are small."""
        most, n_rows = CHUNK_BYTES // (4 * self._d_vocab), rows.shape[0]
        if 4 * rows.numel() * self._d_vocab <= CHUNK_BYTES:  # as in `_unembeds_apart`
            yield slice(0, n_rows), slice(0, last)
            return
        of_rows = max(1, min(n_rows, most))
        at_once = max(1, most // of_rows)
        for row in range(0, n_rows, of_rows):
            for start in range(0, last, at_once):
                yield slice(row, min(row + of_rows, n_rows)), slice(start, min(start + at_once, last))

    def _residual(self, rows: Tensor, start: Start | None = None) -> Float[Tensor, "rows pos d_model"]:
        return self.host.residual(rows, int(self.host.model.cfg.n_layers), start=start)

    def _unembeds_apart(self, rows: Int[Tensor, "rows pos"]) -> bool:
        if 4 * rows.numel() * self._d_vocab <= CHUNK_BYTES:
            return False
        if self._apart is None:
            self._apart = self._agrees(rows)
        return self._apart

    def _agrees(self, rows: Int[Tensor, "rows pos"], layer: int | None = None) -> bool:
        """Whether runs that are unembedded apart, and take up at a block, end in the logits of whole ones."""
        few = tried_on(self.host, rows)

        def apart() -> Tensor:
            start = None if layer is None else Start(layer, self.host.residual(few, layer))
            return self._residual(few, start)

        return ends_in_whole_logits(self.host, few, apart, rounded=True)
