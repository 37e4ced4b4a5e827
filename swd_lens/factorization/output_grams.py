"""Output Grams: the second moments of the loss's gradients at what each site writes, streamed over the tokens.

1. In front of each site stands a projection that hands over to the host's own product (`Attachment.dense`): it shows what the
   site writes, of every kind of host, packed or not, and computes what the host computes.
2. The text is run a few rows at a time, as the dense host. The loss is the cross-entropy of its own next tokens; autograd gives
   the gradient g of each output. No parameter's gradient is computed, and no tensor of logits is whole (hosts/predictions.py).
3. H = mean over tokens of g^T g, in float32: no support is chosen by it, so that last digits do not grow.

What a factorization does with them: solver/outputs.py.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.base.divergence import cross_entropy, log_probabilities
from swd_lens.base.errors import error
from swd_lens.base.progress import tqdm
from swd_lens.base.surroundings import in_plain_surroundings
from swd_lens.hosts import host_of, require_gradients, require_no_dropout
from swd_lens.hosts.families import facts_of
from swd_lens.hosts.frozen import frozen
from swd_lens.hosts.fused import fused_attention
from swd_lens.hosts.predictions import Predictions
from swd_lens.hosts.recording import require_seen
from swd_lens.hosts.sites import Site, overlapping
from swd_lens.tasks.streams import TokenStream, as_stream
from swd_lens.units import Attachment, attach, attached_at
from swd_lens.units.factors import Factors

TOKENS = 1_024  # of a forward and its way back
_WHILE_COLLECTING = "while gradients are taken at its matrices"


@in_plain_surroundings
def collect_output_grams(
    model: Any, sites: Sequence[Site], tokens: Any, *, progress: bool = False
) -> dict[str, Float[Tensor, "_d_out _d_out"]]:
    """Stream tokens through the dense host, and back from the loss to what every site writes; average g^T g there.

    Args:
        model: the host; these sites must not be attached.
        sites: where gradients are taken.
        tokens: (rows, pos) ids, or a `TokenStream`; each row predicts its own tokens 1..pos-1.

    Returns:
        Site name -> (d_out, d_out) float32; entry (i, j) in units of nats squared per output squared, mean over tokens.

    Raises:
        TokenError: see `swd_lens.tasks.streams.as_stream`.
        ValueError: a gradient is not finite (site named).
        AttachError: a site is attached.
        TokenError, UnsupportedHostError, ValueError: see `require_loss`.
    """
    stream = as_stream(tokens, model)
    require_loss(model, stream)
    first_row = stream.first_row()[None]
    host, size = host_of(model), max(1, TOKENS // first_row.shape[1])
    sums: dict[str, Tensor] = {}
    with frozen(host, _WHILE_COLLECTING), _dense_with_projections(model, sites) as attachment, ExitStack() as stack:
        stack.enter_context(fused_attention(host, first_row))
        predictions, shown = Predictions(host), _Outputs()
        for site in sites:
            projection = attachment.projection(site.name)
            stack.callback(projection.register_forward_hook(shown.keeping(site)).remove)
        batches = stream.batches(size)
        total = -(-stream.n_rows // size)
        for rows in tqdm(batches, desc="gradients", total=total, unit="batch", disable=not progress, leave=False):
            for name, g in shown.gradients(predictions, rows, sites).items():
                flat = g.float().flatten(0, -2)
                sums[name] = sums[name].addmm_(flat.T, flat) if name in sums else flat.T @ flat
    for name, gradient_sum in sums.items():
        if not bool(gradient_sum.isfinite().all()):
            raise error("gradients-not-finite", site=name)
    n_tokens = stream.n_rows * stream.row_length
    return {name: gradient_sum.div_(n_tokens) for name, gradient_sum in sums.items()}


def require_loss(model: Any, stream: TokenStream) -> None:
    """Do nothing if the loss of the next tokens of this text can be differentiated.

    Raises:
        TokenError: rows of a single token, which predict nothing.
        UnsupportedHostError: a model that does not predict next tokens, or through which no gradient passes.
        ValueError: the host is in training mode and has dropout.
    """
    if not facts_of(model).causal:
        raise error("outputs-weighed-without-next-tokens", model=model.cfg.model_name)
    if stream.row_length < 2:
        raise error("output-grams-of-single-tokens")
    require_no_dropout(model)
    require_gradients(model)


@contextmanager
def _dense_with_projections(model: Any, sites: Sequence[Site]) -> Iterator[Attachment]:
    """The dense host, with a projection in front of each site's product; and of every other one, whatever `sites` are: a packed
    product adds up gradients in another order than its parts, so that a call for fewer sites would give other last bits."""
    host, named = host_of(model), {site.name for site in sites}
    held = named.union(*(overlapping(name) for name in named))
    others = [site for site in host.sites() if site.name not in held and attached_at(host, site) is None]
    empty = {site.name: Factors(torch.zeros(site.d_in, 1), torch.zeros(1, site.d_out)) for site in (*sites, *others)}
    with attach(model, empty) as attachment, attachment.dense():
        yield attachment


class _Outputs:
    """What projections give in a forward, so that the loss can be differentiated by it."""

    def __init__(self) -> None:
        self._shown: dict[str, Tensor] = {}

    def keeping(self, site: Site) -> Callable[..., Tensor]:
        def keep(projection: Any, args: Any, y: Float[Tensor, "*batch d_out"]) -> Float[Tensor, "*batch d_out"]:
            # In a frozen host nothing before the first site has a gradient.
            self._shown[site.name] = y if y.requires_grad else y.detach().requires_grad_(True)
            return self._shown[site.name]

        return keep

    def gradients(
        self, predictions: Predictions, rows: Int[Tensor, "rows pos"], sites: Sequence[Site]
    ) -> dict[str, Tensor]:
        """Site -> gradient of the rows' cross-entropy, summed over predictions, by what it wrote."""
        with torch.enable_grad():
            run = predictions.run(rows)
            outputs, self._shown = self._shown, {}
            require_seen(sites, outputs, "output")
            loss = predictions.total(_cross_entropy, rows, run)
            return dict(zip(outputs, torch.autograd.grad(loss, list(outputs.values())), strict=True))


def _cross_entropy(targets: Int[Tensor, "rows prediction"], logits: Tensor) -> Float[Tensor, ""]:
    return cross_entropy(log_probabilities(logits), targets).sum()
