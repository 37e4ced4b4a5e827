"""fidelity: how much of the host's behaviour a replacement keeps, on text that it was not fitted on.

1. For each batch of rows, run the dense host and the replaced host.
2. Sum, over all next-token predictions, cross-entropy of both, KL(dense || replaced) and top-1 agreement; over all
   positions, squared error and squared norm of every site's output (bias included).
3. Divide at the end: means over predictions, and per site sum ||Y_rep - Y_dense||^2 / sum ||Y_dense||^2 (method.md §5.5).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from swd_lens.base.divergence import Divergence, divergence
from swd_lens.base.errors import error
from swd_lens.base.record import Record
from swd_lens.hosts import host_of, require_no_dropout
from swd_lens.hosts.recording import record
from swd_lens.tasks.text import as_rows
from swd_lens.units import attach


@dataclass(frozen=True)
class Fidelity(Record):
    """Replacement metrics; cross-entropies and KL in nats per predicted token.

    Attributes:
        ce_dense, ce: of the dense and of the replaced host.
        kl: KL(dense || replaced).
        top1_agreement: fraction of predictions whose most likely token is the same.
        relmse: site -> relative squared error of the site's output in the replaced host against the dense host; with several
            sites replaced it includes what earlier ones did to this one's input.
        n_predictions: next-token predictions averaged over.
    """

    derived: ClassVar[tuple[str, ...]] = ("ce_delta",)

    ce_dense: float
    ce: float
    kl: float
    top1_agreement: float
    relmse: Mapping[str, float]
    n_predictions: int

    @property
    def ce_delta(self) -> float:
        """CE(replaced) - CE(dense)."""
        return self.ce - self.ce_dense

    def table(self) -> pd.DataFrame:
        """One row: the model-level metrics and the mean and largest site relMSE."""
        errors = list(self.relmse.values())
        return pd.DataFrame(
            {
                "CE dense": [self.ce_dense],
                "CE": [self.ce],
                "CE delta": [self.ce_delta],
                "KL": [self.kl],
                "top-1 agreement": [self.top1_agreement],
                "mean relMSE": [sum(errors) / len(errors)],
                "max relMSE": [max(errors)],
            }
        )

    def title(self) -> str:
        return f"Fidelity of {len(self.relmse)} sites on {self.n_predictions:,} predictions: CE delta {self.ce_delta:+.4f} nats"

    def parts(self) -> tuple[Any, ...]:
        sites = pd.DataFrame({"site": list(self.relmse), "relMSE": list(self.relmse.values())})
        return (
            self.table(),
            "relMSE by site, largest first:",
            sites.sort_values("relMSE", ascending=False, kind="stable"),
        )


def fidelity(model: Any, factors: Any, tokens: Any, *, batch_size: int = 16, progress: bool = False) -> Fidelity:
    """Compare the host with and without the factors on held-out tokens (paper app. A.5; method.md §5.5). Float32 throughout.

    Args:
        model: the host, with these sites not attached.
        factors: what to attach, see `swd_lens.attach`.
        tokens: (rows, pos) ids; each row predicts its own tokens 1..pos-1.
        batch_size: rows per forward.

    Raises:
        TokenError: bad tokens, or rows of a single token.
        AttachError: see `swd_lens.attach`.
        UnsupportedHostError: a site whose output the host's forward never shows.
    """
    rows = as_rows(tokens, model)
    require_no_dropout(model)
    if rows.shape[1] < 2:
        raise error("fidelity-of-single-tokens")
    host, total = host_of(model), Divergence()
    with torch.no_grad(), attach(model, factors) as attachment:
        errors, norms = (dict.fromkeys(attachment.factors, torch.zeros((), dtype=torch.float64)) for _ in range(2))
        for batch in tqdm(rows.split(batch_size), desc="fidelity", unit="batch", disable=not progress, leave=False):
            with attachment.dense():
                dense = record(host, batch, outputs=attachment.sites, run="whole", keep=Tensor.float)
            replaced = record(host, batch, outputs=attachment.sites, run="whole", keep=Tensor.float)
            for name, y in dense.outputs.items():
                errors[name] = errors[name] + (replaced.outputs[name] - y).double().square().sum().cpu()
                norms[name] = norms[name] + y.double().square().sum().cpu()
            assert dense.logits is not None and replaced.logits is not None
            total += divergence(dense.logits.float(), replaced.logits.float(), batch)
    relmse = {name: float(errors[name] / norms[name]) for name in errors}
    return Fidelity(**total.means(), relmse=relmse, n_predictions=total.n_predictions)
