"""How a HookedTransformer's matrices lie in memory: as its forward multiplies them, (d_out, d_in).

TransformerLens has them as (d_in, d_out), or (head, d_in, d_head), and makes a transposed copy of each at every run: of those of
attention, of gated MLPs and of the unembedding. Of a matrix that lies transposed it copies nothing. Shapes and numbers stay, and
so do the results, to the bit. A model that somebody else has loaded stays as it is; fused.py spares it the largest copy, of W_U.
"""

from typing import Any

from torch import Tensor
from transformer_lens.components import Attention, GatedMLP, GroupedQueryAttention

from swd_lens.hosts.hooked.components import matrices


def lay_out(model: Any) -> None:
    """Have every matrix lie as the forward reads it; in place, the parameters stay the same objects."""
    _transpose(model.unembed.W_U)
    for block in model.blocks:
        attn, mlp = block.attn, block._modules.get("mlp")
        if isinstance(attn, Attention | GroupedQueryAttention):
            for part in "QKV":
                _transpose(matrices(attn, part)[0])  # of each head
            # (head, d_head, d_model) is read as (d_model, head x d_head).
            attn.W_O.data = attn.W_O.data.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        if isinstance(mlp, GatedMLP):
            for matrix in (mlp.W_gate, mlp.W_in, mlp.W_out):
                _transpose(matrix)


def _transpose(matrix: Tensor) -> None:
    matrix.data = matrix.data.mT.contiguous().mT
