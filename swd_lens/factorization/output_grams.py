"""Output Grams: the second moments of the loss's gradients at what each site writes, streamed over the tokens.

1. The text is run forward and back a few rows at a time, as the dense host (gradients.py), which gives the gradient g of each
   output.
2. H = mean over tokens that count (tasks/counting.py) of g^T g, in float32: no support is chosen by it, so that last digits do
   not grow.

What a factorization does with them: solver/outputs.py.
"""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from swd_lens.base.errors import GradientError
from swd_lens.base.progress import tqdm
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.factorization.gradients import gradient_passes, require_loss, rows_per_pass
from swd_lens.hosts.sites import Site
from swd_lens.tasks.counting import predicted
from swd_lens.tasks.streams import as_stream


@with_torch_defaults
def collect_output_grams(
    model: Any, sites: Sequence[Site], tokens: Any, *, progress: bool = False
) -> dict[str, Float[Tensor, "_d_out _d_out"]]:
    """Stream tokens through the dense host, and back from the loss to what every site writes; average g^T g there.

    Args:
        model: the host; these sites must not be attached.
        sites: where gradients are taken.
        tokens: (rows, pos) ids, or a `TokenStream`; each row predicts its own tokens 1..pos-1.

    Returns: Site name -> (d_out, d_out) float32; entry (i, j) in units of nats squared per output squared, mean over tokens.

    Raises:
        TokenError: see `swd_lens.tasks.streams.as_stream`.
        ValueError: a gradient is not finite (site named).
        AttachError: a site is attached.
        TokenError, UnsupportedHostError, ValueError: see `require_loss`.
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
