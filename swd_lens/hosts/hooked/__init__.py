"""The HookedTransformer host (transformer_lens 3.9): where each matrix is, what feeds it, and how to swap it.

1. The sites of a block, each a (d_in, d_out) view of TransformerLens' parameters: attn_qkv (Q, K, V side by side, heads
   inside; apart: attn_q, attn_k, attn_v), attn_o (heads stacked), mlp_in, mlp_out, and mlp_gate of gated MLPs. Grouped
   keys and values have as many heads as are stored.
2. A site's input and output are read with plain PyTorch hooks on TransformerLens' own modules.
3. A swap mounts a projection in the MLP or attention module and changes the module's class (components.py). The dense parameters
   stay where they are; the undo restores class, children and hook_dict, so that the host is what it was, bit for bit.
"""

from collections.abc import Mapping
from typing import Any

import einops
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.components import GatedMLP
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES

from swd_lens.base.errors import UnsupportedHostError
from swd_lens.hosts.families import family_of
from swd_lens.hosts.hooked import fused
from swd_lens.hosts.hooked.components import FACTORED_TO_PLAIN, PLAIN_TO_FACTORED, matrices, model_with_units, plain_model
from swd_lens.hosts.hooked.running import HookedRuns
from swd_lens.hosts.host import Affine, Host, Register, Use, is_centered, require_matrix, require_unattached, value_constant
from swd_lens.hosts.sites import PACKED, READS_ATTENTION_INPUT, RESIDUAL_MATRICES, BlockShapes, Site
from swd_lens.hosts.weights import refusals, shadow_methods

# Everything that rewrites weights: its result would not reach the units.
_REWRITES = (
    *("load_state_dict", "load_and_process_state_dict", "process_weights_", "fold_layer_norm", "fold_value_biases"),
    *("center_writing_weights", "center_unembed", "refactor_factored_attn_matrices", "init_weights"),
)
_PARTS = {"attn_q": "Q", "attn_k": "K", "attn_v": "V"}


class HookedTransformerHost(HookedRuns, Host):
    """See `swd_lens.hosts.Host`; how it runs is in running.py."""

    def __init__(self, model: Any):
        self.model = model
        # Name what stands in the way, before anything is touched.
        cfg = model.cfg
        if getattr(cfg, "load_in_4bit", False):
            raise UnsupportedHostError("cfg.load_in_4bit is on: quantized weights are not supported. Load the model without it.")
        if getattr(cfg, "positional_embedding_type", "") == "shortformer":
            raise UnsupportedHostError(
                "cfg.positional_embedding_type is 'shortformer': it feeds Q and K another input than V, so attn_qkv has no "
                "single input. Take a model with other positions"
            )
        for where in ("attn",) if cfg.attn_only else ("attn", "mlp"):
            component = type(getattr(model.blocks[0], where))
            if component not in PLAIN_TO_FACTORED and component not in FACTORED_TO_PLAIN:
                known = ", ".join(plain.__name__ for plain in PLAIN_TO_FACTORED)
                raise UnsupportedHostError(
                    f"blocks.0.{where} is a {component.__name__}; swd_lens injects into {known}. A TransformerBridge leaves "
                    'such parts out: load_host(name, kind="bridge")'
                )

    def blocks(self) -> tuple[BlockShapes, ...]:
        cfg = self.model.cfg
        widths = {kind: matrices(self.model.blocks[0].attn, part)[1].numel() for kind, part in _PARTS.items()}
        shapes = {"attn_qkv": (cfg.d_model, sum(widths.values()))}
        shapes |= {kind: (cfg.d_model, width) for kind, width in widths.items()}
        shapes["attn_o"] = (cfg.n_heads * cfg.d_head, cfg.d_model)
        if not cfg.attn_only:
            if cfg.gated_mlp:
                shapes["mlp_gate"] = (cfg.d_model, cfg.d_mlp)
            shapes |= {"mlp_in": (cfg.d_model, cfg.d_mlp), "mlp_out": (cfg.d_mlp, cfg.d_model)}
            shapes["mlp"] = (cfg.d_model, cfg.d_model)
        # A model that was made from a configuration (architecture None) is seen as GPT-2 is.
        packed = cfg.original_architecture is None or family_of(cfg.original_architecture).packed
        alternatives = ("mlp", *_PARTS) if packed else ("mlp", "attn_qkv")
        return (BlockShapes(tuple((kind, *shape) for kind, shape in shapes.items()), alternatives),) * cfg.n_layers

    def weight(self, site: Site) -> Float[Tensor, "d_in d_out"]:
        require_matrix(site)
        block = self.model.blocks[site.layer]
        if site.kind == "attn_qkv":
            weight = torch.cat([_flat(matrices(block.attn, part)[0]) for part in "QKV"], dim=1)
        elif site.kind in _PARTS:
            weight = _flat(matrices(block.attn, _PARTS[site.kind])[0])
        elif site.kind == "attn_o":
            weight = block.attn.W_O.flatten(0, 1)
        else:
            weight = getattr(block.mlp, f"W_{site.kind.removeprefix('mlp_')}")
        return weight.detach().float().contiguous()

    def stored_parameters(self, site: Site) -> list[tuple[Mapping[str, Any], str]]:
        parts, kept = PACKED.get(site.kind, (site.kind,)), self._module(site)._parameters
        names = [f"W_{part.partition('_')[2]}" for part in parts]
        if site.kind.startswith("attn"):  # grouped keys and values are kept as _W_K and _W_V
            names = [f"_{name.upper()}" if f"_{name.upper()}" in kept else name.upper() for name in names]
        return [(kept, name) for name in names if name in kept]

    def affine(self, site: Site) -> Affine | None:
        block, cfg = self.model.blocks[site.layer], self.model.cfg
        if site.kind == "attn_o":
            value = next(s for s in (*self.sites(), *self.alternatives()) if (s.layer, s.kind) == (site.layer, "attn_v"))
            norm, bias = self.affine(value), matrices(block.attn, "V")[1]
            shift = None if norm is None else norm.shift
            return Affine(shift=value_constant(bias, shift, self.weight(value), cfg.d_head, site.d_in))
        if site.kind == "mlp_out":
            return self.norm_affine(getattr(block.mlp, "ln", None)) if cfg.is_layer_norm_activation() else Affine()
        if cfg.original_architecture in POST_NORM_ARCHITECTURES:
            return None  # the norm follows the matrices: nothing can be folded into them
        return self.norm_affine(block.ln1 if site.kind in READS_ATTENTION_INPUT else block.ln2)

    def norm_before(self, site: Site) -> Affine | None:
        if site.kind in RESIDUAL_MATRICES:
            return None
        return Affine() if self.model.cfg.original_architecture in POST_NORM_ARCHITECTURES else self.affine(site)

    def norm_behind(self, site: Site) -> nn.Module | None:
        name = "ln1" if site.kind == "attn_o" else "ln2"
        if self.model.cfg.original_architecture not in POST_NORM_ARCHITECTURES:
            name = f"{name}_post"
        return self.model.blocks[site.layer]._modules.get(name)

    def processing(self) -> dict[str, bool]:
        writes = [site for site in self.sites() if site.layer == 0 and site.kind in RESIDUAL_MATRICES]
        return {
            "fold_ln": str(self.model.cfg.normalization_type).endswith("Pre"),
            "center_writing_weights": all(is_centered(self.weight(site)) for site in writes),
            "fold_value_biases": not any(bool(matrices(block.attn, "V")[1].any()) for block in self.model.blocks),
        }

    def watch_input(self, site: Site, use: Use, register: Register) -> None:
        block = self.model.blocks[site.layer]
        # hook_normalized sits before LayerNorm's weight and bias, so the module's own argument is the true input.
        if site.kind in ("mlp_in", "mlp_gate", "mlp"):
            handle = block.mlp.register_forward_pre_hook(lambda _, args: use(site, args[0]))
        elif site.kind in READS_ATTENTION_INPUT:
            index = {"attn_k": 1, "attn_v": 2}.get(site.kind, 0)
            name = ("query_input", "key_input", "value_input")[index]
            handle = block.attn.register_forward_pre_hook(
                lambda _, args, kwargs: use(site, kwargs[name] if name in kwargs else args[index]), with_kwargs=True
            )
        elif site.kind == "mlp_out":
            handle = block.mlp.hook_post.register_forward_hook(lambda _, args, out: use(site, out))
        else:
            handle = block.attn.hook_z.register_forward_hook(lambda _, args, out: use(site, out.flatten(-2)))
        register(handle.remove)

    def watch_output(self, site: Site, use: Use, register: Register) -> None:
        block, cfg = self.model.blocks[site.layer], self.model.cfg
        if site.kind not in READS_ATTENTION_INPUT:
            shown = self._module(site)
            if site.kind in ("mlp_in", "mlp_gate"):
                linear = isinstance(block.mlp, GatedMLP) and site.kind == "mlp_in"
                shown = block.mlp.hook_pre_linear if linear else block.mlp.hook_pre
            register(shown.register_forward_hook(lambda _, args, out: use(site, out)).remove)
            return
        kinds = tuple(_PARTS) if site.kind == "attn_qkv" else (site.kind,)
        repeats = cfg.n_key_value_heads is not None and cfg.ungroup_grouped_query_attention
        parts: list[Tensor] = []

        def gather(_: nn.Module, args: Any, out: Tensor) -> None:
            # One head per stored key or value head, also where the configuration repeats them.
            repeated = repeats and kinds[len(parts)] != "attn_q"
            parts.append(out[:, :, :: cfg.n_heads // cfg.n_key_value_heads] if repeated else out)
            if len(parts) == len(kinds):
                use(site, torch.cat([part.flatten(-2) for part in parts], dim=-1))
                parts.clear()

        # TransformerLens computes q, k, v in this order in every forward.
        for kind in kinds:
            register(getattr(block.attn, f"hook_{_PARTS[kind].lower()}").register_forward_hook(gather).remove)

    def readout(self) -> tuple[Float[Tensor, " d_model"] | None, Float[Tensor, "d_model vocab"]]:
        return self.norm_affine(getattr(self.model, "ln_final", None)).scale, self.model.W_U.detach().float()

    def norm_affine(self, norm: Any) -> Affine:
        # LayerNormPre and RMSNormPre have neither weight nor bias, RMSNorm no bias.
        weight, bias = getattr(norm, "w", None), getattr(norm, "b", None)
        return Affine(*(None if t is None else t.detach().float() for t in (weight, bias)))

    def is_swapped(self, site: Site) -> bool:
        return site.kind in getattr(self._module(site), "unit_projections", ())

    def fuse_attention(self, register: Register) -> bool:
        return fused.cover(self.model, register, whole=True)

    def share_prefix(self, register: Register) -> bool:
        return fused.cover(self.model, register, whole=False)

    def guard(self, reason: str, register: Register) -> None:
        model = self.model

        def undo() -> None:
            # Pushed before the swaps of an attachment, so run after theirs; another attachment's may still stand.
            if not any("unit_projections" in part._modules for block in model.blocks for part in block.children()):
                model.__class__ = plain_model(type(model))

        register(undo)
        model.__class__ = model_with_units(type(model))
        shadow_methods(self.model, refusals(_REWRITES, reason), register)

    def swap(self, site: Site, projection: nn.Module, hook: HookPoint, register: Register) -> None:
        # Settings under which a site's z would not be one vector per position.
        flags = {}
        if site.kind == "attn_o":
            flags["use_attn_result"] = "would have one z per head instead of one vector per position"
        if site.kind in READS_ATTENTION_INPUT:
            flags["use_split_qkv_input"] = flags["use_attn_in"] = "would read another input from head to head"
        for flag, why in flags.items():
            if getattr(self.model.cfg, flag, False):
                raise UnsupportedHostError(f"cfg.{flag} is on: {site.name} {why}. Switch it off: model.set_{flag}(False).")
        module, block = self._module(site), self.model.blocks[site.layer]
        mounted = module._modules.get("unit_projections", ())
        require_unattached(site, {f"blocks.{site.layer}.{kind}" for kind in mounted})
        hook_attribute = f"hook_{site.kind}_unit"

        def undo() -> None:
            # Takes out what this swap put in and nothing else, so that it serves twice and after half a swap.
            projections = module._modules.get("unit_projections", {})
            if site.kind in projections and projections[site.kind] is projection:
                del projections[site.kind]
            if not projections:
                module.__class__ = FACTORED_TO_PLAIN.get(type(module), type(module))
                module._modules.pop("unit_projections", None)
            if block._modules.get(hook_attribute) is hook:
                del block._modules[hook_attribute]
            # Take out of the model's dictionaries what is no longer in the model: this hook, and unmounted projections.
            where = "attn" if site.kind.startswith("attn") else "mlp"
            root = f"blocks.{site.layer}.{where}.unit_projections"
            mounted = self._module(site)._modules.get("unit_projections")
            for name in [name for name in self.model.mod_dict if name == root or name.startswith(root + ".")]:
                kind = name.removeprefix(root).lstrip(".").partition(".")[0]
                if mounted is None or (kind and kind not in mounted):
                    del self.model.mod_dict[name]
            for names in (self.model.hook_dict, self.model.mod_dict):
                if names.get(site.hook_name) is hook:
                    del names[site.hook_name]

        register(undo)
        if "unit_projections" not in module._modules:
            module.unit_projections = nn.ModuleDict().train(module.training)
        module.unit_projections[site.kind] = projection
        module.__class__ = PLAIN_TO_FACTORED.get(type(module), type(module))
        setattr(block, hook_attribute, hook)
        # What model.setup() would do, for this one hook: setup() walks the whole model.
        hook.name = site.hook_name
        self.model.hook_dict[site.hook_name] = self.model.mod_dict[site.hook_name] = hook

    def _module(self, site: Site) -> Any:
        return getattr(self.model.blocks[site.layer], "attn" if site.kind.startswith("attn") else "mlp")


def _flat(weight: Float[Tensor, "head d_in d_head"]) -> Float[Tensor, "d_in d_out"]:
    return einops.rearrange(weight, "head d_in d_head -> d_in (head d_head)")
