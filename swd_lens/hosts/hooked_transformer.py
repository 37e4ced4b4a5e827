"""The HookedTransformer host (transformer_lens 3.9): where each matrix is, what feeds it, and how to swap it.

1. Four sites per block, each a (d_in, d_out) view of TransformerLens' parameters: attn_qkv (Q, K, V side by side,
   heads inside), attn_o (heads stacked), mlp_in, mlp_out.
2. A site's input and output are read with plain PyTorch hooks on TransformerLens' own modules.
3. A swap changes `__class__` of the MLP or attention module to a subclass whose forward asks the mounted projection
   instead of multiplying by W. The dense parameters stay where they are; the undo restores class and children, and
   `model.setup()` rebuilds hook_dict, so that the host is what it was, bit for bit.

Found by trying (shared/spec/injection.md): a mixin fails with "object layout differs", so the subclasses inherit singly.
W_O sits inside one long forward; that forward is left by an exception once z (its input) is known, which keeps rotary
embeddings, the KV cache, masks and sinks TransformerLens' own.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import einops
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache
from transformer_lens.components import MLP, Attention
from transformer_lens.utilities.addmm import batch_addmm

from swd_lens.hosts import Undo, UnsupportedHostError
from swd_lens.sites import Site

_SITES_OF_MODULE = {"attn": ("attn_qkv", "attn_o"), "mlp": ("mlp_in", "mlp_out")}


# ---------------------------------------------------------------------------------------------- factored components


class FactoredMLP(MLP):
    """MLP with mlp_in, mlp_out or both computed by mounted projections; the rest as TransformerLens computes it."""

    unit_projections: nn.ModuleDict

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        pre = self.hook_pre(self._project("mlp_in", x, self.W_in, self.b_in))
        post = self.act_fn(pre)
        if self.cfg.is_layer_norm_activation() and self.hook_mid is not None and self.ln is not None:
            post = self.ln(self.hook_mid(post))
        return self._project("mlp_out", self.hook_post(post), self.W_out, self.b_out)

    def _project(self, kind: str, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if kind in self.unit_projections:
            return self.unit_projections[kind](h, bias)
        return batch_addmm(bias, weight, h)


class _LeaveAtZ(Exception):
    """Carries attn_o's input out of TransformerLens' attention forward, just before it multiplies by W_O."""

    def __init__(self, z: Tensor):
        super().__init__()
        self.z = z


class FactoredAttention(Attention):
    """Attention with attn_qkv, attn_o or both computed by mounted projections."""

    unit_projections: nn.ModuleDict

    def forward(self, *args: Any, **kwargs: Any) -> Float[Tensor, "batch pos d_model"]:
        if "attn_o" not in self.unit_projections:
            return super().forward(*args, **kwargs)
        if self.cfg.use_attn_result:
            raise RuntimeError(
                "use_attn_result was switched on while attn_o is attached; detach first, or switch it off"
            )
        try:
            super().forward(*args, **kwargs)
        except _LeaveAtZ as left:
            h = einops.rearrange(left.z, "batch pos head d_head -> batch pos (head d_head)")
            return self.unit_projections["attn_o"](h, self.b_O)
        raise RuntimeError(
            "attention finished without asking for z: this transformer_lens differs from 3.9; please report it"
        )

    def calculate_z_scores(self, v: Tensor, pattern: Tensor) -> Tensor:
        z = super().calculate_z_scores(v, pattern)
        if "attn_o" in self.unit_projections:
            raise _LeaveAtZ(z)
        return z

    def calculate_qkv_matrices(
        self, query_input: Tensor, key_input: Tensor, value_input: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if "attn_qkv" not in self.unit_projections:
            return super().calculate_qkv_matrices(query_input, key_input, value_input)
        if query_input.ndim != 3:
            raise RuntimeError(
                "split inputs were switched on while attn_qkv is attached; detach first, or switch them off"
            )
        # Without split inputs the three are equal (LayerNorm of one residual), so query_input speaks for all.
        bias = torch.cat([self.b_Q.flatten(), self.b_K.flatten(), self.b_V.flatten()])
        packed = self.unit_projections["attn_qkv"](query_input, bias)
        q, k, v = einops.rearrange(
            packed, "batch pos (three head d_head) -> three batch pos head d_head", three=3, d_head=self.cfg.d_head
        )
        return self.hook_q(q), self.hook_k(k), self.hook_v(v)


_FACTORED = {"mlp": FactoredMLP, "attn": FactoredAttention}
_PLAIN = {"mlp": MLP, "attn": Attention}


# ---------------------------------------------------------------------------------------------- the host


class HookedTransformerHost:
    """See `swd_lens.hosts.Host`."""

    def __init__(self, model: Any):
        self.model = model
        _refuse_unsupported(model)

    def sites(self) -> list[Site]:
        cfg = self.model.cfg
        shapes = {
            "attn_qkv": (cfg.d_model, 3 * cfg.n_heads * cfg.d_head),
            "attn_o": (cfg.n_heads * cfg.d_head, cfg.d_model),
        }
        if not cfg.attn_only:
            shapes |= {"mlp_in": (cfg.d_model, cfg.d_mlp), "mlp_out": (cfg.d_mlp, cfg.d_model)}
        return [Site(layer, kind, *shape) for layer in range(cfg.n_layers) for kind, shape in shapes.items()]

    def weight(self, site: Site) -> Float[Tensor, "d_in d_out"]:
        block = self.model.blocks[site.layer]
        if site.kind == "mlp_in":
            weight = block.mlp.W_in
        elif site.kind == "mlp_out":
            weight = block.mlp.W_out
        elif site.kind == "attn_o":
            weight = einops.rearrange(block.attn.W_O, "head d_head d_out -> (head d_head) d_out")
        else:
            packed = torch.stack([block.attn.W_Q, block.attn.W_K, block.attn.W_V])
            weight = einops.rearrange(packed, "three head d_in d_head -> d_in (three head d_head)")
        return weight.detach().float().contiguous()

    # ------------------------------------------------------------------ reading

    @contextmanager
    def inputs(self, sites: Iterable[Site], use: Callable[[Site, Tensor], None]) -> Iterator[None]:
        with ExitStack() as stack:
            for site in sites:
                stack.callback(self._watch_input(site, use).remove)
            yield

    @contextmanager
    def outputs(self, sites: Iterable[Site], use: Callable[[Site, Tensor], None]) -> Iterator[None]:
        with ExitStack() as stack:
            for site in sites:
                for handle in self._watch_output(site, use):
                    stack.callback(handle.remove)
            yield

    def _watch_input(self, site: Site, use: Callable[[Site, Tensor], None]) -> Any:
        block = self.model.blocks[site.layer]
        # hook_normalized sits before LayerNorm's weight and bias, so the module's own argument is the true input.
        if site.kind == "mlp_in":
            return block.mlp.register_forward_pre_hook(lambda _, args: use(site, args[0]))
        if site.kind == "attn_qkv":
            return block.attn.register_forward_pre_hook(
                lambda _, args, kwargs: use(site, kwargs["query_input"] if "query_input" in kwargs else args[0]),
                with_kwargs=True,
            )
        if site.kind == "mlp_out":
            return block.mlp.hook_post.register_forward_hook(lambda _, args, out: use(site, out))
        return block.attn.hook_z.register_forward_hook(lambda _, args, out: use(site, out.flatten(-2)))

    def _watch_output(self, site: Site, use: Callable[[Site, Tensor], None]) -> list[Any]:
        block = self.model.blocks[site.layer]
        if site.kind == "mlp_in":
            return [block.mlp.hook_pre.register_forward_hook(lambda _, args, out: use(site, out))]
        if site.kind in ("mlp_out", "attn_o"):
            module = block.mlp if site.kind == "mlp_out" else block.attn
            return [module.register_forward_hook(lambda _, args, out: use(site, out))]
        parts: list[Tensor] = []

        def gather(_: nn.Module, args: Any, out: Tensor) -> None:
            parts.append(out.flatten(-2))
            if len(parts) == 3:
                use(site, torch.cat(parts, dim=-1))
                parts.clear()

        # TransformerLens computes q, k, v in this order in every forward.
        return [
            hook.register_forward_hook(gather) for hook in (block.attn.hook_q, block.attn.hook_k, block.attn.hook_v)
        ]

    # ------------------------------------------------------------------ running

    def freeze_prefix(self, tokens: Int[Tensor, "batch pos"]) -> Any:
        if tokens.shape[1] == 1:
            return None
        cfg, prefix = self.model.cfg, tokens[:, :-1]
        cache = TransformerLensKeyValueCache.init_cache(cfg, cfg.device, len(tokens))
        with torch.no_grad():
            self._run(prefix, past_kv_cache=cache, stop_at_layer=cfg.n_layers)
        cache.freeze()
        return cache

    def repeat_prefix(self, prefix: Any, times: int) -> Any:
        if prefix is None or times == 1:
            return prefix
        entries = [
            replace(e, past_keys=e.past_keys.repeat(times, 1, 1, 1), past_values=e.past_values.repeat(times, 1, 1, 1))
            for e in prefix.entries
        ]
        return TransformerLensKeyValueCache(entries, prefix.previous_attention_mask.repeat(times, 1), frozen=True)

    def last_logits(self, tokens: Int[Tensor, "batch pos"], prefix: Any = None) -> Float[Tensor, "batch vocab"]:
        n_layers = self.model.cfg.n_layers
        if prefix is None:
            # Unembed the last position only: for long prompts the rest is most of the work and memory.
            resid = self._run(tokens, stop_at_layer=n_layers)[:, -1:]
        else:
            resid = self._run(tokens[:, -1:], past_kv_cache=prefix, stop_at_layer=n_layers)
        return self.model(resid, start_at_layer=n_layers)[:, -1]

    def _run(self, tokens: Tensor, **how: Any) -> Tensor:
        tokens = tokens.to(self.model.cfg.device)
        # An explicit mask: otherwise TransformerLens guesses padding from the tokenizer's settings.
        return self.model(tokens, attention_mask=torch.ones_like(tokens), **how)

    # ------------------------------------------------------------------ swapping

    def is_swapped(self, site: Site) -> bool:
        module = self._module(site)[1]
        return site.kind in getattr(module, "unit_projections", ())

    def swap(self, site: Site, projection: nn.Module, hook: nn.Module) -> Undo:
        where, module = self._module(site)
        block, hook_attribute = self.model.blocks[site.layer], f"hook_{site.kind}_unit"

        def undo() -> None:
            # Takes out whatever is there, so that it also serves a swap that was interrupted half-way.
            block._modules.pop(hook_attribute, None)
            projections = module._modules.get("unit_projections", {})
            if site.kind in projections:
                del projections[site.kind]
            if not projections:
                module.__class__ = _PLAIN[where]
                module._modules.pop("unit_projections", None)
            self.model.setup()

        try:
            if "unit_projections" not in module._modules:
                module.unit_projections = nn.ModuleDict()
            module.unit_projections[site.kind] = projection
            module.__class__ = _FACTORED[where]
            setattr(block, hook_attribute, hook)
            self.model.setup()
        except BaseException:
            undo()
            raise
        return undo

    def _module(self, site: Site) -> tuple[str, Any]:
        where = next(name for name, kinds in _SITES_OF_MODULE.items() if site.kind in kinds)
        return where, getattr(self.model.blocks[site.layer], where)


def _refuse_unsupported(model: Any) -> None:
    """Name what stands in the way, before anything is touched."""
    cfg = model.cfg
    flags = {
        "use_attn_result": "attn_o would have one z per head instead of one vector per position",
        "use_split_qkv_input": "attn_qkv's input would differ from head to head",
        "use_attn_in": "attn_qkv's input would differ from head to head",
        "load_in_4bit": "quantized weights are not supported",
        "gated_mlp": "gated MLPs (mlp_gate) are not supported yet",
        "use_qk_norm": "query and key norms are not supported yet",
    }
    for flag, why in flags.items():
        if getattr(cfg, flag, False):
            raise UnsupportedHostError(f"cfg.{flag} is on: {why}. Load or configure the model without it.")
    if getattr(cfg, "positional_embedding_type", "") == "shortformer":
        raise UnsupportedHostError(
            "shortformer positions feed Q and K another input than V, so attn_qkv has no single input"
        )
    for where, plain in _PLAIN.items():
        if where == "mlp" and cfg.attn_only:
            continue
        found = type(getattr(model.blocks[0], where))
        if found not in (plain, _FACTORED[where]):
            raise UnsupportedHostError(
                f"blocks.0.{where} is a {found.__name__}; swd_lens injects into GPT-2-style blocks ({plain.__name__}) so far"
            )
