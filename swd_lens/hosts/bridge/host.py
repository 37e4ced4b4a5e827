"""The TransformerBridge host (transformer_lens 3.9 and 4.x): where each matrix is, what feeds it, and how to swap it.

1. Sites are read off the bridge's components: attn.{q,k,v,o}, mlp.{in,gate,out}, and the projections of linear attention.
   attn_qkv is q, k, v side by side, whatever order the checkpoint keeps them in; it is the site proper where the checkpoint
   holds them as one matrix, and an alternative elsewhere.
2. Inputs and outputs are read with plain PyTorch hooks on the leaves (leaves.py).
3. A swap mounts the projection on the leaf and the HookPoint on the block and in the bridge's registry. Both are needed:
   hook_dict reads the registry alone, and a rescan of the model looks at attributes alone.
4. What weight processing can fold away of a site's input is in norms.py, a prompt's kept prefix in cache.py.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.model_bridge.generalized_components import NormalizationBridge

from swd_lens.hosts import (
    Affine,
    Register,
    Start,
    Undo,
    UnsupportedHostError,
    is_centered,
    require_before,
    require_kept,
)
from swd_lens.hosts.bridge import cache as cache_tools
from swd_lens.hosts.bridge import running
from swd_lens.hosts.bridge.leaves import (
    Packed,
    leaves_of_block,
    matrix,
    mount,
    mounted_site,
    shapes_of_block,
    unmount,
    whole_mlp,
)
from swd_lens.hosts.bridge.norms import affine_of, has_value_bias, is_folded, scale_of
from swd_lens.hosts.weights import Shadow, refusals, shadow_methods
from swd_lens.hosts.sites import PACKED, RESIDUAL_MATRICES, BlockShapes, Site, overlapping, sites_of_blocks

_PARTS = PACKED["attn_qkv"]
# Models whose matrices were looked at, with the shapes found then: what is no site is reported once.
_ACCEPTED: WeakKeyDictionary[nn.Module, tuple[BlockShapes, ...]] = WeakKeyDictionary()
_REWRITES_WEIGHTS = ("enable_compatibility_mode", "process_weights", "load_state_dict", "init_weights")


class BridgeHost:
    """See `swd_lens.hosts.Host`."""

    def __init__(self, model: Any):
        self.model = model
        if not isinstance(model._modules.get("blocks"), nn.ModuleList):
            raise UnsupportedHostError(
                f"this {type(model).__name__} ({type(model.adapter).__name__}) has no list of blocks called `blocks`; "
                "swd_lens reads sites off decoder-only and BERT-style models"
            )
        blocks = self._blocks()
        if _ACCEPTED.get(model) != blocks:
            self._require_matrices(blocks)
            _ACCEPTED[model] = blocks

    def _require_matrices(self, blocks: tuple[BlockShapes, ...]) -> None:
        """No matrix is left out silently: say which are not sites; raise if none is one."""
        others = [f"blocks.{layer}.{other}" for layer, block in enumerate(blocks) for other in block.other_matrices]
        if not any(block.shapes for block in blocks):
            raise UnsupportedHostError(
                f"found no matrix to factorize in this bridge ({type(self.model.adapter).__name__}); its blocks have "
                f"{', '.join(others[:4]) or 'no matrices'}, and swd_lens needs plain nn.Linear or Conv1D projections"
            )
        if others:
            warnings.warn(
                f"{len(others)} parts of this bridge hold matrices that are no sites: {', '.join(others[:4])}"
                f"{' ...' if len(others) > 4 else ''}; 'all' leaves them out",
                stacklevel=4,
            )

    # ------------------------------------------------------------------ sites

    def sites(self) -> list[Site]:
        return list(sites_of_blocks(self._blocks())[0])

    def alternatives(self) -> list[Site]:
        return list(sites_of_blocks(self._blocks())[1])

    def _blocks(self) -> tuple[BlockShapes, ...]:
        return tuple(shapes_of_block(block) for block in self.model.blocks)

    def weight(self, site: Site) -> Float[Tensor, "d_in d_out"]:
        if site.kind == "mlp":
            raise UnsupportedHostError(
                f"{site.name} is a whole MLP, not one matrix; its matrices are {', '.join(PACKED['mlp'])}"
            )
        matrices = [matrix(leaf).detach().float() for leaf in self._leaves(site)]
        return matrices[0] if len(matrices) == 1 else torch.cat(matrices, dim=1)

    def _leaves(self, site: Site) -> list[Any]:
        """The site's leaf; of a packed site those of q, k and v; of a whole MLP its module."""
        if site.kind == "mlp":
            return [whole_mlp(self.model.blocks[site.layer])]
        leaves = leaves_of_block(self.model.blocks[site.layer])[0]
        if site.kind in leaves:
            return [leaves[site.kind]]
        return [leaves[kind] for kind in PACKED[site.kind]]

    # ------------------------------------------------------------------ weight processing

    def affine(self, site: Site) -> Affine | None:
        return affine_of(self.model, site)

    def processing(self) -> dict[str, bool]:
        writes = [site for site in self.sites() if site.layer == 0 and site.kind in RESIDUAL_MATRICES]
        reads = [site for site in self.sites() if site.kind not in RESIDUAL_MATRICES]
        return {
            "fold_ln": is_folded(self.model, reads),
            "center_writing_weights": all(is_centered(self.weight(site)) for site in writes),
            "fold_value_biases": not any(has_value_bias(block) for block in self.model.blocks),
            "compatibility_mode": bool(self.model.compatibility_mode),
        }

    def guard(self, reason: str, register: Register) -> None:
        # model.W_Q, ..., model.W_out and all that is made of them go through one method, in both versions.
        stacks = {"_stack_block_params": lambda: _StackedWeights(self.model)}
        shadow_methods(self.model, refusals(_REWRITES_WEIGHTS, reason) | stacks, register)

    # ------------------------------------------------------------------ reading

    def inputs(self, sites: Iterable[Site], use: Callable[[Site, Tensor], None]) -> AbstractContextManager[None]:
        # Of a packed site q's input speaks for all three.
        return self._watch(
            sites,
            lambda site: [
                self._leaves(site)[0].register_forward_pre_hook(lambda _, args: use(site, args[0])),
            ],
        )

    def outputs(self, sites: Iterable[Site], use: Callable[[Site, Tensor], None]) -> AbstractContextManager[None]:
        def watch(site: Site) -> list[Any]:
            leaves, parts = self._leaves(site), {}
            return [
                leaf.register_forward_hook(_gatherer(site, part, len(leaves), parts, use))
                for part, leaf in enumerate(leaves)
            ]

        return self._watch(sites, watch)

    @contextmanager
    def _watch(self, sites: Iterable[Site], watch: Callable[[Site], list[Any]]) -> Iterator[None]:
        with ExitStack() as stack:

            def at_the_end(undo: Undo) -> None:
                stack.callback(undo)

            for site in sites:
                self._call_leaves(site, at_the_end)
                for handle in watch(site):
                    at_the_end(handle.remove)
            yield

    def _call_leaves(self, site: Site, register: Register) -> None:
        """Make a GatedMLPBridge that multiplies by processed weights itself (gated_mlp.py:108) call its projections."""
        mlp = self.model.blocks[site.layer]._modules.get("mlp") if site.kind.startswith("mlp") else None
        state: dict[str, Any] = {} if mlp is None else mlp.__dict__
        if not (state.get("_use_processed_weights") or state.get("_unit_holders")):
            return
        holder = object()

        def undo() -> None:
            holders = state.get("_unit_holders", set())
            holders.discard(id(holder))
            if not holders and "_unit_holders" in state:
                state["_use_processed_weights"] = True
                del state["_unit_holders"]

        register(undo)
        state.setdefault("_unit_holders", set()).add(id(holder))
        state["_use_processed_weights"] = False

    # ------------------------------------------------------------------ running

    def run(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos vocab"]:
        return self._run(tokens)

    def run_blocks(self, tokens: Int[Tensor, "batch pos"], n_blocks: int, start: Start | None = None) -> None:
        if start is not None:
            self.residual(tokens, n_blocks, start=start)
            return
        # Where no block knows its number (BERT: block.py:_check_stop_at_layer), upstream runs them all.
        self._run(tokens, stop_at_layer=n_blocks)

    def freeze_prefix(self, tokens: Int[Tensor, "batch pos"]) -> Any:
        if tokens.shape[1] == 1 or not self._keeps_cache():
            return None
        with torch.no_grad():
            _, cache = self._run(tokens[:, :-1], return_type="logits_and_cache", use_cache=True, **self._last_only())
        return cache if cache_tools.is_known(cache) else None

    def repeat_prefix(self, prefix: Any, times: int, from_layer: int = 0) -> Any:
        if prefix is None or (times == 1 and from_layer == 0):
            return prefix
        return cache_tools.repeated(prefix, times, from_layer)

    def residual(
        self, tokens: Int[Tensor, "batch pos"], layer: int, prefix: Any = None, start: Start | None = None
    ) -> Float[Tensor, "batch _pos d_model"]:
        require_before(start, layer, prefix)
        if start is not None and start.layer == layer:
            return start.residual
        # With a start as `run_blocks` runs it: whether keys and values are kept changes GPT-2's last bits.
        run = (lambda: self._run_last(tokens, prefix, 0)) if start is None else (lambda: self._run(tokens))
        try:
            running.with_stand_ins(self.model, running.stopping(self.model, layer, start), run)
        except running.Reached as reached:
            return reached.args[0]
        raise RuntimeError(f"this {type(self.model.adapter).__name__} did not run block {layer}; please report it")

    def last_logits(
        self,
        tokens: Int[Tensor, "batch pos"],
        prefix: Any = None,
        *,
        start: Start | None = None,
        token_ids: Int[Tensor, " answer"] | None = None,
        short: bool = False,
    ) -> Float[Tensor, "batch _vocab"]:
        stand_ins, first, pick = [], 0, None
        if start is not None:
            if start.layer == len(self.model.blocks):
                # No block runs: what is before the last position is of no use, and neither are positions.
                tokens, prefix, start = tokens[:, -1:], None, replace(start, residual=start.residual[:, -1:])
            stand_ins, first = running.starting(self.model, start), start.layer
        if token_ids is not None:
            some = running.unembedding_some(self.model, token_ids)
            stand_ins, pick = stand_ins + some, None if some else token_ids
        logits = running.with_stand_ins(self.model, stand_ins, lambda: self._run_last(tokens, prefix, first))[:, -1]
        return logits if pick is None else logits[:, pick.to(logits.device)]

    def _run_last(self, tokens: Tensor, prefix: Any, first: int) -> Tensor:
        """Logits (batch, pos, vocab), of the last position at least; with a prefix only that position is run.

        Args:
            first: the first block that is run; what the prefix keeps of earlier ones is not asked for.
        """
        if prefix is None:
            return self._run(tokens, **self._last_only(), **self._without_cache())
        require_kept(prefix, first)
        cache = cache_tools.to_run_on(prefix, first)
        return self._run(tokens[:, -1:], attention_mask=torch.ones_like(tokens), past_key_values=cache)

    def _run(self, tokens: Tensor, **how: Any) -> Any:
        device = self.model.cfg.device
        mask = how.pop("attention_mask", torch.ones_like(tokens))
        if self._has_linear_attention():
            # Without a cache 3.9 recomputes the layer itself and asks Hugging Face's module for causal_conv1d_fn
            # (gated_delta_net.py:180), which transformers 5.15 moved out of it.
            how.setdefault("use_cache", True)
        return self.model(tokens.to(device), attention_mask=mask.to(device), **how)

    def _has_linear_attention(self) -> bool:
        return any("linear_attn" in block._modules for block in self.model.blocks)

    def _accepts(self, argument: str) -> bool:
        return argument in _arguments_of(type(self.model.original_model))

    def _last_only(self) -> dict[str, int]:
        """Unembed the last position only: for long prompts the rest is most of the work and memory."""
        return {"logits_to_keep": 1} if self._accepts("logits_to_keep") else {}

    def _without_cache(self) -> dict[str, bool]:
        """Keep no keys and values that nobody asks for; where nothing is said, Hugging Face keeps them."""
        return {"use_cache": False} if self._keeps_cache() and not self._has_linear_attention() else {}

    def _generates(self) -> bool:
        return bool(getattr(self.model.adapter, "supports_generation", True))

    def _keeps_cache(self) -> bool:
        return self._generates() and self._accepts("past_key_values")

    def readout(self) -> tuple[Float[Tensor, " d_model"] | None, Float[Tensor, "d_model vocab"]]:
        unembed, norm = self.model._modules.get("unembed"), self.model._modules.get("ln_final")
        if unembed is None or not self._generates():
            raise UnsupportedHostError(
                f"{type(self.model.adapter).__name__}: this model does not read next-token logits off its last block, so a write "
                "vector has no direct effect on them; take a decoder-only model"
            )
        scale = scale_of(norm) if isinstance(norm, NormalizationBridge) else None
        return scale, unembed.W_U.detach().float()

    # ------------------------------------------------------------------ swapping

    def is_swapped(self, site: Site) -> bool:
        return any(mounted_site(leaf) == site.name for leaf in self._leaves(site))

    def swap(self, site: Site, projection: nn.Module, hook: Any, register: Register) -> None:
        self._refuse(site)
        leaves, block, attribute = self._leaves(site), self.model.blocks[site.layer], f"hook_{site.kind}_unit"
        mounted = projection if len(leaves) == 1 else Packed(projection, leaves)
        places = (
            (block._modules, attribute),
            (block._hook_registry, attribute),
            (self.model._hook_registry, site.hook_name),
        )

        def undo() -> None:
            # Takes out what this swap put in and nothing else, so that it serves twice and after half a swap.
            unmount(leaves, mounted)
            for names, name in places:
                if names.get(name) is hook:
                    del names[name]

        register(undo)
        self._call_leaves(site, register)
        for names, name in places:
            names[name] = hook
        hook.name = site.hook_name
        mount(leaves, mounted, site.name)

    def _refuse(self, site: Site) -> None:
        block = self.model.blocks[site.layer]
        swappable = (*leaves_of_block(block)[0].values(), whole_mlp(block))
        attached = {mounted_site(module) for module in swappable if module is not None}
        for name in (site.name, *overlapping(site.name)):
            if name in attached:
                raise RuntimeError(f"{site.name} cannot be attached: {name} is attached already; detach it first")
        flags = {"attn_o": ("use_attn_result",)} | dict.fromkeys(
            ("attn_qkv", *_PARTS), ("use_split_qkv_input", "use_attn_in")
        )
        for flag in flags.get(site.kind, ()):
            if getattr(self.model.cfg, flag, False):
                raise UnsupportedHostError(
                    f"cfg.{flag} is on: {site.name} would be computed head by head instead of as one vector per position. "
                    f"Call model.set_{flag}(False) first."
                )


# ---------------------------------------------------------------------------------------------- helpers


class _StackedWeights(Shadow):
    """Stacks a parameter over the layers, unless one of its matrices is attached: upstream would leave that layer out."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def __call__(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        component, _, parameter = attr_path.partition(".")
        kind = f"{component}_{parameter.removeprefix('W_').lower()}"
        for block in self.model.blocks:
            leaf = leaves_of_block(block)[0].get(kind) if parameter.startswith("W_") else None
            if leaf is not None and mounted_site(leaf) is not None:
                raise RuntimeError(
                    f"model.{parameter} was read while {mounted_site(leaf)} is attached: its dense weight is not in use, and "
                    "the stack would lack that layer. Detach first"
                )
        return type(self.model)._stack_block_params(self.model, attr_path, *args, **kwargs)


@lru_cache(maxsize=64)
def _arguments_of(model_class: type[nn.Module]) -> frozenset[str]:
    """What a Hugging Face model's forward takes; a signature is slow to read."""
    return frozenset(inspect.signature(model_class.forward).parameters)


def _gatherer(
    site: Site, part: int, n_parts: int, parts: dict[int, Tensor], use: Callable[[Site, Tensor], None]
) -> Any:
    """A forward hook that hands over the outputs of all parts side by side, once the last of them is there."""

    def gather(_: nn.Module, args: Any, out: Tensor) -> None:
        if part in parts:  # an earlier forward was left half-way
            parts.clear()
        parts[part] = out
        if len(parts) == n_parts:
            whole = torch.cat([parts[i] for i in range(n_parts)], dim=-1) if n_parts > 1 else out
            parts.clear()
            use(site, whole)

    return gather
