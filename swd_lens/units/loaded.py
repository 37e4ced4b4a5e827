"""LoadedCoder: an SAE or transcoder of a folder (folders.py), computed as the package that wrote it computes it.

As found in sae-lens 6.54 and circuit-tracer 0.5.0:

    z = f(norm(x) @ W_enc + b_enc),    y = unnorm(z @ W_dec + b_dec)

a. SAELens takes b_dec off the normed x first, if apply_b_dec_to_input (not of transcoders); W_enc is (d_in, unit).
b. f of "standard" and "transcoder": ReLU. "jumprelu": ReLU, then 0 up to the threshold. "topk": ReLU of the k largest, 0 else;
   with rescale_acts_by_decoder_norm z is in units of |W_dec[i]|. "gated": ReLU of (W_enc * exp(r_mag)) with b_mag where W_enc
   with b_gate is above 0.
c. norm at run time: "layer_norm" (sample standard deviation, 1e-5 beside it) and "constant_norm_rescale" (length sqrt(d_in)).
d. circuit-tracer stores W_enc as (unit, d_in); with a threshold f is x where x lies above it (no ReLU), else ReLU.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import torch
from jaxtyping import Float
from torch import Tensor, nn

# Architecture -> its weights beyond W_enc, W_dec and b_dec.
ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "standard": ("b_enc",),
    "topk": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "gated": ("b_gate", "b_mag", "r_mag"),
    "transcoder": ("b_enc",),
    "jumprelu_transcoder": ("b_enc", "threshold"),
    "skip_transcoder": ("b_enc", "W_skip"),
    "jumprelu_skip_transcoder": ("b_enc", "threshold", "W_skip"),
}


class LoadedCoder(nn.Module):
    """An SAE or transcoder of a folder.

    Attributes:
        cfg: d_in, d_sae, d_out (of transcoders), normalize_activations, metadata (hooks), as SAELens' objects have them.
        W_enc, W_dec: (d_in, unit) and (unit, d_out); with the other weights of the architecture they are buffers.
    """

    W_enc: Tensor
    W_dec: Tensor
    b_enc: Tensor
    b_dec: Tensor
    b_gate: Tensor
    b_mag: Tensor
    r_mag: Tensor
    threshold: Tensor

    def __init__(self, architecture: str, cfg: SimpleNamespace, weights: Mapping[str, Tensor]):
        super().__init__()
        self.architecture, self.cfg = architecture, cfg
        for name, weight in weights.items():
            self.register_buffer(name, weight.contiguous())
        self._undo: Callable[[Tensor], Tensor] | None = None

    def encode(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch unit"]:
        """z of the units."""
        norm = self.cfg.normalize_activations
        if norm == "layer_norm":
            mean = x.mean(dim=-1, keepdim=True)
            deviation = (x - mean).std(dim=-1, keepdim=True)
            self._undo = lambda y: y * deviation + mean
            x = (x - mean) / (deviation + 1e-5)
        elif norm == "constant_norm_rescale":
            scale = self.cfg.d_in**0.5 / x.norm(dim=-1, keepdim=True)
            self._undo = lambda y: y / scale
            x = x * scale
        if self.cfg.apply_b_dec_to_input:
            x = x - self.b_dec
        if self.architecture == "gated":
            gate = (x @ self.W_enc + self.b_gate > 0).to(x.dtype)
            return gate * (x @ (self.W_enc * self.r_mag.exp()) + self.b_mag).relu()
        pre = x @ self.W_enc + self.b_enc
        if self.architecture == "topk":
            pre = pre * self.W_dec.norm(dim=-1) if self.cfg.rescale_acts_by_decoder_norm else pre
            largest, units = pre.topk(self.cfg.k, dim=-1)
            return torch.zeros_like(pre).scatter(-1, units, largest.relu())
        z = pre if self.cfg.negative_above_threshold else pre.relu()
        return z * (pre > self.threshold).to(z.dtype) if hasattr(self, "threshold") else z

    def decode(self, z: Float[Tensor, "*batch unit"]) -> Float[Tensor, "*batch d_out"]:
        """Sum what the units write; a norm at run time is undone as the latest encode applied it."""
        if self.architecture == "topk" and self.cfg.rescale_acts_by_decoder_norm:
            z = z * (1 / self.W_dec.norm(dim=-1))
        y = z @ self.W_dec + self.b_dec
        if self._undo is not None and not hasattr(self.cfg, "d_out"):
            y, self._undo = self._undo(y), None
        return y

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        return self.decode(self.encode(x))
