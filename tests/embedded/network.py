"""The embedded model's architecture in plain torch, for fast training; the same function as the loaded model.

1. GPT-2 style: token + learned position embeddings, pre-LayerNorm blocks (causal attention, gelu_new MLP), final
   LayerNorm, unembedding tied to the embedding.
2. Attention may be kept within documents (packed rows).
3. `hooked_state` renames and reshapes the parameters to TransformerLens' names; training checks that both give equal
   logits. `gpt2_state` (swd_lens/hosts/embedded/__init__.py) goes on from there to the names of transformers' GPT-2.

The initialization starts two heads of layer 0 as previous-token heads and every head as a weak copier: induction, which
IOI and docstring are made of, is then found after less than a million tokens instead of several. Nothing is frozen.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from swd_lens.hosts.embedded import Shape


class Block(nn.Module):
    """One pre-LayerNorm transformer block; matrices are (d_in, d_out) as in GPT-2."""

    def __init__(self, shape: Shape):
        super().__init__()
        d = shape.d_model
        self.n_heads = shape.n_heads
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.w_qkv, self.b_qkv = nn.Parameter(torch.empty(d, 3 * d)), nn.Parameter(torch.zeros(3 * d))
        self.w_o, self.b_o = nn.Parameter(torch.empty(d, d)), nn.Parameter(torch.zeros(d))
        self.w_in, self.b_in = nn.Parameter(torch.empty(d, shape.d_mlp)), nn.Parameter(torch.zeros(shape.d_mlp))
        self.w_out, self.b_out = nn.Parameter(torch.empty(shape.d_mlp, d)), nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, pos, d = x.shape
        qkv = torch.addmm(self.b_qkv, self.ln1(x).view(-1, d), self.w_qkv)
        q, k, v = qkv.view(batch, pos, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + torch.addmm(self.b_o, z.transpose(1, 2).reshape(-1, d), self.w_o).view_as(x)
        hidden = F.gelu(torch.addmm(self.b_in, self.ln2(x).view(-1, d), self.w_in), approximate="tanh")
        return x + torch.addmm(self.b_out, hidden, self.w_out).view_as(x)


class Network(nn.Module):
    """The whole model; `forward` returns logits."""

    def __init__(self, shape: Shape, seed: int = 0):
        super().__init__()
        self.shape = shape
        self.w_e = nn.Parameter(torch.empty(shape.d_vocab, shape.d_model))
        self.w_pos = nn.Parameter(torch.empty(shape.n_ctx, shape.d_model))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layers))
        self.ln_final = nn.LayerNorm(shape.d_model)
        initialize(self, seed)

    def each_block(self) -> Iterator[Block]:
        """The blocks, first to last."""
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block

    def forward(
        self, tokens: Int[Tensor, "batch pos"], documents: Int[Tensor, "batch pos"] | None = None
    ) -> Float[Tensor, "batch pos vocab"]:
        """Logits; `documents` numbers the document of each token and keeps attention within equal numbers."""
        n = tokens.shape[1]
        mask = None
        if documents is not None:
            causal = torch.ones(n, n, dtype=torch.bool).tril()
            mask = ((documents[:, :, None] == documents[:, None, :]) & causal)[:, None]
        x = F.embedding(tokens, self.w_e) + self.w_pos[:n]
        for block in self.each_block():
            x = block(x, mask)
        return self.ln_final(x) @ self.w_e.T


EMBED_STD = 0.05  # with positions at RMS .08, words and places weigh about the same after the first LayerNorm
POS_RMS = 0.08
PREVIOUS_GAIN = 1.5  # makes the score of the previous token about 7 logits above its neighbours'
COPY_GAIN = 0.5  # OV of every head starts as half a projector onto 32 random directions


@torch.no_grad()
def initialize(network: Network, seed: int) -> None:
    """Draw all parameters from `seed` (module docstring: previous-token heads, weak copiers, sinusoidal positions)."""
    shape, generator = network.shape, torch.Generator().manual_seed(seed)
    d, d_head = shape.d_model, shape.d_head
    network.w_e.normal_(0, EMBED_STD, generator=generator)
    # frequencies from 2 (tells neighbours apart) down to half a turn over the context
    frequencies = torch.logspace(math.log10(2.0), math.log10(math.pi / shape.n_ctx), d // 2)
    angles = torch.arange(shape.n_ctx)[:, None] * frequencies
    network.w_pos.copy_(POS_RMS * math.sqrt(2) * torch.stack((angles.sin(), angles.cos()), -1).flatten(1))
    for layer, block in enumerate(network.each_block()):
        block.w_qkv.normal_(0, d**-0.5, generator=generator)
        block.w_in.normal_(0, d**-0.5, generator=generator)
        block.w_out.normal_(0, 0.5 * shape.d_mlp**-0.5, generator=generator)
        for head in range(shape.n_heads):
            columns = slice(head * d_head, (head + 1) * d_head)
            basis, _ = torch.linalg.qr(torch.randn(d, d_head, generator=generator))
            block.w_qkv[:, 2 * d :][:, columns] = math.sqrt(COPY_GAIN) * basis
            block.w_o[columns] = math.sqrt(COPY_GAIN) * basis.T
            if layer == 0 and head < 2:
                _look_back(block.w_qkv, frequencies, d, columns, offset=head + 1)


def _look_back(w_qkv: Tensor, frequencies: Tensor, d: int, columns: slice, offset: int) -> None:
    """Make a head attend `offset` positions back: keys read sine and cosine, queries the same turned by -offset."""
    for i in range((columns.stop - columns.start) // 2):
        sin, cos, column = 2 * i, 2 * i + 1, columns.start + 2 * i
        angle = frequencies[i] * offset
        w_qkv[:, [column, column + 1, d + column, d + column + 1]] = 0.0
        w_qkv[sin, d + column] = w_qkv[cos, d + column + 1] = PREVIOUS_GAIN
        # sin(w(p - o)) = sin(wp)cos(wo) - cos(wp)sin(wo);  cos(w(p - o)) = cos(wp)cos(wo) + sin(wp)sin(wo)
        w_qkv[sin, column], w_qkv[cos, column] = PREVIOUS_GAIN * angle.cos(), -PREVIOUS_GAIN * angle.sin()
        w_qkv[cos, column + 1], w_qkv[sin, column + 1] = PREVIOUS_GAIN * angle.cos(), PREVIOUS_GAIN * angle.sin()


def hooked_state(network: Network) -> dict[str, Tensor]:
    """The parameters under TransformerLens' names and shapes; the tied unembedding is left out."""
    shape = network.shape
    heads, d, d_head = shape.n_heads, shape.d_model, shape.d_head
    state: dict[str, Tensor] = {"embed.W_E": network.w_e, "pos_embed.W_pos": network.w_pos}
    state |= {"ln_final.w": network.ln_final.weight, "ln_final.b": network.ln_final.bias}
    for i, block in enumerate(network.each_block()):
        prefix = f"blocks.{i}."
        for name, norm in (("ln1", block.ln1), ("ln2", block.ln2)):
            state |= {f"{prefix}{name}.w": norm.weight, f"{prefix}{name}.b": norm.bias}
        for j, letter in enumerate("QKV"):
            weight, bias = block.w_qkv[:, j * d : (j + 1) * d], block.b_qkv[j * d : (j + 1) * d]
            state[f"{prefix}attn.W_{letter}"] = weight.view(d, heads, d_head).transpose(0, 1)
            state[f"{prefix}attn.b_{letter}"] = bias.view(heads, d_head)
        state |= {f"{prefix}attn.W_O": block.w_o.view(heads, d_head, d), f"{prefix}attn.b_O": block.b_o}
        state |= {f"{prefix}mlp.W_in": block.w_in, f"{prefix}mlp.b_in": block.b_in}
        state |= {f"{prefix}mlp.W_out": block.w_out, f"{prefix}mlp.b_out": block.b_out}
    return {name: value.detach().clone().contiguous() for name, value in state.items()}
