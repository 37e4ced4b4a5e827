"""sparse_pretrain: train a GPT-2 from scratch with ever fewer weights (paper app. sparse-pretrain-setting; method.md §3).

1. A GPT-2 with erf GELU and no dropout, drawn from the seed: N(0, .02), output projections over sqrt(2 layers).
2. Each update: next-token loss of a batch of rows; gradients divided by their common root mean square; AdamW at the schedule's
   rate; then every matrix, embeddings too, is projected to the schedule's density (sparse_schedule.py). Biases and norms stay
   dense. The first update has rate 0: it only fills the optimizer's moments.
3. The result is a checkpoint folder that `load_host` reads, and its units: the MLP channels after the activation.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from tqdm.auto import tqdm

from swd_lens.baselines.learned.sparse_schedule import Schedule, normalized, project_
from swd_lens.baselines.learned.spec import TrainError
from swd_lens.inject.coder import CoderUnits


class SparsePretraining:
    """Args: config: a transformers GPT2Config; batches: (update, from 0) -> rows; schedule: see `Schedule`."""

    def __init__(
        self, config: Any, batches: Callable[[int], Int[Tensor, "_rows pos"]], schedule: Schedule, *, seed: int = 0
    ):
        from transformers import GPT2LMHeadModel

        torch.manual_seed(seed)
        config.activation_function = "gelu"  # exact, with erf
        config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
        self.network: Any = GPT2LMHeadModel(config)
        _initialize(self.network, seed)
        self.batches, self.schedule = batches, schedule
        self.update = 0
        self.losses: list[float] = []
        self.parameters = list(self.network.parameters())
        self.adam: Any = torch.optim.AdamW(
            self.parameters, lr=0.0, betas=(0.9, 0.95), eps=0.1, weight_decay=1e-3, foreach=False
        )

    def run(self, updates: int | None = None, *, progress: bool = True) -> None:
        """On to this many updates in all; None = the schedule's last."""
        last = self.schedule.updates if updates is None else updates
        with tqdm(total=last, initial=self.update, unit="update", disable=not progress, leave=False) as bar:
            while self.update < last:
                self._one()
                bar.set_postfix({"loss": f"{self.losses[-1]:.4g}", "density": f"{self.density:.3f}"}, refresh=False)
                bar.update()

    @property
    def density(self) -> float:
        """That of the last projection."""
        return self.schedule.density(max(0, self.update - 1) * self.schedule.tokens_per_update)

    def _one(self) -> None:
        tokens = self.update * self.schedule.tokens_per_update
        rows = self.batches(self.update)
        if rows.numel() != self.schedule.tokens_per_update:
            raise TrainError(
                f"update {self.update}: the batch has {rows.numel()} tokens, the schedule counts {self.schedule.tokens_per_update}"
            )
        logits = self.network(rows).logits[:, :-1].float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        if not math.isfinite(float(loss.detach())):
            raise TrainError(f"update {self.update}: the loss is {float(loss.detach())}; lower learning_rate")
        self.adam.zero_grad()
        loss.backward()
        for p, g in zip(self.parameters, normalized([p.grad for p in self.parameters]), strict=True):  # type: ignore[list-item]
            p.grad = g
        for group in self.adam.param_groups:
            group["lr"] = self.schedule.rate(tokens)
        self.adam.step()
        density = self.schedule.density(tokens)
        for matrix in _matrices(self.network):
            project_(matrix, density)
        self.losses.append(float(loss.detach()))
        self.update += 1


def _matrices(network: Any) -> Iterator[Tensor]:
    """Every matrix once, its rows the outputs: neurons of a projection, tokens or positions of an embedding (the head is tied)."""
    yield network.transformer.wte.weight.data
    yield network.transformer.wpe.weight.data
    for block in network.transformer.h:
        for linear in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj):
            yield linear.weight.data.T  # transformers' Conv1D holds (d_in, d_out)


@torch.no_grad()
def _initialize(network: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    n_layers = len(network.transformer.h)
    for name, p in network.named_parameters():
        if p.ndim == 2:
            std = 0.02 / math.sqrt(2 * n_layers) if name.endswith("c_proj.weight") else 0.02
            p.copy_(torch.randn(p.shape, generator=generator) * std)


class Channels(nn.Module):
    """An MLP's channels after the activation as units: z = gelu(x W_enc + b_enc), y = z W_dec + b_out."""

    def __init__(self, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor):
        super().__init__()
        for name, t in (("W_enc", w_in), ("b_enc", b_in), ("W_dec", w_out), ("b_out", b_out)):
            self.register_buffer(name, t.detach().clone())

    W_enc: Tensor
    b_enc: Tensor
    W_dec: Tensor
    b_out: Tensor

    def encode(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch unit"]:
        return nn.functional.gelu(x @ self.W_enc + self.b_enc)

    def decode(self, z: Float[Tensor, "*batch unit"]) -> Float[Tensor, "*batch d_out"]:
        return z @ self.W_dec + self.b_out

    @property
    def edges_per_unit(self) -> Int[Tensor, " unit"]:
        """Nonzeros read and written, and one more where the channel has a bias: the paper's count for this method."""
        return (self.W_enc != 0).sum(0) + (self.W_dec != 0).sum(1) + (self.b_enc != 0)


def channels_of(network: Any) -> dict[str, CoderUnits]:
    """Site -> units of every MLP of a GPT-2: blocks.{L}.mlp."""
    found = {}
    for layer, block in enumerate(network.transformer.h):
        c_fc, c_proj = block.mlp.c_fc, block.mlp.c_proj
        coder = Channels(c_fc.weight, c_fc.bias, c_proj.weight, c_proj.bias)
        d, width = c_fc.weight.shape
        site = f"blocks.{layer}.mlp"
        provenance = {"method": "sparse_pretrain", "site": site}
        found[site] = CoderUnits(coder, d, d, width, name="sparse_pretrain", provenance=provenance)
    return found
