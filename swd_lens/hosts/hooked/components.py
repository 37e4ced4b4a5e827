"""TransformerLens 3.9's MLP and attention modules with some of their matrices computed by mounted projections.

1. A swap changes `__class__` of a module to the subclass here and mounts projections in its `unit_projections`.
2. Matrices without a projection keep TransformerLens' own expressions. The model's own stacks of matrices (`model.W_out`) are
   refused for kinds of which one is mounted, as on a bridge.
3. W_O sits inside one long forward (abstract_attention.py:215): that forward is left by an exception once z, its input, is
   known, which keeps rotary embeddings, the KV cache, masks and sinks TransformerLens' own.
4. `lay_out` has the matrices of a loaded model lie as its forward multiplies them.

Found by trying (shared/spec/injection.md): a mixin fails with "object layout differs", so the subclasses inherit singly and
share functions instead.
"""

from collections.abc import Callable
from typing import Any

import einops
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.components import MLP, Attention, GatedMLP, GroupedQueryAttention
from transformer_lens.utilities.addmm import batch_addmm
from transformer_lens.utilities.attention import simple_attn_linear

from swd_lens.base.errors import legible


def _project(module: Any, kind: str, h: Tensor, bias: Tensor | None, dense: Callable[[Tensor], Tensor]) -> Tensor:
    """The projection mounted at a kind, else the dense product."""
    if kind not in module.unit_projections:
        return dense(h)
    return module.unit_projections[kind](h, bias, dense)


class FactoredMLP(MLP):
    """mlp_in, mlp_out or both (or the whole, "mlp") computed by mounted projections."""

    unit_projections: nn.ModuleDict

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        return _project(self, "mlp", x, None, self._matrices)

    def _matrices(self, x: Tensor) -> Tensor:
        pre = _project(self, "mlp_in", x, self.b_in, lambda h: batch_addmm(self.b_in, self.W_in, h))
        post = self.act_fn(self.hook_pre(pre))
        if self.cfg.is_layer_norm_activation() and self.hook_mid is not None and self.ln is not None:
            post = self.ln(self.hook_mid(post))
        post = self.hook_post(post)
        return _project(self, "mlp_out", post, self.b_out, lambda h: batch_addmm(self.b_out, self.W_out, h))


class FactoredGatedMLP(GatedMLP):
    """mlp_gate, mlp_in, mlp_out or several of them (or the whole, "mlp") computed by mounted projections."""

    unit_projections: nn.ModuleDict

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        return _project(self, "mlp", x, None, self._matrices)

    def _matrices(self, x: Tensor) -> Tensor:
        # b_in is added after the gate's product (gated_mlp.py:26), so the projections of x have no bias.
        pre = _project(self, "mlp_gate", x, None, lambda h: F.linear(h, self.W_gate.T.contiguous()))
        gate = self.act_fn(self.hook_pre(pre))
        if self.cfg.is_layer_norm_activation() and self.hook_mid is not None and self.ln is not None:
            post = self.ln(self.hook_mid(gate))
        else:
            linear = _project(self, "mlp_in", x, None, lambda h: F.linear(h, self.W_in.T.contiguous()))
            post = gate * self.hook_pre_linear(linear) + self.b_in
        post = self.hook_post(post)
        return _project(self, "mlp_out", post, self.b_out, lambda h: F.linear(h, self.W_out.T.contiguous(), self.b_out))


class _LeaveAtZ(Exception):
    """Carries attn_o's input, its only argument, out of TransformerLens' attention forward, just before W_O.

    Without an __init__ of its own: torch.compile cannot trace one.
    """


def leave_at_z(attn: Any, z: Tensor) -> Tensor:
    """z, where attn_o is the module's own; else its forward ends here, and the projection takes over."""
    if "attn_o" in attn._modules.get("unit_projections", ()):
        raise _LeaveAtZ(z)
    return z


def _with_units(plain: Any, name: str) -> type:
    """A subclass of an attention class: attn_o, and attn_qkv or some of attn_q, attn_k, attn_v, by mounted projections."""

    class Factored(plain):
        unit_projections: nn.ModuleDict

        def forward(self, *args: Any, **kwargs: Any) -> Float[Tensor, "batch pos d_model"]:
            if "attn_o" not in self.unit_projections:
                return super().forward(*args, **kwargs)
            if self.cfg.use_attn_result:
                raise RuntimeError(
                    "cfg.use_attn_result was switched on while attn_o is attached; detach first, or switch it off: "
                    "model.set_use_attn_result(False)"
                )
            try:
                super().forward(*args, **kwargs)
            except _LeaveAtZ as left:
                h = left.args[0].flatten(-2)
                return _project(self, "attn_o", h, self.b_O, lambda h: F.linear(h, self.W_O.flatten(0, 1).T, self.b_O))
            raise RuntimeError(
                "attention finished without asking for z: this transformer_lens differs from 3.9; please report it"
            )

        def calculate_z_scores(self, v: Tensor, pattern: Tensor) -> Tensor:
            return leave_at_z(self, super().calculate_z_scores(v, pattern))

        def calculate_qkv_matrices(
            self, query_input: Tensor, key_input: Tensor, value_input: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            if not any(kind in self.unit_projections for kind in ("attn_qkv", "attn_q", "attn_k", "attn_v")):
                return super().calculate_qkv_matrices(query_input, key_input, value_input)
            return _qkv(self, query_input, key_input, value_input)

    Factored.__name__ = Factored.__qualname__ = name  # as at module level: it can be pickled and is named in prints
    return Factored


FactoredAttention = _with_units(Attention, "FactoredAttention")
FactoredGroupedQueryAttention = _with_units(GroupedQueryAttention, "FactoredGroupedQueryAttention")


def _qkv(attn: Any, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (batch, pos, head, d_head), hooked and normalized as upstream does."""
    if inputs[0].ndim != 3:
        flag = "use_attn_in" if attn.cfg.use_attn_in else "use_split_qkv_input"
        raise RuntimeError(
            f"cfg.{legible(flag)} was switched on while units read the attention's input; detach first, or switch it off: "
            f"model.set_{legible(flag)}(False)"
        )

    def dense(part: str, h: Tensor) -> Tensor:
        return simple_attn_linear(h, *matrices(attn, part)).flatten(-2)

    biases = [matrices(attn, part)[1].flatten() for part in "QKV"]
    if "attn_qkv" in attn.unit_projections:
        # Without split inputs the three are equal (a normalization of one residual), so the query's speaks for all.
        y = _project(attn, "attn_qkv", inputs[0], torch.cat(biases), lambda h: torch.cat([dense(part, h) for part in "QKV"], -1))
        projected = y.split([len(bias) for bias in biases], dim=-1)
    else:
        projected = [
            _project(attn, f"attn_{part.lower()}", h, bias, lambda h, part=part: dense(part, h))
            for part, h, bias in zip("QKV", inputs, biases, strict=True)
        ]
    d_head = attn.cfg.d_head
    q, k, v = (einops.rearrange(y, "batch pos (head d_head) -> batch pos head d_head", d_head=d_head) for y in projected)
    if isinstance(attn, GroupedQueryAttention) and attn.cfg.ungroup_grouped_query_attention:
        k, v = (x.repeat_interleave(attn.repeat_kv_heads, dim=2) for x in (k, v))
    q, k, v = attn.hook_q(q), attn.hook_k(k), attn.hook_v(v)
    if attn.cfg.use_qk_norm:
        norms: Any = (attn.q_norm, attn.k_norm)
        q, k = (attn._apply_qk_norm(x, norm) for x, norm in zip((q, k), norms, strict=True))
    return q, k, v


def matrices(attn: Any, part: str) -> tuple[Float[Tensor, "head d_in d_head"], Float[Tensor, "head d_head"]]:
    """W and b of "Q", "K" or "V", with as many heads as are stored (grouped: those of keys and values)."""
    grouped = part != "Q" and isinstance(attn, GroupedQueryAttention)
    under = "_" if grouped else ""
    return getattr(attn, f"{under}W_{part}"), getattr(attn, f"{under}b_{part}")


def lay_out(model: Any) -> None:
    """Have every matrix lie as the forward multiplies it, (d_out, d_in); in place, the parameters stay the same objects.

    TransformerLens has them as (d_in, d_out), or (head, d_in, d_head), and makes a transposed copy of each at every run: of those
    of attention, of gated MLPs and of the unembedding. Of a matrix that lies transposed it copies nothing. Shapes and numbers
    stay, and so do the results, to the bit. A model that somebody else has loaded stays as it is; fused.py spares it the largest
    copy, of W_U.
    """
    transposed = [model.unembed.W_U]
    for block in model.blocks:
        attn, mlp = block.attn, block._modules.get("mlp")
        if isinstance(attn, Attention | GroupedQueryAttention):
            transposed += [matrices(attn, part)[0] for part in "QKV"]  # of each head
            # (head, d_head, d_model) is read as (d_model, head x d_head).
            attn.W_O.data = attn.W_O.data.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        if isinstance(mlp, GatedMLP):
            transposed += [mlp.W_gate, mlp.W_in, mlp.W_out]
    for matrix in transposed:
        matrix.data = matrix.data.mT.contiguous().mT


# Matrices that the model stacks over the layers (HookedTransformer.W_Q ...) -> the kinds of sites that they hold.
_STACKED = {
    **{f"W_{part}": (f"attn_{part.lower()}", "attn_qkv") for part in "QKV"},
    "W_O": ("attn_o",),
    **{f"W_{part}": (f"mlp_{part}", "mlp") for part in ("in", "gate", "out")},
}


# Class of a model -> its class while units are attached.
_MODELS: dict[type, type] = {}


def model_with_units(plain: type) -> type:
    """The model's class while units are attached: a stack with a matrix that is not in use cannot be read, nor what is made of
    it (QK, OV, composition scores). It is made here and nobody can import it: a pickle names the plain class."""
    if plain in _MODELS.values():
        return plain

    def stack(name: str) -> property:
        def read(model: Any) -> Any:
            for layer, block in enumerate(model.blocks):
                for part in (block.attn, block._modules.get("mlp")):
                    mounted = () if part is None else part._modules.get("unit_projections", ())
                    if kinds := [kind for kind in _STACKED[name] if kind in mounted]:
                        site = f"blocks.{layer}.{kinds[0]}"
                        raise RuntimeError(
                            f"model.{legible(name)} was read while {site} is attached: its dense weight is not in use. "
                            "Detach first, or read the factors: factors[site].read @ factors[site].write"
                        )
            return getattr(plain, name).fget(model)

        return property(read)

    def reduced(model: Any, protocol: Any) -> tuple[Any, ...]:  # what pickles and copies are made of
        _, _, *state = object.__reduce_ex__(model, 4)
        return _empty, (plain_model(type(model)),), *state

    if plain not in _MODELS:
        own = {name: stack(name) for name in _STACKED} | {"__reduce_ex__": reduced}
        _MODELS[plain] = type(plain.__name__, (plain,), own)
    return _MODELS[plain]


def _empty(plain: type) -> Any:
    """A model with units that has nothing in it yet."""
    with_units: Any = model_with_units(plain)
    return with_units.__new__(with_units)


def plain_model(with_units: type) -> type:
    """The model's class without units."""
    return next((plain for plain, other in _MODELS.items() if other is with_units), with_units)


PLAIN_TO_FACTORED: dict[type, type] = {
    MLP: FactoredMLP,
    GatedMLP: FactoredGatedMLP,
    Attention: FactoredAttention,
    GroupedQueryAttention: FactoredGroupedQueryAttention,
}
FACTORED_TO_PLAIN = {factored: plain for plain, factored in PLAIN_TO_FACTORED.items()}
