"""The loss's gradients at what each site writes: the dense host on text, forward and back, a few rows at a time.

1. In front of each site stands a projection that hands over to the host's own product (`Attachment.dense`): it shows what the
   site reads and writes, of every kind of host, packed or not, and computes what the host computes.
2. The loss is the cross-entropy of the text's own next tokens; autograd gives the gradient of each output. No parameter's
   gradient is computed, and no tensor of logits is whole (hosts/predictions.py).

3. `collect_output_grams`: H = mean over tokens that count (tasks/counting.py) of g^T g, in float32: no support is chosen by it,
   so that last digits do not grow. What a factorization does with them: solver/outputs.py.

The choice of a basis (basis.py) is made of these gradients, too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from swd_lens.base.divergence import cross_entropy, log_probabilities
from swd_lens.base.errors import GradientError, TokenError, UnsupportedHostError
from swd_lens.base.progress import tqdm
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts import host_of, require_gradients, require_no_dropout
from swd_lens.hosts.families import facts_of
from swd_lens.hosts.fused import fused_attention
from swd_lens.hosts.host import frozen
from swd_lens.hosts.predictions import Predictions
from swd_lens.hosts.recording import require_seen
from swd_lens.hosts.sites import Site, overlapping
from swd_lens.tasks.counting import predicted
from swd_lens.tasks.streams import TokenStream, as_stream
from swd_lens.units import attach, attached_at
from swd_lens.units.factors import Factors

TOKENS = 1_024  # of a forward and its way back
_WHILE_COLLECTING = "while gradients are taken at its matrices"


class AtSite(NamedTuple):
    """Activations and gradients at one site, of a few rows."""

    read: Float[Tensor, "rows pos d_in"] | None  # the activations that enter it; None where they were not asked for
    gradient: Float[Tensor, "rows pos d_out"]  # of the rows' cross-entropy summed over predictions, in nats per output


# Rows, and which of their next-token predictions count (None: all) -> what was seen at each site.
Pass = Callable[[Int[Tensor, "rows pos"], Tensor | None], dict[str, AtSite]]


def require_loss(model: Any, stream: TokenStream) -> None:
    """Require that the loss of the next tokens of this text can be differentiated. Raises TokenError: rows of a single token,
    which predict nothing; UnsupportedHostError: a model that does not predict next tokens, or through which no gradient passes;
    ValueError: the host is in training mode and has dropout."""
    if not facts_of(model).causal:
        raise UnsupportedHostError(
            f"{model.cfg.model_name} does not predict next tokens, so there is no loss to take gradients of; leave out "
            "weigh_outputs, or name a basis"
        )
    if stream.row_length < 2:
        raise TokenError(
            "tokens has rows of a single token, which predict nothing; gradients of the loss need rows of at least 2 tokens"
        )
    require_no_dropout(model)
    require_gradients(model)


def rows_per_pass(stream: TokenStream) -> int:
    """How many rows go forward and back together."""
    return max(1, TOKENS // stream.row_length)


@contextmanager
def gradient_passes(model: Any, sites: Sequence[Site], first_row: Int[Tensor, "1 pos"], *, reads: bool = False) -> Iterator[Pass]:
    """Prepare the dense host; yields a function that runs rows through it and back, and answers in execution order of sites.
    first_row: of the text, shows whether attention can be fused; reads: whether what enters the sites is kept, too. Raises
    AttachError: a site is attached."""
    host, named = host_of(model), {site.name for site in sites}
    # A projection in front of every site's product, whatever `sites` are: a packed product adds up gradients in another order
    # than its parts, so that a call for fewer sites would give other last bits.
    held = named.union(*(overlapping(name) for name in named))
    others = [site for site in host.sites() if site.name not in held and attached_at(host, site) is None]
    empty = {site.name: Factors(torch.zeros(site.d_in, 1), torch.zeros(1, site.d_out)) for site in (*sites, *others)}
    with frozen(host, _WHILE_COLLECTING), attach(model, empty) as attachment, attachment.dense(), ExitStack() as stack:
        stack.enter_context(fused_attention(host, first_row))
        shown = _Shown(Predictions(host), sites, reads)
        for site in sites:
            stack.callback(attachment.projection(site.name).register_forward_hook(shown.keeping(site)).remove)
        yield shown.gradients


@dataclass
class _Shown:
    """Inputs and outputs of projections in a forward, so that the loss can be differentiated by them."""

    predictions: Predictions
    sites: Sequence[Site]
    reads: bool
    read: dict[str, Tensor] = field(default_factory=dict)
    written: dict[str, Tensor] = field(default_factory=dict)

    def keeping(self, site: Site) -> Callable[..., Tensor]:
        def keep(projection: Any, args: Any, y: Float[Tensor, "*batch d_out"]) -> Float[Tensor, "*batch d_out"]:
            if self.reads:
                self.read[site.name] = args[0].detach()
            # In a frozen host nothing before the first site has a gradient.
            self.written[site.name] = y if y.requires_grad else y.detach().requires_grad_(True)
            return self.written[site.name]

        return keep

    def gradients(self, rows: Int[Tensor, "rows pos"], counted: Bool[Tensor, "rows predictions"] | None) -> dict[str, AtSite]:
        with torch.enable_grad():
            run = self.predictions.run(rows)
            read, written = self.read, self.written
            self.read, self.written = {}, {}
            require_seen(self.sites, written, "output")
            loss = self.predictions.total(_cross_entropy, rows, run, counted=counted)
            gradients = torch.autograd.grad(loss, list(written.values()))
        return {name: AtSite(read.get(name), g) for name, g in zip(written, gradients, strict=True)}


def _cross_entropy(targets: Int[Tensor, "rows prediction"], logits: Tensor) -> Float[Tensor, ""]:
    """Cross-entropy summed over the predictions that count: the others have no target."""
    log_q = log_probabilities(logits)
    if bool((targets >= 0).all()):
        return cross_entropy(log_q, targets).sum()
    return cross_entropy(log_q, targets.clamp(min=0))[(targets >= 0).to(log_q.device)].sum()


@with_torch_defaults
def collect_output_grams(
    model: Any, sites: Sequence[Site], tokens: Any, *, progress: bool = False
) -> dict[str, Float[Tensor, "_d_out _d_out"]]:
    """Stream tokens (each row predicts its own tokens 1..pos-1) through the dense host, and back from the loss to what every site
    writes; average g^T g there.

    Returns: Site name -> (d_out, d_out) float32; entry (i, j) in units of nats squared per output squared, mean over tokens.

    Raises TokenError: see `swd_lens.tasks.streams.as_stream`; TokenError, UnsupportedHostError, ValueError: see `require_loss`;
    ValueError: a gradient is not finite (site named); AttachError: a site is attached.
    """
    stream = as_stream(tokens, model)
    require_loss(model, stream)
    size, sums = rows_per_pass(stream), dict[str, Tensor]()
    with gradient_passes(model, sites, stream.first_row()[None]) as gradients_of:
        total = -(-stream.n_rows // size)
        bar = tqdm(stream.batches(size), desc="gradients", total=total, unit="batch", disable=not progress, leave=False)
        first_row = 0
        for rows in bar:
            counted = stream.counted(rows, first_row)
            first_row += len(rows)
            for name, at_site in gradients_of(rows, predicted(counted)).items():
                flat = at_site.gradient.float().flatten(0, -2)
                flat = flat if counted is None else flat[counted.flatten().to(flat.device)]
                sums[name] = sums[name].addmm_(flat.T, flat) if name in sums else flat.T @ flat
    for name, gradient_sum in sums.items():
        if not bool(gradient_sum.isfinite().all()):
            raise GradientError(f"the loss's gradients at {name} are not finite on these tokens; the host itself is broken there")
    n_tokens = stream.n_counted
    return {name: gradient_sum.div_(n_tokens) for name, gradient_sum in sums.items()}
