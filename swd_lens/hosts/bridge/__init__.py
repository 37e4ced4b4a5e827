"""The TransformerBridge host (transformer_lens 3.9 and 4.x): where each matrix is, what feeds it, and how to swap it.

1. Sites are read off the bridge's components: attn.{q,k,v,o}, mlp.{in,gate,out}, and the projections of linear attention.
   attn_qkv is q, k, v side by side, whatever order the checkpoint keeps them in; it is the site proper where the checkpoint
   holds them as one matrix, and an alternative elsewhere.
2. Inputs and outputs are read with plain PyTorch hooks on the leaves (leaves.py).
3. A swap mounts the projection on the leaf and the HookPoint on the block and in the bridge's registry. Both are needed:
   hook_dict reads the registry alone, and a rescan of the model looks at attributes alone.
4. What weight processing can fold away of a site's input is in norms.py, a prompt's kept prefix in cache.py.
5. A bridge can be deep-copied and not pickled, attached or not: transformers and transformer_lens keep local functions in it.
   Both ask `__reduce_ex__`; what only a pickle looks at is the `_Ticket` in `OnlyCopied`'s answer.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from swd_lens.base.errors import AttachError, UnsupportedHostError, legible, warn
from swd_lens.hosts.adapters import require_no_adapter
from swd_lens.hosts.bridge import fused
from swd_lens.hosts.bridge.experts import ExpertMatrix, call_matrices
from swd_lens.hosts.bridge.leaves import (
    Packed,
    Rows,
    leaves_of_block,
    matrix,
    mount,
    mounted_site,
    shapes_of_block,
    unmount,
    whole_mlp,
)
from swd_lens.hosts.bridge.norms import BridgeNorms, scale_of
from swd_lens.hosts.bridge.running import BridgeRuns
from swd_lens.hosts.families import facts_of
from swd_lens.hosts.host import Register, Use, matrix_entries, require_matrix, require_unattached
from swd_lens.hosts.language import packed_in
from swd_lens.hosts.sites import PACKED, BlockShapes, Site
from swd_lens.hosts.weights import Shadow, refusals, shadow_methods, while_wanted

# Models whose matrices were looked at, with the shapes found then: what is no site is reported once.
_ACCEPTED: WeakKeyDictionary[nn.Module, tuple[BlockShapes, ...]] = WeakKeyDictionary()
# Of the entries of the blocks' matrices: what holds less than that and is no site (routers) is said by tables only.
_LEFT = 0.01
_REWRITES_WEIGHTS = ("enable_compatibility_mode", "process_weights", "load_state_dict", "init_weights")


class BridgeHost(BridgeRuns, BridgeNorms):
    """See `swd_lens.hosts.Host`; how it runs is in running.py, what of it folds in norms.py."""

    def __init__(self, model: Any):
        self.model = model
        if not isinstance(model._modules.get("blocks"), nn.ModuleList):
            raise UnsupportedHostError(
                f"this {type(model).__name__} ({type(model.adapter).__name__}) has no list of blocks called `blocks`; "
                "swd_lens reads sites off decoder-only and BERT-style models"
            )
        blocks = self.blocks()
        if _ACCEPTED.get(model) != blocks:
            # Warn of matrices that are no sites; raise where no matrix is one, or some are packed or have an adapter.
            require_no_adapter(self.model.original_model)
            if (packed := packed_in(self.model.original_model)) is not None:
                raise UnsupportedHostError(
                    f"{packed}, no plain tensor: swd_lens factorizes what h @ W multiplies by. Load the model unquantized, or "
                    "dequantize it first"
                )
            others = [f"blocks.{layer}.{other}" for layer, block in enumerate(blocks) for other in block.other_matrices]
            if not any(block.shapes for block in blocks):
                raise UnsupportedHostError(
                    f"found no matrix to factorize in this bridge ({type(self.model.adapter).__name__}); its blocks have "
                    f"{', '.join(others[:4]) or 'no matrices'}, and swd_lens needs plain nn.Linear or Conv1D projections"
                )
            share = sum(block.numel_left for block in blocks) / matrix_entries(self)
            if others and share >= _LEFT:
                more = " ..." if len(others) > 4 else ""
                warn(
                    f"{len(others)} parts of this bridge hold matrices that are no sites: {', '.join(others[:4])}{more}; "
                    f"'all' leaves them out, which is {share:.2%} of the entries of its blocks' matrices"
                )
            _ACCEPTED[model] = blocks

    def blocks(self) -> tuple[BlockShapes, ...]:
        return tuple(shapes_of_block(block) for block in self.model.blocks)

    def weight(self, site: Site) -> Float[Tensor, "d_in d_out"]:
        require_matrix(site)
        matrices = [matrix(leaf).detach().float() for leaf in self._leaves(site)]
        return matrices[0] if len(matrices) == 1 else torch.cat(matrices, dim=1)

    def stored_parameters(self, site: Site) -> list[tuple[Mapping[str, Any], str]]:
        parts, leaves = PACKED.get(site.kind, (site.kind,)), leaves_of_block(self.model.blocks[site.layer])[0]
        of_site = [leaves[site.kind]] if site.kind in leaves else [leaves[part] for part in parts if part in leaves]
        return [(getattr(leaf, "stored_in", leaf._parameters), "weight") for leaf in of_site]

    def stores_transposed(self, site: Site) -> bool:
        return isinstance(self._leaves(site)[0], nn.Linear)

    def _leaves(self, site: Site) -> list[Any]:
        """The site's leaf; for a packed site those of q, k and v; for a whole MLP its module."""
        if site.kind == "mlp":
            return [whole_mlp(self.model.blocks[site.layer])]
        leaves = leaves_of_block(self.model.blocks[site.layer])[0]
        if site.kind in leaves:
            return [leaves[site.kind]]
        return [leaves[kind] for kind in PACKED[site.kind]]

    def fuse_attention(self, register: Register) -> bool:
        return fused.cover(self.model, register)

    def guard(self, reason: str, register: Register) -> None:
        # model.W_Q, ..., model.W_out and all that is made of them go through one method, in both versions.
        own = {"_stack_block_params": _StackedWeights, "get_params": _Parameters, "__reduce_ex__": OnlyCopied}
        shadow_methods(self.model, refusals(_REWRITES_WEIGHTS, reason) | own, register)

    def watch_input(self, site: Site, use: Use, register: Register) -> None:
        self._call_leaves(site, register)
        rows = self._watched_rows(site, register)

        def show(_: nn.Module, args: Any) -> None:
            use(site, rows.apart(args[0]))

        # The input of q speaks for all three of a packed site.
        register(self._leaves(site)[0].register_forward_pre_hook(show).remove)

    def watch_output(self, site: Site, use: Use, register: Register) -> None:
        self._call_leaves(site, register)
        rows, leaves, parts = self._watched_rows(site, register), self._leaves(site), {}

        def gather(part: int, leaf: nn.Module, args: Any, out: Tensor) -> Tensor | None:
            """Hand over the outputs of all leaves side by side, once the last of them is there."""
            if part in parts:  # an earlier forward was left half-way
                parts.clear()
            # An expert writes nothing at the tokens of others.
            out = out * leaf.routed[:, None] if isinstance(leaf, ExpertMatrix) and leaf.routed is not None else out
            parts[part] = shown = rows.apart(out)
            if len(parts) == len(leaves):
                whole = torch.cat([parts[i] for i in range(len(leaves))], dim=-1) if len(leaves) > 1 else shown
                parts.clear()
                use(site, whole)
            # Flat rows go on from the tensor that was shown, so that it has a gradient.
            return None if shown is out else shown.flatten(0, 1)

        for part, leaf in enumerate(leaves):
            register(leaf.register_forward_hook(partial(gather, part)).remove)

    def _watched_rows(self, site: Site, register: Register) -> Rows:
        """Batch and positions of the site's block, noted until the undo."""
        rows, block = Rows(), self.model.blocks[site.layer]
        register(lambda: rows.leave(block))
        rows.watch(block)
        return rows

    def _call_leaves(self, site: Site, register: Register) -> None:
        """Make a stack of experts call its matrices, and a GatedMLPBridge that multiplies by processed weights itself
        (gated_mlp.py:108) its projections."""
        if site.expert is not None:
            call_matrices(self._leaves(site)[0].stack, register)
            return
        mlp = self.model.blocks[site.layer]._modules.get("mlp") if site.kind.startswith("mlp") else None
        state: dict[str, Any] = {} if mlp is None else mlp.__dict__
        if not (state.get("_use_processed_weights") or state.get("unit_holders")):
            return
        use = partial(state.__setitem__, "_use_processed_weights")
        while_wanted(state, partial(use, False), partial(use, True), register)

    def readout(self) -> tuple[Float[Tensor, " d_model"] | None, Float[Tensor, "d_model vocab"]]:
        unembed, norm = self.model._modules.get("unembed"), self.model._modules.get("ln_final")
        if unembed is None or not facts_of(self.model).reads_out:
            raise UnsupportedHostError(
                f"{type(self.model.adapter).__name__}: this model does not read next-token logits off its last block, so "
                "a write vector has no direct effect on them; take a decoder-only model"
            )
        return None if norm is None else scale_of(norm), unembed.W_U.detach().float()

    def is_swapped(self, site: Site) -> bool:
        return any(mounted_site(leaf) == site.name for leaf in self._leaves(site))

    def swap(self, site: Site, projection: nn.Module, hook: Any, register: Register) -> None:
        block = self.model.blocks[site.layer]
        swappable = (*leaves_of_block(block)[0].values(), whole_mlp(block))
        require_unattached(site, {mounted_site(module) for module in swappable if module is not None})
        reads = ("use_split_qkv_input", "use_attn_in")
        flags = {"attn_o": ("use_attn_result",), **dict.fromkeys(("attn_qkv", *PACKED["attn_qkv"]), reads)}
        for flag in flags.get(site.kind, ()):
            if getattr(self.model.cfg, flag, False):
                raise UnsupportedHostError(
                    f"cfg.{flag} is on: {site.name} would be computed head by head instead of as one vector per position. "
                    f"Call model.set_{flag}(False) first."
                )
        leaves, attribute = self._leaves(site), site.hook_name.rpartition(".")[2]
        mounted = projection if len(leaves) == 1 else Packed(projection, leaves)
        rows = Rows()
        registries = ((block._modules, attribute), (block._hook_registry, attribute), (self.model._hook_registry, site.hook_name))

        # An expert's leaf is in the module tree while it is mounted, so that what is mounted moves with the model.
        tree = ((leaves[0].stack._modules, site.kind.replace(".", "_"), leaves[0]),) if site.expert is not None else ()

        def undo() -> None:
            # Takes out what this swap put in and nothing else, so that it serves twice and after half a swap.
            unmount(leaves, mounted)
            for names, name, module in tree:
                if names.get(name) is module:
                    del names[name]
            rows.leave(block)
            for names, name in registries:
                if names.get(name) is hook:
                    del names[name]

        register(undo)
        self._call_leaves(site, register)
        for names, name in registries:
            names[name] = hook
        hook.name = site.hook_name
        rows.watch(block)
        for names, name, module in tree:
            names[name] = module
        mount(leaves, mounted, site.name, rows)


class _StackedWeights(Shadow):
    """Stand in for `_stack_block_params`: refuse where a matrix is attached, whose layer upstream would leave out."""

    def __call__(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        component, _, parameter = attr_path.partition(".")
        kind = f"{component}_{parameter.removeprefix('W_').lower()}"
        for block in self.owner.blocks:
            leaf = leaves_of_block(block)[0].get(kind) if parameter.startswith("W_") else None
            if leaf is not None and mounted_site(leaf) is not None:
                raise RuntimeError(
                    f"model.{legible(parameter)} was read while {mounted_site(leaf)} is attached: its dense weight is not "
                    "in use. Detach first, or read the factors: factors[site].read @ factors[site].write"
                )
        return type(self.owner)._stack_block_params(self.owner, attr_path, *args, **kwargs)


class _Parameters(Shadow):
    """Refuse get_params, which tl_parameters and SVDInterpreter read: upstream zeroes or leaves out what is not in use."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "the bridge's parameters were read (get_params, tl_parameters, tl_named_parameters) while units are "
            "attached: transformer_lens would leave attached matrices out or give zeros. Detach first, or take "
            "state_dict()"
        )


class OnlyCopied(Shadow):
    """`__reduce_ex__` of a bridge that can be copied and not pickled."""

    def __call__(self, protocol: Any) -> tuple[Any, ...]:
        _, _, *state = object.__reduce_ex__(self.owner, 4)
        return _empty, (type(self.owner), _Ticket()), *state


class _Ticket:
    """Copied, not pickled."""

    def __deepcopy__(self, memo: Any) -> "_Ticket":
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AttachError(
            "a TransformerBridge cannot be pickled, saved by torch.save or sent to a process: transformers and "
            "transformer_lens keep local functions in it. Save the factors (factors.save(folder)), send that folder and "
            "what the host was loaded from, and attach there: swd.attach(load_host(name), FactorSet.load(folder))"
        )


def _empty(kind: Any, _: _Ticket) -> Any:
    return kind.__new__(kind)
