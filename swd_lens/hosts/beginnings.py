"""How rows of text begin: a host that was trained on text with BOS is another model without it, and is told so.

1. The first few rows are looked at (`warn_without_bos`). A host that begins with BOS (`begins_with_bos`) and rows that do not are
   one warning, which says what it costs: the host's cross-entropy of the same tokens, on a few rows, without and with BOS.
2. `text_for` is how calls that sum over text take it: with what counts (tasks/counting.py).
"""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from swd_lens.base.divergence import CHUNK_BYTES, cross_entropy, log_probabilities
from swd_lens.base.errors import TextWarning, TokenError, quoted, warn
from swd_lens.hosts import host_of
from swd_lens.hosts.families import facts_of
from swd_lens.tasks.encoding import begins_with_bos
from swd_lens.tasks.streams import TokenStream, as_stream

_ROWS, _POSITIONS = 4, 256  # that are looked at


def text_for(model: Any, tokens: Any, *, exclude: Any = None, attention_mask: Any = None) -> TokenStream:
    """Tokens of any form for a call that sums over those that count. exclude, attention_mask: see
    `swd_lens.tasks.streams.as_stream`. Raises TokenError: see `as_stream`; a mask for a host that attends both ways, which
    sees padding wherever it is; or nothing is left that counts."""
    stream = as_stream(tokens, model, exclude=exclude, attention_mask=attention_mask)
    if stream.counting.lengths is not None and not facts_of(model).causal:
        raise TokenError(
            f"{model.cfg.model_name} attends both ways, so that padding changes what it makes of the text beside it: run "
            "rows of one length, without attention_mask="
        )
    if not stream.counting.all:
        _ = stream.n_counted  # refuses text of which nothing counts
    return stream


def warn_without_bos(model: Any, stream: TokenStream, what: str) -> None:
    """Warn where the first rows do not begin with the BOS that this host's text begins with. what: the call's word for these
    tokens ("calibration tokens")."""
    if not begins_with_bos(model):
        return
    rows = next(iter(stream.batches(_ROWS)))
    bos = model.tokenizer.bos_token_id
    without = rows[rows[:, 0] != bos]
    if not len(without):
        return
    # Both cross-entropies, where there are next-token predictions to compare.
    measured = ""
    n_positions = min(rows.shape[1], _POSITIONS, int(model.cfg.n_ctx) - 1, CHUNK_BYTES // (4 * int(model.cfg.d_vocab)))
    if n_positions >= 2 and facts_of(model).causal:
        beginning = without[:, :n_positions]
        with_bos = torch.cat([torch.full((len(beginning), 1), bos), beginning], 1)
        ces = f"{_ce(model, beginning, 1):.3f} nats without and {_ce(model, with_bos, 2):.3f} with BOS"
        measured = f" On {len(beginning)} of them the host's cross-entropy is {ces}."
    warn(
        f"{what}: {len(without)} of the first {len(rows)} rows do not begin with BOS "
        f"({quoted(model.tokenizer.bos_token)}), as the text of this host and the prompts of its tasks "
        f"do.{measured} load_text, stream_rows and pack_text put it there; set "
        "model.cfg.default_prepend_bos = False if the host was trained without",
        TextWarning,
    )


def _ce(model: Any, rows: Int[Tensor, "rows pos"], first: int) -> float:
    """Mean cross-entropy of the tokens from position `first` on, in nats; one row at a time, so that logits stay small."""
    host, total = host_of(model), 0.0
    with torch.no_grad():
        for row in rows.split(1):
            log_q = log_probabilities(host.run(row)[:, first - 1 : -1])
            total += float(cross_entropy(log_q, row[:, first:]).double().mean())
    return total / len(rows)
